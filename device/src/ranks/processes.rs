//! The processes of a run, each with ranks of its own, and what they tell each other.
//!
//! Messages between two processes arrive in the order in which one thread sent them. Each process
//! says several times a second that it lives. One that says nothing for long has failed.

use super::patience::Patience;
use super::wire::Message;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The way of messages to other processes.
pub trait Wire: Send + Sync + std::fmt::Debug {
    /// Sends `bytes` to process `to`; returns at once. Messages of one thread to one process keep
    /// their order. `urgent`: it may overtake others.
    fn send(&self, to: usize, bytes: Vec<u8>, urgent: bool);

    /// Closes the wire: in order, with all others, or by ending all processes with this exit code.
    fn close(&self, abort: Option<u8>);
}

/// A world, as the processes know it.
pub(crate) trait MessageHandler: Send + Sync + std::fmt::Debug {
    /// Takes a message of process `from`, which is to this world.
    fn hear(&self, from: usize, bytes: Vec<u8>);

    /// Ends the run because `process` is lost: it was silent for `silent` seconds, or it has ended (`None`).
    fn lose(&self, process: usize, silent: Option<u64>);

    /// Something outside the run holds a rank of this process up.
    fn is_held_up(&self) -> bool;

    /// The ranks of this process whose GPUs wait in a collective.
    fn gpus_held_up(&self) -> Vec<u64>;

    /// The ranks of process `from` whose GPUs do.
    fn hold_gpus_up(&self, from: usize, gpus: &[u64]);
}

/// A process that is lost: since how many seconds it was silent, or `None` if it has ended.
type Loss = (usize, Option<u64>);

/// The processes of a run, as one of them sees them.
#[derive(Debug)]
pub struct Processes {
    me: usize,
    nodes: Vec<String>,
    wire: Box<dyn Wire>,
    silence: Duration,
    table: Mutex<CommunicatorTable>,
    turned: Condvar,
    /// By process: messages that came from it.
    heard: Vec<AtomicU64>,
    /// By process: something outside the run holds one of its ranks up.
    held_up: Vec<AtomicBool>,
}

#[derive(Debug, Default)]
struct CommunicatorTable {
    /// The world of the present run, which is the only one that can fail.
    world: Option<Weak<dyn MessageHandler>>,
    /// Number of worlds that this process has made.
    worlds: u64,
    /// Messages to a world that this process has not made yet, or whose earlier messages are being
    /// handed out: sender and bytes.
    early: VecDeque<(usize, Vec<u8>)>,
    /// No such messages are left.
    caught_up: bool,
    /// Number of exchanges that this process has begun.
    turns: u64,
    /// By turn and sender: what it is about, and its bytes.
    contributions: HashMap<(u64, usize), (String, Vec<u8>)>,
    /// By process: the exit code with which it has ended.
    gone: HashMap<usize, u8>,
    lost: Option<Loss>,
}

impl CommunicatorTable {
    fn world(&self) -> Option<Arc<dyn MessageHandler>> {
        self.world.as_ref()?.upgrade()
    }
}

/// Interval at which a process looks whether the others live.
pub(crate) const LOOK: Duration = Duration::from_millis(200);

/// How long a process that ends waits for the others, after a failure.
const FAREWELL: Duration = Duration::from_secs(10);

