//! The learning rate and gradient weight that the loop provides for each step, and the control
//! words that depend on them. Steps count from 1, skipped steps included.

use crate::control;
use crate::update::Rule;
use std::fmt::Debug;
use std::sync::Arc;

/// The learning rate of a step, and the weight of its gradient: pure functions of the step.
pub trait StepSchedule: Send + Sync + Debug {
    /// Learning rate at `step`.
    fn learning_rate(&self, step: u64) -> f64;
    /// Factor of the mean gradient of `step` over its ranks and micro-batches: 1 if all of their
    /// tokens have the same weight.
    fn weight(&self, step: u64) -> f64;
}

/// Computes the control words that an update reads, except for the clipping.
#[derive(Clone, Debug)]
pub(crate) struct Rates {
    pub(crate) rule: Rule,
    /// Ratio of a summed gradient to the mean over ranks and micro-batches.
    pub(crate) summands: f64,
    pub(crate) given: Arc<dyn StepSchedule>,
}

impl Rates {
    /// Factor of a summed gradient of `step` without clipping: unscaling, and the mean over ranks
    /// and micro-batches.
    pub(crate) fn unit(&self, words: &[f64], step: u64) -> f64 {
        self.given.weight(step) / (words[control::LOSS_SCALE] * self.summands)
    }

    /// Sets the words that an update of `step` reads, for gradients times `factor`.
    pub(crate) fn apply(&self, words: &mut [f64], step: u64, factor: f64) {
        words[control::STEP] = step as f64;
        words[control::LR] = self.given.learning_rate(step);
        words[control::FACTOR] = factor;
        words[control::APPLIED] += 1.0;
        self.correct_bias(words);
    }

    fn correct_bias(&self, words: &mut [f64]) {
        if let Rule::AdamW { beta1, beta2, .. } = self.rule {
            let t = words[control::APPLIED];
            words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - f64::from(beta1).powf(t));
            words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - f64::from(beta2).powf(t));
        }
    }
}
