//! Whether a checkpoint is being written, and that it moves: a run that has failed waits for it as long as it does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Of the checkpoints of a run.
#[derive(Debug, Default)]
pub(crate) struct UnderWay {
    writers: AtomicUsize,
    /// Grows with every block that is written and every file that is synced.
    moved: AtomicU64,
}

/// While this lives, a checkpoint that can become whole is being written.
#[derive(Debug)]
pub(crate) struct Writing(Arc<UnderWay>);

impl UnderWay {
    /// A checkpoint is being written from now on.
    pub(crate) fn begin(self: &Arc<Self>) -> Writing {
        self.writers.fetch_add(1, Ordering::SeqCst);
        Writing(Arc::clone(self))
    }

    /// A part of it is done.
    pub(crate) fn moves(&self) {
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that grows while a checkpoint is being written; `None` when none is.
    pub(crate) fn progress(&self) -> Option<u64> {
        (self.writers.load(Ordering::SeqCst) > 0).then(|| self.moved.load(Ordering::Relaxed))
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.writers.fetch_sub(1, Ordering::SeqCst);
    }
}
