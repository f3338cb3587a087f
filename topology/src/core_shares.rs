//! Deals the cores of a box to seats: every core once, whole caches if the numbers allow.

use std::collections::{BTreeMap, HashSet};
use std::iter;

use crate::{Core, Machine};

/// The cores of one seat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CoreShare {
    /// The node of its first cores.
    pub(crate) home: Option<u32>,
    /// (node, allowed logical CPUs of one core).
    pub(crate) cores: Vec<(u32, Vec<u32>)>,
}

/// The cores of all seats.
#[derive(Debug, Default)]
pub(crate) struct CoreShares {
    pub(crate) shares: Vec<CoreShare>,
    /// Nodes whose allowed cores stay idle, since no seat is on their socket.
    pub(crate) idle: Vec<u32>,
    /// Whether several seats share cores.
    pub(crate) shared: bool,
}

/// A core with at least one allowed CPU.
struct UsableCore<'a> {
    core: &'a Core,
    cpus: Vec<u32>,
}

/// Deals the allowed cores to seats. Each seat is next to a node, or its node is unknown.
///
/// A seat's home is its node, or the nearest node with allowed cores. A node that is no seat's home
/// goes to a home of its socket: the nearest by distance, then the one with the fewest cores per
/// seat. With `all_sockets`, nodes of a socket without a home go to the nearest home elsewhere.
/// Seats of one home split each of their nodes evenly, so that all are equally fast.
pub(crate) fn deal(machine: &Machine, seats: &[Option<u32>], all_sockets: bool) -> CoreShares {
    let nodes = usable(machine);
    let shares = vec![CoreShare::default(); seats.len()];
    let mut dealt = CoreShares { shares, ..CoreShares::default() };
    if nodes.is_empty() {
        return dealt;
    }
    let homes = homes(machine, &nodes, seats);
    let mut groups: BTreeMap<u32, Group> = BTreeMap::new();
    for (seat, home) in homes.iter().enumerate() {
        let group = groups.entry(*home).or_insert_with(|| Group::at(*home, &nodes));
        group.seats.push(seat);
    }
    for node in nodes.keys().filter(|node| !homes.contains(node)) {
        match nearest_home(machine, &groups, *node, all_sockets) {
            Some(home) => {
                let group = groups.entry(home).or_insert_with(|| Group::at(home, &nodes));
                group.nodes.push(*node);
                group.cores += nodes[node].len();
            }
            None => dealt.idle.push(*node),
        }
    }
    for (home, group) in &groups {
        dealt.shared |= share_out(*home, group, &nodes, &mut dealt.shares);
    }
    dealt
}

/// Seats with one home, and the nodes that they split.
struct Group {
    seats: Vec<usize>,
    nodes: Vec<u32>,
    cores: usize,
}

impl Group {
    fn at(home: u32, nodes: &BTreeMap<u32, Vec<UsableCore<'_>>>) -> Self {
        Self { seats: Vec::new(), nodes: vec![home], cores: nodes.get(&home).map_or(0, Vec::len) }
    }
}

/// The allowed cores of each node with at least one.
fn usable(machine: &Machine) -> BTreeMap<u32, Vec<UsableCore<'_>>> {
    let allowed: HashSet<u32> = machine.allowed_cpus.iter().copied().collect();
    let mut nodes: BTreeMap<u32, Vec<UsableCore<'_>>> = BTreeMap::new();
    for core in &machine.cores {
        let cpus: Vec<u32> =
            core.cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
        if !cpus.is_empty() {
            nodes.entry(core.numa_node).or_default().push(UsableCore { core, cpus });
        }
    }
    nodes
}

/// The home of each seat.
fn homes(
    machine: &Machine,
    nodes: &BTreeMap<u32, Vec<UsableCore<'_>>>,
    seats: &[Option<u32>],
) -> Vec<u32> {
    let mut load: BTreeMap<u32, usize> = BTreeMap::new();
    for node in seats.iter().flatten().filter(|node| nodes.contains_key(node)) {
        *load.entry(*node).or_default() += 1;
    }
    let mut home = |seat: &Option<u32>| {
        if let Some(node) = seat.filter(|node| nodes.contains_key(node)) {
            return node;
        }
        let crowd = |node: &u32| {
            let seats = load.get(node).copied().unwrap_or(0);
            // In thousandths. A large node gets more of the seats without cores on their own node.
            seats * 1000 / nodes[node].len().max(1)
        };
        let far = |node: &u32| seat.map_or(0, |from| machine.distance(from, *node));
        let best = nodes.keys().min_by_key(|node| (far(node), crowd(node), **node)).copied();
        let best = best.unwrap_or_else(|| unreachable!("some node has cores that may be used"));
        *load.entry(best).or_default() += 1;
        best
    };
    seats.iter().map(&mut home).collect()
}

