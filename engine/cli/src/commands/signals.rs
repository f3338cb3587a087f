//! The signals that end a run, as shells, schedulers and terminals send them.
//!
//! `timeout`, a closed terminal and others signal twice within microseconds. Only a second Ctrl-C,
//! a second or more after the first, ends the process immediately.
//!
//! Before the first step there is nothing to save, and files are written as if power could fail:
//! the first signal then ends the process, even if it waits for data, hashes, memory or a driver.

use super::exit::code;
use crate::report::progress::announce;
use crate::report::stderr;
use files::input;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals as Heard;
use signal_hook::low_level::signal_name;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Signals that stop a run: Ctrl-C, `kill`, a closed terminal, Slurm's warnings, a CPU time limit.
const HEARD: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU];
/// Minimum time between the first Ctrl-C and a second one that counts.
const APART: Duration = Duration::from_secs(1);

/// State that the signal handler shares with a run.
#[derive(Clone)]
pub(super) struct Signals {
    /// True after the first signal that stops the run.
    pub(super) stop: Arc<AtomicBool>,
    pub(super) starting: StartupNotice,
    /// Whether the run saves checkpoints, also when it stops.
    pub(super) saves: Arc<AtomicBool>,
}

/// Message for a signal during startup, when ranks do not react to a stop yet; then `None`.
#[derive(Clone)]
pub(super) struct StartupNotice(Arc<Mutex<Option<String>>>);

impl StartupNotice {
    fn words(&self) -> MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the message with which a signal ends the process until [`over`](Self::over).
    pub(super) fn say(&self, words: String) {
        *self.words() = Some(words);
    }

    pub(super) fn over(&self) {
        *self.words() = None;
    }
}

/// Ctrl-C during a command that writes its results at its end.
pub(super) struct Interrupt {
    came: Arc<AtomicBool>,
}

impl Interrupt {
    /// Handles Ctrl-C from now on: the first one no longer ends the process, a second one a second
    /// or more later does. A Ctrl-C that is already ignored stays ignored.
    pub(super) fn hear() -> io::Result<Self> {
        let interrupt = Self { came: Arc::default() };
        if is_ignored(SIGINT) {
            return Ok(interrupt);
        }
        let (mut heard, came) = (Heard::new([SIGINT])?, Arc::clone(&interrupt.came));
        let hear = move || {
            let mut interrupted = None;
            for signal in heard.forever() {
                if counts_twice(signal, &mut interrupted, Instant::now()) {
                    stderr::leave();
                    signal_hook::low_level::exit(i32::from(code::ABORTED));
                }
                came.store(true, Ordering::SeqCst);
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(hear)?;
        Ok(interrupt)
    }

    /// Whether a Ctrl-C came.
    pub(super) fn came(&self) -> bool {
        self.came.load(Ordering::SeqCst)
    }
}

/// From now on a write beyond the limit of the size of a file is an error, not the end of the process.
pub(super) fn outlive_size_limit() {
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// Handles signals from now on. Signals that are already ignored, as under `nohup`, stay ignored.
pub(super) fn hear() -> Signals {
    let (stop, stopping) = (Arc::default(), Arc::default());
    let words = "interrupted before the first step; nothing is lost".to_owned();
    let starting = StartupNotice(Arc::new(Mutex::new(Some(words))));
    stderr::by_thread(&stopping);
    let heard = HEARD.into_iter().filter(|signal| !is_ignored(*signal));
    let saves = Arc::new(AtomicBool::new(true));
    let signals = Signals { stop, starting, saves };
    if let Err(error) = listen(heard, signals.clone(), stopping) {
        tracing::warn!("Ctrl-C will end the run at once: {error}");
    }
    signals
}

/// Whether this process ignores `signal`, as under `nohup`.
pub(super) fn is_ignored(signal: i32) -> bool {
    let status = input::text(Path::new("/proc/self/status"), 1 << 20);
    ignored(&status.unwrap_or_default()) >> (signal - 1) & 1 == 1
}

/// Reads the set of ignored signals, one bit each, from a process's status; empty if missing.
fn ignored(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

/// Starts the signal thread. `stopping` becomes true at any signal but SIGWINCH.
fn listen(
    heard: impl Iterator<Item = i32>,
    Signals { stop, starting, saves }: Signals,
    stopping: Arc<AtomicBool>,
) -> io::Result<()> {
    let heard: Vec<_> = heard.chain([SIGWINCH]).collect();
    let (registered, outcome) = channel();
    let hear = move || {
        // Registered in this thread: if the thread cannot start, signals keep their default effect.
        let heard = Heard::new(heard).map_err(|error| drop(registered.send(Err(error))));
        let Ok(mut heard) = heard else { return };
        drop(registered.send(Ok(())));
        let mut interrupted = None;
        for signal in heard.forever() {
            if signal == SIGWINCH {
                stderr::redraw();
                continue;
            }
            stopping.store(true, Ordering::SeqCst);
            // The lock is held until the exit, so that no step begins meanwhile.
            if let Some(words) = &*starting.words() {
                stderr::leave();
                announce(words);
                stderr::flush();
                signal_hook::low_level::exit(i32::from(code::INTERRUPTED));
            }
            if counts_twice(signal, &mut interrupted, Instant::now()) {
                stderr::leave();
                signal_hook::low_level::exit(i32::from(code::ABORTED));
            }
            if !stop.swap(true, Ordering::SeqCst) || signal == SIGINT {
                announce(&announcement(signal, saves.load(Ordering::SeqCst)));
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(hear)?;
    outcome.recv().unwrap_or_else(|_| Err(io::Error::other("its thread has panicked")))
}

/// Whether `signal` is the Ctrl-C that ends the process. `interrupted`: time of the first one.
fn counts_twice(signal: i32, interrupted: &mut Option<Instant>, now: Instant) -> bool {
    signal == SIGINT && now.saturating_duration_since(*interrupted.get_or_insert(now)) >= APART
}

fn announcement(signal: i32, saves: bool) -> String {
    let what = match saves {
        true => "topping after this step and saving.",
        false => "topping after this step and writing the weights; this run saves no checkpoints.",
    };
    match signal {
        SIGINT => format!("S{what} Press Ctrl-C again to quit now."),
        SIGXCPU => format!("The limit of CPU time is near: s{what}"),
        _ => format!("{}: s{what}", signal_name(signal).unwrap_or("A signal")),
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
