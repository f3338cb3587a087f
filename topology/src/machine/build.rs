//! Builds a [`Machine`] from hwloc's objects.

use super::kind::{os_devices, pci_kind};
use super::nvlink;
use crate::raw::{RawBox, RawCpuKind, RawKind, RawObject};
use crate::{Core, CoreKind, Error, Gpu, Link, Machine, NumaNode, PciAddress, PciKind, PciNode};

/// The box that `raw` describes.
pub(crate) fn machine(raw: &RawBox, live: bool) -> Result<Machine, Error> {
    let (numa_nodes, node_objects) = numa_nodes(raw)?;
    let core_kinds = core_kinds(raw);
    let cores = cores(raw, &numa_nodes, &core_kinds);
    if cores.is_empty() {
        return Err(Error::NotABox { why: "it has no CPU".into() });
    }
    let total_memory =
        numa_nodes.iter().fold(0, |sum: u64, node| sum.saturating_add(node.memory_bytes));
    let (pci, gpus, gpu_objects) = pci(raw);
    let numa_nodes = with_distances(raw, numa_nodes, &node_objects);
    let is_io = |o: &RawObject| matches!(o.kind, RawKind::HostBridge | RawKind::PciDevice);
    let known = |id: &u32| numa_nodes.iter().any(|node| node.id == *id);
    let allowed_nodes = raw.allowed_nodes.iter().copied().filter(known).collect();
    let exists = |cpu: &u32| cores.iter().any(|core: &Core| core.cpus.contains(cpu));
    let nvlink = nvlink::between_gpus(raw, &gpu_objects);
    Ok(Machine {
        name: info(raw, "DMIProductName").or_else(|| info(raw, "PlatformModel")),
        virtual_machine: ["DMIProductName", "DMIBoardName", "DMISysVendor"]
            .iter()
            .any(|key| info(raw, key).is_some_and(|name| names_a_hypervisor(&name))),
        cpu_model: info(raw, "CPUModel"),
        live,
        allowed_cpus: raw.allowed_cpus.iter().copied().filter(exists).collect(),
        allowed_nodes,
        numa_nodes,
        cores,
        core_kinds,
        total_memory,
        has_io: raw.objects.iter().any(is_io),
        nvlink_unknown: (nvlink.is_empty() && !live)
            .then(|| "the export does not tell it".to_owned()),
        nvlink,
        available_memory: None,
        pci,
        gpus,
    })
}

/// Whether this name of a product, board or vendor is a hypervisor's.
fn names_a_hypervisor(name: &str) -> bool {
    let known = [
        "KVM",
        "QEMU",
        "Standard PC (",
        "VMware",
        "VirtualBox",
        "Virtual Machine",
        "HVM domU",
        "Google Compute Engine",
        "Amazon EC2",
        "OpenStack",
    ];
    known.iter().any(|known| name.contains(known))
}

/// A property of the machine or of its first socket.
fn info(raw: &RawBox, key: &str) -> Option<String> {
    let infos = raw.objects.iter().flat_map(|object| &object.infos);
    value_of(infos.filter(|(_, value)| !value.is_empty()), key)
}

/// The first value of a name.
fn value_of<'a>(
    infos: impl IntoIterator<Item = &'a (String, String)>,
    key: &str,
) -> Option<String> {
    infos.into_iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
}

/// The nearest object at or above `index` of this kind.
fn above(raw: &RawBox, index: usize, kind: RawKind) -> Option<usize> {
    raw.way_up(index).find(|at| raw.objects[*at].kind == kind)
}

/// The socket number of an object.
fn package(raw: &RawBox, index: usize) -> Option<u32> {
    raw.objects[above(raw, index, RawKind::Package)?].os_index
}

/// The nodes by number, and hwloc's object of each.
fn numa_nodes(raw: &RawBox) -> Result<(Vec<NumaNode>, Vec<usize>), Error> {
    let objects = raw.objects.iter().enumerate();
    let mut nodes: Vec<(NumaNode, usize)> = objects
        .filter(|(_, object)| object.kind == RawKind::NumaNode)
        .map(|(index, object)| {
            let unnumbered = || Error::NotABox { why: "a NUMA node has no number".into() };
            let node = NumaNode {
                id: object.os_index.ok_or_else(unnumbered)?,
                cpus: object.cpus.clone(),
                memory_bytes: object.memory,
                free_bytes: None,
                package: package(raw, index),
                distances: Vec::new(),
            };
            Ok((node, index))
        })
        .collect::<Result<_, Error>>()?;
    nodes.sort_by_key(|(node, _)| node.id);
    nodes.dedup_by_key(|(node, _)| node.id);
    Ok(nodes.into_iter().unzip())
}

