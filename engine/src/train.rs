//! What one rank walks: its layout, its initial weights, its batches, the learning rate, and who puts them together.

pub mod batch;
pub mod build;
pub mod detours;
pub(crate) mod init;
pub(crate) mod runs;
pub mod schedule;
pub(crate) mod trainer;
