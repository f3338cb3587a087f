//! Placement of the ranks of a run on this machine.

use crate::LocalMachine;
use crate::hardware_queues::few_queues;
use config::{Config, DeviceConfig};
use topology::{HostBytes, Machine, PciAddress, Placement, RankPlace, Request, Seats, place};

/// Number of kernel threads of each of `ranks` ranks that share `cpus` CPUs, at least 1. If a rank
/// is placed on `placed` CPUs, it has at most as many threads.
pub fn kernel_threads(cpus: usize, ranks: usize, placed: Option<usize>) -> usize {
    (cpus / ranks).min(placed.unwrap_or(usize::MAX)).max(1)
}

/// Request to place all ranks of `config` on one machine. Each rank needs `host` bytes of host
/// memory.
pub fn request(config: &Config, host: HostBytes) -> Request {
    Request {
        tp: config.parallel.tensor,
        dp: config.parallel.data,
        seats: Seats::default(),
        staging_bytes: host.staging,
        state_bytes: host.states,
        sockets: config.offload.sockets,
    }
}

/// Places of all ranks.
#[derive(Debug, Default)]
pub struct Places {
    /// Place of each rank of the run; empty if threads and memory are not bound.
    pub ranks: Vec<RankPlace>,
    /// GPU of each rank on this machine, as the driver's number; empty without GPUs.
    pub gpus: Vec<usize>,
}

impl LocalMachine {
    /// Number of kernel threads of each virtual GPU of this machine. Each rank needs `host` bytes
    /// of host memory.
    pub(crate) fn virtual_threads(&self, config: &Config, host: HostBytes) -> usize {
        let wanted = Request { seats: Seats::Virtual, ..self.request(config, host) };
        let placed = self.topology().and_then(|machine| place(machine, &wanted).ok());
        let least = placed.and_then(|all| all.ranks.iter().map(|rank| rank.cpus.len()).min());
        kernel_threads(self.cores(), self.ranks(config), least.filter(|cpus| *cpus > 0))
    }

    /// Request to place the ranks of `config` that are on this machine. Each rank needs `host`
    /// bytes of host memory.
    pub fn request(&self, config: &Config, host: HostBytes) -> Request {
        let (tp, dp) = self.grid(config);
        Request { tp, dp, ..request(config, host) }
    }

    /// Places the ranks, and logs the reasons. Each rank needs `host` bytes of host memory. Without
    /// `bind`, this function only chooses GPUs.
    pub fn places(&self, config: &Config, host: HostBytes, bind: bool) -> Places {
        let (gpus, world_size) = (self.gpus(config), self.ranks(config));
        if let Some(few) = few_queues().filter(|_| !gpus.is_empty()) {
            tracing::warn!("{few}");
        }
        let mut places = Places { ranks: Vec::new(), gpus: round_robin(gpus.len(), world_size) };
        if !bind {
            return places;
        }
        let Some(machine) = self.topology() else {
            tracing::warn!("threads are not bound: this machine cannot be looked at");
            return places;
        };
        match place_on(machine, &self.request(config, host), &gpus) {
            Err(error) => tracing::warn!("threads are not bound: {error}"),
            Ok((placement, gpus)) => {
                let cpus = machine.allowed_cpus.len();
                places.gpus = gpus;
                placement.reasons.iter().for_each(|reason| tracing::info!("{reason}"));
                // If there are more ranks than CPUs, the scheduler should move the ranks.
                if cpus < world_size {
                    tracing::info!("more ranks than CPUs: threads and memory are not bound");
                    return places;
                }
                for place in &placement.ranks {
                    tracing::info!("{place}");
                    place.reasons.iter().for_each(|reason| tracing::info!("  {reason}"));
                }
                // Index: rank of the run. No thread of this process reads the places of other
                // ranks.
                let place = |rank| placement.ranks[self.number(config, rank).unwrap_or(0)].clone();
                places.ranks = (0..config.world_size()).map(place).collect();
            }
        }
        places
    }

    /// PCI addresses of the GPUs, by CUDA's numbers; empty if the run uses no real GPUs.
    pub fn gpus(&self, config: &Config) -> Vec<Option<PciAddress>> {
        match config.device {
            DeviceConfig::Cuda => self.cuda().gpus.iter().map(|gpu| gpu.pci).collect(),
            DeviceConfig::Cpu { .. } | DeviceConfig::Sim { .. } => Vec::new(),
        }
    }
}

