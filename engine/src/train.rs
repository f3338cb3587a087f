//! The parts of a rank's training: its initial states, batches, and learning rate.

pub mod batch;
pub mod initial_states;
pub mod learning_rate;
