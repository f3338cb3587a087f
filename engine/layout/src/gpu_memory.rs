//! Memory budget of a rank on a real GPU.

use crate::LocalMachine;
use crate::placement::{place_on, round_robin};
use config::Config;
use device::cuda::{
    ACTIVATION_STREAMS, LEAVE_ROOM_SINCE, STREAMS_PER_RANK, connected, look, page_tables,
};
use device::{Cargo, Plan};
use std::collections::BTreeSet;
use std::sync::PoisonError;
use topology::Request;

/// Most bytes that an NCCL communicator uses, if no run has measured it. On a small GPU the bound
/// is a 16th of the GPU's memory.
const COMMUNICATOR: u64 = 1 << 30;

/// Bytes for each rank that allocations lose by rounding, and that code takes at its first use:
/// cuBLASLt makes code for each shape of a product. Llama 3 8B took 90 MiB on an H200.
const FIRST_USE: u64 = 128 << 20;

/// Bytes of the streams and events of a rank with `plan`. A rank without activations on the host
/// has `measured` bytes of them.
fn bytes_of_streams(measured: u64, plan: &Plan) -> u64 {
    let more = if plan.carries(Cargo::Activation) { ACTIVATION_STREAMS } else { 0 };
    (measured * (STREAMS_PER_RANK + more) as u64).div_ceil(STREAMS_PER_RANK as u64)
}

/// Bytes of a GPU that the plan of a rank may use, and bytes that are kept back.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    /// Most bytes that the plan may use.
    pub limit: u64,
    /// Uses of GPU memory besides the plan. The text also says how the number of bytes is known.
    pub overheads: Vec<(&'static str, u64)>,
}

impl LocalMachine {
    /// GPU of each rank, as the driver's number, in the order of the ranks.
    pub fn rank_gpus(&self, (tp, dp): (usize, usize)) -> Vec<usize> {
        let mut known = self.0.rank_gpus.lock().unwrap_or_else(PoisonError::into_inner);
        let place = || {
            let all: Vec<_> = self.cuda().gpus.iter().map(|gpu| gpu.pci).collect();
            let request = Request { tp, dp, ..Request::default() };
            let machine = self.topology();
            let placed = machine.and_then(|machine| place_on(machine, &request, &all).ok());
            placed.map_or_else(|| round_robin(all.len(), tp * dp), |(_, gpus)| gpus)
        };
        known.entry((tp, dp)).or_insert_with(place).clone()
    }

    /// Budget of the rank of `config` with the least room for `plan`, on the GPUs of its placement.
    ///
    /// # Errors
    /// The machine has no GPUs, or a GPU cannot be examined. The text says why.
    pub fn memory_budget(&self, config: &Config, plan: &Plan) -> Result<MemoryBudget, String> {
        if let Some(missing) = self.missing_gpus() {
            return Err(missing);
        }
        let gpus = self.rank_gpus(self.grid(config));
        let distinct: BTreeSet<usize> = gpus.iter().copied().collect();
        let one = |gpu: usize| {
            let ranks = gpus.iter().filter(|other| **other == gpu).count() as u64;
            self.of_gpu((gpu, ranks), config, plan)
        };
        let rooms = distinct.into_iter().map(one).collect::<Result<Vec<_>, _>>()?;
        rooms.into_iter().min_by_key(|room| room.limit).ok_or_else(|| "no GPU is taken".into())
    }

    fn of_gpu(
        &self,
        (gpu, ranks): (usize, u64),
        config: &Config,
        plan: &Plan,
    ) -> Result<MemoryBudget, String> {
        let found = look(gpu, offload::PROGRAMS)
            .map_err(|why| format!("GPU {gpu} cannot be looked at: {why}"))?;
        let mut overheads = vec![
            ("cuBLASLt's products", found.overhead.products.div_ceil(ranks)),
            ("onebox's kernels", found.overhead.kernels),
            ("streams and events", bytes_of_streams(found.overhead.streams, plan)),
            ("page tables of pinned memory", page_tables(plan)),
            ("code of the first use", FIRST_USE.min(found.free / ranks / 8)),
        ];
        let nccl = self.nccl((gpu, found.total), config);
        let sm = self.cuda().gpus.iter().find(|known| known.ordinal == gpu).map(|gpu| gpu.sm);
        if nccl.is_some() && sm.is_some_and(|sm| sm >= LEAVE_ROOM_SINCE) {
            // A product has code of its own for the time beside a collective.
            let bytes = FIRST_USE.min(found.free / ranks / 8);
            overheads.push(("code of products beside collectives", bytes));
        }
        overheads.extend(nccl);
        let sum: u64 = overheads.iter().map(|(_, bytes)| bytes).sum();
        Ok(MemoryBudget { limit: (found.free / ranks).saturating_sub(sum), overheads })
    }

    /// Name and bytes of NCCL's memory; `None` if a run would not use NCCL.
    fn nccl(&self, (gpu, memory): (usize, u64), config: &Config) -> Option<(&'static str, u64)> {
        let (tp, dp) = (config.parallel.tensor, config.parallel.data);
        let cuda = self.cuda();
        if tp * dp == 1 || self.ranks(config) > cuda.gpus.len() || !cuda.has_nccl() {
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
}
