//! Runs from the first step to the last: checkpoints, stops, resumption, watching.

#[path = "../common/mod.rs"]
mod common;

mod checkpoint_commands;
mod checkpoints;
mod compatibility;
mod cuda;
mod directories;
mod runs;
mod stops;
mod watching;
