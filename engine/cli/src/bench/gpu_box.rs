//! Measures the GPUs and the host of this machine for a box file: matmuls, GPU memory, copies,
//! collectives, host memory, and the update on the host.

use super::block::{BlockShape, BlockTimes};
use super::concurrent::{
    CollectiveRate, ConcurrentUpdate, collective_rates, together, update_beside_copies, update_rate,
};
use super::node_memory::one_core;
use super::{
    Copies, NodeMemory, PATIENCE, REPEATS, Row, TILE_BYTES, all_at_once, copies, fastest, open,
    place,
};
use crate::single_rank::on_gpu;
use config::{BoxConfig, GpuConfig, load_box};
use device::cuda::{self, GpuInfo, Peers};
use device::{Arena, Communicator, Dtype, Error, Group, HostPlace, Lane, Op, Plan, Reduction};
use layout::LocalMachine;
use predict::product_rate::{OperandWidth, product_rate};
use predict::sim::MEMORY_SHARE;
use predict::simulate::SimulateError;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use topology::{Machine, available_memory, format_bytes};

/// Beginning of the names of the stand-in driver's GPUs.
const STAND_IN: &str = "Fake GPU";

/// The sizes of the measurements.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Block whose matmuls are measured.
    block: BlockShape,
    /// Time of the load, for 16-bit and for fp32 matmuls.
    loads: [Duration; 2],
    /// Bytes of each copy, each all-reduce, and each array on a GPU or a node.
    bytes: u64,
    /// Parameters that the host updates.
    params: usize,
}

/// Sizes for the stand-in driver, which computes on the cores.
const SMALL: Sizes = Sizes {
    block: BlockShape { tokens: 128, hidden: 128, qkv: 192, ffn: 256 },
    loads: [Duration::ZERO; 2],
    bytes: 1 << 20,
    params: 1 << 18,
};
const LARGE: Sizes = Sizes {
    // A block of Llama 3 8B, with 8192 tokens.
    block: BlockShape { tokens: 8192, hidden: 4096, qkv: 6144, ffn: 14_336 },
    // The fp32 units stay below the limit of power.
    loads: [Duration::from_secs(10), Duration::from_secs(2)],
    bytes: 512 << 20,
    params: 1 << 26,
};

/// Bytes of GPU memory that [`LARGE`] needs, with the overhead of CUDA.
const NEEDED: u64 = 4 << 30;

/// Measured matmuls of a block with their gradients, under lasting load.
#[derive(Clone, Copy, Debug)]
pub struct Products {
    /// Rate in 10^12 operations per second: operations of a round over its median time in the second half
    /// of the load.
    pub tflops: f64,
    /// Rate in 10^12 operations per second with which a simulation of the round has the measured time; `None`
    /// if it needs more time with every rate.
    pub simulated_tflops: Option<f64>,
    /// Sizes of the block.
    pub block: BlockShape,
    /// Seconds of the load.
    pub load: f64,
    /// Number of rounds in the median.
    pub rounds: usize,
    /// Type of operands and results.
    pub dtype: Dtype,
}

/// Rates of each GPU while all GPUs work at the same time, in 10^9 bytes per second.
#[derive(Clone, Copy, Debug)]
pub struct ConcurrentRates {
    /// Rate from host to GPU.
    pub up: f64,
    /// Rate from GPU to host.
    pub down: f64,
    /// Rate at which each GPU sends in sums over all GPUs. It receives at the same rate.
    pub sums: f64,
}

