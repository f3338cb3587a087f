//! Chooses the GPUs of each tensor-parallel group.

use crate::{Machine, Path};

/// Largest number of candidates that are compared one by one.
const MOST_CANDIDATES: u64 = 50_000;

/// The quality of a group: lower is better, earlier fields first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// MB/s of NVLink between the two members with the slowest connection, negated.
    nvlink: i64,
    /// The worst path and the sum over all pairs, if some pair has no NVLink.
    pcie: (Path, usize),
    /// MB/s of the slowest chosen GPU while all chosen GPUs copy, negated. Counts only if GPUs
    /// stay idle.
    host: i64,
    /// Number of NUMA nodes.
    nodes: usize,
    /// MB/s of the slowest member while all members copy, negated.
    spread: i64,
}

/// Chooses `dp` groups of `tp` GPUs, as indexes into [`Machine::gpus`], members in order of
/// address.
///
/// Members should reach each other by NVLink; without NVLink by the same switch, then on the same
/// node. Among equal groups the best one stays on one node and spreads its members over uplinks.
/// If GPUs stay idle, the GPUs that copy fastest together are chosen. `tp * dp` is at most the
/// number of `gpus`.
pub(crate) fn choose(machine: &Machine, gpus: &[usize], tp: usize, dp: usize) -> Vec<Vec<usize>> {
    let links = Links::of(machine);
    let mut left = gpus.to_vec();
    let all = tp * dp == left.len();
    let mut chosen: Vec<Vec<usize>> = Vec::new();
    while chosen.len() < dp {
        let taken: Vec<usize> = chosen.concat();
        let best = best_group(machine, &links, &left, tp, &taken, all);
        left.retain(|gpu| !best.contains(gpu));
        chosen.push(best);
    }
    chosen.sort();
    chosen
}

fn best_group(
    machine: &Machine,
    links: &Links,
    left: &[usize],
    tp: usize,
    taken: &[usize],
    all: bool,
) -> Vec<usize> {
    if tp == left.len() || candidates(left.len(), tp) > MOST_CANDIDATES {
        return left[..tp].to_vec();
    }
    let mut best: Option<(Cost, Vec<usize>)> = None;
    let mut consider = |group: &[usize]| {
        let cost = cost(machine, links, group, taken, all);
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, group.to_vec()));
        }
    };
    // If all GPUs are used, some group contains the first one: it begins a group.
    let fixed = usize::from(all);
    let mut group = left[..fixed].to_vec();
    combine(&left[fixed..], tp - fixed, &mut group, &mut consider);
    best.map_or_else(|| left[..tp].to_vec(), |(_, group)| group)
}

/// Calls `consider` with every choice of `count` more members, in order.
fn combine(
    from: &[usize],
    count: usize,
    group: &mut Vec<usize>,
    consider: &mut impl FnMut(&[usize]),
) {
    if count == 0 {
        return consider(group);
    }
    for (index, gpu) in from.iter().enumerate() {
        if from.len() - index < count {
            break;
        }
        group.push(*gpu);
        combine(&from[index + 1..], count - 1, group, consider);
        group.pop();
    }
}

/// Ways to choose `k` of `n`, saturating.
fn candidates(n: usize, k: usize) -> u64 {
    let k = k.min(n - k);
    (0..k).fold(1u64, |ways, i| ways.saturating_mul((n - i) as u64) / (i as u64 + 1))
}

fn cost(machine: &Machine, links: &Links, group: &[usize], taken: &[usize], all: bool) -> Cost {
    let pairs = || {
        let each = group.iter().enumerate();
        each.flat_map(|(i, a)| group[i + 1..].iter().map(move |b| (*a, *b)))
    };
    let both = |(a, b)| machine.nvlink_mb_per_s(a, b).min(machine.nvlink_mb_per_s(b, a));
    let nvlink = pairs().map(both).min().unwrap_or(0);
    let pcie = if nvlink > 0 {
        (Path::Same, 0)
    } else {
        let worst = pairs().map(|(a, b)| links.pcie[a][b]).max().unwrap_or(Path::Same);
        (worst, pairs().map(|(a, b)| steps(links.pcie[a][b])).sum())
    };
    let together: Vec<usize> = if all { Vec::new() } else { [taken, group].concat() };
    let mut nodes: Vec<Option<u32>> =
        group.iter().map(|gpu| machine.gpus[*gpu].numa_node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    Cost {
        nvlink: -i64::try_from(nvlink).unwrap_or(i64::MAX),
        pcie,
        host: -links.slowest(&together),
        nodes: nodes.len(),
        spread: -links.slowest(group),
    }
}

fn steps(path: Path) -> usize {
    match path {
        Path::Same | Path::NvLink(_) => 0,
        Path::Pix => 1,
        Path::Pxb => 2,
        Path::Phb => 3,
        Path::Node => 4,
        Path::Sys => 5,
    }
}

/// Speeds of the links, computed once.
struct Links {
    /// For each GPU: (link, GB/s).
    up: Vec<Vec<(usize, f64)>>,
    pcie: Vec<Vec<Path>>,
}

impl Links {
    fn of(machine: &Machine) -> Self {
        let n = machine.gpus.len();
        let up = |gpu| machine.hops(gpu).into_iter().map(|hop| (hop.below, hop.gb_per_s));
        Self {
            up: (0..n).map(|gpu| up(gpu).collect()).collect(),
            pcie: (0..n).map(|a| (0..n).map(|b| machine.pcie_path(a, b)).collect()).collect(),
        }
    }

    /// MB/s of the slowest of these GPUs while all of them copy.
    fn slowest(&self, gpus: &[usize]) -> i64 {
        let users = |link: usize| {
            let uses = |gpu: &&usize| self.up[**gpu].iter().any(|(other, _)| *other == link);
            gpus.iter().filter(uses).count().max(1)
        };
        let all = gpus.iter().flat_map(|gpu| &self.up[*gpu]);
        let share = all.map(|(link, gb_per_s)| gb_per_s * 1000.0 / users(*link) as f64);
        share.min_by(f64::total_cmp).map_or(0, |least| least as i64)
    }
}
