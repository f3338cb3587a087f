//! Output of the program: progress, messages, reports, plots and traces.

pub(crate) mod colour;
pub(crate) mod curves;
pub(crate) mod eval_line;
pub(crate) mod message;
pub(crate) mod page;
pub(crate) mod plot;
pub mod progress;
pub(crate) mod reading;
pub(crate) mod stage;
pub(crate) mod stderr;
pub mod trace;
