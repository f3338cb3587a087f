//! What a run shows and writes while it goes on: metrics, progress, traces.

pub(crate) mod appended;
pub(crate) mod colour;
pub mod metrics;
pub mod progress;
pub(crate) mod shown;
pub(crate) mod stderr;
pub mod tensorboard;
pub mod trace;
