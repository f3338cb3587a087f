//! Real GPUs: lanes are CUDA streams (the Host lane is a thread). Ranks are assigned to GPUs in
//! turn.
//!
//! `submit` enqueues ops, which run later. A stream waits for another lane's stream by an event,
//! and for the Host lane by a pinned word; the Host lane waits for streams by events. [`open`]
//! creates all streams and events and all memory: a step allocates nothing.

mod blas;
mod blaslt;
mod built_for;
mod collectives;
mod compile;
mod cudnn;
mod driver;
mod gpu_overhead;
mod history;
mod host;
mod launch;
mod libraries;
mod marks;
mod matmul_choices;
mod matmul_timing;
mod memory;
mod nccl;
mod nvrtc;
mod open;
mod pace;
mod probe;
mod products;
mod progress;
mod rank_access;
mod scratch;
mod timeline;
mod verdict;
mod watchdog;

pub use cudnn::FASTER_ON as CUDNN_ATTENTION_ON;
pub use gpu_overhead::{ACTIVATION_STREAMS, GpuOverhead, STREAMS_PER_RANK};
pub use gpu_overhead::{GpuMemory, connected, look};
pub use launch::{Program, WIDEST_HEAD, is_small_attention};
pub use libraries::LibraryFile;
pub use matmul_choices::{MatmulChoices, MatmulSelection, TimedSelection};
pub use memory::{Peers, page_tables, pinned_bytes};
pub use open::{AttentionLibrary, Collectives, CudaOptions, open};
pub use probe::{GpuInfo, LibraryInfo, Probe, free_memory, probe, try_compiler};
pub use products::LEAVE_ROOM_SINCE;
pub use scratch::{attention_workspace, delta_scratch, device_bytes, gains_scratch};
pub use scratch::{norm_scratch, shares_scratch};
pub use verdict::{is_proven, keep_proven, stack};

/// Items for tests that run the kernels on an emulator.
#[doc(hidden)]
pub mod testing {
    pub use super::compile::cubins;
    pub use super::launch::{
        Args, DeviceElements, Launch, Launches, MAX_PEERS, OPTIONS, PROGRAMS, add_bias,
        combine_peers, launches, scratch_bytes,
    };
    pub use super::nccl::NAMES as NCCL_NAMES;
}

use crate::op::{CollectiveKind, CollectiveOp, lane::Clock, lane::join};
use crate::ranks::queue::Queue;
use crate::ranks::rank_state::RankState;
use crate::{
    Activity, AdmittedOp, Arena, Error, Event, Executor, LANES, Lane, Op, Rank, Reduction, Tensor,
    ThreadTeam, View, ViewMut,
};
use blas::{Blas, Workspace};
use collectives::Transport;
use compile::{Kernels, LaunchError};
use cudnn::{Attention, AttentionOp};
use driver::{Context, Failure, Stream, Words};
use history::{ErrorPlace, History};
use host::HostJob;
use launch::DeviceElements;
use launch::Launch;
use marks::{Marks, PendingWait, STREAMS};
use memory::Peer;
use pace::Pace;
use products::OverlapTracker;
use progress::Progress;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use timeline::Timeline;

/// Index of the Host lane's pinned word, which follows the words of the streams' progress.
const HOST_WORD: usize = STREAMS;

/// The executor of a rank on a GPU.
struct Gpu {
    /// The Host lane's part, pinned memory, and the world.
    host: Arc<RankState>,
    context: Arc<Context>,
    peer: Arc<Peer>,
    peers: Arc<Peers>,
    sm: u32,
    /// Number of multiprocessors.
    processors: u32,
    /// Multiprocessors of TP and DP collectives that matmuls leave free.
    ctas: [u32; 2],
    overlap: Cell<OverlapTracker>,
    /// Address and bytes of the kernels' scratch.
    scratch: (u64, u64),
    // Kernels and matmuls are dropped before the streams of their context, and streams before the
    // words that they write.
    kernels: RefCell<Kernels>,
    blas: RefCell<Blas>,
    /// cuDNN's attention, if the run asks for it.
    attention: Option<RefCell<Attention>>,
    transport: Transport,
    timeline: Option<Timeline>,
    /// Streams by lane. The last stream is the rank's own, for `read` and `write`.
    streams: Vec<Rc<Stream>>,
    words: Words,
    marks: RefCell<Marks>,
    /// Paces by lane. Lanes that share a stream use the pace of the first of these lanes.
    paces: RefCell<Vec<Pace>>,
    progress: RefCell<Progress>,
    history: Arc<History>,
    /// The clock that the next op of the Host lane waits for.
    host_after: Cell<Clock>,
    /// The number of the Host lane's last op in which other ranks participate.
    host_met: Cell<u64>,
    queue: Arc<Queue<HostJob>>,
    thread: Option<JoinHandle<()>>,
}

