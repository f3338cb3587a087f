//! Converts a described box to the simulator's hardware: ranks' places, shared links and nodes.

use crate::sim::{AttentionKernels, Era2020, Gpu, Hardware, MeasuredMachine, Rates, Seat};
use config::{
    Attention, BoxConfig, Config, DeviceConfig, LoadDistribution, MeasuredConfig,
    meaning_and_source, missing_rates,
};
use device::cuda::CUDNN_ATTENTION_ON;
use files::foreign_text::foreign;
use layout::placement::{kernel_threads, request};
use std::collections::BTreeMap;
use topology::{
    HostBytes, Machine, Needs, Placement, RankPlace, Request, Sockets, counted, far_staging,
    far_words, format_bytes, in_parts,
};

/// Error of a box that cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum BoxError {
    /// The box lacks rates that the simulator needs.
    #[error(
        "the box `{}` lacks {} that a simulation needs (0: not known):{}\nadd them to the box; see the boxes that `onebox boxes` lists, \
         or measure this machine with `onebox bench --save-box FILE`",
        foreign(name), counted(keys.len(), "key"), explained(keys)
    )]
    Unknown {
        /// Name of the box.
        name: String,
        /// Keys of all missing rates in the description.
        keys: Vec<&'static str>,
    },
    /// The topology of the box has no place for the ranks.
    #[error("the topology of the box `{name}`: {source}")]
    Topology {
        /// Name of the box.
        name: String,
        /// Reason for the failure.
        source: topology::Error,
    },
    /// The config asks for cuDNN's attention, and a run would refuse it on this GPU.
    #[error(
        "the box `{name}` has GPUs of sm_{sm}, and `attention: Cudnn` is for {}: leave `attention` out",
        in_words(&CUDNN_ATTENTION_ON)
    )]
    Attention {
        /// Name of the box.
        name: String,
        /// Compute capability of its GPUs.
        sm: u32,
    },
    /// The number of ranks does not fit the number of machines.
    #[error("the box `{name}`: {why}")]
    Machines {
        /// Name of the box.
        name: String,
        /// Reason for the failure.
        why: String,
    },
}

/// Compute capabilities as text: `sm_90, sm_100`.
fn in_words(capabilities: &[u32]) -> String {
    capabilities.iter().map(|sm| format!("sm_{sm}")).collect::<Vec<_>>().join(", ")
}

/// Factor of giga, 10^9.
const G: f64 = 1e9;

/// Places of the ranks; independent of rates.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Places by rank.
    pub seats: Vec<Seat>,
    /// Number of NUMA nodes of all machines.
    pub nodes: usize,
    /// PCIe links: bytes per second each way.
    links: Vec<f64>,
    /// NVLink bytes per second between the GPUs of two ranks.
    nvlink: Vec<Vec<f64>>,
    /// Bytes of host memory of each rank's plan, by node.
    pub bytes: Vec<BTreeMap<usize, u64>>,
    /// Sentences on how ranks use the sockets without ranks.
    pub reasons: Vec<String>,
}

/// Hardware of the ranks of `config` on a box. `host` has the bytes of host memory of a rank.
///
/// # Errors
/// Returns an error if a rate is missing, and the errors of [`layout()`].
pub fn hardware(
    config: &Config,
    described: &BoxConfig,
    host: HostBytes,
) -> Result<Hardware, BoxError> {
    let measured = described.measured.as_ref().map(|measured| virtual_gpus(config, measured));
    check_rates(described)?;
    let Layout { seats, nodes, links, nvlink, .. } = layout(config, described, host)?;
    Ok(Hardware {
        gpu: gpu(config, described)?,
        links,
        nodes: vec![f64::from(described.host.node_gb_per_s) * G; nodes],
        core_memory: f64::from(described.host.core_gb_per_s) * G,
        nvlink,
        pcie_sums: f64::from(described.pcie_sums_gb_per_s()) * G,
        network: f64::from(described.network_gb_per_s) * G,
        seats,
        dp_size: config.parallel.data,
        // PyTorch uses one stream for each communicator.
        one_communication_stream: !described.gpu.as_of_2020,
        measured,
    })
}

