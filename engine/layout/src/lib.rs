//! Turns a config into the memory plan of a rank, and describes the machine of the run.

// Only the crate `files` opens, creates, reads and renames files.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod attention;
pub mod batches;
pub mod build;
pub mod decoder_parts;
mod frozen_rules;
mod frozen_tensors;
mod glob;
pub mod gpu_memory;
pub mod hardware_queues;
pub mod least;
mod local_machine;
mod local_ranks;
mod machine_rules;
pub mod placement;
pub mod segment_runs;
pub mod tensor_names;

pub use local_machine::LocalMachine;
