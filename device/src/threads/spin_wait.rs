//! Waiting of a thread for another thread: it polls for a moment and then sleeps. It never yields
//! its core. A thread that yields loses its turn, so on a busy machine each poll would wait for all
//! other processes. A sleeping thread is woken as soon as a core is free.

use std::time::{Duration, Instant};

/// Number of polls between two reads of the clock.
const LOOKS: usize = 64;
/// Number of polls of a thread that has no time to poll: the awaited thread may need its core.
const FEW_LOOKS: usize = 4;
/// Time for which a thread polls for a rank. Waking a sleeping thread needs about the same time.
const MOMENT: Duration = Duration::from_micros(20);

/// Calls `find` until it returns a value, for a `moment` and at least [`LOOKS`] times, or
/// [`FEW_LOOKS`] times if the moment is zero; then `None`.
pub(crate) fn spin_for<T>(moment: Duration, mut find: impl FnMut() -> Option<T>) -> Option<T> {
    let looks = if moment.is_zero() { FEW_LOOKS } else { LOOKS };
    let began = Instant::now();
    loop {
        for _ in 0..looks {
            let found = find();
            if found.is_some() {
                return found;
            }
            std::hint::spin_loop();
        }
        if began.elapsed() >= moment {
            return None;
        }
    }
}

/// The time for which each of `threads` threads polls before it sleeps: `moment` if each thread has
/// a core. Otherwise it is zero, since the awaited thread may need the core.
pub(crate) fn pause(threads: usize, moment: Duration) -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if threads <= cores { moment } else { Duration::ZERO }
}

/// The [`pause`] of `ranks` threads that wait for each other.
pub(crate) fn pause_of_ranks(ranks: usize) -> Duration {
    pause(ranks, MOMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_ends_by_itself_and_beside_more_threads_than_cores_at_once() {
        assert_eq!((pause_of_ranks(1), pause_of_ranks(usize::MAX)), (MOMENT, Duration::ZERO));
        let mut looks = 0;
        let nothing = spin_for(Duration::ZERO, || {
            looks += 1;
            None::<()>
        });
        assert_eq!((nothing, looks), (None, FEW_LOOKS));
        assert_eq!(spin_for(MOMENT, || None::<()>), None);
        let mut looks = 0..;
        let third = || looks.next().filter(|look| *look == 2);
        assert_eq!(spin_for(Duration::ZERO, third), Some(2));
    }
}
