//! What a caller may ask of a run besides its config; most of it is for tests.

use crate::checkpoint::detours::Detours;
use crate::checkpoint::{Checkpoint, RunFolder};
use crate::files::held::Held;
use crate::hugging_face::Pretrained;
use crate::run::RunError;
use crate::run::fault_point::Watcher;
use crate::train::init::Weights;
use device::Lane;
use device::Processes;
use device::Trace;
use device::cpu::Lanes;
use device::cuda::Collectives;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// How long a failed run is waited for, and what is called then.
pub type Stuck = (Duration, fn(&RunError));

/// What a caller may ask of a run besides its config.
#[derive(Clone, Debug)]
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
    /// Told where ranks are: see [`crate::run::Place`].
    pub watcher: Option<Watcher>,
    /// Parameters by global name; those that it lacks start at random.
    pub initial: Option<Arc<Weights>>,
    /// Weights that training starts from, of the same model.
    pub pretrained: Option<Arc<Pretrained>>,
    /// The processes to which the ranks are dealt in order; `None`: all are threads of this one.
    pub processes: Option<Arc<Processes>>,
    /// Bind rank threads to the cores that topology deals them.
    pub bind: bool,
    /// When true, every rank ends after the step that is running, or the batch of an evaluation; before the first step as
    /// soon as each rank hears of it.
    pub stop: Arc<AtomicBool>,
    /// A collective that a rank does not come to for so long is an error.
    pub timeout: Duration,
    /// Called when the run has failed and a rank's thread does not end for so long: it is stuck where no one can
    /// wake it, and so is who waits for it. Nothing but the process's end helps.
    pub stuck: Option<Stuck>,
    /// Likewise when a checkpoint is being written beside a run that has failed and does not move for so long.
    pub stuck_save: Duration,
    /// Least time between checkpoints by `train.checkpoint_overhead`, and before the first.
    pub checkpoint_pause: Duration,
    /// The directory into which the weights are written, if any; `train.weights` says when.
    pub weights: Option<Arc<Held>>,
    /// Where checkpoints go, if anywhere.
    pub checkpoints: Option<RunFolder>,
    /// Whether ranks copy their states and go on while these are written, as a plan has decided; `None`: decided when the run
    /// starts.
    pub copies_states: Option<bool>,
    /// What the run goes on from; of the same model.
    pub resume: Option<Arc<Checkpoint>>,
    /// Where samples are not those of the seed alone; `None`: as what it goes on from knows.
    pub detours: Option<Detours>,
    /// Skipped steps in a row that the first one of this run follows; `None`: as what it goes on from knows.
    pub skipped_in_a_row: Option<u64>,
}

impl RunOptions {
    pub(crate) fn detours(&self) -> Detours {
        let stored = || self.resume.as_ref().map(|from| from.detours().clone());
        self.detours.clone().or_else(stored).unwrap_or_default()
    }

    pub(crate) fn skipped_in_a_row(&self) -> u64 {
        let stored = || self.resume.as_ref().map_or(0, |from| from.skipped_in_a_row());
        self.skipped_in_a_row.unwrap_or_else(stored)
    }
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            lanes: Lanes::Inline,
            collectives: Collectives::Auto,
            trace: None,
            slow: None,
            panic_at: None,
            stall_at: None,
            leave_at: None,
            change_at: None,
            watcher: None,
            initial: None,
            pretrained: None,
            processes: None,
            bind: false,
            stop: Arc::default(),
            timeout: Duration::from_secs(600),
            stuck: None,
            stuck_save: Duration::from_secs(600),
            checkpoint_pause: Duration::from_secs(600),
            weights: None,
            checkpoints: None,
            copies_states: None,
            resume: None,
            detours: None,
            skipped_in_a_row: None,
        }
    }
}
