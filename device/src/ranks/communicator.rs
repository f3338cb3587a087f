//! Rendezvous of rank threads for collectives, and the report of a failed rank to all ranks.
//! `remote` handles ranks in other processes.

mod remote;

use super::memory::Memory;
use super::processes::{MessageHandler, Processes};
use super::remote::RemoteRanks;
use super::rendezvous::{Arrival, ArrivalRecord, Rendezvous, lock};
use crate::threads::spin_wait::{pause_of_ranks, spin_for};
use crate::{Error, Group, LANES, Lane, Rank, Tensor};
use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The ranks of one run: threads of this process and of other processes.
#[derive(Debug)]
pub struct Communicator {
    failed: AtomicBool,
    first: Mutex<Option<(usize, u64, Error)>>,
    memories: Vec<OnceLock<Arc<Memory>>>,
    /// Rendezvous per lane and group. A collective of one lane never meets a collective of another
    /// lane.
    tp: Vec<Vec<Rendezvous>>,
    dp: Vec<Vec<Rendezvous>>,
    all: Vec<Rendezvous>,
    /// Rendezvous of the ranks' own threads, separate from all lanes.
    pub(crate) own: Rendezvous,
    timeout: Duration,
    /// Milliseconds added to the timeout during large reads and writes.
    more: AtomicU64,
    /// Per rank: whether its GPU waits in a collective for another rank, which causes the delay.
    gpus_held_up: Vec<AtomicBool>,
    /// Number of ranks that wait for something outside the run. While it is above 0, deadlines
    /// stand still.
    held_up: AtomicUsize,
    /// The last step that a rank of this process has begun.
    pub(crate) step: AtomicU64,
    /// Time for which a rank polls for the other ranks before it sleeps.
    pause: Duration,
    /// Ranks in other processes.
    pub(crate) remote: Option<RemoteRanks>,
}

/// Longest sleep of a waiting thread between two checks. A much longer pause means that a signal or
/// a debugger stopped the whole process, and no rank is to blame for it.
const LOOK_UP: Duration = Duration::from_secs(1);

/// Extra time before a timeout blames ranks that may only wait for other ranks.
pub(crate) const DOUBT: Duration = Duration::from_secs(2);

/// A completed rendezvous. Its arrivals can be read until the next rendezvous at the same place.
pub(crate) struct CompletedRendezvous<'a> {
    pub(crate) world: &'a Communicator,
    pub(crate) rendezvous: &'a Rendezvous,
    generation: u64,
    pub(crate) me: usize,
}

impl Communicator {
    /// A grid of ranks in this process. A collective that a rank does not enter within `timeout` is
    /// an error.
    pub fn new(tp_size: usize, dp_size: usize, timeout: Duration) -> Arc<Self> {
        Arc::new(Self::of(tp_size, dp_size, timeout, None))
    }

    /// A grid of ranks that is divided among `processes` in order. All processes call this function
    /// at the same point of the program.
    pub fn across(
        processes: &Arc<Processes>,
        tp_size: usize,
        dp_size: usize,
        timeout: Duration,
    ) -> Arc<Self> {
        let ranks = tp_size * dp_size;
        assert!(ranks.is_multiple_of(processes.count()), "the caller has looked at it");
        let world =
            Arc::new(Self::of(tp_size, dp_size, timeout, Some(RemoteRanks::new(processes))));
        if let Some(remote) = &world.remote {
            let handler: Arc<dyn MessageHandler> = Arc::clone(&world) as _;
            remote.enter(&handler);
        }
        world
    }

