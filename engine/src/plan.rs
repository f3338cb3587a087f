//! What a config needs of every GPU and every NUMA node, before anything is allocated: the very handles that a
//! run allocates, and the very step, sent through a device that only counts.

mod saving;

pub(crate) use saving::{checkpoint_copy, saved_states};

use crate::boxes;
use crate::build::{Built, build, device_bytes, device_limit, reserved, shape, world_size};
use crate::config::{Accumulate, BoxConfig, Config, DeviceConfig};
use crate::data::Dataset;
use crate::gpu;
use crate::places;
use crate::simulate::typical_step;
use crate::trainer::trainer;
use device::recorder::{self, Totals};
use device::sim::Seat;
use device::{Arena, Dtype, Error, Lane, Rank};
use serde::Serialize;
use std::sync::{Arc, OnceLock};
use topology::{Machine, format_bytes};

/// All that `onebox plan` says.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Of the run.
    pub name: String,
    /// Every memory holds what it must.
    pub fits: bool,
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
    /// The host's memory by node.
    pub nodes: Vec<Node>,
    /// How checkpoints are written, where there are any: a sentence.
    pub saving: Option<String>,
    /// The memory that is nearest its limit.
    pub binding: Binding,
    /// One optimizer step of rank 0; not counted by [`memory_report`], nor for what does not fit, which may be
    /// of any size.
    pub step: Option<Step>,
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
    /// Bytes below the label that the CUDA context and NCCL take.
    pub reserved: u64,
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
#[derive(Clone, Debug, Serialize)]
pub struct Node {
    /// Its number.
    pub node: u32,
    /// Whose memory it holds.
    pub ranks: Vec<usize>,
    /// Planned bytes; with the virtual GPUs' own, where there are no real ones.
    pub bytes: u64,
    /// Bytes it has.
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

/// What a rank does in one optimizer step, as counted.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// Over all ranks.
    pub tokens: u64,
    /// Of the model, over all ranks, without recomputation.
    pub model_flops: f64,
    /// Of this rank, as run, with recomputation.
    pub hardware_flops: f64,
    /// By lane.
    pub lanes: Vec<LaneTotals>,
}

/// What a lane does in one step.
#[derive(Clone, Debug, Serialize)]
pub struct LaneTotals {
    /// `Compute`, ...
    pub lane: String,
    /// Ops.
    pub ops: u64,
    /// Copies: their length. Others: all that they read and write.
    pub bytes: u64,
}

/// Plans `config`, whose handles are `built`, and counts a step.
///
/// # Errors
/// A step that its own checks refuse; that is a defect of onebox.
pub fn report(config: &Config, built: &Built) -> Result<Report, Error> {
    let mut report = memory_report(config, built);
    report.step = report.fits.then(|| step(config, built)).transpose()?;
    Ok(report)
}

/// The same without the step, whose counting takes as long as its ops are many.
pub fn memory_report(config: &Config, built: &Built) -> Report {
    let gpu = gpu(config, built);
    let mut host_per_rank = memory("host, per rank", built, Arena::Pinned);
    let copy = checkpoint_copy(config, built);
    if copy > 0 {
        host_per_rank.bytes += copy;
        host_per_rank.pools.push(Pool { name: "checkpoint copy", bytes: copy });
        host_per_rank.pools.sort_by_key(|pool| std::cmp::Reverse(pool.bytes));
    }
    let (nodes, memories) = memories(config, built, copy);
    let binding = binding(&memories);
    let fits = all_fit(&memories);
    Report {
        name: config.name.clone(),
        fits,
        parameters: built.gpt.shape().parameters(),
        tensor: config.parallel.tensor,
        data: config.parallel.data,
        micro_batches: built.micro_batches,
        accumulate: match built.sum {
            offload::Sum::None => "none",
            offload::Sum::Device => "device",
            offload::Sum::Host => "host",
        },
        saving: saving::saving(config, built, copy),
        binding,
        step: None,
        gpu,
        host_per_rank,
        nodes,
    }
}

