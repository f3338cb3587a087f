//! Progress of work that is not reading, such as simulations: a status on a terminal, no output
//! elsewhere. A thread draws it, so that the time goes on during a long step.

use super::progress::{ProgressCount, clock, cut, on_terminal, status};
use super::stderr;
use data::progress::Reading;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Minimum duration of work that is shown.
const FIRST: Duration = Duration::from_secs(1);
/// Time between two drawings.
const REDRAW: Duration = Duration::from_millis(200);

/// Progress of one work, which ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Stage {
    state: Arc<StageState>,
    /// Thread that draws the status; `None` without a terminal.
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct StageState {
    what: &'static str,
    /// Number of finished steps.
    done: AtomicU64,
    /// Number of steps; 0 if it is not known.
    of: u64,
    began: Instant,
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Stage {
    /// Begins work of `of` steps; 0 if their number is not known.
    pub(crate) fn begin(what: &'static str, of: u64) -> Self {
        let (done, is_over, over) = (AtomicU64::new(0), Mutex::new(false), Condvar::new());
        let state = Arc::new(StageState { what, done, of, began: Instant::now(), is_over, over });
        let drawn = Arc::clone(&state);
        let thread = on_terminal().then(|| Builder::new().name("status".into()));
        // Without the thread, the work goes on and shows no progress.
        let thread = thread.and_then(|thread| thread.spawn(move || drawn.draw_until_over()).ok());
        Self { state, thread }
    }
}

impl Reading for Stage {
    fn add(&self, finished: u64) {
        self.state.done.fetch_add(finished, Ordering::Relaxed);
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        *self.state.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.state.over.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl StageState {
    fn draw_until_over(&self) {
        let mut wait = FIRST;
        let mut over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*over {
            let waited = self.over.wait_timeout(over, wait);
            let (now, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            over = now;
            if timeout.timed_out() && !*over {
                self.draw();
                wait = REDRAW;
            }
        }
        if wait == REDRAW {
            stderr::clear();
        }
    }

    fn draw(&self) {
        let (done, of) = (self.done.load(Ordering::Relaxed), self.of);
        let text = words(self.what, ProgressCount { done, of }, self.began.elapsed().as_secs_f64());
        stderr::status(Box::new(move |width| match of {
            0 => cut(&text, width),
            _ => status(ProgressCount { done, of }, width, |left| cut(&text, left)),
        }));
    }
}

fn words(what: &str, ProgressCount { done, of }: ProgressCount, seconds: f64) -> String {
    let time = clock(seconds);
    match of {
        0 => format!("{what}  {time}"),
        _ => format!("{what}  {done} of {of}  {time}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_has_steps_and_time() {
        let of = |done, of| words("simulating layouts", ProgressCount { done, of }, 7.2);
        assert_eq!(of(3, 12), "simulating layouts  3 of 12  0:07");
        assert_eq!(of(0, 0), "simulating layouts  0:07");
    }

    #[test]
    fn work_that_ends_early_waits_for_no_drawing() {
        let stage = Stage::begin("simulating layouts", 2);
        stage.add(1);
        stage.add(1);
        assert_eq!(stage.state.done.load(Ordering::Relaxed), 2);
        let state = Arc::clone(&stage.state);
        drop(stage);
        // A drawing thread that begins now ends at once.
        state.draw_until_over();
    }
}
