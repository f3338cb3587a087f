//! Runs from the first step to the last: checkpoints, stops, resumption, watching.

#[path = "../common/mod.rs"]
mod common;

mod best;
mod checkpoint_commands;
mod checkpoints;
mod compatibility;
mod cuda;
mod directories;
mod matmuls;
mod proof;
mod rise;
mod runs;
mod stops;
mod watching;
