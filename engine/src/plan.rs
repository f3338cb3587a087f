//! What a config needs of every GPU and every NUMA node, before anything is allocated: the very handles that a
//! run allocates, and the very step, sent through a device that only counts.

use crate::build::{Built, RESERVED, build, device_limit, shape, world_size};
use crate::config::{Accumulate, Config, DeviceConfig};
use crate::data::Dataset;
use crate::gpu;
use crate::run::trainer;
use device::recorder::{self, Totals};
use device::{Arena, Dtype, Error, Lane, Rank};
use serde::Serialize;
use std::sync::Arc;
use topology::{Machine, format_bytes, place_ranks};

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
    /// The memory that is nearest its limit.
    pub binding: Binding,
    /// One optimizer step of rank 0; not counted for what does not fit, which may be of any size.
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

/// Plans `config`, whose handles are `built`.
///
/// # Errors
/// A step that its own checks refuse; that is a defect of onebox.
pub fn report(config: &Config, built: &Built) -> Result<Report, Error> {
    let gpu = gpu(config, built);
    let mut host_per_rank = memory("host", built, Arena::Pinned);
    host_per_rank.what = "host, per rank".into();
    let (nodes, whole) = nodes(config, &gpu, &host_per_rank);
    let memories = memories(&gpu, &nodes, whole);
    let binding = binding(&memories);
    let fits = memories.iter().all(|(_, bytes, limit)| bytes <= limit);
    Ok(Report {
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
        binding,
        step: fits.then(|| step(config, built)).transpose()?,
        gpu,
        host_per_rank,
        nodes,
    })
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
        DeviceConfig::Sim { .. } => RESERVED,
    };
    Memory { limit: device_limit(config), reserved, ..memory(&what, built, Arena::Device) }
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
    }
}

/// The nodes, and bytes against limit of them all together where that limit is a tighter one.
fn nodes(config: &Config, gpu: &Memory, host: &Memory) -> (Vec<Node>, Option<(u64, u64)>) {
    let world_size = config.parallel.tensor * config.parallel.data;
    if let DeviceConfig::Sim { box_, .. } = &config.device {
        let node_of = |rank: usize| (rank * box_.numa_nodes / box_.gpus.max(1)) as u32;
        let limits = (0..box_.numa_nodes as u32).map(|node| (node, box_.node_memory));
        return (by_node(limits.collect(), world_size, node_of, host.bytes), None);
    }
    let virtual_ = matches!(config.device, DeviceConfig::Cpu { .. });
    let per_rank = host.bytes + if virtual_ { gpu.bytes } else { 0 };
    let whole = Some((per_rank * world_size as u64, topology::available_memory()));
    let Ok(machine) = Machine::discover() else { return (Vec::new(), whole) };
    let places = place_ranks(&machine, world_size);
    let limits = machine.numa_nodes.iter().map(|node| (node.id, node.memory_bytes)).collect();
    let node_of = |rank: usize| places.get(rank).map_or(0, |place| place.numa_node);
    (by_node(limits, world_size, node_of, per_rank), whole)
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

/// (name, bytes, limit) of everything that has a limit.
fn memories(gpu: &Memory, nodes: &[Node], whole: Option<(u64, u64)>) -> Vec<(String, u64, u64)> {
    let gpu = gpu.limit.map(|limit| ("gpu".to_owned(), gpu.bytes, limit));
    let node = |n: &Node| (format!("node {}", n.node), n.bytes, n.limit);
    let whole = whole.map(|(bytes, limit)| ("host".to_owned(), bytes, limit));
    gpu.into_iter().chain(nodes.iter().map(node)).chain(whole).collect()
}

fn binding(memories: &[(String, u64, u64)]) -> Binding {
    let share = |(_, bytes, limit): &(String, u64, u64)| *bytes as f64 / (*limit).max(1) as f64;
    let mut sorted: Vec<&(String, u64, u64)> = memories.iter().collect();
    sorted.sort_by(|a, b| share(b).total_cmp(&share(a)));
    let Some(&first) = sorted.first() else {
        let words = "no limit is known: the GPUs are not there to be asked".to_owned();
        return Binding { what: "none".into(), bytes: 0, limit: 0, words };
    };
    let (what, bytes, limit) = first.clone();
    let of = |m: &(String, u64, u64)| format!("{} {:.0} %", name(&m.0), 100.0 * share(m));
    let rest: Vec<String> = sorted[1..].iter().map(|m| of(m)).collect();
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

/// Most bytes of a GPU that one op of a step needs besides its operands.
///
/// # Errors
/// As [`report`].
pub(crate) fn scratch(config: &Config, built: &Built) -> Result<u64, Error> {
    totals(config, built).map(|totals| totals.scratch)
}

/// One step. Of many micro-batches three and four are counted: all between the first and the last are alike.
fn totals(config: &Config, built: &Built) -> Result<Totals, Error> {
    let (few, all) = (3, built.micro_batches as u64);
    Ok(if all <= few + 1 {
        count(config, built)?
    } else {
        let of = |micro_batches: u64| {
            let mut config = config.clone();
            config.batch.global =
                micro_batches as usize * config.batch.micro * config.parallel.data;
            config.offload.accumulate = match built.sum {
                offload::Sum::Host => Accumulate::Host,
                offload::Sum::Device | offload::Sum::None => Accumulate::Device,
            };
            count(&config, &build(&config))
        };
        let (less, more) = (of(few)?, of(few + 1)?);
        let line = |a: u64, b: u64| a + (b - a) * (all - few);
        Totals {
            ops: std::array::from_fn(|i| line(less.ops[i], more.ops[i])),
            bytes: std::array::from_fn(|i| line(less.bytes[i], more.bytes[i])),
            flops: less.flops + (more.flops - less.flops) * (all - few) as f64,
            scratch: more.scratch,
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
    let mut trainer = trainer(config, built, &no_tokens, rank);
    trainer.optimizer.init(&dev, &|_, _| 0.0)?;
    trainer.loader.prefetch(&dev);
    let mut before = Totals::default();
    for step in 1..=2 {
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
        scratch: after.scratch,
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
