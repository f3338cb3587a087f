//! A rank's device and its kernel threads.

use crate::config::DeviceConfig;
use crate::dry_run::distinct;
use crate::layout::build::{KernelScratch, op_scratch};
use crate::layout::here;
use crate::layout::placement::kernel_threads;
use crate::run::{Place, Ranks, RunOptions};
use device::HostWork;
use device::cpu::{self, CpuOptions};
use device::cuda::{self, CudaOptions};
use device::{Crew, Device, Error, Rank};
use std::sync::Arc;
use topology::RankPlace;
use topology::cores;

impl Ranks<'_> {
    pub(crate) fn open(&self, rank: Rank, place: Option<&RankPlace>) -> Result<Device, Error> {
        if self.config.device == DeviceConfig::Cuda {
            return self.open_cuda(rank, place);
        }
        let host = place.map_or_else(Default::default, device::HostPlace::from);
        let cpus = place.map(|place| place.cpus.clone());
        let KernelScratch { floats, threads } = self.built.scratch;
        let memory_limit = match &self.config.device {
            DeviceConfig::Cpu { memory, .. } => *memory,
            DeviceConfig::Cuda | DeviceConfig::Sim { .. } => u64::MAX,
        };
        let options = CpuOptions {
            lanes: self.options.lanes,
            memory_limit,
            host,
            scratch: floats,
            work: self.work(kernel_crew(threads, cpus)),
        };
        cpu::open(rank, &self.built.plan, &self.world, &options)
    }

    fn open_cuda(&self, rank: Rank, place: Option<&RankPlace>) -> Result<Device, Error> {
        let cpus = place.map(|place| place.worker_cpus.clone());
        let threads = cpus
            .as_ref()
            .map_or_else(|| kernel_threads(cores(), here::ranks(self.config), None), Vec::len);
        let number = here::number(self.config, rank.index());
        let options = CudaOptions {
            gpu: number.and_then(|number| self.places.gpus.get(number)).copied(),
            host: place.map_or_else(Default::default, device::HostPlace::from),
            peers: Arc::clone(&self.peers),
            collectives: self.options.collectives,
            scratch: op_scratch(self.config),
            work: HostWork {
                cpus: cpus.clone().unwrap_or_default(),
                ..self.work(kernel_crew(threads, cpus))
            },
            programs: offload::PROGRAMS,
            warm_up: Arc::new(distinct(self.config, self.built, rank)?),
        };
        cuda::open(rank, &self.built.plan, &self.world, &options)
    }

    /// Binds the calling thread, which drives a real GPU: `alone`, while it queues steps, to a CPU of its own beside those on
    /// which the host updates; else to all of its rank's.
    pub(crate) fn drives(&self, place: Option<&RankPlace>, alone: bool) {
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

    /// A rank's thread comes by, for tests.
    pub(crate) fn passes(&self, rank: Rank, place: Place, step: u64) {
        if let Some(watcher) = &self.options.watcher {
            watcher.passes(rank.index(), place, step);
        }
    }

    fn work(&self, crew: Option<Arc<Crew>>) -> HostWork {
        let RunOptions { trace, slow, panic_at, stall_at, .. } = self.options;
        HostWork {
            crew,
            cpus: Vec::new(),
            jobs: self.host_jobs,
            rehearsal: false,
            trace: trace.clone(),
            slow: *slow,
            panic_at: *panic_at,
            stall_at: *stall_at,
        }
    }
}

/// Kernel threads of a rank, on its cores; none when its own thread is enough.
pub(crate) fn kernel_crew(threads: usize, cpus: Option<Vec<u32>>) -> Option<Arc<Crew>> {
    if threads < 2 {
        return None;
    }
    let bind = move || {
        if let Some(cpus) = &cpus {
            // The rank's thread has reported what does not work.
            let _ = topology::bind_current_thread(cpus);
        }
    };
    let crew = Crew::new(threads, bind);
    Some(Arc::new(crew.inspect_err(|e| tracing::warn!("no kernel threads: {e}")).ok()?))
}
