//! Benchmarks of this machine: host-GPU copies, matmuls, the update on the host, and training
//! steps. Each result has a ceiling that is measured here or known from the link.

mod adam;
mod block;
mod box_text;
mod compute;
mod concurrent;
mod copies;
pub mod gpu_box;
mod node_memory;
mod residual;
mod triad;

pub use adam::{Case, Row, adam, cases};
pub use block::BlockShape;
pub(crate) use box_text::OUTPUT as BOX_OF_GPUS;
pub use compute::{Collective, MatmulShape, Product, collectives, products};
pub use concurrent::{CollectiveRate, ConcurrentUpdate};
pub use copies::{Copies, TILE_BYTES, TileCopies, copies};
use node_memory::Node;
pub use node_memory::{NodeMemory, memory};
pub(crate) use residual::{SmallModels, residuals, with_residual};

use crate::single_rank::{ALONE, inline, on_gpu};
use config::{Config, DeviceConfig};
use data::Dataset;
use device::cpu::{self, CpuOptions, Lanes};
use device::cuda::{self, Peers};
use device::{
    Arena, Communicator, Device, Dtype, Error, HostPlace, Lane, Op, Plan, Rank, ThreadTeam, random,
};
use engine::metrics;
use engine::run::{Message, RunError, RunOptions, StepReport, train};
use layout::LocalMachine;
use layout::build::RankLayout;
use layout::placement::place_on;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Times of training steps.
#[derive(Clone, Debug, Serialize)]
pub struct StepTimes {
    /// Number of measured steps, without the first step of the run.
    pub steps: usize,
    /// Seconds of the median step.
    pub seconds: f64,
    /// Seconds of the fastest step.
    pub least_seconds: f64,
    /// Tokens per second in the median step.
    pub tokens_per_second: f64,
    /// Model FLOPs per second and GPU in the median step, without recomputation, in 10^12.
    pub tflops_per_gpu: f64,
    /// Speed of a large matmul of the same type on this machine, in 10^12 FLOPs per second.
    pub ceiling_tflops: f64,
    /// Seconds of work of the Host lane in a step.
    pub host_seconds: f64,
    /// Seconds of `host_seconds` while Compute was idle; `None` if lanes run one after another.
    pub exposed_seconds: Option<f64>,
    /// Loss of the last step.
    pub loss: f64,
}

/// Deadline of a collective: ten times the duration of any measurement.
const PATIENCE: Duration = Duration::from_secs(600);
const REPEATS: usize = 5;

/// Placement of the single rank, chosen as in a run: the driver's number of its GPU, its host
/// memory, and the GB/s of the link between both.
#[derive(Default)]
struct BenchPlace {
    gpu: Option<usize>,
    host: HostPlace,
    link: Option<f64>,
}

/// Placement of the single rank; the default if the machine cannot be examined.
fn place(local: &LocalMachine) -> BenchPlace {
    let place = || {
        let machine = local.topology()?;
        let lone = topology::Request { tp: 1, dp: 1, ..topology::Request::default() };
        let gpus: Vec<_> = local.cuda().gpus.iter().map(|gpu| gpu.pci).collect();
        let (placement, numbers) = place_on(machine, &lone, &gpus).ok()?;
        let rank = placement.ranks.first()?;
        let at = rank.gpu.and_then(|pci| machine.gpus.iter().position(|gpu| gpu.pci == pci));
        let link = at.and_then(|gpu| machine.host_gb_per_s_alone(gpu));
        Some(BenchPlace { gpu: numbers.first().copied(), host: rank.into(), link })
    };
    place().unwrap_or_default()
}

/// Opens a device for the single rank.
fn open(plan: Plan, on_cuda: bool, place: &BenchPlace) -> Result<Device, Error> {
    let (world, plan) = (Communicator::new(1, 1, PATIENCE), Arc::new(plan));
    if on_cuda {
        let options = on_gpu(place.gpu, place.host.clone(), &Arc::new(Peers::new(1)));
        return cuda::open(ALONE, &plan, &world, &options);
    }
    let scratch = cpu::ScratchFloats::new(1, 1, PRODUCT_ON_CPU, 0);
    let lanes = Lanes::Threads { chaos_us: 0 };
    let options = CpuOptions { lanes, ..inline(HostPlace::default(), scratch, None) };
    cpu::open(ALONE, &plan, &world, &options)
}

/// Opens a virtual GPU whose kernels run on `team`, with its host memory on `node`.
fn open_on_host(
    plan: Plan,
    team: Option<Arc<ThreadTeam>>,
    small_pages: bool,
    node: &Node,
) -> Result<Device, Error> {
    let (nodes, cpus) = (node.id.into_iter().collect(), node.cpus.clone());
    let host = HostPlace { nodes, cpus, small_pages, ..HostPlace::default() };
    let world = Communicator::new(1, 1, PATIENCE);
    cpu::open(ALONE, &Arc::new(plan), &world, &inline(host, cpu::ScratchFloats::default(), team))
}