impl Gpu {
    fn rank(&self) -> Rank {
        self.host.rank
    }

    fn stream(&self, lane: Lane) -> &Stream {
        &self.streams[lane as usize]
    }

    fn fail_run(&self, error: &Error) {
        let (step, own) = (self.host.step.load(Ordering::Relaxed), self.rank());
        // A rank may be the first to notice that another rank's GPU is lost.
        let whose = match error {
            Error::Gpu { rank, .. } => {
                Rank { tp: rank % own.tp_size, dp: rank / own.tp_size, ..own }
            }
            _ => own,
        };
        self.host.world.fail(whose, step, error);
    }

    /// The error of a driver call that failed for `op`.
    fn failed(&self, op: &AdmittedOp, failure: &Failure) -> Error {
        self.failed_at(op.lane, op.tick, failure)
    }

    fn failed_at(&self, lane: Lane, tick: u64, failure: &Failure) -> Error {
        let (rank, gpu) = (self.rank().index(), self.context.ordinal);
        let ErrorPlace { op, site, problem } = self.history.place(lane, tick, failure);
        match site {
            Some(site) => Error::Gpu { rank, gpu, op, site, problem },
            None => Error::GpuSetup { rank, gpu, problem },
        }
    }

    /// The error for an `op` that failed for a reason other than a driver call.
    fn refused(&self, op: &AdmittedOp, problem: &str) -> Error {
        let (rank, gpu) = (self.rank().index(), self.context.ordinal);
        Error::Gpu { rank, gpu, op: op.op.name(), site: op.site, problem: problem.into() }
    }

    /// The error of a library that cannot enqueue `op` on a stream. For a lost GPU the library only
    /// says that CUDA failed, so the GPU's own error is added.
    fn library_failed(&self, op: &AdmittedOp, stream: &Stream, problem: &str) -> Error {
        match stream.loss() {
            Some(loss) => self.refused(op, &format!("{problem}: {loss}")),
            None => self.refused(op, problem),
        }
    }

    /// Enqueues an op on its stream.
    fn enqueue(&self, op: &AdmittedOp) -> Result<(), Error> {
        let stream = self.stream(op.lane);
        match op.op {
            Op::Copy { src, dst } => self.copy(op, stream, src, dst),
            Op::Zero { x } => {
                stream.zero(self.peer.at(x), x.bytes()).map_err(|e| self.failed(op, &e))
            }
            Op::Gemm { .. } | Op::ScaledGemm { .. } => self.gemm(op, stream, self.spared()),
            _ => match op.op.collective() {
                Some(of) => self.collective(op, of, stream),
                None => match (&self.attention, AttentionOp::of(&op.op)) {
                    (Some(library), Some(attention)) => {
                        let at = |t: Tensor| self.peer.at(t);
                        let (address, bytes) = self.scratch;
                        let memory = Workspace { address, bytes };
                        let done = library.borrow_mut().run(stream, &attention, &at, memory);
                        done.map_err(|problem| self.library_failed(op, stream, &problem))
                    }
                    _ => self.kernels(op, stream, &op.op),
                },
            },
        }
    }

