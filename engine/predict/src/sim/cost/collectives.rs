//! Costs of collectives on the GPUs' links: NVLink by generation, number of ranks and size, and PCIe.

use super::{COLLECTIVE_HOP, KERNEL_GAP, Resource, ResourceRequest, across, link_share};
use crate::sim::hardware::Hardware;
use crate::sim::program::{Work, WorkKind};
use std::collections::BTreeSet;

/// Share of NVLink that large collectives reach on a V100 (130 GB/s of 150 on a DGX-2), and on pairs
/// of RTX cards.
pub const NVLINK_SHARE: f64 = 0.87;

/// Share of a PCIe link that sums over 2, 3 to 5, and more GPUs reach, if the box does not say it.
/// A server with 8 RTX PRO 6000 has these rates: 38, 26 and 20 GB/s of 63. A server with 8
/// L40S reaches 20, 5.1 and 1.5 of 31.5; tuned hosts reach 41 of 63 on 8 GPUs.
pub const PCIE_SUM_SHARES: [f64; 3] = [0.6, 0.4, 0.3];

/// Seconds until a collective of one rank moves bytes.
const COLLECTIVE_START: f64 = 12e-6;

/// Rate of NCCL's protocols for short messages, relative to the rate of the protocol for large messages.
const QUICK_RATE: f64 = 0.5;

/// Speed of collectives of a number of ranks on NVSwitch.
#[derive(Clone, Copy)]
struct GroupRates {
    /// Share of the nominal NVLink rate that a large collective reaches.
    share: f64,
    /// Microseconds in addition to the bytes' time in a large collective.
    large: f64,
    /// Microseconds in addition to the bytes' time at [`QUICK_RATE`], with which short collectives
    /// run.
    quick: f64,
}

const fn rates(share: f64, large: f64, quick: f64) -> GroupRates {
    GroupRates { share, large, quick }
}

/// Rates of a GPU generation for 2, 4 and 8 ranks. NCCL's measured times of 1, 16 and 256 MiB give them
/// (NVIDIA's aiconfigurator, `systems/data/*/nccl`). The times of the H200 were not used: they check the
/// rates of the H100.
struct Generation {
    /// All-reduce. On 8 GPUs from sm_90 on, the switches add.
    sums: [GroupRates; 3],
    /// All-gather, reduce-scatter and broadcast.
    gathers: [GroupRates; 3],
}

const SM_80: Generation = Generation {
    sums: [rates(0.64, 41.0, 30.0), rates(0.72, 67.0, 15.0), rates(0.75, 85.0, 22.0)],
    gathers: [rates(0.50, 37.0, 13.0), rates(0.64, 53.0, 14.0), rates(0.68, 63.0, 18.0)],
};

const SM_90: Generation = Generation {
    sums: [rates(0.70, 29.0, 8.0), rates(0.78, 27.0, 9.0), rates(1.01, 57.0, 17.0)],
    gathers: [rates(0.57, 23.0, 7.0), rates(0.71, 27.0, 9.0), rates(0.74, 25.0, 12.0)],
};

const SM_100: Generation = Generation {
    sums: [rates(0.60, 22.0, 10.0), rates(0.75, 58.0, 14.0), rates(0.79, 58.0, 25.0)],
    gathers: [rates(0.50, 19.0, 10.0), rates(0.68, 37.0, 12.0), rates(0.78, 58.0, 16.0)],
};

/// Rates of `ranks` GPUs of compute capability `sm` on NVSwitch; `None` for GPUs without own rates.
fn of_generation(sm: u32, ranks: usize, is_sum: bool) -> Option<GroupRates> {
    let generation = match sm {
        80 => SM_80,
        90 => SM_90,
        100..=119 => SM_100,
        _ => return None,
    };
    let all = if is_sum { generation.sums } else { generation.gathers };
    Some(all[by_ranks(ranks)])
}

/// Index of a number of ranks in a table for 2, 3 to 5, and more ranks.
const fn by_ranks(ranks: usize) -> usize {
    match ranks {
        0..=2 => 0,
        3..=5 => 1,
        _ => 2,
    }
}

/// Share of the nominal NVLink rate that a large all-reduce of `ranks` GPUs of compute capability `sm`
/// reaches. A measured rate divided by it is the rate of a box.
pub fn nvlink_sum_share(sm: u32, ranks: usize) -> f64 {
    of_generation(sm, ranks, true).map_or(NVLINK_SHARE, |rates| rates.share)
}

