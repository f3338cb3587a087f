//! Describes how full a memory is.

use config::Config;
use engine::memory::{GPU, MemoryUse, is_virtual};
use topology::format_bytes;

/// Fraction of a memory above which a plan warns, because other programs may need the rest.
const NEARLY_FULL: f64 = 0.95;

fn percent(used: u64, total: u64) -> f64 {
    100.0 * used as f64 / total.max(1) as f64
}

/// Used and total bytes as text, for example `250.66 GiB of 251.00 GiB (99.9 %)`.
pub fn filled(used: u64, total: u64) -> String {
    let share = percent(used, total);
    format!("{} of {} ({share:.1} %)", format_bytes(used), format_bytes(total))
}

/// One sentence for GPUs and one for host memory, if they are nearly full. Virtual GPUs are only a
/// limit of the config, which no other program uses.
pub(super) fn warnings(config: &Config, limited: &[MemoryUse]) -> Vec<String> {
    let full = |of_gpu: bool| {
        let these = limited.iter().filter(|(name, ..)| (name == GPU) == of_gpu);
        let shares = these.map(|(_, used, total)| percent(*used, *total));
        let most = shares.fold(0.0, f64::max);
        (most > 100.0 * NEARLY_FULL).then_some(most)
    };
    let gpu = full(true).filter(|_| !is_virtual(config)).map(|share| {
        format!(
            "GPU memory is {share:.1} % full: a desktop, or another program that uses a GPU, takes what the run needs"
        )
    });
    let host = full(false).map(|share| {
        format!(
            "host memory is {share:.1} % full: other programs and the page cache need some of it, too"
        )
    });
    gpu.into_iter().chain(host).collect()
}
