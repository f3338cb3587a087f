//! The box: which CPU cores and NUMA nodes a machine has, how much memory is free, where each rank goes, and how a
//! thread is bound there.
//!
//! [`Machine::discover`] makes a plain description once, at start-up; [`place_ranks`] shares it out; each rank thread
//! then calls [`bind_current_thread`] before it allocates anything, so that its memory lands on its own node.
//!
//! Cores and binding come from hwloc through the `hwloc2` crate. That crate cannot list NUMA nodes (it panics,
//! Ichbinjoe/hwloc2-rs#3), so those are read from Linux sysfs. Some of its safe functions are unsound
//! (`TopologyObject::name`, `Display for TopologyObject`, `cpuset`, `nodeset`, `cache_attributes`); only `hwloc.rs`
//! touches the crate, it uses none of them, and no hwloc type leaves it.

mod bind;
mod error;
mod hwloc;
mod machine;
mod memory;
mod place;
pub mod units;

pub use bind::{bind_current_thread, current_binding};
pub use error::Error;
pub use machine::{Core, Machine, NumaNode};
pub use memory::available_memory;
pub use place::{RankPlace, place_ranks};
pub use units::{format_bytes, parse_bytes};
