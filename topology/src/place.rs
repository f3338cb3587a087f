//! Places each rank: its GPU, its cores, the nodes of its buffers.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::core_shares::{CoreShare, deal};
use crate::kinds::unlike_ranks;
use crate::reasons::group_reasons;
use crate::spread::sums;
use crate::{
    Error, Machine, Needs, NumaNode, PciAddress, Severity, Warning, counted, far_staging,
    format_bytes, format_cpu_list, format_nodes, groups, in_parts,
};

/// The devices of the ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Seats {
    /// The GPUs of the box, each for at most one rank.
    #[default]
    Gpus,
    /// These GPUs alone, each for at most one rank.
    These(Vec<PciAddress>),
    /// These GPUs, dealt to the ranks in turn; several ranks may share one.
    Shared(Vec<PciAddress>),
    /// No GPU. Ranks are dealt over the nodes.
    Virtual,
}

/// Sockets without ranks whose cores and memory the ranks may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum Sockets {
    /// None, unless the ranks' own sockets are too small for their memory; then as `All`.
    #[default]
    Auto,
    /// None.
    Near,
    /// All. Their cores and memory go to the nearest ranks.
    All,
}

/// A request for placement.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Request {
    /// Ranks of a tensor-parallel group.
    pub tp: usize,
    /// Tensor-parallel groups.
    pub dp: usize,
    /// The devices of the ranks.
    pub seats: Seats,
    /// Bytes of optimizer state of each rank, 0 if unknown.
    pub state_bytes: u64,
    /// Bytes of staging buffers of each rank, 0 if unknown.
    pub staging_bytes: u64,
    /// Sockets without ranks that they may use.
    pub sockets: Sockets,
}

/// The place of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// `dp_rank * tp + tp_rank`.
    pub rank: usize,
    /// Its rank in the tensor-parallel group.
    pub tp_rank: usize,
    /// Index of its tensor-parallel group.
    pub dp_rank: usize,
    /// Its GPU, if it has one.
    pub gpu: Option<PciAddress>,
    /// The [`NumaNode::id`](crate::NumaNode::id) of its staging buffers, which its GPU reads and writes.
    pub numa_node: u32,
    /// Nodes and bytes of the staging buffers that `numa_node` does not hold; usually empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub far_staging: Vec<(u32, u64)>,
    /// The nodes of its optimizer states, which are the nodes of its cores. Never empty.
    pub state_nodes: Vec<u32>,
    /// One logical CPU of each of its physical cores, for the threads that update parameters.
    pub worker_cpus: Vec<u32>,
    /// CPU of the thread that drives the GPU: a sibling of the first worker's CPU, or that CPU.
    pub driver_cpu: Option<u32>,
    /// The logical CPUs of the rank's cores, ascending, siblings included. Empty only if this
    /// process may use no core of the machine.
    pub cpus: Vec<u32>,
    /// Reasons for the place, if they are not obvious.
    pub reasons: Vec<String>,
}

/// Host memory of a rank in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostBytes {
    /// Bytes of staging, next to its GPU.
    pub staging: u64,
    /// Bytes of states, on the nodes of its cores.
    pub states: u64,
}

impl RankPlace {
    /// The nodes of its staging buffers, its GPU's own first.
    pub fn staging_nodes(&self) -> Vec<u32> {
        std::iter::once(self.numa_node)
            .chain(self.far_staging.iter().map(|(node, _)| *node))
            .collect()
    }

    /// Bytes of a rank's memory on each node: `staging` on the rank's own node except
    /// [`far_staging`](Self::far_staging), `states` in equal parts on the nodes of the cores that
    /// touch them first.
    pub fn bytes_by_node(
        &self,
        machine: &Machine,
        HostBytes { staging, states }: HostBytes,
    ) -> BTreeMap<u32, u64> {
        let node_of = |cpu: &u32| {
            let core = machine.cores.iter().find(|core| core.cpus.contains(cpu));
            let node = core.map(|core| core.numa_node);
            // A node without memory of its own takes the bytes of the first node.
            node.filter(|node| self.state_nodes.contains(node)).unwrap_or(self.state_nodes[0])
        };
        let mut nodes: Vec<u32> = self.worker_cpus.iter().map(node_of).collect();
        if nodes.is_empty() {
            nodes.clone_from(&self.state_nodes);
        }
        let far: u64 = self.far_staging.iter().map(|(_, bytes)| bytes).sum();
        assert!(far <= staging, "a rank is placed with the staging that it has");
        let mut bytes = BTreeMap::from([(self.numa_node, staging - far)]);
        for (node, part) in in_parts(states, &nodes).iter().chain(&self.far_staging) {
            *bytes.entry(*node).or_default() += part;
        }
        bytes
    }
}

