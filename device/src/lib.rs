//! The operations of one GPU, and the backends that run them.
//!
//! **Operations are data, memory belongs to the plan.** A [`Tensor`] is an address in a planned
//! arena; an [`Op`] names tensors; [`Device::submit`] puts ops on [`Lane`]s, [`Event`]s order
//! lanes, and a hazard check refuses unordered ops. An executor runs the ops of a [`Device`]:
//! [`cpu`] has virtual GPUs with real arithmetic, [`cuda`] has real GPUs.
//!
//! Read in this order:
//!
//! 1. `tensor`: tensors, and the [`Plan`] that lays them out;
//! 2. `op`: the operations, lanes and events, tasks of other crates; `op/access.rs` names the
//!    ranges of each op, `op/check.rs` checks its shapes;
//! 3. `submit`: [`Device`] and its executors, the hazard check;
//! 4. `threads`: kernel threads; `ranks`: the rendezvous of rank threads, their memory and queues;
//! 5. [`cpu`]: an executor with its kernels, the reference for all other executors;
//! 6. [`numerics`], [`random`]: arithmetic that is the same everywhere;
//! 7. [`cuda`]: streams, launches, NCCL; the kernels are in `cuda/kernels`;
//! 8. [`recorder`], [`warm`]: count, list or collect ops (the simulator is in `engine/predict`);
//!    [`lockstep`]: compare two devices, op by op;
//! 9. `error`: all errors.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod cpu;
pub mod cuda;
mod error;
pub mod numerics;
mod op;
pub mod random;
mod ranks;
mod submit;
mod tensor;
mod threads;

pub use error::{Error, ErrorKind, Hazard, OutOfMemory, RemoteFailure, Site};
pub use numerics::view::{BLOCK, Element, View, ViewMut};
pub use op::lane::{Clock, Event, LANES, Lane, join};
pub use op::task::{DeviceOp, DeviceTask, HostContext, HostOp, HostTask, KernelArg, KernelCall};
pub use op::{
    BalanceGradient, ColumnShard, DELTA_CHUNK, DeltaHeads, Dropout, Epilogue, ExpertWeights,
    FP8_SINCE, Gate, Group, GroupedForm, HeadNorm, HeadNormGrads, Heads, MAXIMA, MOST_CHOICES,
    MOST_EXPERTS, MOST_TAPS, Mode, Op, PADDING, Reduction, ScoreRule, Scores, SigmoidRule,
    VocabShard, WIDEST_DELTA_KEY, WidthNorm, expert_sort_scratch,
};
pub use ranks::communicator::Communicator;
pub use ranks::memory::HostPlace;
#[cfg(feature = "mpi")]
pub use ranks::mpi;
pub use ranks::processes::{Processes, Wire};
pub use ranks::rank_state::HostWork;
pub use ranks::rank_state::collectives::message_bytes;
pub use ranks::trace::{Span, Trace};
pub use submit::device::{Activity, Device, Rank};
pub use submit::device::{AdmittedOp, Executor};
pub use submit::{lockstep, recorder, warm};
pub use tensor::{Arena, Cargo, Copies, Dtype, Entry, Plan, Pool, Tensor};
pub use threads::panics;
pub use threads::thread_team::{Divisible, ThreadTeam};
