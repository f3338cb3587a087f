//! What an op costs: how much of which resource, and how long it takes with nobody else about.
//!
//! A resource is something with a rate that several ops may use at once. The constants here are few, the same for
//! every box and model, and none is fitted to a whole step: each is what one kind of op reaches of its data sheet.

use super::hardware::{Hardware, Measured};
use super::program::{Cargo, Kind, Work};

/// Sides of the tile of a matrix product that one multiprocessor works on.
const TILE: f64 = 128.0;

/// Writing a tile and fetching its first operands take as long as so many terms of its sums.
const GEMM_DEPTH: f64 = 128.0;

/// Of a GPU's memory, streaming kernels.
const MEMORY_SHARE: f64 = 0.8;

/// Of a PCIe link, large pinned copies: 12.3 GB/s of 15.75.
const LINK_SHARE: f64 = 0.78;

/// Of NVLink, large collectives: 130 GB/s of 150.
const NVLINK_SHARE: f64 = 0.87;

/// Of the network between boxes.
const NETWORK_SHARE: f64 = 0.85;

/// Of a node's memory channels, one fused pass that reads and writes.
const CHANNEL_SHARE: f64 = 0.8;

/// Of a data sheet's fp32 rate, matrix products.
const WIDE_SHARE: f64 = 0.85;

/// Of the rate of matrix products, attention in one kernel.
const FUSED_ATTENTION_SHARE: f64 = 0.6;

/// How often attention in several kernels moves the scores: forward (products, softmax, dropout) and backward.
const SCORE_PASSES: [f64; 2] = [4.0, 9.0];

/// The same where every operation is a kernel: also scaling, two for the mask and dropout with its own mask, and
/// their gradients (Megatron-LM of 2020, `mpu/transformer.py`).
const EAGER_SCORE_PASSES: [f64; 2] = [12.5, 13.5];

/// Heads are cut out of the projections and put together again by copies, forward and backward: so many times the
/// bytes of the attention's own operands.
const EAGER_HEADS: [f64; 2] = [2.0, 1.0];

/// Of a link, copies to memory that is not pinned, where PyTorch kept checkpoints: pinning one such copy made it four
/// to six times as fast (DeepSpeed pull request 5301).
const PAGEABLE_SHARE: f64 = 0.2;

/// Of all memory channels of a box, the CPU-Adam of 2020 on all its ranks: 109 to 127 GB/s of 256 (ZeRO-Offload,
/// Table 4).
const ADAM_SHARE_2020: f64 = 0.46;

/// A pass of its own unscaled its fp32 gradients (`unscale_and_clip_grads`): 8 bytes beside 28.
const ADAM_BYTES_2020: f64 = 36.0 / 28.0;

/// Other kernels that are several when each operation is one: so many times the bytes. Bias, dropout and residual are
/// 7.5 passes for 3; dropout's gradient reads a mask; the loss works on fp32 logits, 52 bytes of each for 8.
const EAGER_BYTES: [(&str, f64); 5] = [
    ("bias_dropout_add", 2.5),
    ("dropout", 1.25),
    ("row_max", 6.5),
    ("cross_entropy_stats", 6.5),
    ("cross_entropy_backward", 6.5),
];

/// Seconds from the end of a kernel to the start of the next on its stream.
const KERNEL_GAP: f64 = 2e-6;

/// Seconds until a copy moves bytes.
const COPY_START: f64 = 8e-6;

/// Seconds until a collective moves bytes, and for each further rank.
const COLLECTIVE_START: f64 = 12e-6;
const COLLECTIVE_HOP: f64 = 2e-6;

/// Seconds until a host task is picked up, and until ranks have met there.
const TASK_START: f64 = 2e-6;
const MEETING: f64 = 3e-5;

/// An op's use of resources, and its time alone.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Demand {
    /// Seconds when nothing else runs.
    pub(super) alone: f64,
    /// (resource, share of its rate that the op takes then).
    pub(super) uses: Vec<(usize, f64)>,
}

/// Numbers of the resources, in blocks.
#[derive(Clone, Debug)]
pub(super) struct Resources {
    ranks: usize,
    links: usize,
    nodes: usize,
    /// Units per second, by number.
    pub(super) rates: Vec<f64>,
}

/// What several ops may use at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Resource {
    Arithmetic(usize),
    Memory(usize),
    NvLink(usize),
    Up(usize),
    Down(usize),
    Channels(usize),
    Network(usize),
    Cores,
}

