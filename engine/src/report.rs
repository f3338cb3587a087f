//! What a run shows and writes while it goes on: metrics, progress, traces.

pub(crate) mod appended;
pub(crate) mod colour;
pub(crate) mod curves;
pub mod metrics;
pub(crate) mod page;
pub(crate) mod plot;
pub mod progress;
pub(crate) mod reading;
pub(crate) mod stderr;
pub mod tensorboard;
pub mod trace;
