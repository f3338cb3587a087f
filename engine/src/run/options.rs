//! Options of a run that are not in its config; most are for tests.

use crate::run::RunError;
use crate::run::fault_point::Watcher;
use crate::train::initial_states::Weights;
use checkpoint::hugging_face::PretrainedWeights;
use checkpoint::manifest::Hash;
use checkpoint::rollback::RollbackHistory;
use checkpoint::{Checkpoint, RunFolder};
use config::{Config, Matmuls};
use device::cpu::Lanes;
use device::cuda::{Collectives, MatmulSelection};
use device::{Lane, Processes, Trace};
use files::held::LockedRunDir;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Handler of a failed run that does not end.
#[derive(Clone, Copy, Debug)]
pub struct StuckHandler {
    /// Time after the failure in which the ranks must end.
    pub after: Duration,
    /// Function that is called after this time.
    pub call: fn(&RunError),
}

/// Options of a run that are not in its config.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Execution mode of the lanes of virtual GPUs.
    pub lanes: Lanes,
    /// Transport of data between real GPUs.
    pub collectives: Collectives,
    /// Recorder of the spans of ops.
    pub trace: Option<Arc<Trace>>,
    /// Host task that is slowed down, for tests: see [`device::HostWork::slow`].
    pub slow: Option<(&'static str, u32)>,
    /// Op that panics, for tests: see [`device::HostWork::panic_at`].
    pub panic_at: Option<(usize, Lane, u64)>,
    /// Op that stalls, for tests: see [`device::HostWork::stall_at`].
    pub stall_at: Option<(usize, Lane, u64, Duration)>,
    /// Rank, and the step before which it returns, for tests.
    pub leave_at: Option<(usize, u64)>,
    /// Rank and step of a parameter change between the two runs of the step, for tests.
    pub change_at: Option<(usize, u64)>,
    /// Function that is called at each [`crate::run::FaultPoint`].
    pub watcher: Option<Watcher>,
    /// Initial parameters by global name; missing parameters start at random.
    pub initial: Option<Arc<Weights>>,
    /// Weights that training starts from, of the same model. A run with frozen parameters needs
    /// them to resume, too.
    pub pretrained: Option<Arc<PretrainedWeights>>,
    /// Processes over which the ranks are spread in order; `None`: all ranks are threads of this
    /// process.
    pub processes: Option<Arc<Processes>>,
    /// Whether rank threads are bound to the cores that topology deals to them.
    pub bind: bool,
    /// Request to stop. If it is true, every rank ends after the running step or batch of an
    /// evaluation. Before the first step, a rank ends when it reads the request.
    pub stop: Arc<AtomicBool>,
    /// Deadline for a rank to reach a collective, after which the run fails; `None`: ten minutes.
    pub timeout: Option<Duration>,
    /// Handler of a failed run in which the thread of a rank does not end. The thread then waits
    /// for an event that never comes, and only the end of the process helps.
    pub stuck: Option<StuckHandler>,
    /// Time before the call of `stuck` if a checkpoint write makes no progress; `None`: ten
    /// minutes.
    pub stuck_save: Option<Duration>,
    /// Shortest time between checkpoints by `train.checkpoint_overhead`, and before the first one;
    /// `None`: ten minutes.
    pub checkpoint_pause: Option<Duration>,
    /// Directory for the weights, if the run may write them; `train.weights` says when.
    pub weights: Option<Arc<LockedRunDir>>,
    /// Folder for checkpoints, if the run may save them.
    pub checkpoints: Option<RunFolder>,
    /// Whether ranks copy their states, and continue while the copies are written, as a plan has
    /// decided; `None`: decided when the run starts.
    pub copies_states: Option<bool>,
    /// The checkpoint that the run resumes from, of the same model.
    pub resume: Option<Arc<Checkpoint>>,
    /// Steps after which the run was rolled back; `None`: the steps that the checkpoint records.
    pub rollback_history: Option<RollbackHistory>,
    /// Number of skipped steps in a row before this run; `None`: the number that the checkpoint
    /// records.
    pub skipped_in_a_row: Option<u64>,
}

impl RunOptions {
    /// Hash of the weights with the frozen parameters of a run, for its checkpoints.
    pub(crate) fn base_hash(&self) -> Option<Hash> {
        self.pretrained.as_ref().and_then(|weights| weights.known_hash()).cloned()
    }

    pub(crate) fn rollback_history(&self) -> RollbackHistory {
        let stored = || self.resume.as_ref().map(|from| from.manifest().rollback_history.clone());
        self.rollback_history.clone().or_else(stored).unwrap_or_default()
    }

    /// How GPUs select the algorithms of matmuls: with the choices of the checkpoint, if it has any.
    pub(crate) fn matmul_selection(&self, config: &Config) -> MatmulSelection {
        match config.matmuls {
            Matmuls::Heuristic => MatmulSelection::Heuristic,
            Matmuls::Timed => {
                let from = self.resume.as_ref().map(|from| from.manifest().matmul_choices());
                let stored = from.map(|read| {
                    let Ok(choices) = read else {
                        unreachable!("a manifest with damaged choices of matmuls is not opened")
                    };
                    choices
                });
                MatmulSelection::timed(stored.flatten())
            }
        }
    }

    pub(crate) fn skipped_in_a_row(&self) -> u64 {
        let stored = || self.resume.as_ref().map_or(0, |from| from.manifest().skipped_in_a_row);
        self.skipped_in_a_row.unwrap_or_else(stored)
    }
}
