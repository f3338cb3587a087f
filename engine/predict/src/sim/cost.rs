//! The cost of an op: its use of resources, and its time if nothing else runs.
//!
//! A resource has a rate, and several ops may use it at the same time. The constants here are few
//! and the same for every box and model. None is fitted to a whole step: each is the fraction of a
//! data sheet's rate that one kind of op reaches.

mod across;
mod kernels;

use super::hardware::{Hardware, MeasuredMachine};
use super::program::{Work, WorkKind};
use super::share::Side;
#[cfg(test)]
pub(super) use across::GroupSpread;
pub(super) use across::meeting;
use config::Fact;
use device::Cargo;
pub use kernels::WIDE_SHARE;
use kernels::kernel;

/// Share of a GPU's memory bandwidth that streaming kernels reach.
pub const MEMORY_SHARE: f64 = 0.8;

/// Share of a PCIe link that large pinned copies reach: 12.3 GB/s of 15.75.
pub const LINK_SHARE: f64 = 0.78;

/// Share of NVLink that large collectives reach: 130 GB/s of 150.
pub const NVLINK_SHARE: f64 = 0.87;

/// Share of the network between boxes that collectives reach.
const NETWORK_SHARE: f64 = 0.85;

/// Share of a node's memory channels that one fused pass reaches, reading and writing.
pub const CHANNEL_SHARE: f64 = 0.8;

/// Seconds from the end of a kernel to the start of the next on its stream.
pub(super) const KERNEL_GAP: f64 = 2e-6;

/// Seconds until a copy moves bytes.
const COPY_START: f64 = 8e-6;

/// Seconds until a collective moves bytes, and additional seconds for each further rank.
const COLLECTIVE_START: f64 = 12e-6;
const COLLECTIVE_HOP: f64 = 2e-6;

/// Seconds until a host task starts, and seconds until ranks of one process have met.
const TASK_START: f64 = 2e-6;
const MEETING: f64 = 3e-5;

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
        WorkKind::Gemm { .. } | WorkKind::Attention { .. } | WorkKind::Kernel => {
            kernel(h, rank, work)
        }
        WorkKind::Up | WorkKind::Down => copy(h, rank, work),
        WorkKind::Host => host(h, rank, work),
        WorkKind::Collective { .. } | WorkKind::Meeting { .. } => ResourceRequest::default(),
    };
    request.demand(resources)
}

fn copy(h: &Hardware, rank: usize, work: &Work) -> ResourceRequest {
    let (seat, bytes) = (&h.seats[rank], work.bytes as f64);
    let link = |link: &usize| match work.kind {
        WorkKind::Up => (Resource::Up(*link), bytes),
        _ => (Resource::Down(*link), bytes),
    };
    let mut amounts: Vec<_> = seat.links.iter().map(link).collect();
    amounts.extend(
        seat.staging.iter().map(|(node, share)| (Resource::Channels(*node), bytes * share)),
    );
    let share = copy_share(h, work.cargo);
    let slowest = seat.links.iter().map(|link| h.links[*link]).fold(f64::INFINITY, f64::min);
    let side = if matches!(work.kind, WorkKind::Down) { Side::Down } else { Side::Device };
    ResourceRequest {
        fixed: COPY_START,
        least: bytes / (slowest * LINK_SHARE * share),
        amounts,
        side,
    }
}

/// Share of a link that a rank's copy gets. Before DeepSpeed's `round_robin_gradients`, in 2020,
/// consecutive gradients belonged to one rank. One rank of a data-parallel group then copied
/// gradients that here all ranks copy in parallel.
fn copy_share(h: &Hardware, cargo: Cargo) -> f64 {
    match cargo {
        Cargo::Checkpoint => h.gpu.checkpoint_share_2020(),
        Cargo::Gradient if h.gpu.did(Fact::OneCopier) => 1.0 / h.dp_size as f64,
        Cargo::Gradient | Cargo::Other => 1.0,
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
        WorkKind::Collective { rounds, .. } if n > 1 => {
            // A ring, or an equally fast algorithm: every rank sends and receives this many bytes.
            let crossing = f64::from(rounds) * (n - 1) as f64 / n as f64 * work.bytes as f64;
            let mut request = ring(h, members, crossing);
            // Each rank also reads and writes its own memory.
            request.amounts.extend(members.iter().map(|&r| (Resource::Memory(r), 2.0 * crossing)));
            request.fixed = COLLECTIVE_START + COLLECTIVE_HOP * (n - 1) as f64;
            request.fixed += across::hops(h, members, rounds);
            request
        }
        WorkKind::Meeting { .. } if n > 1 => {
            ResourceRequest { fixed: across::host_sum(h, members), ..ResourceRequest::default() }
        }
        _ => ResourceRequest { fixed: KERNEL_GAP, ..ResourceRequest::default() },
    };
    request.demand(resources)
}

/// The bytes that pass every rank of a ring, on the links between them.
fn ring(h: &Hardware, members: &[usize], crossing: f64) -> ResourceRequest {
    let mut request = ResourceRequest::default();
    let machine = |rank: usize| h.seats[rank].machine;
    let machines: std::collections::BTreeSet<usize> = members.iter().map(|&r| machine(r)).collect();
    if machines.len() > 1 {
        request.amounts.extend(machines.iter().map(|&m| (Resource::Network(m), crossing)));
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
            // GPUs on switches use all links for one peer or for all; without switches each pair
            // has its own links.
            let rate = if switched { rates[0] } else { rates.iter().sum() };
            request.amounts.push((Resource::NvLink(rank), crossing / (rate * NVLINK_SHARE)));
        } else {
            for &link in &h.seats[rank].links {
                for way in [Resource::Up(link), Resource::Down(link)] {
                    // A ring crosses a shared link once each way, for any number of GPUs below the
                    // link.
                    if !request.amounts.iter().any(|(used, _)| *used == way) {
                        request.amounts.push((way, crossing));
                    }
                }
            }
        }
    }
    request
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
        WorkKind::Attention { backward, .. } => {
            m.attention[usize::from(backward)].seconds(work.flops, work.bytes as f64)
        }
        WorkKind::Collective { rounds, .. } => {
            f64::from(rounds) * work.bytes as f64 * members as f64 / by_name.unwrap_or(m.other)
        }
        WorkKind::Meeting { .. } => 0.0,
        WorkKind::Up | WorkKind::Down | WorkKind::Kernel | WorkKind::Host => {
            work.bytes as f64 / by_name.unwrap_or(m.other)
        }
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
