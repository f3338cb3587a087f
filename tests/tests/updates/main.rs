//! When parameters are updated, and the memory that holds the states.

mod activations;
mod delayed;
mod lanes;
mod memory;
mod overlap;
mod speculative;
