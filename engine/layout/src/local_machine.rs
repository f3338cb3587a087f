//! Machine on which the program runs: its hardware, and its share of the ranks of a run.

use device::Processes;
use device::cuda::{Probe, probe};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use topology::Machine;

/// This machine. A program creates one value and passes it on; clones share its data. Each part is
/// examined at its first use, which can last seconds, and not again. Use every part before threads
/// are bound, because a bound thread sees fewer cores.
#[derive(Clone, Debug, Default)]
pub struct LocalMachine(pub(crate) Arc<Parts>);

#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) processes: LocalProcesses,
    pub(crate) cuda: OnceLock<Probe>,
    pub(crate) topology: OnceLock<Option<Machine>>,
    pub(crate) cores: OnceLock<usize>,
    /// GPU of each rank on this machine, by the TP and DP degree of these ranks.
    pub(crate) rank_gpus: Mutex<BTreeMap<(usize, usize), Vec<usize>>>,
}

/// Processes of a run, and the processes on this machine.
#[derive(Debug)]
pub(crate) struct LocalProcesses {
    pub(crate) count: usize,
    /// Numbers of the processes on this machine, in ascending order.
    pub(crate) on_node: Vec<usize>,
}

impl Default for LocalProcesses {
    /// One process that has all ranks.
    fn default() -> Self {
        Self { count: 1, on_node: vec![0] }
    }
}

impl LocalMachine {
    /// Machine of a process to which a launcher has given a part of the run's ranks.
    pub fn of_processes(processes: &Processes) -> Self {
        let processes =
            LocalProcesses { count: processes.count(), on_node: processes.on_this_node() };
        Self(Arc::new(Parts { processes, ..Parts::default() }))
    }

    /// Driver, GPUs and libraries that CUDA finds.
    pub fn cuda(&self) -> &Probe {
        self.0.cuda.get_or_init(probe)
    }

    /// Reason why `device: Cuda` cannot be used here; `None` if it can.
    pub fn missing_gpus(&self) -> Option<String> {
        self.cuda().missing()
    }

    /// NUMA nodes, cores, GPUs and their links; `None` if they cannot be examined.
    pub fn topology(&self) -> Option<&Machine> {
        self.0.topology.get_or_init(|| Machine::discover().ok()).as_ref()
    }

    /// Number of hardware threads that the process may use.
    pub fn cores(&self) -> usize {
        *self.0.cores.get_or_init(topology::cores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::cuda::GpuInfo;
    use std::path::Path;

    /// A DGX-1 on which CUDA shows only the GPUs on these buses.
    fn dgx1(buses: &[u8]) -> LocalMachine {
        let boxes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/boxes/topologies");
        let machine = Machine::from_xml_file(&boxes.join("dgx1v.xml")).unwrap();
        let gpu = |(ordinal, bus): (usize, &u8)| GpuInfo {
            ordinal,
            pci: format!("0000:{bus:02x}:00.0").parse().ok(),
            name: "Tesla V100".into(),
            sm: 70,
            memory: 16 << 30,
            processors: 80,
        };
        let gpus = buses.iter().enumerate().map(gpu).collect();
        let driver = Ok("12.4".into());
        let cuda =
            Probe { driver, driver_file: None, gpus, libraries: Vec::new(), architectures: None };
        let (cuda, topology) = (OnceLock::from(cuda), OnceLock::from(Some(machine)));
        LocalMachine(Arc::new(Parts { cuda, topology, ..Parts::default() }))
    }

    #[test]
    fn each_machine_of_a_process_places_ranks_on_gpus_of_its_own() {
        let (many, few) = (dgx1(&[0x85, 0x06, 0x07]), dgx1(&[0x06]));
        assert_eq!(many.rank_gpus((1, 2)), [1, 0]);
        assert_eq!(few.rank_gpus((1, 2)), [0, 0]);
        assert_eq!(many.clone().rank_gpus((1, 2)), [1, 0]);
    }

    #[test]
    fn a_machine_alone_has_all_ranks() {
        let alone = LocalMachine::default();
        let ron = r#"(model: (layers: 1, hidden: 32, heads: 4, seq_len: 16), device: Cpu(count: 6),
            parallel: (tensor: 2, data: 3), batch: (micro: 1), data: (train: "unused"), train: (steps: 1))"#;
        let config = config::load_str(ron, "a.ron", Path::new("."), &[]).unwrap().config;
        assert!(!alone.is_spread());
        assert_eq!((alone.processes(), alone.ranks(&config)), (1, 6));
        assert_eq!(alone.grid(&config), (2, 3));
        assert_eq!(
            (0..6).map(|rank| alone.number(&config, rank)).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4, 5].map(Some)
        );
        assert_eq!(alone.remote_members(&config, 1, 2), 0);
    }
}
