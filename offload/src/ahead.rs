//! Updates ahead of the decision: while the last micro-batch goes backward, a segment whose gradient is complete is updated as
//! if neither clipping nor a skip followed. The new states go to a second array, so the old ones stay. Behind the decision each
//! tile is settled: where it was the presumed one nothing is left to do; else the tile is updated again, from the old
//! states, or its parameters are put back. The results are those of an update behind the decision, bit for bit.
//!
//! SuperOffload (arXiv 2509.21271) speculates as well, and undoes an update by its algebraic inverse, which rounds.

use crate::adam::{AdamTile, share};
use crate::control::{
    self, AHEAD, CLIPPED, COMMITTED, FACTOR, NORM, NOT_AHEAD, REDONE, SIDE, SKIP,
};
use crate::schedule::Rates;
use crate::update::{Apart, Update, Upper, traffic_apart, update_apart};
use device::{HostContext, HostTask, Mode, Tensor, ViewMut};
use std::ops::Range;

/// What became of the updates of a step ahead of its decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ahead {
    /// No update ran ahead of the decision.
    No,
    /// The decision was the presumed one, so the updates stand.
    Committed,
    /// The decision was another one: such updates, where the step made any before its sums of squares stopped them, are made again, or
    /// dropped where the step is skipped.
    Redone,
}

impl Ahead {
    /// Reads it from the [control block](crate::control) of the step.
    pub fn of(words: &[f64; control::WORDS]) -> Self {
        match words[AHEAD] {
            COMMITTED => Self::Committed,
            REDONE => Self::Redone,
            _ => Self::No,
        }
    }
}

/// Share of the recent steps that were clipped or skipped from which on no segment is updated ahead of the decision.
pub const TOO_OFTEN: f64 = 0.5;

/// Leaves in a block of its own the words that the decision will have if the gradient is neither clipped nor skipped. Their
/// factor is 0 where recent steps were clipped too often. `arg` is the step.
#[derive(Debug)]
pub(crate) struct Presume {
    /// The [control block](crate::control) of the step before.
    pub(crate) control: Tensor,
    /// The presumed words. `SIDE` is that of the old states, `NORM` the sum of squares so far.
    pub(crate) presumed: Tensor,
    pub(crate) rates: Rates,
}

impl HostTask for Presume {
    fn name(&self) -> &'static str {
        "presume"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Read, self.control);
        visit(Mode::Write, self.presumed);
    }
    fn run(&self, step: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let words = host.write_as::<f64>(self.presumed)?;
        words.copy_from_slice(host.read_as(self.control)?);
        let factor = self.rates.unit(words, step);
        self.rates.apply(words, step, factor);
        words[SKIP] = 0.0;
        words[NORM] = 0.0;
        words[AHEAD] = COMMITTED;
        if words[CLIPPED] >= TOO_OFTEN {
            (words[FACTOR], words[AHEAD]) = (0.0, NOT_AHEAD);
        }
        Ok(())
    }
}

/// Sets the words of a decision about updates ahead of it. `as_presumed`: the gradient is neither clipped nor skipped.
pub(crate) fn judge(words: &mut [f64], presumed: &[f64], as_presumed: bool) {
    words[AHEAD] = match presumed[AHEAD] {
        NOT_AHEAD => NOT_AHEAD,
        _ if as_presumed => COMMITTED,
        _ => REDONE,
    };
    if words[SKIP] == 0.0 {
        words[SIDE] = 1.0 - words[SIDE];
    }
}

/// Adds a segment's sums of squares to those before. Where they alone show that the step will be clipped or skipped, nothing
/// more is updated ahead of the decision. This rank's sums only: what it finds changes no result.
#[derive(Debug)]
pub(crate) struct Tally {
    /// See [`Presume::presumed`].
    pub(crate) presumed: Tensor,
    /// The segment's partial sums of squares on this rank.
    pub(crate) partials: Tensor,
    /// The largest norm of a gradient, where it is bounded.
    pub(crate) clip: Option<f64>,
}

impl HostTask for Tally {
    fn name(&self) -> &'static str {
        "tally"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Update, self.presumed);
        visit(Mode::Read, self.partials);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let words = host.write_as::<f64>(self.presumed)?;
        words[NORM] += host.read_as::<f64>(self.partials)?.iter().sum::<f64>();
        let norm = words[NORM].sqrt() * words[FACTOR];
        if !norm.is_finite() || self.clip.is_some_and(|most| norm > most) {
            words[FACTOR] = 0.0;
        }
        Ok(())
    }
}

