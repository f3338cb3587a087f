//! What a rank may hold on a real GPU.

use crate::gpus::machine;
use crate::local_ranks;
use crate::placement::{self, this_machine};
use config::Config;
use device::Plan;
use device::cuda::{connected, look, page_tables};
use std::sync::{Mutex, PoisonError};
use topology::Request;

/// What a communicator of NCCL takes at most, where no run has measured it yet; on a small GPU a 16th of its memory.
const COMMUNICATOR: u64 = 1 << 30;

/// What allocations lose by being rounded, and what kernels take at their first launch, for each rank.
const ROUNDING: u64 = 16 << 20;

/// By rank, the driver's number of the GPU that it takes.
pub fn rank_gpus((tp, dp): (usize, usize)) -> Vec<usize> {
    type GpusByGrid = Vec<((usize, usize), Vec<usize>)>;
    static KNOWN: Mutex<GpusByGrid> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, gpus)) = known.iter().find(|(grid, _)| *grid == (tp, dp)) {
        return gpus.clone();
    }
    let all: Vec<_> = machine().gpus.iter().map(|gpu| gpu.pci).collect();
    let request = Request { tp, dp, ..Request::default() };
    let placed =
        this_machine().and_then(|machine| placement::place_on(machine, &request, &all).ok());
    let gpus = placed.map_or_else(|| placement::round_robin(all.len(), tp * dp), |(_, gpus)| gpus);
    known.push(((tp, dp), gpus.clone()));
    gpus
}

/// Bytes of a GPU: what a rank's plan may take, and what is kept back from it.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    /// For the plan.
    pub limit: u64,
    /// What lies beside it, with how that is known.
    pub overheads: Vec<(&'static str, u64)>,
}

/// The least room that any rank of `config` has with `plan`, on the GPUs that its placement takes.
///
/// # Errors
/// Why that is not known: there are no GPUs, or one cannot be looked at.
pub fn memory_budget(config: &Config, plan: &Plan) -> Result<MemoryBudget, String> {
    if let Some(missing) = machine().missing() {
        return Err(missing);
    }
    let gpus = rank_gpus(local_ranks::grid(config));
    let mut distinct = gpus.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let one = |gpu: usize| {
        let ranks = gpus.iter().filter(|other| **other == gpu).count() as u64;
        of_gpu((gpu, ranks), config, plan)
    };
    let rooms = distinct.into_iter().map(one).collect::<Result<Vec<_>, _>>()?;
    rooms.into_iter().min_by_key(|room| room.limit).ok_or_else(|| "no GPU is taken".into())
}

fn of_gpu(
    (gpu, ranks): (usize, u64),
    config: &Config,
    plan: &Plan,
) -> Result<MemoryBudget, String> {
    let found = look(gpu, offload::PROGRAMS)
        .map_err(|why| format!("GPU {gpu} cannot be looked at: {why}"))?;
    let mut beside = vec![
        ("cuBLASLt's products", found.overhead.products.div_ceil(ranks)),
        ("onebox's kernels", found.overhead.kernels),
        ("streams and events", found.overhead.streams),
        ("page tables of pinned memory", page_tables(plan)),
        ("rounding", ROUNDING.min(found.free / ranks / 8)),
    ];
    beside.extend(nccl((gpu, found.total), config));
    let sum: u64 = beside.iter().map(|(_, bytes)| bytes).sum();
    Ok(MemoryBudget { limit: (found.free / ranks).saturating_sub(sum), overheads: beside })
}

/// NCCL's part, where a run would use it.
fn nccl((gpu, memory): (usize, u64), config: &Config) -> Option<(&'static str, u64)> {
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    if tp * dp == 1 || local_ranks::ranks(config) > machine().gpus.len() || !machine().has_nccl() {
        return None;
    }
    let communicators = u64::from(tp > 1) + u64::from(dp > 1);
    Some(match connected(gpu, (tp, dp)) {
        Some(bytes) => ("NCCL, the most that a run has measured", bytes),
        None => (
            "NCCL, at most: no run has measured it yet",
            communicators * COMMUNICATOR.min(memory / 16),
        ),
    })
}
