//! What real GPUs this machine has, asked once, and what a rank may hold on one.

use crate::build::world_size;
use crate::config::{Config, DeviceConfig};
use crate::places::{self, this_machine};
use device::Plan;
use device::cuda::{Probe, STREAMS_PER_RANK, connected, look, page_tables, probe};
use std::sync::{Mutex, OnceLock, PoisonError};
use topology::Request;

/// What a communicator of NCCL takes at most, where no run has measured it yet; on a small GPU a 16th of its memory.
const COMMUNICATOR: u64 = 1 << 30;

/// What allocations lose by being rounded, and what kernels take at their first launch, for each rank.
const ROUNDING: u64 = 16 << 20;

/// Queues of a GPU's hardware. Streams that share one wait for each other.
const HARDWARE_QUEUES: usize = 32;

/// How many of them a process may use: read by the driver when it starts.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Asked at the first call, which comes before a run starts threads.
pub(crate) fn machine() -> &'static Probe {
    static ASKED: OnceLock<Probe> = OnceLock::new();
    ASKED.get_or_init(probe)
}

/// By rank, the driver's number of the GPU that it takes.
pub(crate) fn taken((tp, dp): (usize, usize)) -> Vec<usize> {
    type Taken = Vec<((usize, usize), Vec<usize>)>;
    static KNOWN: Mutex<Taken> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, gpus)) = known.iter().find(|(grid, _)| *grid == (tp, dp)) {
        return gpus.clone();
    }
    let all: Vec<_> = machine().gpus.iter().map(|gpu| gpu.pci).collect();
    let request = Request { tp, dp, ..Request::default() };
    let placed = this_machine().and_then(|machine| places::on(machine, &request, &all).ok());
    let gpus = placed.map_or_else(|| places::in_turn(all.len(), tp * dp), |(_, gpus)| gpus);
    known.push(((tp, dp), gpus.clone()));
    gpus
}

/// Bytes of a GPU: what a rank's plan may take, and what is kept back from it.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    /// For the plan.
    pub(crate) limit: u64,
    /// What lies beside it, with how that is known.
    pub(crate) beside: Vec<(&'static str, u64)>,
}

/// The least room that any rank of `config` has with `plan`, on the GPUs that its placement takes.
///
/// # Errors
/// Why that is not known: there are no GPUs, or one cannot be looked at.
pub(crate) fn room(config: &Config, plan: &Plan) -> Result<Room, String> {
    if let Some(missing) = machine().missing() {
        return Err(missing);
    }
    let gpus = taken((config.parallel.tensor, config.parallel.data));
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

fn of_gpu((gpu, ranks): (usize, u64), config: &Config, plan: &Plan) -> Result<Room, String> {
    let found = look(gpu).map_err(|why| format!("GPU {gpu} cannot be looked at: {why}"))?;
    let mut beside = vec![
        ("cuBLASLt's products", found.beside.products.div_ceil(ranks)),
        ("onebox's kernels", found.beside.kernels),
        ("streams and events", found.beside.streams),
        ("page tables of pinned memory", page_tables(plan)),
        ("rounding", ROUNDING.min(found.free / ranks / 8)),
    ];
    beside.extend(nccl((gpu, found.total), config));
    let sum: u64 = beside.iter().map(|(_, bytes)| bytes).sum();
    Ok(Room { limit: (found.free / ranks).saturating_sub(sum), beside })
}

/// NCCL's part, where a run would use it.
fn nccl((gpu, memory): (usize, u64), config: &Config) -> Option<(&'static str, u64)> {
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    if tp * dp == 1 || tp * dp > machine().gpus.len() || !machine().has_nccl() {
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

/// Why the hardware queues of the GPUs cannot order the streams of all ranks, and what helps.
pub(crate) fn crowded(config: &Config) -> Option<(String, String)> {
    let gpus = machine().gpus.len();
    if config.device != DeviceConfig::Cuda || gpus == 0 {
        return None;
    }
    let ranks = world_size(config).div_ceil(gpus);
    queues((ranks, gpus), connections())
}

/// Hardware queues that the environment grants this process.
pub(crate) fn connections() -> usize {
    /// What the driver takes where nothing is said.
    const DEFAULT: usize = 8;
    let Some(text) = std::env::var_os(CONNECTIONS) else { return HARDWARE_QUEUES };
    let number = text.to_str().and_then(|text| text.trim().parse().ok());
    number.unwrap_or(DEFAULT).clamp(1, HARDWARE_QUEUES)
}

/// Of `ranks` on each of `gpus` GPUs whose process may use so many queues.
fn queues((ranks, gpus): (usize, usize), granted: usize) -> Option<(String, String)> {
    let streams = ranks * STREAMS_PER_RANK;
    if ranks < 2 || streams <= granted {
        return None;
    }
    let most = HARDWARE_QUEUES / STREAMS_PER_RANK;
    if ranks > most {
        let message = format!(
            "{ranks} ranks on a GPU have {streams} streams; its {HARDWARE_QUEUES} hardware queues order those of {most}, \
             and ranks whose streams share a queue can wait for each other for ever"
        );
        let help = format!("use at most {} ranks on {gpus} GPU(s)", most * gpus);
        return Some((message, help));
    }
    let message = format!(
        "{ranks} ranks on a GPU have {streams} streams, and {CONNECTIONS}={granted} grants them {granted} hardware queues: \
         ranks whose streams share a queue can wait for each other for ever"
    );
    Some((message, format!("unset {CONNECTIONS}, or set it to {HARDWARE_QUEUES}")))
}

/// That one rank's copies wait for its products, where the environment grants too few queues.
pub(crate) fn few_queues() -> Option<String> {
    let granted = connections();
    (granted < 8).then(|| {
        format!(
            "{CONNECTIONS}={granted}: streams share {granted} hardware queue(s), so copies and collectives wait for \
             products; unset it, or set it to {HARDWARE_QUEUES}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_a_gpu_as_far_as_its_queues_order_their_streams() {
        assert_eq!(STREAMS_PER_RANK, 6);
        for ranks in 1..=5 {
            assert_eq!(queues((ranks, 1), 32), None);
        }
        let (message, help) = queues((6, 2), 32).unwrap();
        assert!(message.starts_with("6 ranks on a GPU have 36 streams"), "{message}");
        assert_eq!(help, "use at most 10 ranks on 2 GPU(s)");
        let (message, help) = queues((2, 1), 8).unwrap();
        assert!(message.contains("CUDA_DEVICE_MAX_CONNECTIONS=8"), "{message}");
        assert!(help.contains("unset CUDA_DEVICE_MAX_CONNECTIONS"), "{help}");
        assert_eq!(queues((1, 1), 1), None);
    }
}
