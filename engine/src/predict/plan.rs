//! What a config needs of every GPU and every NUMA node, before anything is allocated: the very handles that a
//! run allocates, and the very step, sent through a device that only counts.

mod beside;
mod data;
mod disk;
mod fill;
mod ops;
mod saving;
mod step;

use beside::{beside, letters};
pub use data::DataMemory;
pub use disk::Disk;
pub use fill::filled;
pub use ops::{Op, Touched, list};
use saving::decided;
pub(crate) use saving::{checkpoint_copy, saved_states};
use step::step;
pub use step::{LaneTotals, Step};
pub(crate) use step::{count, ops_of_step};

use crate::config::{Accumulate, BoxConfig, Config, DeviceConfig};
use crate::predict::boxes;
use crate::run::gpu_room;
use crate::run::here;
use crate::run::placement::{self, this_machine};
use crate::train::build::{RankLayout, device_bytes, device_limit, reserved_bytes, vertical_width};
use device::{Arena, Dtype, Error};
use serde::Serialize;
use std::collections::BTreeMap;
use tensor_parallel::Ring;
use topology::{HostBytes, Machine, NumaNode, Placement, RankPlace, format_bytes};

/// All that `onebox plan` says.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Of the run.
    pub name: String,
    /// Every memory that could be looked at holds what it must.
    #[serde(skip)]
    pub fits: bool,
    /// Whether it fits; `None` where it may and the GPUs' memory could not be looked at.
    #[serde(rename = "fits")]
    pub verdict: Option<bool>,
    /// Why the GPUs' memory could not be looked at.
    pub not_checked: Option<String>,
    /// Of the model, without padding.
    pub parameters: u64,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// `none`, `device` or `host`: where micro-batches are summed.
    pub accumulate: &'static str,
    /// Each GPU; all need the same.
    pub gpu: Memory,
    /// Each rank's part of the host's memory.
    pub host_per_rank: Memory,
    /// Bytes of the host that the process takes besides the plan of all ranks.
    pub host_beside: u64,
    /// Bytes of letters between processes. `host_beside` has them, too.
    #[serde(skip_serializing_if = "is_zero")]
    pub letters: u64,
    /// The host's memory by node.
    pub nodes: Vec<Node>,
    /// What the data takes of the host's memory, where it can be looked at.
    pub data_memory: Option<DataMemory>,
    /// Why it cannot be looked at: the key, the path and the remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_not_counted: Option<String>,
    /// Why ranks are on these nodes, where that is not plain: sentences.
    pub placed: Vec<String>,
    /// How checkpoints are written, where there are any: a sentence.
    pub saving: Option<String>,
    /// Whether ranks copy their states and go on while these are written.
    pub copies_states: bool,
    /// The memory that is nearest its limit.
    pub binding: Binding,
    /// Of each memory that is nearly full, although it fits: a sentence.
    pub nearly_full: Vec<String>,
    /// One optimizer step of rank 0; not counted by [`memory_report`], nor for what does not fit, which may be
    /// of any size.
    pub step: Option<Step>,
}

const fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// A rank's planned part of a memory.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// For messages: `virtual GPUs`.
    pub what: String,
    /// Planned bytes.
    pub bytes: u64,
    /// Bytes that the plan may take, if known.
    pub limit: Option<u64>,
    /// Bytes below the label that are kept back for what lies beside the plan.
    pub reserved: u64,
    /// Of these bytes, what each part takes.
    pub beside: Vec<Pool>,
    /// Bytes by kind, largest first.
    pub pools: Vec<Pool>,
    /// Everything, in order of address.
    pub buffers: Vec<Buffer>,
}

/// Buffers of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Pool {
    /// `parameters`, `optimizer states`, ...
    pub name: &'static str,
    /// Bytes, with the padding between buffers.
    pub bytes: u64,
}