fn with_distances(raw: &RawBox, mut nodes: Vec<NumaNode>, objects: &[usize]) -> Vec<NumaNode> {
    let Some(matrix) = &raw.numa_distances else { return nodes };
    let place = |object: usize| matrix.objects.iter().position(|o| *o == Some(object));
    let Some(places) = objects.iter().map(|o| place(*o)).collect::<Option<Vec<_>>>() else {
        return nodes;
    };
    let n = matrix.objects.len();
    for (node, from) in nodes.iter_mut().zip(&places) {
        node.distances = places.iter().map(|to| matrix.values[from * n + to]).collect();
    }
    nodes
}

/// The physical cores in hwloc's order. Some virtual machines report none; every CPU then counts as
/// a core.
fn cores(raw: &RawBox, nodes: &[NumaNode], kinds: &[CoreKind]) -> Vec<Core> {
    let of_kind = |kind| {
        let objects = raw.objects.iter().enumerate();
        objects.filter(move |(_, object)| object.kind == kind)
    };
    let kind = if of_kind(RawKind::Core).next().is_some() { RawKind::Core } else { RawKind::Pu };
    let mut seen = std::collections::HashSet::new();
    let (mut cores, mut strays) = (Vec::new(), Vec::new());
    for (index, object) in of_kind(kind) {
        // A damaged file may list a CPU twice. It belongs to the first core that has it.
        let mut cpus = object.cpus.clone();
        cpus.retain(|cpu| seen.insert(*cpu));
        if !cpus.is_empty() {
            let own = node_of(nodes, object);
            if own.is_none() {
                strays.push((cores.len(), nearest(raw, index, nodes)));
            }
            let numa_node = own.unwrap_or_else(|| nodes.first().map_or(0, |node| node.id));
            let l3 = above(raw, index, RawKind::L3).and_then(|l3| u32::try_from(l3).ok());
            let kind = kinds.iter().position(|kind| kind.cpus.contains(&cpus[0]));
            cores.push(Core { cpus, numa_node, package: package(raw, index), l3, kind });
        }
    }
    take_in(&mut cores, &strays);
    cores
}

/// The node of a core: the node with memory and the fewest CPUs, the first of several.
fn node_of(nodes: &[NumaNode], core: &RawObject) -> Option<u32> {
    let holds = |node: &&NumaNode| core.cpus.iter().any(|cpu| node.cpus.contains(cpu));
    let local = nodes.iter().filter(holds);
    let best = local.min_by_key(|node| (node.memory_bytes == 0, node.cpus.len(), node.id));
    best.map(|node| node.id)
}

/// The nodes with memory in the smallest part of the box that contains the core and has such nodes.
/// hwloc drops a node without memory; of its cores only the socket is then known, not the
/// distances.
fn nearest(raw: &RawBox, core: usize, nodes: &[NumaNode]) -> Vec<u32> {
    let inside = |at: usize| {
        let within = |node: &&NumaNode| {
            let cpus = &raw.objects[at].cpus;
            node.memory_bytes > 0 && node.cpus.iter().any(|cpu| cpus.contains(cpu))
        };
        nodes.iter().filter(within).map(|node| node.id).collect::<Vec<_>>()
    };
    raw.way_up(core).map(inside).find(|nodes| !nodes.is_empty()).unwrap_or_default()
}

/// Assigns the cores without a node of their own to their nearest nodes, in runs of neighbours. The
/// nodes then have equally many cores, if possible.
fn take_in(cores: &mut [Core], strays: &[(usize, Vec<u32>)]) {
    for alike in strays.chunk_by(|(_, a), (_, b)| a == b) {
        let nodes = &alike[0].1;
        let is_stray = |core: usize| strays.iter().any(|(stray, _)| *stray == core);
        let own = |id: u32| {
            let cores = cores.iter().enumerate();
            cores.filter(|(i, core)| core.numa_node == id && !is_stray(*i)).count()
        };
        let mut counts: Vec<(u32, usize)> = nodes.iter().map(|id| (*id, own(*id))).collect();
        let all: usize = counts.iter().map(|(_, count)| count).sum();
        let share = (all + alike.len()).div_ceil(nodes.len().max(1));
        for (core, _) in alike {
            let Some((id, count)) = counts.iter_mut().find(|(_, count)| *count < share) else {
                break;
            };
            cores[*core].numa_node = *id;
            *count += 1;
        }
    }
}

