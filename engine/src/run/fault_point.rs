//! Points in a run at which tests inject faults, and a caller learns that ranks react to a stop.

use std::fmt;
use std::sync::Arc;

/// A point that the thread of a rank reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultPoint {
    /// The device is open; it has no states yet.
    Opened,
    /// The states are loaded: initial states, or the states of a checkpoint.
    Loaded,
    /// The rank is about to submit a step.
    Step,
    /// A step is decided, and its report is not sent yet.
    Decided,
    /// The rank has done its step, and is about to save its states.
    Saving,
    /// The rank's file is about to be written, by the rank's thread or the thread that writes its
    /// copy.
    Writing,
    /// The rank's states are copied, or its file is written.
    Saved,
    /// The files of the checkpoint are written, and the checkpoint has no name yet. The thread that
    /// writes copies reaches this point, or rank 0's thread.
    Naming,
    /// The rank is about to evaluate.
    Evaluating,
    /// The rank is about to gather the states at the end.
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

/// Function that is called with rank, point and step whenever a rank reaches a point.
#[derive(Clone)]
pub struct Watcher(Arc<dyn Fn(usize, FaultPoint, u64) + Send + Sync>);

impl Watcher {
    /// Makes a watcher that calls `f`.
    pub fn new(f: impl Fn(usize, FaultPoint, u64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// Calls the function: a rank reaches a point.
    pub fn reach(&self, rank: usize, point: FaultPoint, step: u64) {
        (self.0)(rank, point, step);
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