/// The second arrays of the states of a store or of a tile, and what an update ahead of the decision needs besides.
#[derive(Clone, Debug)]
pub struct Second {
    /// The masters, the first moments and the second moments, of side 1.
    pub states: [Tensor; 3],
    /// The upper halves of split masters before the update.
    pub upper: Option<Tensor>,
    /// The factor by which a tile was updated ahead of the decision, or 0: one F64 of a tile, and of a store one for each chunk,
    /// since tiles begin with chunks.
    pub factor: Tensor,
    /// The presumed [control block](crate::control); its `SIDE` is that of the old states.
    pub presumed: Tensor,
}

/// When a tile with second arrays is updated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Ahead of the decision, by the presumed words.
    Ahead,
    /// Behind the decision, where no update ahead of it stands.
    Behind,
}

/// The update of a tile from one side of its states to the other.
#[derive(Clone, Debug)]
pub struct AheadTile {
    /// The tile with the first arrays of its states.
    pub tile: AdamTile,
    /// The second arrays.
    pub second: Second,
    /// When the update runs.
    pub when: When,
}

impl HostTask for AheadTile {
    fn name(&self) -> &'static str {
        match self.when {
            When::Ahead => "ahead_tile",
            When::Behind => "settle_tile",
        }
    }
    /// Everything that may be touched, whatever the words say.
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        let Self { tile, second, when } = self;
        visit(Mode::Read, second.presumed);
        visit(Mode::Read, tile.grad);
        visit(Mode::Update, tile.param);
        let first = [tile.master, tile.momentum, tile.variance];
        for tensor in first.into_iter().chain(second.own_arrays()) {
            visit(Mode::Update, tensor);
        }
        match when {
            When::Ahead => visit(Mode::Write, second.factor),
            When::Behind => {
                visit(Mode::Read, second.factor);
                visit(Mode::Read, tile.control);
            }
        }
    }
    /// Those of the update in place, and of the upper halves that are kept or brought back.
    fn bytes(&self, _: u64) -> u64 {
        let mut bytes = self.second.upper.map_or(0, Tensor::bytes);
        let each = |mode| if mode == Mode::Update { 2 } else { 1 };
        self.tile.accesses(&mut |mode, t| bytes += t.bytes() * each(mode));
        bytes
    }
    fn flops(&self) -> f64 {
        self.tile.flops()
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let presumed = host.read_as::<f64>(self.second.presumed)?;
        let (words, halves) = match self.when {
            When::Ahead => {
                host.write_as::<f64>(self.second.factor)?[0] = presumed[FACTOR];
                if presumed[FACTOR] == 0.0 {
                    return Ok(());
                }
                (presumed, Halves::Keep)
            }
            When::Behind => {
                let words = host.read_as::<f64>(self.tile.control)?;
                let factor = host.read_as::<f64>(self.second.factor)?[0];
                // Of a skipped step the factor is 0.
                if factor == words[FACTOR] {
                    return Ok(());
                }
                (words, if factor == 0.0 { Halves::Leave } else { Halves::Restore })
            }
        };
        let apart = self.apart((words, presumed[SIDE], halves), host)?;
        share(host, apart, update_apart)
    }
}

/// What an update does with the kept upper halves of split masters.
#[derive(Clone, Copy)]
enum Halves {
    /// It keeps those that it changes.
    Keep,
    /// It brings them back first: an update ahead of the decision has changed the parameters.
    Restore,
    /// Nothing: nobody reads them any more.
    Leave,
}

impl AheadTile {
    /// The update by `words`; `side` is that of the old states.
    fn apart<'a, 'host: 'a>(
        &'a self,
        (words, side, halves): (&'a [f64], f64, Halves),
        host: &mut HostContext<'host>,
    ) -> Result<Apart<'a>, String> {
        let Self { tile, second, .. } = self;
        let first = [tile.master, tile.momentum, tile.variance];
        let [old, new] = if side == 0.0 { [first, second.states] } else { [second.states, first] };
        let upper = match (second.upper, halves) {
            (None, _) | (_, Halves::Leave) => Upper::Stay,
            (Some(kept), Halves::Keep) => Upper::Keep(host.write_as(kept)?),
            (Some(kept), Halves::Restore) => Upper::Restore(host.write_as(kept)?),
        };
        let mut read = |t: Tensor| host.write(t).map(ViewMut::into_view);
        let old = [read(old[0])?, read(old[1])?, read(old[2])?];
        let new = tile.whole(words, new, host)?;
        Ok(Apart { upper, update: Update { old: Some(old), ..new } })
    }
}

/// The loads and stores of an update ahead of the decision without its arithmetic, to see how long it would take at least.
#[derive(Debug)]
pub struct AheadTraffic(
    /// The tile, whose states are nonsense afterwards.
    pub AheadTile,
);