impl fmt::Display for RankPlace {
    /// Writes `rank 3: node 0, cores 9-11, driver on CPU 57`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut workers = self.worker_cpus.clone();
        workers.sort_unstable();
        write!(f, "rank {}: ", self.rank)?;
        if let Some(gpu) = self.gpu {
            write!(f, "GPU {gpu}, ")?;
        }
        write!(
            f,
            "staging on node {}, states on node {}, cores {}",
            format_nodes(&self.staging_nodes()),
            format_nodes(&self.state_nodes),
            format_cpu_list(&workers)
        )?;
        match self.driver_cpu {
            Some(cpu) => write!(f, ", driver on CPU {cpu}"),
            None => Ok(()),
        }
    }
}

/// The places of all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Ranks of a tensor-parallel group.
    pub tp: usize,
    /// Tensor-parallel groups.
    pub dp: usize,
    /// The places by rank.
    pub ranks: Vec<RankPlace>,
    /// Reasons about sockets without ranks, and about staging away from its GPU.
    pub sockets: Vec<String>,
    /// Whether cores of sockets without ranks are dealt too.
    pub all_sockets: bool,
    /// One line per tensor-parallel group, and lines for all groups.
    pub reasons: Vec<String>,
    /// Problems of the placement.
    pub warnings: Vec<Warning>,
}

impl Placement {
    /// Adds a reason about sockets.
    fn say(&mut self, why: String) {
        self.reasons.push(why.clone());
        self.sockets.push(why);
    }
}

/// Deals `world_size` virtual GPUs over the NUMA nodes in blocks, as evenly as the numbers allow:
/// with 16 ranks on two nodes, ranks 0-7 go to the first. Each rank gets a contiguous share of the
/// allowed physical cores of its node, and of nodes without ranks on its socket. With more ranks
/// than cores, several ranks share a core.
///
/// A node without memory or without an allowed core gets no rank, unless no node has both.
pub fn place_ranks(machine: &Machine, world_size: usize) -> Vec<RankPlace> {
    let request = Request { tp: 1, dp: world_size, seats: Seats::Virtual, ..Request::default() };
    place(machine, &request).map_or_else(|_| Vec::new(), |placement| placement.ranks)
}

/// Places TP x DP ranks.
///
/// # Errors
/// More ranks than GPUs, with [`Seats::Gpus`] and [`Seats::These`]; no GPU at all, with
/// [`Seats::Shared`].
pub fn place(machine: &Machine, request: &Request) -> Result<Placement, Error> {
    let mut placement = place_on(machine, request, request.sockets == Sockets::All)?;
    let is_idle = !placement.sockets.is_empty();
    spread_staging(machine, request, &mut placement);
    let short = short_nodes(machine, &needed(machine, request, &placement.ranks));
    if let (Sockets::Auto, true, Some(short)) = (request.sockets, is_idle, short.first()) {
        placement = place_on(machine, request, true)?;
        placement.say(format!(
            "{short}: they use the cores and the memory of all sockets; what \
             far cores work on is staged near the GPU and crosses the link between the sockets"
        ));
        spread_staging(machine, request, &mut placement);
    }
    let mut warnings = too_little_memory(machine, request, &placement.ranks);
    warnings.append(&mut placement.warnings);
    placement.warnings = warnings;
    Ok(placement)
}

/// Moves staging away from nodes that cannot hold it, to other nodes of their ranks.
fn spread_staging(machine: &Machine, request: &Request, placement: &mut Placement) {
    let host = HostBytes { staging: request.staging_bytes, states: request.state_bytes };
    let needs = |place: &RankPlace| Needs {
        home: place.numa_node,
        others: place.state_nodes.iter().copied().filter(|id| *id != place.numa_node).collect(),
        bytes: place.bytes_by_node(machine, host),
    };
    let needs: Vec<Needs<u32>> = placement.ranks.iter().map(needs).collect();
    let available = |id| machine.numa_node(id).map_or(u64::MAX, |node| room(node).0);
    let mut moved: BTreeMap<u32, u64> = BTreeMap::new();
    let far = far_staging(host.staging, &needs, available);
    for (place, far) in placement.ranks.iter_mut().zip(far) {
        *moved.entry(place.numa_node).or_default() +=
            far.iter().map(|(_, bytes)| bytes).sum::<u64>();
        place.far_staging = far;
    }
    for (node, bytes) in moved.into_iter().filter(|(_, bytes)| *bytes > 0) {
        placement.say(far_words(node, bytes));
    }
}

