//! Stderr, written by its own thread while a run trains. A reader that stalls delays neither
//! training nor, after a stop, the end of the run.
//!
//! On a terminal, a status may stand below all other text. The cursor waits at the first column of
//! the status. One command therefore erases the status, even if a narrower terminal has wrapped it.

use crossbeam_channel::{RecvTimeoutError, SendTimeoutError, Sender};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use topology::counted;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of pieces that wait for the reader. Further pieces are dropped.
const ROOM: usize = 256;
/// Maximum time for which a stopped run waits for the reader.
const GRACE: Duration = Duration::from_secs(3);
/// Interval at which a waiting thread checks for a stop of the run.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Function that formats a status for a number of columns.
pub(crate) type Status = Box<dyn Fn(usize) -> String + Send>;

enum Job {
    /// Whole lines; without bytes, the status is drawn again.
    Bytes(Vec<u8>),
    Status(Option<Status>),
    /// Request for an answer when all earlier jobs are written.
    Flush(Sender<()>),
}

struct Thread {
    jobs: Sender<Job>,
    /// True after a signal that stops the run.
    stopping: Arc<AtomicBool>,
    /// Whether the reader was too slow, so that no thread waits for it again.
    gave_up: AtomicBool,
    /// Number of dropped log lines that are not reported yet.
    dropped: AtomicU64,
}

/// Thread that writes stderr; `None` if it could not start, so that callers write themselves.
static THREAD: OnceLock<Option<Thread>> = OnceLock::new();

/// Starts the thread that writes from now on. `stopping` becomes true when a signal stops the run.
pub(crate) fn by_thread(stopping: &Arc<AtomicBool>) {
    let _ = THREAD.get_or_init(|| {
        let (jobs, queue) = crossbeam_channel::bounded(ROOM);
        let started = std::thread::Builder::new().name("stderr".into());
        started.spawn(move || queue.into_iter().for_each(Job::run)).ok()?;
        Some(Thread::new(jobs, Arc::clone(stopping)))
    });
}

impl Job {
    fn run(self) {
        match self {
            Self::Bytes(bytes) => write(&bytes),
            Self::Status(status) => show(status),
            Self::Flush(answer) => drop(answer.send(())),
        }
    }

    /// Submits the job. It is dropped if too many jobs wait for the reader.
    fn offer(self) {
        match THREAD.get() {
            Some(Some(thread)) => thread.offer(self),
            _ => self.run(),
        }
    }

    /// Submits the job and waits for room. After a stop, it is dropped if the reader is too slow.
    fn put(self) {
        match THREAD.get() {
            Some(Some(thread)) => thread.put(self),
            _ => self.run(),
        }
    }
}

/// Status below all other text.
static STATUS: Mutex<Option<Status>> = Mutex::new(None);

/// Erases from the cursor, in the status's first column, to the end of the screen.
const ERASE: &str = "\r\x1b[J";

fn shown() -> MutexGuard<'static, Option<Status>> {
    STATUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes bytes above the status. Ignores errors, since the reader may be gone.
fn write(bytes: &[u8]) {
    let status = shown();
    let mut all = Vec::new();
    if status.is_some() {
        all.extend_from_slice(ERASE.as_bytes());
    }
    all.extend_from_slice(bytes);
    if let Some(status) = &*status {
        // If the terminal has become narrower meanwhile, the status is cut and not wrapped.
        all.extend_from_slice(format!("\x1b[?7l{}\x1b[?7h\r", status(width())).as_bytes());
    }
    let mut out = io::stderr().lock();
    let _ = out.write_all(&all).and_then(|()| out.flush());
}

/// Whether the process ends immediately, so that no further status is drawn.
static LEAVES: AtomicBool = AtomicBool::new(false);

fn show(status: Option<Status>) {
    let erased = shown().take().map_or("", |_| ERASE);
    *shown() = status.filter(|_| !LEAVES.load(Ordering::SeqCst));
    write(erased.as_bytes());
}

/// Columns of the terminal; 80 if unknown.
pub(crate) fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stderr());
    size.map_or(80, |size| if size.ws_col == 0 { 80 } else { usize::from(size.ws_col) })
}

/// Replaces the status. Drops the new status if stderr is read too slowly and many jobs wait.
pub(crate) fn status(status: Status) {
    Job::Status(Some(status)).offer();
}

/// Draws the status again, as for another width.
pub(crate) fn redraw() {
    offer(Vec::new());
}

/// Removes the status.
pub(crate) fn clear() {
    Job::Status(None).put();
}

/// Removes the status before the process ends immediately, with almost no wait for the reader.
pub(crate) fn leave() {
    LEAVES.store(true, Ordering::SeqCst);
    if let Some(Some(thread)) = THREAD.get() {
        let (answer, answered) = crossbeam_channel::bounded(1);
        thread.offer(Job::Status(None));
        thread.offer(Job::Bytes(thread.lost().into_bytes()));
        thread.offer(Job::Flush(answer));
        let _ = answered.recv_timeout(LOOK_UP);
    }
}

/// Writes bytes soon. They are dropped if too many jobs wait for the reader.
pub(crate) fn offer(bytes: Vec<u8>) {
    Job::Bytes(bytes).offer();
}