fn gpu(config: &Config, built: &Built) -> Memory {
    let what = match &config.device {
        DeviceConfig::Cpu { .. } => "virtual GPUs".to_owned(),
        DeviceConfig::Cuda => "GPUs".to_owned(),
        DeviceConfig::Sim { box_, .. } => format!("GPUs of {}", box_.name),
    };
    let reserved = match &config.device {
        DeviceConfig::Cpu { .. } => 0,
        DeviceConfig::Cuda => gpu::room(world_size(config)).map_or(0, |room| room.reserved),
        DeviceConfig::Sim { box_, .. } => reserved(box_),
    };
    let mut gpu =
        Memory { limit: device_limit(config), reserved, ..memory(&what, built, Arena::Device) };
    let whole = device_bytes(config, &built.plan);
    if whole > gpu.bytes {
        gpu.pools.push(Pool { name: "kernels and products", bytes: whole - gpu.bytes });
        gpu.pools.sort_by_key(|pool| std::cmp::Reverse(pool.bytes));
        gpu.bytes = whole;
    }
    gpu
}

fn memory(what: &str, built: &Built, arena: Arena) -> Memory {
    let mut pools: Vec<Pool> =
        built.plan.pools(arena).into_iter().map(|(name, bytes)| Pool { name, bytes }).collect();
    pools.sort_by_key(|pool| std::cmp::Reverse(pool.bytes));
    let entries = built.plan.entries().iter().filter(|e| e.arena == arena);
    let buffer = |e: &device::Entry| Buffer {
        name: e.name.clone(),
        pool: e.pool,
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
    }
}

/// Whether every memory holds what it must, as in [`memory_report`].
pub(crate) fn fits(config: &Config, built: &Built) -> bool {
    all_fit(&memories(config, built, checkpoint_copy(config, built)).1)
}

/// (name, bytes, limit) of a memory.
type Limited = (String, u64, u64);

fn all_fit(memories: &[Limited]) -> bool {
    memories.iter().all(|(_, bytes, limit)| bytes <= limit)
}

/// The nodes, and everything that has a limit.
fn memories(config: &Config, built: &Built, copy: u64) -> (Vec<Node>, Vec<Limited>) {
    let gpu = device_bytes(config, &built.plan);
    let host = built.plan.bytes(Arena::Pinned) + copy;
    let (nodes, whole) = nodes(config, built, (gpu, host));
    let gpu = device_limit(config).map(|limit| ("gpu".to_owned(), gpu, limit));
    let node = |n: &Node| (format!("node {}", n.node), n.bytes, n.limit);
    let whole = whole.map(|(bytes, limit)| ("host".to_owned(), bytes, limit));
    let all = gpu.into_iter().chain(nodes.iter().map(node)).chain(whole).collect();
    (nodes, all)
}

/// The machine that this is, looked at once.
fn this_machine() -> Option<&'static Machine> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    MACHINE.get_or_init(|| Machine::discover().ok()).as_ref()
}

/// The nodes under ranks of so many bytes on the GPU and the host, and bytes against limit of them all together where
/// that limit is a tighter one.
fn nodes(
    config: &Config,
    built: &Built,
    (gpu, host): (u64, u64),
) -> (Vec<Node>, Option<(u64, u64)>) {
    let world_size = world_size(config);
    if let DeviceConfig::Sim { box_, .. } = &config.device {
        return (of_box(config, box_, (built, host)), None);
    }
    let virtual_ = matches!(config.device, DeviceConfig::Cpu { .. });
    let per_rank = host + if virtual_ { gpu } else { 0 };
    let whole = Some((per_rank * world_size as u64, topology::available_memory()));
    let Some(machine) = this_machine() else { return (Vec::new(), whole) };
    let ranks = (config.parallel.tensor, config.parallel.data);
    let placed = places::on(machine, ranks, &places::gpus(config));
    let places = placed.map_or_else(|_| Vec::new(), |(placement, _)| placement.ranks);
    let limits = machine.numa_nodes.iter().map(|node| (node.id, node.memory_bytes)).collect();
    let node_of = |rank: usize| places.get(rank).map_or(0, |place| place.numa_node);
    (by_node(limits, world_size, node_of, per_rank), whole)
}

