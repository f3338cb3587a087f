//! What real GPUs this machine has, asked once, and what a rank may hold on one.

use device::cuda::{Probe, free_memory, probe};
use std::sync::OnceLock;

/// What the driver takes when kernels are loaded, and for streams, events and handles.
const BESIDE_THE_PLAN: u64 = 64 << 20;

/// Asked at the first call, which comes before a run starts threads.
pub(crate) fn machine() -> &'static Probe {
    static ASKED: OnceLock<Probe> = OnceLock::new();
    ASKED.get_or_init(probe)
}

/// The newest compute capability of its GPUs, which needs the largest workspace; 0 without any.
pub(crate) fn sm() -> u32 {
    machine().gpus.iter().map(|gpu| gpu.sm).max().unwrap_or(0)
}

/// Bytes of a GPU: what a rank's plan may take, and what is kept back from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// For the plan.
    pub(crate) limit: u64,
    /// For what lies beside it, NCCL's buffers included.
    pub(crate) reserved: u64,
}

/// The least room that any of `world_size` ranks has, dealt to the GPUs in turn; `None` where there are none. With
/// fewer ranks than GPUs it is that of the fullest GPU: which ones are taken is decided when the run starts.
pub(crate) fn room(world_size: usize) -> Option<Room> {
    static FREE: OnceLock<Vec<u64>> = OnceLock::new();
    let machine = machine();
    if machine.missing().is_some() {
        return None;
    }
    let free = FREE.get_or_init(|| {
        let free = |gpu: &device::cuda::GpuInfo| free_memory(gpu.ordinal).unwrap_or(gpu.memory);
        machine.gpus.iter().map(free).collect()
    });
    let count = free.len();
    let by_nccl = world_size > 1 && world_size <= count && machine.has_nccl();
    let one = |(i, free): (usize, &u64)| {
        // Ranks i, i + count, ... share this GPU.
        let ranks = (world_size.saturating_sub(i)).div_ceil(count) as u64;
        let nccl = if by_nccl { (machine.gpus[i].memory / 32).min(1 << 30) } else { 0 };
        let reserved = nccl + BESIDE_THE_PLAN.min(free / 8);
        Room { limit: (free / ranks.max(1)).saturating_sub(reserved), reserved }
    };
    free.iter().enumerate().map(one).min_by_key(|room| room.limit)
}