    fn of(tp_size: usize, dp_size: usize, timeout: Duration, remote: Option<RemoteRanks>) -> Self {
        let first = Rank { tp: 0, tp_size, dp: 0, dp_size };
        let world_size = first.world_size();
        let rendezvous = |(lane, kind, rank): (usize, u64, Rank), group| {
            let members = (0..rank.within(group).1).map(|i| rank.member(group, i));
            let members: Vec<usize> = members.collect();
            let homes = remote.iter().flat_map(|remote| {
                let home = |member: &usize| remote.home(*member, world_size);
                members.iter().map(home).filter(|home| *home != remote.processes.me())
            });
            let elsewhere: BTreeSet<usize> = homes.collect();
            let id = (rank.index() as u64) << 16 | (lane as u64) << 8 | kind;
            Rendezvous::new(id, members, elsewhere.into_iter().collect())
        };
        let tp_group = |lane| move |dp| rendezvous((lane, 0, Rank { dp, ..first }), Group::Tp);
        let dp_group = |lane| move |tp| rendezvous((lane, 1, Rank { tp, ..first }), Group::Dp);
        let mut world = Self {
            failed: AtomicBool::new(false),
            first: Mutex::new(None),
            memories: (0..world_size).map(|_| OnceLock::new()).collect(),
            tp: (0..LANES).map(|lane| (0..dp_size).map(tp_group(lane)).collect()).collect(),
            dp: (0..LANES).map(|lane| (0..tp_size).map(dp_group(lane)).collect()).collect(),
            all: (0..LANES).map(|lane| rendezvous((lane, 2, first), Group::World)).collect(),
            own: rendezvous((LANES, 2, first), Group::World),
            timeout,
            more: AtomicU64::new(0),
            gpus_held_up: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            held_up: AtomicUsize::new(0),
            step: AtomicU64::new(0),
            pause: Duration::ZERO,
            remote,
        };
        world.pause = pause_of_ranks(world.ranks_on_this_machine());
        world
    }

    /// Time for which a rank's thread polls for another thread's progress before it sleeps.
    pub(crate) const fn pause(&self) -> Duration {
        self.pause
    }

    /// Whether ranks are in other processes.
    pub const fn has_remote_ranks(&self) -> bool {
        self.remote.is_some()
    }

    /// Whether this process has the rank.
    pub fn has(&self, rank: Rank) -> bool {
        let home = |remote: &RemoteRanks| remote.home(rank.index(), self.num_ranks());
        self.remote.as_ref().is_none_or(|remote| home(remote) == remote.processes.me())
    }

    /// Number of ranks on this machine.
    pub(crate) fn ranks_on_this_machine(&self) -> usize {
        let of = |remote: &RemoteRanks| {
            self.num_ranks() / remote.processes.count() * remote.processes.on_this_node().len()
        };
        self.remote.as_ref().map_or(self.num_ranks(), of)
    }

    pub(crate) fn rendezvous(&self, rank: Rank, lane: Lane, group: Group) -> &Rendezvous {
        match group {
            Group::Tp => &self.tp[lane as usize][rank.dp],
            Group::Dp => &self.dp[lane as usize][rank.tp],
            Group::World => &self.all[lane as usize],
        }
    }

    pub(crate) fn all_rendezvous(&self) -> impl Iterator<Item = &Rendezvous> {
        self.tp.iter().chain(&self.dp).flatten().chain(&self.all).chain([&self.own])
    }

    /// Exchanges one number between all ranks, and returns the numbers by rank. The ranks call it
    /// on their own threads and in the same order.
    ///
    /// # Errors
    /// A rank has failed, or does not enter before the timeout.
    #[track_caller]
    pub fn agree(&self, rank: Rank, what: &'static str, payload: u64) -> Result<Vec<u64>, Error> {
        let (site, tensor) = (Location::caller(), Tensor::NONE);
        let arrival = Arrival { op: what, site, tensor, detail: 0, payload };
        self.arrive(rank, &self.own, rank.index(), arrival).map(|met| met.payloads())
    }

    pub(crate) fn hold_gpu_up(&self, rank: usize, held_up: bool) {
        self.gpus_held_up[rank].store(held_up, Ordering::SeqCst);
    }

    pub(crate) fn is_gpu_held_up(&self, rank: usize) -> bool {
        self.gpus_held_up[rank].load(Ordering::SeqCst)
    }