/// The home that gets a node without seats: on the same socket, or with `all_sockets` on any
/// socket.
fn nearest_home(
    machine: &Machine,
    groups: &BTreeMap<u32, Group>,
    node: u32,
    all_sockets: bool,
) -> Option<u32> {
    let package = |id: u32| machine.numa_node(id).map(|node| node.package);
    let same = |home: u32| package(home) == package(node);
    // A home on the same socket comes first, whatever distance the box reports.
    let elsewhere = all_sockets && !groups.keys().any(|home| same(*home));
    let on_socket = groups.iter().filter(|(home, _)| elsewhere || same(**home));
    let key = |(home, group): &(&u32, &Group)| {
        let per_seat = group.cores / group.seats.len().max(1);
        (machine.distance(**home, node), per_seat, home.abs_diff(node), **home)
    };
    on_socket.min_by_key(key).map(|(home, _)| *home)
}

/// Splits the nodes of a group among its seats. Returns whether seats have to share cores.
fn share_out(
    home: u32,
    group: &Group,
    nodes: &BTreeMap<u32, Vec<UsableCore<'_>>>,
    shares: &mut [CoreShare],
) -> bool {
    let n = group.seats.len();
    let cores_of = |node: &u32| nodes.get(node).map_or(&[][..], Vec::as_slice);
    for seat in &group.seats {
        shares[*seat].home = Some(home);
    }
    if cores_of(&home).len() < n {
        // Too few cores at home: all cores of the group form one row.
        let give = |node: &u32| {
            let node = *node;
            cores_of(&node).iter().map(move |core| (node, core.cpus.clone())).collect::<Vec<_>>()
        };
        let all: Vec<(u32, Vec<u32>)> = group.nodes.iter().flat_map(give).collect();
        for (index, seat) in group.seats.iter().enumerate() {
            let start = index * all.len() / n;
            let end = ((index + 1) * all.len() / n).max(start + 1).min(all.len());
            shares[*seat].cores.extend_from_slice(&all[start..end]);
        }
        return all.len() < n;
    }
    for node in &group.nodes {
        for cores in by_kind(cores_of(node)) {
            let bounds = match cores.len() == cores_of(node).len() {
                true => bounds(&cores, n),
                false => {
                    let have = group.seats.iter().map(|seat| shares[*seat].cores.len());
                    even_bounds(cores.len(), &have.collect::<Vec<_>>())
                }
            };
            for (seat, range) in group.seats.iter().zip(bounds.windows(2)) {
                let own = cores[range[0]..range[1]].iter();
                shares[*seat].cores.extend(own.map(|core| (*node, core.cpus.clone())));
            }
        }
    }
    false
}

/// The cores of each kind, the fastest first.
fn by_kind<'a, 'm>(cores: &'a [UsableCore<'m>]) -> Vec<Vec<&'a UsableCore<'m>>> {
    let mut kinds: BTreeMap<Option<usize>, Vec<&UsableCore<'_>>> = BTreeMap::new();
    cores.iter().for_each(|core| kinds.entry(core.core.kind).or_default().push(core));
    kinds.into_values().collect()
}

/// Indexes that cut a row of `cores` cores into one part per seat. The parts are equal; the
/// remaining cores go to the seats that `have` the fewest cores.
fn even_bounds(cores: usize, have: &[usize]) -> Vec<usize> {
    let (each, more) = (cores / have.len(), cores % have.len());
    let mut seats: Vec<usize> = (0..have.len()).collect();
    seats.sort_by_key(|seat| have[*seat]);
    let gets_more = |seat: usize| seats[..more].contains(&seat);
    let size = |seat: usize| each + usize::from(gets_more(seat));
    let ends = (0..have.len()).scan(0, |end, seat| {
        *end += size(seat);
        Some(*end)
    });
    iter::once(0).chain(ends).collect()
}

