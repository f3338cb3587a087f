//! Plain data from the walk over hwloc's objects, between `hwloc_ext` and `build`.

use crate::PciAddress;

/// hwloc's description of a box.
#[derive(Debug, Default)]
pub(crate) struct RawBox {
    /// Objects of the box, parents before their children.
    pub(crate) objects: Vec<RawObject>,
    pub(crate) allowed_cpus: Vec<u32>,
    pub(crate) allowed_nodes: Vec<u32>,
    /// Relative latencies between NUMA nodes, 10 within a node.
    pub(crate) numa_distances: Option<RawDistances>,
    /// MB/s between GPUs, and between GPUs and switches or CPUs.
    pub(crate) nvlink: Option<RawDistances>,
    /// Kinds of CPUs in hwloc's order; empty if hwloc reports none.
    pub(crate) cpu_kinds: Vec<RawCpuKind>,
}

impl RawBox {
    /// An object and its ancestors.
    pub(crate) fn way_up(&self, index: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(index), |at| self.objects[*at].parent)
    }
}

/// The types of hwloc's objects that matter here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RawKind {
    Package,
    Core,
    Pu,
    L3,
    NumaNode,
    /// Between the CPUs and PCI.
    HostBridge,
    /// Between PCI and PCI: a root port, or a port of a switch.
    PciBridge,
    PciDevice,
    /// The operating system's name for a PCI device: `mlx5_0`, `nvme0n1`, `nvml0`.
    OsDevice,
    Other,
}

#[derive(Debug)]
pub(crate) struct RawObject {
    pub(crate) kind: RawKind,
    /// Index into [`RawBox::objects`].
    pub(crate) parent: Option<usize>,
    pub(crate) os_index: Option<u32>,
    /// CPUs of the object; empty for I/O objects.
    pub(crate) cpus: Vec<u32>,
    /// NUMA nodes of the object; empty for I/O objects.
    pub(crate) nodes: Vec<u32>,
    /// Bytes of a NUMA node's memory.
    pub(crate) memory: u64,
    pub(crate) name: Option<String>,
    pub(crate) infos: Vec<(String, String)>,
    pub(crate) pci: Option<RawPci>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RawPci {
    pub(crate) address: PciAddress,
    pub(crate) class: u16,
    pub(crate) vendor_id: u16,
    pub(crate) device_id: u16,
    /// GB/s of the link at the time of the export; 0 if unknown.
    pub(crate) gb_per_s: f32,
}

/// A square of values between objects.
#[derive(Debug)]
pub(crate) struct RawDistances {
    /// Indexes into [`RawBox::objects`]; `None` for an object that was not kept.
    pub(crate) objects: Vec<Option<usize>>,
    /// The value from the i-th to the j-th object is at i * n + j.
    pub(crate) values: Vec<u64>,
}

/// One kind of CPUs.
#[derive(Debug)]
pub(crate) struct RawCpuKind {
    pub(crate) cpus: Vec<u32>,
    /// Relative efficiency, which grows with the speed; negative if unknown.
    pub(crate) efficiency: i32,
    pub(crate) infos: Vec<(String, String)>,
}