    /// Time that a rank waits for the others.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout + Duration::from_millis(self.more.load(Ordering::Relaxed))
    }

    /// Sets the time that is added to the timeout while ranks allocate, read or write large data.
    pub fn wait_longer(&self, more: Duration) {
        let millis = u64::try_from(more.as_millis()).unwrap_or(u64::MAX);
        self.more.store(millis, Ordering::Relaxed);
    }

    /// Blocks until all ranks have called it. Callers are outside of steps, without a running
    /// collective.
    #[track_caller]
    pub(crate) fn gather(&self, rank: Rank, op: &'static str) -> Result<(), Error> {
        let arrival =
            Arrival { op, site: Location::caller(), tensor: Tensor::NONE, detail: 0, payload: 0 };
        self.meet(rank, Lane::Compute, Group::World, arrival).map(drop)
    }

    /// Number of ranks.
    pub(crate) fn num_ranks(&self) -> usize {
        self.memories.len()
    }

    /// Gives peers access to this rank's memory inside collectives until the end of the run.
    pub(crate) fn join(&self, rank: Rank, memory: &Arc<Memory>) {
        // A rank opens one device. A second device would meet no peer.
        let _ = self.memories[rank.index()].set(Arc::clone(memory));
    }

    /// Runs `wait`, which depends on something outside the run. Meanwhile no rank's deadline
    /// passes.
    pub fn held_up<R>(&self, wait: impl FnOnce() -> R) -> R {
        self.held_up.fetch_add(1, Ordering::SeqCst);
        let result = wait();
        self.held_up.fetch_sub(1, Ordering::SeqCst);
        result
    }

    pub(crate) fn is_held_up_here(&self) -> bool {
        self.held_up.load(Ordering::SeqCst) > 0
    }

    fn is_held_up(&self) -> bool {
        let remote = self.remote.as_ref();
        self.is_held_up_here() || remote.is_some_and(|remote| remote.processes.any_held_up())
    }

    /// Ends the run because `rank`'s thread did not start, and returns the error.
    pub fn not_started(&self, rank: Rank, error: &std::io::Error) -> Error {
        let whom = format!("rank {}", rank.index());
        let error = Error::NoThread { whom, problem: error.to_string() };
        self.fail(rank, 0, &error);
        error
    }

    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Keeps the first failure, wakes every rank that waits in a rendezvous, and informs the other
    /// processes.
    pub(crate) fn fail(&self, rank: Rank, step: u64, error: &Error) {
        if self.note_failure(rank.index(), step, error)
            && let Some(remote) = &self.remote
        {
            remote.failed(rank.index(), step, error);
        }
    }

    /// Does the work of `fail` in this process only. Returns whether this failure is the first.
    pub(crate) fn note_failure(&self, rank: usize, step: u64, error: &Error) -> bool {
        let is_first = {
            let mut first = lock(&self.first);
            let is_first = first.is_none();
            first.get_or_insert_with(|| (rank, step, error.clone()));
            is_first
        };
        self.failed.store(true, Ordering::SeqCst);
        for m in self.all_rendezvous() {
            drop(lock(&m.slots));
            m.changed.notify_all();
        }
        is_first
    }

    /// The first failure: rank, step and error.
    pub fn failure(&self) -> Option<(usize, u64, Error)> {
        lock(&self.first).clone()
    }

    /// The failure as `rank` sees it: its own error, or the name of the failed rank.
    pub(crate) fn check(&self, rank: Rank) -> Result<(), Error> {
        if !self.failed() {
            return Ok(());
        }
        match &*lock(&self.first) {
            Some((r, _, error)) if *r == rank.index() => Err(error.clone()),
            Some((r, step, error)) => {
                Err(Error::PeerFailed { rank: *r, step: *step, cause: error.to_string() })
            }
            None => Ok(()),
        }
    }

    /// Blocks until every member of the group has entered `lane`'s rendezvous, then compares their
    /// arrivals.
    pub(crate) fn meet(
        &self,
        rank: Rank,
        lane: Lane,
        group: Group,
        arrival: Arrival,
    ) -> Result<CompletedRendezvous<'_>, Error> {
        self.arrive(rank, self.rendezvous(rank, lane, group), rank.within(group).0, arrival)
    }

    fn arrive<'a>(
        &'a self,
        rank: Rank,
        rendezvous: &'a Rendezvous,
        me: usize,
        arrival: Arrival,
    ) -> Result<CompletedRendezvous<'a>, Error> {
        let mut slots = lock(&rendezvous.slots);
        let generation = slots.generation;
        rendezvous.put(&mut slots, me, generation, arrival.into());
        // Releases the lock, since the handler of a message that arrives now needs it.
        drop(slots);
        if let Some(remote) = &self.remote {
            remote.send_arrival(rendezvous, me, generation, arrival.into());
        }
        self.await_turn(rank, rendezvous, generation, arrival)?;
        let met = CompletedRendezvous { world: self, rendezvous, generation, me };
        met.compare(rank, arrival).map(|()| met)
    }

    fn await_turn(
        &self,
        rank: Rank,
        rendezvous: &Rendezvous,
        generation: u64,
        arrival: Arrival,
    ) -> Result<(), Error> {
        spin_for(self.pause, || rendezvous.has_advanced(generation).then_some(()));
        let mut slots = lock(&rendezvous.slots);
        // Reads the timeout in every iteration, since `wait_longer` may have changed it.
        let mut waited = Duration::ZERO;
        while slots.generation == generation {
            self.check(rank)?;
            let mut left = self.timeout().saturating_sub(waited);
            if left.is_zero() {
                let absent = slots.absent(rendezvous);
                drop(slots);
                let missing = self.culprits(absent);
                // A rank whose GPU waits for another rank has a watchdog, which names that other
                // rank. A process knows best which of its own ranks causes a delay.
                let excused =
                    |rank: &usize| self.is_gpu_held_up(*rank) || self.is_remote_rank(*rank);
                let excused = missing.iter().all(excused);
                if !excused || waited >= self.timeout() + DOUBT {
                    let (op, site, seconds) = (arrival.op, arrival.site, self.timeout().as_secs());
                    return Err(Error::Timeout { rank: rank.index(), op, site, seconds, missing });
                }
                (slots, left) = (lock(&rendezvous.slots), DOUBT / 20);
            }
            let (began, slice) = (Instant::now(), left.min(LOOK_UP));
            slots =
                rendezvous.changed.wait_timeout(slots, slice).unwrap_or_else(|e| e.into_inner()).0;
            if !self.is_held_up() {
                waited += began.elapsed().min(2 * LOOK_UP);
            }
        }
        Ok(())
    }

    /// Whether the rank is in another process.
    pub(crate) fn is_remote_rank(&self, rank: usize) -> bool {
        let home =
            |remote: &RemoteRanks| remote.home(rank, self.num_ranks()) != remote.processes.me();
        self.remote.as_ref().is_some_and(home)
    }

    /// The ranks to blame for the absence of `missing`. A missing rank that waits in another
    /// rendezvous passes the blame to the ranks that are absent there.
    fn culprits(&self, missing: Vec<usize>) -> Vec<usize> {
        let mut waits: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        for rendezvous in self.all_rendezvous() {
            let absent = lock(&rendezvous.slots).absent(rendezvous);
            let come = |rank: &usize| !absent.contains(rank);
            waits.push((rendezvous.members.iter().copied().filter(come).collect(), absent));
        }
        let (mut seen, mut found) = (missing.clone(), Vec::new());
        let mut next = 0;
        while let Some(&rank) = seen.get(next) {
            next += 1;
            let mut waits_for = waits.iter().filter(|(come, _)| come.contains(&rank)).peekable();
            if waits_for.peek().is_none() {
                found.push(rank);
            }
            let others: Vec<usize> = waits_for.flat_map(|(_, absent)| absent).copied().collect();
            others.into_iter().for_each(|other| {
                if !seen.contains(&other) {
                    seen.push(other);
                }
            });
        }
        found.sort_unstable();
        // All missing ranks wait for each other, so the ranks missing here are to blame.
        if found.is_empty() { missing } else { found }
    }
}

