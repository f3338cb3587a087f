//! A rank's device and its kernel threads.

use crate::dry_run::distinct;
use crate::run::{FaultPoint, Ranks, RunOptions};
use config::DeviceConfig;
use device::cpu::{self, CpuOptions};
use device::cuda::{self, CudaOptions};
use device::{Device, Error, HostWork, Rank, ThreadTeam};
use layout::attention::attention_library;
use layout::build::{KernelScratch, op_scratch};
use layout::placement::kernel_threads;
use std::sync::Arc;
use topology::RankPlace;

impl Ranks<'_> {
    pub(crate) fn open(&self, rank: Rank, place: Option<&RankPlace>) -> Result<Device, Error> {
        if self.config.device == DeviceConfig::Cuda {
            return self.open_cuda(rank, place);
        }
        let host = place.map_or_else(Default::default, device::HostPlace::from);
        let cpus = place.map(|place| place.cpus.clone());
        let KernelScratch { floats, threads } = self.layout.scratch;
        let memory_limit = match &self.config.device {
            DeviceConfig::Cpu { memory, .. } => *memory,
            DeviceConfig::Cuda | DeviceConfig::Sim { .. } => u64::MAX,
        };
        let options = CpuOptions {
            lanes: self.options.lanes,
            memory_limit,
            host,
            scratch: floats,
            work: self.work(kernel_team(threads, cpus)),
        };
        cpu::open(rank, &self.layout.plan, &self.world, &options)
    }

    fn open_cuda(&self, rank: Rank, place: Option<&RankPlace>) -> Result<Device, Error> {
        let cpus = place.map(|place| place.worker_cpus.clone());
        let machine = &self.layout.machine;
        let threads = cpus.as_ref().map_or_else(
            || kernel_threads(machine.cores(), machine.ranks(self.config), None),
            Vec::len,
        );
        let number = machine.number(self.config, rank.index());
        let options = CudaOptions {
            gpu: number.and_then(|number| self.places.gpus.get(number)).copied(),
            host: place.map_or_else(Default::default, device::HostPlace::from),
            peers: Arc::clone(&self.peers),
            collectives: self.options.collectives,
            attention: attention_library(self.config),
            matmuls: self.matmuls.clone(),
            scratch: op_scratch(self.config),
            work: HostWork {
                cpus: cpus.clone().unwrap_or_default(),
                ..self.work(kernel_team(threads, cpus))
            },
            programs: offload::PROGRAMS,
            warm_up: Arc::new(distinct(self.config, self.layout, rank)?),
        };
        cuda::open(rank, &self.layout.plan, &self.world, &options)
    }

    /// Binds the calling thread, which queues the work of a real GPU. While it queues steps
    /// (`alone`), it runs on a CPU that the update does not use; otherwise on all CPUs of its rank.
    pub(crate) fn bind_driver(&self, place: Option<&RankPlace>, alone: bool) {
        let on_gpu = self.config.device == DeviceConfig::Cuda;
        let Some(place) = place.filter(|_| on_gpu) else { return };
        let cpus = match place.driver_cpu.as_ref().filter(|_| alone) {
            Some(cpu) => std::slice::from_ref(cpu),
            None => &place.cpus,
        };
        if let Err(error) = topology::bind_current_thread(cpus) {
            tracing::warn!("the thread that drives rank {} is not bound: {error}", place.rank);
        }
    }

    /// Calls the watcher, if the run has one: the thread of a rank reaches `point`.
    pub(crate) fn reach(&self, rank: Rank, point: FaultPoint, step: u64) {
        if let Some(watcher) = &self.options.watcher {
            watcher.reach(rank.index(), point, step);
        }
    }

    fn work(&self, team: Option<Arc<ThreadTeam>>) -> HostWork {
        let RunOptions { trace, slow, panic_at, stall_at, .. } = self.options;
        HostWork {
            team,
            cpus: Vec::new(),
            jobs: self.host_queue_capacity,
            rehearsal: false,
            trace: trace.clone(),
            slow: *slow,
            panic_at: *panic_at,
            stall_at: *stall_at,
        }
    }
}

/// Starts the kernel threads of a rank on its cores. `None` if the rank's own thread is enough, or
/// if the threads cannot start.
pub fn kernel_team(threads: usize, cpus: Option<Vec<u32>>) -> Option<Arc<ThreadTeam>> {
    if threads < 2 {
        return None;
    }
    let bind = move || {
        if let Some(cpus) = &cpus {
            // The rank's own thread has warned if binding fails.
            let _ = topology::bind_current_thread(cpus);
        }
    };
    let team = ThreadTeam::new(threads, bind);
    Some(Arc::new(team.inspect_err(|e| tracing::warn!("no kernel threads: {e}")).ok()?))
}
