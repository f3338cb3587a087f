//! Progress of reading long files: a status on a terminal, no output elsewhere.

use super::progress::{ProgressCount, clock, cut, on_terminal, status};
use super::stage::Stage;
use super::stderr;
use data::progress as data;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use topology::format_bytes;

/// Minimum duration of a reading that is shown.
const FIRST: Duration = Duration::from_secs(1);
/// Time between two drawings.
const REDRAW: Duration = Duration::from_millis(100);

/// Shows the progress of long work, if stderr is a terminal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TerminalProgress;

impl data::Progress for TerminalProgress {
    fn begin(&self, what: &'static str, bytes: u64) -> Box<dyn data::Reading> {
        let (done, drawn) = (AtomicU64::new(0), AtomicU64::new(0));
        let next = on_terminal().then(|| AtomicU64::new(FIRST.as_millis() as u64));
        Box::new(ReadProgress { what, of: bytes, done, began: Instant::now(), next, drawn })
    }

    fn begin_steps(&self, what: &'static str, steps: u64) -> Box<dyn data::Reading> {
        Box::new(Stage::begin(what, steps))
    }
}

/// Number of bytes that threads have read, and number of all bytes.
#[derive(Debug)]
struct ReadProgress {
    what: &'static str,
    of: u64,
    done: AtomicU64,
    began: Instant,
    /// Milliseconds since the start at which the next drawing is due; `None` without a terminal.
    next: Option<AtomicU64>,
    drawn: AtomicU64,
}

impl data::Reading for ReadProgress {
    fn add(&self, bytes: u64) {
        let done = bytes + self.done.fetch_add(bytes, Ordering::Relaxed);
        let Some(next) = &self.next else { return };
        let now = self.began.elapsed();
        let (due, millis) = (next.load(Ordering::Relaxed), now.as_millis() as u64);
        let after = millis + REDRAW.as_millis() as u64;
        let (one, other) = (Ordering::Relaxed, Ordering::Relaxed);
        if millis < due || next.compare_exchange(due, after, one, other).is_err() {
            return;
        }
        self.drawn.store(1, Ordering::Relaxed);
        let (what, of) = (self.what, self.of);
        let rest = words(what, ProgressCount { done, of }, now.as_secs_f64());
        stderr::status(Box::new(move |width| {
            status(ProgressCount { done, of }, width, |left| cut(&rest, left))
        }));
    }
}

impl Drop for ReadProgress {
    fn drop(&mut self) {
        if *self.drawn.get_mut() > 0 {
            stderr::clear();
        }
    }
}

fn words(what: &str, ProgressCount { done, of }: ProgressCount, seconds: f64) -> String {
    let rate = done as f64 / seconds;
    let left = clock(of.saturating_sub(done) as f64 / rate);
    let [done, of, rate] = [done, of, rate as u64].map(format_bytes);
    format!("{what}  {done} of {of}  {rate}/s  eta {left}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_has_bytes_speed_and_time() {
        let words = words("checking data", ProgressCount { done: 3 << 30, of: 9 << 30 }, 1.5);
        assert_eq!(words, "checking data  3.00 GiB of 9.00 GiB  2.00 GiB/s  eta 0:03");
    }
}
