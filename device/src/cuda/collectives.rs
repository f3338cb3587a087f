//! Collectives between ranks on GPUs, by NCCL or by kernels that read the other ranks' memory.
//!
//! Ranks are threads of this process, and with NCCL also threads of other processes. They meet
//! before they enqueue a collective, and the meeting compares their ops as on the cpu backend. Then
//! each rank continues independently. A full queue of launches would keep a peer from enqueuing the
//! kernel that the collective waits for, so a rank sleeps before it fills a queue (`pace.rs`). The
//! ranks of an in-process collective meet again between its phases and at its end, since they read
//! each other's memory.

use super::driver::{Context, DeviceMemory, Event, Failure, Stream};
use super::launch::DeviceElements;
use super::memory::{Peer, Peers};
use super::nccl::{self, Member, NcclCommunicator};
use super::watchdog::{Watchdog, abort_all};
use super::{Gpu, launch};
use crate::op::{CollectiveKind, CollectiveOp};
use crate::ranks::communicator::Communicator;
use crate::ranks::patience::Patience;
use crate::ranks::rank_state::collectives::{divisible, meet};
use crate::ranks::rendezvous::Arrival;
use crate::submit::warm::Call;
use crate::{AdmittedOp, Error, Group, Lane, Rank, Reduction, Tensor};
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

/// The transport of data between ranks.
#[derive(Debug)]
pub(super) enum Transport {
    /// Kernels that read peers' memory. Sums have the bits of the cpu backend: in rank order, in
    /// fp32, rounded once.
    InProcess,
    /// NCCL communicators of the groups with several ranks: TP, DP.
    Nccl(NcclCommunicators, Watchdog),
}

/// Phases of an in-process collective: the rank's stream has reached the collective; the rank's
/// part is combined; the rank has all parts.
const COME: usize = 0;
const COMBINED: usize = 1;
const GATHERED: usize = 2;

/// A rank's communicators: TP, DP.
pub(super) type NcclCommunicators = [Option<Arc<NcclCommunicator>>; 2];

/// Makes the communicators of `rank` with at most `ctas` blocks (TP, DP; 0: no bound). Blocks until
/// the peers make theirs.
pub(super) fn connect(
    rank: Rank,
    world: &Communicator,
    peers: &Peers,
    gpu: usize,
    ctas: [u32; 2],
) -> Result<NcclCommunicators, Error> {
    let failed = |problem| Error::GpuSetup { rank: rank.index(), gpu, problem };
    let one = |group: Group| {
        let (me, size) = rank.within(group);
        if size == 1 {
            return Ok(None);
        }
        let id = meet_for_id(rank, world, peers, group)?.map_err(failed)?;
        let made = communicator(rank, world, gpu, id, Member { me, size }, ctas[group as usize]);
        let gone = || given_up(rank, world);
        made.map_err(failed)?.map(|made| Some(Arc::new(made))).ok_or_else(gone)
    };
    let communicators = [one(Group::Tp)?, one(Group::Dp)?];
    // No rank starts a collective while another still allocates for its communicator.
    world.gather(rank, "open: connected")?;
    Ok(communicators)
}

/// The NCCL id of a group, which its first rank creates and sends to other processes.
fn meet_for_id(
    rank: Rank,
    world: &Communicator,
    peers: &Peers,
    group: Group,
) -> Result<Result<nccl::Id, String>, Error> {
    let ((me, size), lane) = (rank.within(group), Lane::Compute);
    let first = rank.member(group, 0);
    if me == 0 {
        let id = match nccl::new_id() {
            Ok(id) => id,
            Err(problem) => return Ok(Err(problem)),
        };
        peers.post_id(group, first, id);
        let bytes = nccl::id_bytes(&id);
        let away = (1..size).filter(|to| world.is_remote_rank(rank.member(group, *to)));
        away.for_each(|to| world.send(rank, lane, group, to, &bytes));
    }
    let (op, site, tensor) = ("open: communicators", Location::caller(), Tensor::NONE);
    let met = world.meet(rank, lane, group, Arrival { op, site, tensor, detail: 0, payload: 0 })?;
    if world.is_remote_rank(first) {
        let id = nccl::id_from(met.parcel(0).bytes());
        return Ok(id.ok_or_else(|| "no identity of its communicator came".to_owned()));
    }
    Ok(peers.id(group, first).ok_or_else(|| "no identity of its communicator".to_owned()))
}

