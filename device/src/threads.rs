//! Threads, whatever they work for.
//!
//! `thread_team`: threads that help with kernels. `spin_wait`: how threads wait for each other. `panics`: records of panics.

pub mod panics;
pub(crate) mod spin_wait;
pub(crate) mod thread_team;
