//! How far a look through long files has come, for whoever shows it.

use std::fmt;

/// Who hears of looks through long files.
pub trait Progress: fmt::Debug + Sync {
    /// A look at so many bytes begins; `what` is being done, such as `checking data`.
    fn begin(&self, what: &'static str, bytes: u64) -> Box<dyn Reading>;
}

/// One look, from its beginning to its end, at which it is dropped. Several threads add to it.
pub trait Reading: fmt::Debug + Sync {
    /// So many more bytes are done.
    fn add(&self, bytes: u64);
}

/// Nobody hears of it.
#[derive(Clone, Copy, Debug)]
pub struct Silence;

impl Progress for Silence {
    fn begin(&self, _: &'static str, _: u64) -> Box<dyn Reading> {
        Box::new(Self)
    }
}

impl Reading for Silence {
    fn add(&self, _: u64) {}
}