/// Sends every collective of the program through its communicator, and each kind with 8 bytes. NCCL
/// connects an algorithm, and allocates for it, at the first collective that uses it.
pub(super) fn warm_up(
    rank: Rank,
    world: &Communicator,
    context: &Arc<Context>,
    communicators: &NcclCommunicators,
    stream: &Stream,
    calls: &[Call],
) -> Result<(), Error> {
    let gpu = context.ordinal;
    let failed = |problem: String| Error::GpuSetup { rank: rank.index(), gpu, problem };
    let text = |e: Failure| failed(format!("the first collectives: {e}"));
    let largest = calls.iter().map(|call| call.len as u64 * call.dtype.bytes()).max();
    let memory = DeviceMemory::new(context, largest.unwrap_or(0).max(1 << 20)).map_err(text)?;
    for call in calls {
        let (_, size) = rank.within(call.group);
        let comm = communicators.get(call.group as usize).and_then(Option::as_ref);
        let Some(comm) = comm.filter(|_| size > 1) else { continue };
        let few = (8 / call.dtype.bytes() as usize).max(1).next_multiple_of(size);
        for len in [few, call.len] {
            let buffer = DeviceElements { at: memory.start, len, dtype: call.dtype };
            comm.run(call.kind, buffer, stream).map_err(failed)?;
        }
    }
    let ended = Event::new().and_then(|event| stream.record(&event).map(|()| event));
    let error = match await_all(world, communicators, &ended.map_err(text)?) {
        Ok(true) => return Ok(()),
        Ok(false) => given_up(rank, world),
        Err(problem) => failed(problem),
    };
    // Precedes any call that may block, since the first error is reported.
    world.fail(rank, 0, &error);
    // The collectives' kernels spin, and their memory cannot be freed before they end.
    abort_all(communicators.iter().flatten());
    Err(error)
}