impl HostTask for AheadTraffic {
    fn name(&self) -> &'static str {
        "ahead_traffic"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        self.0.accesses(visit);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let words = host.read_as::<f64>(self.0.second.presumed)?;
        host.write_as::<f64>(self.0.second.factor)?[0] = words[FACTOR];
        let apart = self.0.apart((words, words[SIDE], Halves::Keep), host)?;
        share(host, apart, |piece| {
            traffic_apart(piece);
            Ok(())
        })
    }
}

impl Second {
    /// Cuts the elements `owned` of a tile out of a store's arrays; word number `chunk` of the factors is the tile's.
    #[must_use]
    pub fn tile(&self, owned: &Range<usize>, chunk: usize) -> Self {
        Self {
            states: self.states.map(|array| array.slice(owned.clone())),
            upper: self.upper.map(|array| array.slice(owned.clone())),
            factor: self.factor.slice(chunk..chunk + 1),
            presumed: self.presumed,
        }
    }

    /// The arrays that an update may leave as they are.
    pub(crate) fn own_arrays(&self) -> impl Iterator<Item = Tensor> {
        self.states.into_iter().chain(self.upper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::PerStep;
    use crate::update::Rule;
    use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
    use device::{Arena, Dtype, HostOp, HostPlace, HostWork, Plan, Rank, World};
    use std::sync::Arc;
    use std::time::Duration;

    #[derive(Debug)]
    struct Twice;

    impl PerStep for Twice {
        fn learning_rate(&self, _: u64) -> f64 {
            0.5
        }
        fn weight(&self, _: u64) -> f64 {
            2.0
        }
    }

    /// The presumed factor and what is done ahead at all: before the first segment, and behind the sums of each.
    fn presumed(clipped: f64, clip: Option<f64>, sums: &[f64]) -> (Vec<f64>, f64) {
        let mut plan = Plan::default();
        let mut words = |name, n| plan.tensor((Arena::Pinned, "test"), name, Dtype::F64, (1, n));
        let [control, presumed] = ["control", "presumed"].map(|name| words(name, control::WORDS));
        let partials = words("partials", sums.len());
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats::default(),
            work: HostWork::default(),
        };
        let rank = Rank::all(1, 1).next().expect("one rank");
        let world = World::new(1, 1, Duration::from_secs(10));
        let dev = cpu::open(rank, &Arc::new(plan), &world, &options).expect("a virtual GPU");
        let mut before = [0.0; control::WORDS];
        (before[control::LOSS_SCALE], before[CLIPPED]) = (4.0, clipped);
        dev.write(control, &|i| before[i]).expect("written");
        dev.write(partials, &|i| sums[i]).expect("written");
        let rule = Rule::Sgd { weight_decay: 0.0 };
        let rates = Rates { rule, summands: 1.0, given: Arc::new(Twice) };
        let mut tasks = vec![HostOp::new(Presume { control, presumed, rates })];
        for at in 0..sums.len() {
            let partials = partials.slice(at..at + 1);
            tasks.push(HostOp::new(Tally { presumed, partials, clip }));
        }
        let mut words = [0.0; control::WORDS];
        let factors = tasks.iter().map(|task| {
            dev.submit_host(task, 3);
            dev.sync_all().expect("it runs");
            dev.read(presumed, &mut words).expect("read");
            words[FACTOR]
        });
        let factors = factors.collect();
        dev.finish().expect("it ends");
        (factors, words[AHEAD])
    }

    /// The factor is 2 / 4.
    #[test]
    fn nothing_more_is_updated_ahead_once_the_sums_of_a_rank_show_a_clipped_or_skipped_step() {
        let ran = |clip, sums: &[f64]| presumed(0.0, clip, sums).0;
        assert_eq!(ran(Some(2.5), &[9.0, 16.0, 0.1, 0.0]), [0.5, 0.5, 0.5, 0.0, 0.0]);
        assert_eq!(ran(None, &[9.0, 1e30, 1e300]), [0.5; 4]);
        for odd in [f64::INFINITY, f64::NAN] {
            assert_eq!(ran(None, &[9.0, odd, 0.0]), [0.5, 0.5, 0.0, 0.0]);
            assert_eq!(ran(Some(1e9), &[odd]), [0.5, 0.0]);
        }
    }

    #[test]
    fn nothing_is_updated_ahead_where_half_of_the_recent_steps_were_clipped() {
        assert_eq!(presumed(0.499, None, &[1.0]), (vec![0.5, 0.5], COMMITTED));
        assert_eq!(presumed(TOO_OFTEN, None, &[1.0]), (vec![0.0, 0.0], NOT_AHEAD));
    }
}
