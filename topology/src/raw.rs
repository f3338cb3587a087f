//! What the walk over hwloc's objects leaves: plain data between `hwloc_ext` and `build`.

/// A box as hwloc describes it.
#[derive(Debug, Default)]
pub(crate) struct RawBox {
    /// Parents before their children.
    pub(crate) objects: Vec<RawObject>,
    pub(crate) allowed_cpus: Vec<u32>,
    pub(crate) allowed_nodes: Vec<u32>,
    /// Relative latencies between NUMA nodes: 10 is local.
    pub(crate) numa_distances: Option<RawDistances>,
    /// MB/s between GPUs, and between GPUs and switches or CPUs.
    pub(crate) nvlink: Option<RawDistances>,
}

/// The part of hwloc's types that matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RawKind {
    Package,
    Core,
    Pu,
    L3,
    NumaNode,
    /// From the CPUs to PCI.
    HostBridge,
    /// From PCI to PCI: a root port, or a port of a switch.
    PciBridge,
    PciDevice,
    /// The operating system's name for what a PCI device is: `mlx5_0`, `nvme0n1`, `nvml0`.
    OsDevice,
    Other,
}

#[derive(Debug)]
pub(crate) struct RawObject {
    pub(crate) kind: RawKind,
    /// Index into [`RawBox::objects`].
    pub(crate) parent: Option<usize>,
    pub(crate) os_index: Option<u32>,
    /// Empty for I/O objects.
    pub(crate) cpus: Vec<u32>,
    /// Empty for I/O objects.
    pub(crate) nodes: Vec<u32>,
    /// Bytes, of NUMA nodes.
    pub(crate) memory: u64,
    pub(crate) name: Option<String>,
    pub(crate) infos: Vec<(String, String)>,
    pub(crate) pci: Option<RawPci>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RawPci {
    pub(crate) domain: u32,
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
    pub(crate) class: u16,
    pub(crate) vendor_id: u16,
    pub(crate) device_id: u16,
    /// Of the link as it was when it was read; 0 where unknown.
    pub(crate) gb_per_s: f32,
}

/// A square of values between objects.
#[derive(Debug)]
pub(crate) struct RawDistances {
    /// Indexes into [`RawBox::objects`]; `None` for an object that was not kept.
    pub(crate) objects: Vec<Option<usize>>,
    /// From the i-th to the j-th object at i * n + j.
    pub(crate) values: Vec<u64>,
}
