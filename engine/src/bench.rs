//! What this machine reaches: copies between host and GPU, plain products, training steps. Each figure has a ceiling
//! beside it, measured here or that of the link.

mod adam;
mod box_text;
mod compute;
mod copies;
pub mod gpu_box;
mod memory;

pub use adam::{Case, Row, adam, cases, state_name};
pub(crate) use box_text::OUTPUT as BOX_OF_GPUS;
pub use compute::{Collective, Product, collectives, products};
pub use copies::{Copies, InParts, TILE_BYTES, copies};
pub use memory::{NodeMemory, memory};

use crate::config::{Config, DeviceConfig};
use crate::data::Dataset;
use crate::layout::build::Built;
use crate::layout::{gpu, placement};
use crate::run::{Message, RunError, RunOptions, StepReport, train};
use device::cpu::{self, CpuOptions, Lanes};
use device::cuda::{self, Collectives, CudaOptions, Peers};
use device::{Arena, Crew, Device, Dtype, Error, Lane, Op, Plan, Rank};
use device::{HostWork, World};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use topology::Machine;

/// Training steps.
#[derive(Clone, Debug, Serialize)]
pub struct Steps {
    /// Measured, after the first.
    pub steps: usize,
    /// The median step.
    pub seconds: f64,
    /// The fastest.
    pub least_seconds: f64,
    /// Of the median step.
    pub tokens_per_second: f64,
    /// Of the model, without recomputation, in the median step; 10^12 a second and GPU.
    pub tflops_per_gpu: f64,
    /// That a large product of the same type reaches here.
    pub ceiling_tflops: f64,
    /// Work of the Host lane in a step.
    pub host_seconds: f64,
    /// Of it, while Compute stood still; `None` where lanes run one after another.
    pub exposed_seconds: Option<f64>,
    /// Of the last step.
    pub loss: f64,
}

/// Ten times as long as anything here takes.
const PATIENCE: Duration = Duration::from_secs(600);
const REPEATS: usize = 5;

/// The only rank's GPU by the driver's number, its host memory, and GB/s of the way between both: as in a run.
#[derive(Default)]
struct Place {
    gpu: Option<usize>,
    host: device::HostPlace,
    link: Option<f64>,
}

/// Nothing where the box cannot be looked at.
fn place() -> Place {
    let Ok(machine) = Machine::discover() else { return Place::default() };
    let lone = topology::Request { tp: 1, dp: 1, ..topology::Request::default() };
    let gpus: Vec<_> = gpu::machine().gpus.iter().map(|gpu| gpu.pci).collect();
    let Ok((placement, numbers)) = placement::on(&machine, &lone, &gpus) else {
        return Place::default();
    };
    let Some(rank) = placement.ranks.first() else { return Place::default() };
    let at = rank.gpu.and_then(|pci| machine.gpus.iter().position(|gpu| gpu.pci == pci));
    let link = at.and_then(|gpu| machine.host_gb_per_s_alone(gpu));
    Place { gpu: numbers.first().copied(), host: rank.into(), link }
}

/// The only rank.
fn open(plan: Plan, on_cuda: bool, place: &Place) -> Result<Device, Error> {
    let (world, plan) = (World::new(1, 1, PATIENCE), Arc::new(plan));
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    if on_cuda {
        let collectives = Collectives::Auto;
        let (gpu, host) = (place.gpu, place.host.clone());
        let (work, warm_up) = (HostWork::default(), Arc::default());
        let peers = Arc::new(Peers::new(1));
        let options =
            CudaOptions { gpu, host, peers, collectives, scratch: 0, work, programs: &[], warm_up };
        return cuda::open(rank, &plan, &world, &options);
    }
    let options = CpuOptions {
        lanes: Lanes::Threads { chaos_us: 0 },
        memory_limit: u64::MAX,
        host: device::HostPlace::default(),
        scratch: cpu::ScratchFloats::new(1, 1, PRODUCT_ON_CPU, 0),
        work: HostWork::default(),
    };
    cpu::open(rank, &plan, &world, &options)
}

/// A virtual GPU whose kernels `crew` computes; its host memory on a node by its cores, where they are given.
fn on_host(
    plan: Plan,
    crew: Option<Arc<Crew>>,
    small_pages: bool,
    node: &[(u32, Vec<u32>)],
) -> Result<Device, Error> {
    let (world, rank) = (World::new(1, 1, PATIENCE), Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 });
    let nodes = node.iter().map(|(id, _)| *id).collect();
    let host = device::HostPlace {
        nodes,
        cpus: node.first().map(|(_, cpus)| cpus.clone()).unwrap_or_default(),
        small_pages,
        ..device::HostPlace::default()
    };
    let options = CpuOptions {
        lanes: Lanes::Inline,
        memory_limit: u64::MAX,
        host,
        scratch: cpu::ScratchFloats::default(),
        work: HostWork { crew, ..HostWork::default() },
    };
    cpu::open(rank, &Arc::new(plan), &world, &options)
}

