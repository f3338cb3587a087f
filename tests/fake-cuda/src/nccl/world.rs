//! Worlds of ranks, and their collectives. A rank's job posts its part and waits; the last part
//! starts the work of all ranks. A part that does not match the others is an error that all ranks
//! see. The collective then never completes: as in NCCL, it ends when the communicator is aborted.
#![expect(unsafe_code, reason = "collectives move data between addresses that were checked")]

use std::{
    collections::HashMap,
    ffi::c_int,
    sync::{
        Arc, Condvar, LazyLock, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use super::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS,
    collective::{Collective, CollectiveKind, describe},
    reduce::{Order, reduce},
    remote::{self, RankConnection, RemoteRank},
};
use crate::{
    call::CallResult,
    config::config,
    failure::fails_at,
    health::Health,
    machine::machine,
    overhead,
    stream::Stream,
    sync::{complain, lock, wait_briefly},
};

#[derive(Debug, Default)]
struct Round {
    parts: HashMap<usize, Collective>,
    left: usize,
    done: bool,
    hangs: bool,
}

#[derive(Debug, Default)]
struct Meeting {
    /// Process and device of each rank that has joined.
    joined: HashMap<usize, (u64, usize)>,
    rounds: HashMap<u64, Round>,
    error: c_int,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) ranks: usize,
    /// View of a world that another process owns; the `meeting` here then stays empty.
    away: Option<RemoteRank>,
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

impl World {
    /// The world of a unique id; its first rank creates it.
    pub(super) fn named(id: [u8; 128], ranks: usize) -> Result<Arc<Self>, c_int> {
        static WORLDS: LazyLock<Mutex<HashMap<[u8; 128], Arc<World>>>> =
            LazyLock::new(Mutex::default);
        let away = (!remote::is_here(&id)).then(|| RemoteRank::new(id, ranks));
        let (meeting, changed) = (Mutex::default(), Condvar::new());
        let new = || Arc::new(Self { ranks, away, meeting, changed });
        let world = lock(&WORLDS).entry(id).or_insert_with(new).clone();
        if world.ranks == ranks { Ok(world) } else { Err(INVALID_ARGUMENT) }
    }

    /// Adds a rank on a device of a process.
    pub(super) fn join(&self, rank: usize, device: (u64, usize)) -> Result<(), c_int> {
        let mut meeting = lock(&self.meeting);
        if !config().shared_devices && meeting.joined.values().any(|&d| d == device) {
            complain(&format!("NCCL: two ranks use device {}", device.1));
            return Err(INVALID_USAGE);
        }
        if meeting.joined.insert(rank, device).is_some() {
            complain(&format!("NCCL: rank {rank} joins twice"));
            return Err(INVALID_USAGE);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Adds a rank of this process, to its own world or to the world of another process.
    pub(super) fn enter(
        &self,
        rank: usize,
        device: usize,
    ) -> Result<Option<RankConnection>, c_int> {
        match &self.away {
            Some(away) => away.join(rank, device).map(Some),
            None => self.join(rank, (remote::process(), device)).map(|()| None),
        }
    }

    /// Records that the process of a rank is gone.
    pub(super) fn lose(&self, rank: usize) {
        let text = format!("NCCL: the process of rank {rank} is gone");
        self.fail(&mut lock(&self.meeting), REMOTE_ERROR, &text);
    }

    /// Number of ranks that have joined, and the world's error.
    pub(super) fn state(&self) -> (usize, c_int) {
        let meeting = lock(&self.meeting);
        (meeting.joined.len(), meeting.error)
    }

    fn fail(&self, meeting: &mut Meeting, error: c_int, message: &str) {
        complain(message);
        if meeting.error == SUCCESS {
            meeting.error = error;
        }
    }

    /// Waits for the end of a round with a part of this rank. False if the caller gives up.
    pub(super) fn await_round(&self, sequence: u64, gives_up: &dyn Fn() -> bool) -> bool {
        let mut meeting = lock(&self.meeting);
        while !meeting.rounds.get(&sequence).is_some_and(|round| round.done) {
            if gives_up() {
                return false;
            }
            meeting = wait_briefly(&self.changed, meeting);
        }
        let round = meeting.rounds.entry(sequence).or_default();
        round.left += 1;
        if round.left == self.ranks {
            meeting.rounds.remove(&sequence);
        }
        true
    }

    /// Adds a rank's part; the last part starts the work of all ranks.
    pub(super) fn post(&self, sequence: u64, rank: usize, part: Collective) {
        let mut meeting = lock(&self.meeting);
        let round = meeting.rounds.entry(sequence).or_default();
        let misfit = round.parts.iter().find(|(_, other)| !other.fits(&part));
        let misfit = misfit.map(|(&peer, &other)| (peer, other));
        round.parts.insert(rank, part);
        let number = sequence + 1;
        if let Some((peer, other)) = misfit {
            round.hangs = true;
            let text = format!(
                "NCCL: collective {number} differs: rank {rank} {}, rank {peer} {}",
                describe(&part),
                describe(&other)
            );
            self.fail(&mut meeting, INVALID_USAGE, &text);
            return;
        }
        if fails_at("nccl", number) {
            round.hangs = true;
        }
        if fails_at("nccl-error", number) && !round.hangs {
            round.hangs = true;
            self.fail(&mut meeting, REMOTE_ERROR, "NCCL: a remote error on demand");
            return;
        }
        if !round.hangs && round.parts.len() == self.ranks {
            let parts: Vec<Collective> = (0..self.ranks).map(|r| round.parts[&r]).collect();
            if !config().accounting {
                perform(&parts);
            }
            round.done = true;
            self.changed.notify_all();
        }
    }
}

/// A rank of a world.
#[derive(Debug)]
pub(super) struct Comm {
    pub(super) world: Arc<World>,
    pub(super) rank: usize,
    pub(super) device: usize,
    /// Number of collectives enqueued so far.
    sequence: AtomicU64,
    running: Mutex<usize>,
    idle: Condvar,
    aborted: AtomicBool,
    /// Whether the connections for small and for large collectives exist.
    connected: Mutex<[bool; 2]>,
    /// Connection to the process that owns the world, if that is another process.
    life: Option<RankConnection>,
}

impl Drop for Comm {
    fn drop(&mut self) {
        let [small, large] = *lock(&self.connected);
        let bytes = overhead::JOINED
            + if small { overhead::CONNECTED } else { 0 }
            + if large { overhead::CONNECTED_LARGE } else { 0 };
        machine().devices[self.device].free_overhead(bytes);
    }
}

impl Comm {
    pub(super) fn new(
        world: Arc<World>,
        rank: usize,
        device: usize,
        life: Option<RankConnection>,
    ) -> Self {
        Self {
            life,
            world,
            rank,
            device,
            sequence: AtomicU64::new(0),
            running: Mutex::default(),
            idle: Condvar::new(),
            aborted: AtomicBool::new(false),
            connected: Mutex::default(),
        }
    }

    /// Number of ranks that have joined, and the world's error.
    fn state(&self) -> (usize, c_int) {
        match (&self.world.away, &self.life) {
            (Some(away), Some(life)) => away.state(life),
            _ => self.world.state(),
        }
    }

    /// Counts the memory of connections at an algorithm's first collective, as NCCL does since
    /// 2.22.
    pub(super) fn connect(&self, bytes: usize) -> CallResult {
        let device = &machine().devices[self.device];
        let mut connected = lock(&self.connected);
        let wanted =
            [(true, overhead::CONNECTED), (bytes > overhead::LARGE, overhead::CONNECTED_LARGE)];
        for (done, (wanted, bytes)) in connected.iter_mut().zip(wanted) {
            if wanted && !*done {
                device.take_overhead(bytes)?;
                *done = true;
            }
        }
        Ok(())
    }

    pub(super) fn wait_for_ranks(&self) {
        let waits = || {
            let (joined, error) = self.state();
            joined < self.world.ranks && error == SUCCESS && !self.aborted.load(SeqCst)
        };
        while waits() {
            drop(wait_briefly(&self.world.changed, lock(&self.world.meeting)));
        }
    }

    /// The world's error; `IN_PROGRESS` until all ranks have joined.
    pub(super) fn async_error(&self) -> c_int {
        match self.state() {
            (joined, SUCCESS) if joined < self.world.ranks => IN_PROGRESS,
            (_, error) => error,
        }
    }

    pub(super) fn abort(&self) {
        self.aborted.store(true, SeqCst);
        self.world.changed.notify_all();
        self.finish();
    }

    /// Waits until no job of this rank is left, or its device is lost.
    pub(super) fn finish(&self) {
        let mut running = lock(&self.running);
        while *running > 0 && machine().devices[self.device].alive().is_ok() {
            running = wait_briefly(&self.idle, running);
        }
    }

    /// Whether a wait must end, because the communicator is aborted or the device is lost.
    fn gives_up(&self, health: &Health) -> bool {
        self.aborted.load(SeqCst) || health.alive().is_err()
    }

    /// Enqueues a job of this communicator.
    fn enqueue(
        self: &Arc<Self>,
        stream: &Stream,
        run: impl FnOnce(&Self, &Health) -> CallResult + Send + 'static,
    ) {
        *lock(&self.running) += 1;
        let comm = self.clone();
        stream.push(move |health| {
            let result = if comm.gives_up(health) { Ok(()) } else { run(&comm, health) };
            *lock(&comm.running) -= 1;
            comm.idle.notify_all();
            result
        });
    }

    /// Enqueues this rank's part of a collective.
    pub(super) fn start(self: &Arc<Self>, stream: &Stream, part: Collective) {
        let sequence = self.sequence.fetch_add(1, SeqCst);
        self.enqueue(stream, move |comm, health| {
            let world = &comm.world;
            part.check(comm.rank, world.ranks)?;
            let gives_up = || comm.gives_up(health);
            if let Some(away) = &world.away {
                // A collective that never completes ends only with an abort or a lost device.
                let done = away.collective(sequence, comm.rank, &part, &gives_up);
                while !done && !gives_up() {
                    drop(wait_briefly(&world.changed, lock(&world.meeting)));
                }
                return Ok(());
            }
            world.post(sequence, comm.rank, part);
            world.await_round(sequence, &gives_up);
            Ok(())
        });
    }
}

/// Does the work of all ranks. Results are computed before any is written: ranks may share buffers.
fn perform(parts: &[Collective]) {
    let first = parts[0];
    let (bytes, root) = (first.bytes(), first.root);
    let sends = |offset: usize| parts.iter().map(|part| part.send + offset).collect::<Vec<_>>();
    // The ring of part i ends at rank i, which then has the sum.
    let order = |part: usize| {
        let around = config().hops && first.element.bytes() == 2;
        if around { Order::Ring((part + 1) % parts.len()) } else { Order::Ranks }
    };
    // SAFETY (of this function): every rank's job has checked its buffers and waits for the end.
    let reduced = |offset, part, count| unsafe {
        reduce(first.element, first.reduction, order(part), &sends(offset), count)
    };
    let read = |address: usize| {
        // SAFETY (of this function): as above, `bytes` of it are checked.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec()
    };
    let results: Vec<(usize, Vec<u8>)> = match first.kind {
        CollectiveKind::AllReduce => {
            let each = first.count.div_ceil(parts.len()).max(1);
            let part = |(i, start)| {
                reduced(start * first.element.bytes(), i, each.min(first.count - start))
            };
            let sum: Vec<u8> = (0..first.count).step_by(each).enumerate().flat_map(part).collect();
            parts.iter().map(|part| (part.recv, sum.clone())).collect()
        }
        CollectiveKind::Reduce => vec![(parts[root].recv, reduced(0, root, first.count))],
        CollectiveKind::ReduceScatter => {
            let shard = |(rank, part): (usize, &Collective)| {
                (part.recv, reduced(rank * bytes, rank, first.count))
            };
            parts.iter().enumerate().map(shard).collect()
        }
        CollectiveKind::AllGather => {
            let all: Vec<u8> = parts.iter().flat_map(|part| read(part.send)).collect();
            parts.iter().map(|part| (part.recv, all.clone())).collect()
        }
        CollectiveKind::Broadcast => {
            let sent = read(parts[root].send);
            parts.iter().map(|part| (part.recv, sent.clone())).collect()
        }
    };
    for (address, content) in results {
        // SAFETY: the rank's job has checked the receive buffer for these bytes; `content` is a
        // copy.
        unsafe { (address as *mut u8).copy_from(content.as_ptr(), content.len()) };
    }
}
