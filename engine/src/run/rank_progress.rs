//! Progress of a rank between steps.

/// Progress of a rank.
pub(super) struct RankProgress {
    /// Last finished step.
    pub(super) step: u64,
    /// Whether a stop was requested: no step follows.
    pub(super) stopped: bool,
    /// Whether too many steps in a row were skipped: no step follows.
    pub(super) diverged: bool,
    /// Whether `train.patience` ends the run: no step follows.
    pub(super) out_of_patience: bool,
}

impl RankProgress {
    pub(super) const fn at(step: u64) -> Self {
        Self { step, stopped: false, diverged: false, out_of_patience: false }
    }

    pub(super) const fn goes_on(&self) -> bool {
        !self.stopped && !self.diverged && !self.out_of_patience
    }
}
