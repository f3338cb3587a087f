//! The processes of a run, each with ranks of its own, and their messages.
//!
//! Messages between two processes arrive in the order in which one thread sent them. Each process
//! sends a heartbeat several times a second. A process that is silent for too long has failed.

use super::patience::Patience;
use super::wire::Message;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// A transport for messages to other processes.
pub trait Wire: Send + Sync + std::fmt::Debug {
    /// Sends `bytes` to process `to` and returns immediately. Messages of one thread to one process
    /// keep their order, but an `urgent` message may overtake others.
    fn send(&self, to: usize, bytes: Vec<u8>, urgent: bool);

    /// Closes the wire: in order, with all processes, or by aborting all with exit code `abort`.
    fn close(&self, abort: Option<u8>);
}

/// A world's handler of messages and of lost processes.
pub(crate) trait MessageHandler: Send + Sync + std::fmt::Debug {
    /// Handles a message to this world from process `from`.
    fn hear(&self, from: usize, bytes: Vec<u8>);

    /// Ends the run since `process` is lost: silent for `silent` seconds, or ended (`None`).
    fn lose(&self, process: usize, silent: Option<u64>);

    /// Whether a rank of this process waits for something outside the run.
    fn is_held_up(&self) -> bool;

    /// The ranks of this process whose GPUs wait in a collective.
    fn gpus_held_up(&self) -> Vec<u64>;

    /// Sets `gpus`, the ranks of process `from` whose GPUs wait in a collective.
    fn hold_gpus_up(&self, from: usize, gpus: &[u64]);
}

/// A lost process, with the seconds of its silence, or `None` if it has ended.
type Loss = (usize, Option<u64>);

/// The processes of a run, from the view of one process.
#[derive(Debug)]
pub struct Processes {
    me: usize,
    nodes: Vec<String>,
    wire: Box<dyn Wire>,
    silence: Duration,
    table: Mutex<CommunicatorTable>,
    changed: Condvar,
    /// Per process: number of messages received from it.
    heard: Vec<AtomicU64>,
    /// Per process: whether one of its ranks waits for something outside the run.
    held_up: Vec<AtomicBool>,
}

#[derive(Debug, Default)]
struct CommunicatorTable {
    /// The world of the present run, which is the only one that can fail.
    world: Option<Weak<dyn MessageHandler>>,
    /// Number of worlds that this process has made.
    worlds: u64,
    /// Sender and bytes of messages to a world that does not exist yet in this process, or that
    /// still gets its earlier messages.
    early: VecDeque<(usize, Vec<u8>)>,
    /// Whether `early` has no message to the present world.
    caught_up: bool,
    /// Number of exchanges that this process has begun.
    turns: u64,
    /// By turn and sender: the subject and the bytes of a contribution.
    contributions: HashMap<(u64, usize), (String, Vec<u8>)>,
    /// Exit codes of the processes that have ended.
    gone: HashMap<usize, u8>,
    lost: Option<Loss>,
}

impl CommunicatorTable {
    fn world(&self) -> Option<Arc<dyn MessageHandler>> {
        self.world.as_ref()?.upgrade()
    }
}

/// Interval of a process's heartbeats, and of its checks that the others live.
pub(crate) const LOOK: Duration = Duration::from_millis(200);

/// Time that an ending process waits for the other processes after a failure.
const FAREWELL: Duration = Duration::from_secs(10);

