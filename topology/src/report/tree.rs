//! The PCI tree below the NUMA nodes.

use std::fmt::Write as _;

use super::{ReportSubject, link};
use crate::{Machine, PciKind, format_bytes, format_cpu_list};

/// Sockets, nodes, host bridges, switches and devices, one line each.
pub fn tree(shown: &ReportSubject<'_>) -> String {
    let machine = shown.machine;
    let mut out = shown.title() + "\n";
    for node in &machine.numa_nodes {
        let socket = node.package.map_or(String::new(), |package| format!(", socket {package}"));
        let _ = writeln!(
            out,
            "node {}{socket}: CPU {}, {}",
            node.id,
            format_cpu_list(&node.cpus),
            format_bytes(node.memory_bytes)
        );
        roots(&mut out, shown, Some(node.id));
    }
    let mut separate = String::new();
    roots(&mut separate, shown, None);
    if !separate.is_empty() {
        out += "node unknown\n";
        out += &separate;
    }
    out
}

fn roots(out: &mut String, shown: &ReportSubject<'_>, node: Option<u32>) {
    let pci = &shown.machine.pci;
    let here = (0..pci.len()).filter(|at| pci[*at].parent.is_none() && pci[*at].numa_node == node);
    for root in here {
        below(out, shown, root, 1);
    }
}

fn below(out: &mut String, shown: &ReportSubject<'_>, at: usize, indent: usize) {
    let machine = shown.machine;
    let object = &machine.pci[at];
    let indented = "  ".repeat(indent);
    let address = object.address.map_or(String::new(), |address| format!(" {address}"));
    let _ = write!(out, "{indented}{}{address}", kind(machine, at));
    let speed = link(object.link);
    if speed != "-" {
        let _ = write!(out, "  {speed}");
    }
    if let Some(gpu) = machine.gpus.iter().position(|gpu| gpu.node == at) {
        let _ = write!(out, "  {}", machine.gpus[gpu].model.as_deref().unwrap_or(""));
        let ranks = shown.placement.iter().flat_map(|placement| &placement.ranks);
        for rank in ranks.filter(|rank| rank.gpu == Some(machine.gpus[gpu].pci)) {
            let _ = write!(out, "  rank {} (TP {} DP {})", rank.rank, rank.tp_rank, rank.dp_rank);
        }
    }
    if !object.names.is_empty() {
        let _ = write!(out, "  {}", object.names.join(", "));
    }
    out.push('\n');
    for child in (0..machine.pci.len()).filter(|child| machine.pci[*child].parent == Some(at)) {
        below(out, shown, child, indent + 1);
    }
}

fn kind(machine: &Machine, at: usize) -> String {
    let object = &machine.pci[at];
    let name = match object.kind {
        PciKind::HostBridge => "host bridge",
        PciKind::Bridge if object.depth == 1 => {
            let users =
                (0..machine.gpus.len()).filter(|gpu| machine.root_port_node(*gpu) == Some(at));
            match users.count() {
                0 => "root port",
                1 => "root port (1 GPU)",
                n => return format!("root port ({n} GPUs)"),
            }
        }
        PciKind::Bridge if object.depth.is_multiple_of(2) => "switch",
        PciKind::Bridge => "port",
        PciKind::Gpu => "GPU",
        PciKind::NvSwitch => "NVSwitch",
        PciKind::Network => "network",
        PciKind::Storage => "storage",
        PciKind::Other => "device",
    };
    name.to_owned()
}
