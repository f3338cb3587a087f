//! Watches collectives. An NCCL collective that never ends causes no error: its kernel spins. One
//! thread per rank checks the started collectives. If one takes too long, the thread ends the run
//! with the name of the missing rank and aborts.

use super::driver::{Context, Event, Failure, Stream};
use super::memory::Peers;
use super::nccl::NcclCommunicator;
use crate::error::Site;
use crate::ranks::communicator::DOUBT;
use crate::ranks::patience::Patience;
use crate::ranks::rank_state::RankState;
use crate::{AdmittedOp, Error, Group};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Largest number of collectives under watch, far more than a rank's thread enqueues ahead. Further
/// collectives are not watched.
pub(super) const WATCHED: usize = 256;
/// With this many unused pairs of events, `ends` wakes the thread to remove ended collectives.
/// Otherwise only the clock wakes it.
const FEW: usize = WATCHED / 4;
/// Time between two checks.
const LOOK: Duration = Duration::from_millis(50);
/// Longest wait for an abort. A slower abort continues in its own thread.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time in which collectives may still finish after another rank has failed.
const GRACE: Duration = Duration::from_millis(500);

#[derive(Clone, Debug)]
struct Entry {
    op: &'static str,
    site: Site,
    group: Group,
    /// Number of the collective among the group's collectives.
    number: u64,
    events: Arc<Events>,
    /// Whether both events are recorded.
    enqueued: bool,
    /// Start of the collective on the watching thread's clock.
    started: Option<Duration>,
}

/// Events before and after a collective.
#[derive(Debug)]
struct Events {
    starts: Event,
    ends: Event,
}

#[derive(Debug)]
struct State {
    /// Watched collectives by group, in order: a group uses one stream, so they run one by one.
    under_way: [VecDeque<Entry>; 2],
    unused: Vec<Arc<Events>>,
    /// Number of enqueued collectives by group.
    numbers: [u64; 2],
    closed: bool,
}

struct Watch {
    shared: Arc<RankState>,
    gpu: usize,
    peers: Arc<Peers>,
    communicators: Vec<Arc<NcclCommunicator>>,
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct Watchdog {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watchdog").field("gpu", &self.watch.gpu).finish_non_exhaustive()
    }
}

