//! The description of a machine: plain data, made once at start-up, or read from a file that describes another box.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::hwloc::Hwloc;
use crate::memory::total_memory_under;

/// A machine as onebox sees it. CPU numbers are the logical CPUs of Linux.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The NUMA nodes in the order of their numbers, those without CPUs or without memory included. Never empty
    /// after [`Machine::discover`].
    pub numa_nodes: Vec<NumaNode>,
    /// The physical cores, neighbours in caches next to each other. CPUs that a cgroup denies are absent.
    pub cores: Vec<Core>,
    /// The CPUs that this process may use (its cgroup and the binding that it inherited), ascending.
    pub allowed_cpus: Vec<u32>,
    /// Bytes of memory of the whole machine.
    pub total_memory: u64,
}

/// A part of the machine's memory and the CPUs next to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// The number that Linux gives the node; there may be gaps.
    pub id: u32,
    /// The logical CPUs of the node, ascending.
    pub cpus: Vec<u32>,
    /// Bytes of memory of the node.
    pub memory_bytes: u64,
}

/// A physical core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    /// Its logical CPUs, ascending: two or more with simultaneous multithreading.
    pub cpus: Vec<u32>,
    /// The [`NumaNode::id`] of its node.
    pub numa_node: u32,
}

impl Machine {
    /// Describes the machine on which this process runs.
    ///
    /// Call it before you bind the calling thread: that thread's binding counts as what the process may use.
    pub fn discover() -> Result<Self, Error> {
        Self::discover_under(Path::new("/"))
    }

    /// [`Machine::discover`] with `/proc` and `/sys` under another root; CPUs are still those of this machine.
    fn discover_under(root: &Path) -> Result<Self, Error> {
        let hwloc = Hwloc::load()?;
        let core_cpus = hwloc.cores();
        let mut all_cpus = core_cpus.concat();
        all_cpus.sort_unstable();

        let mut numa_nodes = numa_nodes_under(root)?;
        let total_memory = total_memory_under(root)
            .unwrap_or_else(|| numa_nodes.iter().map(|node| node.memory_bytes).sum());
        if numa_nodes.is_empty() {
            let memory_bytes = total_memory;
            numa_nodes.push(NumaNode { id: 0, cpus: all_cpus.clone(), memory_bytes });
        }

        if let [only] = &mut numa_nodes[..] {
            // Virtual machines grow by memory that sysfs does not count.
            only.memory_bytes = total_memory;
        }

        let cores = core_cpus
            .into_iter()
            .map(|cpus| Core { numa_node: node_of(&numa_nodes, &cpus), cpus })
            .collect();
        let mut allowed_cpus = hwloc.current_binding()?;
        allowed_cpus.retain(|cpu| all_cpus.binary_search(cpu).is_ok());
        Ok(Self { numa_nodes, cores, allowed_cpus, total_memory })
    }
}

/// The node that lists one of these CPUs; the first node if none does.
fn node_of(numa_nodes: &[NumaNode], cpus: &[u32]) -> u32 {
    let listing = numa_nodes.iter().find(|node| cpus.iter().any(|cpu| node.cpus.contains(cpu)));
    listing.or(numa_nodes.first()).map_or(0, |node| node.id)
}

/// The NUMA nodes in sysfs under `root`, by number; none where the kernel was built without NUMA or sysfs is hidden.
fn numa_nodes_under(root: &Path) -> Result<Vec<NumaNode>, Error> {
    let Ok(folder) = fs::read_dir(root.join("sys/devices/system/node")) else {
        return Ok(Vec::new());
    };
    let mut numa_nodes = Vec::new();
    for entry in folder.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("node"));
        if let Some(id) = number.and_then(|number| number.parse().ok()) {
            let cpus = read(&entry.path().join("cpulist"), "a list like 0-3,8", parse_cpu_list)?;
            let memory_bytes =
                read(&entry.path().join("meminfo"), "a line with MemTotal", node_memory)?;
            numa_nodes.push(NumaNode { id, cpus, memory_bytes });
        }
    }
    numa_nodes.sort_unstable_by_key(|node| node.id);
    Ok(numa_nodes)
}

/// Reads and parses one file of the kernel.
fn read<T>(path: &Path, expected: &'static str, parse: fn(&str) -> Option<T>) -> Result<T, Error> {
    let text =
        fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    parse(&text).ok_or_else(|| Error::Parse { path: path.to_owned(), expected, found: text })
}