/// Text that `bytes` of the staging of the ranks next to `node` lie on other nodes.
pub fn far_words(node: u32, bytes: u64) -> String {
    format!(
        "node {node} does not hold all staging of its GPUs: {} of it lie on other nodes of their ranks, and its copies \
         cross the link between the nodes",
        format_bytes(bytes)
    )
}

fn place_on(machine: &Machine, request: &Request, all_sockets: bool) -> Result<Placement, Error> {
    let (tp, dp) = (request.tp.max(1), request.dp);
    let groups = seat_groups(machine, request, tp, dp)?;
    let seats: Vec<Option<usize>> = groups.concat();
    let near: Vec<Option<u32>> = match request.seats {
        Seats::Virtual => virtual_nodes(machine, seats.len()),
        _ => seats.iter().map(|gpu| machine.gpus[(*gpu)?].numa_node).collect(),
    };
    let dealt = deal(machine, &near, all_sockets);
    let rank = |rank: usize| {
        let share = &dealt.shares[rank];
        rank_place(machine, rank, tp, seats[rank], near[rank], share)
    };
    let ranks: Vec<RankPlace> = (0..seats.len()).map(rank).collect();
    let mut reasons = if tp > 1 { group_reasons(machine, &groups) } else { Vec::new() };
    let stay = |node| format!("the cores of node {node} stay idle: no rank is on their socket");
    let sockets: Vec<String> = dealt.idle.iter().map(stay).collect();
    reasons.extend(sockets.iter().cloned());
    let mut warnings = Vec::new();
    if dealt.shared {
        warnings.push(Warning {
            id: "more-ranks-than-cores",
            severity: Severity::Warning,
            text: format!(
                "{} on {}: several ranks share a core",
                counted(ranks.len(), "rank"),
                counted(machine.allowed_cores().count(), "allowed core")
            ),
            remedy: "fewer ranks, or a wider cpuset".into(),
        });
    }
    let cpus = ranks.iter().map(|place| place.worker_cpus.as_slice());
    warnings.extend(unlike_ranks(machine, cpus));
    Ok(Placement { tp, dp, ranks, all_sockets, sockets, reasons, warnings })
}

/// The GPU of each rank, by group; `None` for a virtual one.
fn seat_groups(
    machine: &Machine,
    request: &Request,
    tp: usize,
    dp: usize,
) -> Result<Vec<Vec<Option<usize>>>, Error> {
    let place = |pci: &PciAddress| machine.gpus.iter().position(|gpu| gpu.pci == *pci);
    let (chosen, shared): (Vec<usize>, _) = match &request.seats {
        Seats::Virtual => return Ok(vec![vec![None; tp]; dp]),
        Seats::Shared(wanted) => (wanted.iter().filter_map(place).collect(), true),
        Seats::Gpus => ((0..machine.gpus.len()).collect(), false),
        Seats::These(wanted) => {
            let is = |gpu: &usize| wanted.contains(&machine.gpus[*gpu].pci);
            ((0..machine.gpus.len()).filter(is).collect(), false)
        }
    };
    let (ranks, gpus) = (tp.saturating_mul(dp), chosen.len());
    if gpus == 0 && shared || gpus < ranks && !shared {
        return Err(Error::TooFewGpus { ranks, gpus });
    }
    // Rank i has the GPU i modulo the number of GPUs.
    let in_turn = |group| (0..tp).map(|i| chosen[(group * tp + i) % gpus]).collect();
    let groups: Vec<Vec<usize>> = match shared {
        true => (0..dp).map(in_turn).collect(),
        false => groups::choose(machine, &chosen, tp, dp),
    };
    Ok(groups.into_iter().map(|group| group.into_iter().map(Some).collect()).collect())
}

/// The nodes of virtual GPUs, in blocks over the nodes with memory and allowed cores.
fn virtual_nodes(machine: &Machine, count: usize) -> Vec<Option<u32>> {
    let has_core = |id: u32| machine.allowed_cores().any(|core| core.numa_node == id);
    let usable = machine.numa_nodes.iter().filter(|n| n.memory_bytes > 0 && has_core(n.id));
    let usable: Vec<u32> = usable.map(|node| node.id).collect();
    let node = |rank: usize| usable.get(rank * usable.len() / count.max(1)).copied();
    (0..count).map(node).collect()
}

