//! Locks that survive a panic of another thread, messages, and random numbers.

use std::{
    io::Write,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits at most 2 ms for a change, so that the caller can check whether its device is lost.
pub(crate) fn wait_briefly<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
) -> MutexGuard<'a, T> {
    let pause = Duration::from_millis(2);
    condvar.wait_timeout(guard, pause).unwrap_or_else(PoisonError::into_inner).0
}

/// Writes one line to stderr; a closed stderr is no reason to fail.
pub(crate) fn complain(message: &str) {
    let _ = writeln!(std::io::stderr(), "fake-cuda: {message}");
}

/// The random number generator SplitMix64.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
