//! A rank's device and its kernel threads.

use crate::build::{KernelScratch, kernel_scratch};
use crate::config::DeviceConfig;
use crate::places::cores;
use crate::run::{Ranks, RunOptions};
use device::cpu::{self, CpuOptions, HostWork};
use device::cuda::{self, CudaOptions};
use device::{Crew, Device, Error, Rank};
use std::sync::Arc;
use topology::RankPlace;

impl Ranks<'_> {
    pub(crate) fn open(&self, rank: Rank, place: Option<&RankPlace>) -> Result<Device, Error> {
        if self.config.device == DeviceConfig::Cuda {
            return self.open_cuda(rank, place);
        }
        let host = place.map_or_else(Default::default, cpu::HostPlace::from);
        let cpus = place.map(|place| place.cpus.clone());
        let KernelScratch { floats, threads } = kernel_scratch(self.config);
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
        let threads = cpus.as_ref().map_or(cores() / rank.world_size(), Vec::len);
        let options = CudaOptions {
            gpu: self.places.gpus.get(rank.index()).copied(),
            host: place.map_or_else(Default::default, cpu::HostPlace::from),
            collectives: self.options.collectives,
            scratch: self.scratch,
            work: self.work(kernel_crew(threads, cpus)),
        };
        cuda::open(rank, &self.built.plan, &self.world, &options)
    }

    fn work(&self, crew: Option<Arc<Crew>>) -> HostWork {
        let RunOptions { trace, slow, panic_at, stall_at, .. } = self.options;
        HostWork {
            crew,
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