impl<'a> CompletedRendezvous<'a> {
    /// The memory of member `i`.
    pub(crate) fn peer(&self, i: usize) -> &'a Memory {
        let rank = self.rendezvous.members[i];
        match self.world.memories[rank].get() {
            Some(memory) => memory,
            None => unreachable!(
                "rank {rank} has come to a collective, and opens its memory before it comes to any"
            ),
        }
    }

    /// The payload of each member's arrival.
    fn payloads(&self) -> Vec<u64> {
        let slots = lock(&self.rendezvous.slots);
        let records = slots.records(self.generation);
        records.iter().flatten().map(|record| record.payload).collect()
    }

    fn compare(&self, rank: Rank, mine: Arrival) -> Result<(), Error> {
        let slots = lock(&self.rendezvous.slots);
        let (site, mine) = (mine.site, ArrivalRecord::from(mine));
        let shape = |p: &ArrivalRecord| (p.op, p.tensor.range(), p.tensor.dtype(), p.detail);
        for (i, theirs) in slots.records(self.generation).iter().enumerate() {
            let Some(theirs) = theirs else { continue };
            if shape(theirs) != shape(&mine) {
                let tell = |p: &ArrivalRecord| {
                    format!("{} of {} x {:?} at {}", p.op, p.tensor.len(), p.tensor.dtype(), p.line)
                };
                let peer = self.rendezvous.members[i];
                let problem = format!("{} here, {} on rank {peer}", tell(&mine), tell(theirs));
                let (rank, op) = (rank.index(), mine.op);
                return Err(Error::Mismatch { rank, op, site, problem });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blame_goes_past_those_that_wait_themselves() {
        let world = Communicator::new(2, 2, Duration::from_millis(10));
        let at = |tp, dp| Rank { tp, tp_size: 2, dp, dp_size: 2 };
        let arrival = Arrival {
            op: "test",
            site: Location::caller(),
            tensor: Tensor::NONE,
            detail: 0,
            payload: 0,
        };
        let missing = |rank, group| match world.meet(rank, Lane::Compute, group, arrival) {
            Err(Error::Timeout { missing, .. }) => missing,
            other => panic!("{:?}", other.map(drop)),
        };
        // After its timeout (1, 0) still counts as waiting for (1, 1).
        assert_eq!(missing(at(1, 0), Group::Dp), [at(1, 1).index()]);
        assert_eq!(missing(at(0, 0), Group::Tp), [at(1, 1).index()]);
        // (0, 0) still counts as waiting for (1, 0).
        assert_eq!(missing(at(0, 1), Group::Dp), [at(1, 1).index()]);
    }

    /// The watchdog of the rank whose GPU waits may need a little longer to name the other rank.
    #[test]
    fn a_rank_whose_gpu_waits_for_another_is_blamed_last() {
        let world = Communicator::new(2, 1, Duration::from_millis(1));
        let alone = Rank { tp: 0, tp_size: 2, dp: 0, dp_size: 1 };
        let arrival = Arrival {
            op: "test",
            site: Location::caller(),
            tensor: Tensor::NONE,
            detail: 0,
            payload: 0,
        };
        world.hold_gpu_up(1, true);
        let began = Instant::now();
        let met = world.meet(alone, Lane::Compute, Group::Tp, arrival).map(drop);
        assert!(matches!(met, Err(Error::Timeout { .. })), "{met:?}");
        assert!(began.elapsed() >= DOUBT, "blamed after {:?}", began.elapsed());
    }

    #[test]
    fn what_is_large_is_waited_for_longer_and_a_step_is_not() {
        let step = Duration::from_millis(1);
        let world = Communicator::new(2, 1, step);
        world.wait_longer(Duration::from_secs(60));
        assert_eq!(world.timeout(), step + Duration::from_secs(60));
        world.wait_longer(Duration::ZERO);
        assert_eq!(world.timeout(), step);
        let alone = Rank { tp: 0, tp_size: 2, dp: 0, dp_size: 1 };
        let arrival = Arrival {
            op: "test",
            site: Location::caller(),
            tensor: Tensor::NONE,
            detail: 0,
            payload: 0,
        };
        let met = world.meet(alone, Lane::Compute, Group::Tp, arrival).map(drop);
        assert!(matches!(met, Err(Error::Timeout { .. })), "{met:?}");
    }
}