/// Seconds of the fastest of some repetitions, after one that is not counted.
fn fastest(mut work: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    work()?;
    let mut least = f64::INFINITY;
    for _ in 0..REPEATS {
        let started = Instant::now();
        work()?;
        least = least.min(started.elapsed().as_secs_f64());
    }
    Ok(least)
}

fn memcpy(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    let seconds = fastest(|| {
        to.copy_from_slice(std::hint::black_box(&from));
        Ok(())
    });
    std::hint::black_box(&to);
    bytes as f64 / seconds.unwrap_or(f64::INFINITY) / 1e9
}

const PRODUCT_ON_CPU: usize = 512;
const PRODUCT_ON_CUDA: usize = 4096;

/// 10^12 operations a second of square products.
///
/// # Errors
/// There is no GPU, or no memory.
pub fn product(on_cuda: bool, dtype: Dtype) -> Result<f64, Error> {
    // A GPU of less memory than any is none.
    let large = on_cuda && cuda::free_memory(0).is_ok_and(|bytes| bytes > 1 << 30);
    let (n, count) = if large { (PRODUCT_ON_CUDA, 10) } else { (PRODUCT_ON_CPU, 1) };
    product_of_shape(on_cuda, dtype, ((n, n, n), count), &Place::default())
}

/// 10^12 operations a second of `count` products (m, k) by (k, n) behind each other.
fn product_of_shape(
    on_cuda: bool,
    dtype: Dtype,
    ((m, k, n), count): ((usize, usize, usize), usize),
    place: &Place,
) -> Result<f64, Error> {
    let mut plan = Plan::default();
    let [a, b, c] = [("a", (m, k)), ("b", (k, n)), ("c", (m, n))].map(|(name, shape)| {
        plan.tensor((Arena::Device, "of the measurement"), name, dtype, shape)
    });
    let dev = open(plan, on_cuda, place)?;
    [a, b].iter().try_for_each(|t| dev.write(*t, &|i| 1.0 / (1 + i % 7) as f64))?;
    let seconds = fastest(|| {
        for _ in 0..count {
            dev.submit(Lane::Compute, Op::product(a, b, c));
        }
        dev.sync_all()
    })?;
    dev.finish()?;
    Ok(2.0 * (m * n * k) as f64 * count as f64 / seconds / 1e12)
}

/// `count` steps of `config`, after one that is not counted; nothing is written or evaluated. `trace`: of ops.
///
/// # Errors
/// As [`train`].
pub fn steps(
    config: &Config,
    built: &Built,
    data: &Arc<Dataset>,
    (count, model_flops, ceiling_tflops): (usize, f64, f64),
    trace: Option<Arc<device::Trace>>,
) -> Result<Steps, RunError> {
    let mut config = config.clone();
    // More than are measured: the last step of a run is followed by an evaluation.
    config.train.steps = count as u64 + 4;
    config.train.eval_every = 0;
    let options = RunOptions { bind: true, trace, ..RunOptions::default() };
    let mut all: Vec<StepReport> = Vec::new();
    train(&config, built, data, &options, &mut |message| {
        if let Message::Step(step) = message {
            all.push(step);
            if all.len() > count {
                options.stop.store(true, Ordering::Relaxed);
            }
        }
    })?;
    let measured = &all[1..all.len().min(count + 1)];
    let mut seconds: Vec<f64> = measured.iter().map(|step| step.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let (first, last) = (all[0], measured[measured.len() - 1]);
    let per_step = |now: f64, then: f64| (now - then) / measured.len() as f64;
    let host = per_step(last.activity.host_seconds, first.activity.host_seconds);
    let overlapped = last.activity.overlapped_seconds.zip(first.activity.overlapped_seconds);
    let ranks = (config.parallel.tensor * config.parallel.data) as f64;
    Ok(Steps {
        steps: measured.len(),
        seconds: median,
        least_seconds: seconds[0],
        tokens_per_second: (config.batch.global * config.model.seq_len) as f64 / median,
        tflops_per_gpu: model_flops / median / ranks / 1e12,
        ceiling_tflops,
        host_seconds: host,
        exposed_seconds: overlapped.map(|(now, then)| (host - per_step(now, then)).max(0.0)),
        loss: last.loss,
    })
}

/// A run on real GPUs.
pub fn is_on_cuda(config: &Config) -> bool {
    config.device == DeviceConfig::Cuda
}
