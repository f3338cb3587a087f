//! Virtual GPUs: real data, real arithmetic, an enforced memory limit. Lanes run inline in the caller, or are
//! threads; the results are the same bits.

pub(crate) mod collectives;
mod gemm;
mod kernels;
mod lanes;
pub(crate) mod memory;
pub(crate) mod queue;
pub(crate) mod workers;
pub(crate) mod world;

pub use lanes::{Span, Trace};
pub use memory::HostPlace;
pub use workers::ScratchFloats;
pub use world::World;

use crate::error::OutOfMemory;
use crate::host::{Declared, HostContext, Slot};
use crate::lane::{Clock, join};
use crate::view::{View, ViewMut};
use crate::{
    Activity, Admitted, Arena, Crew, Device, Error, Event, Executor, LANES, Lane, Mode, Op, Plan,
    Rank, Tensor,
};
use lanes::{Chaos, Meter};
use memory::Memory;
use queue::Queue;
use std::cell::RefCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use workers::Workers;

/// How lanes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// Each op runs inside `submit`: program order is one of the orders that the events allow.
    Inline,
    /// One thread per lane; each op is held back by up to so many microseconds, seeded by rank and lane.
    Threads {
        /// 0: not held back.
        chaos_us: u64,
    },
}

/// How a virtual GPU is opened.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// How lanes run.
    pub lanes: Lanes,
    /// Bytes that the device's arena may take.
    pub memory_limit: u64,
    /// Where host memory goes.
    pub host: HostPlace,
    /// Scratch of kernels; the plan counts it.
    pub scratch: ScratchFloats,
    /// Of all lanes.
    pub work: HostWork,
}

/// How lanes that run on the host work: all of a virtual GPU's, the Host lane of a real one.
#[derive(Clone, Debug, Default)]
pub struct HostWork {
    /// Kernel threads besides the lane's own; `None`: kernels run on the lane's thread.
    pub crew: Option<Arc<Crew>>,
    /// Where the Host lane of a real GPU runs when it has no crew; empty: wherever its rank's thread may.
    pub cpus: Vec<u32>,
    /// Ops of the Host lane that can be queued before their submitter waits; never less than some 1,000.
    pub jobs: usize,
    /// Tasks are not run, and nothing is written before step 1: for the accounting of a stand-in driver, where no memory
    /// stands behind addresses.
    pub rehearsal: bool,
    /// Where spans of ops are noted.
    pub trace: Option<Arc<Trace>>,
    /// Ops of this name take so many times as long (for tests of overlap).
    pub slow: Option<(&'static str, u32)>,
    /// At this op of the rank, counted from 1, the kernel panics (for tests of faults): rank, lane, tick.
    pub panic_at: Option<(usize, Lane, u64)>,
    /// At this one it takes so long (likewise).
    pub stall_at: Option<(usize, Lane, u64, Duration)>,
}

/// A virtual GPU for `rank`.
///
/// # Errors
/// The plan does not fit the limit, or this machine's memory. The peers are told.
pub fn open(
    rank: Rank,
    plan: &Arc<Plan>,
    world: &Arc<World>,
    options: &CpuOptions,
) -> Result<Device, Error> {
    let memory = check_limit(rank, plan, options.memory_limit).and_then(|()| {
        let refused = |(arena, wanted)| Error::HostMemory { rank: rank.index(), arena, wanted };
        Memory::new(plan, &options.host).map(Arc::new).map_err(refused)
    });
    let memory = memory.inspect_err(|error| world.fail(rank, 0, error))?;
    let (work, threads) = (options.work.clone(), options.lanes != Lanes::Inline);
    let shared = Arc::new(Shared::new(rank, memory, plan, world, work, threads));
    let cpu = Cpu::new(&shared, options).inspect_err(|error| world.fail(rank, 0, error))?;
    Ok(Device::new(rank, Arc::clone(plan), Box::new(cpu)))
}

fn check_limit(rank: Rank, plan: &Plan, limit: u64) -> Result<(), Error> {
    let wanted = plan.bytes(Arena::Device);
    if wanted <= limit { Ok(()) } else { Err(out_of_memory(rank, plan, wanted, limit)) }
}

/// The plan, which makes `wanted` bytes with what comes beside it, does not fit `limit`.
pub(crate) fn out_of_memory(rank: Rank, plan: &Plan, wanted: u64, limit: u64) -> Error {
    let mut entries = plan.entries().iter().filter(|e| e.arena == Arena::Device);
    let first = entries.find(|e| e.range.end > limit);
    let free_at = first.map_or((plan.bytes(Arena::Device), "what kernels need".into()), |e| {
        (e.range.start, e.name.clone())
    });
    let mut pools = plan.pools(Arena::Device);
    pools.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let (rank, arena) = (rank.index(), Arena::Device);
    Error::from(Box::new(OutOfMemory { rank, arena, wanted, limit, free_at, pools }))
}

struct Cpu {
    shared: Arc<Shared>,
    /// By lane; empty when lanes run inline.
    queues: Vec<Arc<Queue<Job>>>,
    threads: Vec<JoinHandle<()>>,
    /// Per lane: what its next op waits for.
    pending: RefCell<[Clock; LANES]>,
    /// Inline lanes share one.
    workers: Workers,
}

struct Job {
    op: Admitted,
    after: Clock,
}

/// What the lanes of a rank share. The Host lane of a real GPU is one of these too.
pub(crate) struct Shared {
    pub(crate) rank: Rank,
    pub(crate) memory: Arc<Memory>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) world: Arc<World>,
    pub(crate) work: HostWork,
    pub(crate) step: AtomicU64,
    /// Per lane, ops finished. Stored by the lane, loaded by whoever waits.
    done: [AtomicU64; LANES],
    pub(crate) meter: Meter,
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    turned: Condvar,
}

