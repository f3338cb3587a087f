//! Memory that a run needs on this machine, and the writer of checkpoints that this memory allows.

mod data;
mod host_overhead;
mod saving;
pub(crate) mod windows;

pub use data::DataMemory;
pub use host_overhead::{process_messages, process_overhead};
pub use saving::{checkpoint_copy, decided, saved_states, saving};

use config::{Config, DeviceConfig};
use layout::build::{RankLayout, device_bytes, device_limit};
use layout::placement::place_on;
use serde::Serialize;
use std::collections::BTreeMap;
use topology::{HostBytes, Machine, NumaNode, Placement, RankPlace};

/// Name, used bytes and limit in bytes of a memory.
pub type MemoryUse = (String, u64, u64);

/// Use of a NUMA node's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Number of the node.
    pub node: u32,
    /// Ranks that have memory on the node.
    pub ranks: Vec<usize>,
    /// Planned bytes, including the memory of virtual GPUs.
    pub bytes: u64,
    /// Bytes of the node; on this machine, bytes that are free or can be freed.
    pub limit: u64,
}

/// Use of every memory by a run, from one look at the free memory.
#[derive(Debug)]
pub struct Memories {
    /// Bytes of each rank's copy of its states; 0 without copies.
    pub copy: u64,
    /// NUMA nodes of the host.
    pub nodes: Vec<Node>,
    /// Reasons for a placement of ranks that is not obvious.
    pub placed: Vec<String>,
    /// Use of each memory that has a limit.
    pub limited: Vec<MemoryUse>,
}

impl Memories {
    /// Whether each memory of the host is large enough.
    pub(crate) fn host_fits(&self) -> bool {
        self.limited.iter().all(|(name, bytes, limit)| name == GPU || bytes <= limit)
    }
}

/// Name of a GPU's memory in [`Memories::limited`].
pub const GPU: &str = "gpu";

/// Whether no memory exceeds its limit.
pub fn all_fit(memories: &[MemoryUse]) -> bool {
    memories.iter().all(|(_, bytes, limit)| bytes <= limit)
}

/// Use of the host's memory by the ranks of a run.
#[derive(Debug, Default)]
pub struct HostNodes {
    /// NUMA nodes of the host.
    pub nodes: Vec<Node>,
    /// Reasons for a placement of ranks that is not obvious.
    pub placed: Vec<String>,
    /// Bytes and limit of all nodes together, which may be tighter than the limits of the nodes.
    pub whole: Option<(u64, u64)>,
}

impl Memories {
    /// Use of all memories if each rank keeps a copy of `copy` bytes, which `nodes` includes.
    fn new(config: &Config, built: &RankLayout, copy: u64, nodes: HostNodes) -> Self {
        let HostNodes { nodes, placed, whole } = nodes;
        let gpu = device_bytes(config, &built.plan);
        let gpu = device_limit(config, built).map(|limit| (GPU.to_owned(), gpu, limit));
        let node = |n: &Node| (format!("node {}", n.node), n.bytes, n.limit);
        let whole = whole.map(|(bytes, limit)| ("host".to_owned(), bytes, limit));
        let limited = gpu.into_iter().chain(nodes.iter().map(node)).chain(whole).collect();
        Self { copy, nodes, placed, limited }
    }
}

/// Use of this machine's nodes by the ranks. Each rank has a checkpoint copy of `copy` bytes in
/// addition to the plan.
pub fn of_this_machine(config: &Config, built: &RankLayout, copy: u64) -> HostNodes {
    let host = built.host_bytes(config);
    let planned = (host.staging + host.states + copy) * built.machine.ranks(config) as u64;
    let data = DataMemory::of(config).ok().flatten().unwrap_or_default();
    let data = (planned + data.tokens + data.documents).max(data.reading);
    let bytes = data + process_overhead(config, built, planned);
    let whole = Some((bytes, topology::available_memory()));
    let nowhere = HostNodes { whole, ..HostNodes::default() };
    let Some(machine) = built.machine.topology() else { return nowhere };
    let (wanted, gpus) = (built.machine.request(config, host), built.machine.gpus(config));
    let placed = place_on(machine, &wanted, &gpus);
    let Ok((Placement { ranks, sockets, .. }, _)) = placed else { return nowhere };
    let with_copy = HostBytes { states: host.states + copy, ..host };
    HostNodes { nodes: of_machine(machine, &ranks, with_copy), placed: sockets, whole }
}

/// Use of the nodes of `machine`: the memory of each rank is on the nodes of its arena. The limit
/// of a node is its free memory.
pub fn of_machine(machine: &Machine, ranks: &[RankPlace], host: HostBytes) -> Vec<Node> {
    let of_rank = |place: &RankPlace| place.bytes_by_node(machine, host);
    let bytes: Vec<BTreeMap<u32, u64>> = ranks.iter().map(of_rank).collect();
    let limit = |node: &NumaNode| (node.id, node.free_bytes.unwrap_or(node.memory_bytes));
    by_node(machine.numa_nodes.iter().map(limit), &bytes)
}

/// Use of the nodes: `limits` has their numbers and limits, `ranks` the bytes of each rank by node.
pub fn by_node(
    limits: impl Iterator<Item = (u32, u64)>,
    ranks: &[BTreeMap<u32, u64>],
) -> Vec<Node> {
    let node = |(node, limit): (u32, u64)| {
        let on = |(rank, of): (usize, &BTreeMap<u32, u64>)| Some((rank, *of.get(&node)?));
        let (ranks, bytes): (Vec<usize>, Vec<u64>) =
            ranks.iter().enumerate().filter_map(on).unzip();
        Node { node, bytes: bytes.iter().sum(), ranks, limit }
    };
    limits.map(node).collect()
}

/// Whether the GPUs are virtual, so that their memory is host memory.
pub fn is_virtual(config: &Config) -> bool {
    matches!(config.device, DeviceConfig::Cpu { .. })
}
