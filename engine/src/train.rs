//! The parts of a rank's training: its layout, initial weights, batches, learning rate, and the trainer that joins them.

pub mod batch;
pub mod build;
pub mod detours;
pub(crate) mod init;
pub(crate) mod runs;
pub mod schedule;
pub(crate) mod trainer;
