//! Where a rank's own thread is: for tests that have something go wrong there, and for who waits until ranks hear of a stop.

use std::fmt;
use std::sync::Arc;

/// A place in a run, outside of the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Its device is open; no state is there yet.
    Opened,
    /// Its states are there, fresh or from a checkpoint.
    Loaded,
    /// About to submit a step.
    Step,
    /// A step is decided and not told yet.
    Decided,
    /// The other ranks have come to save with it.
    Saving,
    /// About to write its file: itself, or on the thread that writes its copy.
    Writing,
    /// Its states are copied, or its file is written.
    Saved,
    /// On the thread that writes copies, or on rank 0's: the files are there, the name is not.
    Naming,
    /// About to evaluate.
    Evaluating,
    /// About to put the states together at the end.
    Ending,
}

impl Place {
    /// Every one.
    pub const ALL: [Self; 10] = [
        Self::Opened,
        Self::Loaded,
        Self::Step,
        Self::Decided,
        Self::Saving,
        Self::Writing,
        Self::Saved,
        Self::Naming,
        Self::Evaluating,
        Self::Ending,
    ];
}

/// Called with rank, place and step wherever a rank comes by.
#[derive(Clone)]
pub struct Watcher(Arc<dyn Fn(usize, Place, u64) + Send + Sync>);

impl Watcher {
    /// That calls `f`.
    pub fn new(f: impl Fn(usize, Place, u64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// A rank comes by.
    pub fn passes(&self, rank: usize, place: Place, step: u64) {
        (self.0)(rank, place, step);
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