/// Indexes that cut a row of cores into `n` parts: at the ends of caches if each part then differs
/// from the even share by at most a quarter, else evenly.
fn bounds(cores: &[&UsableCore<'_>], n: usize) -> Vec<usize> {
    let even: Vec<usize> = (0..=n).map(|i| i * cores.len() / n).collect();
    let cache_ends: Vec<usize> = iter::once(0)
        .chain((1..cores.len()).filter(|i| cores[i - 1].core.l3 != cores[*i].core.l3))
        .chain([cores.len()])
        .collect();
    let snap = |at: &usize| cache_ends.iter().copied().min_by_key(|end| end.abs_diff(*at));
    let snapped: Vec<usize> = even.iter().filter_map(snap).collect();
    let near = |part: &[usize]| {
        let size = part[1].saturating_sub(part[0]);
        size > 0 && (size * n).abs_diff(cores.len()) * 4 <= cores.len()
    };
    if snapped.windows(2).all(near) { snapped } else { even }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores_of(share: &CoreShare) -> Vec<u32> {
        share.cores.iter().map(|(_, cpus)| cpus[0]).collect()
    }

    #[test]
    fn cuts_fall_between_caches_where_parts_stay_even() {
        // Two nodes, each with two caches of four cores.
        let machine = Machine::from_synthetic("pack:2 numa:1 l3:2 core:4 pu:1").unwrap();
        let dealt = deal(&machine, &[Some(0), Some(0), Some(1)], false);
        assert_eq!(
            dealt.shares.iter().map(cores_of).collect::<Vec<_>>(),
            [vec![0, 1, 2, 3], vec![4, 5, 6, 7], (8..16).collect()]
        );
        // Three parts of eight cores: with whole caches one part would stay empty.
        let dealt = deal(&machine, &[Some(0); 3], false);
        let sizes: Vec<_> = dealt.shares.iter().map(|share| share.cores.len()).collect();
        assert_eq!(sizes, [2, 3, 3]);
        assert_eq!(dealt.idle, [1]);
    }

    #[test]
    fn nodes_without_ranks_go_to_their_socket() {
        let machine = Machine::from_synthetic("pack:2 numa:4 core:4 pu:1").unwrap_or_else(|_| {
            Machine::from_synthetic("pack:2 group:4 numa:1 core:4 pu:1").unwrap()
        });
        let dealt = deal(&machine, &[Some(3), Some(1), Some(6)], false);
        let nodes = |share: &CoreShare| {
            let mut nodes: Vec<u32> = share.cores.iter().map(|(node, _)| *node).collect();
            nodes.dedup();
            nodes
        };
        assert_eq!(
            dealt.shares.iter().map(nodes).collect::<Vec<_>>(),
            [vec![3, 2], vec![1, 0], vec![6, 4, 5, 7]]
        );
        assert!(dealt.idle.is_empty() && !dealt.shared);
    }

    #[test]
    fn sockets_without_a_seat_are_dealt_where_all_are_wanted() {
        let machine = Machine::from_synthetic("pack:4 numa:1 core:4 pu:1").unwrap();
        let nodes = |seats: &[Option<u32>], all| {
            let dealt = deal(&machine, seats, all);
            let nodes = |share: &CoreShare| {
                let mut nodes: Vec<u32> = share.cores.iter().map(|(node, _)| *node).collect();
                nodes.dedup();
                nodes
            };
            (dealt.shares.iter().map(nodes).collect::<Vec<_>>(), dealt.idle)
        };
        assert_eq!(nodes(&[Some(1)], false), (vec![vec![1]], vec![0, 2, 3]));
        assert_eq!(nodes(&[Some(1)], true), (vec![vec![1, 0, 2, 3]], vec![]));
        assert_eq!(nodes(&[Some(1), Some(2)], true), (vec![vec![1, 0], vec![2, 3]], vec![]));
        assert_eq!(nodes(&[Some(1), Some(1)], true), (vec![vec![1, 0, 2, 3]; 2], vec![]));
    }

    #[test]
    fn more_seats_than_cores_share_them() {
        let machine = Machine::from_synthetic("core:2 pu:1").unwrap();
        let dealt = deal(&machine, &[None; 4], false);
        assert!(dealt.shared);
        assert_eq!(dealt.shares.iter().map(cores_of).collect::<Vec<_>>(), [[0], [0], [1], [1]]);
    }
}
