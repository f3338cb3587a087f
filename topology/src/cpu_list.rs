//! Sets of CPUs as text.

use std::collections::BTreeSet;

/// Writes a set of CPUs in the kernel's form, `0-3,8`. `cpus` ascends.
pub fn format_cpu_list(cpus: &[u32]) -> String {
    let runs = cpus.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        single => single.iter().map(u32::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}

/// Each number once, in ascending order.
pub(crate) fn ascending<T: Ord>(numbers: impl IntoIterator<Item = T>) -> Vec<T> {
    BTreeSet::from_iter(numbers).into_iter().collect()
}

/// Numbers of nodes, in their order: `1,0`.
pub(crate) fn format_nodes(nodes: &[u32]) -> String {
    nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
