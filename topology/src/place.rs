//! Which rank runs where.
//!
//! A first rule that looks at cores and memory only: neighbouring ranks share a node, and each has its own cores there.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::{Core, Machine};

/// The place of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// The rank.
    pub rank: usize,
    /// The [`NumaNode::id`](crate::NumaNode::id) whose memory the rank should use.
    pub numa_node: u32,
    /// The logical CPUs of the rank's cores, ascending, siblings included. Empty only if the machine has no core that
    /// this process may use.
    pub cpus: Vec<u32>,
}

/// Deals `world_size` ranks over the NUMA nodes, as evenly as the numbers allow, in blocks: with 16 ranks on two nodes,
/// ranks 0-7 go to the first. Each rank gets a contiguous share of its node's allowed physical cores; with more ranks
/// than cores, several share one.
///
/// With fewer ranks than nodes the other nodes stay idle. A node without memory or without an allowed core gets no
/// rank, unless no node has both.
pub fn place_ranks(machine: &Machine, world_size: usize) -> Vec<RankPlace> {
    let nodes = usable_nodes(machine);
    let place = |rank| {
        let (index, ranks_before, ranks_here) = block_of(rank, world_size, nodes.len());
        let (numa_node, cores) = &nodes[index];
        let cpus = share(cores, rank - ranks_before, ranks_here);
        RankPlace { rank, numa_node: *numa_node, cpus }
    };
    (0..world_size).map(place).collect()
}

/// The allowed CPUs of one physical core.
type CoreCpus = Vec<u32>;

/// The nodes that can take ranks, each with its cores; never empty.
fn usable_nodes(machine: &Machine) -> Vec<(u32, Vec<CoreCpus>)> {
    let allowed: HashSet<u32> = machine.allowed_cpus.iter().copied().collect();
    let allowed_in = |core: &Core| -> CoreCpus {
        core.cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect()
    };
    let cores_on = |id: u32| -> Vec<CoreCpus> {
        let cores = machine.cores.iter().filter(|core| core.numa_node == id);
        cores.map(allowed_in).filter(|cpus| !cpus.is_empty()).collect()
    };
    let with_memory = machine.numa_nodes.iter().filter(|node| node.memory_bytes > 0);
    let nodes: Vec<_> = with_memory
        .map(|node| (node.id, cores_on(node.id)))
        .filter(|(_, cores)| !cores.is_empty())
        .collect();
    if !nodes.is_empty() {
        return nodes;
    }
    // Memory and CPUs are never together: all cores serve the first node that has memory.
    let first = machine.numa_nodes.iter().find(|node| node.memory_bytes > 0);
    let id = first.or(machine.numa_nodes.first()).map_or(0, |node| node.id);
    let cores = machine.cores.iter().map(allowed_in).filter(|cpus| !cpus.is_empty()).collect();
    vec![(id, cores)]
}

/// Splits `count` items into `blocks` even, contiguous blocks; returns the block of `item`, that block's first item
/// and its length.
fn block_of(item: usize, count: usize, blocks: usize) -> (usize, usize, usize) {
    let block = item * blocks / count;
    let first = (block * count).div_ceil(blocks);
    let end = ((block + 1) * count).div_ceil(blocks);
    (block, first, end - first)
}

