//! Staging that the node next to a GPU cannot hold: a part of it lies on the rank's other nodes.

use std::collections::BTreeMap;

/// This fraction of a node (1 / SPARE) stays free if staging of its ranks moves away.
const SPARE: u64 = 32;

/// The host memory of one rank, with all staging next to its GPU.
#[derive(Clone, Debug)]
pub struct Needs<N> {
    /// The node next to its GPU.
    pub home: N,
    /// The other nodes of the rank's states.
    pub others: Vec<N>,
    /// Bytes of the rank by node.
    pub bytes: BTreeMap<N, u64>,
}

/// Splits `bytes` over the nodes `to`, in parts that differ by at most one byte.
pub fn in_parts<N: Copy>(bytes: u64, to: &[N]) -> Vec<(N, u64)> {
    let parts = to.len() as u64;
    let part = |(index, node): (u64, &N)| (*node, bytes / parts + u64::from(index < bytes % parts));
    (0..).zip(to).map(part).collect()
}

/// The bytes on each node.
pub(crate) fn sums<N: Ord>(parts: impl IntoIterator<Item = (N, u64)>) -> BTreeMap<N, u64> {
    let mut sums: BTreeMap<N, u64> = BTreeMap::new();
    for (node, bytes) in parts {
        let sum = sums.entry(node).or_default();
        *sum = sum.saturating_add(bytes);
    }
    sums
}

/// For each rank, the nodes and bytes of the part of its `staging` bytes that the node next to its
/// GPU cannot hold; usually empty. `available` returns the bytes of a node. Ranks of a node
/// move equal parts, each in equal parts to its other nodes, even if these cannot hold them.
pub fn far_staging<N: Copy + Ord>(
    staging: u64,
    ranks: &[Needs<N>],
    available: impl Fn(N) -> u64,
) -> Vec<Vec<(N, u64)>> {
    let needed = sums(ranks.iter().flat_map(|rank| rank.bytes.clone()));
    let of_rank = |rank: &Needs<N>| {
        let (needed, available) =
            (needed.get(&rank.home).copied().unwrap_or(0), available(rank.home));
        if needed <= available || staging == 0 || rank.others.is_empty() {
            return Vec::new();
        }
        let movers = ranks.iter().filter(|r| r.home == rank.home && !r.others.is_empty());
        let over = needed - (available - available / SPARE);
        let each = over.div_ceil(movers.count() as u64).min(staging);
        in_parts(each, &rank.others)
    };
    ranks.iter().map(of_rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(home: u32, others: &[u32], bytes: &[(u32, u64)]) -> Needs<u32> {
        Needs { home, others: others.to_vec(), bytes: bytes.iter().copied().collect() }
    }

    #[test]
    fn what_a_node_does_not_hold_moves_to_the_other_nodes_of_its_ranks() {
        // 400 of staging and 400 of states on two nodes of 512 each: the first node needs 600.
        let one = [rank(0, &[1], &[(0, 600), (1, 200)])];
        assert_eq!(far_staging(400, &one, |_| 512), [[(1, 600 - 496)]]);
        assert_eq!(far_staging(400, &one, |_| 600), [[]]);
        assert_eq!(far_staging(0, &one, |_| 512), [[]]);
        // All staging moves if less is not enough. No staging moves if there is no other node.
        assert_eq!(far_staging(400, &one, |_| 64), [[(1, 400)]]);
        assert_eq!(far_staging(400, &[rank(0, &[], &[(0, 600)])], |_| 512), [[]; 1]);
        // Two ranks share the excess, on two further nodes each. A third on another node is
        // unchanged.
        let two = rank(0, &[1, 2], &[(0, 400), (1, 100), (2, 100)]);
        let all = [two.clone(), two, rank(3, &[1], &[(3, 400)])];
        let part = vec![(1, 76), (2, 76)];
        assert_eq!(far_staging(400, &all, |_| 512), [part.clone(), part, Vec::new()]);
    }

    #[test]
    fn parts_add_up() {
        assert_eq!(in_parts(7, &['a', 'b', 'c']), [('a', 3), ('b', 2), ('c', 2)]);
        assert_eq!(in_parts::<u32>(7, &[]), []);
    }
}
