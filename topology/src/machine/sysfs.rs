//! Facts from Linux that hwloc does not report: memory, both ends of links, the driver's names.
//! Every
//! path is below a root that tests set. A missing file leaves its fact unknown.

use std::path::Path;

use crate::memory::{available_memory_under, kernel_text, total_memory_under};
use crate::pci::generation_of;
use crate::{Link, Machine, PciAddress};

/// Adds the facts from files under `root` to `machine`.
pub(crate) fn complete(machine: &mut Machine, root: &Path) {
    if let Some(total) = total_memory_under(root) {
        machine.total_memory = total;
    }
    let cpu = kernel_text(&root.join("proc/cpuinfo")).unwrap_or_default();
    let flags = cpu.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    machine.virtual_machine |= flags.split_whitespace().any(|flag| flag == "hypervisor");
    let available = available_memory_under(root);
    machine.available_memory = (available < u64::MAX).then_some(available);
    for node in &mut machine.numa_nodes {
        // A process has at most the memory that its cgroups leave it, on every node.
        node.free_bytes = node_free(root, node.id).map(|free| free.min(available));
    }
    if let [only] = &mut machine.numa_nodes[..] {
        // Virtual machines can grow by memory that sysfs does not count.
        only.memory_bytes = total_memory_under(root).unwrap_or(only.memory_bytes);
        only.free_bytes = machine.available_memory.or(only.free_bytes);
    }
    let known: Vec<u32> = machine.numa_nodes.iter().map(|node| node.id).collect();
    for node in &mut machine.pci {
        let Some(address) = node.address else { continue };
        let link = link(root, address);
        if link != Link::default() {
            node.link = link;
        }
        let numa_node = read(root, address, "numa_node").and_then(|text| text.parse::<u32>().ok());
        node.numa_node = numa_node.filter(|id| known.contains(id)).or(node.numa_node);
    }
    for gpu in &mut machine.gpus {
        gpu.numa_node = machine.pci[gpu.node].numa_node;
        let path = root.join(format!("proc/driver/nvidia/gpus/{}/information", gpu.pci));
        let text = kernel_text(&path).unwrap_or_default();
        let value_of = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            let value = line.trim_start_matches(':').trim();
            (!value.is_empty() && !value.contains('?')).then(|| value.to_owned())
        };
        gpu.uuid = value_of("GPU UUID").or_else(|| gpu.uuid.take());
        gpu.model = value_of("Model").or_else(|| gpu.model.take());
    }
}

/// One file of a PCI device, trimmed.
fn read(root: &Path, address: PciAddress, name: &str) -> Option<String> {
    let folder = root.join("sys/bus/pci/devices").join(address.to_string());
    kernel_text(&folder.join(name)).map(|text| text.trim().to_owned())
}

fn link(root: &Path, address: PciAddress) -> Link {
    let generation = |name| read(root, address, name).as_deref().and_then(generation_of);
    // 0 and 255 stand for a width that the kernel could not read.
    let width = |name| {
        read(root, address, name)?.parse::<u8>().ok().filter(|width| (1..=32).contains(width))
    };
    Link::of_lanes(
        (generation("current_link_speed"), width("current_link_width")),
        (generation("max_link_speed"), width("max_link_width")),
    )
}

/// Bytes of a node that may still be allocated, counted as the kernel counts `MemAvailable` for all
/// nodes: free memory, file pages and droppable caches, less the kernel's own reserve.
fn node_free(root: &Path, id: u32) -> Option<u64> {
    let path = root.join(format!("sys/devices/system/node/node{id}/meminfo"));
    let text = kernel_text(&path)?;
    let kib = |key: &str| {
        let line = text.lines().find(|line| line.contains(key))?;
        line.split_whitespace().nth(3)?.parse::<u64>().ok()
    };
    let droppable = [" Active(file):", " Inactive(file):", " SReclaimable:"];
    let droppable: u64 = droppable.into_iter().filter_map(kib).sum();
    let bytes = kib(" MemFree:")?.checked_add(droppable)?.checked_mul(1024)?;
    Some(bytes.saturating_sub(node_reserve(root, id)))
}

