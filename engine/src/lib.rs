//! The loop: config, plan, step, rank threads, data, metrics and the command line of onebox.
//!
//! `step.rs` is the place to start reading.

pub mod batch;
pub mod build;
pub mod cli;
pub mod config;
pub mod data;
mod export;
pub mod generate;
mod gpu;
mod init;
pub mod metrics;
mod places;
pub mod plan;
pub mod progress;
pub mod run;
pub mod run_dir;
pub mod schedule;
mod step;
