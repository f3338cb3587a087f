//! Plans the memory of every GPU and NUMA node before a run allocates anything. It uses the layout
//! that a run allocates and counts the real step on a device that runs nothing.

mod disk;
mod fill;
mod ops;
mod step;

pub use disk::Disk;
pub use fill::filled;
pub use ops::{Op, TouchedRange, list};
use step::step;
pub use step::{LaneTotals, Step, ops_of_step};

use crate::boxes;
use config::{BoxConfig, Config, DeviceConfig};
use device::{Arena, Dtype, Error};
use engine::memory::{
    self, DataMemory, GPU, HostNodes, Memories, MemoryUse, Node, all_fit, by_node, is_virtual,
    of_this_machine, process_messages, process_overhead,
};
use layout::build::{RankLayout, device_bytes, device_limit, reserved_bytes};
use serde::Serialize;
use std::collections::BTreeMap;
use topology::{HostBytes, format_bytes};

/// Report of `onebox plan`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name of the run.
    pub name: String,
    /// Whether the plan fits every memory with a known limit.
    #[serde(skip)]
    pub fits: bool,
    /// Whether the plan fits; `None` if the GPUs' memory is unknown and all other memories fit.
    #[serde(rename = "fits")]
    pub verdict: Option<bool>,
    /// Reason why the GPUs' memory is unknown.
    pub not_checked: Option<String>,
    /// Number of parameters of the model, without adapters and padding.
    pub parameters: u64,
    /// Number of parameters that the run trains, without padding.
    pub trained_parameters: u64,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// Place of gradient accumulation: `none`, `device` or `host`.
    pub accumulate: &'static str,
    /// Memory of each GPU. All GPUs need the same amount.
    pub gpu: Memory,
    /// Planned host memory of each rank.
    pub host_per_rank: Memory,
    /// Bytes of host memory that the process needs in addition to the plans of all ranks.
    #[serde(rename = "host_beside")]
    pub host_overhead: u64,
    /// Bytes of messages between processes, which `host_overhead` includes.
    #[serde(rename = "letters", skip_serializing_if = "is_zero")]
    pub process_messages: u64,
    /// Host memory by NUMA node.
    pub nodes: Vec<Node>,
    /// Host memory of the data set, if the data set can be read.
    pub data_memory: Option<DataMemory>,
    /// Reason why the data set cannot be read: the key, the path and the remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_not_counted: Option<String>,
    /// Sentences that explain the NUMA nodes of ranks, if the choice is not obvious.
    pub placed: Vec<String>,
    /// Sentence on how checkpoints are written, if the run saves any.
    pub saving: Option<String>,
    /// Whether ranks copy their states and continue training while the copy is written.
    pub copies_states: bool,
    /// The memory nearest to its limit.
    pub binding: Binding,
    /// Sentence for each memory that is nearly full.
    pub nearly_full: Vec<String>,
    /// Counts of one optimizer step of rank 0. `None` in [`memory_report`], and for a config that
    /// does not fit, because its step may be very large.
    pub step: Option<Step>,
}

const fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// A rank's planned part of a memory.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Name of the memory for messages, for example `virtual GPUs`.
    pub what: String,
    /// Planned bytes.
    pub bytes: u64,
    /// Bytes that the plan may use, if known.
    pub limit: Option<u64>,
    /// Bytes of the memory that are reserved for uses other than the plan.
    pub reserved: u64,
    /// Reserved bytes by use.
    #[serde(rename = "beside")]
    pub overheads: Vec<Pool>,
    /// Planned bytes by kind, largest first.
    pub pools: Vec<Pool>,
    /// All planned tensors, in order of address.
    pub buffers: Vec<Buffer>,
}

/// Buffers of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Pool {
    /// Name of the kind: `parameters`, `optimizer states`, ...
    pub name: &'static str,
    /// Bytes, including the padding between buffers.
    pub bytes: u64,
}

