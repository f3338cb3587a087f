//! The rank threads of a process, on every backend: their meetings, the state that their lanes
//! share, and their helper threads.
//!
//! `world`: collectives meet, failures spread. `shared`: a rank's lanes. `memory`: its arenas.
//! `queue`: jobs of a lane. `trace`: times of ops. `crew`: kernel threads. `panics`, `patience`:
//! notes of panics, and times of waiting.

pub(crate) mod crew;
pub(crate) mod memory;
pub mod panics;
pub(crate) mod patience;
pub(crate) mod queue;
pub(crate) mod shared;
pub(crate) mod trace;
pub(crate) mod world;