/// Measurements of a machine with GPUs of one kind. Byte rates are in 10^9 bytes per second.
#[derive(Clone, Debug)]
pub struct GpuBox {
    /// Description of the first GPU; all GPUs are of one kind.
    pub gpu: GpuInfo,
    /// Number of GPUs.
    pub gpus: usize,
    /// Bytes of the GPU with the least memory.
    pub gpu_memory: u64,
    /// Version of the driver.
    pub driver: String,
    /// Version of NCCL, or the reason of its absence.
    pub nccl: Result<String, String>,
    /// Free bytes of the NUMA node with the least free memory.
    pub node_memory: u64,
    /// Cores that this process may use.
    pub cores: usize,
    /// Rates of 16-bit matmuls and of fp32 matmuls.
    pub products: [Products; 2],
    /// Rate at which a kernel reads and writes GPU memory.
    pub streamed: f64,
    /// Copies of one GPU alone, with the memory rates of every NUMA node.
    pub copies: Copies,
    /// Rates of all GPUs at the same time, or the reason why they are not measured.
    pub together: Result<ConcurrentRates, String>,
    /// Collectives of several sizes on several GPUs, or the reason why they are not measured.
    pub collectives: Result<Vec<CollectiveRate>, String>,
    /// Memory rates of one core alone.
    pub core: NodeMemory,
    /// Update on all cores of the node with the slowest cores.
    pub adam: Row,
    /// The update on the host while one GPU copies both ways.
    pub beside: ConcurrentUpdate,
    /// Bytes of each array and copy.
    pub bytes: u64,
}

impl GpuBox {
    /// Whether the driver is a stand-in without GPUs.
    pub fn is_stand_in(&self) -> bool {
        self.gpu.name.starts_with(STAND_IN)
    }
}

/// Reason why no box was measured.
#[derive(Debug, thiserror::Error)]
pub enum GpuBoxError {
    /// There are no GPUs, or they cannot be used.
    #[error(
        "the GPUs of this machine cannot be used: {0}; see `onebox doctor`, or measure the cores: --cores"
    )]
    None(String),
    /// The GPUs are of several kinds.
    #[error(
        "a box has GPUs of one kind, and this machine has {0}: show those of one kind by CUDA_VISIBLE_DEVICES"
    )]
    Mixed(String),
    /// A GPU has too little free memory.
    #[error(
        "GPU {gpu} has {} free, and the measurement takes {}: end what runs there",
        format_bytes(*free), format_bytes(NEEDED)
    )]
    Full {
        /// Driver's number of the GPU.
        gpu: usize,
        /// Free bytes of the GPU.
        free: u64,
    },
    /// The measured matmuls cannot be simulated.
    #[error("the matmuls that were measured: {0}")]
    Simulated(Box<SimulateError>),
    /// A measurement failed.
    #[error("{what}: {error}")]
    Failed {
        /// Name of the measured rate.
        what: &'static str,
        /// Error that ended the measurement.
        error: Error,
    },
}