impl Cpu {
    fn new(shared: &Arc<Shared>, options: &CpuOptions) -> Result<Self, Error> {
        let scratch = options.scratch;
        let workers = shared.workers(scratch);
        let (queues, threads, pending) = (Vec::new(), Vec::new(), RefCell::default());
        let mut cpu = Self { shared: Arc::clone(shared), queues, threads, pending, workers };
        if let Lanes::Threads { chaos_us } = options.lanes {
            for lane in Lane::ALL {
                let jobs = if lane == Lane::Host { options.work.jobs } else { 0 };
                let queue = Arc::new(Queue::new(jobs));
                cpu.queues.push(Arc::clone(&queue));
                let (shared, chaos) = (Arc::clone(shared), Chaos::new(shared.rank, lane, chaos_us));
                let whom = format!("the {lane:?} lane of rank {}", shared.rank.index());
                let run = move || shared.run_lane(&queue, &shared.workers(scratch), chaos);
                let started = std::thread::Builder::new().spawn(run);
                let refused =
                    |error: io::Error| Error::NoThread { whom, problem: error.to_string() };
                cpu.threads.push(started.map_err(refused)?);
            }
        }
        Ok(cpu)
    }
}

impl Shared {
    /// Joins the world; `memory` can be read by peers from here on. `threads`: lanes have threads of their own.
    pub(crate) fn new(
        rank: Rank,
        memory: Arc<Memory>,
        plan: &Arc<Plan>,
        world: &Arc<World>,
        work: HostWork,
        threads: bool,
    ) -> Self {
        world.join(rank, &memory);
        Self {
            rank,
            memory,
            plan: Arc::clone(plan),
            world: Arc::clone(world),
            step: AtomicU64::new(0),
            done: Default::default(),
            meter: Meter::new(threads),
            sleepers: AtomicUsize::new(0),
            mutex: Mutex::new(()),
            turned: Condvar::new(),
            work,
        }
    }

    pub(crate) fn cpus(&self) -> &[u32] {
        &self.work.cpus
    }

    pub(crate) fn workers(&self, scratch: ScratchFloats) -> Workers {
        Workers::new(self.work.crew.clone(), scratch)
    }

    /// The rank's kernel threads, where there is more than one.
    pub(crate) fn crew(&self) -> Option<&Crew> {
        self.work.crew.as_deref().filter(|crew| crew.threads() > 1)
    }

    fn run_lane(&self, jobs: &Queue<Job>, workers: &Workers, mut chaos: Chaos) {
        crate::panics::watch_this_thread();
        while let Some(Job { op, after }) = jobs.pop() {
            for (lane, tick) in after.into_iter().enumerate() {
                self.wait_done(lane, tick);
            }
            chaos.pause();
            self.run(&op, workers);
        }
    }

