//! Real GPUs: lanes are CUDA streams (the Host lane a thread), ranks are dealt to GPUs in turn.
//!
//! Ops are enqueued inside `submit` and run later. A stream waits for another lane's stream by an event, for the
//! Host lane by a pinned word; the Host lane waits for streams by events. All of that, and all memory, is made in
//! [`open`]: a step allocates nothing.

mod blas;
mod blaslt;
mod collectives;
mod compile;
mod driver;
mod history;
mod host;
mod launch;
mod marks;
mod memory;
mod nccl;
mod nvrtc;
mod open;
mod probe;
mod watchdog;

pub(crate) use memory::Board;
pub use open::{Collectives, CudaOptions, open};
pub use probe::{GpuInfo, LibraryInfo, Probe, free_memory, probe};

/// For the tests of the kernels, which run them on an emulator.
#[doc(hidden)]
pub mod testing {
    pub use super::launch::{
        Args, Launch, MAX_PEERS, OPTIONS, SOURCES, add_bias, combine_peers, launches, scratch_bytes,
    };
}

use crate::cpu::Shared;
use crate::cpu::queue::Queue;
use crate::lane::{Clock, join};
use crate::view::View;
use crate::{
    Activity, Admitted, Arena, Dtype, Error, Event, Executor, LANES, Lane, Op, Plan, Rank, Tensor,
};
use blas::{Blas, Gemm, workspace_bytes};
use collectives::Transport;
use compile::{Kernels, NotLaunched};
use driver::{Context, Failure, Stream, Words};
use history::{History, Place};
use host::Job;
use launch::Launch;
use marks::{Marks, STREAMS, Until};
use memory::{Arrangement, Peer};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

/// Bytes of a GPU that a rank takes: those of `plan`, and behind them `scratch` for kernels and the workspace of products
/// on compute capability `sm`.
pub fn device_bytes(plan: &Plan, scratch: u64, sm: u32) -> u64 {
    Arrangement::new(plan, scratch, workspace_bytes(sm)).bytes
}

/// Numbers of the pinned words: how far each stream has come, then the Host lane.
const HOST_WORD: usize = STREAMS;