/// Measures everything in a few minutes. `tell` gets each measurement's name before it begins.
///
/// # Errors
/// There are no GPUs or GPUs of several kinds, a GPU fails, or there is not enough memory.
pub fn measure(machine: &LocalMachine, tell: &mut dyn FnMut(&str)) -> Result<GpuBox, GpuBoxError> {
    let probe = machine.cuda();
    if let Some(missing) = probe.missing() {
        return Err(GpuBoxError::None(missing));
    }
    let [gpu, others @ ..] = &probe.gpus[..] else {
        return Err(GpuBoxError::None("there are none".into()));
    };
    let kind = |gpu: &GpuInfo| (gpu.name.clone(), gpu.sm, gpu.processors);
    if let Some(other) = others.iter().find(|other| kind(other) != kind(gpu)) {
        return Err(GpuBoxError::Mixed(format!("{} and {}", gpu.name, other.name)));
    }
    let gpus = probe.gpus.len();
    let gpu_memory = probe.gpus.iter().map(|gpu| gpu.memory).min().unwrap_or(gpu.memory);
    let sizes = if gpu.name.starts_with(STAND_IN) { SMALL } else { LARGE };
    if let Some((gpu, free)) = full_gpu(&probe.gpus).filter(|_| sizes.bytes == LARGE.bytes) {
        return Err(GpuBoxError::Full { gpu, free });
    }
    let half = if gpu.sm >= 80 { Dtype::Bf16 } else { Dtype::F16 };
    let [load, wide_load] = sizes.loads;
    let block = |dtype, load| BlockTimes::measure(sizes.block, dtype, load, &place(machine));
    let halves = measure_one(tell, "16-bit products of a block", || block(half, load))?;
    let wide = measure_one(tell, "fp32 products of a block", || block(Dtype::F32, wide_load))?;
    let streamed = measure_one(tell, "the memory of a GPU", || memory_rate(machine, sizes.bytes))?;
    let copies = measure_one(tell, "copies, and the host's memory node by node", || {
        copies(machine, true, sizes.bytes, TILE_BYTES)
    })?;
    let core = measure_one(tell, "one core", || one_core(sizes.bytes))?;
    let adam = measure_one(tell, "the update on the host", || update_rate(sizes.params))?;
    let beside = measure_one(tell, "the update on the host beside copies", || {
        update_beside_copies(machine, sizes.params, sizes.bytes)
    })?;
    let together = if gpus > 1 {
        tell("copies and sums of all GPUs at once");
        concurrent_rates(gpus, sizes.bytes).map_err(|error| error.to_string())
    } else {
        Err("there is one GPU".into())
    };
    let collectives = match &together {
        Ok(_) => {
            tell("collectives of several sizes on several GPUs");
            collective_rates(gpus, sizes.bytes).map_err(|error| error.to_string())
        }
        Err(why) => Err(why.clone()),
    };
    let rates = KnownRates { gpu, streamed };
    let products = [
        rates.products(&halves, OperandWidth::Half, half, sizes)?,
        rates.products(&wide, OperandWidth::Full, Dtype::F32, sizes)?,
    ];
    let library = probe.libraries.iter().find(|library| library.name == "NCCL");
    Ok(GpuBox {
        gpu: gpu.clone(),
        gpus,
        gpu_memory,
        driver: probe.driver.clone().unwrap_or_else(|why| why),
        nccl: library.map_or_else(|| Err("nobody looked for it".into()), |l| l.version.clone()),
        node_memory: node_memory(),
        cores: machine.cores(),
        products,
        streamed,
        copies,
        together,
        collectives,
        core,
        adam,
        beside,
        bytes: sizes.bytes,
    })
}

/// Passes the name of a measurement to `tell` and runs the measurement.
fn measure_one<T>(
    tell: &mut dyn FnMut(&str),
    what: &'static str,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, GpuBoxError> {
    tell(what);
    work().map_err(|error| GpuBoxError::Failed { what, error })
}

/// Free bytes of the NUMA node with the least free memory.
fn node_memory() -> u64 {
    let Ok(machine) = Machine::discover() else { return available_memory() };
    let nodes = machine.numa_nodes.iter().filter(|node| !node.cpus.is_empty());
    let free = nodes.map(|node| node.free_bytes.unwrap_or(node.memory_bytes));
    free.min().map_or_else(available_memory, |bytes| bytes.min(available_memory()))
}

/// Facts of a GPU from which the rates of its matmuls are computed.
struct KnownRates<'a> {
    gpu: &'a GpuInfo,
    /// Rate at which a kernel reads and writes GPU memory, in 10^9 bytes per second.
    streamed: f64,
}

impl KnownRates<'_> {
    /// Rates of measured matmuls. The host of the simulated box does not matter for them.
    fn products(
        &self,
        times: &BlockTimes,
        width: OperandWidth,
        dtype: Dtype,
        sizes: Sizes,
    ) -> Result<Products, GpuBoxError> {
        let tflops = sizes.block.flops() / times.seconds / 1e12;
        let lone = load_box(Path::new("h100-128gib"));
        let lone = lone.unwrap_or_else(|e| unreachable!("a box of the program: {e}"));
        let gpu = GpuConfig {
            gemm_tflops: tflops as f32,
            fp32_tflops: tflops as f32,
            memory_gb_per_s: (self.streamed / MEMORY_SHARE) as f32,
            processors: self.gpu.processors as usize,
            sm: self.gpu.sm,
            ..lone.gpu.clone()
        };
        let described = BoxConfig { gpu, ..lone };
        let simulated_tflops =
            product_rate(&described, width, &times.plan, times.seconds, |dev| times.submit(dev));
        Ok(Products {
            tflops,
            simulated_tflops: simulated_tflops
                .map_err(|error| GpuBoxError::Simulated(Box::new(error)))?,
            block: sizes.block,
            load: sizes.loads[usize::from(width == OperandWidth::Full)].as_secs_f64(),
            rounds: times.rounds,
            dtype,
        })
    }
}

