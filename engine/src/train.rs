//! The parts of a rank's training: its layout, initial weights, batches, learning rate, and the trainer that joins them.

pub mod batch;
pub mod initial_states;
pub mod learning_rate;
pub mod trainer;
