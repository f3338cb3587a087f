//! What the loop gives each step: pure functions of the step, counted from 1 (skipped steps count).

use std::fmt::Debug;

/// The learning rate of a step, and the weight of its gradient.
pub trait PerStep: Send + Sync + Debug {
    /// The learning rate at `step`.
    fn learning_rate(&self, step: u64) -> f64;
    /// Factor of the mean gradient of `step` over its ranks and micro-batches: 1 where all of their tokens count alike.
    fn weight(&self, step: u64) -> f64;
}
