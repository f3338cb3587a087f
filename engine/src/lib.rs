//! The training loop: one step in program order, the ranks that walk it, what they save and write.
//!
//! Start with `step.rs`: one training step in program order.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod append_file;
pub mod dry_run;
pub mod memory;
pub mod metrics;
pub mod run;
pub mod run_dir;
mod step;
pub mod tensorboard;
pub mod train;
mod trainer;

use std::time::Duration;

/// Time that a rank waits for others by default, before the run fails.
const TIMEOUT: Duration = Duration::from_secs(600);
