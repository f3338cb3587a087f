//! Speculative updates: during the backward pass of the last micro-batch, a segment with a complete
//! gradient is updated as if the step were neither clipped nor skipped. The new states go to a
//! second array, so the old states stay. After the decision each tile is validated. If the decision
//! is the predicted one, the tile is finished. Otherwise the tile is updated again from the old
//! states, or its parameters are restored. The results are those of an update after the decision,
//! bit for bit.
//!
//! SuperOffload (arXiv 2509.21271) speculates as well, and undoes an update by its algebraic
//! inverse, which rounds.

use crate::adam::{AdamTile, parallel_for};
use crate::control::{
    self, CLIP_RATE, COMMITTED, FACTOR, NORM, NOT_SPECULATED, REDONE, SKIP, SPECULATION,
    STATE_BUFFER,
};
use crate::schedule::Rates;
use crate::update::{
    OutOfPlaceUpdate, Update, UpperHalves, traffic_out_of_place, update_out_of_place,
};
use device::{HostContext, HostTask, Mode, Tensor, ViewMut};
use std::ops::Range;

/// Outcome of a step's speculative updates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpeculationOutcome {
    /// No speculative update ran.
    None,
    /// The decision was the predicted one, so the updates are valid.
    Committed,
    /// The decision was not the predicted one. Speculative updates of the step, if any ran, are
    /// redone, or dropped if the step is skipped.
    Redone,
}

impl SpeculationOutcome {
    /// Reads the outcome from the [control block](crate::control) of the step.
    pub fn of(words: &[f64; control::WORDS]) -> Self {
        match words[SPECULATION] {
            COMMITTED => Self::Committed,
            REDONE => Self::Redone,
            _ => Self::None,
        }
    }
}

/// Speculative updates stop at this share of clipped or skipped steps among recent steps.
pub const MAX_CLIP_RATE: f64 = 0.5;

/// Writes the words of the decision that holds if the gradient is neither clipped nor skipped. The
/// factor is 0 if recent steps were clipped too often. `arg` is the step.
#[derive(Debug)]
pub(crate) struct PredictDecision {
    /// The [control block](crate::control) of the previous step.
    pub(crate) control: Tensor,
    /// The words of the predicted decision. In them, `STATE_BUFFER` is the number of the array that
    /// holds the old states, and `NORM` is the sum of squares so far.
    pub(crate) predicted: Tensor,
    pub(crate) rates: Rates,
}

impl HostTask for PredictDecision {
    fn name(&self) -> &'static str {
        "presume"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Read, self.control);
        visit(Mode::Write, self.predicted);
    }
    fn run(&self, step: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let words = host.write_as::<f64>(self.predicted)?;
        words.copy_from_slice(host.read_as(self.control)?);
        let factor = self.rates.unit(words, step);
        self.rates.apply(words, step, factor);
        words[SKIP] = 0.0;
        words[NORM] = 0.0;
        words[SPECULATION] = COMMITTED;
        if words[CLIP_RATE] >= MAX_CLIP_RATE {
            (words[FACTOR], words[SPECULATION]) = (0.0, NOT_SPECULATED);
        }
        Ok(())
    }
}

/// Compares a decision with the prediction and sets its words `SPECULATION` and `STATE_BUFFER`.
/// `as_predicted`: the gradient is neither clipped nor skipped.
pub(crate) fn validate(words: &mut [f64], predicted: &[f64], as_predicted: bool) {
    words[SPECULATION] = match predicted[SPECULATION] {
        NOT_SPECULATED => NOT_SPECULATED,
        _ if as_predicted => COMMITTED,
        _ => REDONE,
    };
    if words[SKIP] == 0.0 {
        words[STATE_BUFFER] = 1.0 - words[STATE_BUFFER];
    }
}

/// Adds a segment's sums of squares to the sums of the earlier segments. If this rank's sums
/// already show that the step will be clipped or skipped, speculation stops. Stopping changes no
/// result, so the sums of other ranks are not needed.
#[derive(Debug)]
pub(crate) struct NormGuard {
    /// See [`PredictDecision::predicted`].
    pub(crate) predicted: Tensor,
    /// The segment's partial sums of squares on this rank.
    pub(crate) partials: Tensor,
    /// Largest norm of a gradient, if gradients are clipped.
    pub(crate) clip: Option<f64>,
}

impl HostTask for NormGuard {
    fn name(&self) -> &'static str {
        "tally"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Update, self.predicted);
        visit(Mode::Read, self.partials);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let words = host.write_as::<f64>(self.predicted)?;
        words[NORM] += host.read_as::<f64>(self.partials)?.iter().sum::<f64>();
        let norm = words[NORM].sqrt() * words[FACTOR];
        if !norm.is_finite() || self.clip.is_some_and(|most| norm > most) {
            words[FACTOR] = 0.0;
        }
        Ok(())
    }
}

