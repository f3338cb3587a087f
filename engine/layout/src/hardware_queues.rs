//! Checks that the hardware queues of GPUs can order the streams of all ranks.

use config::Config;
use device::cuda::{ACTIVATION_STREAMS, STREAMS_PER_RANK};
use topology::counted;

/// Number of hardware queues of a GPU. Streams that share a queue wait for each other.
const HARDWARE_QUEUES: usize = 32;

/// Environment variable with the number of queues of a process; the driver reads it at its start.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Number of hardware queues that the environment grants to this process.
pub fn connections() -> usize {
    /// Number that the driver uses if the variable holds no number.
    const DEFAULT: usize = 8;
    let Some(text) = std::env::var_os(CONNECTIONS) else { return HARDWARE_QUEUES };
    let number = text.to_str().and_then(|text| text.trim().parse().ok());
    number.unwrap_or(DEFAULT).clamp(1, HARDWARE_QUEUES)
}

/// Number of streams of a rank of `config`.
pub(crate) const fn streams_of_rank(config: &Config) -> usize {
    let more = if config.activations.moves() { ACTIVATION_STREAMS } else { 0 };
    STREAMS_PER_RANK + more
}

/// Error and remedy if the hardware queues of `gpus` GPUs cannot order the streams of `ranks` ranks
/// on each GPU. A rank has `of_rank` streams, and the process may use `granted` queues.
pub(crate) fn queues(
    ranks: usize,
    of_rank: usize,
    gpus: usize,
    granted: usize,
) -> Option<(String, String)> {
    let streams = ranks * of_rank;
    if ranks < 2 || streams <= granted {
        return None;
    }
    let most = HARDWARE_QUEUES / of_rank;
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

/// Warning that copies wait for matmuls, if the environment grants too few queues for one rank.
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
            assert_eq!(queues(ranks, 6, 1, 32), None);
        }
        let (message, help) = queues(6, 6, 2, 32).unwrap();
        assert!(message.starts_with("6 ranks on a GPU have 36 streams"), "{message}");
        assert_eq!(help, "use at most 10 ranks on 2 GPUs");
        let (message, help) = queues(2, 6, 1, 8).unwrap();
        assert!(message.contains("CUDA_DEVICE_MAX_CONNECTIONS=8"), "{message}");
        assert!(help.contains("unset CUDA_DEVICE_MAX_CONNECTIONS"), "{help}");
        assert_eq!(queues(1, 6, 1, 1), None);
        // Activations on the host have two more streams.
        assert_eq!(queues(4, STREAMS_PER_RANK + ACTIVATION_STREAMS, 1, 32), None);
        let (message, _) = queues(5, STREAMS_PER_RANK + ACTIVATION_STREAMS, 1, 32).unwrap();
        assert!(message.starts_with("5 ranks on a GPU have 40 streams"), "{message}");
    }
}