/// Places of the ranks of `config` on the box `described`: by its topology, or dealt evenly without
/// a topology. `host` has the bytes of host memory of a rank.
///
/// # Errors
/// Returns an error if the number of ranks does not fit the number of machines.
pub fn layout(config: &Config, described: &BoxConfig, host: HostBytes) -> Result<Layout, BoxError> {
    let refuse = |why| BoxError::Machines { name: described.name.clone(), why };
    let per_machine = described.ranks_per_machine(&config.parallel).map_err(refuse)?;
    let mut one = match &described.machine {
        Some(machine) => placed(config, described, machine, per_machine, host)?,
        None => layout_without_topology(described, per_machine, &request(config, host)),
    };
    repeat(&mut one, config.world_size().div_ceil(per_machine));
    Ok(one)
}

/// Checks that `b` has all rates that a simulation needs. A measured box has them.
///
/// # Errors
/// Returns all missing rates.
pub fn check_rates(b: &BoxConfig) -> Result<(), BoxError> {
    match missing_rates(b) {
        none if none.is_empty() => Ok(()),
        keys => Err(BoxError::Unknown { name: b.name.clone(), keys }),
    }
}

/// A line for each key, with its meaning and its source.
fn explained(keys: &[&str]) -> String {
    keys.iter().map(|key| format!("\n  {key}: {}", meaning_and_source(key))).collect()
}

/// GPU of a box with the kernels of attention that `config` chooses.
///
/// # Errors
/// Returns an error if a run on this GPU would refuse the library of attention.
fn gpu(config: &Config, b: &BoxConfig) -> Result<Gpu, BoxError> {
    let attention = match config.attention {
        Attention::Own => AttentionKernels::Own,
        Attention::Cudnn if CUDNN_ATTENTION_ON.contains(&b.gpu.sm) || b.measured.is_some() => {
            AttentionKernels::Cudnn
        }
        Attention::Cudnn => return Err(BoxError::Attention { name: b.name.clone(), sm: b.gpu.sm }),
    };
    let expert_load = match config.device {
        DeviceConfig::Sim { expert_load, .. } => expert_load,
        DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => LoadDistribution::Even,
    };
    let tera = |rate: f32| f64::from(rate) * f64::from(b.gpu.clock_share) * 1e12;
    Ok(Gpu {
        flops_16: tera(b.gpu.gemm_tflops),
        flops_32: tera(b.gpu.fp32_tflops),
        memory: f64::from(b.gpu.memory_gb_per_s) * G,
        processors: b.gpu.processors,
        sm: b.gpu.sm,
        attention,
        expert_load,
        as_of_2020: b.gpu.as_of_2020.then(|| Era2020::without(&b.gpu.as_of_2020_without)),
    })
}

