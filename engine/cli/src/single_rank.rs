//! Options of devices that belong to no run: for measurements, and to generate.

use device::cpu::{CpuOptions, Lanes, ScratchFloats};
use device::cuda::{AttentionLibrary, Collectives, CudaOptions, MatmulSelection, Peers};
use device::{HostPlace, HostWork, Rank, ThreadTeam};
use std::sync::Arc;

/// The only rank.
pub(crate) const ALONE: Rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };

/// Options of a virtual GPU whose kernels run on `team`, one after another.
pub(crate) fn inline(
    host: HostPlace,
    scratch: ScratchFloats,
    team: Option<Arc<ThreadTeam>>,
) -> CpuOptions {
    let work = HostWork { team, ..HostWork::default() };
    CpuOptions { lanes: Lanes::Inline, memory_limit: u64::MAX, host, scratch, work }
}

/// Options of a GPU for ops that need no scratch. It loads no kernels of device tasks.
pub(crate) fn on_gpu(gpu: Option<usize>, host: HostPlace, peers: &Arc<Peers>) -> CudaOptions {
    CudaOptions {
        gpu,
        host,
        peers: Arc::clone(peers),
        collectives: Collectives::Auto,
        attention: AttentionLibrary::Own,
        matmuls: MatmulSelection::Heuristic,
        scratch: 0,
        work: HostWork::default(),
        programs: &[],
        warm_up: Arc::default(),
    }
}