/// One planned tensor.
#[derive(Clone, Debug, Serialize)]
pub struct Buffer {
    /// Name of the tensor, for example `block.3.params`.
    pub name: String,
    /// Kind of the tensor.
    pub pool: &'static str,
    /// Element type: `f16`, `bf16`, `f32`, `f64` or `i32`.
    pub dtype: String,
    /// Rows and columns.
    pub shape: (usize, usize),
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The memory nearest to its limit.
#[derive(Clone, Debug, Serialize)]
pub struct Binding {
    /// `gpu`, `node 0`, or `host` (all nodes together).
    pub what: String,
    /// Planned bytes.
    pub bytes: u64,
    /// Limit in bytes.
    pub limit: u64,
    /// Sentence for messages.
    pub words: String,
}

/// Plans `config` with the layout `built` and counts a step.
///
/// # Errors
/// Returns an error if the step fails its own checks, which is a defect of onebox.
pub fn report(config: &Config, built: &RankLayout) -> Result<Report, Error> {
    let mut report = memory_report(config, built);
    report.step = report.fits.then(|| step(config, built)).transpose()?;
    Ok(report)
}

/// Plans the memory but counts no step. Counting takes time for each op.
pub fn memory_report(config: &Config, built: &RankLayout) -> Report {
    let gpu = gpu(config, built);
    let mut host_per_rank = memory("host, per rank", built, Arena::Pinned);
    let memories = decided(config, built);
    let copy = memories.copy;
    host_per_rank.add("checkpoint copy", copy);
    let host = built.host_bytes(config);
    let planned = (host.staging + host.states + copy) * built.machine.ranks(config) as u64;
    let saving = memory::saving(config, built, &memories);
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
        trained_parameters: built.decoder.shape().trained_parameters(),
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
        host_overhead: process_overhead(config, built, planned),
        process_messages: process_messages(config, built),
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
    let overheads = gpu_overheads(config, built);
    let reserved = overheads.iter().map(|pool| pool.bytes).sum();
    let limit = device_limit(config, built);
    let mut gpu = Memory { limit, reserved, overheads, ..memory(&what, built, Arena::Device) };
    let whole = device_bytes(config, &built.plan);
    gpu.add("kernels and products", whole.saturating_sub(gpu.bytes));
    gpu
}

/// Reserved memory of a GPU by use.
fn gpu_overheads(config: &Config, built: &RankLayout) -> Vec<Pool> {
    let parts = match &config.device {
        DeviceConfig::Cpu { .. } => Vec::new(),
        DeviceConfig::Cuda => {
            let budget = built.machine.memory_budget(config, &built.plan);
            budget.map_or(Vec::new(), |room| room.overheads)
        }
        DeviceConfig::Sim { box_, .. } => vec![("CUDA context and NCCL", reserved_bytes(box_))],
    };
    let parts = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    parts.map(|(name, bytes)| Pool { name, bytes }).collect()
}

/// Reason why the GPUs' memory is unknown, if it is.
fn not_checked(config: &Config, built: &RankLayout) -> Option<String> {
    let cuda = config.device == DeviceConfig::Cuda;
    cuda.then(|| built.machine.memory_budget(config, &built.plan).err()).flatten()
}

impl Memory {
    /// Adds bytes of a kind, unless they are 0.
    fn add(&mut self, name: &'static str, bytes: u64) {
        self.bytes += bytes;
        self.pools.extend((bytes > 0).then_some(Pool { name, bytes }));
        self.pools.sort_by_key(|pool| std::cmp::Reverse(pool.bytes));
    }
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
        overheads: Vec::new(),
        pools,
        buffers: entries.map(buffer).collect(),
    }
}

fn dtype_name(dtype: Dtype) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// Whether every memory fits, as in [`memory_report`].
pub fn fits(config: &Config, built: &RankLayout) -> bool {
    all_fit(&decided(config, built).limited)
}

/// Memories of a run on its box or on this machine.
pub(crate) fn decided(config: &Config, built: &RankLayout) -> Memories {
    let nodes = |copy| match &config.device {
        DeviceConfig::Sim { box_, .. } => of_box(config, box_, built.host_bytes(config), copy),
        DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => of_this_machine(config, built, copy),
    };
    memory::decided(config, built, &nodes)
}

/// Nodes of a described box, with `copy` additional bytes for each rank.
fn of_box(config: &Config, box_: &BoxConfig, host: HostBytes, copy: u64) -> HostNodes {
    // A checked config fits its box. The copy lies with the states and moves no rank.
    let Ok(layout) = boxes::layout(config, box_, host) else {
        return HostNodes::default();
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
    HostNodes { nodes, placed: layout.reasons, whole: None }
}

fn binding(memories: &[MemoryUse], is_virtual: bool) -> Binding {
    let share = |(_, bytes, limit): &MemoryUse| *bytes as f64 / (*limit).max(1) as f64;
    let mut sorted: Vec<&MemoryUse> = memories.iter().collect();
    sorted.sort_by(|a, b| share(b).total_cmp(&share(a)));
    let Some(&first) = sorted.first() else {
        let words = "no limit is known: the GPUs are not there to be asked".to_owned();
        return Binding { what: "none".into(), bytes: 0, limit: 0, words };
    };
    let (what, bytes, limit) = first.clone();
    let name = |what: &str| name(what, is_virtual);
    let of = |m: &MemoryUse| {
        let (used, all) = (format_bytes(m.1), format_bytes(m.2));
        format!("{} {used} of {all} ({:.0} %)", name(&m.0), 100.0 * share(m))
    };
    // Of several nodes, only the fullest is named: the table shows all.
    let mut rest: Vec<&MemoryUse> = sorted[1..].to_vec();
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

#[cfg(test)]
mod tests {
    use super::*;
    use engine::memory::of_machine;
    use layout::build::lay_out;
    use layout::{LocalMachine, placement};
    use topology::Machine;

    /// A described DGX A100 whose processors have four nodes each, and a config of `sets` on it.
    fn nps4(sets: &[&str]) -> (Config, BoxConfig) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let of_box = format!("device=Sim(box: {:?})", folder.join("boxes/dgx-a100.ron"));
        let sets: Vec<String> = sets.iter().map(ToString::to_string).chain([of_box]).collect();
        let config = config::load(&folder.join("dgx2-70b.ron"), &sets);
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
            let host = lay_out(&config, &LocalMachine::default()).host_bytes(&config);
            let HostNodes { nodes, .. } = of_box(&config, &described, host, 0);
            // The same machine seen by a process on it, with the same free memory.
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
            // Another process uses most of one node, so the plan does not fit that node.
            machine.numa_nodes[1].free_bytes = Some(1 << 20);
            let live = of_machine(&machine, &ranks(&machine), host);
            let limited = |n: &Node| (format!("node {}", n.node), n.bytes, n.limit);
            let limited: Vec<MemoryUse> = live.iter().map(limited).collect();
            assert!(!all_fit(&limited), "{sets:?}");
            let words = binding(&limited, false).words;
            assert!(words.contains("node 1's memory does not fit"), "{words}");
            assert!(words.contains("1.00 MiB there"), "{words}");
        }
    }
}
