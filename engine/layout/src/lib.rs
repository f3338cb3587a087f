//! From a config to the plan of a rank, and the machine on which it runs.

pub mod batches;
pub mod build;
pub mod gpu;
pub mod gpu_room;
pub mod here;
pub mod placement;
pub mod runs;
