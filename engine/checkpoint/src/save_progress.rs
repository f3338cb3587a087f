//! Whether a checkpoint is being written, and that it moves: a run that has failed waits for it as long as it does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Of the checkpoints of a run.
#[derive(Debug, Default)]
pub struct SaveProgress {
    writers: AtomicUsize,
    /// Grows with every block that is written and every file that is synced.
    moved: AtomicU64,
}

/// While this lives, a checkpoint that can become whole is being written.
#[derive(Debug)]
pub struct SaveGuard(Arc<SaveProgress>);

impl SaveProgress {
    /// A checkpoint is being written from now on.
    pub fn begin(self: &Arc<Self>) -> SaveGuard {
        self.writers.fetch_add(1, Ordering::SeqCst);
        SaveGuard(Arc::clone(self))
    }

    /// A part of it is done.
    pub(crate) fn moves(&self) {
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that grows while a checkpoint is being written; `None` when none is.
    pub fn progress(&self) -> Option<u64> {
        (self.writers.load(Ordering::SeqCst) > 0).then(|| self.moved.load(Ordering::Relaxed))
    }
}

impl Drop for SaveGuard {
    fn drop(&mut self) {
        self.0.writers.fetch_sub(1, Ordering::SeqCst);
    }
}