/// Places of the ranks by the crate `topology`.
fn placed(
    config: &Config,
    b: &BoxConfig,
    machine: &Machine,
    ranks: usize,
    host: HostBytes,
) -> Result<Layout, BoxError> {
    let refuse = |source| BoxError::Topology { name: b.name.clone(), source };
    let tp = config.parallel.tensor.min(ranks);
    let request = Request { tp, dp: ranks / tp, ..request(config, host) };
    let Placement { ranks: places, sockets: reasons, .. } =
        topology::place(machine, &request).map_err(refuse)?;
    let mut links: Vec<(usize, f64)> = Vec::new();
    let node = |id: u32| {
        let found = machine.numa_nodes.iter().position(|node| node.id == id);
        found.unwrap_or_else(|| {
            unreachable!("a rank is placed on node {id}, which {} lacks", b.name)
        })
    };
    let gpu_of = |place: &RankPlace| {
        let found = machine.gpus.iter().position(|gpu| Some(gpu.pci) == place.gpu);
        found.unwrap_or_else(|| unreachable!("a rank is placed on a GPU that {} lacks", b.name))
    };
    let seat = |place: &RankPlace| {
        let link = |hop: topology::Hop| {
            let known = links.iter().position(|(below, _)| *below == hop.below);
            known.unwrap_or_else(|| {
                links.push((hop.below, hop.gb_per_s * G));
                links.len() - 1
            })
        };
        let far: Vec<(usize, u64)> =
            place.far_staging.iter().map(|(id, bytes)| (node(*id), *bytes)).collect();
        Seat {
            machine: 0,
            links: machine.hops(gpu_of(place)).into_iter().map(link).collect(),
            staging: shares(node(place.numa_node), &far, host.staging),
            states: place.state_nodes.iter().map(|id| node(*id)).collect(),
            cores: place.worker_cpus.len().max(1) as f64,
        }
    };
    let seats = places.iter().map(seat).collect();
    let to =
        |a: &RankPlace, b: &RankPlace| machine.nvlink_mb_per_s(gpu_of(a), gpu_of(b)) as f64 * 1e6;
    let nvlink = places.iter().map(|a| places.iter().map(|b| to(a, b)).collect()).collect();
    let by_node = |place: &RankPlace| {
        let bytes = place.bytes_by_node(machine, host);
        bytes.into_iter().map(|(id, bytes)| (node(id), bytes)).collect()
    };
    Ok(Layout {
        bytes: places.iter().map(by_node).collect(),
        reasons,
        seats,
        nodes: machine.numa_nodes.len(),
        links: links.into_iter().map(|(_, rate)| rate).collect(),
        nvlink,
    })
}

/// Nodes of `staging` bytes with their fractions: the parts in `far`, and the rest on `home`.
fn shares(home: usize, far: &[(usize, u64)], staging: u64) -> Vec<(usize, f64)> {
    let share = |(node, bytes): &(usize, u64)| (*node, *bytes as f64 / staging as f64);
    let far: Vec<(usize, f64)> = far.iter().map(share).collect();
    let near = 1.0 - far.iter().map(|(_, share)| share).sum::<f64>();
    std::iter::once((home, near)).chain(far).collect()
}

/// Places on a box without a topology: one link for each GPU, and cores and nodes dealt evenly. A
/// node without a rank counts as a socket without ranks.
fn layout_without_topology(b: &BoxConfig, ranks: usize, request: &Request) -> Layout {
    let node = |rank: usize| rank * b.numa_nodes / ranks.max(1);
    let (staging, states) = (request.staging_bytes, request.state_bytes);
    let short = staging.saturating_add(states) > b.node_memory;
    let all = match request.sockets {
        Sockets::All => true,
        Sockets::Auto => short && ranks < b.numa_nodes,
        Sockets::Near => false,
    };
    let nodes = |rank: usize| {
        let near = node(rank);
        if all { (near..node(rank + 1).max(near + 1)).collect() } else { vec![near] }
    };
    let needs = |rank: usize| {
        let (home, nodes) = (node(rank), nodes(rank));
        let mut bytes = BTreeMap::from([(home, staging)]);
        for (node, part) in in_parts(states, &nodes) {
            *bytes.entry(node).or_default() += part;
        }
        Needs { home, others: nodes.into_iter().filter(|node| *node != home).collect(), bytes }
    };
    let mut needs: Vec<Needs<usize>> = (0..ranks).map(needs).collect();
    let far = far_staging(staging, &needs, |_| b.node_memory);
    let mut moved: BTreeMap<usize, u64> = BTreeMap::new();
    for (Needs { home, bytes, .. }, far) in needs.iter_mut().zip(&far) {
        for (node, part) in far {
            *bytes.entry(*home).or_default() -= part;
            *bytes.entry(*node).or_default() += part;
            *moved.entry(*home).or_default() += part;
        }
    }
    let mut reasons = match request.sockets {
        Sockets::Auto if all => vec![format!(
            "a rank needs {} of host memory, a node has {}: it uses the cores and the memory of all sockets; what far cores \
             work on is staged near the GPU and crosses the link between the sockets",
            format_bytes(staging + states),
            format_bytes(b.node_memory)
        )],
        _ => Vec::new(),
    };
    reasons.extend(moved.into_iter().map(|(node, bytes)| far_words(node as u32, bytes)));
    // If there are fewer ranks than nodes, a rank has the cores of a whole node.
    let seat = |rank: usize| Seat {
        machine: 0,
        links: vec![rank],
        staging: shares(node(rank), &far[rank], staging),
        states: nodes(rank),
        cores: b.host.cores as f64 * nodes(rank).len() as f64 / ranks.max(b.numa_nodes) as f64,
    };
    let peer = f64::from(b.nvlink_gb_per_s()) * G;
    let between = |a: usize, other: usize| if a == other { 0.0 } else { peer };
    Layout {
        bytes: needs.into_iter().map(|needs| needs.bytes).collect(),
        reasons,
        seats: (0..ranks).map(seat).collect(),
        nodes: b.numa_nodes,
        links: vec![f64::from(b.host.link_gb_per_s) * G; ranks],
        nvlink: (0..ranks).map(|a| (0..ranks).map(|other| between(a, other)).collect()).collect(),
    }
}

