//! The loop: config, plan, step, rank threads, data, metrics and the command line of onebox.
//!
//! Start with `step.rs`: one training step in program order. Then, in the order in which a run meets them:
//!
//! 1. `cli`: a command, its arguments, its exit code;
//! 2. [`config`]: a RON file becomes a checked [`Config`](config::Config);
//! 3. [`data`]: files become tokens;
//! 4. [`train`]: what one rank walks: its layout, initial weights, batches, learning rate;
//! 5. [`run`]: the rank threads, and what they hear and say;
//! 6. [`run_dir`], [`checkpoint`], [`report`]: what a run writes;
//! 7. [`predict`]: plan, search and simulation, which send the same step through other devices;
//! 8. [`mod@bench`], [`generate`], [`hugging_face`]: what else a user asks for.

pub mod bench;
pub mod chat;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod dry_run;
pub mod files;
pub mod generate;
pub mod hugging_face;
pub mod layout;
pub mod memory;
pub mod parsers;
pub mod predict;
pub mod report;
pub mod run;
pub mod run_dir;
mod save;
mod step;
pub mod train;
