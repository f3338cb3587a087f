//! Progress of checkpoint writes: a failed run waits for a write as long as the write advances.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Progress of all checkpoint writes of a run.
#[derive(Debug, Default)]
pub struct SaveProgress {
    writers: AtomicUsize,
    /// Counter that grows with every block written and every file synced.
    moved: AtomicU64,
}

/// Guard that counts as one running checkpoint write until it is dropped.
#[derive(Debug)]
pub struct SaveGuard(Arc<SaveProgress>);

impl SaveProgress {
    /// Registers a checkpoint write, which lasts until the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> SaveGuard {
        self.writers.fetch_add(1, Ordering::SeqCst);
        SaveGuard(Arc::clone(self))
    }

    /// Records that a part of a write is done.
    pub(crate) fn moves(&self) {
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// A counter that grows during a checkpoint write; `None` if no write is running.
    pub fn progress(&self) -> Option<u64> {
        (self.writers.load(Ordering::SeqCst) > 0).then(|| self.moved.load(Ordering::Relaxed))
    }
}

impl Drop for SaveGuard {
    fn drop(&mut self) {
        self.0.writers.fetch_sub(1, Ordering::SeqCst);
    }
}
