//! The description of a box: plain data, made once at start-up or read from a file that describes
//! another box.

mod build;
mod kind;
pub(crate) mod nvlink;
pub(crate) mod sysfs;

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::PoisonError;

use serde::{Deserialize, Serialize};

use crate::hwloc_ext::{Handle, Input, c_text};
use crate::{Error, PciAddress, PciNode, guard, hwloc_ext, nvml, trial};

/// A box. CPU numbers are the logical CPUs of Linux.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The product's name, if the firmware reports one.
    pub name: Option<String>,
    /// Whether the box is a virtual machine, so that a hypervisor decides what is visible.
    #[serde(default)]
    pub virtual_machine: bool,
    /// The processor's name.
    pub cpu_model: Option<String>,
    /// Whether this is the machine on which the process runs.
    pub live: bool,
    /// The NUMA nodes in the order of their numbers, including those without CPUs or without
    /// memory. Never empty after [`Machine::discover`].
    pub numa_nodes: Vec<NumaNode>,
    /// The physical cores, neighbours in caches next to each other, including those that a cgroup
    /// denies.
    pub cores: Vec<Core>,
    /// The kinds of cores, the fastest first; empty if all are of one kind or their speeds are
    /// unknown.
    #[serde(default)]
    pub core_kinds: Vec<CoreKind>,
    /// The CPUs that this process may use (its cgroup and its inherited binding), ascending.
    pub allowed_cpus: Vec<u32>,
    /// The nodes on which this process may allocate, ascending.
    pub allowed_nodes: Vec<u32>,
    /// Bytes of memory of the whole machine.
    pub total_memory: u64,
    /// Host bridges, bridges and devices, parents first.
    pub pci: Vec<PciNode>,
    /// Whether the box showed any I/O. Without it no GPU can be placed.
    pub has_io: bool,
    /// The GPUs in the order of their PCI addresses.
    pub gpus: Vec<Gpu>,
    /// MB/s of NVLink between two GPUs, links through switches included; empty if unknown.
    pub nvlink: Vec<Vec<u64>>,
    /// Why NVLink is unknown, or unknown for some GPUs.
    pub nvlink_unknown: Option<String>,
    /// Bytes that may still be allocated: the kernel's figure, or less under a cgroup's limit.
    /// `None` for a box from a file.
    pub available_memory: Option<u64>,
}

/// A part of the machine's memory and the CPUs next to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// Linux's number of the node. The numbers may have gaps.
    pub id: u32,
    /// The logical CPUs of the node, ascending.
    pub cpus: Vec<u32>,
    /// Bytes of memory of the node.
    pub memory_bytes: u64,
    /// Bytes that this process may still allocate: free and droppable memory, within the limits of
    /// its cgroups. `None` for a box from a file.
    pub free_bytes: Option<u64>,
    /// Number of the socket.
    pub package: Option<u32>,
    /// Distances to each of [`Machine::numa_nodes`], 10 for itself; empty if unknown.
    pub distances: Vec<u64>,
}

/// A physical core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    /// Its logical CPUs, ascending: two or more with simultaneous multithreading.
    pub cpus: Vec<u32>,
    /// The [`NumaNode::id`] of its node.
    pub numa_node: u32,
    /// Number of the socket.
    pub package: Option<u32>,
    /// Number of the last-level cache. Cores that share it have the same number.
    pub l3: Option<u32>,
    /// Index in [`Machine::core_kinds`]; `None` if all cores are of one kind or their kinds are
    /// unknown.
    #[serde(default)]
    pub kind: Option<usize>,
}

/// One kind of cores, if a box has several kinds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreKind {
    /// Its name, such as `IntelAtom`, if hwloc reports a name.
    pub name: Option<String>,
    /// Highest frequency in MHz. If the box does not report it: the base frequency in MHz, or a
    /// relative capacity.
    pub speed: Option<u64>,
    /// Logical CPUs of these cores, ascending.
    pub cpus: Vec<u32>,
}

/// A GPU. Its PCI address identifies it, never an index: indexes change with
/// `CUDA_VISIBLE_DEVICES`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its PCI address.
    pub pci: PciAddress,
    /// Its index in [`Machine::pci`].
    pub node: usize,
    /// `GPU-...`, if the driver reports it.
    pub uuid: Option<String>,
    /// Its name, if known.
    pub model: Option<String>,
    /// PCI's numbers of the vendor and of the model.
    pub device_id: (u16, u16),
    /// The [`NumaNode::id`] next to it, if known.
    pub numa_node: Option<u32>,
}

/// Largest size of an hwloc export in bytes. An export of the largest machines is a tenth as large.
const LONGEST_XML: u64 = 64 << 20;

impl Machine {
    /// Describes the machine on which this process runs.
    ///
    /// Callers bind their thread only afterwards: its binding counts as the CPUs that the process
    /// may use.
    pub fn discover() -> Result<Self, Error> {
        Self::discover_under(Path::new("/"))
    }

    /// [`Machine::discover`] with `/proc` and `/sys` under another root. The CPUs are still those
    /// of this machine.
    pub fn discover_under(root: &Path) -> Result<Self, Error> {
        let handle = Handle::load(Input::Live)?;
        if !handle.is_this_machine() {
            return Err(Error::NotThisMachine);
        }
        let mut machine = build::machine(&handle.read(), true)?;
        let binding = crate::current_binding()?;
        machine.allowed_cpus.retain(|cpu| binding.binary_search(cpu).is_ok());
        sysfs::complete(&mut machine, root);
        nvlink::complete(&mut machine, OsStr::new(nvml::NAME));
        Ok(machine)
    }