/// Repeats the first machine until there are `machines` machines.
fn repeat(h: &mut Layout, machines: usize) {
    let (links, nodes, ranks) = (h.links.len(), h.nodes, h.seats.len());
    let alike = |machine: usize, seat: &Seat| Seat {
        machine,
        links: seat.links.iter().map(|link| link + machine * links).collect(),
        staging: seat
            .staging
            .iter()
            .map(|(node, share)| (node + machine * nodes, *share))
            .collect(),
        states: seat.states.iter().map(|node| node + machine * nodes).collect(),
        cores: seat.cores,
    };
    let beyond = |machine: usize, of: &BTreeMap<usize, u64>| {
        of.iter().map(|(node, bytes)| (node + machine * nodes, *bytes)).collect()
    };
    let all = 0..ranks * machines;
    h.seats = all.clone().map(|rank| alike(rank / ranks, &h.seats[rank % ranks])).collect();
    h.bytes = all.clone().map(|rank| beyond(rank / ranks, &h.bytes[rank % ranks])).collect();
    h.links = h.links.repeat(machines);
    h.nodes = nodes * machines;
    let of_one = std::mem::take(&mut h.nvlink);
    let inside = |a: usize, b: usize| {
        if a / ranks == b / ranks { of_one[a % ranks][b % ranks] } else { 0.0 }
    };
    h.nvlink = all.clone().map(|a| all.clone().map(|b| inside(a, b)).collect()).collect();
}

fn virtual_gpus(config: &Config, m: &MeasuredConfig) -> MeasuredMachine {
    let ranks = config.world_size();
    let pair = |[a, b]: [f32; 2]| [f64::from(a) * G, f64::from(b) * G];
    let rates = |[flops, bytes]: [f32; 2]| Rates {
        flops: f64::from(flops) * G,
        bytes: f64::from(bytes) * G,
    };
    // An op measured in one width only has the same speed in the other width.
    let known = m.ops_gb_per_s.iter().filter_map(|&(name, [a, b])| {
        let either = |x: f32, y: f32| if x > 0.0 { x } else { y };
        (a > 0.0 || b > 0.0).then(|| (name.to_owned(), pair([either(a, b), either(b, a)])))
    });
    // Speculative updates have the speed of other updates.
    let updates = |(name, rates): (String, [f64; 2])| {
        let also = ["ahead_tile", "settle_tile"].map(|also| (also.to_owned(), rates));
        let is_update = name == "adam_tile";
        std::iter::once((name, rates)).chain(also.into_iter().filter(move |_| is_update))
    };
    let known = known.flat_map(updates);
    MeasuredMachine {
        cores: m.cores as f64,
        threads: 1.0
            + (kernel_threads(m.cores, ranks, None) - 1) as f64 * f64::from(m.thread_share),
        gemm: m.gemm.map(rates),
        attention: m.attention.map(rates),
        ops: known.collect(),
        other: f64::from(m.other_gb_per_s) * G,
        overhead: f64::from(m.op_us) * 1e-6,
        threads_start: f64::from(m.thread_us) * 1e-6,
        meeting: f64::from(m.meeting_us) * 1e-6,
    }
}

#[cfg(test)]
mod tests;
