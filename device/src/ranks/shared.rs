//! What the lanes of a rank share, on virtual GPUs and on the Host lane of a real one: memory, how far each lane has come, and
//! how an op is run that is host work or a collective.

pub(crate) mod collectives;

use super::memory::Memory;
use super::trace::{Meter, Trace};
use super::world::World;
use crate::submit::task::{Declared, HostContext, HostOp, Slot};
use crate::{Admitted, Crew, Error, LANES, Lane, Mode, Op, Plan, Rank, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

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

    /// The rank's kernel threads, where there is more than one.
    pub(crate) fn crew(&self) -> Option<&Crew> {
        self.work.crew.as_deref().filter(|crew| crew.threads() > 1)
    }

    /// Runs an op on this thread: host tasks and collectives itself, anything else by `compute`, which may say what is wrong.
    /// After a failure anywhere ops are counted but not run: queues drain, waiters wake, nobody hangs.
    pub(crate) fn run(&self, op: &Admitted, compute: &dyn Fn(&Op) -> Result<(), String>) {
        if !self.world.failed() {
            let (started, computed) = (self.meter.start(op.lane), self.done(Lane::Compute));
            let result = catch_unwind(AssertUnwindSafe(|| self.execute(op, compute)));
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

    fn execute(
        &self,
        op: &Admitted,
        compute: &dyn Fn(&Op) -> Result<(), String>,
    ) -> Result<(), Error> {
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
            Op::Host { .. } if self.work.rehearsal => Ok(()),
            Op::Host { task, arg } => self.run_task(task, *arg).map_err(named),
            Op::Task { task } => self.run_task(task.on_cpus(), 0).map_err(named),
            Op::AllReduce { .. }
            | Op::ReduceScatter { .. }
            | Op::AllGather { .. }
            | Op::Broadcast { .. } => collectives::run(op, self),
            other => compute(other).map_err(named),
        }
    }

    fn run_task(&self, task: &HostOp, arg: u64) -> Result<(), String> {
        let mut declared: Declared<'_> = [const { None }; _];
        let accesses = task.accesses();
        if accesses.len() > declared.len() {
            let (count, most) = (accesses.len(), declared.len());
            return Err(format!("{count} ranges are more than {most}"));
        }
        for (slot, &(mode, t)) in declared.iter_mut().zip(accesses) {
            *slot = Some(self.slot(mode, t));
        }
        let crew = self.crew();
        task.run(arg, &mut HostContext { crew, declared: &mut declared })
    }

    fn slot(&self, mode: Mode, t: Tensor) -> Slot<'_> {
        match mode {
            Mode::Read => Slot::Read(t, self.memory.view(t)),
            Mode::Write | Mode::Update => Slot::Write(t, Some(self.memory.view_mut(t))),
        }
    }

    fn panicked(&self, op: &Admitted, payload: &(dyn std::any::Any + Send)) -> Error {
        let text = payload.downcast_ref::<&str>().copied().map(str::to_owned);
        let problem =
            text.or_else(crate::ranks::panics::last).unwrap_or_else(|| "no message".into());
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
