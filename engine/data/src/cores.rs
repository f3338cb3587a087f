//! Parallel work on parts of the data, on all cores available to the process.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, scope};
use topology::cores;

/// Bytes of text that are tokenized at the same time, unless one file is longer.
const TEXT_AT_ONCE: u64 = 64 << 20;

/// Number of texts that are tokenized at the same time; the longest has `longest` bytes.
pub fn texts_at_once(longest: u64) -> usize {
    (TEXT_AT_ONCE / longest.max(1)).clamp(1, cores() as u64) as usize
}

/// The results of `f(0)..f(count - 1)` in this order, computed on all cores. The calling thread
/// works too; if no other thread can be started, it works alone.
pub(super) fn map<T: Send>(count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    map_by(usize::MAX, count, f)
}

/// Like [`map`], but lazily in groups of `group` calls.
pub(super) fn map_groups<T: Send>(
    group: usize,
    count: usize,
    f: impl Fn(usize) -> T + Sync,
) -> impl Iterator<Item = T> {
    let firsts = (0..count).step_by(group);
    firsts.flat_map(move |first| map(group.min(count - first), |i| f(first + i)))
}

/// Like [`map`], but with at most `threads` threads.
pub(super) fn map_by<T: Send>(
    threads: usize,
    count: usize,
    f: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return done;
            }
            done.push((i, f(i)));
        }
    };
    let mut all = scope(|scope| {
        let helpers = 1..threads.min(cores()).min(count);
        let helpers = helpers.map_while(|_| Builder::new().spawn_scoped(scope, work).ok());
        let helpers: Vec<_> = helpers.collect();
        let mut all = work();
        for helper in helpers {
            all.extend(helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        all
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, done)| done).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_part_is_done_once_and_stands_in_its_place() {
        assert_eq!(super::map(1000, |i| 3 * i), (0..1000).map(|i| 3 * i).collect::<Vec<_>>());
        assert!(super::map(0, |i| i).is_empty());
        let panicked = std::panic::catch_unwind(|| super::map(50, |i| assert!(i != 33)));
        assert!(panicked.is_err());
    }
}
