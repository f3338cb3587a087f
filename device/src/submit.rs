//! How ops come to a backend: lanes and events order them, the hazard check admits them, an executor runs them.
//!
//! `device`: the handle of a rank, and what a backend must do. `lane`: lanes, events, clocks. `hazard`: the check.
//! `task`: work for the host that other crates bring. `bulk`: large reads and writes between steps. [`recorder`]: an executor
//! that only counts or lists. [`warm`]: one op of each kind, before step 1.

pub(crate) mod bulk;
pub(crate) mod device;
pub(crate) mod hazard;
pub(crate) mod lane;
pub mod recorder;
pub(crate) mod task;
pub mod warm;