/// Waits for the collectives before `ended`. Returns false if another rank has failed, and an error
/// if NCCL fails or the wait takes too long.
fn await_all(
    world: &Communicator,
    communicators: &NcclCommunicators,
    ended: &Event,
) -> Result<bool, String> {
    let mut patience = Patience::new();
    while !ended.has_passed().map_err(|e| e.to_string())? {
        let wrong = communicators.iter().flatten().find_map(|comm| comm.check().err());
        if let Some(problem) = wrong {
            return Err(format!("the first collectives: {problem}"));
        }
        if world.failed() {
            return Ok(false);
        }
        if patience.waited() > world.timeout() {
            let seconds = world.timeout().as_secs();
            return Err(format!("NCCL's first collectives have not ended in {seconds} s"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(true)
}

/// Creates the communicator of a member of a group in a separate thread. The library blocks until
/// all ranks have called it, even after a failure, so the thread may stay blocked. `None` if another
/// rank has failed.
fn communicator(
    rank: Rank,
    world: &Communicator,
    gpu: usize,
    id: nccl::Id,
    member: Member,
    ctas: u32,
) -> Result<Option<NcclCommunicator>, String> {
    let (sender, made) = std::sync::mpsc::channel();
    let make = move || {
        let bound = Context::of(gpu).and_then(|context| context.bind());
        let made =
            bound.map_err(|e| e.to_string()).and_then(|()| NcclCommunicator::new(id, member, ctas));
        let _ = sender.send(made);
    };
    let thread = std::thread::Builder::new().name(format!("connect {}", rank.index()));
    thread.spawn(make).map_err(|e| format!("no thread to connect ranks: {e}"))?;
    let mut patience = Patience::new();
    loop {
        match made.recv_timeout(LOOK) {
            Ok(made) => return made.map(Some),
            Err(_) if world.failed() => return Ok(None),
            Err(_) if patience.waited() > world.timeout() => {
                let seconds = world.timeout().as_secs();
                return Err(format!("NCCL has not connected the ranks in {seconds} s"));
            }
            Err(_) => {}
        }
    }
}

/// Time between two checks for failed ranks.
const LOOK: Duration = Duration::from_millis(20);

/// The error of a rank that stops because another rank has failed.
fn given_up(rank: Rank, world: &Communicator) -> Error {
    let ended = || Error::GpuSetup { rank: rank.index(), gpu: 0, problem: "given up".into() };
    world.check(rank).err().unwrap_or_else(ended)
}

impl Gpu {
    /// Enqueues a collective on `stream`. Blocks until all ranks of its group have reached it.
    pub(super) fn collective(
        &self,
        op: &AdmittedOp,
        of: CollectiveOp,
        stream: &Stream,
    ) -> Result<(), Error> {
        let (me, size) = self.host.rank.within(of.group);
        if size == 1 {
            return Ok(());
        }
        divisible(op, &self.host, of)?;
        match (&self.transport, of.group) {
            (Transport::Nccl([Some(tp), _], watchdog), Group::Tp) => {
                self.by_nccl(op, stream, of, tp, watchdog)
            }
            (Transport::Nccl([_, Some(dp)], watchdog), Group::Dp) => {
                self.by_nccl(op, stream, of, dp, watchdog)
            }
            (Transport::Nccl(..), _) => Err(self.refused(op, "no communicator of this group")),
            (Transport::InProcess, _) => Exchange { gpu: self, op, stream, of, me, size }.run(),
        }
    }

    fn by_nccl(
        &self,
        op: &AdmittedOp,
        stream: &Stream,
        of: CollectiveOp,
        comm: &NcclCommunicator,
        watchdog: &Watchdog,
    ) -> Result<(), Error> {
        let CollectiveOp { x, group, kind } = of;
        meet(op, &self.host, of)?;
        let buffer = DeviceElements { at: self.peer.at(x), len: x.len(), dtype: x.dtype() };
        watchdog.starts(stream, op, group).map_err(|e| self.failed(op, &e))?;
        let enqueued = comm.run(kind, buffer, stream);
        enqueued.map_err(|problem| self.library_failed(op, stream, &problem))?;
        watchdog.ends(stream, group).map_err(|e| self.failed(op, &e))
    }
}

/// One in-process collective on one rank.
///
/// An event is recorded again only after a later meeting of the same group and lane. Peers enter
/// that meeting only after they have enqueued their waits for the last record.
struct Exchange<'a> {
    gpu: &'a Gpu,
    op: &'a AdmittedOp,
    stream: &'a Stream,
    of: CollectiveOp,
    me: usize,
    size: usize,
}

impl Exchange<'_> {
    fn run(&self) -> Result<(), Error> {
        let x = self.of.x;
        self.meet(COME)?;
        match self.of.kind {
            CollectiveKind::AllReduce(reduce) => {
                let (flat, each) = (x.reshape(1, x.len()), x.len().div_ceil(self.size));
                let each = each.next_multiple_of(ALIGNED);
                let part =
                    |i: usize| flat.slice((i * each).min(x.len())..((i + 1) * each).min(x.len()));
                self.combine(part(self.me), reduce)?;
                self.meet(COMBINED)?;
                self.gather(part)?;
            }
            CollectiveKind::ReduceScatter => {
                self.combine(x.shard(self.me, self.size), Reduction::Sum)?;
            }
            CollectiveKind::AllGather => self.gather(|i| x.shard(i, self.size))?,
            CollectiveKind::Broadcast { root } if root != self.me => self.copy(root, x)?,
            CollectiveKind::Broadcast { .. } => {}
        }
        // After this meeting a rank may change memory that its peers have read.
        self.meet(GATHERED)
    }

    /// Makes this stream wait until the streams of all ranks have reached `phase`.
    fn meet(&self, phase: usize) -> Result<(), Error> {
        let (lane, group) = (self.op.lane as usize, self.of.group);
        let own = self.gpu.peer.event(lane, group, phase);
        self.stream.record(own).map_err(|e| self.gpu.failed(self.op, &e))?;
        meet(self.op, &self.gpu.host, self.of)?;
        for i in (0..self.size).filter(|&i| i != self.me) {
            let peer = self.peer(i)?;
            let event = peer.event(lane, group, phase);
            self.stream.wait(event).map_err(|e| self.blamed(i, peer, &e))?;
        }
        Ok(())
    }

    /// The error of a failed wait for member `i`. If this GPU works, the other GPU is the broken
    /// one.
    fn blamed(&self, i: usize, peer: &Peer, failure: &Failure) -> Error {
        let own = self.gpu.failed(self.op, failure);
        let index = self.gpu.host.rank.member(self.of.group, i);
        match own {
            Error::Gpu { op, site, .. } if self.stream.loss().is_none() => {
                let from = self.gpu.host.rank.index();
                let problem = format!("rank {from} waits for it in vain: {failure}");
                Error::Gpu { rank: index, gpu: peer.context.ordinal, op, site, problem }
            }
            own => own,
        }
    }

    fn peer(&self, i: usize) -> Result<&Arc<Peer>, Error> {
        let index = self.gpu.host.rank.member(self.of.group, i);
        let peer = self.gpu.peers.peer(index);
        peer.ok_or_else(|| self.gpu.refused(self.op, &format!("rank {index} has no memory")))
    }

    /// Sets `mine` to the combination of the same range on every rank.
    fn combine(&self, mine: Tensor, reduce: Reduction) -> Result<(), Error> {
        let mut peers = [0; launch::MAX_PEERS];
        if self.size > peers.len() {
            let problem = format!("{} ranks; in-process sums take {}", self.size, peers.len());
            return Err(self.gpu.refused(self.op, &problem));
        }
        for (i, at) in peers[..self.size].iter_mut().enumerate() {
            *at = self.peer(i)?.at(mine);
        }
        let into = DeviceElements { at: peers[self.me], len: mine.len(), dtype: mine.dtype() };
        let launch = launch::combine_peers(into, &peers[..self.size], reduce);
        let launch = launch.map_err(|problem| self.gpu.refused(self.op, &problem))?;
        launch.map_or(Ok(()), |launch| self.gpu.launch(self.op, self.stream, &launch))
    }

    /// Copies every other rank's part.
    fn gather(&self, part: impl Fn(usize) -> Tensor) -> Result<(), Error> {
        let others = (0..self.size).filter(|&i| i != self.me);
        others.into_iter().try_for_each(|i| self.copy(i, part(i)))
    }

    fn copy(&self, from: usize, t: Tensor) -> Result<(), Error> {
        let (src, dst) = (self.peer(from)?.at(t), self.gpu.peer.at(t));
        let copied: Result<(), Failure> = self.stream.copy_on_device(src, dst, t.bytes());
        copied.map_err(|e| self.gpu.failed(self.op, &e))
    }
}

/// Alignment of an all-reduce's parts, in elements.
const ALIGNED: usize = 64;