/// The executor of a rank on a GPU.
struct Gpu {
    /// The Host lane's side; pinned memory; the world.
    host: Arc<Shared>,
    context: Arc<Context>,
    peer: Arc<Peer>,
    sm: u32,
    /// Where kernels have room besides their tensors, and how much.
    scratch: (u64, u64),
    // Kernels and products go before their context's streams, streams before the words that they write.
    kernels: RefCell<Kernels>,
    blas: RefCell<Blas>,
    transport: Transport,
    /// By lane; the last is the rank's own, for `read` and `write`.
    streams: Vec<Rc<Stream>>,
    words: Words,
    marks: RefCell<Marks>,
    history: Arc<History>,
    /// What the next op of the Host lane waits for.
    host_after: Cell<Clock>,
    queue: Arc<Queue<Job>>,
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
        // A rank may be the first to see that another's GPU is lost.
        let whose = match error {
            Error::Gpu { rank, .. } => {
                Rank { tp: rank % own.tp_size, dp: rank / own.tp_size, ..own }
            }
            _ => own,
        };
        self.host.world.fail(whose, step, error);
    }

    /// The driver refused a call for `op`.
    fn failed(&self, op: &Admitted, failure: &Failure) -> Error {
        self.failed_at(op.lane, op.tick, failure)
    }

    fn failed_at(&self, lane: Lane, tick: u64, failure: &Failure) -> Error {
        let (rank, gpu) = (self.rank().index(), self.context.ordinal);
        let Place { op, site, problem } = self.history.place(lane, tick, failure);
        match site {
            Some(site) => Error::Gpu { rank, gpu, op, site, problem },
            None => Error::GpuSetup { rank, gpu, problem },
        }
    }

    /// Something else than the driver cannot do `op`.
    fn refused(&self, op: &Admitted, problem: &str) -> Error {
        let (rank, gpu) = (self.rank().index(), self.context.ordinal);
        Error::Gpu { rank, gpu, op: op.op.name(), site: op.site, problem: problem.into() }
    }

    /// Enqueues an op of a stream.
    fn enqueue(&self, op: &Admitted) -> Result<(), Error> {
        let stream = self.stream(op.lane);
        match op.op {
            Op::Copy { src, dst } => self.copy(op, stream, src, dst),
            Op::Zero { x } => {
                stream.zero(self.peer.at(x), x.bytes()).map_err(|e| self.failed(op, &e))
            }
            Op::Gemm { a, b, c, bias } => self.gemm(op, stream, &Gemm { a, b, c, bias }),
            _ if op.op.group().is_some() => self.collective(op, stream),
            _ => self.kernels(op, stream),
        }
    }

    fn copy(&self, op: &Admitted, stream: &Stream, src: Tensor, dst: Tensor) -> Result<(), Error> {
        let (from, to, bytes) = (self.peer.at(src), self.peer.at(dst), src.bytes());
        let done = match (src.arena(), dst.arena()) {
            (Arena::Device, Arena::Device) => stream.copy_on_device(from, to, bytes),
            (Arena::Pinned, _) => {
                pieces(src.range().start, bytes, &mut |at, n| stream.copy_up(from + at, to + at, n))
            }
            (Arena::Device, Arena::Pinned) => pieces(dst.range().start, bytes, &mut |at, n| {
                stream.copy_down(from + at, to + at, n)
            }),
        };
        done.map_err(|e| self.failed(op, &e))
    }

    fn gemm(&self, op: &Admitted, stream: &Stream, gemm: &Gemm) -> Result<(), Error> {
        let at = |t: Tensor| self.peer.at(t);
        let done = self.blas.borrow_mut().gemm(stream, gemm, &at);
        done.map_err(|problem| self.refused(op, &problem))?;
        let Some(bias) = gemm.bias.filter(|_| !gemm.takes_bias()) else { return Ok(()) };
        let mut result = Ok(());
        launch::add_bias((gemm.c, bias), &at, &mut |launch| {
            result = self.launch(op, stream, launch);
        })
        .map_err(|problem| self.refused(op, &problem))?;
        result
    }

    fn kernels(&self, op: &Admitted, stream: &Stream) -> Result<(), Error> {
        let at = |t: Tensor| self.peer.at(t);
        let mut result = Ok(());
        let (scratch, room) = self.scratch;
        let needed = launch::scratch_bytes(&op.op);
        if needed > room {
            let problem = format!("{needed} bytes of scratch are needed, {room} are there");
            return Err(self.refused(op, &problem));
        }
        launch::launches(&op.op, &at, scratch, self.sm, &mut |launch| {
            if result.is_ok() {
                result = self.launch(op, stream, launch);
            }
        })
        .map_err(|problem| self.refused(op, &problem))?;
        result
    }

    fn launch(&self, op: &Admitted, stream: &Stream, launch: &Launch) -> Result<(), Error> {
        self.kernels.borrow_mut().launch(stream, launch).map_err(|error| match error {
            NotLaunched::Missing => {
                self.refused(op, &format!("there is no kernel `{}`", launch.kernel))
            }
            NotLaunched::Failed(failure) => self.failed(op, &failure),
        })
    }

    /// Records an event behind op `tick` of a stream, unless there is one.
    fn mark(&self, lane: Lane, tick: u64) -> Result<(), Failure> {
        let host_done = |tick| self.host.wait_done(Lane::Host as usize, tick);
        let Some(event) = self.marks.borrow_mut().mark(lane, tick, &host_done) else {
            return Ok(());
        };
        let stream = self.stream(lane);
        stream.record(&event)?;
        stream.write_word(&self.words.words[lane as usize], tick as u32)
    }

    /// Tells a stream to wait for all of `clock`.
    fn wait_on_stream(&self, lane: Lane, event: &Event) -> Result<(), Failure> {
        let stream = self.stream(lane);
        let host_done = self.host.done(Lane::Host);
        let source = (event.lane as usize, &event.clock);
        self.marks.borrow_mut().wait(lane, source, host_done, &mut |until| match until {
            Until::Event(event) => stream.wait(&event),
            Until::Host(tick) => stream.wait_word(&self.words.words[HOST_WORD], tick as u32),
        })
    }

    /// Blocks until op `tick` of a stream is over.
    fn await_stream(&self, lane: Lane, tick: u64) -> Result<(), Failure> {
        let found = self.marks.borrow_mut().find(lane as usize, tick).map(|m| Arc::clone(&m.event));
        let Some(event) = found else { return Ok(()) };
        event.synchronize()?;
        self.marks.borrow_mut().finish(lane, tick);
        Ok(())
    }

    /// For the rank's own thread, while nothing in the lanes conflicts.
    fn own<T>(&self, call: &str, done: Result<T, Failure>) -> Result<T, Error> {
        let (rank, gpu) = (self.rank().index(), self.context.ordinal);
        done.map_err(|e| Error::GpuSetup { rank, gpu, problem: format!("{call}: {e}") })
    }
}

impl Executor for Gpu {
    fn submit(&self, op: Admitted) {
        if op.lane == Lane::Host {
            let clock = self.host_after.take();
            let after = self.marks.borrow_mut().for_host(&clock, op.tick);
            self.queue.push(Job { op, after });
            return;
        }
        // After a failure anywhere nothing more is started; what is under way ends.
        if self.host.world.failed() {
            return;
        }
        self.history.remember(&op);
        if let Err(error) = self.enqueue(&op) {
            self.fail_run(&error);
        }
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
        if lane == Lane::Host {
            let mut clock = self.host_after.get();
            join(&mut clock, &event.clock);
            self.host_after.set(clock);
        } else if let Err(failure) = self.wait_on_stream(lane, event)
            && !self.host.world.failed()
        {
            self.fail_run(&self.failed_at(lane, event.tick(), &failure));
        }
    }

