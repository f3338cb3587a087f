//! The evaluations of a run up to a checkpoint: the least validation loss, the evaluations since,
//! and the best checkpoint. Each checkpoint stores them in its manifest. So after a resume, a
//! rollback or a crash, the newest checkpoint says which checkpoint is the best.

use serde::{Deserialize, Serialize};

/// A step, and the validation loss after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// Number of the step.
    pub step: u64,
    /// Bits of the F64, since a decimal number may be read back as its neighbour.
    loss: u64,
}

impl Evaluation {
    /// An evaluation after `step`.
    pub const fn new(step: u64, loss: f64) -> Self {
        Self { step, loss: loss.to_bits() }
    }

    /// Mean validation loss, in nats per token.
    pub const fn loss(&self) -> f64 {
        f64::from_bits(self.loss)
    }

    /// Whether its loss is finite, and less than the loss of `other`.
    pub fn is_better_than(&self, other: Option<&Self>) -> bool {
        self.loss().is_finite() && other.is_none_or(|other| self.loss() < other.loss())
    }
}

/// Summary of the evaluations of a run: the least loss and the best checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationHistory {
    /// Step of the last evaluation that counts; 0 before the first.
    last: u64,
    /// Number of targets in each evaluation. Losses over other targets are not compared.
    targets: u64,
    /// Number of evaluations in a row since the one with the least loss.
    without_improvement: u64,
    /// Evaluation with the least loss; `None` if no loss was finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    least: Option<Evaluation>,
    /// Evaluation of the best checkpoint, if the run keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<Evaluation>,
}

impl EvaluationHistory {
    /// Counts an evaluation over `targets` targets. Returns false if the step was counted before,
    /// since a resumed run evaluates some steps again.
    pub fn count(&mut self, evaluation: Evaluation, targets: u64) -> bool {
        if evaluation.step <= self.last {
            return false;
        }
        (self.last, self.targets) = (evaluation.step, targets);
        if evaluation.is_better_than(self.least.as_ref()) {
            (self.least, self.without_improvement) = (Some(evaluation), 0);
        } else {
            self.without_improvement += 1;
        }
        true
    }

    /// Whether the losses so far are over another number of targets than `targets`.
    pub const fn is_over_other_targets(&self, targets: u64) -> bool {
        self.last > 0 && self.targets != targets
    }

    /// Number of evaluations in a row since the one with the least loss.
    pub const fn without_improvement(&self) -> u64 {
        self.without_improvement
    }

    /// Evaluation with the least loss.
    pub const fn least(&self) -> Option<Evaluation> {
        self.least
    }

    /// Evaluation of the best checkpoint.
    pub const fn best(&self) -> Option<Evaluation> {
        self.best
    }

    /// This history with another best checkpoint.
    #[must_use]
    pub const fn with_best(self, best: Option<Evaluation>) -> Self {
        Self { best, ..self }
    }

    /// Reports values that no run writes into a checkpoint of `step`.
    pub(crate) fn check(&self, step: u64) -> Result<(), String> {
        let Self { last, least, best, .. } = self;
        let of_run = |found: &Evaluation| found.step <= *last && found.loss().is_finite();
        let possible = *last <= step
            && least.iter().chain(best).all(of_run)
            && best.is_none_or(|best| !best.is_better_than(least.as_ref()));
        if possible { Ok(()) } else { Err("its evaluations contradict each other".into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(losses: &[(u64, f64)]) -> EvaluationHistory {
        let mut history = EvaluationHistory::default();
        losses.iter().for_each(|(step, loss)| {
            history.count(Evaluation::new(*step, *loss), 64);
        });
        history
    }

    #[test]
    fn only_a_finite_loss_below_all_before_is_an_improvement() {
        let worse = history(&[(2, 3.0), (4, 3.0), (6, f64::NAN), (8, f64::INFINITY)]);
        assert_eq!(
            (worse.least(), worse.without_improvement()),
            (Some(Evaluation::new(2, 3.0)), 3)
        );
        let better = history(&[(2, f64::NAN), (4, 3.0), (6, 2.5)]);
        assert_eq!(
            (better.least(), better.without_improvement()),
            (Some(Evaluation::new(6, 2.5)), 0)
        );
        assert_eq!(history(&[(2, f64::NAN)]).least(), None);
    }

    #[test]
    fn an_evaluation_that_a_resumed_run_repeats_counts_once() {
        let mut history = history(&[(2, 3.0), (4, 3.5)]);
        let before = history;
        assert!(!history.count(Evaluation::new(4, 2.0), 64));
        assert_eq!(history, before);
        assert!(history.is_over_other_targets(65) && !history.is_over_other_targets(64));
    }

    #[test]
    fn what_is_written_is_read_back_to_the_bit_and_contradictions_are_refused() {
        let of =
            history(&[(2, 0.1 + 0.2), (4, 9.0)]).with_best(Some(Evaluation::new(2, 0.1 + 0.2)));
        let text = serde_json::to_string(&of).unwrap();
        assert_eq!(serde_json::from_str::<EvaluationHistory>(&text).unwrap(), of);
        of.check(4).unwrap();
        assert!(of.check(3).is_err(), "an evaluation after the checkpoint's step");
        assert!(of.with_best(Some(Evaluation::new(6, 1.0))).check(9).is_err());
        assert!(of.with_best(Some(Evaluation::new(2, 0.1))).check(9).is_err());
        assert!(of.with_best(Some(Evaluation::new(2, f64::NAN))).check(9).is_err());
    }
}
