//! Finds problems that waste a box's bandwidth, and their remedies.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::kinds::cores_without_memory;
use crate::machine::sysfs;
use crate::{Machine, Placement, Severity, Warning, counted, format_cpu_list};

/// The surroundings of the process, for a live box.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// Root of `/proc` and `/sys`; `None` for a box from a file.
    pub root: Option<PathBuf>,
    /// `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER`, if it is set.
    pub device_order: Option<String>,
}

/// All problems of the box, its surroundings, and a placement on it, worst first.
pub fn warnings(
    machine: &Machine,
    placement: Option<&Placement>,
    environment: &Environment,
) -> Vec<Warning> {
    let mut found = WarningList(Vec::new());
    found.io(machine);
    found.uplinks(machine);
    found.links(machine);
    found.nodes(machine);
    found.limits(machine);
    found.surroundings(machine, environment);
    if let Some(placement) = placement {
        found.0.extend(placement.warnings.iter().cloned());
    }
    found.0.sort_by_key(|warning| std::cmp::Reverse(warning.severity));
    found.0
}

struct WarningList(Vec<Warning>);

impl WarningList {
    fn say(&mut self, id: &'static str, severity: Severity, text: String, remedy: &str) {
        self.0.push(Warning { id, severity, text, remedy: remedy.to_owned() });
    }

    fn info(&mut self, id: &'static str, text: String, remedy: &str) {
        self.say(id, Severity::Info, text, remedy);
    }

    fn warn(&mut self, id: &'static str, text: String, remedy: &str) {
        self.say(id, Severity::Warning, text, remedy);
    }

    fn io(&mut self, machine: &Machine) {
        if !machine.has_io {
            self.warn(
                "no-pci",
                "the box shows no PCI devices, so no GPU can be placed".into(),
                "a container needs /sys; hwloc needs its I/O support; an export needs \
                 `lstopo --whole-io box.xml`",
            );
        } else if machine.gpus.is_empty() {
            self.info(
                "no-gpu",
                "no NVIDIA GPU is on the PCI buses".into(),
                "nothing, if there is none: ranks are dealt over the NUMA nodes",
            );
        }
        let models: BTreeSet<_> = machine.gpus.iter().map(|gpu| gpu.device_id).collect();
        if models.len() > 1 {
            let names: BTreeSet<String> = machine
                .gpus
                .iter()
                .map(|gpu| gpu.model.clone().unwrap_or_else(|| format!("{:04x}", gpu.device_id.1)))
                .collect();
            self.warn(
                "mixed-gpus",
                format!(
                    "GPUs of {} models: {}; the slowest sets the pace",
                    models.len(),
                    names.into_iter().collect::<Vec<_>>().join(", ")
                ),
                "use GPUs of one model; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA numbers them \
                 by speed",
            );
        }
    }

    fn uplinks(&mut self, machine: &Machine) {
        // Uplinks with the same problem make one finding.
        let mut alike: BTreeMap<(usize, String), BTreeSet<String>> = BTreeMap::new();
        for gpu in 0..machine.gpus.len() {
            let (sharers, port) = (machine.sharers(gpu), machine.root_port(gpu));
            let (Some(port), true) = (port, sharers > 1) else { continue };
            let (alone, all) = (machine.host_gb_per_s_alone(gpu), machine.host_gb_per_s_all(gpu));
            let speed = match (alone, all) {
                (Some(alone), Some(all)) => {
                    format!(": {all:.2} GB/s each when all copy, {alone:.2} alone")
                }
                _ => String::new(),
            };
            alike.entry((sharers, speed)).or_default().insert(port.to_string());
        }
        for ((sharers, speed), ports) in alike {
            let list = ports.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            let text = match ports.len() {
                1 => format!("{sharers} GPUs share the uplink at root port {list}{speed}"),
                n => format!("{sharers} GPUs share each of {n} uplinks, root ports {list}{speed}"),
            };
            self.warn(
                "shared-uplink",
                text,
                "it is how the board is wired; where GPUs stay idle, let onebox choose which, and \
                 it spreads ranks over uplinks",
            );
        }
    }

