//! The rules of this machine's GPUs: whether they compute in the precision of a config, and whether their hardware queues order
//! the streams of all ranks.

use crate::LocalMachine;
use config::{Config, DeviceConfig, Violation};
use device::cuda::STREAMS_PER_RANK;
use topology::counted;

/// Queues of a GPU's hardware. Streams that share one wait for each other.
const HARDWARE_QUEUES: usize = 32;

/// How many of them a process may use: read by the driver when it starts.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

impl LocalMachine {
    /// The rules that `config` breaks on the GPUs of this machine.
    pub fn broken(&self, config: &Config) -> Vec<Violation> {
        if config.device != DeviceConfig::Cuda {
            return Vec::new();
        }
        let all = &self.cuda().gpus;
        let taken = self.rank_gpus((config.parallel.tensor, config.parallel.data));
        let oldest = taken.into_iter().filter_map(|gpu| all.get(gpu)).min_by_key(|gpu| gpu.sm);
        let refusal = oldest.and_then(|gpu| {
            config.precision.refusal(&format!("GPU {}, {},", gpu.ordinal, gpu.name), gpu.sm)
        });
        let values = vec![("parallel.data", "ranks of the run".into()), ("device", "GPUs".into())];
        let crowded = self.crowded(config);
        let crowded = crowded.map(|(message, help)| Violation { message, help, values });
        refusal.into_iter().chain(crowded).collect()
    }

    /// Whether `config` keeps every rule, those of this machine's GPUs included.
    pub fn is_sound(&self, config: &Config) -> bool {
        self.first_broken(config).is_none()
    }

    /// The message of the first rule that `config` breaks, those of this machine's GPUs included.
    pub fn first_broken(&self, config: &Config) -> Option<String> {
        let of_machine = || self.broken(config).into_iter().next().map(|one| one.message);
        config.first_broken().or_else(of_machine)
    }

    /// Why the hardware queues of the GPUs cannot order the streams of all ranks, and what helps.
    fn crowded(&self, config: &Config) -> Option<(String, String)> {
        let gpus = self.cuda().gpus.len();
        if config.device != DeviceConfig::Cuda || gpus == 0 {
            return None;
        }
        queues((self.ranks(config).div_ceil(gpus), gpus), connections())
    }
}

/// Hardware queues that the environment grants this process.
pub fn connections() -> usize {
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
        let help = format!("use at most {} ranks on {}", most * gpus, counted(gpus, "GPU"));
        return Some((message, help));
    }
    let message = format!(
        "{ranks} ranks on a GPU have {streams} streams, and {CONNECTIONS}={granted} grants them {granted} hardware queues: \
         ranks whose streams share a queue can wait for each other for ever"
    );
    Some((message, format!("unset {CONNECTIONS}, or set it to {HARDWARE_QUEUES}")))
}

/// That one rank's copies wait for its products, where the environment grants too few queues.
pub fn few_queues() -> Option<String> {
    let granted = connections();
    (granted < 8).then(|| {
        format!(
            "{CONNECTIONS}={granted}: streams share {}, so copies and collectives wait for products; unset it, or set \
             it to {HARDWARE_QUEUES}",
            counted(granted, "hardware queue")
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
        assert_eq!(help, "use at most 10 ranks on 2 GPUs");
        let (message, help) = queues((2, 1), 8).unwrap();
        assert!(message.contains("CUDA_DEVICE_MAX_CONNECTIONS=8"), "{message}");
        assert!(help.contains("unset CUDA_DEVICE_MAX_CONNECTIONS"), "{help}");
        assert_eq!(queues((1, 1), 1), None);
    }
}
