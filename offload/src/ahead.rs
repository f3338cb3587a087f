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
    /// The decision was another one: the updates are made again, or dropped where the step is skipped.
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
/// Weight of a step in that share.
const NEWEST: f64 = 0.125;

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
    words[CLIPPED] += NEWEST * (f64::from(u8::from(!as_presumed)) - words[CLIPPED]);
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

/// The update of a tile ahead of the decision.
#[derive(Clone, Debug)]
pub struct AheadTile {
    /// The tile with the first arrays of its states.
    pub tile: AdamTile,
    /// The second arrays.
    pub second: Second,
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
        let AheadTile { tile, second } = &self.0;
        let words = host.read_as::<f64>(second.presumed)?;
        host.write_as::<f64>(second.factor)?[0] = words[FACTOR];
        let apart =
            second.apart(tile, Inputs { words, side: words[SIDE], changed: false }, host)?;
        share(host, apart, |piece| {
            traffic_apart(piece);
            Ok(())
        })
    }
}

/// What is left to do of a tile behind the decision.
#[derive(Debug)]
pub(crate) struct SettleTile {
    pub(crate) tile: AdamTile,
    pub(crate) second: Second,
}

impl HostTask for AheadTile {
    fn name(&self) -> &'static str {
        "ahead_tile"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        self.second.accesses(&self.tile, visit);
        visit(Mode::Write, self.second.factor);
    }
    fn bytes(&self, _: u64) -> u64 {
        self.second.bytes(&self.tile)
    }
    fn flops(&self) -> f64 {
        self.tile.flops()
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let presumed = host.read_as::<f64>(self.second.presumed)?;
        host.write_as::<f64>(self.second.factor)?[0] = presumed[FACTOR];
        if presumed[FACTOR] == 0.0 {
            return Ok(());
        }
        let side = presumed[SIDE];
        self.second.update(&self.tile, Inputs { words: presumed, side, changed: false }, host)
    }
}

impl HostTask for SettleTile {
    fn name(&self) -> &'static str {
        "settle_tile"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        self.second.accesses(&self.tile, visit);
        visit(Mode::Read, self.second.factor);
        visit(Mode::Read, self.tile.control);
    }
    fn bytes(&self, _: u64) -> u64 {
        self.second.bytes(&self.tile)
    }
    fn flops(&self) -> f64 {
        self.tile.flops()
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let words = host.read_as::<f64>(self.tile.control)?;
        let side = host.read_as::<f64>(self.second.presumed)?[SIDE];
        let factor = host.read_as::<f64>(self.second.factor)?[0];
        let changed = factor != 0.0;
        // Of a skipped step the factor is 0.
        if factor == words[FACTOR] {
            return Ok(());
        }
        self.second.update(&self.tile, Inputs { words, side, changed }, host)
    }
}

/// What an update from one side to the other reads besides gradients and states.
struct Inputs<'a> {
    words: &'a [f64],
    /// The side of the old states.
    side: f64,
    /// Whether an update ahead of the decision has changed the parameters.
    changed: bool,
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

    /// Everything that may be touched, whatever the words say.
    fn accesses(&self, tile: &AdamTile, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Read, self.presumed);
        visit(Mode::Read, tile.grad);
        visit(Mode::Update, tile.param);
        let first = [tile.master, tile.momentum, tile.variance];
        for tensor in first.into_iter().chain(self.own_arrays()) {
            visit(Mode::Update, tensor);
        }
    }

    /// Bytes that an update moves: those of the update in place, and the upper halves that are kept.
    fn bytes(&self, tile: &AdamTile) -> u64 {
        let mut bytes = self.upper.map_or(0, Tensor::bytes);
        tile.accesses(&mut |mode, t| bytes += t.bytes() * if mode == Mode::Update { 2 } else { 1 });
        bytes
    }

    /// The arrays of the states: the old ones' and the new ones'.
    fn arrays(&self, tile: &AdamTile, side: f64) -> [[Tensor; 3]; 2] {
        let first = [tile.master, tile.momentum, tile.variance];
        if side == 0.0 { [first, self.states] } else { [self.states, first] }
    }

    fn update(
        &self,
        tile: &AdamTile,
        inputs: Inputs<'_>,
        host: &mut HostContext<'_>,
    ) -> Result<(), String> {
        let apart = self.apart(tile, inputs, host)?;
        share(host, apart, update_apart)
    }

    fn apart<'a, 'host: 'a>(
        &self,
        tile: &'a AdamTile,
        Inputs { words, side, changed }: Inputs<'a>,
        host: &mut HostContext<'host>,
    ) -> Result<Apart<'a>, String> {
        let [old, new] = self.arrays(tile, side);
        let upper = match self.upper {
            None => Upper::Absent,
            Some(kept) => {
                let kept = host.write_as(kept)?;
                if changed { Upper::Restore(kept) } else { Upper::Keep(kept) }
            }
        };
        let mut read = |t: Tensor| host.write(t).map(ViewMut::into_view);
        let old = [read(old[0])?, read(old[1])?, read(old[2])?];
        let new = tile.whole(words, new, host)?;
        Ok(Apart { upper, update: Update { old: Some(old), ..new } })
    }
}
