//! What a run takes of the memories of this machine, and how its checkpoints are written, which depends on that.

mod data;
mod host_overhead;
mod saving;
pub(crate) mod windows;

pub use data::DataMemory;
pub use host_overhead::{beside, letters};
pub use saving::{checkpoint_copy, decided, saved_states, saving};

use config::{Config, DeviceConfig};
use layout::build::{RankLayout, device_bytes, device_limit};
use layout::placement::place_on;
use serde::Serialize;
use std::collections::BTreeMap;
use topology::{HostBytes, Machine, NumaNode, Placement, RankPlace};

/// (name, bytes, limit) of a memory.
pub type MemoryUse = (String, u64, u64);

/// A NUMA node's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its number.
    pub node: u32,
    /// Whose memory it holds.
    pub ranks: Vec<usize>,
    /// Planned bytes; with the virtual GPUs' own, where there are no real ones.
    pub bytes: u64,
    /// Bytes it has; of this machine, those that are free or can be.
    pub limit: u64,
}

/// What a run takes of every memory, as looked at once.
#[derive(Debug)]
pub struct Memories {
    /// Bytes of each rank's copy of its states; 0: none.
    pub copy: u64,
    /// NUMA nodes of the host.
    pub nodes: Vec<Node>,
    /// Why ranks are there, where that is not plain.
    pub placed: Vec<String>,
    /// Everything that has a limit.
    pub limited: Vec<MemoryUse>,
}

impl Memories {
    /// Whether the host's memories hold what they must.
    pub(crate) fn host_fits(&self) -> bool {
        self.limited.iter().all(|(name, bytes, limit)| name == GPU || bytes <= limit)
    }
}

/// The name of a GPU's memory among those that have a limit.
pub const GPU: &str = "gpu";

/// Whether none has more than its limit.
pub fn all_fit(memories: &[MemoryUse]) -> bool {
    memories.iter().all(|(_, bytes, limit)| bytes <= limit)
}

/// The host's memory under the ranks of a run.
#[derive(Debug, Default)]
pub struct HostNodes {
    /// NUMA nodes of the host.
    pub nodes: Vec<Node>,
    /// Why ranks are there, where that is not plain.
    pub placed: Vec<String>,
    /// Bytes against limit of all nodes together, where that limit is a tighter one.
    pub whole: Option<(u64, u64)>,
}

impl Memories {
    /// The memories where each rank keeps a copy of `copy` bytes, on `nodes` that count it.
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

/// The nodes of this machine under the ranks, each of which has `copy` bytes more than the plan says for a checkpoint.
pub fn of_this_machine(config: &Config, built: &RankLayout, copy: u64) -> HostNodes {
    let host = built.host_bytes(config);
    let planned = (host.staging + host.states + copy) * built.machine.ranks(config) as u64;
    let data = DataMemory::of(config).ok().flatten().unwrap_or_default();
    let data = (planned + data.tokens + data.documents).max(data.reading);
    let bytes = data + beside(config, built, planned);
    let whole = Some((bytes, topology::available_memory()));
    let nowhere = HostNodes { whole, ..HostNodes::default() };
    let Some(machine) = built.machine.topology() else { return nowhere };
    let (wanted, gpus) = (built.machine.request(config, host), built.machine.gpus(config));
    let placed = place_on(machine, &wanted, &gpus);
    let Ok((Placement { ranks, sockets, .. }, _)) = placed else { return nowhere };
    let with_copy = HostBytes { states: host.states + copy, ..host };
    HostNodes { nodes: of_machine(machine, &ranks, with_copy), placed: sockets, whole }
}

/// The nodes of `machine`, with the memory of each rank where its arena has them, against what is free there.
pub fn of_machine(machine: &Machine, ranks: &[RankPlace], host: HostBytes) -> Vec<Node> {
    let of_rank = |place: &RankPlace| place.bytes_by_node(machine, host);
    let bytes: Vec<BTreeMap<u32, u64>> = ranks.iter().map(of_rank).collect();
    let limit = |node: &NumaNode| (node.id, node.free_bytes.unwrap_or(node.memory_bytes));
    by_node(machine.numa_nodes.iter().map(limit), &bytes)
}

/// Nodes of (number, limit), and what each rank has on them.
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

/// Whether the GPUs are virtual ones, which are memory of the host.
pub fn is_virtual(config: &Config) -> bool {
    matches!(config.device, DeviceConfig::Cpu { .. })
}