    fn sync(&self, lane: Lane, tick: u64) -> Result<(), Error> {
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

    fn read(&self, t: Tensor, out: &mut [f64]) -> Result<(), Error> {
        let (at, size) = (self.peer.at(t), t.dtype().bytes() as usize);
        let own = &self.streams[STREAMS];
        let mut bytes = vec![0u8; OWN_BYTES.min(out.len() * size)];
        for (i, out) in out.chunks_mut(OWN_BYTES / size).enumerate() {
            let bytes = &mut bytes[..out.len() * size];
            self.own("read", own.download(at + (i * OWN_BYTES) as u64, bytes))?;
            let values = bytes.chunks_exact(size).map(|b| decode(t.dtype(), b));
            out.iter_mut().zip(values).for_each(|(o, x)| *o = x);
        }
        Ok(())
    }

    fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        if t.arena() == Arena::Pinned {
            self.host.memory.view_mut(t).fill(value);
            return Ok(());
        }
        let (at, size) = (self.peer.at(t), t.dtype().bytes() as usize);
        let own = &self.streams[STREAMS];
        let mut bytes = Vec::with_capacity(OWN_BYTES.min(t.len() * size));
        for start in (0..t.len()).step_by(OWN_BYTES / size) {
            let end = t.len().min(start + OWN_BYTES / size);
            bytes.clear();
            (start..end).for_each(|i| encode(t.dtype(), value(i), &mut bytes));
            self.own("write", own.upload(&bytes, at + (start * size) as u64))?;
        }
        Ok(())
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
        // Memory outlives this: the world holds it. Events, words and the library's workspace do not.
        let _ = self.context.bind();
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
    }
}

/// Elements that `read` and `write` move at a time take so many bytes.
const OWN_BYTES: usize = 1 << 20;

/// Host memory is pinned in pieces of the arena, and a copy must not reach across two of them.
fn pieces(
    start: u64,
    bytes: u64,
    copy: &mut dyn FnMut(u64, u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut at = 0;
    while at < bytes {
        let to_end = memory::PIECE - (start + at) % memory::PIECE;
        let n = to_end.min(bytes - at);
        copy(at, n)?;
        at += n;
    }
    Ok(())
}

fn decode(dtype: Dtype, bytes: &[u8]) -> f64 {
    use half::{bf16, f16};
    macro_rules! number {
        ($t:ty) => {
            bytes.try_into().map_or(f64::NAN, |b| f64::from(<$t>::from_le_bytes(b)))
        };
    }
    match dtype {
        Dtype::F16 => number!(f16),
        Dtype::Bf16 => number!(bf16),
        Dtype::F32 => number!(f32),
        Dtype::F64 => number!(f64),
        Dtype::I32 => number!(i32),
        Dtype::U16 => number!(u16),
    }
}

/// Rounded as the cpu backend rounds: through f32, unless it is F64.
fn encode(dtype: Dtype, value: f64, out: &mut Vec<u8>) {
    use half::f16;
    let single = value as f32;
    match dtype {
        Dtype::F16 => out.extend(f16::from_f32(single).to_le_bytes()),
        Dtype::Bf16 => out.extend(crate::view::round_bf16(single).to_le_bytes()),
        Dtype::F32 => out.extend(single.to_le_bytes()),
        Dtype::F64 => out.extend(value.to_le_bytes()),
        Dtype::I32 => out.extend((single as i32).to_le_bytes()),
        Dtype::U16 => out.extend((single as u16).to_le_bytes()),
    }
}

const _: () = assert!(HOST_WORD < LANES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_within_pieces_of_pinned_memory() {
        let piece = memory::PIECE;
        let cases = [(0, 10), (piece - 4, 10), (5, 3 * piece), (piece, piece), (7, 0)];
        for (start, bytes) in cases {
            let mut next = 0;
            pieces(start, bytes, &mut |at, n| {
                assert_eq!(at, next);
                assert!(n > 0 && (start + at) / piece == (start + at + n - 1) / piece);
                next = at + n;
                Ok(())
            })
            .unwrap();
            assert_eq!(next, bytes);
        }
    }

    #[test]
    fn storage_types_round_trip() {
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::I32, Dtype::U16] {
            // Halves have no sign.
            let last = if dtype == Dtype::U16 { 65_535.0 } else { -3.0 };
            for value in [0.0, 1.0, 100.0, last] {
                let mut bytes = Vec::new();
                encode(dtype, value, &mut bytes);
                assert_eq!(bytes.len() as u64, dtype.bytes());
                assert_eq!(decode(dtype, &bytes), value);
            }
        }
    }
}
