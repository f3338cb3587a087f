//! What the loop gives each step: pure functions of the step, counted from 1 (skipped steps count), and the words that follow.

use crate::control;
use crate::update::Rule;
use std::fmt::Debug;
use std::sync::Arc;

/// The learning rate of a step, and the weight of its gradient.
pub trait StepSchedule: Send + Sync + Debug {
    /// The learning rate at `step`.
    fn learning_rate(&self, step: u64) -> f64;
    /// Factor of the mean gradient of `step` over its ranks and micro-batches: 1 where all of their tokens count alike.
    fn weight(&self, step: u64) -> f64;
}

/// Where the words come from that an update reads, but for clipping.
#[derive(Clone, Debug)]
pub(crate) struct Rates {
    pub(crate) rule: Rule,
    /// Summed gradients are this many times the mean over ranks and micro-batches.
    pub(crate) summands: f64,
    pub(crate) given: Arc<dyn StepSchedule>,
}

impl Rates {
    /// Factor of a summed gradient of `step` that is not clipped: unscaling, and the mean over ranks and micro-batches.
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
