//! The box: NUMA nodes, cores, GPUs and the links between them; the place of each rank; and the
//! binding of threads and memory.
//!
//! [`Machine::discover`] describes this machine once, at start-up, and [`Machine::from_xml`]
//! describes another box. [`place`] gives each rank its share; each rank thread then binds itself
//! before it allocates, so that its memory is on its own node. Binding always uses this machine: a
//! [`Machine`] cannot bind.
//!
//! The crate reaches hwloc through the `hwloc2` crate if `hwloc2` is sound there: `bind.rs` binds
//! threads. `hwloc2` cannot load XML, list NUMA nodes (it panics, Ichbinjoe/hwloc2-rs#3), see PCI
//! or bind memory, and some of its safe functions are unsound (`TopologyObject::name`, `Display for
//! TopologyObject`, `cpuset`, `nodeset`, `cache_attributes`). `hwloc_ext.rs` therefore declares the
//! dozen missing functions. No hwloc type leaves these two files.
//!
//! Read in this order:
//!
//! 1. `machine`: a box as plain data; [`units`]: bytes and speeds as text;
//! 2. `machine/`: builds the description; `hwloc_ext`, `cpu_kinds`, `pci`, `nvml` are its sources,
//!    and
//!    `raw` holds hwloc's objects;
//! 3. `guard`, `trial`: a description from outside is checked, then loaded in a child process;
//! 4. `paths`: links and the bandwidth of a shared link; `memory`: the memory that may be
//!    allocated;
//! 5. `place`: the place of each rank; `groups` chooses GPUs, `core_shares` cores, `spread` the
//!    nodes of
//!    staging that one node cannot hold;
//! 6. `bind`, `arena`: bind threads and memory;
//! 7. `warnings`, [`report`]: findings about a box, and reports.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod arena;
mod bind;
mod core_shares;
mod cpu_kinds;
mod cpu_list;
mod error;
mod groups;
mod guard;
mod hwloc_ext;
mod infos;
mod kinds;
mod machine;
mod memory;
mod nvml;
mod paths;
mod pci;
mod place;
mod raw;
mod reasons;
pub mod report;
mod spread;
mod trial;
pub mod units;
mod warning;
mod warnings;

pub use arena::{Arena, ArenaReport, Part};
pub use bind::{bind_current_thread, cores, current_binding};
pub use cpu_list::format_cpu_list;
use cpu_list::{ascending, format_nodes};
pub use error::Error;
pub use machine::{Core, CoreKind, Gpu, Machine, NumaNode};
pub use memory::{available_memory, resident_memory};
pub use paths::{Hop, Path};
pub use pci::{Link, PciAddress, PciKind, PciNode};
pub use place::{
    HostBytes, Placement, RankPlace, Request, Seats, Sockets, far_words, place, place_ranks,
};
pub use spread::{Needs, far_staging, in_parts};
pub use units::{counted, format_bytes, parse_bytes, up_to_hundredths};
pub use warning::{Severity, Warning};
pub use warnings::{Environment, warnings};