/// One planned tensor.
#[derive(Clone, Debug, Serialize)]
pub struct Buffer {
    /// `block.3.params`
    pub name: String,
    /// Its kind.
    pub pool: &'static str,
    /// `f16`, `bf16`, `f32`, `f64`, `i32`
    pub dtype: &'static str,
    /// Rows and columns.
    pub shape: (usize, usize),
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

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

/// The memory that is nearest its limit.
#[derive(Clone, Debug, Serialize)]
pub struct Binding {
    /// `gpu`, `node 0`, or `host` (all nodes together).
    pub what: String,
    /// Planned bytes.
    pub bytes: u64,
    /// Its limit.
    pub limit: u64,
    /// A sentence.
    pub words: String,
}

/// Plans `config`, whose handles are `built`, and counts a step.
///
/// # Errors
/// A step that its own checks refuse; that is a defect of onebox.
pub fn report(config: &Config, built: &RankLayout) -> Result<Report, Error> {
    let mut report = memory_report(config, built);
    report.step = report.fits.then(|| step(config, built)).transpose()?;
    Ok(report)
}

/// The same without the step, whose counting takes as long as its ops are many.
pub fn memory_report(config: &Config, built: &RankLayout) -> Report {
    let gpu = gpu(config, built);
    let mut host_per_rank = memory("host, per rank", built, Arena::Pinned);
    let memories = decided(config, built);
    let copy = memories.copy;
    if copy > 0 {
        host_per_rank.bytes += copy;
        host_per_rank.pools.push(Pool { name: "checkpoint copy", bytes: copy });
        host_per_rank.pools.sort_by_key(|pool| std::cmp::Reverse(pool.bytes));
    }
    let host = built.host_bytes(config);
    let planned = (host.staging + host.states + copy) * here::ranks(config) as u64;
    let saving = saving::saving(config, built, &memories);
    let Memories { nodes, placed, limited, .. } = memories;
    let binding = binding(&limited, is_virtual(config));
    let (fits, not_checked) = (all_fit(&limited), not_checked(config, built));
    let nearly_full = if fits { fill::warnings(config, &limited) } else { Vec::new() };
    let data = DataMemory::of(config);
    Report {
        name: config.name.clone(),
        fits,
        verdict: (!fits || not_checked.is_none()).then_some(fits),
        not_checked,
        parameters: built.decoder.shape().parameters(),
        tensor: config.parallel.tensor,
        data: config.parallel.data,
        micro_batches: built.micro_batches,
        accumulate: match built.accumulation {
            offload::GradAccumulation::None => "none",
            offload::GradAccumulation::Device | offload::GradAccumulation::Shared => "device",
            offload::GradAccumulation::Host => "host",
        },
        data_memory: data.clone().ok().flatten(),
        data_not_counted: data.err(),
        saving,
        copies_states: copy > 0,
        binding,
        nearly_full,
        step: None,
        gpu,
        host_per_rank,
        host_beside: beside(config, built, planned),
        letters: letters(config, built),
        nodes,
        placed,
    }
}

fn gpu(config: &Config, built: &RankLayout) -> Memory {
    let gpus = if config.world_size() == 1 { "GPU" } else { "GPUs" };
    let what = match &config.device {
        DeviceConfig::Cpu { .. } => format!("virtual {gpus}"),
        DeviceConfig::Cuda => gpus.to_owned(),
        DeviceConfig::Sim { box_, .. } => format!("{gpus} of {}", box_.name),
    };
    let beside = beside_on_gpu(config, built);
    let reserved = beside.iter().map(|pool| pool.bytes).sum();
    let limit = device_limit(config, &built.plan);
    let mut gpu = Memory { limit, reserved, beside, ..memory(&what, built, Arena::Device) };
    let whole = device_bytes(config, &built.plan);
    if whole > gpu.bytes {
        gpu.pools.push(Pool { name: "kernels and products", bytes: whole - gpu.bytes });
        gpu.pools.sort_by_key(|pool| std::cmp::Reverse(pool.bytes));
        gpu.bytes = whole;
    }
    gpu
}

/// What lies on a GPU beside the plan.
fn beside_on_gpu(config: &Config, built: &RankLayout) -> Vec<Pool> {
    let parts = match &config.device {
        DeviceConfig::Cpu { .. } => Vec::new(),
        DeviceConfig::Cuda => {
            gpu_room::memory_budget(config, &built.plan).map_or(Vec::new(), |room| room.overheads)
        }
        DeviceConfig::Sim { box_, .. } => vec![("CUDA context and NCCL", reserved_bytes(box_))],
    };
    let parts = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    parts.map(|(name, bytes)| Pool { name, bytes }).collect()
}

/// Why the GPUs' memory is not looked at, where it is not.
fn not_checked(config: &Config, built: &RankLayout) -> Option<String> {
    let cuda = config.device == DeviceConfig::Cuda;
    cuda.then(|| gpu_room::memory_budget(config, &built.plan).err()).flatten()
}

fn memory(what: &str, built: &RankLayout, arena: Arena) -> Memory {
    let mut pools: Vec<Pool> =
        built.plan.pools(arena).into_iter().map(|(name, bytes)| Pool { name, bytes }).collect();
    pools.sort_by_key(|pool| std::cmp::Reverse(pool.bytes));
    let entries = built.plan.entries().iter().filter(|e| e.arena == arena);
    let buffer = |e: &device::Entry| Buffer {
        name: e.name.clone(),
        pool: e.pool.name,
        dtype: dtype_name(e.dtype),
        shape: e.shape,
        offset: e.range.start,
        bytes: e.range.end - e.range.start,
    };
    Memory {
        what: what.into(),
        bytes: built.plan.bytes(arena),
        limit: None,
        reserved: 0,
        beside: Vec::new(),
        pools,
        buffers: entries.map(buffer).collect(),
    }
}

const fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F16 => "f16",
        Dtype::Bf16 => "bf16",
        Dtype::F32 => "f32",
        Dtype::F64 => "f64",
        Dtype::I32 => "i32",
        Dtype::U16 => "u16",
        Dtype::E4m3 => "e4m3",
        Dtype::E5m2 => "e5m2",
    }
}

