//! One norm over all ranks, and the step's decision: update or skip, by how much to clip, the next loss scale.
//! All of it is host work that leaves data behind; the rank's thread never waits for it and the program is the
//! same either way.

use crate::control;
use crate::schedule::Rates;
use crate::speculation;
use device::numerics::{CountedRange, accumulate, accumulate_chunks};
use device::{Divisible, HostContext, HostTask, Mode, Tensor, View};

type Visit<'a> = &'a mut dyn FnMut(Mode, Tensor);

/// Weight of a step in the share of recent steps that were clipped or skipped.
const NEWEST: f64 = 0.125;

/// Dynamic loss scale as Megatron-LM has it: doubled after `window` good steps in a row, halved by overflow number `hysteresis` since
/// it last doubled and by each further one, never below `floor`. Good steps between overflows do not begin the count anew.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The scale at the first step.
    pub initial: f64,
    /// Number of good steps that double it.
    pub window: u64,
    /// The first overflow that halves it, counted from the last time that it doubled.
    pub hysteresis: u32,
    /// The smallest scale.
    pub floor: f64,
}

/// No scale grows beyond this.
const LARGEST_SCALE: f64 = 16_777_216.0;

/// Which of a step's micro-batches an accumulation serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MicrobatchPosition {
    First,
    Middle,
    Last,
}

/// sum = grad, or += grad; after the last micro-batch also the sums of squares of the result, chunk by chunk.
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

/// The part of one thread: whole chunks.
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
    /// At the ends of chunks, so that the cut changes no bit.
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

/// A rank's partial sums in their places among all ranks'; zero elsewhere, for a sum over the ranks.
#[derive(Debug)]
pub(crate) struct SpreadPartials {
    pub(crate) own: Tensor,
    pub(crate) all: Tensor,
    /// Which of the rank's partial sums go where.
    pub(crate) runs: Vec<PartialsRun>,
}

/// Partial sums that lie together, both in a rank's own and among all ranks'.
#[derive(Debug)]
pub(crate) struct PartialsRun {
    /// The first one's index among the rank's own.
    pub(crate) own: usize,
    /// The first one's index among all.
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

/// From the global sum of squares to the control block. `arg` is the step.
#[derive(Debug)]
pub(crate) struct DecideTask {
    pub(crate) norm: Tensor,
    pub(crate) control: Tensor,
    pub(crate) rates: Rates,
    pub(crate) clip: Option<f64>,
    pub(crate) loss_scale: Option<LossScale>,
    /// The block of [`PredictDecision`](crate::speculation::PredictDecision), where segments are updated ahead of the decision.
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

    /// As Megatron-LM's DynamicGradScaler does it: good steps between overflows give nothing back, a scale that doubles does.
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