/// The nodes of a described box, with staging and states where its ranks are placed.
fn of_box(config: &Config, box_: &BoxConfig, (built, host): (&Built, u64)) -> Vec<Node> {
    // A checked config has a place on its box.
    let (seats, nodes) =
        boxes::layout(config, box_).map_or((Vec::new(), 1), |l| (l.seats, l.nodes));
    let all = built.plan.entries().iter().filter(|e| e.arena == Arena::Pinned && e.is_staging());
    let mut staging: u64 = all.map(|e| e.range.end - e.range.start).sum();
    let states = host - staging;
    if box_.measured.is_some() {
        // Virtual GPUs are host memory.
        staging += built.plan.bytes(Arena::Device);
    }
    let mut bytes = vec![0; nodes];
    for seat in &seats {
        bytes[seat.staging] += staging;
        let parts = seat.states.len() as u64;
        for (part, node) in seat.states.iter().enumerate() {
            bytes[*node] += states / parts + u64::from((part as u64) < states % parts);
        }
    }
    let id = |index: usize| match &box_.machine {
        Some(machine) if nodes == machine.numa_nodes.len() => machine.numa_nodes[index].id,
        _ => index as u32,
    };
    let node = |(index, bytes): (usize, u64)| {
        let on = |seat: &Seat| seat.staging == index || seat.states.contains(&index);
        let ranks = seats.iter().enumerate().filter(|(_, seat)| on(seat)).map(|(rank, _)| rank);
        Node { node: id(index), ranks: ranks.collect(), bytes, limit: box_.node_memory }
    };
    bytes.into_iter().enumerate().map(node).collect()
}

fn by_node(
    limits: Vec<(u32, u64)>,
    world_size: usize,
    node_of: impl Fn(usize) -> u32,
    per_rank: u64,
) -> Vec<Node> {
    let node = |(node, limit): (u32, u64)| {
        let ranks: Vec<usize> = (0..world_size).filter(|rank| node_of(*rank) == node).collect();
        Node { node, bytes: per_rank * ranks.len() as u64, ranks, limit }
    };
    limits.into_iter().map(node).collect()
}

fn binding(memories: &[Limited]) -> Binding {
    let share = |(_, bytes, limit): &Limited| *bytes as f64 / (*limit).max(1) as f64;
    let mut sorted: Vec<&Limited> = memories.iter().collect();
    sorted.sort_by(|a, b| share(b).total_cmp(&share(a)));
    let Some(&first) = sorted.first() else {
        let words = "no limit is known: the GPUs are not there to be asked".to_owned();
        return Binding { what: "none".into(), bytes: 0, limit: 0, words };
    };
    let (what, bytes, limit) = first.clone();
    let of = |m: &Limited| format!("{} {:.0} %", name(&m.0), 100.0 * share(m));
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
        format!("{who} is nearest its limit: {used} of {all}, {:.0} %{rest}", 100.0 * share(first))
    };
    Binding { what, bytes, limit, words }
}

fn name(what: &str) -> String {
    match what {
        "gpu" => "GPU memory".into(),
        "host" => "free host memory".into(),
        node => format!("{node}'s memory"),
    }
}

/// `config`, whose handles are `built`, with another number of micro-batches, more than one, summed at the same place.
pub(crate) fn with_micro_batches(config: &Config, built: &Built, micro_batches: usize) -> Config {
    let mut config = config.clone();
    config.batch.global = micro_batches * config.batch.micro * config.parallel.data;
    config.offload.accumulate = match built.sum {
        offload::Sum::Host => Accumulate::Host,
        offload::Sum::Device | offload::Sum::None => Accumulate::Device,
    };
    config
}

