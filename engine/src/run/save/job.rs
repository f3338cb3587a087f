//! The facts about a step that the save after this step needs.

use checkpoint::evaluations::{Evaluation, EvaluationHistory};
use offload::control;
use std::time::{Duration, Instant};

/// Point in a run at which states are saved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavePoint {
    pub(crate) step: u64,
    /// Number of skipped steps in a row up to this step.
    pub(crate) skipped_in_a_row: u64,
    /// Evaluations up to this step, if the run compares them.
    pub(crate) evaluations: Option<EvaluationHistory>,
    /// Evaluation of this step.
    pub(crate) evaluation: Option<Evaluation>,
}

/// A checkpoint that is being saved.
#[derive(Clone, Copy)]
pub(super) struct SaveJob {
    pub(super) step: u64,
    pub(super) skipped_in_a_row: u64,
    pub(super) evaluations: Option<EvaluationHistory>,
    pub(super) evaluation: Option<Evaluation>,
    pub(super) words: [f64; control::WORDS],
    /// Whether the update of the step is delayed.
    pub(super) is_delayed: bool,
    pub(super) started: Instant,
    /// Time that training waited; `None` if it still waits.
    pub(super) waited: Option<Duration>,
}

impl SaveJob {
    /// Returns the job with the time that training waited; `None` if it still waits.
    pub(super) const fn after(self, waited: Option<Duration>) -> Self {
        Self { waited, ..self }
    }
}
