//! How a thread waits for what another one is about to do: it looks for a moment, and then it sleeps. It never yields its
//! core instead. A thread that yields loses its turn: on a busy machine each look then waits for all other processes. A
//! thread that sleeps is woken as soon as a core is free.

use std::time::{Duration, Instant};

/// Looks between two glances at the clock.
const LOOKS: usize = 64;
/// Waking a sleeping thread takes as long.
const MOMENT: Duration = Duration::from_micros(20);

/// Calls `find` for a `moment`, at least [`LOOKS`] times, until it returns something; `None` if it never does.
pub(crate) fn spin_for<T>(moment: Duration, mut find: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        for _ in 0..LOOKS {
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

/// The time that each of `threads` threads looks before it sleeps: a `moment` if each has a core. Otherwise none, since the thread
/// that it waits for may need its core.
pub(crate) fn pause(threads: usize, moment: Duration) -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if threads <= cores { moment } else { Duration::ZERO }
}

/// The same for threads that wait for ranks.
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
        assert_eq!((nothing, looks), (None, LOOKS));
        assert_eq!(spin_for(MOMENT, || None::<()>), None);
        let mut looks = 0..;
        let third = || looks.next().filter(|look| *look == 2);
        assert_eq!(spin_for(Duration::ZERO, third), Some(2));
    }
}