/// The kinds of cores, the fastest first; empty if there is one kind, or if their order is unknown.
fn core_kinds(raw: &RawBox) -> Vec<CoreKind> {
    let info = |kind: &RawCpuKind, key: &str| value_of(&kind.infos, key);
    let speed = |kind: &RawCpuKind| {
        let keys = ["FrequencyMaxMHz", "FrequencyBaseMHz", "LinuxCapacity"];
        keys.iter().find_map(|key| info(kind, key)?.parse().ok())
    };
    let mut kinds: Vec<&RawCpuKind> = raw.cpu_kinds.iter().collect();
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.efficiency));
    let known = kinds.first().zip(kinds.last());
    if !known.is_some_and(|(fast, slow)| slow.efficiency >= 0 && fast.efficiency > slow.efficiency)
    {
        return Vec::new();
    }
    let kind = |kind: &RawCpuKind| CoreKind {
        name: info(kind, "CoreType"),
        speed: speed(kind),
        cpus: kind.cpus.clone(),
    };
    kinds.into_iter().map(kind).collect()
}

/// The relevant part of the PCI tree, the GPUs by address, and hwloc's object of each GPU.
fn pci(raw: &RawBox) -> (Vec<PciNode>, Vec<Gpu>, Vec<usize>) {
    let kinds: Vec<Option<PciKind>> =
        (0..raw.objects.len()).map(|index| pci_kind(raw, index)).collect();
    let mut needed = vec![false; raw.objects.len()];
    for (index, kind) in kinds.iter().enumerate() {
        if matches!(
            kind,
            Some(PciKind::Gpu | PciKind::NvSwitch | PciKind::Network | PciKind::Storage)
        ) {
            let up = raw.way_up(index).take_while(|at| kinds[*at].is_some());
            up.for_each(|at| needed[at] = true);
        }
    }
    let mut place = vec![None; raw.objects.len()];
    let (mut nodes, mut gpus): (Vec<PciNode>, Vec<(Gpu, usize)>) = (Vec::new(), Vec::new());
    for (index, object) in raw.objects.iter().enumerate() {
        let Some(kind) = kinds[index].filter(|_| needed[index]) else { continue };
        let parent = object.parent.and_then(|parent| place[parent]);
        let address = object.pci.map(|pci| pci.address);
        place[index] = Some(nodes.len());
        let numa_node = numa_node_of(raw, index);
        if let (PciKind::Gpu, Some(pci)) = (kind, address) {
            gpus.push((gpu(raw, index, pci, nodes.len(), numa_node), index));
        }
        nodes.push(PciNode {
            kind,
            address,
            parent,
            depth: parent.map_or(0, |parent| nodes[parent].depth + 1),
            numa_node,
            link: object.pci.map_or_else(Link::default, |pci| Link::of_speed(pci.gb_per_s)),
            names: os_devices(raw, index).filter_map(|device| device.name.clone()).collect(),
        });
    }
    gpus.sort_by_key(|(gpu, _)| gpu.pci);
    gpus.dedup_by_key(|(gpu, _)| gpu.pci);
    let (gpus, objects) = gpus.into_iter().unzip();
    (nodes, gpus, objects)
}

fn gpu(raw: &RawBox, index: usize, pci: PciAddress, node: usize, numa_node: Option<u32>) -> Gpu {
    let object = &raw.objects[index];
    let info = |key: &str| {
        let own = object.infos.iter();
        let below = os_devices(raw, index).flat_map(|device| &device.infos);
        value_of(own.chain(below), key)
    };
    let device_id = object.pci.map_or((0, 0), |pci| (pci.vendor_id, pci.device_id));
    Gpu {
        pci,
        node,
        uuid: info("NVIDIAUUID"),
        model: info("GPUModel")
            .or_else(|| info("PCIDevice"))
            .or_else(|| nvlink::model_name(device_id).map(str::to_owned)),
        device_id,
        numa_node,
    }
}

/// The node next to a PCI object: the node of the CPU object above it, if there is exactly one.
fn numa_node_of(raw: &RawBox, index: usize) -> Option<u32> {
    let anchor = raw.way_up(index).find(|at| pci_kind(raw, *at).is_none())?;
    match raw.objects[anchor].nodes[..] {
        [node] => Some(node),
        _ => None,
    }
}
