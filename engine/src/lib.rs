//! The loop: config, plan, step, rank threads, data, metrics and the command line of onebox.
//!
//! `step.rs` is the place to start reading.

pub mod batch;
pub mod bench;
pub mod boxes;
pub mod build;
pub mod calibrate;
pub mod changes;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod detours;
mod evaluate;
mod export;
pub mod generate;
mod gpu;
mod host_jobs;
pub mod hugging_face;
mod init;
mod load;
mod messages;
pub mod metrics;
mod open;
mod options;
mod outcome;
mod output;
mod own;
pub mod parsers;
mod place;
mod places;
pub mod plan;
pub mod progress;
pub mod rehearsal;
pub mod remedies;
pub mod run;
pub mod run_dir;
pub mod schedule;
pub mod search;
mod shown;
pub mod simulate;
mod stderr;
mod step;
mod stop;
pub mod trace;
mod trainer;
