//! The box: NUMA nodes, cores, GPUs and the links between them; where each rank goes; and how threads and memory are
//! put there.
//!
//! [`Machine::discover`] makes a plain description once, at start-up, and [`Machine::from_xml`] one of a box that is
//! elsewhere; [`place`] shares it out; each rank thread then binds itself before it allocates anything, so that
//! its memory lands on its own node. Only [`Live`] binds: it exists for this machine alone.
//!
//! hwloc is reached through the `hwloc2` crate, as far as that is sound: `hwloc.rs` binds threads. The crate cannot load
//! XML, list NUMA nodes (it panics, Ichbinjoe/hwloc2-rs#3), see PCI or bind memory, and some of its safe functions are
//! not (`TopologyObject::name`, `Display for TopologyObject`, `cpuset`, `nodeset`, `cache_attributes`), so
//! `hwloc_ext.rs` declares the dozen functions that are missing. No hwloc type leaves these two files.
//!
//! Read in this order:
//!
//! 1. `machine`: a box as plain data; [`units`]: bytes and speeds as text;
//! 2. `machine/`: how it is made; `hwloc`, `hwloc_ext`, `pci`, `nvml` are its sources, and `raw` what hwloc gives;
//! 3. `guard`, `trial`: a description from outside is checked, and loaded in a child process;
//! 4. `paths`: links and what a shared one leaves; `memory`: what may be allocated;
//! 5. `place`: where each rank goes; `groups` chooses GPUs, `deal` cores;
//! 6. `bind`, `arena`: threads and memory are put there;
//! 7. `warnings`, [`report`]: what is wrong with a box, and how it is shown.

mod arena;
mod bind;
mod cpu_list;
mod deal;
mod error;
mod groups;
mod guard;
mod hwloc;
mod hwloc_ext;
mod machine;
mod memory;
mod nvml;
mod paths;
mod pci;
mod place;
mod raw;
pub mod report;
mod trial;
pub mod units;
mod warning;
mod warnings;

pub use arena::{Arena, ArenaReport, Part};
pub use bind::{Live, bind_current_thread, current_binding};
pub use cpu_list::format_cpu_list;
pub use error::Error;
pub use machine::{Core, Gpu, Machine, NumaNode};
pub use memory::available_memory;
pub use paths::{Hop, Path};
pub use pci::{Link, PciAddress, PciKind, PciNode};
pub use place::{HostBytes, Placement, RankPlace, Request, Seats, Sockets, place, place_ranks};
pub use units::{counted, format_bytes, parse_bytes};
pub use warning::{Severity, Warning};
pub use warnings::{Environment, warnings};
