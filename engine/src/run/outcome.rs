//! The end of a run: complete, interrupted or failed.

use checkpoint::evaluations::EvaluationHistory;
use device::Error;

/// The end of a run that did not fail.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Last finished step.
    pub step: u64,
    /// Whether this was the last step of the config, and the last evaluation is done, or whether
    /// `train.patience` ended the run here.
    pub complete: bool,
    /// xxh3 over fp32 parameters, first and second moments, in global tensor order. Empty if the
    /// ranks did not gather the states: after an interrupt, unless the weights are written.
    pub state_hash: String,
    /// Whether the weights are on the disk.
    pub weights_written: bool,
    /// Why the weights are not written, if they should have been.
    pub weights_problem: Option<String>,
    /// Name of a tensor whose gradient was not finite, if the last step was skipped. The tensor is
    /// in the last block with such a gradient, because its backward pass comes first.
    pub not_finite: Option<String>,
    /// The evaluations of the run, with the best checkpoint, if the run compares them.
    pub evaluations: Option<EvaluationHistory>,
    /// Whether `train.patience` ended the run. `complete` is then true, too.
    pub out_of_patience: bool,
    /// First and last of the skipped steps in a row that ended the run.
    pub diverged: Option<(u64, u64)>,
}

/// A failed run: the rank that failed first, and the step.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rank {rank}, step {step}: {error}")]
pub struct RunError {
    /// The rank that failed first.
    pub rank: usize,
    /// Step of the failure; 0 before the first step.
    pub step: u64,
    /// Error of this rank.
    pub error: Error,
    /// Error of each rank, by rank.
    pub all: Vec<Option<Error>>,
    /// Why the checkpoint that the run resumes from could not be read, if that is the cause.
    pub read_failure: Option<ReadFailure>,
}

/// Why a checkpoint that passed its check could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// The system refused to read the checkpoint.
    System,
    /// The checkpoint has changed since the check.
    Changed,
}
