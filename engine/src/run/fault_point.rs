//! Points in a run at which tests inject faults, and at which a caller learns that the ranks listen to a stop.

use std::fmt;
use std::sync::Arc;

/// A point that the thread of a rank reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultPoint {
    /// The device is open; there are no states yet.
    Opened,
    /// The states are there, initial ones or those of a checkpoint.
    Loaded,
    /// About to submit a step.
    Step,
    /// A step is decided, and its report is not sent yet.
    Decided,
    /// All ranks have met to save.
    Saving,
    /// About to write the rank's file: on its thread, or on the thread that writes its copy.
    Writing,
    /// The rank's states are copied, or its file is written.
    Saved,
    /// The files of the checkpoint are written, and it has no name yet: on the thread that writes copies, or on rank 0's.
    Naming,
    /// About to evaluate.
    Evaluating,
    /// About to gather the states at the end.
    Ending,
}

impl FaultPoint {
    /// All points.
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

/// A function that is called with rank, point and step whenever a rank reaches a point.
#[derive(Clone)]
pub struct Watcher(Arc<dyn Fn(usize, FaultPoint, u64) + Send + Sync>);

impl Watcher {
    /// Makes a watcher that calls `f`.
    pub fn new(f: impl Fn(usize, FaultPoint, u64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// A rank reaches a point.
    pub fn reach(&self, rank: usize, point: FaultPoint, step: u64) {
        (self.0)(rank, point, step);
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