    fn copy(
        &self,
        op: &AdmittedOp,
        stream: &Stream,
        src: Tensor,
        dst: Tensor,
    ) -> Result<(), Error> {
        let (from, to, bytes) = (self.peer.at(src), self.peer.at(dst), src.bytes());
        let host = [src, dst].into_iter().find(|t| t.arena() == Arena::Pinned);
        if let Some(t) = host.filter(|t| bytes > 0 && !self.peer.is_pinned(*t)) {
            let name = self.host.plan.name(t);
            return Err(self.refused(op, &format!("the host memory of {name} is not pinned")));
        }
        let (src, dst) = (src.arena(), dst.arena());
        let done = match host.map(|t| t.range()) {
            None => stream.copy_on_device(from, to, bytes),
            Some(range) => memory::pieces(range.start..range.start + bytes, &mut |piece| {
                let (at, n) = (piece.start - range.start, piece.end - piece.start);
                match (src, dst) {
                    (Arena::Pinned, _) => stream.copy_up(from + at, to + at, n),
                    (Arena::Device, _) => stream.copy_down(from + at, to + at, n),
                }
            }),
        };
        done.map_err(|e| self.failed(op, &e))
    }

    /// Launches the kernels of `work`, which is `op` or a part of it.
    fn kernels(&self, op: &AdmittedOp, stream: &Stream, work: &Op) -> Result<(), Error> {
        let at = |t: Tensor| self.peer.at(t);
        let (scratch, room) = self.scratch;
        let needed = launch::scratch_bytes(work);
        if needed > room {
            let problem = format!("{needed} bytes of scratch are needed, {room} are there");
            return Err(self.refused(op, &problem));
        }
        let launches = launch::launches(work, &at, scratch, self.sm);
        let launches = launches.map_err(|problem| self.refused(op, &problem))?;
        launches.iter().try_for_each(|launch| self.launch(op, stream, launch))
    }

    fn launch(&self, op: &AdmittedOp, stream: &Stream, launch: &Launch) -> Result<(), Error> {
        self.kernels.borrow_mut().launch(stream, launch).map_err(|error| match error {
            LaunchError::Missing => {
                self.refused(op, &format!("there is no kernel `{}`", launch.kernel))
            }
            LaunchError::Failed(failure) => self.failed(op, &failure),
        })
    }

    /// Records an event after op `tick` of a stream, unless the op already has a mark.
    fn mark(&self, lane: Lane, tick: u64) -> Result<(), Failure> {
        let host_done = |tick| self.host.wait_done(Lane::Host as usize, tick);
        let Some(event) = self.marks.borrow_mut().mark(lane, tick, &host_done) else {
            return Ok(());
        };
        self.stream(lane).record(&event)
    }

    /// Makes a stream wait for all of the event's clock.
    fn wait_on_stream(&self, lane: Lane, event: &Event) -> Result<(), Failure> {
        let stream = self.stream(lane);
        let host_done = self.host.done(Lane::Host);
        let source = (event.lane as usize, &event.clock);
        // Waits for collectives inside a layer are short, so they are not shown.
        let shows = lane == Lane::Compute && source.0 != Lane::TpComm as usize;
        let mut waits = false;
        self.marks.borrow_mut().wait(lane, source.0, source.1, host_done, &mut |until| {
            if shows && !std::mem::replace(&mut waits, true) {
                self.progress.borrow_mut().write(lane, stream, true)?;
            }
            match until {
                PendingWait::Event(event) => stream.wait(&event),
                PendingWait::Host(tick) => {
                    self.await_peers(tick);
                    stream.wait_word(&self.words.words[HOST_WORD], tick as u32)
                }
            }
        })?;
        if waits { self.progress.borrow_mut().write(lane, stream, false) } else { Ok(()) }
    }

    /// Ranks that share a GPU may share its hardware queues. An entry behind a wait for op `tick`
    /// of the Host lane can then block another rank before a meeting that precedes that op.
    /// Therefore this function waits until these meetings are over.
    fn await_peers(&self, tick: u64) {
        if matches!(self.transport, Transport::InProcess) {
            self.host.wait_done(Lane::Host as usize, self.host_met.get().min(tick));
        }
    }

    /// Sleeps while the stream of `lane` is many entries behind the rank's thread.
    fn keep_pace(&self, lane: Lane) -> Result<(), Failure> {
        let stream = &self.streams[lane as usize];
        let first = self.streams.iter().position(|s| Rc::ptr_eq(s, stream));
        let kept = self.paces.borrow_mut()[first.unwrap_or(lane as usize)].keep(stream)?;
        if kept { self.progress.borrow_mut().write(lane, stream, false) } else { Ok(()) }
    }

