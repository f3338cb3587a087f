//! The rank threads of a process, on every backend: how they meet, the state that their lanes
//! share.
//!
//! `communicator`: ranks meet for collectives, and learn of failures; `rendezvous`: one place where they meet. `processes`:
//! the processes of a run, which `mpi` joins; `remote`: the ranks of the others; `wire`: the messages between them.
//! `rank_state`: a rank's lanes. `memory`: its arenas.
//! `queue`: jobs of a lane. `trace`: times of ops. `patience`: times of waiting.

pub(crate) mod communicator;
pub(crate) mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
pub(crate) mod patience;
pub(crate) mod processes;
pub(crate) mod queue;
pub(crate) mod rank_state;
pub(crate) mod remote;
pub(crate) mod rendezvous;
pub(crate) mod trace;
pub(crate) mod wire;
