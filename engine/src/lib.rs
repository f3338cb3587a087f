//! The training loop: one step in program order, the threads of the ranks, and the files of a run.
//!
//! Start with `step.rs`: one training step in program order.

// The crate `files` opens, creates, reads and renames all files.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod append_file;
pub mod dry_run;
pub mod memory;
pub mod metrics;
pub mod proof;
pub mod run;
pub mod run_dir;
mod step;
pub mod tensorboard;
pub mod train;
mod trainer;

use std::time::Duration;

/// Default time that a rank waits for other ranks before the run fails.
const TIMEOUT: Duration = Duration::from_secs(600);