/// The CPUs of the share `index` of `shares` of these cores: at least one core, if there is one at all.
fn share(cores: &[CoreCpus], index: usize, shares: usize) -> Vec<u32> {
    let start = index * cores.len() / shares;
    let end = ((index + 1) * cores.len() / shares).max(start + 1).min(cores.len());
    let mut cpus = cores[start..end].concat();
    cpus.sort_unstable();
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NumaNode;

    /// Nodes of 1 GiB with `cores` cores each, all cores numbered through, then their siblings.
    fn machine(nodes: u32, cores: u32, siblings: u32) -> Machine {
        let total = nodes * cores;
        let core = |c| (0..siblings).map(|s| s * total + c).collect::<Vec<u32>>();
        let node_cores = |n| (n * cores..(n + 1) * cores).map(core);
        Machine {
            numa_nodes: (0..nodes)
                .map(|id| NumaNode {
                    id,
                    cpus: node_cores(id).flatten().collect(),
                    memory_bytes: 1 << 30,
                })
                .collect(),
            cores: (0..nodes)
                .flat_map(|id| node_cores(id).map(move |cpus| Core { cpus, numa_node: id }))
                .collect(),
            allowed_cpus: (0..total * siblings).collect(),
            total_memory: u64::from(nodes) << 30,
        }
    }

    fn cpus_of(places: &[RankPlace]) -> Vec<Vec<u32>> {
        places.iter().map(|place| place.cpus.clone()).collect()
    }

    fn nodes_of(places: &[RankPlace]) -> Vec<u32> {
        places.iter().map(|place| place.numa_node).collect()
    }

    #[test]
    fn four_ranks_share_two_cores() {
        let places = place_ranks(&machine(1, 2, 1), 4);
        assert_eq!(cpus_of(&places), [[0], [0], [1], [1]]);
        assert_eq!(places.iter().map(|place| place.rank).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn sixteen_ranks_get_three_cores_each_on_two_nodes_of_24() {
        let places = place_ranks(&machine(2, 24, 2), 16);
        assert_eq!(nodes_of(&places), [[0; 8], [1; 8]].concat());
        assert_eq!(places[0].cpus, [0, 1, 2, 48, 49, 50]);
        assert_eq!(places[15].cpus, [45, 46, 47, 93, 94, 95]);
        let mut all = cpus_of(&places).concat();
        all.sort_unstable();
        assert_eq!(all, (0..96).collect::<Vec<_>>());
    }

    #[test]
    fn uneven_numbers_leave_no_core_idle_and_differ_by_one_at_most() {
        let places = place_ranks(&machine(2, 5, 1), 5);
        assert_eq!(nodes_of(&places), [0, 0, 0, 1, 1]);
        assert_eq!(cpus_of(&places), [vec![0], vec![1, 2], vec![3, 4], vec![5, 6], vec![7, 8, 9]]);
        assert_eq!(nodes_of(&place_ranks(&machine(4, 2, 1), 2)), [0, 2]);
    }

    #[test]
    fn only_allowed_cpus_are_given_out() {
        let mut machine = machine(2, 4, 2);
        machine.allowed_cpus = vec![1, 2, 10];
        let places = place_ranks(&machine, 2);
        assert_eq!(nodes_of(&places), [0, 0]);
        assert_eq!(cpus_of(&places), [vec![1], vec![2, 10]]);
    }

    #[test]
    fn a_node_without_memory_gets_no_rank_unless_no_node_has_memory_and_cores() {
        let mut machine = machine(2, 2, 1);
        machine.numa_nodes[0].memory_bytes = 0;
        assert_eq!(nodes_of(&place_ranks(&machine, 3)), [1, 1, 1]);
        // Memory without cores: the cores of the other node serve it.
        machine.cores.truncate(2);
        let places = place_ranks(&machine, 2);
        assert_eq!(nodes_of(&places), [1, 1]);
        assert_eq!(cpus_of(&places), [[0], [1]]);
    }

    #[test]
    fn odd_machines_never_panic_and_every_rank_has_a_place() {
        for (nodes, cores, siblings) in [(0, 0, 0), (1, 0, 1), (1, 1, 1), (3, 7, 2), (8, 1, 4)] {
            for world_size in 0..20 {
                let mut machine = machine(nodes, cores, siblings);
                for _ in 0..3 {
                    let places = place_ranks(&machine, world_size);
                    assert_eq!(places.len(), world_size);
                    let cpus_exist = !machine.allowed_cpus.is_empty();
                    assert!(places.iter().all(|place| place.cpus.is_empty() != cpus_exist));
                    machine.allowed_cpus.retain(|cpu| cpu % 3 == 1);
                    machine.numa_nodes.pop();
                }
            }
        }
    }
}