fn rank_place(
    machine: &Machine,
    rank: usize,
    tp: usize,
    gpu: Option<usize>,
    near: Option<u32>,
    share: &CoreShare,
) -> RankPlace {
    let mut reasons = Vec::new();
    let numa_node = staging_node(machine, near.or(share.home), &mut reasons);
    let mut state_nodes: Vec<u32> = Vec::new();
    for (node, _) in &share.cores {
        if !state_nodes.contains(node) && has_memory(machine, *node) {
            state_nodes.push(*node);
        }
    }
    if state_nodes.is_empty() {
        state_nodes.push(numa_node);
    }
    if let (Some(near), Some(home)) = (near, share.home)
        && near != home
    {
        reasons.push(format!("node {near} has no allowed core: cores of node {home}"));
    }
    if gpu.is_some() && near.is_none() && machine.numa_nodes.len() > 1 {
        reasons.push("the box does not tell the GPU's node: the least crowded one".into());
    }
    let worker_cpus: Vec<u32> = share.cores.iter().map(|(_, cpus)| cpus[0]).collect();
    let first = share.cores.first().map(|(_, cpus)| cpus);
    let mut cpus: Vec<u32> = share.cores.iter().flat_map(|(_, cpus)| cpus.clone()).collect();
    cpus.sort_unstable();
    RankPlace {
        rank,
        tp_rank: rank % tp,
        dp_rank: rank / tp,
        gpu: gpu.map(|gpu| machine.gpus[gpu].pci),
        numa_node,
        far_staging: Vec::new(),
        state_nodes,
        worker_cpus,
        driver_cpu: first.map(|cpus| cpus.get(1).copied().unwrap_or(cpus[0])),
        cpus,
        reasons,
    }
}

fn has_memory(machine: &Machine, id: u32) -> bool {
    machine.allowed_nodes.contains(&id)
        && machine.numa_node(id).is_some_and(|node| node.memory_bytes > 0)
}

/// The node next to the GPU, or the nearest node on which this process may allocate.
fn staging_node(machine: &Machine, near: Option<u32>, reasons: &mut Vec<String>) -> u32 {
    if let Some(node) = near.filter(|node| has_memory(machine, *node)) {
        return node;
    }
    let with_memory = machine.numa_nodes.iter().map(|n| n.id).filter(|id| has_memory(machine, *id));
    let far = |id: &u32| (near.map_or(0, |near| machine.distance(near, *id)), *id);
    let best = with_memory.min_by_key(far);
    if let (Some(near), Some(best)) = (near, best) {
        reasons.push(format!("no memory may be used on node {near}: staging on node {best}"));
    }
    best.or(machine.numa_nodes.first().map(|node| node.id)).unwrap_or(0)
}

/// Bytes that all ranks need, by node.
fn needed(machine: &Machine, request: &Request, ranks: &[RankPlace]) -> BTreeMap<u32, u64> {
    let host = HostBytes { staging: request.staging_bytes, states: request.state_bytes };
    sums(ranks.iter().flat_map(|place| place.bytes_by_node(machine, host)))
}

/// Texts about the nodes with fewer bytes than are `needed` there.
fn short_nodes(machine: &Machine, needed: &BTreeMap<u32, u64>) -> Vec<String> {
    let short = |(id, bytes): (&u32, &u64)| {
        let (available, word) = room(machine.numa_node(*id)?);
        let [wanted, left] = [*bytes, available].map(format_bytes);
        (*bytes > available)
            .then(|| format!("the ranks need {wanted} on node {id}, {left} are {word}"))
    };
    needed.iter().filter_map(short).collect()
}

/// Bytes of a node for ranks, free or (if unknown) all, and the word for which of the two.
fn room(node: &NumaNode) -> (u64, &'static str) {
    node.free_bytes.map_or((node.memory_bytes, "there"), |free| (free, "free"))
}

