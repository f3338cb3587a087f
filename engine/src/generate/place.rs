//! The device on which a model generates: this machine's cores as one virtual GPU, or one of its GPUs.

use super::GenerateError;
use crate::config::{Config, ParallelConfig};
use crate::layout::build::scratch_floats;
use crate::layout::gpu::machine;
use crate::layout::gpu_room::{Room, room, taken};
use crate::run::open::kernel_crew;
use device::cpu::{self, CpuOptions, Lanes};
use device::cuda::{self, Collectives, CudaOptions, Peers, WIDEST_HEAD};
use device::{Arena, Device, Dtype, HostPlace, HostWork, Plan, Rank, World};
use std::sync::Arc;
use std::time::Duration;
use tensor_parallel::GptShape;
use topology::cores;
use topology::{available_memory, format_bytes};

/// The only rank.
const ALONE: Rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
/// The first compute capability with bf16 products.
const BF16_SINCE: u32 = 80;

/// Where a model computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum On {
    /// All cores of this machine.
    Cores,
    /// One GPU of this machine.
    Gpu,
}

/// Memory for `plan`, or a refusal with the bytes that are wanted and free.
pub(super) fn open(
    config: &Config,
    plan: Plan,
    shape: &GptShape,
    on: On,
) -> Result<Device, GenerateError> {
    match on {
        On::Cores => on_cores(plan, shape),
        On::Gpu => on_gpu(config, plan, shape),
    }
}

fn world() -> Arc<World> {
    World::new(1, 1, Duration::from_secs(60))
}

fn on_cores(plan: Plan, shape: &GptShape) -> Result<Device, GenerateError> {
    let (crew, scratch) = (kernel_crew(cores(), None), scratch_floats(shape));
    let threads = crew.as_ref().map_or(1, |crew| crew.threads());
    let (needed, free) = (plan.bytes(Arena::Device) + scratch.bytes(threads), available_memory());
    if needed > free {
        return Err(GenerateError::Memory { needed, free });
    }
    let options = CpuOptions {
        lanes: Lanes::Inline,
        memory_limit: u64::MAX,
        host: HostPlace::default(),
        scratch,
        work: HostWork { crew, ..HostWork::default() },
    };
    Ok(cpu::open(ALONE, &Arc::new(plan), &world(), &options)?)
}

fn on_gpu(config: &Config, plan: Plan, shape: &GptShape) -> Result<Device, GenerateError> {
    let dtype = shape.dtype;
    if let Some(missing) = machine().missing() {
        return Err(GenerateError::NoGpu(missing));
    }
    if shape.head_dim > WIDEST_HEAD {
        return Err(GenerateError::WideHeads(shape.head_dim));
    }
    let gpu = taken((1, 1)).first().copied();
    let gpu = gpu.and_then(|gpu| machine().gpus.get(gpu));
    let Some(gpu) = gpu else { return Err(GenerateError::NoGpu("none is taken".into())) };
    if dtype == Dtype::Bf16 && gpu.sm > 0 && gpu.sm < BF16_SINCE {
        return Err(GenerateError::NoBf16 { gpu: gpu.ordinal, name: gpu.name.clone(), sm: gpu.sm });
    }
    let parallel = ParallelConfig { tensor: 1, data: 1, ..config.parallel.clone() };
    let alone = Config { parallel, ..config.clone() };
    let needed = cuda::device_bytes(&plan, 0);
    match room(&alone, &plan) {
        Ok(Room { limit, beside }) if needed > limit => {
            let problem = refusal(&plan, dtype, (gpu.ordinal, needed), (limit, &beside));
            return Err(GenerateError::GpuMemory(problem));
        }
        Ok(_) => {}
        // Opening it says in figures what is missing.
        Err(why) => tracing::warn!("the GPU's free memory is not known: {why}"),
    }
    tracing::info!("on GPU {}, {}: {}", gpu.ordinal, gpu.name, format_bytes(needed));
    let options = CudaOptions {
        gpu: Some(gpu.ordinal),
        host: HostPlace::default(),
        peers: Arc::new(Peers::new(1)),
        collectives: Collectives::Auto,
        // A forward pass needs none.
        scratch: 0,
        work: HostWork { crew: kernel_crew(cores(), None), ..HostWork::default() },
        programs: offload::PROGRAMS,
        warm_up: Arc::default(),
    };
    Ok(cuda::open(ALONE, &Arc::new(plan), &world(), &options)?)
}

/// What a plan takes of a GPU, part by part, what the GPU has, and what helps.
fn refusal(
    plan: &Plan,
    dtype: Dtype,
    (gpu, needed): (usize, u64),
    (limit, beside): (u64, &[(&'static str, u64)]),
) -> String {
    let mut pools = plan.pools(Arena::Device);
    pools.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let behind = needed - pools.iter().map(|(_, bytes)| bytes).sum::<u64>();
    pools.push(("workspace of products", behind));
    let line =
        |(name, bytes): &(&'static str, u64)| format!("\n  {:>12}  {name}", format_bytes(*bytes));
    let beside: u64 = beside.iter().map(|(_, bytes)| bytes).sum();
    let halves = match dtype {
        Dtype::F32 => "weights of 16 bits (--set precision=Bf16), ",
        _ => "",
    };
    format!(
        "out of GPU memory: {} are wanted, and GPU {gpu} has {} free beside {} of code and streams: give fewer --tokens or \
         prompts, {halves}or take the cores (--set device=Cpu); by part:{}",
        format_bytes(needed),
        format_bytes(limit),
        format_bytes(beside),
        pools.iter().map(line).collect::<String>()
    )
}