/// Runs `work` and returns its duration in seconds.
fn timed(work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed().as_secs_f64())
}

/// Seconds of each of `count` rounds, after one round that is not timed.
fn rounds(count: usize, mut work: impl FnMut() -> Result<(), Error>) -> Result<Vec<f64>, Error> {
    work()?;
    (0..count).map(|_| timed(&mut work)).collect()
}

/// Seconds of the fastest of [`REPEATS`] rounds.
fn fastest(work: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    Ok(rounds(REPEATS, work)?.into_iter().fold(f64::INFINITY, f64::min))
}

/// Runs `work` for all ranks at the same time, each in its own thread. Returns their results, or
/// the error of the lowest rank that fails.
fn all_at_once<T: Send>(
    world: &Communicator,
    ranks: usize,
    work: impl Fn(Rank) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let work = &work;
    std::thread::scope(|scope| {
        let spawn = |rank: Rank| {
            let started = std::thread::Builder::new().spawn_scoped(scope, move || work(rank));
            started.map_err(|error| world.not_started(rank, &error))
        };
        let threads: Vec<_> = Rank::all(1, ranks).map(spawn).collect();
        let join = |thread: Result<ScopedJoinHandle<'_, _>, Error>| {
            thread?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
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

/// Speed of square matmuls, in 10^12 operations per second.
///
/// # Errors
/// There is no GPU or not enough memory.
pub fn product(on_cuda: bool, dtype: Dtype) -> Result<f64, Error> {
    // The stand-in driver reports less memory than any real GPU has.
    let large = on_cuda && cuda::free_memory(0).is_ok_and(|bytes| bytes > 1 << 30);
    let (n, count) = if large { (PRODUCT_ON_CUDA, 10) } else { (PRODUCT_ON_CPU, 1) };
    let shape = MatmulShape { m: n, k: n, n };
    product_of_shape(on_cuda, dtype, shape, count)
}

/// Time of the matmuls that precede a measurement of several: at its limit of power, a GPU lowers its clock. An H200 reached
/// 809 TFLOPS in the first milliseconds and 700 under lasting load.
const UNDER_LOAD: Duration = Duration::from_secs(1);

/// Speed of `count` successive matmuls of `shape`, in 10^12 operations per second. If `count` is
/// more than 1, other matmuls run for [`UNDER_LOAD`] before the measured ones.
fn product_of_shape(
    on_cuda: bool,
    dtype: Dtype,
    shape: MatmulShape,
    count: usize,
) -> Result<f64, Error> {
    let MatmulShape { m, k, n } = shape;
    let mut plan = Plan::default();
    let [a, b, c] = [("a", (m, k)), ("b", (k, n)), ("c", (m, n))].map(|(name, shape)| {
        plan.tensor((Arena::Device, "of the measurement"), name, dtype, shape)
    });
    let dev = open(plan, on_cuda, &BenchPlace::default())?;
    // Repeated numbers would take less power, and the clock would be higher.
    let values: Vec<f64> =
        (0..1 << 16).map(|i| random::below(7, i, 255) as f64 / 128.0 - 0.99).collect();
    [a, b].iter().try_for_each(|t| dev.write(*t, &|i| values[i % values.len()]))?;
    let round = || {
        for _ in 0..count {
            dev.submit(Lane::Compute, Op::product(a, b, c));
        }
        dev.sync_all()
    };
    let started = Instant::now();
    while count > 1 && started.elapsed() < UNDER_LOAD {
        round()?;
    }
    let seconds = fastest(round)?;
    dev.finish()?;
    Ok(2.0 * (m * n * k) as f64 * count as f64 / seconds / 1e12)
}

/// Measures `count` steps of `config`, without files and evaluations. `model_flops`: FLOPs of a
/// step without recomputation. `ceiling_tflops`: speed of a large matmul. `trace` records op spans.
///
/// # Errors
/// Same as [`train`].
pub fn steps(
    config: &Config,
    layout: &RankLayout,
    data: &Arc<Dataset>,
    count: usize,
    model_flops: f64,
    ceiling_tflops: f64,
    trace: Option<Arc<device::Trace>>,
) -> Result<StepTimes, RunError> {
    let mut config = config.clone();
    // The run gets more steps than are measured, since an evaluation follows its last step.
    config.train.steps = count as u64 + 4;
    config.train.eval_every = 0;
    let options = RunOptions { bind: true, trace, ..RunOptions::default() };
    let mut all: Vec<StepReport> = Vec::new();
    train(&config, layout, data, &options, &mut |message| {
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
    Ok(StepTimes {
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

/// Median of the values; `NaN` if there are none.
fn median(of: &[f64]) -> f64 {
    metrics::median(of.iter().copied()).unwrap_or(f64::NAN)
}

/// Whether `config` runs on real GPUs.
pub fn is_on_cuda(config: &Config) -> bool {
    config.device == DeviceConfig::Cuda
}