impl Resources {
    pub(super) fn new(hardware: &Hardware) -> Self {
        let (ranks, gpu) = (hardware.seats.len(), &hardware.gpu);
        let machines = hardware.seats.iter().map(|seat| seat.machine + 1).max().unwrap_or(1);
        // Arithmetic is counted in seconds, since its rate depends on shapes.
        let mut rates = vec![1.0; ranks];
        rates.extend(vec![gpu.memory * MEMORY_SHARE; ranks]);
        rates.extend(vec![1.0; ranks]);
        for _ in 0..2 {
            rates.extend(hardware.links.iter().map(|rate| rate * LINK_SHARE));
        }
        rates.extend(hardware.nodes.iter().map(|rate| rate * CHANNEL_SHARE));
        rates.extend(vec![hardware.network * NETWORK_SHARE; machines]);
        rates.push(hardware.measured.as_ref().map_or(1.0, |m| m.cores));
        Self { ranks, links: hardware.links.len(), nodes: hardware.nodes.len(), rates }
    }

    fn index(&self, resource: Resource) -> usize {
        let (links, nodes) = (3 * self.ranks, 3 * self.ranks + 2 * self.links);
        match resource {
            Resource::Arithmetic(rank) => rank,
            Resource::Memory(rank) => self.ranks + rank,
            Resource::NvLink(rank) => 2 * self.ranks + rank,
            Resource::Up(link) => links + link,
            Resource::Down(link) => links + self.links + link,
            Resource::Channels(node) => nodes + node,
            Resource::Network(machine) => nodes + self.nodes + machine,
            Resource::Cores => self.rates.len() - 1,
        }
    }
}

/// What an op asks for, before it is known how long it takes.
#[derive(Default)]
struct Asked {
    fixed: f64,
    /// Not faster than this, whatever is free.
    least: f64,
    amounts: Vec<(Resource, f64)>,
}

impl Asked {
    fn demand(self, resources: &Resources) -> Demand {
        let seconds = |(resource, amount): &(Resource, f64)| {
            amount / resources.rates[resources.index(*resource)]
        };
        let longest = self.amounts.iter().map(seconds).fold(self.least, f64::max);
        let alone = self.fixed + longest;
        let share = |asked: &(Resource, f64)| {
            let share = if alone > 0.0 { seconds(asked) / alone } else { 0.0 };
            (resources.index(asked.0), share)
        };
        let uses = self.amounts.iter().map(share).filter(|(_, share)| *share > 0.0).collect();
        Demand { alone, uses }
    }
}

/// The demand of an op of one rank.
pub(super) fn of_rank(h: &Hardware, resources: &Resources, rank: usize, work: &Work) -> Demand {
    if let Some(measured) = &h.measured {
        return on_cores(measured, work, 1).demand(resources);
    }
    let asked = match work.kind {
        Kind::Gemm { .. } | Kind::Attention { .. } | Kind::Kernel => kernel(h, rank, work),
        Kind::Up | Kind::Down => copy(h, rank, work),
        Kind::Host => host(h, rank, work),
        Kind::Collective { .. } | Kind::Meeting { .. } => Asked::default(),
    };
    asked.demand(resources)
}

fn copy(h: &Hardware, rank: usize, work: &Work) -> Asked {
    let (seat, bytes) = (&h.seats[rank], work.bytes as f64);
    let link = |link: &usize| match work.kind {
        Kind::Up => (Resource::Up(*link), bytes),
        _ => (Resource::Down(*link), bytes),
    };
    let mut amounts: Vec<_> = seat.links.iter().map(link).collect();
    amounts.push((Resource::Channels(seat.staging), bytes));
    let share = if h.gpu.as_of_2020 { copy_share_2020(h, work.cargo) } else { 1.0 };
    let slowest = seat.links.iter().map(|link| h.links[*link]).fold(f64::INFINITY, f64::min);
    Asked { fixed: COPY_START, least: bytes / (slowest * LINK_SHARE * share), amounts }
}

/// Of a link, what a rank's copy got in 2020. Consecutive gradients belonged to one rank (before DeepSpeed's
/// `round_robin_gradients`), so that of a data-parallel group one copied what here all do at once.
fn copy_share_2020(h: &Hardware, cargo: Cargo) -> f64 {
    match cargo {
        Cargo::Other => 1.0,
        Cargo::Checkpoint => PAGEABLE_SHARE,
        Cargo::Gradient => 1.0 / h.dp_size as f64,
    }
}