impl Processes {
    /// The processes of a run, as process `me`. `nodes` has the machine name of each process. A
    /// process that sends nothing for `silence` has failed.
    pub fn new(me: usize, nodes: Vec<String>, wire: Box<dyn Wire>, silence: Duration) -> Arc<Self> {
        let count = nodes.len();
        Arc::new(Self {
            me,
            nodes,
            wire,
            silence,
            table: Mutex::default(),
            changed: Condvar::new(),
            heard: (0..count).map(|_| AtomicU64::new(0)).collect(),
            held_up: (0..count).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    /// The number of this process.
    pub const fn me(&self) -> usize {
        self.me
    }

    /// Number of processes.
    pub const fn count(&self) -> usize {
        self.nodes.len()
    }

    /// The name of the machine of `process`.
    pub fn node(&self, process: usize) -> &str {
        &self.nodes[process]
    }

    /// Processes on this machine, in order.
    pub fn on_this_node(&self) -> Vec<usize> {
        let here = |process: &usize| self.nodes[*process] == self.nodes[self.me];
        (0..self.count()).filter(here).collect()
    }

    /// The ranks of `process`, if `world_size` ranks are divided among the processes in order.
    pub const fn ranks(&self, process: usize, world_size: usize) -> Range<usize> {
        let each = world_size / self.count();
        process * each..(process + 1) * each
    }

    /// The process's name in messages, such as `process 1 on node7`.
    pub fn name(&self, process: usize) -> String {
        format!("process {process} on {}", self.nodes[process])
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let me = self.me;
        (0..self.count()).filter(move |other| *other != me)
    }

    fn table(&self) -> MutexGuard<'_, CommunicatorTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a rank of another process waits for something outside the run.
    pub(crate) fn any_held_up(&self) -> bool {
        self.held_up.iter().any(|held_up| held_up.load(Ordering::Relaxed))
    }

    pub(crate) fn send(&self, to: usize, message: &Message<'_>) {
        let urgent = matches!(message, Message::Heartbeat { .. } | Message::Failed { .. });
        self.wire.send(to, message.encode(), urgent);
    }

    /// Sends a message to all other processes.
    pub(crate) fn send_all(&self, message: &Message<'_>) {
        self.others().for_each(|to| self.send(to, message));
    }

    /// Sends a heartbeat to all other processes. The wire calls it several times a second.
    pub fn beat(&self) {
        let world = self.table().world();
        let held_up = world.as_ref().is_some_and(|world| world.is_held_up());
        let gpus = world.map_or_else(Vec::new, |world| world.gpus_held_up());
        self.send_all(&Message::Heartbeat { held_up, gpus });
    }

    /// Makes `world` the receiver of messages, and returns its number. All processes enter their
    /// worlds in the same order.
    pub(crate) fn enter(&self, world: &Arc<dyn MessageHandler>) -> u64 {
        let mut rooms = self.table();
        rooms.world = Some(Arc::downgrade(world));
        rooms.worlds += 1;
        rooms.caught_up = false;
        rooms.worlds
    }

    /// Gives the world the messages that arrived before it existed.
    pub(crate) fn catch_up(&self, world: &dyn MessageHandler) {
        loop {
            let mut rooms = self.table();
            let Some((from, bytes)) = rooms.early.pop_front() else {
                rooms.caught_up = true;
                break;
            };
            drop(rooms);
            world.hear(from, bytes);
        }
        let lost = self.table().lost;
        if let Some((process, silent)) = lost {
            world.lose(process, silent);
        }
    }

    /// Handles a message from process `from`. The wire calls it.
    pub fn hear(&self, from: usize, bytes: Vec<u8>) {
        self.heard[from].fetch_add(1, Ordering::Relaxed);
        let Some(message) = Message::decode(&bytes) else {
            unreachable!("a message from {} is cut: MPI delivers whole messages", self.name(from))
        };
        match message {
            Message::Heartbeat { held_up, gpus } => {
                self.held_up[from].store(held_up, Ordering::Relaxed);
                let world = self.table().world();
                if let Some(world) = world {
                    world.hold_gpus_up(from, &gpus);
                }
            }
            Message::Contribution { turn, what, bytes } => {
                let word = (what.to_owned(), bytes.to_owned());
                self.table().contributions.insert((turn, from), word);
                self.changed.notify_all();
            }
            Message::Exit { code } => {
                self.table().gone.insert(from, code);
                self.changed.notify_all();
            }
            Message::Arrival { world, .. }
            | Message::Data { world, .. }
            | Message::Failed { world, .. } => {
                if let Some(present) = self.world_of(world, from, &bytes) {
                    present.hear(from, bytes);
                }
            }
        }
    }

    /// The world of this number, for a message. `None` if the world does not accept messages yet,
    /// so that the message is kept, or if the world has ended.
    fn world_of(&self, number: u64, from: usize, bytes: &[u8]) -> Option<Arc<dyn MessageHandler>> {
        let mut rooms = self.table();
        if number > rooms.worlds || (number == rooms.worlds && !rooms.caught_up) {
            rooms.early.push_back((from, bytes.to_owned()));
            return None;
        }
        rooms.world().filter(|_| number == rooms.worlds)
    }

    /// Sends `bytes` about `what` to all processes, and returns the bytes of each process. All
    /// processes call it in the same order, each on one thread.
    ///
    /// # Errors
    /// A process is lost or calls it with another `what`; the text says which.
    pub fn exchange(&self, what: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, String> {
        let turn = {
            let mut rooms = self.table();
            rooms.turns += 1;
            rooms.turns
        };
        self.send_all(&Message::Contribution { turn, what, bytes: &bytes });
        let mut own = Some(bytes);
        (0..self.count())
            .map(|from| match own.take_if(|_| from == self.me) {
                Some(own) => Ok(own),
                None => self.contribution(from, turn, what),
            })
            .collect()
    }

    fn contribution(&self, from: usize, turn: u64, what: &str) -> Result<Vec<u8>, String> {
        let mut rooms = self.table();
        loop {
            if let Some((about, bytes)) = rooms.contributions.remove(&(turn, from)) {
                let other = || format!("{} asks for `{about}`, not `{what}`", self.name(from));
                return if about == what { Ok(bytes) } else { Err(other()) };
            }
            if let Some(lost) = rooms.lost {
                return Err(self.loss(lost));
            }
            if rooms.gone.contains_key(&from) {
                return Err(self.loss((from, None)));
            }
            rooms = self.changed.wait_timeout(rooms, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    fn loss(&self, (process, silent): Loss) -> String {
        let name = self.name(process);
        match silent {
            Some(seconds) => format!("no sign of life for {seconds} s from {name}"),
            None => format!("{name} has ended before the others; it says why"),
        }
    }

    /// Waits for the end of process 0 and returns its exit code, with which all processes end.
    /// `None` if process 0 is lost.
    pub fn await_first(&self) -> Option<u8> {
        let mut rooms = self.table();
        loop {
            if let Some(code) = rooms.gone.get(&0) {
                return Some(*code);
            }
            if rooms.lost.is_some_and(|(lost, _)| lost == 0) {
                return None;
            }
            rooms = self.changed.wait_timeout(rooms, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Whether `process` has been silent for too long, or has ended before the run.
    pub fn is_lost(&self, process: usize) -> bool {
        self.table().lost.is_some_and(|(lost, _)| lost == process)
    }

    /// The exit code of the lowest-numbered process that has ended.
    pub fn ended(&self) -> Option<u8> {
        let rooms = self.table();
        let first = rooms.gone.iter().min_by_key(|(process, _)| **process);
        first.map(|(_, code)| *code)
    }

    /// Watches the other processes until one of them is lost or `ended` is set. A thread of the
    /// wire runs it.
    pub fn watch(&self, ended: &AtomicBool) {
        let mut silent: Vec<(u64, Duration)> = vec![(0, Duration::ZERO); self.count()];
        let mut patience = Patience::new();
        let mut before = Duration::ZERO;
        while !ended.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
            let now = patience.waited();
            let passed = now - std::mem::replace(&mut before, now);
            for other in self.others() {
                let heard = self.heard[other].load(Ordering::Relaxed);
                let (known, since) = &mut silent[other];
                *since = if *known == heard { *since + passed } else { Duration::ZERO };
                *known = heard;
            }
            let gone: Vec<usize> = self.table().gone.keys().copied().collect();
            let living = self.others().filter(|other| !gone.contains(other));
            // The longest silent process: others may be silent only because they wait for it.
            let worst = living.max_by_key(|other| silent[*other].1);
            if let Some(worst) = worst.filter(|worst| silent[*worst].1 >= self.silence) {
                return self.lose((worst, Some(silent[worst].1.as_secs())));
            }
            if let Some(early) = gone.first().copied()
                && self.table().world().is_some()
            {
                return self.lose((early, None));
            }
        }
    }

    fn lose(&self, lost: Loss) {
        self.table().lost = Some(lost);
        self.changed.notify_all();
        let world = self.table().world();
        if let Some(world) = world {
            world.lose(lost.0, lost.1);
        }
    }

    /// Sends this process's exit code to the others, and waits until they end too. If a process
    /// does not end, returns a text that names it, and [`close`](Self::close) must then abort.
    pub fn part(&self, code: u8) -> Option<String> {
        self.send_all(&Message::Exit { code });
        let mut patience = Patience::new();
        let mut rooms = self.table();
        loop {
            let mut left = self.others().filter(|other| !rooms.gone.contains_key(other));
            let next = left.next()?;
            if let Some(lost) = rooms.lost {
                // Waits for the exit codes of the remaining processes too.
                let only = left.all(|other| other == lost.0) && next == lost.0;
                if only || patience.waited() >= FAREWELL {
                    return Some(self.loss(lost));
                }
            }
            let failed = code != 0 || rooms.gone.values().any(|code| *code != 0);
            if failed && patience.waited() >= FAREWELL {
                return Some(format!("{} does not end", self.name(next)));
            }
            rooms = self.changed.wait_timeout(rooms, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Closes the wire after [`part`](Self::part): in order, or by aborting all with this exit
    /// code.
    pub fn close(&self, abort: Option<u8>) {
        self.wire.close(abort);
    }
}

/// Wire between threads that act as processes, for tests. A message arrives inside `send`.
#[derive(Debug)]
struct ThreadWire {
    me: usize,
    all: Arc<Mutex<Vec<Weak<Processes>>>>,
}

impl Wire for ThreadWire {
    fn send(&self, to: usize, bytes: Vec<u8>, _urgent: bool) {
        let to = self.all.lock().unwrap_or_else(PoisonError::into_inner)[to].upgrade();
        if let Some(to) = to {
            to.hear(self.me, bytes);
        }
    }

    fn close(&self, _abort: Option<u8>) {}
}

impl Processes {
    /// `count` processes that are threads of this process, for tests.
    pub fn in_threads(count: usize) -> Vec<Arc<Self>> {
        let all = Arc::new(Mutex::new(Vec::new()));
        let nodes: Vec<String> = (0..count).map(|node| format!("node{node}")).collect();
        let process = |me| {
            let wire = Box::new(ThreadWire { me, all: Arc::clone(&all) });
            Self::new(me, nodes.clone(), wire, Duration::from_secs(3600))
        };
        let made: Vec<_> = (0..count).map(process).collect();
        *all.lock().unwrap_or_else(PoisonError::into_inner) =
            made.iter().map(Arc::downgrade).collect();
        made
    }
}
