//! The rank threads of a process, on whatever backend: where they meet, what their lanes share, and the threads that help.
//!
//! `world`: collectives meet, failures spread. `shared`: a rank's lanes. `memory`: its arenas. `queue`: jobs of a lane.
//! `trace`: when ops ran. `crew`: kernel threads. `panics`, `patience`: what went wrong, and how long others wait.

pub(crate) mod crew;
pub(crate) mod memory;
pub mod panics;
pub(crate) mod patience;
pub(crate) mod queue;
pub(crate) mod shared;
pub(crate) mod trace;
pub(crate) mod world;