/// Places the ranks of `request` on `machine`. Returns the placement and the number of each rank's
/// GPU among `gpus`. If the machine does not show a GPU, ranks use the GPUs in turn and are placed
/// like ranks of virtual GPUs.
pub fn place_on(
    machine: &Machine,
    request: &Request,
    gpus: &[Option<PciAddress>],
) -> Result<(Placement, Vec<usize>), topology::Error> {
    let ranks = request.tp * request.dp;
    let shown = |pci: &PciAddress| machine.gpus.iter().any(|gpu| gpu.pci == *pci);
    let known: Option<Vec<PciAddress>> = gpus.iter().map(|pci| pci.filter(shown)).collect();
    let seats = match known {
        Some(known) if known.is_empty() => Seats::Virtual,
        Some(known) if known.len() < ranks => Seats::Shared(known),
        Some(known) => Seats::These(known),
        None => {
            tracing::info!("the box does not show CUDA's GPUs: ranks are placed as without them");
            Seats::Virtual
        }
    };
    let placement = place(machine, &Request { seats, ..request.clone() })?;
    let number = |rank: &RankPlace| gpus.iter().position(|pci| *pci == rank.gpu);
    let numbers: Option<Vec<usize>> =
        placement.ranks.iter().map(|rank| rank.gpu.and_then(|_| number(rank))).collect();
    Ok((placement, numbers.unwrap_or_else(|| round_robin(gpus.len(), ranks))))
}

/// GPU of each rank: rank i has GPU i mod `gpus`.
pub fn round_robin(gpus: usize, world_size: usize) -> Vec<usize> {
    if gpus == 0 { Vec::new() } else { (0..world_size).map(|rank| rank % gpus).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use topology::cores;

    fn dgx1() -> Machine {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        Machine::from_xml_file(&folder.join("../../configs/boxes/topologies/dgx1v.xml")).unwrap()
    }

    fn at(buses: &[u8]) -> Vec<Option<PciAddress>> {
        let address = |bus: &u8| format!("0000:{bus:02x}:00.0").parse().ok();
        buses.iter().map(address).collect()
    }

    fn ranks(tp: usize, dp: usize) -> Request {
        Request { tp, dp, ..Request::default() }
    }

    #[test]
    fn every_rank_has_its_part_of_all_cpus_whoever_asks() {
        let of = |ranks| kernel_threads(64, ranks, None);
        assert_eq!([1, 3, 4, 8, 64, 100].map(of), [64, 21, 16, 8, 1, 1]);
        // Two sockets of 32 CPUs with a rank only on the first socket; then ranks that share CPUs.
        assert_eq!([kernel_threads(64, 1, Some(32)), kernel_threads(2, 2, Some(2))], [32, 1]);
        let all = cores();
        let first = topology::current_binding().unwrap()[0];
        let bound = move || topology::bind_current_thread(&[first]).map(|()| cores());
        assert_eq!(std::thread::spawn(bound).join().unwrap().unwrap(), all);
    }

    fn nodes(placement: &Placement) -> Vec<u32> {
        placement.ranks.iter().map(|rank| rank.numa_node).collect()
    }

    #[test]
    fn ranks_get_the_gpus_that_are_joined_best_by_cudas_numbers() {
        // Two NVLinks join the GPUs of a pair, and each pair has its own uplink. CUDA counts
        // backwards here.
        let gpus = at(&[0x8a, 0x89, 0x86, 0x85, 0x0b, 0x0a, 0x07, 0x06]);
        let (placement, numbers) = place_on(&dgx1(), &ranks(2, 4), &gpus).unwrap();
        assert_eq!(numbers, [7, 4, 6, 5, 3, 0, 2, 1]);
        assert_eq!(nodes(&placement), [0, 0, 0, 0, 1, 1, 1, 1]);
    }

    #[test]
    fn ranks_that_share_gpus_are_placed_next_to_them() {
        let (placement, numbers) = place_on(&dgx1(), &ranks(1, 4), &at(&[0x85, 0x06])).unwrap();
        assert_eq!(numbers, [0, 1, 0, 1]);
        assert_eq!(nodes(&placement), [1, 0, 1, 0]);
    }

    #[test]
    fn gpus_that_the_box_does_not_show_are_dealt_in_turn() {
        let (placement, numbers) = place_on(&dgx1(), &ranks(1, 4), &at(&[0x10, 0x11])).unwrap();
        assert_eq!(numbers, [0, 1, 0, 1]);
        assert_eq!(nodes(&placement), [0, 0, 1, 1]);
        assert!(placement.ranks.iter().all(|rank| rank.gpu.is_none()));
        assert_eq!(place_on(&dgx1(), &ranks(1, 4), &[]).unwrap().1, [0; 0]);
    }
}
