//! The rank threads of a process, on every backend: their meetings, the state that their lanes
//! share, and their helper threads.
//!
//! `world`: collectives meet, failures spread; `meeting`: their boards. `processes`: the processes of a run, which `mpi`
//! joins; `far`: the ranks of the others; `letters`: what they tell each other.
//! `shared`: a rank's lanes. `memory`: its arenas.
//! `queue`: jobs of a lane. `trace`: times of ops. `crew`: kernel threads. `look`: how threads wait for each other. `panics`,
//! `patience`: notes of panics, and times of waiting.

pub(crate) mod communicator;
pub(crate) mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod panics;
pub(crate) mod patience;
pub(crate) mod processes;
pub(crate) mod queue;
pub(crate) mod rank_state;
pub(crate) mod remote;
pub(crate) mod rendezvous;
pub(crate) mod spin_wait;
pub(crate) mod thread_team;
pub(crate) mod trace;
pub(crate) mod wire;