/// A collective of `members`. Each member contributes `work.bytes`.
pub(super) fn collective(h: &Hardware, members: &[usize], work: &Work) -> ResourceRequest {
    let n = members.len();
    let WorkKind::Collective { rounds, .. } = work.kind else {
        return ResourceRequest { fixed: KERNEL_GAP, ..ResourceRequest::default() };
    };
    // A ring, or an equally fast algorithm: every rank sends and receives this many bytes.
    let crossing = f64::from(rounds) * (n - 1) as f64 / n as f64 * work.bytes as f64;
    let mut request = ring(h, members, crossing, rounds == 2);
    // Each rank also reads and writes its own memory.
    request.amounts.extend(members.iter().map(|&r| (Resource::Memory(r), 2.0 * crossing)));
    request.fixed += across::hops(h, members, rounds);
    request
}

/// Bytes that pass every rank of a ring, on the links between them, and the time to start.
fn ring(h: &Hardware, members: &[usize], crossing: f64, is_sum: bool) -> ResourceRequest {
    let start = COLLECTIVE_START + COLLECTIVE_HOP * (members.len() - 1) as f64;
    let mut request = ResourceRequest { fixed: start, ..ResourceRequest::default() };
    let machine = |rank: usize| h.seats[rank].machine;
    let machines: BTreeSet<usize> = members.iter().map(|&r| machine(r)).collect();
    if machines.len() > 1 {
        request.amounts.extend(machines.iter().map(|&m| (Resource::Network(m), crossing)));
    }
    for &rank in members {
        let rates = to_peers(h, members, rank);
        if rates.is_empty() {
            continue;
        }
        let switched = rates.len() > 1 && rates.iter().all(|rate| *rate == rates[0]);
        if joined(&rates) {
            // GPUs on switches use all links for one peer or for all; without switches each pair
            // has its own links.
            let rate = if switched { rates[0] } else { rates.iter().sum() };
            let seconds = match of_generation(h.gpu.sm, rates.len() + 1, is_sum) {
                None => crossing / (rate * NVLINK_SHARE),
                Some(rates) => {
                    let bytes = crossing / (rate * rates.share);
                    let large = (rates.large * 1e-6, bytes);
                    let quick = (rates.quick * 1e-6, bytes / QUICK_RATE);
                    let is_quick = quick.0 + quick.1 < large.0 + large.1;
                    let (start, seconds) = if is_quick { quick } else { large };
                    // Between boxes the network's protocol starts.
                    if machines.len() == 1 {
                        request.fixed = start;
                    }
                    seconds
                }
            };
            request.amounts.push((Resource::NvLink(rank), seconds));
        } else {
            over_pcie(h, rank, rates.len() + 1, crossing, &mut request);
        }
    }
    request
}

/// NVLink bytes per second between `rank` and each other member in its box.
fn to_peers(h: &Hardware, members: &[usize], rank: usize) -> Vec<f64> {
    let machine = |rank: usize| h.seats[rank].machine;
    let inside = members.iter().filter(|&&other| machine(other) == machine(rank));
    inside.filter(|&&other| other != rank).map(|&other| h.nvlink[rank][other]).collect()
}

/// Whether NVLink joins a rank into a ring with peers at these rates.
fn joined(rates: &[f64]) -> bool {
    let links = rates.iter().filter(|rate| **rate > 0.0).count();
    links == rates.len() || links >= 2
}

/// Whether the ring of `members` crosses PCIe.
pub(in crate::sim) fn crosses_pcie(h: &Hardware, members: &[usize]) -> bool {
    let peers = members.iter().map(|&rank| to_peers(h, members, rank));
    peers.into_iter().any(|rates| !rates.is_empty() && !joined(&rates))
}

/// Adds the bytes of `rank` in a ring of `ranks` GPUs without NVLink. The rates of hosts differ by
/// a factor of 15, so the measured rate of the box is used, if the box has one.
fn over_pcie(
    h: &Hardware,
    rank: usize,
    ranks: usize,
    crossing: f64,
    request: &mut ResourceRequest,
) {
    let links = &h.seats[rank].links;
    let slowest = links.iter().map(|link| h.links[*link]).fold(f64::INFINITY, f64::min);
    request.least = request.least.max(crossing / pcie_sums(h.pcie_sums, slowest, ranks));
    for &link in links {
        for way in [Resource::Up(link), Resource::Down(link)] {
            // A ring crosses a shared link once each way, for any number of GPUs below the link.
            if !request.amounts.iter().any(|(used, _)| *used == way) {
                request.amounts.push((way, crossing));
            }
        }
    }
}

/// Bytes per second at which each of `ranks` GPUs sends in a sum over PCIe: the box's `measured` rate,
/// or if it is 0 a share of the nominal rate of a link. It is never above what copies reach.
pub fn pcie_sums(measured: f64, link: f64, ranks: usize) -> f64 {
    let assumed = link * PCIE_SUM_SHARES[by_ranks(ranks)];
    let rate = if measured > 0.0 { measured } else { assumed };
    rate.min(link * link_share(link))
}
