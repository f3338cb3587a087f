//! One norm over all ranks, and the step's decision: update or skip, the clipping factor, the next
//! loss scale. Host tasks compute both and write them to memory. The rank's thread never waits for
//! them, and the program of a step does not depend on the decision.

use crate::control;
use crate::schedule::Rates;
use crate::speculation;
use device::numerics::{CountedRange, accumulate, accumulate_chunks};
use device::{Divisible, HostContext, HostTask, Mode, Tensor, View};

type Visit<'a> = &'a mut dyn FnMut(Mode, Tensor);

/// Weight of the newest step in [`control::CLIP_RATE`].
const NEWEST: f64 = 0.125;

/// Dynamic loss scale as in Megatron-LM. It doubles after `window` good steps in a row. It halves
/// at overflow number `hysteresis` since the last doubling and at each later overflow, never below
/// `floor`. Good steps between overflows do not restart the count of overflows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// Loss scale at the first step.
    pub initial: f64,
    /// Number of good steps in a row after which the scale doubles.
    pub window: u64,
    /// Number of the first overflow that halves the scale, counted from the last doubling.
    pub hysteresis: u32,
    /// Smallest loss scale.
    pub floor: f64,
}

/// Largest loss scale.
const LARGEST_SCALE: f64 = 16_777_216.0;

/// Position of a micro-batch in its step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MicrobatchPosition {
    First,
    Middle,
    Last,
}

/// Host task that computes sum = grad, or sum += grad. After the last micro-batch it also computes
/// the sums of squares of the result, chunk by chunk.
#[derive(Debug)]
pub(crate) struct AccumulateTask {
    pub(crate) grad: Tensor,
    pub(crate) sum: Tensor,
    pub(crate) position: MicrobatchPosition,
    pub(crate) partials: Tensor,
    pub(crate) chunk: usize,
    pub(crate) counted: CountedRange,
}

impl HostTask for AccumulateTask {
    fn name(&self) -> &'static str {
        "accumulate"
    }
    fn accesses(&self, visit: Visit<'_>) {
        visit(Mode::Read, self.grad);
        visit(
            if self.position == MicrobatchPosition::First { Mode::Write } else { Mode::Update },
            self.sum,
        );
        if self.position == MicrobatchPosition::Last {
            visit(Mode::Write, self.partials);
        }
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let (grad, sum) = (host.read(self.grad)?, host.write_as::<f32>(self.sum)?);
        let partials = match self.position {
            MicrobatchPosition::Last => Some(host.write_as::<f64>(self.partials)?),
            MicrobatchPosition::First | MicrobatchPosition::Middle => None,
        };
        let whole =
            AccumulationSlice { grad, sum, partials, counted: self.counted, chunk: self.chunk };
        host.parallel_for(whole, &|part| self.add(part));
        Ok(())
    }
}

/// The part of one thread: a whole number of chunks.
struct AccumulationSlice<'a> {
    grad: View<'a>,
    sum: &'a mut [f32],
    partials: Option<&'a mut [f64]>,
    counted: CountedRange,
    chunk: usize,
}

impl AccumulateTask {
    fn add(&self, part: AccumulationSlice<'_>) {
        let first = self.position == MicrobatchPosition::First;
        let AccumulationSlice { grad, sum, partials, counted, .. } = part;
        match partials {
            None => accumulate(grad, sum, first),
            Some(partials) => {
                accumulate_chunks(grad, sum, first, partials, self.chunk, counted);
            }
        }
    }
}

impl Divisible for AccumulationSlice<'_> {
    fn units(&self) -> usize {
        self.sum.len().div_ceil(self.chunk)
    }
    /// Cuts at the end of a chunk, so that the cut changes no bit.
    fn cut(self, units: usize) -> (Self, Self) {
        let AccumulationSlice { grad, sum, partials, counted, chunk } = self;
        let (n, mid) = (sum.len(), units * chunk);
        let (left, right) = sum.split_at_mut(mid);
        let (first, second) = partials.map(|partials| partials.split_at_mut(units)).unzip();
        let (grads, more) = (grad.slice(0..mid), grad.slice(mid..n));
        let left = AccumulationSlice { grad: grads, sum: left, partials: first, counted, chunk };
        let counted = counted.from(mid);
        let right = AccumulationSlice { grad: more, sum: right, partials: second, counted, chunk };
        (left, right)
    }
}

/// Copies a rank's partial sums to their positions among all ranks' sums. The other positions
/// become 0, for an all-reduce.
#[derive(Debug)]
pub(crate) struct SpreadPartials {
    pub(crate) own: Tensor,
    pub(crate) all: Tensor,
    /// Runs of partial sums and their positions.
    pub(crate) runs: Vec<PartialsRun>,
}

/// Partial sums that are contiguous both among a rank's sums and among all ranks' sums.
#[derive(Debug)]
pub(crate) struct PartialsRun {
    /// Index of the first sum among the rank's sums.
    pub(crate) own: usize,
    /// Index of the first sum among all ranks' sums.
    pub(crate) all: usize,
    /// Number of partial sums.
    pub(crate) len: usize,
}

impl HostTask for SpreadPartials {
    fn name(&self) -> &'static str {
        "spread_partials"
    }
    fn accesses(&self, visit: Visit<'_>) {
        visit(Mode::Read, self.own);
        visit(Mode::Write, self.all);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let (own, all) = (host.read_as::<f64>(self.own)?, host.write_as::<f64>(self.all)?);
        all.fill(0.0);
        for &PartialsRun { own: from, all: to, len } in &self.runs {
            all[to..to + len].copy_from_slice(&own[from..from + len]);
        }
        Ok(())
    }
}