    fn links(&mut self, machine: &Machine) {
        for gpu in &machine.gpus {
            let link = machine.pci[gpu.node].link;
            if let (Some(now), Some(max)) = (link.width, link.max_width)
                && now < max
            {
                self.warn(
                    "link-below-maximum",
                    format!("GPU {} runs on {now} of its {max} lanes", gpu.pci),
                    "reseat the card or riser, or use a slot with all lanes",
                );
            }
            if let (Some(now), Some(max)) = (link.generation, link.max_generation)
                && now < max
            {
                self.info(
                    "link-below-maximum",
                    format!("GPU {} runs PCIe gen {now}, it can do gen {max}", gpu.pci),
                    "an idle GPU trains its link down: look again under load, then at the \
                     firmware's settings",
                );
            }
        }
        self.slower_than_peers(machine);
        if machine.hides_its_tree() {
            self.warn(
                "tree-hidden",
                format!(
                    "a virtual machine shows its {} GPUs each on a port of its own: its hypervisor hides which of them share \
                     an uplink, and which node they are next to",
                    machine.gpus.len()
                ),
                "look at the host, or at what is known of the product; name that box by `--box FILE` to `onebox plan` and \
                 `simulate`, and measure with `onebox bench copy`",
            );
        }
        self.ends_differ(machine);
    }

    /// Warns about GPUs slower than others of their model, since a file reports no maximum speed.
    fn slower_than_peers(&mut self, machine: &Machine) {
        for (index, gpu) in machine.gpus.iter().enumerate() {
            let own = machine.host_gb_per_s_alone(index);
            if let (Some(own), Some(best)) = (own, machine.outdone_by(index)) {
                self.warn(
                    "link-below-maximum",
                    format!(
                        "GPU {} gets {own:.2} GB/s to the host, others of its model {best:.2}",
                        gpu.pci
                    ),
                    "a slot with fewer lanes or of an older generation: move the card, or leave it \
                     out, since the slowest rank sets the pace",
                );
            }
        }
    }

    /// Reports links whose ends have different speeds in an export, which reads both at one moment.
    fn ends_differ(&mut self, machine: &Machine) {
        let odd = |gpu: &&crate::Gpu| {
            let own = &machine.pci[gpu.node];
            let above = own.parent.map(|parent| &machine.pci[parent]);
            let speeds = (own.link.gb_per_s, above.and_then(|port| port.link.gb_per_s));
            let differ = matches!(speeds, (Some(a), Some(b)) if a > 1.5 * b || b > 1.5 * a);
            differ && own.link.max_gb_per_s.is_none() && own.depth.is_multiple_of(2)
        };
        let odd: Vec<String> =
            machine.gpus.iter().filter(odd).map(|gpu| gpu.pci.to_string()).collect();
        if !odd.is_empty() {
            self.info(
                "link-ends-differ",
                format!(
                    "the ends of the links of {} tell different speeds: the higher is counted",
                    first_of(&odd)
                ),
                "a hypervisor's port, or an idle link: read the box itself, or measure it",
            );
        }
    }

    fn nodes(&mut self, machine: &Machine) {
        let allowed = |cpu: &u32| machine.allowed_cpus.binary_search(cpu).is_ok();
        let (mut far, mut denied, mut unknown) = (Vec::new(), Vec::new(), 0);
        let mut far_nodes = BTreeSet::new();
        for gpu in &machine.gpus {
            let Some(id) = gpu.numa_node else {
                unknown += 1;
                continue;
            };
            let has_cpu = machine.numa_node(id).is_some_and(|node| node.cpus.iter().any(allowed));
            if !has_cpu {
                far.push(gpu.pci.to_string());
                far_nodes.insert(id);
            }
            if !machine.allowed_nodes.contains(&id) {
                denied.push(gpu.pci.to_string());
            }
        }
        if !far.is_empty() {
            let ids: Vec<u32> = far_nodes.into_iter().collect();
            self.say(
                "gpu-far",
                Severity::Error,
                format!(
                    "{} {} on node {}, where this process may use no CPU",
                    first_of(&far),
                    if far.len() == 1 { "is" } else { "are" },
                    format_cpu_list(&ids)
                ),
                "widen the cpuset (cgroup, taskset, Slurm, docker --cpuset-cpus) to CPUs of that \
                 node, or use other GPUs",
            );
        }
        if !denied.is_empty() {
            self.warn(
                "memory-denied",
                format!("no memory may be used on the node of {}", first_of(&denied)),
                "widen cpuset.mems (docker --cpuset-mems)",
            );
        }
        if unknown > 0 && machine.numa_nodes.len() > 1 {
            self.warn(
                "gpu-node-unknown",
                format!("the box does not tell the node of {}", counted(unknown, "GPU")),
                "update the firmware; a virtual machine needs its host's NUMA nodes passed through",
            );
        }
        let sockets: BTreeSet<_> = machine.cores.iter().filter_map(|core| core.package).collect();
        if machine.numa_nodes.len() == 1 && sockets.len() > 1 {
            self.warn(
                "nodes-hidden",
                format!("{} sockets show as one NUMA node", sockets.len()),
                "let the firmware or the hypervisor show NUMA nodes",
            );
        }
        self.0.extend(cores_without_memory(machine));
        for node in &machine.numa_nodes {
            if node.memory_bytes == 0 {
                self.warn(
                    "node-without-memory",
                    format!("node {} has no memory", node.id),
                    "put memory modules into that socket: half of the box's bandwidth is there",
                );
            }
        }
    }

