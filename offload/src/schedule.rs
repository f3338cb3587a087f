//! The learning rate, which the loop gives.

use std::fmt::Debug;

/// The learning rate as a pure function of the step, counted from 1 (skipped steps count).
pub trait LearningRate: Send + Sync + Debug {
    /// The learning rate at `step`.
    fn at(&self, step: u64) -> f64;
}
