//! A rank's device and its kernel threads.

use crate::build::{KernelScratch, kernel_scratch};
use crate::config::DeviceConfig;
use crate::places::cores;
use crate::run::{Ranks, RunOptions};
use device::cpu::{self, CpuOptions, HostWork, Lanes};
use device::cuda::{self, CudaOptions};
use device::{Device, Error, Rank};
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
            scratch_floats: floats,
            work: self.work(kernel_pool(threads, cpus, self.options.lanes == Lanes::Inline)),
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
            work: self.work(kernel_pool(threads, cpus, false)),
        };
        cuda::open(rank, &self.built.plan, &self.world, &options)
    }

    fn work(&self, pool: Option<Arc<rayon::ThreadPool>>) -> HostWork {
        let RunOptions { trace, slow, panic_at, stall_at, .. } = self.options;
        HostWork {
            pool,
            trace: trace.clone(),
            slow: *slow,
            panic_at: *panic_at,
            stall_at: *stall_at,
        }
    }
}

/// Kernel threads of a rank, on its cores; none when its own thread is enough. With `own` the calling thread is
/// one of them: work that comes to a pool from outside goes through a queue that allocates.
pub(crate) fn kernel_pool(
    threads: usize,
    cpus: Option<Vec<u32>>,
    own: bool,
) -> Option<Arc<rayon::ThreadPool>> {
    if threads < 2 {
        return None;
    }
    let bind = move |_| {
        if let Some(cpus) = &cpus {
            // The rank's thread has reported what does not work.
            let _ = topology::bind_current_thread(cpus);
        }
    };
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads).start_handler(bind);
    let pool = if own { builder.use_current_thread() } else { builder }.build();
    let pool = pool.inspect_err(|e| tracing::warn!("no kernel threads: {e}")).ok()?;
    // A thread's first look for work to steal registers it, which allocates: now, not in some step.
    pool.broadcast(|_| {
        let _ = rayon::yield_now();
    });
    Some(Arc::new(pool))
}