fn too_little_memory(machine: &Machine, request: &Request, ranks: &[RankPlace]) -> Vec<Warning> {
    let needed = needed(machine, request, ranks);
    let short = short_nodes(machine, &needed).into_iter().map(|text| Warning {
        id: "memory-short",
        severity: Severity::Error,
        text,
        remedy: "free memory on that node, or use fewer or smaller ranks".into(),
    });
    let total = needed.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
    let limit = machine.available_memory.filter(|available| total > *available);
    let limit = limit.map(|available| Warning {
        id: "memory-limit",
        severity: Severity::Error,
        text: format!(
            "the ranks need {} together, this process may still take {}",
            format_bytes(total),
            format_bytes(available)
        ),
        remedy: "free memory, or raise the cgroup's limit (docker --memory, Slurm --mem)".into(),
    });
    short.chain(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Core;

    /// Nodes of 1 GiB with `cores` cores each. All cores are numbered first, then their siblings.
    fn machine(nodes: u32, cores: u32, siblings: u32) -> Machine {
        let total = nodes * cores;
        let core = |c| (0..siblings).map(|s| s * total + c).collect::<Vec<u32>>();
        let node_cores = |n| (n * cores..(n + 1) * cores).map(core);
        let numa_node = |id| NumaNode {
            id,
            cpus: node_cores(id).flatten().collect(),
            memory_bytes: 1 << 30,
            free_bytes: None,
            package: Some(id),
            distances: Vec::new(),
        };
        let core = |cpus, id| Core { cpus, numa_node: id, package: Some(id), l3: None, kind: None };
        Machine {
            name: None,
            virtual_machine: false,
            cpu_model: None,
            live: false,
            numa_nodes: (0..nodes).map(numa_node).collect(),
            cores: (0..nodes)
                .flat_map(|id| node_cores(id).map(move |cpus| core(cpus, id)))
                .collect(),
            core_kinds: Vec::new(),
            allowed_cpus: (0..total * siblings).collect(),
            allowed_nodes: (0..nodes).collect(),
            total_memory: u64::from(nodes) << 30,
            pci: Vec::new(),
            has_io: false,
            gpus: Vec::new(),
            nvlink: Vec::new(),
            nvlink_unknown: None,
            available_memory: None,
        }
    }

    fn cpus_of(places: &[RankPlace]) -> Vec<Vec<u32>> {
        places.iter().map(|place| place.cpus.clone()).collect()
    }

    fn nodes_of(places: &[RankPlace]) -> Vec<u32> {
        places.iter().map(|place| place.numa_node).collect()
    }

    #[test]
    fn four_ranks_share_two_cores() {
        let places = place_ranks(&machine(1, 2, 1), 4);
        assert_eq!(cpus_of(&places), [[0], [0], [1], [1]]);
        assert_eq!(places.iter().map(|place| place.rank).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn sixteen_ranks_get_three_cores_each_on_two_nodes_of_24() {
        let places = place_ranks(&machine(2, 24, 2), 16);
        assert_eq!(nodes_of(&places), [[0; 8], [1; 8]].concat());
        assert_eq!(places[0].cpus, [0, 1, 2, 48, 49, 50]);
        assert_eq!(places[15].cpus, [45, 46, 47, 93, 94, 95]);
        let mut all = cpus_of(&places).concat();
        all.sort_unstable();
        assert_eq!(all, (0..96).collect::<Vec<_>>());
    }

    #[test]
    fn uneven_numbers_leave_no_core_idle_and_differ_by_one_at_most() {
        let places = place_ranks(&machine(2, 5, 1), 5);
        assert_eq!(nodes_of(&places), [0, 0, 0, 1, 1]);
        assert_eq!(cpus_of(&places), [vec![0], vec![1, 2], vec![3, 4], vec![5, 6], vec![7, 8, 9]]);
        assert_eq!(nodes_of(&place_ranks(&machine(4, 2, 1), 2)), [0, 2]);
    }

    #[test]
    fn only_allowed_cpus_are_given_out() {
        let mut machine = machine(2, 4, 2);
        machine.allowed_cpus = vec![1, 2, 10];
        let places = place_ranks(&machine, 2);
        assert_eq!(nodes_of(&places), [0, 0]);
        assert_eq!(cpus_of(&places), [vec![1], vec![2, 10]]);
    }

    #[test]
    fn a_node_without_memory_gets_no_rank_unless_no_node_has_memory_and_cores() {
        let mut machine = machine(2, 2, 1);
        machine.numa_nodes[0].memory_bytes = 0;
        assert_eq!(nodes_of(&place_ranks(&machine, 3)), [1, 1, 1]);
        // A node has memory without cores: the cores of the other node serve it.
        machine.cores.truncate(2);
        let places = place_ranks(&machine, 2);
        assert_eq!(nodes_of(&places), [1, 1]);
        assert_eq!(cpus_of(&places), [[0], [1]]);
    }

    #[test]
    fn odd_machines_never_panic_and_every_rank_has_a_place() {
        for (nodes, cores, siblings) in [(0, 0, 0), (1, 0, 1), (1, 1, 1), (3, 7, 2), (8, 1, 4)] {
            for world_size in 0..20 {
                let mut machine = machine(nodes, cores, siblings);
                for _ in 0..3 {
                    let places = place_ranks(&machine, world_size);
                    assert_eq!(places.len(), world_size);
                    let cpus_exist = !machine.allowed_cpus.is_empty();
                    assert!(places.iter().all(|place| place.cpus.is_empty() != cpus_exist));
                    machine.allowed_cpus.retain(|cpu| cpu % 3 == 1);
                    machine.numa_nodes.pop();
                }
            }
        }
    }
}