impl Processes {
    /// Process `me` of as many as there are `nodes`, which are the names of their machines. One that
    /// says nothing for `silence` has failed.
    pub fn new(me: usize, nodes: Vec<String>, wire: Box<dyn Wire>, silence: Duration) -> Arc<Self> {
        let count = nodes.len();
        Arc::new(Self {
            me,
            nodes,
            wire,
            silence,
            table: Mutex::default(),
            turned: Condvar::new(),
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

    /// The ranks of `process`, of `world_size` that are dealt in order.
    pub const fn ranks(&self, process: usize, world_size: usize) -> Range<usize> {
        let each = world_size / self.count();
        process * each..(process + 1) * each
    }

    /// `process 1 on node7`
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

    /// Something outside the run holds a rank of another process up.
    pub(crate) fn any_held_up(&self) -> bool {
        self.held_up.iter().any(|held_up| held_up.load(Ordering::Relaxed))
    }

    pub(crate) fn send(&self, to: usize, message: &Message<'_>) {
        let urgent = matches!(message, Message::Heartbeat { .. } | Message::Failed { .. });
        self.wire.send(to, message.encode(), urgent);
    }

    /// To all others.
    pub(crate) fn send_all(&self, message: &Message<'_>) {
        self.others().for_each(|to| self.send(to, message));
    }

    /// Tells all others that this process lives. The wire calls it several times a second.
    pub fn beat(&self) {
        let world = self.table().world();
        let held_up = world.as_ref().is_some_and(|world| world.is_held_up());
        let gpus = world.map_or_else(Vec::new, |world| world.gpus_held_up());
        self.send_all(&Message::Heartbeat { held_up, gpus });
    }

    /// Takes the messages of a new world; all processes make theirs in the same order. Its number.
    pub(crate) fn enter(&self, world: &Arc<dyn MessageHandler>) -> u64 {
        let mut rooms = self.table();
        rooms.world = Some(Arc::downgrade(world));
        rooms.worlds += 1;
        rooms.caught_up = false;
        rooms.worlds
    }

    /// Hands the messages out that came before the world was made.
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

    /// Takes a message of process `from`. The wire calls it.
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
                self.turned.notify_all();
            }
            Message::Exit { code } => {
                self.table().gone.insert(from, code);
                self.turned.notify_all();
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

    /// The world of this number, for a message; `None` where the message waits for it, or comes late.
    fn world_of(&self, number: u64, from: usize, bytes: &[u8]) -> Option<Arc<dyn MessageHandler>> {
        let mut rooms = self.table();
        if number > rooms.worlds || (number == rooms.worlds && !rooms.caught_up) {
            rooms.early.push_back((from, bytes.to_owned()));
            return None;
        }
        rooms.world().filter(|_| number == rooms.worlds)
    }

    /// Tells all processes `bytes` about `what`, and returns what each of them tells. All call it
    /// in the same order, one thread of each.
    ///
    /// # Errors
    /// A process is lost or asks for something else; the text says which.
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
            rooms = self.turned.wait_timeout(rooms, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    fn loss(&self, (process, silent): Loss) -> String {
        let name = self.name(process);
        match silent {
            Some(seconds) => format!("no sign of life for {seconds} s from {name}"),
            None => format!("{name} has ended before the others; it says why"),
        }
    }

    /// Waits for the end of process 0, which says how all end: its exit code, or `None` if it is lost.
    pub fn await_first(&self) -> Option<u8> {
        let mut rooms = self.table();
        loop {
            if let Some(code) = rooms.gone.get(&0) {
                return Some(*code);
            }
            if rooms.lost.is_some_and(|(lost, _)| lost == 0) {
                return None;
            }
            rooms = self.turned.wait_timeout(rooms, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Whether `process` gives no sign of life, or has ended before the run.
    pub fn is_lost(&self, process: usize) -> bool {
        self.table().lost.is_some_and(|(lost, _)| lost == process)
    }

    /// The exit code of a process that has ended; the first such one's.
    pub fn ended(&self) -> Option<u8> {
        let rooms = self.table();
        let first = rooms.gone.iter().min_by_key(|(process, _)| **process);
        first.map(|(_, code)| *code)
    }

    /// Watches over the others until one is lost, or all have ended, or `ended`. A thread of the
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
            // The first to be silent: others may be silent only because they wait for it.
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
        self.turned.notify_all();
        let world = self.table().world();
        if let Some(world) = world {
            world.lose(lost.0, lost.1);
        }
    }

    /// Tells the others that this process ends with this exit code, and waits until they end, too.
    /// Returns who does not end, in words; [`close`](Self::close) must end it then.
    pub fn part(&self, code: u8) -> Option<String> {
        self.send_all(&Message::Exit { code });
        let mut patience = Patience::new();
        let mut rooms = self.table();
        loop {
            let mut left = self.others().filter(|other| !rooms.gone.contains_key(other));
            let next = left.next()?;
            if let Some(lost) = rooms.lost {
                // The others are to say how they end, too.
                let only = left.all(|other| other == lost.0) && next == lost.0;
                if only || patience.waited() >= FAREWELL {
                    return Some(self.loss(lost));
                }
            }
            let failed = code != 0 || rooms.gone.values().any(|code| *code != 0);
            if failed && patience.waited() >= FAREWELL {
                return Some(format!("{} does not end", self.name(next)));
            }
            rooms = self.turned.wait_timeout(rooms, LOOK).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Closes the wire behind [`part`](Self::part): in order, or by ending all processes with this exit code.
    pub fn close(&self, abort: Option<u8>) {
        self.wire.close(abort);
    }
}

/// Processes that are threads of this one, for tests: messages arrive as they are sent.
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
    /// `count` processes that are threads of this one, for tests.
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