impl Watchdog {
    /// Starts the thread on the bound context.
    pub(super) fn start(
        shared: &Arc<RankState>,
        gpu: usize,
        peers: &Arc<Peers>,
        communicators: &[Option<Arc<NcclCommunicator>>],
    ) -> Result<Self, String> {
        let pair = |_| Ok(Arc::new(Events { starts: Event::new()?, ends: Event::new()? }));
        let unused: Result<Vec<_>, Failure> = (0..WATCHED).map(pair).collect();
        let state = State {
            under_way: [0, 1].map(|_| VecDeque::with_capacity(WATCHED)),
            unused: unused?,
            numbers: [0; 2],
            closed: false,
        };
        let watch = Arc::new(Watch {
            shared: Arc::clone(shared),
            gpu,
            peers: Arc::clone(peers),
            communicators: communicators.iter().flatten().cloned().collect(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let (watching, name) = (Arc::clone(&watch), format!("watch {}", shared.rank.index()));
        let thread = std::thread::Builder::new().name(name).spawn(move || watching.run());
        let thread = thread.map_err(|e| format!("no thread to watch collectives: {e}"))?;
        Ok(Self { watch, thread: Some(thread) })
    }

    /// Records that a collective is about to be enqueued on `stream`.
    pub(super) fn starts(
        &self,
        stream: &Stream,
        op: &AdmittedOp,
        group: Group,
    ) -> Result<(), Failure> {
        let mut state = self.watch.lock();
        let number = &mut state.numbers[group as usize];
        *number += 1;
        let number = *number;
        let Some(events) = state.unused.pop() else { return Ok(()) };
        stream.record(&events.starts)?;
        let (op, site, started) = (op.op.name(), op.site, None);
        let entry = Entry { op, site, group, number, events, enqueued: false, started };
        state.under_way[group as usize].push_back(entry);
        Ok(())
    }

    /// Records that the collective is enqueued.
    pub(super) fn ends(&self, stream: &Stream, group: Group) -> Result<(), Failure> {
        let mut state = self.watch.lock();
        let wakes = state.is_idle_but_one() || state.unused.len() == FEW;
        if let Some(entry) = state.under_way[group as usize].back_mut()
            && !entry.enqueued
        {
            stream.record(&entry.events.ends)?;
            entry.enqueued = true;
        }
        drop(state);
        if wakes {
            self.watch.changed.notify_one();
        }
        Ok(())
    }

    /// Ends all collectives in progress, within seconds.
    pub(super) fn abort(&self) {
        abort_all(self.watch.communicators.iter());
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.watch.lock().closed = true;
        self.watch.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.under_way.iter().all(VecDeque::is_empty)
    }

    /// Whether only the newest collective is under watch, so that the thread may be asleep.
    fn is_idle_but_one(&self) -> bool {
        self.under_way.iter().map(VecDeque::len).sum::<usize>() == 1
    }
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        crate::threads::panics::watch_this_thread();
        let bound = Context::of(self.gpu).and_then(|context| context.bind());
        let (mut failed_since, mut patience) = (None, Patience::new());
        let mut state = self.lock();
        while !state.closed && bound.is_ok() {
            if state.is_idle() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            let now = patience.waited();
            if self.look(now).is_err() {
                return; // the context is lost; a thread that waits for a stream gets the error
            }
            state = self.lock();
            if let Some(error) = self.overdue(&state, now) {
                drop(state);
                self.shared.fail(&error);
                abort_all(self.communicators.iter());
                return;
            }
            if self.shared.world.failed() {
                let since = *failed_since.get_or_insert_with(Instant::now);
                if since.elapsed() > GRACE && !state.is_idle() {
                    drop(state);
                    abort_all(self.communicators.iter());
                    return;
                }
            }
            state =
                self.changed.wait_timeout(state, LOOK).map_or_else(|e| e.into_inner().0, |w| w.0);
        }
    }

    /// Removes finished collectives and records the starts of others. It queries the driver without
    /// the lock, so that the thread that enqueues collectives does not wait.
    fn look(&self, now: Duration) -> Result<(), Failure> {
        let mut held_up = false;
        for group in 0..2 {
            while let Some(first) = self.first(group) {
                if first.events.ends.has_passed()? {
                    self.note_start(&first);
                    let mut state = self.lock();
                    state.under_way[group].pop_front();
                    state.unused.push(first.events);
                    continue;
                }
                if first.started.is_some() {
                    held_up = true;
                } else if first.events.starts.has_passed()? {
                    held_up = true;
                    self.note_start(&first);
                    if let Some(first) = self.lock().under_way[group].front_mut() {
                        first.started = Some(now);
                    }
                }
                break;
            }
        }
        self.shared.world.hold_gpu_up(self.shared.rank.index(), held_up);
        Ok(())
    }

    /// The first watched collective of a group, if its events are recorded. Only this thread
    /// removes it.
    fn first(&self, group: usize) -> Option<Entry> {
        self.lock().under_way[group].front().filter(|entry| entry.enqueued).cloned()
    }

    fn note_start(&self, entry: &Entry) {
        if let Some(peer) = self.peers.peer(self.shared.rank.index()) {
            peer.started[entry.group as usize].fetch_max(entry.number, Ordering::SeqCst);
        }
    }

    /// The error of a collective that takes too long or has failed.
    fn overdue(&self, state: &State, now: Duration) -> Option<Error> {
        let rank = self.shared.rank;
        let firsts = state.under_way.iter().filter_map(VecDeque::front);
        let oldest = firsts.filter(|entry| entry.started.is_some()).min_by_key(|e| e.started)?;
        let (op, site) = (oldest.op, oldest.site);
        let gpu = self.gpu;
        let named = |problem| Error::Gpu { rank: rank.index(), gpu, op, site, problem };
        if let Some(problem) = self.communicators.iter().find_map(|comm| comm.check().err()) {
            return Some(named(problem));
        }
        let timeout = self.shared.world.timeout();
        let waited = now.saturating_sub(oldest.started?);
        if waited < timeout {
            return None;
        }
        let missing: Vec<usize> = (0..rank.within(oldest.group).1)
            .map(|i| rank.member(oldest.group, i))
            .filter(|&index| {
                let peer = self.peers.peer(index);
                let started = &peer.map(|p| &p.started[oldest.group as usize]);
                started.is_none_or(|s| s.load(Ordering::SeqCst) < oldest.number)
            })
            .collect();
        let seconds = timeout.as_secs();
        if missing.is_empty() {
            let problem = format!("all ranks have started it, and it has not ended in {seconds} s");
            return Some(named(problem));
        }
        let held_up = |index: &usize| self.shared.world.is_gpu_held_up(*index);
        let free: Vec<usize> = missing.iter().copied().filter(|index| !held_up(index)).collect();
        let missing = match free.is_empty() {
            true if waited < timeout + DOUBT => return None,
            true => missing,
            false => free,
        };
        Some(Error::Timeout { rank: rank.index(), op, site, seconds, missing })
    }
}

/// Aborts each communicator in its own thread: the library may block until the communicator's
/// stream is empty, and the other communicator's collective may be earlier in that stream.
pub(super) fn abort_all<'a>(communicators: impl Iterator<Item = &'a Arc<NcclCommunicator>>) {
    let (sender, aborted) = std::sync::mpsc::channel();
    let start = |comm: &Arc<NcclCommunicator>| {
        let (comm, sender) = (Arc::clone(comm), sender.clone());
        let aborter = std::thread::Builder::new().name("abort".into());
        let abort = move || {
            comm.abort();
            let _ = sender.send(());
        };
        aborter.spawn(abort).is_ok()
    };
    let started = communicators.filter(|comm| start(comm)).count();
    let since = Instant::now();
    for _ in 0..started {
        if aborted.recv_timeout(PATIENCE.saturating_sub(since.elapsed())).is_err() {
            return;
        }
    }
}
