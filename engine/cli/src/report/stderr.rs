//! Stderr, written by a thread of its own while a run trains: a reader that stalls holds up neither training nor, once
//! the run was told to stop, its end.
//!
//! On a terminal a status may stand below all that is written. The cursor waits at its first column, so that one order
//! erases it all, whatever rows a terminal that was made narrower has broken it into.

use crossbeam_channel::{RecvTimeoutError, SendTimeoutError, Sender};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use topology::counted;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Pieces that wait for the reader. More are dropped.
const ROOM: usize = 256;
/// A run that was told to stop waits for the reader at most so long.
const GRACE: Duration = Duration::from_secs(3);
/// A waiting thread looks so often whether the run was told to stop.
const LOOK_UP: Duration = Duration::from_millis(50);

/// A status, as a terminal of so many columns shows it.
pub(crate) type Status = Box<dyn Fn(usize) -> String + Send>;

enum Job {
    /// Whole lines; none draw the status again.
    Bytes(Vec<u8>),
    Status(Option<Status>),
    /// To be answered when all before it is written.
    Flush(Sender<()>),
}

struct Thread {
    jobs: Sender<Job>,
    /// The run was told to stop.
    told: Arc<AtomicBool>,
    /// The reader did not come in time: nobody waits for it again.
    gave_up: AtomicBool,
    /// Lines of the log that the reader did not take in time, and that nobody was told of.
    dropped: AtomicU64,
}

/// None: no thread could be started, so the caller writes by itself.
static THREAD: OnceLock<Option<Thread>> = OnceLock::new();

/// From now on a thread writes. `told`: the run was told to stop.
pub(crate) fn by_thread(told: &Arc<AtomicBool>) {
    let _ = THREAD.get_or_init(|| {
        let (jobs, queue) = crossbeam_channel::bounded(ROOM);
        let started = std::thread::Builder::new().name("stderr".into());
        started.spawn(move || queue.into_iter().for_each(Job::run)).ok()?;
        Some(Thread::new(jobs, Arc::clone(told)))
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

    /// Soon. Dropped where too much waits for the reader.
    fn offer(self) {
        match THREAD.get() {
            Some(Some(thread)) => thread.offer(self),
            _ => self.run(),
        }
    }

    /// Soon, and never dropped.
    fn put(self) {
        match THREAD.get() {
            Some(Some(thread)) => thread.put(self),
            _ => self.run(),
        }
    }
}

/// What stands below all that is written.
static STATUS: Mutex<Option<Status>> = Mutex::new(None);

/// From the cursor, in the status's first column, to the end of the screen.
const ERASE: &str = "\r\x1b[J";

fn shown() -> MutexGuard<'static, Option<Status>> {
    STATUS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ignores errors: nobody may be reading any more.
fn write(bytes: &[u8]) {
    let status = shown();
    let mut all = Vec::new();
    if status.is_some() {
        all.extend_from_slice(ERASE.as_bytes());
    }
    all.extend_from_slice(bytes);
    if let Some(status) = &*status {
        // Cut, not broken, where the terminal has become narrower meanwhile.
        all.extend_from_slice(format!("\x1b[?7l{}\x1b[?7h\r", status(width())).as_bytes());
    }
    let mut out = io::stderr().lock();
    let _ = out.write_all(&all).and_then(|()| out.flush());
}

/// The process ends at once: who draws a status meanwhile draws none.
static LEAVES: AtomicBool = AtomicBool::new(false);

fn show(status: Option<Status>) {
    let erased = shown().take().map_or("", |_| ERASE);
    *shown() = status.filter(|_| !LEAVES.load(Ordering::SeqCst));
    write(erased.as_bytes());
}

/// Columns of the terminal.
pub(crate) fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stderr());
    size.map_or(80, |size| if size.ws_col == 0 { 80 } else { usize::from(size.ws_col) })
}

/// Shows a status soon, for the one before. Dropped where too much waits for the reader.
pub(crate) fn status(status: Status) {
    Job::Status(Some(status)).offer();
}

/// Draws the status again, as for another width.
pub(crate) fn redraw() {
    offer(Vec::new());
}

/// No status from now on.
pub(crate) fn clear() {
    Job::Status(None).put();
}

/// The same before the process ends at once: the reader is hardly waited for.
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

/// Writes soon. Dropped where too much waits for the reader.
pub(crate) fn offer(bytes: Vec<u8>) {
    Job::Bytes(bytes).offer();
}

/// Writes a line, and returns when it has gone out with all before it.
pub(crate) fn line(text: &str) {
    Job::Bytes(format!("{text}\n").into_bytes()).put();
    flush();
}

/// Says once how many lines of the log were dropped.
pub(crate) fn say_lost() {
    if let Some(Some(thread)) = THREAD.get() {
        let lost = thread.lost();
        if !lost.is_empty() {
            thread.put(Job::Bytes(lost.into_bytes()));
        }
    }
}

/// Returns when all has gone out, or the reader does not come in time.
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

    /// Tries until it is done. Once the run was told to stop, for as long as is granted.
    fn wait(&self, mut done: impl FnMut() -> bool) {
        let mut since = None;
        while !done() {
            if self.gave_up.load(Ordering::Relaxed) {
                return;
            }
            if self.told.load(Ordering::Relaxed)
                && since.get_or_insert_with(Instant::now).elapsed() >= GRACE
            {
                self.gave_up.store(true, Ordering::Relaxed);
            }
        }
    }

    const fn new(jobs: Sender<Job>, told: Arc<AtomicBool>) -> Self {
        let (gave_up, dropped) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { jobs, told, gave_up, dropped }
    }

    fn log(&self, line: &[u8], patience: Duration) {
        if self.jobs.send_timeout(Job::Bytes(line.to_vec()), patience).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A line about what was dropped, the first time after it; otherwise nothing.
    fn lost(&self) -> String {
        match self.dropped.swap(0, Ordering::Relaxed) {
            0 => String::new(),
            lines => {
                format!("the log lacks {}: nobody read stderr in time\n", counted(lines, "line"))
            }
        }
    }
}

/// For lines of progress: what cannot be taken at once is dropped.
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

/// For the log.
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

/// How long a line of the log waits for the reader before it is dropped: ranks write it too.
fn patience(level: Level) -> Duration {
    if level <= Level::WARN { Duration::from_secs(1) } else { Duration::ZERO }
}

/// For one line of the log.
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
    fn only_warnings_wait_for_a_reader_and_what_is_dropped_is_said_once() {
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
