//! The signals that end a run, as shells, schedulers and terminals send them.
//!
//! `timeout`, a closed terminal and others signal twice within microseconds. So one more signal never ends the process at
//! once, but for a second Ctrl-C that comes a second or more after the first.

use super::exit::code;
use crate::progress::announce;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// All that ask a run to stop in order: Ctrl-C, `kill`, a closed terminal, Slurm's warnings, a limit of CPU time.
const HEARD: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU];
/// A second Ctrl-C counts after so long.
const APART: Duration = Duration::from_secs(1);

/// True after the first signal that asks the run to stop. What is ignored when the process starts, as under `nohup`, stays
/// ignored.
pub(super) fn stop_at_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    // Caught, so that a write over the limit of a file's size is an error, not the end.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    let heard = HEARD.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    if let Err(error) = listen(heard, &stop) {
        tracing::warn!("Ctrl-C will end the run at once: {error}");
    }
    stop
}

/// The set of ignored signals, a bit for each, of a process's status; empty where it does not say.
fn ignored(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

fn listen(heard: impl Iterator<Item = i32>, stop: &Arc<AtomicBool>) -> std::io::Result<()> {
    let mut signals = Signals::new(heard)?;
    let stop = Arc::clone(stop);
    let hear = move || {
        let mut interrupted = None;
        for signal in signals.forever() {
            if counts_twice(signal, &mut interrupted, Instant::now()) {
                signal_hook::low_level::exit(i32::from(code::ABORTED));
            }
            if !stop.swap(true, Ordering::SeqCst) || signal == SIGINT {
                announce(said(signal));
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(hear).map(drop)
}

/// Whether `signal` is the Ctrl-C that ends the process at once. `interrupted`: when the first one came.
fn counts_twice(signal: i32, interrupted: &mut Option<Instant>, now: Instant) -> bool {
    signal == SIGINT && now.saturating_duration_since(*interrupted.get_or_insert(now)) >= APART
}

const fn said(signal: i32) -> &'static str {
    match signal {
        SIGINT => "Stopping after this step and saving. Press Ctrl-C again to quit now.",
        SIGTERM => "SIGTERM: stopping after this step and saving.",
        SIGHUP => "SIGHUP: stopping after this step and saving.",
        SIGUSR1 => "SIGUSR1: stopping after this step and saving.",
        SIGUSR2 => "SIGUSR2: stopping after this step and saving.",
        _ => "The limit of CPU time is near: stopping after this step and saving.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_second_ctrl_c_after_a_second_ends_the_process() {
        let (start, mut interrupted) = (Instant::now(), None);
        let mut at =
            |signal, ms| counts_twice(signal, &mut interrupted, start + Duration::from_millis(ms));
        assert!(!at(SIGTERM, 0) && !at(SIGTERM, 5000) && !at(SIGHUP, 5000));
        assert!(!at(SIGINT, 6000), "the first Ctrl-C");
        assert!(!at(SIGINT, 6999), "sent twice");
        assert!(!at(SIGTERM, 9000) && !at(SIGHUP, 9000) && !at(SIGUSR1, 9000));
        assert!(at(SIGINT, 7000));
    }

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        let status =
            "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000440\n";
        let set = ignored(status);
        let is_ignored = HEARD.map(|signal| set >> (signal - 1) & 1 == 1);
        assert_eq!(is_ignored, [false, false, true, false, false, false]);
        assert_eq!((ignored(""), ignored("SigIgn:\tx")), (0, 0));
    }
}