/// Writes a line, and returns when it and all earlier output are written.
pub(crate) fn line(text: &str) {
    Job::Bytes(format!("{text}\n").into_bytes()).put();
    flush();
}

/// Reports once how many lines of the log were dropped.
pub(crate) fn say_lost() {
    if let Some(Some(thread)) = THREAD.get() {
        let lost = thread.lost();
        if !lost.is_empty() {
            thread.put(Job::Bytes(lost.into_bytes()));
        }
    }
}

/// Returns when all output is written, or if the reader is too slow.
pub(crate) fn flush() {
    let Some(Some(thread)) = THREAD.get() else { return };
    let (answer, answered) = crossbeam_channel::bounded(1);
    thread.put(Job::Flush(answer));
    thread.wait(|| match answered.recv_timeout(LOOK_UP) {
        Err(RecvTimeoutError::Timeout) => false,
        Ok(()) | Err(RecvTimeoutError::Disconnected) => true,
    });
}

impl Thread {
    fn offer(&self, job: Job) {
        drop(self.jobs.try_send(job));
    }

    fn put(&self, job: Job) {
        let mut job = Some(job);
        self.wait(|| {
            let Some(now) = job.take() else { return true };
            match self.jobs.send_timeout(now, LOOK_UP) {
                Err(SendTimeoutError::Timeout(back)) => {
                    job = Some(back);
                    false
                }
                Ok(()) | Err(SendTimeoutError::Disconnected(_)) => true,
            }
        });
    }

    /// Repeats `done` until it returns true. After a stop of the run, it gives up after [`GRACE`].
    fn wait(&self, mut done: impl FnMut() -> bool) {
        let mut since = None;
        while !done() {
            if self.gave_up.load(Ordering::Relaxed) {
                return;
            }
            if self.stopping.load(Ordering::Relaxed)
                && since.get_or_insert_with(Instant::now).elapsed() >= GRACE
            {
                self.gave_up.store(true, Ordering::Relaxed);
            }
        }
    }

    const fn new(jobs: Sender<Job>, stopping: Arc<AtomicBool>) -> Self {
        let (gave_up, dropped) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { jobs, stopping, gave_up, dropped }
    }

    fn log(&self, line: &[u8], patience: Duration) {
        if self.jobs.send_timeout(Job::Bytes(line.to_vec()), patience).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Line about the log lines dropped since the last call; empty if there are none.
    fn lost(&self) -> String {
        match self.dropped.swap(0, Ordering::Relaxed) {
            0 => String::new(),
            lines => {
                format!("the log lacks {}: nobody read stderr in time\n", counted(lines, "line"))
            }
        }
    }
}

/// Writer for lines of progress. A line that cannot be queued immediately is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queue;

impl Write for Queue {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        offer(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writer for the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log;

impl MakeWriter<'_> for Log {
    type Writer = LogLine;

    fn make_writer(&self) -> LogLine {
        LogLine { patience: patience(Level::ERROR) }
    }

    fn make_writer_for(&self, meta: &Metadata<'_>) -> LogLine {
        LogLine { patience: patience(*meta.level()) }
    }
}

/// Time that a log line waits for the reader before it is dropped. Ranks write log lines too.
fn patience(level: Level) -> Duration {
    if level <= Level::WARN { Duration::from_secs(1) } else { Duration::ZERO }
}

/// Writer for one line of the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogLine {
    patience: Duration,
}

impl Write for LogLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match THREAD.get() {
            Some(Some(thread)) => thread.log(bytes, self.patience),
            _ => write(bytes),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_stalls_is_waited_for_only_once_and_by_nobody_who_trains() {
        let (jobs, unread) = crossbeam_channel::bounded(1);
        let stuck = Thread::new(jobs, Arc::new(AtomicBool::new(true)));
        (0..3).for_each(|_| stuck.offer(Job::Bytes(b"progress".to_vec())));
        assert!(!stuck.gave_up.load(Ordering::Relaxed), "nobody waited");
        let since = Instant::now();
        stuck.put(Job::Bytes(b"last words".to_vec()));
        assert!(since.elapsed() >= GRACE && stuck.gave_up.load(Ordering::Relaxed));
        stuck.put(Job::Bytes(b"more of them".to_vec()));
        assert_eq!(unread.len(), 1, "the first line waits for its reader");
    }

    #[test]
    fn only_warnings_wait_for_a_reader_and_dropped_lines_are_counted_once() {
        assert!(patience(Level::ERROR) > Duration::ZERO && patience(Level::WARN) > Duration::ZERO);
        let hasty = [Level::INFO, Level::DEBUG, Level::TRACE].map(patience);
        assert_eq!(hasty, [Duration::ZERO; 3]);
        let (jobs, unread) = crossbeam_channel::bounded(1);
        let stuck = Thread::new(jobs, Arc::default());
        assert_eq!(stuck.lost(), "");
        (0..4).for_each(|_| stuck.log(b"a phase\n", Duration::ZERO));
        assert_eq!(unread.len(), 1);
        assert!(stuck.lost().starts_with("the log lacks 3 lines"));
        assert_eq!(stuck.lost(), "");
    }
}