    /// The box of an XML export of hwloc 2.x. It holds nothing of this machine, and cannot bind.
    pub fn from_xml(text: &str) -> Result<Self, Error> {
        guard::check(text)?;
        let text = c_text(text)?;
        elsewhere(Input::Xml(&text))
    }

    /// [`Machine::from_xml`] of a file.
    #[expect(
        clippy::disallowed_methods,
        reason = "the crate is below `files`: kind and limit are here"
    )]
    pub fn from_xml_file(path: &Path) -> Result<Self, Error> {
        let unreadable = |source| Error::Read { path: path.to_owned(), source };
        // Reading a pipe would block, and a device such as /dev/zero has no end.
        if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
            return guard::refuse("it is no regular file; write the export into one");
        }
        let (mut bytes, file) = (Vec::new(), File::open(path).map_err(unreadable)?);
        file.take(LONGEST_XML + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > LONGEST_XML {
            return guard::refuse("it has more than 64 MiB, which no export of hwloc has");
        }
        String::from_utf8(bytes)
            .or_else(|_| guard::refuse("it is not UTF-8 text"))
            .and_then(|text| Self::from_xml(&text))
    }

    /// The box of hwloc's synthetic description, such as `pack:2 numa:1 core:8 pu:2`. It cannot
    /// have GPUs.
    pub fn from_synthetic(description: &str) -> Result<Self, Error> {
        guard::check_synthetic(description)?;
        let text = c_text(description)?;
        elsewhere(Input::Synthetic(&text)).map_err(|error| match error {
            Error::HwlocLoad { why } => Error::NotSynthetic { why },
            other => other,
        })
    }

    /// The node with this number.
    pub fn numa_node(&self, id: u32) -> Option<&NumaNode> {
        self.numa_nodes.iter().find(|node| node.id == id)
    }

    /// The cores with at least one CPU that this process may use.
    pub(crate) fn allowed_cores(&self) -> impl Iterator<Item = &Core> {
        let allowed = |cpu: &u32| self.allowed_cpus.binary_search(cpu).is_ok();
        self.cores.iter().filter(move |core| core.cpus.iter().any(allowed))
    }

    /// The relative latency from one node to another, 10 within a node. If the box reports none,
    /// nodes of one socket count as nearer.
    pub fn distance(&self, from: u32, to: u32) -> u64 {
        let index = |id| self.numa_nodes.iter().position(|node| node.id == id);
        let (Some(i), Some(j)) = (index(from), index(to)) else { return u64::MAX };
        let (a, b) = (&self.numa_nodes[i], &self.numa_nodes[j]);
        let distance = a.distances.get(j).copied();
        distance.unwrap_or(if i == j {
            10
        } else if a.package == b.package {
            12
        } else {
            20
        })
    }
}

/// Builds a box that is not this machine. A child process loads it first, since hwloc may crash.
fn elsewhere(input: Input<'_>) -> Result<Machine, Error> {
    hwloc_ext::check_library()?;
    trial::survive(|| {
        let _ = Handle::load(input).map(|handle| handle.read());
    })?;
    let _one = trial::LOADS.lock().unwrap_or_else(PoisonError::into_inner);
    build::machine(&Handle::load(input)?.read(), false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format_cpu_list;
    use crate::memory::tests::Tree;

    #[test]
    fn this_machine_has_cores_nodes_and_memory() {
        let machine = Machine::discover().unwrap();
        assert!(!machine.cores.is_empty() && !machine.numa_nodes.is_empty());
        assert!(machine.live && machine.total_memory > 0);
        assert_eq!(machine.allowed_cpus, crate::current_binding().unwrap());
        for core in &machine.cores {
            assert!(machine.numa_nodes.iter().any(|node| node.id == core.numa_node));
        }
    }

    #[test]
    fn memory_comes_from_the_kernels_files() {
        let tree = Tree::new();
        tree.write("proc/meminfo", "MemTotal:        1000 kB\nMemAvailable:     900 kB\n");
        // A virtual machine has grown: sysfs knows a part of its memory.
        let old = "Node 0 MemTotal: 80 kB\nNode 0 MemFree: 70 kB\n";
        tree.write("sys/devices/system/node/node0/meminfo", old);
        let machine = Machine::discover_under(tree.root()).unwrap();
        assert_eq!(machine.total_memory, 1_024_000);
        if let [node] = machine.numa_nodes.as_slice() {
            assert_eq!((node.memory_bytes, node.free_bytes), (1_024_000, Some(921_600)));
        }
    }

    #[test]
    fn cpu_lists_are_written_as_the_kernel_does() {
        for (cpus, list) in [
            (&[][..], ""),
            (&[0], "0"),
            (&[0, 1, 2, 3, 8], "0-3,8"),
            (&[0, 1, 3, 5, 6, 127], "0-1,3,5-6,127"),
        ] {
            assert_eq!(format_cpu_list(cpus), list);
        }
    }

    #[test]
    fn a_box_survives_the_round_trip_through_serde() {
        let machine = Machine::from_synthetic("pack:2 numa:1 l3:1 core:4 pu:2").unwrap();
        let text = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), machine);
    }
}