/// Second arrays of the states of a store or of a tile, and other data of speculative updates.
#[derive(Clone, Debug)]
pub struct SpeculationBuffers {
    /// Masters, first moments and second moments, with the array number 1.
    pub states: [Tensor; 3],
    /// Upper halves of split masters before the update.
    pub upper: Option<Tensor>,
    /// Factor of a tile's speculative update, or 0 if it did not run: one F64 for a tile. A store
    /// has one F64 per chunk, since each tile begins with a chunk.
    pub factor: Tensor,
    /// Predicted [control block](crate::control); `STATE_BUFFER` is the old states' number.
    pub predicted: Tensor,
}

/// When a tile with second arrays is updated, relative to the decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Before the decision, by the predicted words.
    Speculate,
    /// After the decision, if no speculative update of the tile is valid.
    Validate,
}

/// The update of a tile from one array of its states to the other.
#[derive(Clone, Debug)]
pub struct SpeculativeTile {
    /// The tile with the first arrays of its states.
    pub tile: AdamTile,
    /// Second arrays of the states.
    pub buffers: SpeculationBuffers,
    /// When the update runs.
    pub phase: Phase,
}

impl HostTask for SpeculativeTile {
    fn name(&self) -> &'static str {
        match self.phase {
            Phase::Speculate => "ahead_tile",
            Phase::Validate => "settle_tile",
        }
    }
    /// All tensors that the task may access, whatever the control words are.
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        let Self { tile, buffers, phase } = self;
        visit(Mode::Read, buffers.predicted);
        visit(Mode::Read, tile.grad);
        visit(Mode::Update, tile.param);
        let first = [tile.master, tile.momentum, tile.variance];
        for tensor in first.into_iter().chain(buffers.own_arrays()) {
            visit(Mode::Update, tensor);
        }
        match phase {
            Phase::Speculate => visit(Mode::Write, buffers.factor),
            Phase::Validate => {
                visit(Mode::Read, buffers.factor);
                visit(Mode::Read, tile.control);
            }
        }
    }
    /// Bytes of the update in place, and of the upper halves that are saved or restored.
    fn bytes(&self, _: u64) -> u64 {
        let mut bytes = self.buffers.upper.map_or(0, Tensor::bytes);
        let each = |mode| if mode == Mode::Update { 2 } else { 1 };
        self.tile.accesses(&mut |mode, t| bytes += t.bytes() * each(mode));
        bytes
    }
    fn flops(&self) -> f64 {
        self.tile.flops()
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let predicted = host.read_as::<f64>(self.buffers.predicted)?;
        let (words, halves) = match self.phase {
            Phase::Speculate => {
                host.write_as::<f64>(self.buffers.factor)?[0] = predicted[FACTOR];
                if predicted[FACTOR] == 0.0 {
                    return Ok(());
                }
                (predicted, UpperHalfAction::Keep)
            }
            Phase::Validate => {
                let words = host.read_as::<f64>(self.tile.control)?;
                let factor = host.read_as::<f64>(self.buffers.factor)?[0];
                // The factor of a skipped step is 0.
                if factor == words[FACTOR] {
                    return Ok(());
                }
                (
                    words,
                    if factor == 0.0 { UpperHalfAction::Leave } else { UpperHalfAction::Restore },
                )
            }
        };
        let update = self.out_of_place(words, predicted[STATE_BUFFER], halves, host)?;
        parallel_for(host, update, update_out_of_place)
    }
}

/// Action of an update on the saved upper halves of split masters.
#[derive(Clone, Copy)]
enum UpperHalfAction {
    /// Saves the upper halves before the update changes them.
    Keep,
    /// Restores them first: a speculative update has changed the parameters.
    Restore,
    /// Ignores them: the parameters are unchanged.
    Leave,
}

impl SpeculativeTile {
    /// Makes the update by `words`; `old` is the number of the arrays with the old states.
    fn out_of_place<'a, 'host: 'a>(
        &'a self,
        words: &'a [f64],
        old: f64,
        halves: UpperHalfAction,
        host: &mut HostContext<'host>,
    ) -> Result<OutOfPlaceUpdate<'a>, String> {
        let Self { tile, buffers, .. } = self;
        let first = [tile.master, tile.momentum, tile.variance];
        let [old, new] = if old == 0.0 { [first, buffers.states] } else { [buffers.states, first] };
        let upper = match (buffers.upper, halves) {
            (None, _) | (_, UpperHalfAction::Leave) => UpperHalves::Stay,
            (Some(upper), UpperHalfAction::Keep) => UpperHalves::Keep(host.write_as(upper)?),
            (Some(upper), UpperHalfAction::Restore) => UpperHalves::Restore(host.write_as(upper)?),
        };
        let mut read = |t: Tensor| host.write(t).map(ViewMut::into_view);
        let old = [read(old[0])?, read(old[1])?, read(old[2])?];
        let new = tile.whole(words, new, host)?;
        Ok(OutOfPlaceUpdate { upper, update: Update { old: Some(old), ..new } })
    }
}