/// Whether every memory holds what it must, as in [`memory_report`].
pub(crate) fn fits(config: &Config, built: &RankLayout) -> bool {
    all_fit(&limited(config, built))
}

/// (name, bytes, limit) of a memory.
pub(crate) type Limited = (String, u64, u64);

/// Every memory that has a limit.
pub(crate) fn limited(config: &Config, built: &RankLayout) -> Vec<Limited> {
    decided(config, built).limited
}

/// Whether this is the name of a GPU's memory.
pub(crate) fn is_gpu(name: &str) -> bool {
    name == GPU
}

fn all_fit(memories: &[Limited]) -> bool {
    memories.iter().all(|(_, bytes, limit)| bytes <= limit)
}

/// What a run takes of every memory, as looked at once.
struct Memories {
    /// Bytes of each rank's copy of its states; 0: none.
    copy: u64,
    nodes: Vec<Node>,
    /// Why ranks are there, where that is not plain.
    placed: Vec<String>,
    /// Everything that has a limit.
    limited: Vec<Limited>,
}

impl Memories {
    /// Whether the host's memories hold what they must.
    fn host_fits(&self) -> bool {
        self.limited.iter().all(|(name, bytes, limit)| name == GPU || bytes <= limit)
    }
}

/// The name of a GPU's memory among those that have a limit.
const GPU: &str = "gpu";

/// The memories where each rank keeps a copy of `copy` bytes.
fn memories(config: &Config, built: &RankLayout, copy: u64) -> Memories {
    let gpu = device_bytes(config, &built.plan);
    let (nodes, placed, whole) = nodes(config, built, copy);
    let gpu = device_limit(config, &built.plan).map(|limit| (GPU.to_owned(), gpu, limit));
    let node = |n: &Node| (format!("node {}", n.node), n.bytes, n.limit);
    let whole = whole.map(|(bytes, limit)| ("host".to_owned(), bytes, limit));
    let limited = gpu.into_iter().chain(nodes.iter().map(node)).chain(whole).collect();
    Memories { copy, nodes, placed, limited }
}

/// The nodes under the ranks, each of which has `copy` bytes more than the plan says for a checkpoint, why ranks are where they
/// are, and bytes against limit of all nodes together where that limit is a tighter one.
fn nodes(
    config: &Config,
    built: &RankLayout,
    copy: u64,
) -> (Vec<Node>, Vec<String>, Option<(u64, u64)>) {
    let host = built.host_bytes(config);
    if let DeviceConfig::Sim { box_, .. } = &config.device {
        let (nodes, reasons) = of_box(config, box_, (host, copy));
        return (nodes, reasons, None);
    }
    let planned = (host.staging + host.states + copy) * here::ranks(config) as u64;
    let data = DataMemory::of(config).ok().flatten().unwrap_or_default();
    let data = (planned + data.tokens + data.documents).max(data.reading);
    let bytes = data + beside(config, built, planned);
    let whole = Some((bytes, topology::available_memory()));
    let Some(machine) = this_machine() else { return (Vec::new(), Vec::new(), whole) };
    let wanted = placement::request(config, host);
    let placed = placement::place_on(machine, &wanted, &placement::gpus(config));
    let Ok((Placement { ranks, sockets, .. }, _)) = placed else {
        return (Vec::new(), Vec::new(), whole);
    };
    let with_copy = HostBytes { states: host.states + copy, ..host };
    (of_machine(machine, &ranks, with_copy), sockets, whole)
}

