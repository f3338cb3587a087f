//! From a config to the plan of a rank, and the machine on which it runs.

pub mod batches;
pub mod build;
pub(crate) mod gpu;
pub(crate) mod gpu_room;
pub(crate) mod here;
pub(crate) mod placement;
pub(crate) mod runs;