    /// Makes each stream report the end of its work, before the rank's thread waits.
    fn write_ends(&self) -> Result<(), Failure> {
        let mut progress = self.progress.borrow_mut();
        for &lane in &Lane::ALL[..STREAMS] {
            if !progress.is_up_to_date(lane) {
                progress.write(lane, self.stream(lane), false)?;
            }
        }
        Ok(())
    }

    /// Blocks until op `tick` of a stream has finished.
    fn await_stream(&self, lane: Lane, tick: u64) -> Result<(), Failure> {
        let found = self.marks.borrow_mut().find(lane as usize, tick).map(|m| Arc::clone(&m.event));
        let Some(event) = found else { return Ok(()) };
        event.synchronize()?;
        self.marks.borrow_mut().finish(lane, tick);
        Ok(())
    }

    /// Runs each op once on its stream, since the first launch loads the code of a kernel or
    /// matmul. Nothing else runs yet, and the results are discarded.
    fn warm_up(&self, ops: &[AdmittedOp]) -> Result<(), Error> {
        for op in ops {
            match op.op.collective() {
                Some(of) => self.warm_up_sum(op, of, self.stream(op.lane))?,
                None if matches!(op.op, Op::Copy { .. } | Op::Zero { .. }) => {}
                None => {
                    self.enqueue(op)?;
                    self.warm_up_beside_collectives(op)?;
                }
            }
        }
        for lane in &Lane::ALL[..STREAMS] {
            self.own("warm-up", self.stream(*lane).synchronize())?;
        }
        Ok(())
    }

    /// Runs the kernel of an in-process collective on this rank's memory alone.
    fn warm_up_sum(&self, op: &AdmittedOp, of: CollectiveOp, stream: &Stream) -> Result<(), Error> {
        let CollectiveOp { x, group, kind } = of;
        let reduce = match (&self.transport, kind) {
            (Transport::InProcess, CollectiveKind::AllReduce(reduce)) => reduce,
            (Transport::InProcess, CollectiveKind::ReduceScatter) => Reduction::Sum,
            _ => return Ok(()),
        };
        let size = self.rank().within(group).1;
        if size == 1 || size > launch::MAX_PEERS {
            return Ok(());
        }
        let own = [self.peer.at(x); launch::MAX_PEERS];
        let into = DeviceElements { at: own[0], len: x.len().min(WARM_SUM), dtype: x.dtype() };
        let launch = launch::combine_peers(into, &own[..size], reduce);
        let launch = launch.map_err(|problem| self.refused(op, &problem))?;
        launch.map_or(Ok(()), |launch| self.launch(op, stream, &launch))
    }
}

impl Executor for Gpu {
    fn submit(&self, op: AdmittedOp) {
        self.history.remember(&op);
        self.track(|overlap| overlap.submit(&op));
        if op.lane == Lane::Host {
            if op.op.group().is_some_and(|group| self.rank().within(group).1 > 1) {
                self.host_met.set(op.tick);
            }
            let clock = self.host_after.take();
            let after = self.marks.borrow_mut().for_host(&clock, op.tick);
            self.queue.push(HostJob { op, after });
            return;
        }
        // After a failure of any rank, no more ops start; work in progress ends.
        if self.host.world.failed() {
            return;
        }
        let paced = self.keep_pace(op.lane).map_err(|e| self.failed(&op, &e));
        let done = paced.and_then(|()| match &self.timeline {
            Some(timeline) => {
                let stream = self.stream(op.lane);
                timeline.around(&self.host, &op, stream, || self.enqueue(&op))
            }
            None => self.enqueue(&op),
        });
        if let Err(error) = done {
            self.fail_run(&error);
        }
        self.progress.borrow().submit(op.lane, op.tick);
    }

    fn record(&self, lane: Lane, tick: u64) {
        if lane != Lane::Host
            && let Err(failure) = self.mark(lane, tick)
            && !self.host.world.failed()
        {
            self.fail_run(&self.failed_at(lane, tick, &failure));
        }
    }

    fn wait(&self, lane: Lane, event: &Event) {
        self.track(|overlap| overlap.wait(lane, event));
        if lane == Lane::Host {
            let mut clock = self.host_after.get();
            join(&mut clock, &event.clock);
            self.host_after.set(clock);
        } else if let Err(failure) = self.wait_on_stream(lane, event)
            && !self.host.world.failed()
        {
            self.fail_run(&self.failed_at(Lane::ALL[event.lane as usize], event.tick(), &failure));
        }
    }

