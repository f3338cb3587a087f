//! The clock of events: the machine's, or simulated times of matmuls and kernels alone.

use std::{
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use crate::{
    config::config,
    sync::{Random, lock},
};

/// Nanoseconds by which the clock is ahead of the machine's, or of the first look at it.
static AHEAD: AtomicU64 = AtomicU64::new(0);

/// Sets the clock forward, by seconds.
pub(crate) fn advance(seconds: u64) {
    AHEAD.fetch_add(seconds * 1_000_000_000, SeqCst);
}

/// The time of the clock. With `FAKECUDA_ALGORITHMS` it stands still between simulated jobs.
pub(crate) fn now() -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let base = if config().algorithms.is_empty() { Instant::now() } else { *START };
    base + Duration::from_nanos(AHEAD.load(SeqCst))
}

/// Sets a simulated clock forward by the time of a job, with its noise.
fn pass(microseconds: u64) {
    static NOISE: LazyLock<Mutex<Random>> =
        LazyLock::new(|| Mutex::new(Random(config().seed.wrapping_mul(0x1_0003))));
    if config().algorithms.is_empty() {
        return;
    }
    // Thousandths of the time that are added.
    let noise = lock(&NOISE).next() % (10 * config().noise_percent + 1);
    AHEAD.fetch_add(microseconds * (1000 + noise), SeqCst);
}

/// A matmul by an algorithm has run, with or without a step of an epilogue.
pub(crate) fn pass_matmul(algorithm: usize, has_step: bool) {
    let config = config();
    let alone = config.algorithms.get(algorithm).copied().unwrap_or_default();
    pass(alone + if has_step { config.epilogue_us } else { 0 });
}

/// A kernel has run.
pub(crate) fn pass_kernel() {
    pass(config().kernel_us);
}
