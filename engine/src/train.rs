//! The parts of a rank's training: its layout, initial weights, batches, learning rate, and the trainer that joins them.

pub mod batch;
pub mod init;
pub mod schedule;
pub mod trainer;
