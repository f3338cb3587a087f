//! The cost of an op: its use of resources, and its time if nothing else runs.
//!
//! A resource has a rate, and several ops may use it at the same time. The constants are the same for
//! every box and model. None is fitted to a whole step: each is the fraction of a data sheet's rate
//! that one kind of op reaches, from measurements of that kind of op.

mod across;
mod attention;
mod collectives;
mod kernels;
mod products;

use super::hardware::{Gpu, Hardware, MeasuredMachine};
use super::program::{Work, WorkKind};
use super::share::Side;
#[cfg(test)]
pub(super) use across::GroupSpread;
pub(super) use across::meeting;
pub(super) use collectives::crosses_pcie;
pub use collectives::{NVLINK_SHARE, PCIE_SUM_SHARES, nvlink_sum_share, pcie_sums};
use config::Fact;
use device::Cargo;
use kernels::kernel;

/// Share of a GPU's memory bandwidth that streaming kernels reach. Measured: 0.85 on an H200 by
/// onebox's own sums and casts, 0.90 on an A100 and 0.97 on an H100 by the sum of two arrays (profiles
/// of vidur).
pub const MEMORY_SHARE: f64 = 0.88;

/// The same share in the comparison with the figures of 2020, before any kernel was measured.
const MEMORY_SHARE_2020: f64 = 0.8;

/// Share of a PCIe link up to 4.0 x16 that large pinned copies reach: 12.3 GB/s of 15.75, 24.8 of 31.5.
pub const LINK_SHARE: f64 = 0.78;

/// The same share of a link of PCIe 5.0 x16: 50.5 to 55.6 GB/s of 63 on H100, H200 and RTX PRO 6000.
const FAST_LINK_SHARE: f64 = 0.85;

/// Rate of copies up and down at once relative to one way, from PCIe 4.0 x16 on: 1.46 to 1.69 in six
/// measurements on H200s (`benchmarks/h200-2026-11-26.md`), and 1.43 on an A100 (nvbandwidth).
const BOTH_WAYS: f64 = 1.57;

/// Nominal bytes per second from which on a link is one of PCIe 5.0 x16.
const FAST_LINK: f64 = 40e9;

/// Share of a link of `rate` nominal bytes per second that large pinned copies reach.
pub const fn link_share(rate: f64) -> f64 {
    if rate < FAST_LINK { LINK_SHARE } else { FAST_LINK_SHARE }
}

/// Nominal bytes per second of the link on which pinned copies reach `rate` bytes per second.
pub fn nominal_link(rate: f64) -> f64 {
    let slow = rate / LINK_SHARE;
    // Between both kinds of links lies no rate: copies that are faster than the fastest slow link
    // have a fast one.
    if slow < FAST_LINK { slow } else { (rate / FAST_LINK_SHARE).max(FAST_LINK) }
}

/// Fraction of a data sheet's fp32 rate that matmuls reach.
pub const WIDE_SHARE: f64 = 0.85;

/// Seconds until a collective moves bytes, for each rank after the first.
const COLLECTIVE_HOP: f64 = 2e-6;

/// Share of the network between boxes that collectives reach.
const NETWORK_SHARE: f64 = 0.85;

/// Share of a node's memory channels that one fused pass reaches, reading and writing.
pub const CHANNEL_SHARE: f64 = 0.8;

/// Seconds from the end of a kernel to the start of the next on its stream.
pub(super) const KERNEL_GAP: f64 = 2e-6;

/// Seconds until a copy moves bytes.
const COPY_START: f64 = 8e-6;

/// Seconds until a host task starts, and seconds until ranks of one process have met.
const TASK_START: f64 = 2e-6;
const MEETING: f64 = 3e-5;

impl Gpu {
    /// Bytes per second that streaming kernels read and write.
    fn streamed(&self) -> f64 {
        let share = if self.as_of_2020.is_some() { MEMORY_SHARE_2020 } else { MEMORY_SHARE };
        self.memory * share
    }
}

/// An op's use of resources, and its time if nothing else runs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Demand {
    /// Seconds if nothing else runs.
    pub(super) alone: f64,
    /// (resource, fraction of its rate that the op uses when it runs alone).
    pub(super) uses: Vec<(usize, f64)>,
    pub(super) side: Side,
}

/// Index ranges of the resources.
#[derive(Clone, Debug)]
pub(super) struct Resources {
    ranks: usize,
    links: usize,
    nodes: usize,
    /// Units per second by resource.
    pub(super) rates: Vec<f64>,
}

