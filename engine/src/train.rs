//! What one rank walks: its layout, its initial weights, its batches, the learning rate, and who puts them together.

pub mod batch;
pub(crate) mod init;
pub mod schedule;
pub(crate) mod trainer;
