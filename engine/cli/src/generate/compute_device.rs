//! The device that generates: the cores of this machine as one virtual GPU, or one of its GPUs.

use super::GenerateError;
use crate::single_rank::{ALONE, inline, on_gpu};
use config::{Config, ParallelConfig};
use device::cuda::{self, CudaOptions, Peers, WIDEST_HEAD};
use device::{Arena, Communicator, Device, Dtype, HostPlace, HostWork, Plan, cpu};
use engine::run::devices::kernel_team;
use layout::LocalMachine;
use layout::build::scratch_floats;
use layout::gpu_memory::MemoryBudget;
use std::sync::Arc;
use std::time::Duration;
use tensor_parallel::DecoderShape;
use topology::{available_memory, format_bytes};

/// First compute capability with bf16 matmuls.
const BF16_SINCE: u32 = 80;

/// Device on which a model computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ComputeDevice {
    /// All cores of this machine.
    Cores,
    /// One GPU of this machine.
    Gpu,
}

fn world() -> Arc<Communicator> {
    Communicator::new(1, 1, Duration::from_secs(60))
}

/// Opens a device with the memory of `plan`. The refusal names the bytes that are needed and those
/// that are free.
pub(super) fn open_on_cores(
    plan: Plan,
    shape: &DecoderShape,
    machine: &LocalMachine,
) -> Result<Device, GenerateError> {
    let (team, scratch) = (kernel_team(machine.cores(), None), scratch_floats(shape));
    let threads = team.as_ref().map_or(1, |team| team.threads());
    let (needed, free) = (plan.bytes(Arena::Device) + scratch.bytes(threads), available_memory());
    if needed > free {
        return Err(GenerateError::Memory { needed, free });
    }
    let options = inline(HostPlace::default(), scratch, team);
    Ok(cpu::open(ALONE, &Arc::new(plan), &world(), &options)?)
}

/// Opens a GPU with the memory of `plan`, or refuses with the reason.
pub(super) fn open_on_gpu(
    config: &Config,
    plan: Plan,
    shape: &DecoderShape,
    machine: &LocalMachine,
) -> Result<Device, GenerateError> {
    let dtype = shape.dtype;
    if let Some(missing) = machine.missing_gpus() {
        return Err(GenerateError::NoGpu(missing));
    }
    if shape.head_dim > WIDEST_HEAD {
        return Err(GenerateError::WideHeads(shape.head_dim));
    }
    let gpu = machine.rank_gpus((1, 1)).first().copied();
    let gpu = gpu.and_then(|gpu| machine.cuda().gpus.get(gpu));
    let Some(gpu) = gpu else { return Err(GenerateError::NoGpu("none is taken".into())) };
    if dtype == Dtype::Bf16 && gpu.sm > 0 && gpu.sm < BF16_SINCE {
        return Err(GenerateError::NoBf16 { gpu: gpu.ordinal, name: gpu.name.clone(), sm: gpu.sm });
    }
    let parallel = ParallelConfig { tensor: 1, data: 1, ..config.parallel.clone() };
    let alone = Config { parallel, ..config.clone() };
    let needed = cuda::device_bytes(&plan, 0);
    match machine.memory_budget(&alone, &plan) {
        Ok(budget) if needed > budget.limit => {
            let problem = refusal(&plan, dtype, gpu.ordinal, needed, &budget);
            return Err(GenerateError::GpuMemory(problem));
        }
        Ok(_) => {}
        // If memory is missing, opening the device reports the numbers.
        Err(why) => tracing::warn!("the GPU's free memory is not known: {why}"),
    }
    tracing::info!("on GPU {}, {}: {}", gpu.ordinal, gpu.name, format_bytes(needed));
    // A forward pass needs no scratch.
    let options = CudaOptions {
        work: HostWork { team: kernel_team(machine.cores(), None), ..HostWork::default() },
        programs: offload::PROGRAMS,
        ..on_gpu(Some(gpu.ordinal), HostPlace::default(), &Arc::new(Peers::new(1)))
    };
    Ok(cuda::open(ALONE, &Arc::new(plan), &world(), &options)?)
}

/// The message of a GPU without enough memory: bytes of each part of the plan, the free bytes, and
/// remedies.
fn refusal(plan: &Plan, dtype: Dtype, gpu: usize, needed: u64, budget: &MemoryBudget) -> String {
    let mut pools = plan.pools(Arena::Device);
    pools.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let products = needed - pools.iter().map(|(_, bytes)| bytes).sum::<u64>();
    pools.push(("workspace of products", products));
    let line =
        |(name, bytes): &(&'static str, u64)| format!("\n  {:>12}  {name}", format_bytes(*bytes));
    let overhead: u64 = budget.overheads.iter().map(|(_, bytes)| bytes).sum();
    let halves = match dtype {
        Dtype::F32 => "weights of 16 bits (--set precision=Bf16), ",
        _ => "",
    };
    format!(
        "out of GPU memory: {} are wanted, and GPU {gpu} has {} free beside {} of code and streams: give fewer --tokens or \
         prompts, a smaller --context, {halves}or take the cores (--set device=Cpu); by part:{}",
        format_bytes(needed),
        format_bytes(budget.limit),
        format_bytes(overhead),
        pools.iter().map(line).collect::<String>()
    )
}