    fn sync(&self, lane: Lane, tick: u64) -> Result<(), Error> {
        self.track(|overlap| overlap.sync(lane, tick));
        if !self.host.world.failed()
            && let Err(failure) = self.write_ends()
        {
            self.fail_run(&self.failed_at(lane, tick, &failure));
        }
        if lane == Lane::Host {
            self.host.wait_done(lane as usize, tick);
        } else if !self.host.world.failed()
            && let Err(failure) = self.await_stream(lane, tick)
        {
            self.fail_run(&self.failed_at(lane, tick, &failure));
        }
        self.host.world.check(self.rank())
    }

    fn in_memory(&self, t: Tensor) -> Option<View<'_>> {
        (t.arena() == Arena::Pinned).then(|| self.host.memory.view(t))
    }

    fn in_memory_mut(&self, t: Tensor) -> Option<ViewMut<'_>> {
        (t.arena() == Arena::Pinned).then(|| self.host.memory.view_mut(t))
    }

    fn team(&self) -> Option<&ThreadTeam> {
        self.host.team()
    }

    fn read(&self, t: Tensor, out: &mut [f64]) -> Result<(), Error> {
        self.read_own(t, out)
    }

    fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        self.write_own(t, &|first, part| part.fill(&|i| value(first + i)))
    }

    fn write_f32(&self, t: Tensor, values: &[f32]) -> Result<(), Error> {
        self.write_own(t, &|first, part| part.store(0, &values[first..first + part.len()]))
    }

    fn fail(&self, step: u64, error: &Error) {
        self.host.world.fail(self.rank(), step, error);
    }

    fn begin_step(&self, step: u64) {
        self.host.step.store(step, Ordering::Relaxed);
    }

    fn finish(&self) {}

    fn activity(&self) -> Activity {
        self.host.meter.activity()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if let Transport::Nccl(_, watchdog) = &self.transport
            && self.host.world.failed()
        {
            watchdog.abort();
        }
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // `peers` keeps the memory longer. Events, words and the library's workspace end here.
        let _ = self.context.bind();
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
        if let Some(timeline) = &self.timeline {
            timeline.finish(&self.host);
        }
    }
}

/// Number of elements of the sum that loads its kernel.
const WARM_SUM: usize = 256;

const _: () = assert!(HOST_WORD < LANES);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Plan, Pool};

    #[test]
    fn copies_stay_within_pieces_of_pinned_memory() {
        let piece = memory::PIECE;
        let cases = [(0, 10), (piece - 4, 10), (5, 3 * piece), (piece, piece), (7, 0)];
        for (start, bytes) in cases {
            let mut next = 0;
            memory::pieces(start..start + bytes, &mut |part| {
                assert_eq!(part.start, start + next);
                assert!(!part.is_empty() && part.start / piece == (part.end - 1) / piece);
                next = part.end - start;
                Ok::<(), ()>(())
            })
            .unwrap();
            assert_eq!(next, bytes);
        }
    }

    #[test]
    fn what_copies_touch_is_pinned_in_whole_pages_and_states_are_not() {
        let mut plan = Plan::default();
        let mut tensor = |arena, pool, bytes: usize| {
            plan.tensor((arena, pool), "t", Dtype::U16, (1, bytes / 2));
        };
        let (staging, states) = (Pool::staging("staging"), Pool::of_the_host("states"));
        tensor(Arena::Pinned, staging, 5000);
        tensor(Arena::Pinned, states, 20_000);
        tensor(Arena::Device, Pool::new("parameters"), 4096);
        tensor(Arena::Pinned, staging, 3000);
        tensor(Arena::Pinned, staging, 9000);
        tensor(Arena::Pinned, states, 3 * 4096);
        tensor(Arena::Pinned, Pool::new("batches"), 64);
        // The ranges 0..5000; 25088..28160 and 28160..37160; 49664..49728.
        let expected = [0..8192, 24_576..40_960, 49_152..53_248];
        assert_eq!(memory::copied(&plan), expected);
        // The last term is the page of words.
        assert_eq!(pinned_bytes(&plan), 8192 + 16_384 + 4096 + 4096);
    }
}
