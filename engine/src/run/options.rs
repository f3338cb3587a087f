//! What a caller may ask of a run besides its config; most of it is for tests.

use crate::run::RunError;
use crate::run::fault_point::Watcher;
use crate::train::initial_states::Weights;
use checkpoint::hugging_face::PretrainedWeights;
use checkpoint::rollback::RollbackHistory;
use checkpoint::{Checkpoint, RunFolder};
use device::cpu::Lanes;
use device::cuda::Collectives;
use device::{Lane, Processes, Trace};
use files::held::LockedRunDir;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What happens if a failed run does not end.
#[derive(Clone, Copy, Debug)]
pub struct StuckHandler {
    /// Time that the ranks have to end after the failure.
    pub after: Duration,
    /// Called then.
    pub call: fn(&RunError),
}

/// What a caller may ask of a run besides its config.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// How the lanes of virtual GPUs run.
    pub lanes: Lanes,
    /// How real GPUs exchange data.
    pub collectives: Collectives,
    /// Where spans of ops are noted.
    pub trace: Option<Arc<Trace>>,
    /// For tests: see [`device::HostWork::slow`].
    pub slow: Option<(&'static str, u32)>,
    /// For tests: see [`device::HostWork::panic_at`].
    pub panic_at: Option<(usize, Lane, u64)>,
    /// For tests: see [`device::HostWork::stall_at`].
    pub stall_at: Option<(usize, Lane, u64, Duration)>,
    /// For tests: this rank returns before this step.
    pub leave_at: Option<(usize, u64)>,
    /// For tests: on this rank a parameter changes between the two runs of this step.
    pub change_at: Option<(usize, u64)>,
    /// Called at each [`crate::run::FaultPoint`].
    pub watcher: Option<Watcher>,
    /// Parameters by global name; those that it lacks start at random.
    pub initial: Option<Arc<Weights>>,
    /// Weights that training starts from, of the same model.
    pub pretrained: Option<Arc<PretrainedWeights>>,
    /// The processes over which the ranks are spread in order; `None`: all ranks are threads of this process.
    pub processes: Option<Arc<Processes>>,
    /// Bind rank threads to the cores that topology deals them.
    pub bind: bool,
    /// When true, every rank ends after the step that is running, or the batch of an evaluation; before the first step as
    /// soon as each rank hears of it.
    pub stop: Arc<AtomicBool>,
    /// A collective that a rank does not reach in this time is an error; `None`: in ten minutes.
    pub timeout: Option<Duration>,
    /// Called if the run has failed and the thread of a rank does not end: it waits for something that never comes, and only the
    /// end of the process helps.
    pub stuck: Option<StuckHandler>,
    /// The time before that call if a checkpoint is being written and makes no progress; `None`: ten minutes.
    pub stuck_save: Option<Duration>,
    /// Least time between checkpoints by `train.checkpoint_overhead`, and before the first; `None`: ten minutes.
    pub checkpoint_pause: Option<Duration>,
    /// The directory into which the weights are written, if any; `train.weights` says when.
    pub weights: Option<Arc<LockedRunDir>>,
    /// Where checkpoints go, if anywhere.
    pub checkpoints: Option<RunFolder>,
    /// Whether ranks copy their states and go on while these are written, as a plan has decided; `None`: decided when the run
    /// starts.
    pub copies_states: Option<bool>,
    /// The checkpoint that the run resumes from, of the same model.
    pub resume: Option<Arc<Checkpoint>>,
    /// The steps after which the run was rolled back; `None`: those that the checkpoint knows.
    pub rollback_history: Option<RollbackHistory>,
    /// Number of skipped steps in a row before the first step of this run; `None`: the number that the checkpoint knows.
    pub skipped_in_a_row: Option<u64>,
}

impl RunOptions {
    pub(crate) fn rollback_history(&self) -> RollbackHistory {
        let stored = || self.resume.as_ref().map(|from| from.manifest().rollback_history.clone());
        self.rollback_history.clone().or_else(stored).unwrap_or_default()
    }

    pub(crate) fn skipped_in_a_row(&self) -> u64 {
        let stored = || self.resume.as_ref().map_or(0, |from| from.manifest().skipped_in_a_row);
        self.skipped_in_a_row.unwrap_or_else(stored)
    }
}
