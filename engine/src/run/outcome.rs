//! How a run ended: done or interrupted, or failed.

use device::Error;

/// What a run ended with.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The last step that was done.
    pub step: u64,
    /// It was the last of the config, and the held-out part was evaluated.
    pub complete: bool,
    /// xxh3 over fp32 parameters, first and second moments, in global tensor order. Empty where the states were not put
    /// together: at an interrupt, unless the weights are written.
    pub state_hash: String,
    /// The weights are on the disk.
    pub weights_written: bool,
    /// Why the weights are not written, where they should have been.
    pub weights_problem: Option<String>,
    /// A tensor whose gradient was not finite in the last step, if this run did that and it was skipped: of the blocks with
    /// such ones it is in the last, which the backward pass came to first.
    pub not_finite: Option<String>,
    /// The first and the last of so many skipped steps in a row that the run ended.
    pub diverged: Option<(u64, u64)>,
}

/// A failed run: which rank's own fault it was, and in which step.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rank {rank}, step {step}: {error}")]
pub struct RunError {
    /// Whose.
    pub rank: usize,
    /// 0: before the first.
    pub step: u64,
    /// What.
    pub error: Error,
    /// Every rank's own view, by rank.
    pub all: Vec<Option<Error>>,
    /// Why the checkpoint that the run goes on from could not be read, where that was it.
    pub unread: Option<Unread>,
}

/// Why a checkpoint could be checked and then not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// The system refused.
    System,
    /// It is not any more what it was when it was checked.
    Changed,
}