/// The kernel's reserve of a node in bytes: the sum of the high watermarks of its zones, below
/// which the kernel reclaims.
fn node_reserve(root: &Path, id: u32) -> u64 {
    let text = kernel_text(&root.join("proc/zoneinfo")).unwrap_or_default();
    let (own, mut inside, mut pages) = (format!("Node {id},"), false, 0u64);
    for line in text.lines() {
        inside = if line.starts_with("Node ") { line.starts_with(&own) } else { inside };
        let mut words = line.split_whitespace();
        if inside && words.next() == Some("high") {
            let high: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
            pages = pages.saturating_add(high);
        }
    }
    pages.saturating_mul(4096)
}

/// Kernel settings and process limits that affect the speed of host memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Whether the kernel moves pages between nodes automatically.
    pub(crate) numa_balancing: bool,
    /// `always`, `madvise` or `never`.
    pub(crate) huge_pages: Option<String>,
    /// Whether a node reclaims its own pages before it uses another node's.
    pub(crate) zone_reclaim: bool,
    /// Largest number of bytes that the process may lock; `None` without a limit.
    pub(crate) memlock: Option<u64>,
}

/// Reads the settings under `root`.
pub(crate) fn settings(root: &Path) -> Settings {
    let text = |path: &str| kernel_text(&root.join(path));
    let on = |path: &str| text(path).is_some_and(|text| text.trim() != "0");
    let huge_pages = text("sys/kernel/mm/transparent_hugepage/enabled").and_then(|text| {
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    });
    let memlock = text("proc/self/limits").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
        line.split_whitespace().next()?.parse().ok()
    });
    Settings {
        numa_balancing: on("proc/sys/kernel/numa_balancing"),
        huge_pages,
        zone_reclaim: on("proc/sys/vm/zone_reclaim_mode"),
        memlock,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::Tree;

    #[test]
    fn links_are_read_at_their_ends_now_and_at_most() {
        let tree = Tree::new();
        let folder = "sys/bus/pci/devices/0000:34:00.0";
        for (name, text) in [
            ("current_link_speed", "2.5 GT/s PCIe\n"),
            ("current_link_width", "8\n"),
            ("max_link_speed", "8.0 GT/s PCIe\n"),
            ("max_link_width", "16\n"),
        ] {
            tree.write(&format!("{folder}/{name}"), text);
        }
        let link = link(tree.root(), "0000:34:00.0".parse().unwrap());
        assert_eq!((link.generation, link.width), (Some(1), Some(8)));
        assert_eq!((link.max_generation, link.max_width), (Some(3), Some(16)));
        assert_eq!(link.gb_per_s, Some(2.0));
        tree.write(&format!("{folder}/max_link_width"), "255\n");
        tree.write(&format!("{folder}/max_link_speed"), "Unknown\n");
        let link = super::link(tree.root(), "0000:34:00.0".parse().unwrap());
        assert_eq!(link.max_gb_per_s, None);
    }

    #[test]
    fn settings_are_read_where_the_kernel_has_them() {
        let tree = Tree::new();
        assert_eq!(settings(tree.root()), Settings::default());
        tree.write("proc/sys/kernel/numa_balancing", "1\n");
        tree.write("proc/sys/vm/zone_reclaim_mode", "0\n");
        tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
        tree.write(
            "proc/self/limits",
            "Limit   Soft   Hard\nMax locked memory         65536                65536  bytes\n",
        );
        let settings = settings(tree.root());
        assert!(settings.numa_balancing && !settings.zone_reclaim);
        assert_eq!(settings.huge_pages.as_deref(), Some("never"));
        assert_eq!(settings.memlock, Some(65536));
    }

    #[test]
    fn a_node_offers_what_is_free_and_what_can_be_dropped() {
        let tree = Tree::new();
        tree.write(
            "sys/devices/system/node/node1/meminfo",
            "Node 1 MemTotal: 900 kB\nNode 1 MemFree: 100 kB\nNode 1 Active(file): 3 kB\n\
             Node 1 Inactive(file): 20 kB\nNode 1 SReclaimable: 1 kB\nNode 1 SUnreclaim: 7 kB\n",
        );
        assert_eq!(node_free(tree.root(), 1), Some(124 << 10));
        let zone = |node, high| {
            format!(
                "Node {node}, zone   Normal\n  pages free     900\n        min      2\n        \
                     low      3\n        high     {high}\n    cpu: 0\n              high:  77\n"
            )
        };
        tree.write(
            "proc/zoneinfo",
            &[zone(0, 100), zone(1, 5), zone(1, 6), zone(10, 100)].concat(),
        );
        assert_eq!(node_free(tree.root(), 1), Some((124 << 10) - 11 * 4096));
        assert_eq!(node_free(tree.root(), 0), None);
    }
}