/// The bytes of the line `Node 0 MemTotal:        5204172 kB`.
fn node_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.contains(" MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(3)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// Parses the kernel's form of a set of CPUs, `0-3,8`; an empty text is the empty set. Ascending.
fn parse_cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    Some(cpus)
}

/// The kernel's form of a set of CPUs, `0-3,8`. `cpus` ascends.
pub(crate) fn format_cpu_list(cpus: &[u32]) -> String {
    let runs = cpus.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        single => single.iter().map(u32::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::Tree;

    #[test]
    fn this_machine_has_cores_nodes_and_memory() {
        let machine = Machine::discover().unwrap();
        assert!(!machine.cores.is_empty() && !machine.numa_nodes.is_empty());
        assert!(machine.total_memory > 0);
        assert_eq!(machine.allowed_cpus, crate::current_binding().unwrap());
        for core in &machine.cores {
            assert!(machine.numa_nodes.iter().any(|node| node.id == core.numa_node));
        }
    }

    #[test]
    fn nodes_are_read_from_sysfs_in_the_order_of_their_numbers() {
        let tree = Tree::new();
        // Numbers with a gap as on POWER9, a node without CPUs, and one without memory.
        tree.numa_node(10, "", 1 << 20);
        tree.numa_node(8, "4-5,12-13\n", 2048);
        tree.numa_node(0, "0\n", 0);
        tree.write("sys/devices/system/node/online", "0,8,10\n");
        let nodes = numa_nodes_under(tree.root()).unwrap();
        assert_eq!(
            nodes,
            [
                NumaNode { id: 0, cpus: vec![0], memory_bytes: 0 },
                NumaNode { id: 8, cpus: vec![4, 5, 12, 13], memory_bytes: 2 << 20 },
                NumaNode { id: 10, cpus: vec![], memory_bytes: 1 << 30 },
            ]
        );
    }

    #[test]
    fn without_sysfs_one_node_holds_everything() {
        let tree = Tree::new();
        tree.write("proc/meminfo", "MemTotal:        1000 kB\n");
        let machine = Machine::discover_under(tree.root()).unwrap();
        let [node] = machine.numa_nodes.as_slice() else { panic!("{machine:?}") };
        assert_eq!((node.id, node.memory_bytes, machine.total_memory), (0, 1_024_000, 1_024_000));
        for core in &machine.cores {
            assert!(core.cpus.iter().all(|cpu| node.cpus.contains(cpu)));
            assert_eq!(core.numa_node, 0);
        }
    }

    #[test]
    fn cores_belong_to_the_node_that_lists_their_cpus() {
        let first = current_cpus()[0];
        let tree = Tree::new();
        tree.numa_node(0, "", 1024);
        tree.numa_node(3, &format!("{first}"), 1024);
        let machine = Machine::discover_under(tree.root()).unwrap();
        for core in &machine.cores {
            assert_eq!(core.numa_node, if core.cpus.contains(&first) { 3 } else { 0 });
        }
        assert_eq!(machine.total_memory, 2 << 20);
    }

    fn current_cpus() -> Vec<u32> {
        Hwloc::load().unwrap().cores().concat()
    }

    #[test]
    fn a_malformed_kernel_file_is_named() {
        let tree = Tree::new();
        tree.numa_node(0, "0-x", 1024);
        let error = numa_nodes_under(tree.root()).unwrap_err().to_string();
        assert!(error.contains("node0/cpulist") && error.contains("0-x"), "{error}");
        tree.write("sys/devices/system/node/node0/cpulist", "0");
        tree.write("sys/devices/system/node/node0/meminfo", "nothing");
        let error = numa_nodes_under(tree.root()).unwrap_err().to_string();
        assert!(error.contains("node0/meminfo") && error.contains("MemTotal"), "{error}");
    }

    #[test]
    fn cpu_lists_survive_the_round_trip() {
        for list in ["", "0", "0-3", "0-3,8", "0-1,3,5-6,127"] {
            assert_eq!(format_cpu_list(&parse_cpu_list(list).unwrap()), list);
        }
        for wrong in ["a", "1-", "-1", "0-3-5", "0:2"] {
            assert_eq!(parse_cpu_list(wrong), None, "{wrong}");
        }
    }
}