/// The nodes of `machine`, with the memory of each rank where its arena has them, against what is free there.
fn of_machine(machine: &Machine, ranks: &[RankPlace], host: HostBytes) -> Vec<Node> {
    let of_rank = |place: &RankPlace| place.bytes_by_node(machine, host);
    let bytes: Vec<BTreeMap<u32, u64>> = ranks.iter().map(of_rank).collect();
    let limit = |node: &NumaNode| (node.id, node.free_bytes.unwrap_or(node.memory_bytes));
    by_node(machine.numa_nodes.iter().map(limit), &bytes)
}

/// The nodes of a described box.
fn of_box(
    config: &Config,
    box_: &BoxConfig,
    (host, copy): (HostBytes, u64),
) -> (Vec<Node>, Vec<String>) {
    // A checked config has a place on its box. The copy is where the states are, and changes no seat.
    let Ok(layout) = boxes::layout(config, box_, host) else {
        return (Vec::new(), Vec::new());
    };
    let ranks = &layout.seats;
    let with_copy = |(rank, of): (usize, &BTreeMap<usize, u64>)| {
        let mut of = of.clone();
        let parts = ranks[rank].states.len() as u64;
        for (part, node) in ranks[rank].states.iter().enumerate() {
            *of.entry(*node).or_default() += copy / parts + u64::from((part as u64) < copy % parts);
        }
        of.into_iter().map(|(node, bytes)| (node as u32, bytes)).collect()
    };
    let bytes: Vec<BTreeMap<u32, u64>> = layout.bytes.iter().enumerate().map(with_copy).collect();
    let mut nodes = by_node((0..layout.nodes as u32).map(|node| (node, box_.node_memory)), &bytes);
    if let Some(machine) = box_.machine.as_ref().filter(|m| m.numa_nodes.len() == nodes.len()) {
        nodes.iter_mut().zip(&machine.numa_nodes).for_each(|(node, of)| node.node = of.id);
    }
    (nodes, layout.reasons)
}

/// Nodes of (number, limit), and what each rank has on them.
fn by_node(limits: impl Iterator<Item = (u32, u64)>, ranks: &[BTreeMap<u32, u64>]) -> Vec<Node> {
    let node = |(node, limit): (u32, u64)| {
        let on = |(rank, of): (usize, &BTreeMap<u32, u64>)| Some((rank, *of.get(&node)?));
        let (ranks, bytes): (Vec<usize>, Vec<u64>) =
            ranks.iter().enumerate().filter_map(on).unzip();
        Node { node, bytes: bytes.iter().sum(), ranks, limit }
    };
    limits.map(node).collect()
}

fn is_virtual(config: &Config) -> bool {
    matches!(config.device, DeviceConfig::Cpu { .. })
}

fn binding(memories: &[Limited], is_virtual: bool) -> Binding {
    let share = |(_, bytes, limit): &Limited| *bytes as f64 / (*limit).max(1) as f64;
    let mut sorted: Vec<&Limited> = memories.iter().collect();
    sorted.sort_by(|a, b| share(b).total_cmp(&share(a)));
    let Some(&first) = sorted.first() else {
        let words = "no limit is known: the GPUs are not there to be asked".to_owned();
        return Binding { what: "none".into(), bytes: 0, limit: 0, words };
    };
    let (what, bytes, limit) = first.clone();
    let name = |what: &str| name(what, is_virtual);
    let of = |m: &Limited| {
        let (used, all) = (format_bytes(m.1), format_bytes(m.2));
        format!("{} {used} of {all} ({:.0} %)", name(&m.0), 100.0 * share(m))
    };
    // Of nodes that are no fuller than another one is told: all are in the table.
    let mut rest: Vec<&Limited> = sorted[1..].to_vec();
    rest.dedup_by(|a, b| a.0.starts_with("node") && b.0.starts_with("node"));
    let rest: Vec<String> = rest.into_iter().map(of).collect();
    let rest = if rest.is_empty() { String::new() } else { format!("; {}", rest.join(", ")) };
    let (used, all) = (format_bytes(bytes), format_bytes(limit));
    let who = name(&what);
    let words = if bytes > limit {
        let over = format_bytes(bytes - limit);
        format!("{who} does not fit: {used} wanted, {all} there, {over} too much{rest}")
    } else {
        format!("tightest limit: {who}, {used} of {all} ({:.0} %){rest}", 100.0 * share(first))
    };
    Binding { what, bytes, limit, words }
}

