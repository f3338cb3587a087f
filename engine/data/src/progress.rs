//! Progress of long work, for a display.

use std::fmt;

/// Receiver of the progress of long work.
pub trait Progress: fmt::Debug + Sync {
    /// A read of `bytes` bytes begins; `what` is the work, such as `checking data`.
    fn begin(&self, what: &'static str, bytes: u64) -> Box<dyn Reading>;

    /// Work of `steps` steps begins; 0 if their number is not known.
    fn begin_steps(&self, what: &'static str, steps: u64) -> Box<dyn Reading>;
}

/// Progress of one work, which ends when the value is dropped. Several threads may add to the same
/// progress.
pub trait Reading: fmt::Debug + Sync {
    /// Adds a number of finished bytes or steps.
    fn add(&self, finished: u64);
}

/// A receiver that ignores all progress.
#[derive(Clone, Copy, Debug)]
pub struct Silence;

impl Progress for Silence {
    fn begin(&self, _: &'static str, _: u64) -> Box<dyn Reading> {
        Box::new(Self)
    }

    fn begin_steps(&self, _: &'static str, _: u64) -> Box<dyn Reading> {
        Box::new(Self)
    }
}

impl Reading for Silence {
    fn add(&self, _: u64) {}
}