    fn limits(&mut self, machine: &Machine) {
        let all: usize = machine.cores.iter().map(|core| core.cpus.len()).sum();
        if machine.allowed_cpus.len() < all {
            self.info(
                "cpus-restricted",
                format!(
                    "this process may use {} of {all} CPUs: {}",
                    machine.allowed_cpus.len(),
                    format_cpu_list(&machine.allowed_cpus)
                ),
                "if that is not wanted, look at the cgroup and at the launcher's binding",
            );
        }
    }

    fn surroundings(&mut self, machine: &Machine, environment: &Environment) {
        if let Some(devices) = environment.visible_devices.as_deref().filter(|d| reordered(d)) {
            self.warn(
                "visible-devices-reordered",
                format!("CUDA_VISIBLE_DEVICES={devices} renumbers the GPUs"),
                "onebox goes by PCI address; other tools that count will differ: list them in \
                 ascending order",
            );
        }
        let fastest_first = environment.device_order.as_deref() != Some("PCI_BUS_ID");
        let numbered = environment.visible_devices.is_some();
        if environment.root.is_some() && fastest_first && numbered {
            self.info(
                "device-order",
                "CUDA_VISIBLE_DEVICES counts GPUs by speed, not by PCI address".into(),
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
            );
        }
        let Some(root) = &environment.root else { return };
        let settings = sysfs::settings(root);
        if settings.numa_balancing && machine.numa_nodes.len() > 1 {
            self.warn(
                "numa-balancing",
                "the kernel moves pages between nodes: stalls of 16 to 31 ms were seen".into(),
                "sysctl kernel.numa_balancing=0",
            );
        }
        if settings.huge_pages.as_deref() == Some("never") {
            self.warn(
                "huge-pages-never",
                "transparent huge pages are off: mapping and pinning host memory takes longer"
                    .into(),
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            );
        }
        if settings.zone_reclaim {
            self.warn(
                "zone-reclaim",
                "a full node reclaims its own file pages before it uses another node".into(),
                "sysctl vm.zone_reclaim_mode=0",
            );
        }
        if let Some(bytes) = settings.memlock {
            self.info(
                "memlock",
                format!(
                    "at most {} may be locked; CUDA does not count there, io_uring and RDMA do",
                    crate::format_bytes(bytes)
                ),
                "ulimit -l unlimited",
            );
        }
    }
}

/// Text for several GPUs: `8 GPUs (0000:b7:00.0 ...)`.
fn first_of(gpus: &[String]) -> String {
    let more = if gpus.len() > 1 { " ..." } else { "" };
    format!("{} ({}{more})", counted(gpus.len(), "GPU"), gpus[0])
}

/// Whether the numbers in a list do not ascend. UUIDs have no order.
fn reordered(devices: &str) -> bool {
    let numbers: Result<Vec<u32>, _> = devices.split(',').map(|d| d.trim().parse()).collect();
    numbers.is_ok_and(|numbers| !numbers.is_sorted())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::Tree;

    #[test]
    fn surroundings_get_a_warning_if_they_cost_speed() {
        let machine = Machine::from_synthetic("pack:2 numa:1 core:2 pu:1").unwrap();
        let tree = Tree::new();
        tree.write("proc/sys/kernel/numa_balancing", "1");
        tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]");
        let environment = Environment {
            root: Some(tree.root().to_owned()),
            visible_devices: Some("3,1".into()),
            device_order: None,
        };
        let found: Vec<&str> =
            warnings(&machine, None, &environment).iter().map(|w| w.id).collect();
        assert_eq!(
            found,
            [
                "no-pci",
                "visible-devices-reordered",
                "numa-balancing",
                "huge-pages-never",
                "device-order"
            ]
        );
        assert!(!reordered("0,1,5") && !reordered("GPU-5,GPU-1") && reordered("1,0"));
    }
}