/// A resource that several ops may use at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Resource {
    Arithmetic(usize),
    Memory(usize),
    NvLink(usize),
    Up(usize),
    Down(usize),
    BothWays(usize),
    Channels(usize),
    Network(usize),
    Cores,
}

impl Resources {
    pub(super) fn new(hardware: &Hardware) -> Self {
        let (ranks, gpu) = (hardware.seats.len(), &hardware.gpu);
        let machines = hardware.seats.iter().map(|seat| seat.machine + 1).max().unwrap_or(1);
        // The unit of arithmetic is seconds, since its rate depends on shapes.
        let mut rates = vec![1.0; ranks];
        rates.extend(vec![gpu.streamed(); ranks]);
        rates.extend(vec![1.0; ranks]);
        let links = || hardware.links.iter().map(|rate| rate * link_share(*rate));
        rates.extend(links());
        rates.extend(links());
        // Nobody has measured a loss on slower links.
        let both = |rate: f64| if rate < 20e9 { 2.0 } else { BOTH_WAYS };
        rates.extend(links().zip(&hardware.links).map(|(copied, rate)| copied * both(*rate)));
        rates.extend(hardware.nodes.iter().map(|rate| rate * CHANNEL_SHARE));
        rates.extend(vec![hardware.network * NETWORK_SHARE; machines]);
        rates.push(hardware.measured.as_ref().map_or(1.0, |m| m.cores));
        Self { ranks, links: hardware.links.len(), nodes: hardware.nodes.len(), rates }
    }

    fn index(&self, resource: Resource) -> usize {
        let (links, nodes) = (3 * self.ranks, 3 * self.ranks + 3 * self.links);
        match resource {
            Resource::Arithmetic(rank) => rank,
            Resource::Memory(rank) => self.ranks + rank,
            Resource::NvLink(rank) => 2 * self.ranks + rank,
            Resource::Up(link) => links + link,
            Resource::Down(link) => links + self.links + link,
            Resource::BothWays(link) => links + 2 * self.links + link,
            Resource::Channels(node) => nodes + node,
            Resource::Network(machine) => nodes + self.nodes + machine,
            Resource::Cores => self.rates.len() - 1,
        }
    }
}

/// An op's request for resources, before its time is known.
#[derive(Default)]
pub(super) struct ResourceRequest {
    pub(super) fixed: f64,
    /// Shortest time in seconds, even if all resources are free.
    pub(super) least: f64,
    pub(super) amounts: Vec<(Resource, f64)>,
    pub(super) side: Side,
}

impl ResourceRequest {
    fn demand(self, resources: &Resources) -> Demand {
        let seconds = |(resource, amount): &(Resource, f64)| {
            amount / resources.rates[resources.index(*resource)]
        };
        let longest = self.amounts.iter().map(seconds).fold(self.least, f64::max);
        let alone = self.fixed + longest;
        let share = |request: &(Resource, f64)| {
            let share = if alone > 0.0 { seconds(request) / alone } else { 0.0 };
            (resources.index(request.0), share)
        };
        let uses = self.amounts.iter().map(share).filter(|(_, share)| *share > 0.0).collect();
        Demand { alone, uses, side: self.side }
    }
}

/// The demand of an op of one rank.
pub(super) fn of_rank(h: &Hardware, resources: &Resources, rank: usize, work: &Work) -> Demand {
    if let Some(measured) = &h.measured {
        return on_cores(measured, work, 1).demand(resources);
    }
    let request = match work.kind {
        WorkKind::Gemm { .. }
        | WorkKind::GroupedGemm { .. }
        | WorkKind::Attention { .. }
        | WorkKind::DeltaRule { .. }
        | WorkKind::Kernel => kernel(h, rank, work),
        WorkKind::Up | WorkKind::Down => copy(h, rank, work),
        WorkKind::Host => host(h, rank, work),
        WorkKind::Collective { .. } | WorkKind::Meeting { .. } => ResourceRequest::default(),
    };
    request.demand(resources)
}

fn copy(h: &Hardware, rank: usize, work: &Work) -> ResourceRequest {
    let (seat, bytes) = (&h.seats[rank], work.bytes as f64);
    let link = |link: &usize| match work.kind {
        WorkKind::Up => [(Resource::Up(*link), bytes), (Resource::BothWays(*link), bytes)],
        _ => [(Resource::Down(*link), bytes), (Resource::BothWays(*link), bytes)],
    };
    let mut amounts: Vec<_> = seat.links.iter().flat_map(link).collect();
    amounts.extend(
        seat.staging.iter().map(|(node, share)| (Resource::Channels(*node), bytes * share)),
    );
    let share = copy_share(h, work.cargo);
    let rate = |link: &usize| h.links[*link] * link_share(h.links[*link]);
    let slowest = seat.links.iter().map(rate).fold(f64::INFINITY, f64::min);
    let side = if matches!(work.kind, WorkKind::Down) { Side::Down } else { Side::Device };
    ResourceRequest { fixed: COPY_START, least: bytes / (slowest * share), amounts, side }
}