/// norm (1) = the sum of all partial sums, in index order.
#[derive(Debug)]
pub(crate) struct FoldPartials {
    pub(crate) all: Tensor,
    pub(crate) norm: Tensor,
}

impl HostTask for FoldPartials {
    fn name(&self) -> &'static str {
        "fold_partials"
    }
    fn accesses(&self, visit: Visit<'_>) {
        visit(Mode::Read, self.all);
        visit(Mode::Write, self.norm);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let sum = host.read_as::<f64>(self.all)?.iter().sum();
        host.write_as::<f64>(self.norm)?[0] = sum;
        Ok(())
    }
}

/// Computes the control block from the global sum of squares. `arg` is the step.
#[derive(Debug)]
pub(crate) struct DecideTask {
    pub(crate) norm: Tensor,
    pub(crate) control: Tensor,
    pub(crate) rates: Rates,
    pub(crate) clip: Option<f64>,
    pub(crate) loss_scale: Option<LossScale>,
    /// Predicted block of [`PredictDecision`](crate::speculation::PredictDecision), if segments are
    /// updated speculatively.
    pub(crate) predicted: Option<Tensor>,
}

impl HostTask for DecideTask {
    fn name(&self) -> &'static str {
        "decide"
    }
    fn accesses(&self, visit: Visit<'_>) {
        visit(Mode::Read, self.norm);
        visit(Mode::Update, self.control);
        if let Some(predicted) = self.predicted {
            visit(Mode::Read, predicted);
        }
    }
    fn run(&self, step: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let squares = host.read_as::<f64>(self.norm)?[0];
        let words = host.write_as::<f64>(self.control)?;
        let unit = self.rates.unit(words, step);
        let norm = squares.sqrt() * unit;
        let finite = squares.is_finite();
        let clip = self.clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0));
        words[control::NORM] = norm;
        words[control::SKIP] = f64::from(u8::from(!finite));
        words[control::LOSS_SCALE_USED] = words[control::LOSS_SCALE];
        if finite {
            self.rates.apply(words, step, unit * clip);
        } else {
            words[control::STEP] = step as f64;
            words[control::LR] = self.rates.given.learning_rate(step);
            words[control::FACTOR] = 0.0;
            words[control::SKIPPED] += 1.0;
        }
        let as_predicted = finite && clip == 1.0;
        words[control::CLIP_RATE] +=
            NEWEST * (f64::from(u8::from(!as_predicted)) - words[control::CLIP_RATE]);
        if let Some(predicted) = self.predicted {
            speculation::validate(words, host.read_as::<f64>(predicted)?, as_predicted);
        }
        if let Some(rule) = self.loss_scale {
            rule.next(words, finite);
        }
        Ok(())
    }
}

impl LossScale {
    fn next(self, words: &mut [f64], finite: bool) {
        let scale = words[control::LOSS_SCALE];
        if finite {
            words[control::GOOD_STEPS] += 1.0;
            if words[control::GOOD_STEPS] >= self.window as f64 {
                words[control::LOSS_SCALE] = (2.0 * scale).min(LARGEST_SCALE);
                words[control::GOOD_STEPS] = 0.0;
                words[control::HYSTERESIS_LEFT] = f64::from(self.hysteresis);
            }
            return;
        }
        words[control::GOOD_STEPS] = 0.0;
        words[control::HYSTERESIS_LEFT] -= 1.0;
        if words[control::HYSTERESIS_LEFT] <= 0.0 {
            words[control::LOSS_SCALE] = (scale / 2.0).max(self.floor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule of Megatron-LM's DynamicGradScaler: only a doubling restores the hysteresis, good
    /// steps alone do not.
    #[test]
    fn overflows_are_counted_from_the_last_time_that_the_scale_doubled() {
        let rule = LossScale { initial: 1024.0, window: 6, hysteresis: 3, floor: 1.0 };
        let mut words = [0.0; control::WORDS];
        words[control::LOSS_SCALE] = rule.initial;
        words[control::HYSTERESIS_LEFT] = 3.0;
        let mut moves = String::new();
        for step in "xxxxxxxx......xx.x......x".chars() {
            let before = words[control::LOSS_SCALE];
            rule.next(&mut words, step == '.');
            let ratio = words[control::LOSS_SCALE] / before;
            moves.push(if ratio < 1.0 {
                '<'
            } else if ratio > 1.0 {
                '>'
            } else {
                '='
            });
        }
        assert_eq!(moves, "==<<<<<<=====>===<=====>=");
    }

    #[test]
    fn the_loss_scale_halves_after_forgiven_overflows_and_doubles_after_its_window() {
        let rule = LossScale { initial: 1024.0, window: 3, hysteresis: 2, floor: 256.0 };
        let mut words = [0.0; control::WORDS];
        words[control::LOSS_SCALE] = rule.initial;
        words[control::HYSTERESIS_LEFT] = 2.0;
        let mut seen = Vec::new();
        for finite in [false, false, false, false, true, true, true, true, false, false] {
            rule.next(&mut words, finite);
            seen.push(words[control::LOSS_SCALE]);
        }
        let expected = [1024.0, 512.0, 256.0, 256.0, 256.0, 256.0, 512.0, 512.0, 512.0, 256.0];
        assert_eq!(seen, expected);
    }
}