/// One step. Of many micro-batches three and four are counted: all between the first and the last are alike.
fn totals(config: &Config, built: &Built) -> Result<Totals, Error> {
    let (few, all) = (3, built.micro_batches as u64);
    Ok(if all <= few + 1 {
        count(config, built)?
    } else {
        let of = |micro_batches: u64| {
            let config = with_micro_batches(config, built, micro_batches as usize);
            count(&config, &build(&config))
        };
        let (less, more) = (of(few)?, of(few + 1)?);
        let line = |a: u64, b: u64| a + (b - a) * (all - few);
        Totals {
            ops: std::array::from_fn(|i| line(less.ops[i], more.ops[i])),
            bytes: std::array::from_fn(|i| line(less.bytes[i], more.bytes[i])),
            flops: less.flops + (more.flops - less.flops) * (all - few) as f64,
        }
    })
}

fn step(config: &Config, built: &Built) -> Result<Step, Error> {
    let totals = totals(config, built)?;
    let lane = |lane: Lane| LaneTotals {
        lane: format!("{lane:?}"),
        ops: totals.ops[lane as usize],
        bytes: totals.bytes[lane as usize],
    };
    let tokens = (config.batch.global * config.model.seq_len) as u64;
    Ok(Step {
        tokens,
        model_flops: tokens as f64 * shape(config).model_flops_per_token(),
        hardware_flops: totals.flops,
        lanes: Lane::ALL.into_iter().map(lane).collect(),
    })
}

/// The second step: the first has no update to publish.
fn count(config: &Config, built: &Built) -> Result<Totals, Error> {
    let (tensor, data) = (config.parallel.tensor, config.parallel.data);
    let rank = Rank { tp: 0, tp_size: tensor, dp: 0, dp_size: data };
    let (dev, totals) = recorder::open(rank, &built.plan);
    let no_tokens = Arc::new(Dataset::none(config.model.seq_len));
    let mut trainer = trainer(config, built, (&no_tokens, &Arc::default()), rank);
    trainer.optimizer.init_blank(&dev)?;
    trainer.loader.prefetch(&dev);
    let mut before = Totals::default();
    let first = typical_step(config);
    for step in first..=first + 1 {
        before.clone_from(&totals.borrow());
        dev.begin_step(step);
        let decided = trainer.train_step(&dev, step);
        dev.sync(decided)?;
    }
    let after = totals.borrow();
    Ok(Totals {
        ops: std::array::from_fn(|i| after.ops[i] - before.ops[i]),
        bytes: std::array::from_fn(|i| after.bytes[i] - before.bytes[i]),
        flops: after.flops - before.flops,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_micro_batches_are_counted_as_if_each_were() {
        let ron = r#"(
            device: Cpu(count: 2, memory: "64MiB", threads: 1),
            model: (layers: 2, hidden: 32, heads: 4, seq_len: 16),
            parallel: (data: 2), precision: Bf16, batch: (micro: 1, global: 18),
            data: (train: "unused"), train: (steps: 6),
        )"#;
        for sum in ["offload.accumulate=Host", "offload.accumulate=Device"] {
            let folder = std::path::Path::new(".");
            let loaded = crate::config::load_str(ron, "test.ron", folder, &[sum.to_owned()]);
            let config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
            let built = build(&config);
            let (counted, said) = (count(&config, &built).unwrap(), step(&config, &built).unwrap());
            for lane in &said.lanes {
                let i = Lane::ALL.iter().position(|l| format!("{l:?}") == lane.lane).unwrap();
                assert_eq!(
                    (lane.ops, lane.bytes),
                    (counted.ops[i], counted.bytes[i]),
                    "{}",
                    lane.lane
                );
            }
            assert!((said.hardware_flops / counted.flops - 1.0).abs() < 1e-12);
        }
    }
}
