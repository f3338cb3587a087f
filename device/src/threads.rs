//! Threads, independent of their work.
//!
//! `thread_team`: helpers of kernels. `spin_wait`: waits of threads. `panics`: records of panics.

pub mod panics;
pub(crate) mod spin_wait;
pub(crate) mod thread_team;