    /// After a failure anywhere ops are counted but not run: queues drain, waiters wake, nobody hangs.
    pub(crate) fn run(&self, op: &Admitted, workers: &Workers) {
        if !self.world.failed() {
            let (started, computed) = (self.meter.start(op.lane), self.done(Lane::Compute));
            let result = catch_unwind(AssertUnwindSafe(|| self.execute(op, workers)));
            if let Err(error) = result.unwrap_or_else(|payload| Err(self.panicked(op, &*payload))) {
                self.world.fail(self.rank, self.step.load(Ordering::Relaxed), &error);
            }
            self.slow_down(op, started);
            self.meter.stop(op.lane, started);
            if let Some(trace) = &self.work.trace {
                let step = self.step.load(Ordering::Relaxed);
                trace.note((self.rank, step), op, &self.plan, (started, computed));
            }
        }
        self.done[op.lane as usize].store(op.tick, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.mutex.lock());
            self.turned.notify_all();
        }
    }

    fn execute(&self, op: &Admitted, workers: &Workers) -> Result<(), Error> {
        if self.work.panic_at == Some((self.rank.index(), op.lane, op.tick)) {
            std::panic::resume_unwind(Box::new("injected fault"));
        }
        if let Some((rank, lane, tick, time)) = self.work.stall_at
            && (rank, lane, tick) == (self.rank.index(), op.lane, op.tick)
        {
            std::thread::sleep(time);
        }
        let named = |problem| Error::Task {
            rank: self.rank.index(),
            op: op.op.name(),
            site: op.site,
            problem,
        };
        match &op.op {
            Op::Copy { src, dst } => {
                workers.copy(self.memory.view(*src), self.memory.view_mut(*dst));
                Ok(())
            }
            Op::Host { .. } if self.work.rehearsal => Ok(()),
            Op::Host { task, arg } => {
                let mut declared: Declared<'_> = [const { None }; _];
                let accesses = task.accesses();
                if accesses.len() > declared.len() {
                    let (count, most) = (accesses.len(), declared.len());
                    return Err(named(format!("{count} ranges are more than {most}")));
                }
                for (slot, &(mode, t)) in declared.iter_mut().zip(accesses) {
                    *slot = Some(self.slot(mode, t));
                }
                let crew = workers.crew();
                task.run(*arg, &mut HostContext { crew, declared: &mut declared }).map_err(named)
            }
            op_ if op_.group().is_some() => collectives::run(op, self),
            kernel => kernels::run(kernel, &*self.memory, workers).map_err(named),
        }
    }

    fn slot(&self, mode: Mode, t: Tensor) -> Slot<'_> {
        match mode {
            Mode::Read => Slot::Read(t, self.memory.view(t)),
            Mode::Write | Mode::Update => Slot::Write(t, Some(self.memory.view_mut(t))),
        }
    }

    fn panicked(&self, op: &Admitted, payload: &(dyn std::any::Any + Send)) -> Error {
        let text = payload.downcast_ref::<&str>().copied().map(str::to_owned);
        let problem = text.or_else(crate::panics::last).unwrap_or_else(|| "no message".into());
        Error::Panicked { rank: self.rank.index(), op: op.op.name(), site: op.site, problem }
    }

    fn slow_down(&self, op: &Admitted, started: Instant) {
        if let Some((name, times)) = self.work.slow
            && name == op.op.name()
        {
            std::thread::sleep(started.elapsed() * (times - 1));
        }
    }

    /// Ops of `lane` that are known to be over, where it is no lane of this machine.
    pub(crate) fn note_done(&self, lane: Lane, tick: u64) {
        self.done[lane as usize].fetch_max(tick, Ordering::SeqCst);
    }

    /// Nothing is computed: see [`HostWork::rehearsal`].
    pub(crate) const fn is_rehearsal(&self) -> bool {
        self.work.rehearsal
    }

    /// Ops of `lane` that are over.
    pub(crate) fn done(&self, lane: Lane) -> u64 {
        self.done[lane as usize].load(Ordering::SeqCst)
    }

    pub(crate) fn wait_done(&self, lane: usize, tick: u64) {
        const YIELDS: usize = 100;
        let passed = || self.done[lane].load(Ordering::SeqCst) >= tick;
        for _ in 0..YIELDS {
            if passed() {
                return;
            }
            std::thread::yield_now();
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.mutex.lock().unwrap_or_else(|e| e.into_inner());
        while !passed() {
            guard = self.turned.wait(guard).unwrap_or_else(|e| e.into_inner());
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Executor for Cpu {
    fn submit(&self, op: Admitted) {
        let lane = op.lane as usize;
        match self.queues.get(lane) {
            None => self.shared.run(&op, &self.workers),
            Some(queue) => {
                let after = std::mem::take(&mut self.pending.borrow_mut()[lane]);
                queue.push(Job { op, after });
            }
        }
    }

    fn wait(&self, lane: Lane, event: &Event) {
        join(&mut self.pending.borrow_mut()[lane as usize], &event.clock);
    }

    fn sync(&self, lane: Lane, tick: u64) -> Result<(), Error> {
        self.shared.wait_done(lane as usize, tick);
        self.shared.world.check(self.shared.rank)
    }

    fn in_memory(&self, t: Tensor) -> Option<View<'_>> {
        Some(self.shared.memory.view(t))
    }

    fn in_memory_mut(&self, t: Tensor) -> Option<ViewMut<'_>> {
        Some(self.shared.memory.view_mut(t))
    }

    fn crew(&self) -> Option<&Crew> {
        self.shared.crew()
    }

    fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        self.shared.memory.view_mut(t).fill(value);
        Ok(())
    }

    fn fail(&self, step: u64, error: &Error) {
        self.shared.world.fail(self.shared.rank, step, error);
    }

    fn begin_step(&self, step: u64) {
        self.shared.step.store(step, Ordering::Relaxed);
    }

    fn finish(&self) {}

    fn activity(&self) -> Activity {
        self.shared.meter.activity()
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        self.queues.iter().for_each(|queue| queue.close());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