/// The loads and stores of a speculative update without arithmetic: a lower bound of its time.
#[derive(Debug)]
pub struct SpeculativeTraffic(
    /// The tile. After the task has run, its states are meaningless.
    pub SpeculativeTile,
);

impl HostTask for SpeculativeTraffic {
    fn name(&self) -> &'static str {
        "ahead_traffic"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        self.0.accesses(visit);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let words = host.read_as::<f64>(self.0.buffers.predicted)?;
        host.write_as::<f64>(self.0.buffers.factor)?[0] = words[FACTOR];
        let update =
            self.0.out_of_place(words, words[STATE_BUFFER], UpperHalfAction::Keep, host)?;
        parallel_for(host, update, |piece| {
            traffic_out_of_place(piece);
            Ok(())
        })
    }
}

impl SpeculationBuffers {
    /// Cuts the elements `owned` of a tile, and its factor at `chunk`, out of a store's arrays.
    #[must_use]
    pub fn tile(&self, owned: &Range<usize>, chunk: usize) -> Self {
        Self {
            states: self.states.map(|array| array.slice(owned.clone())),
            upper: self.upper.map(|array| array.slice(owned.clone())),
            factor: self.factor.slice(chunk..chunk + 1),
            predicted: self.predicted,
        }
    }

    /// The second arrays, which an update may leave unwritten.
    pub(crate) fn own_arrays(&self) -> impl Iterator<Item = Tensor> {
        self.states.into_iter().chain(self.upper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::StepSchedule;
    use crate::update::Rule;
    use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
    use device::{Arena, Communicator, Dtype, HostOp, HostPlace, HostWork, Plan, Rank};
    use std::sync::Arc;
    use std::time::Duration;

    #[derive(Debug)]
    struct DoubleWeight;

    impl StepSchedule for DoubleWeight {
        fn learning_rate(&self, _: u64) -> f64 {
            0.5
        }
        fn weight(&self, _: u64) -> f64 {
            2.0
        }
    }

    /// Returns the predicted factors, before the first segment and after each segment's sums, and
    /// the word `SPECULATION`.
    fn predicted(clipped: f64, clip: Option<f64>, sums: &[f64]) -> (Vec<f64>, f64) {
        let mut plan = Plan::default();
        let mut words = |name, n| plan.tensor((Arena::Pinned, "test"), name, Dtype::F64, (1, n));
        let [control, predicted] = ["control", "presumed"].map(|name| words(name, control::WORDS));
        let partials = words("partials", sums.len());
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats::default(),
            work: HostWork::default(),
        };
        let rank = Rank::all(1, 1).next().expect("one rank");
        let world = Communicator::new(1, 1, Duration::from_secs(10));
        let dev = cpu::open(rank, &Arc::new(plan), &world, &options).expect("a virtual GPU");
        let mut before = [0.0; control::WORDS];
        (before[control::LOSS_SCALE], before[CLIP_RATE]) = (4.0, clipped);
        dev.write(control, &|i| before[i]).expect("written");
        dev.write(partials, &|i| sums[i]).expect("written");
        let rule = Rule::Sgd { weight_decay: 0.0 };
        let rates = Rates { rule, summands: 1.0, given: Arc::new(DoubleWeight) };
        let mut tasks = vec![HostOp::new(PredictDecision { control, predicted, rates })];
        for at in 0..sums.len() {
            let partials = partials.slice(at..at + 1);
            tasks.push(HostOp::new(NormGuard { predicted, partials, clip }));
        }
        let mut words = [0.0; control::WORDS];
        let factors = tasks.iter().map(|task| {
            dev.submit_host(task, 3);
            dev.sync_all().expect("it runs");
            dev.read(predicted, &mut words).expect("read");
            words[FACTOR]
        });
        let factors = factors.collect();
        dev.finish().expect("it ends");
        (factors, words[SPECULATION])
    }

    /// The factor without clipping is 2 / 4: weight 2, loss scale 4.
    #[test]
    fn nothing_more_is_updated_ahead_once_the_sums_of_a_rank_show_a_clipped_or_skipped_step() {
        let ran = |clip, sums: &[f64]| predicted(0.0, clip, sums).0;
        assert_eq!(ran(Some(2.5), &[9.0, 16.0, 0.1, 0.0]), [0.5, 0.5, 0.5, 0.0, 0.0]);
        assert_eq!(ran(None, &[9.0, 1e30, 1e300]), [0.5; 4]);
        for odd in [f64::INFINITY, f64::NAN] {
            assert_eq!(ran(None, &[9.0, odd, 0.0]), [0.5, 0.5, 0.0, 0.0]);
            assert_eq!(ran(Some(1e9), &[odd]), [0.5, 0.0]);
        }
    }

    #[test]
    fn nothing_is_updated_ahead_where_half_of_the_recent_steps_were_clipped() {
        assert_eq!(predicted(0.499, None, &[1.0]), (vec![0.5, 0.5], COMMITTED));
        assert_eq!(predicted(MAX_CLIP_RATE, None, &[1.0]), (vec![0.0, 0.0], NOT_SPECULATED));
    }
}
