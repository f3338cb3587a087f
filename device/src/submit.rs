//! The submission of ops: events order them, the hazard check admits them, an executor runs them.
//!
//! `device`: the handle of a rank, and the interface of a backend. `hazard`: the check. `bulk`:
//! large reads and writes between steps. [`recorder`]: an executor that only counts or lists ops.
//! [`warm`]: the distinct ops of a program, which run before step 1. [`lockstep`]: each op on two
//! devices, and a comparison of its results.

pub(crate) mod bulk;
pub(crate) mod device;
pub(crate) mod hazard;
pub mod lockstep;
pub mod recorder;
pub mod warm;