fn host(h: &Hardware, rank: usize, work: &Work) -> Asked {
    let (seat, mut bytes) = (&h.seats[rank], work.bytes as f64);
    let mut rate = seat.cores * h.core_memory;
    if h.gpu.as_of_2020 && work.name == "adam_tile" {
        let ranks = h.seats.iter().filter(|s| s.machine == seat.machine).count() as f64;
        let machines = h.seats.iter().map(|s| s.machine + 1).max().unwrap_or(1) as f64;
        let channels = h.nodes.iter().sum::<f64>() / machines;
        bytes *= ADAM_BYTES_2020;
        rate = rate.min(ADAM_SHARE_2020 * channels / ranks);
    }
    let nodes = seat.states.len().max(1) as f64;
    let amounts = seat.states.iter().map(|n| (Resource::Channels(*n), bytes / nodes));
    Asked { fixed: TASK_START, least: bytes / rate, amounts: amounts.collect() }
}

/// The demand of a collective of all `members` together.
pub(super) fn of_group(
    h: &Hardware,
    resources: &Resources,
    members: &[usize],
    work: &Work,
) -> Demand {
    let n = members.len();
    if let Some(measured) = &h.measured {
        return on_cores(measured, work, n).demand(resources);
    }
    let asked = match work.kind {
        Kind::Collective { rounds, .. } if n > 1 => {
            // A ring, or what is as fast: every rank sends and receives this.
            let crossing = f64::from(rounds) * (n - 1) as f64 / n as f64 * work.bytes as f64;
            let mut asked = ring(h, members, crossing);
            // Its own memory is read and written beside.
            asked.amounts.extend(members.iter().map(|&r| (Resource::Memory(r), 2.0 * crossing)));
            asked.fixed = COLLECTIVE_START + COLLECTIVE_HOP * (n - 1) as f64;
            asked
        }
        Kind::Meeting { .. } if n > 1 => Asked { fixed: MEETING, ..Asked::default() },
        _ => Asked { fixed: KERNEL_GAP, ..Asked::default() },
    };
    asked.demand(resources)
}

/// Bytes that pass every rank of a ring, on the links that it crosses.
fn ring(h: &Hardware, members: &[usize], crossing: f64) -> Asked {
    let mut asked = Asked::default();
    let machine = |rank: usize| h.seats[rank].machine;
    let machines: std::collections::BTreeSet<usize> = members.iter().map(|&r| machine(r)).collect();
    if machines.len() > 1 {
        asked.amounts.extend(machines.iter().map(|&m| (Resource::Network(m), crossing)));
    }
    for &rank in members {
        let inside = members.iter().filter(|&&other| machine(other) == machine(rank));
        let rates: Vec<f64> = inside.filter(|&&o| o != rank).map(|&o| h.nvlink[rank][o]).collect();
        if rates.is_empty() {
            continue;
        }
        let all_joined = rates.iter().all(|rate| *rate > 0.0);
        let switched = rates.len() > 1 && rates.iter().all(|rate| *rate == rates[0]);
        if all_joined || rates.iter().filter(|rate| **rate > 0.0).count() >= 2 {
            // Behind switches a GPU's links serve one peer or all; else each pair has its own.
            let rate = if switched { rates[0] } else { rates.iter().sum() };
            asked.amounts.push((Resource::NvLink(rank), crossing / (rate * NVLINK_SHARE)));
        } else {
            for &link in &h.seats[rank].links {
                for way in [Resource::Up(link), Resource::Down(link)] {
                    // A ring crosses a shared link once each way, however many are below it.
                    if !asked.amounts.iter().any(|(used, _)| *used == way) {
                        asked.amounts.push((way, crossing));
                    }
                }
            }
        }
    }
    asked
}