/// Rate of into += x on the GPU in 10^9 bytes per second: two reads and one write of `bytes`.
fn memory_rate(machine: &LocalMachine, bytes: u64) -> Result<f64, Error> {
    let mut plan = Plan::default();
    let n = (bytes / 4) as usize;
    let [x, into] = ["x", "into"]
        .map(|name| plan.tensor((Arena::Device, "of the measurement"), name, Dtype::F32, (1, n)));
    let dev = open(plan, true, &place(machine))?;
    dev.submit(Lane::Compute, Op::Zero { x });
    dev.submit(Lane::Compute, Op::Zero { x: into });
    let seconds = fastest(|| {
        dev.submit(Lane::Compute, Op::Add { x, into });
        dev.sync_all()
    })?;
    dev.finish()?;
    Ok(3.0 * bytes as f64 / seconds / 1e9)
}

/// Driver's number and free bytes of the GPU with the least free memory, if that is too little.
fn full_gpu(gpus: &[GpuInfo]) -> Option<(usize, u64)> {
    let free = gpus.iter().filter_map(|gpu| {
        // A GPU that cannot report its memory fails with a reason when it is opened.
        Some((gpu.ordinal, cuda::free_memory(gpu.ordinal).ok()?))
    });
    free.filter(|(_, free)| *free < NEEDED).min_by_key(|(_, free)| *free)
}

/// Measures copies up, copies down and sums of `bytes` on all GPUs at the same time.
fn concurrent_rates(gpus: usize, bytes: u64) -> Result<ConcurrentRates, Error> {
    let mut plan = Plan::default();
    let n = ((bytes / 4) as usize).next_multiple_of(gpus);
    let mut tensor = |arena, name: &str, len| {
        plan.tensor((arena, "of the measurement"), name, Dtype::F32, (1, len))
    };
    let above = tensor(Arena::Device, "above", n);
    let below = tensor(Arena::Pinned, "below", n);
    let summed = tensor(Arena::Device, "summed", n);
    let met = tensor(Arena::Device, "met", gpus);
    let (plan, world) = (Arc::new(plan), Communicator::new(1, gpus, PATIENCE));
    let peers = Arc::new(Peers::new(gpus));
    let times = all_at_once(&world, gpus, |rank| {
        let options = on_gpu(Some(rank.index()), HostPlace::default(), &peers);
        let dev = cuda::open(rank, &plan, &world, &options)?;
        dev.write(below, &|_| 1.0)?;
        [above, summed, met].iter().for_each(|x| dev.submit(Lane::Compute, Op::Zero { x: *x }));
        dev.sync_all()?;
        let sum = |x| Op::AllReduce { x, group: Group::Dp, reduce: Reduction::Sum };
        let run = |lane, op: Op| together(&dev, &sum(met), lane, &op);
        let times = [
            run(Lane::H2d, Op::Copy { src: below, dst: above })?,
            run(Lane::D2h, Op::Copy { src: above, dst: below })?,
            run(Lane::DpComm, sum(summed))?,
        ];
        dev.finish()?;
        Ok(times)
    })?;
    let bytes = 4.0 * n as f64;
    // A round lasts as long as its slowest GPU; the fastest round after the first counts.
    let of = |phase: usize| {
        let round = |i: usize| times.iter().map(|of| of[phase][i]).fold(0.0, f64::max);
        bytes / (1..=REPEATS).map(round).fold(f64::INFINITY, f64::min) / 1e9
    };
    let sent = 2.0 * (gpus - 1) as f64 / gpus as f64;
    Ok(ConcurrentRates { up: of(0), down: of(1), sums: sent * of(2) })
}