/// Share of a link that a rank's copy gets. Before DeepSpeed's `round_robin_gradients`, in 2020,
/// consecutive gradients belonged to one rank. Then one rank of a data-parallel group copied
/// gradients that all ranks of onebox copy in parallel.
fn copy_share(h: &Hardware, cargo: Cargo) -> f64 {
    match cargo {
        Cargo::Checkpoint => h.gpu.checkpoint_share_2020(),
        Cargo::Gradient if h.gpu.did(Fact::OneCopier) => 1.0 / h.dp_size as f64,
        Cargo::Activation | Cargo::Gradient | Cargo::Other => 1.0,
    }
}

fn host(h: &Hardware, rank: usize, work: &Work) -> ResourceRequest {
    let (seat, mut bytes) = (&h.seats[rank], work.bytes as f64);
    let mut rate = seat.cores * h.core_memory;
    if work.name == "adam_tile" {
        let (share, times) = h.gpu.adam_2020();
        bytes *= times;
        rate = share.map_or(rate, |share| rate.min(share * channels_of_rank(h, seat.machine)));
    }
    let nodes = seat.states.len().max(1) as f64;
    let amounts = seat.states.iter().map(|n| (Resource::Channels(*n), bytes / nodes)).collect();
    ResourceRequest { fixed: TASK_START, least: bytes / rate, amounts, side: Side::Cores }
}

/// Bytes per second of a machine's memory channels, divided by its number of ranks.
fn channels_of_rank(h: &Hardware, machine: usize) -> f64 {
    let ranks = h.seats.iter().filter(|s| s.machine == machine).count() as f64;
    let machines = h.seats.iter().map(|s| s.machine + 1).max().unwrap_or(1) as f64;
    h.nodes.iter().sum::<f64>() / machines / ranks
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
    let request = match work.kind {
        WorkKind::Collective { .. } if n > 1 => collectives::collective(h, members, work),
        WorkKind::Meeting { .. } if n > 1 => {
            ResourceRequest { fixed: across::host_sum(h, members), ..ResourceRequest::default() }
        }
        _ => ResourceRequest { fixed: KERNEL_GAP, ..ResourceRequest::default() },
    };
    request.demand(resources)
}

/// The cost of a virtual GPU's op in core time. `members` ranks take part, each in its own thread.
fn on_cores(m: &MeasuredMachine, work: &Work, members: usize) -> ResourceRequest {
    let wide = usize::from(work.wide);
    let rate = |op: &str| m.ops.iter().find(|(name, _)| name == op).map(|(_, rates)| rates[wide]);
    let by_name = rate(work.name);
    let seconds = match work.kind {
        WorkKind::Gemm { .. } => {
            let separate_op =
                |(name, bytes): (&str, u64)| bytes as f64 / rate(name).unwrap_or(m.other);
            let product = m.gemm[wide].seconds(work.flops, work.bytes as f64);
            product + work.separate_op.map_or(0.0, separate_op)
        }
        WorkKind::GroupedGemm { .. } => m.gemm[wide].seconds(work.flops, work.bytes as f64),
        WorkKind::Attention { backward, .. } => {
            m.attention[usize::from(backward)].seconds(work.flops, work.bytes as f64)
        }
        WorkKind::Collective { rounds, .. } => {
            f64::from(rounds) * work.bytes as f64 * members as f64 / by_name.unwrap_or(m.other)
        }
        WorkKind::Meeting { .. } => 0.0,
        WorkKind::Up
        | WorkKind::Down
        | WorkKind::DeltaRule { .. }
        | WorkKind::Kernel
        | WorkKind::Host => work.bytes as f64 / by_name.unwrap_or(m.other),
    };
    let met = work.kind.group().is_some() && members > 1;
    let threads = if met { members as f64 } else { m.threads };
    // A rank's threads share an op if it takes longer than waking the threads.
    let shared = if met { 0.0 } else { m.threads_start } + seconds / threads;
    ResourceRequest {
        fixed: m.overhead + if met { m.meeting } else { 0.0 },
        least: shared.min(if met { shared } else { seconds }),
        amounts: vec![(Resource::Cores, seconds)],
        side: Side::Device,
    }
}