fn name(what: &str, is_virtual: bool) -> String {
    match what {
        GPU if is_virtual => "virtual GPU memory".into(),
        GPU => "GPU memory".into(),
        "host" => "free host memory".into(),
        node => format!("{node}'s memory"),
    }
}

/// Micro-batches by which steps of `config` grow alike: parameters that live on the host come up for each group of them.
pub(crate) fn alike(config: &Config, built: &RankLayout) -> usize {
    let group = vertical_width(config);
    let in_groups = built.decoder.shape().ring != Ring::NONE && group < built.micro_batches;
    if in_groups { group } else { 1 }
}

/// `config`, whose handles are `built`, with another number of micro-batches, more than one, summed at the same place, and with the
/// same parameters on the GPU.
pub(crate) fn with_micro_batches(
    config: &Config,
    built: &RankLayout,
    micro_batches: usize,
) -> Config {
    let mut config = config.clone();
    config.batch.global = micro_batches * config.batch.micro * config.parallel.data;
    let Ring { buffers: slots, resident } = built.decoder.shape().ring;
    if slots > 0 {
        (config.offload.ring, config.offload.resident_blocks) = (Some(slots), Some(resident));
    }
    config.offload.accumulate = match built.accumulation {
        offload::GradAccumulation::Host => Accumulate::Host,
        offload::GradAccumulation::Device
        | offload::GradAccumulation::Shared
        | offload::GradAccumulation::None => Accumulate::Device,
    };
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::build::lay_out;

    /// A described DGX A100 whose processors have four nodes each, and a config of `sets` on it.
    fn nps4(sets: &[&str]) -> (Config, BoxConfig) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let of_box = format!("device=Sim(box: {:?})", folder.join("boxes/dgx-a100.ron"));
        let sets: Vec<String> = sets.iter().map(ToString::to_string).chain([of_box]).collect();
        let config = crate::config::load(&folder.join("dgx2-70b.ron"), &sets);
        let config = config.unwrap_or_else(|e| panic!("{e}")).config;
        let DeviceConfig::Sim { box_, .. } = config.device.clone() else { panic!("no box") };
        (config, *box_)
    }

    #[test]
    fn a_live_box_of_many_nodes_is_planned_as_the_same_box_described() {
        for sets in [
            &["parallel.tensor=8", "parallel.data=1"][..],
            &[
                "parallel.tensor=1",
                "parallel.data=4",
                "batch.micro=1",
                "batch.global=4",
                "model.layers=2",
            ],
            &["parallel.tensor=1", "parallel.data=1", "model.layers=24"],
        ] {
            let (config, described) = nps4(sets);
            let host = lay_out(&config).host_bytes(&config);
            let (nodes, _) = of_box(&config, &described, (host, 0));
            // The same machine as a process finds it that runs on it, with as much memory free.
            let mut machine = Machine::clone(described.machine.as_ref().unwrap());
            machine.live = true;
            for node in &mut machine.numa_nodes {
                node.free_bytes = Some(described.node_memory);
            }
            let gpus: Vec<_> = machine.gpus.iter().map(|gpu| Some(gpu.pci)).collect();
            let ranks = |machine: &Machine| {
                let placed =
                    placement::place_on(machine, &placement::request(&config, host), &gpus);
                placed.unwrap().0.ranks
            };
            let live = of_machine(&machine, &ranks(&machine), host);
            assert_eq!(live, nodes, "{sets:?}");
            let busy = live.iter().filter(|node| node.bytes > 0).count();
            assert!(busy >= 4, "{sets:?}: {live:?}");
            // Someone else has most of one node: there it does not fit, and nowhere else.
            machine.numa_nodes[1].free_bytes = Some(1 << 20);
            let live = of_machine(&machine, &ranks(&machine), host);
            let limited = |n: &Node| (format!("node {}", n.node), n.bytes, n.limit);
            let limited: Vec<Limited> = live.iter().map(limited).collect();
            assert!(!all_fit(&limited), "{sets:?}");
            let words = binding(&limited, false).words;
            assert!(words.contains("node 1's memory does not fit"), "{words}");
            assert!(words.contains("1.00 MiB there"), "{words}");
        }
    }
}