fn kernel(h: &Hardware, rank: usize, work: &Work) -> Asked {
    let gpu = &h.gpu;
    let rate = if work.wide { gpu.flops_32 * WIDE_SHARE } else { gpu.flops_16 };
    let width = if work.wide { 4.0 } else { 2.0 };
    let memory = gpu.memory * MEMORY_SHARE;
    let (mut bytes, mut after) = (work.bytes as f64, 0.0);
    let arithmetic = match work.kind {
        Kind::Gemm { m, n, k, bias } => {
            if bias && gpu.as_of_2020 {
                after = KERNEL_GAP + 2.0 * (m * n) as f64 * width / memory;
            }
            work.flops / (rate * filled(gpu.processors, m, n, k))
        }
        Kind::Attention { .. } if gpu.fused_attention && !gpu.as_of_2020 => {
            work.flops / (rate * FUSED_ATTENTION_SHARE)
        }
        Kind::Attention { scores, backward } => {
            let (passes, heads) = if gpu.as_of_2020 {
                (EAGER_SCORE_PASSES, EAGER_HEADS)
            } else {
                (SCORE_PASSES, [0.0; 2])
            };
            bytes *= 1.0 + heads[usize::from(backward)];
            bytes += scores as f64 * width * passes[usize::from(backward)];
            // The whole square, not only what is before each token.
            2.0 * work.flops / (rate * FUSED_ATTENTION_SHARE)
        }
        _ if gpu.as_of_2020 => {
            let times = EAGER_BYTES.iter().find(|(name, _)| *name == work.name);
            bytes *= times.map_or(1.0, |(_, times)| *times);
            0.0
        }
        _ => 0.0,
    };
    // Kernels of several streams share the multiprocessors.
    let amounts = vec![(Resource::Memory(rank), bytes), (Resource::Arithmetic(rank), arithmetic)];
    let mut asked = Asked { fixed: KERNEL_GAP + after, least: 0.0, amounts };
    if matches!(work.kind, Kind::Attention { .. }) && (gpu.as_of_2020 || !gpu.fused_attention) {
        // One after the other: products, passes over the scores.
        asked.fixed = 5.0 * KERNEL_GAP + arithmetic.min(bytes / memory);
    }
    asked
}

/// How much of a GPU a matrix product keeps busy: the last round of tiles may be short, and each has ends.
fn filled(processors: usize, m: usize, n: usize, k: usize) -> f64 {
    let tiles = (m as f64 / TILE).ceil() * (n as f64 / TILE).ceil();
    let rounds = (tiles / processors as f64).ceil();
    let whole = (m as f64 / TILE) * (n as f64 / TILE) / (rounds * processors as f64);
    whole.min(1.0) * k as f64 / (k as f64 + GEMM_DEPTH)
}

/// A virtual GPU's op: time of cores. `members` ranks take part, each in its own thread.
fn on_cores(m: &Measured, work: &Work, members: usize) -> Asked {
    let wide = usize::from(work.wide);
    let by_name = m.ops.iter().find(|(name, _)| name == work.name).map(|(_, rates)| rates[wide]);
    let seconds = match work.kind {
        Kind::Gemm { .. } => m.gemm[wide].seconds(work.flops, work.bytes as f64),
        Kind::Attention { backward, .. } => {
            m.attention[usize::from(backward)].seconds(work.flops, work.bytes as f64)
        }
        Kind::Collective { rounds, .. } => {
            f64::from(rounds) * work.bytes as f64 * members as f64 / by_name.unwrap_or(m.other)
        }
        Kind::Meeting { .. } => 0.0,
        Kind::Up | Kind::Down | Kind::Kernel | Kind::Host => {
            work.bytes as f64 / by_name.unwrap_or(m.other)
        }
    };
    let met = work.kind.group().is_some() && members > 1;
    let threads = if met { members as f64 } else { m.threads };
    // A rank's threads share what takes longer than waking them.
    let shared = if met { 0.0 } else { m.threads_start } + seconds / threads;
    Asked {
        fixed: m.overhead + if met { m.meeting } else { 0.0 },
        least: shared.min(if met { shared } else { seconds }),
        amounts: vec![(Resource::Cores, seconds)],
    }
}

#[cfg(test)]
mod tests {
    use super::filled;

    #[test]
    fn a_product_fills_a_gpu_when_its_tiles_fill_every_round() {
        // 80 tiles of 80 processors; 81 need a second round.
        let one = filled(80, 128 * 80, 128, 1 << 20);
        assert!((one - 1.0).abs() < 1e-3, "{one}");
        let two = filled(80, 128 * 81, 128, 1 << 20);
        assert!((two - 81.0 / 160.0).abs() < 1e-3, "{two}");
        assert!(filled(80, 1, 1, 1024) < 1e-5);
        assert!(filled(80, 10_240, 128, 128) > 0.49 && filled(80, 10_240, 128, 128) < 0.51);
    }
}
