//! The rank threads of a process on every backend: their rendezvous and their lanes' state.
//!
//! `communicator`: collectives between ranks, and reports of failures; `rendezvous`: one rendezvous
//! of a group. `processes`: the processes of a run; `mpi`: their connection by MPI; `remote`: ranks
//! of other processes; `wire`: messages between processes. `rank_state`: a rank's lanes; `memory`:
//! its arenas; `queue`: a lane's jobs. `trace`: times of ops. `patience`: times of waiting.

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
