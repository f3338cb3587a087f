//! Sentences that say how the GPUs of each tensor-parallel group are connected.

use crate::{Machine, Path, ascending, counted, format_cpu_list};

/// The connection of each group, and the speed of its members' copies.
pub(crate) fn group_reasons(machine: &Machine, groups: &[Vec<Option<usize>>]) -> Vec<String> {
    let all: Vec<usize> = groups.iter().flatten().flatten().copied().collect();
    let line = |(index, group): (usize, &Vec<Option<usize>>)| {
        let gpus: Vec<usize> = group.iter().flatten().copied().collect();
        let first = gpus.first()?;
        let ports = ascending(gpus.iter().map(|gpu| machine.root_port(*gpu)));
        let nodes = ascending(gpus.iter().filter_map(|gpu| machine.gpus[*gpu].numa_node));
        let worst = gpus.iter().flat_map(|a| gpus.iter().map(move |b| (*a, *b)));
        let worst = worst.filter(|(a, b)| a != b).map(|(a, b)| machine.path(a, b));
        let joined = match worst.max_by_key(weakness) {
            None => "one GPU".to_owned(),
            Some(Path::NvLink(links)) => format!("NV{links} between any two"),
            Some(path) => format!("at worst {path} between two"),
        };
        let speed = gpus.iter().filter_map(|gpu| machine.host_gb_per_s(*gpu, &all));
        let speed = speed.min_by(f64::total_cmp).map_or(String::new(), |gb_per_s| {
            format!(", {gb_per_s:.2} GB/s each when all ranks copy")
        });
        let uplinks = counted(ports.len(), "uplink");
        Some(format!(
            "TP group {index}: {} to {}: {joined}; {} {}, {uplinks}{speed}",
            machine.gpus[*first].pci,
            gpus.last().map_or(machine.gpus[*first].pci, |last| machine.gpus[*last].pci),
            if nodes.len() == 1 { "node" } else { "nodes" },
            if nodes.is_empty() { "unknown".into() } else { format_cpu_list(&nodes) },
        ))
    };
    groups.iter().enumerate().filter_map(line).collect()
}

/// Orders paths by how bad they are: fewer links are worse.
fn weakness(path: &Path) -> (Path, u64) {
    match path {
        Path::NvLink(links) => (Path::NvLink(0), u64::MAX - links),
        other => (*other, 0),
    }
}
