//! State that the lanes of a rank share, on virtual GPUs and on the Host lane of a real GPU:
//! memory, the progress of each lane, and the execution of host work and collectives.

pub(crate) mod collectives;

use super::communicator::Communicator;
use super::memory::Memory;
use super::trace::{Meter, Trace};
use crate::op::task::{DeclaredRanges, HostContext, HostOp, Slot};
use crate::threads::{panics, spin_wait::spin_for};
use crate::{AdmittedOp, Error, LANES, Lane, Mode, Op, Plan, Rank, Tensor, ThreadTeam};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Settings of lanes that run on the host: all lanes of a virtual GPU, and the Host lane of a real
/// GPU.
#[derive(Clone, Debug, Default)]
pub struct HostWork {
    /// Kernel threads in addition to the lane's thread. If `None`, kernels run on the lane's
    /// thread.
    pub team: Option<Arc<ThreadTeam>>,
    /// CPUs of a real GPU's Host lane without a team. If empty, the lane runs on any CPU of its
    /// rank's thread.
    pub cpus: Vec<u32>,
    /// Number of Host lane ops that fit the queue before the submitting thread waits. If it is
    /// below 1,024, 1,024 ops fit.
    pub jobs: usize,
    /// Skips tasks, and writes nothing before step 1. A stand-in driver uses it to account for
    /// memory, since its addresses have no memory.
    pub rehearsal: bool,
    /// Destination of the spans of ops.
    pub trace: Option<Arc<Trace>>,
    /// Ops with this name last this multiple of their time (for tests of overlap).
    pub slow: Option<(&'static str, u32)>,
    /// The kernel of this op panics (for tests of faults): rank, lane, and tick (the number of the
    /// op in the lane, from 1).
    pub panic_at: Option<(usize, Lane, u64)>,
    /// This op is delayed (for tests of faults): rank, lane, tick from 1, time.
    pub stall_at: Option<(usize, Lane, u64, Duration)>,
}

/// State that the lanes of a rank share. The Host lane of a real GPU also has a `RankState`.
pub(crate) struct RankState {
    pub(crate) rank: Rank,
    pub(crate) memory: Arc<Memory>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) world: Arc<Communicator>,
    pub(crate) work: HostWork,
    pub(crate) step: AtomicU64,
    /// Finished ops by lane. The lane stores the number, and waiting threads load it.
    done: [AtomicU64; LANES],
    pub(crate) meter: Meter,
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    changed: Condvar,
}

impl RankState {
    /// Joins the world; peers can then read `memory`. `threads`: whether lanes have own threads.
    pub(crate) fn new(
        rank: Rank,
        memory: Arc<Memory>,
        plan: &Arc<Plan>,
        world: &Arc<Communicator>,
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
            changed: Condvar::new(),
            work,
        }
    }

    /// The rank's kernel threads, if there is more than one.
    pub(crate) fn team(&self) -> Option<&ThreadTeam> {
        self.work.team.as_deref().filter(|team| team.threads() > 1)
    }

    /// Runs an op on this thread. Ops other than host tasks and collectives run in `compute`, which
    /// may return an error. After a failure of any rank, ops are counted but not run, so that
    /// queues drain, waiting threads wake, and no rank hangs.
    pub(crate) fn run(&self, op: &AdmittedOp, compute: &dyn Fn(&Op) -> Result<(), String>) {
        if !self.world.failed() {
            let (started, computed) = (self.meter.start(op.lane), self.done(Lane::Compute));
            let result = catch_unwind(AssertUnwindSafe(|| self.execute(op, compute)));
            if let Err(error) = result.unwrap_or_else(|payload| Err(self.panicked(op, &*payload))) {
                self.fail(&error);
            }
            self.slow_down(op, started);
            self.meter.stop(op.lane);
            if let Some(trace) = &self.work.trace {
                let step = self.step.load(Ordering::Relaxed);
                trace.note(self.rank, step, op, &self.plan, started, computed);
            }
        }
        self.done[op.lane as usize].store(op.tick, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.mutex.lock());
            self.changed.notify_all();
        }
    }

    /// Ends the run because of an error in the present step.
    pub(crate) fn fail(&self, error: &Error) {
        self.world.fail(self.rank, self.step.load(Ordering::Relaxed), error);
    }

    fn execute(
        &self,
        op: &AdmittedOp,
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
            other => match other.collective() {
                Some(of) => collectives::run(op, self, of),
                None => compute(other).map_err(named),
            },
        }
    }

    fn run_task(&self, task: &HostOp, arg: u64) -> Result<(), String> {
        let mut declared: DeclaredRanges<'_> = [const { None }; _];
        let accesses = task.accesses();
        if accesses.len() > declared.len() {
            let (count, most) = (accesses.len(), declared.len());
            return Err(format!("{count} ranges are more than {most}"));
        }
        for (slot, &(mode, t)) in declared.iter_mut().zip(accesses) {
            *slot = Some(self.slot(mode, t));
        }
        let team = self.team();
        task.run(arg, &mut HostContext { team, declared: &mut declared })
    }

    fn slot(&self, mode: Mode, t: Tensor) -> Slot<'_> {
        match mode {
            Mode::Read => Slot::Read(t, self.memory.view(t)),
            Mode::Write | Mode::Update => Slot::Write(t, Some(self.memory.view_mut(t))),
        }
    }

    fn panicked(&self, op: &AdmittedOp, payload: &(dyn std::any::Any + Send)) -> Error {
        let text = payload.downcast_ref::<&str>().copied().map(str::to_owned);
        let problem = text.or_else(panics::last).unwrap_or_else(|| "no message".into());
        Error::Panicked { rank: self.rank.index(), op: op.op.name(), site: op.site, problem }
    }

    fn slow_down(&self, op: &AdmittedOp, started: Instant) {
        if let Some((name, times)) = self.work.slow
            && name == op.op.name()
        {
            std::thread::sleep(started.elapsed() * (times - 1));
        }
    }

    /// Records that ops of `lane` up to `tick` have finished, for a lane that runs elsewhere.
    pub(crate) fn note_done(&self, lane: Lane, tick: u64) {
        self.done[lane as usize].fetch_max(tick, Ordering::SeqCst);
    }

    /// Number of finished ops of `lane`.
    pub(crate) fn done(&self, lane: Lane) -> u64 {
        self.done[lane as usize].load(Ordering::SeqCst)
    }

    pub(crate) fn wait_done(&self, lane: usize, tick: u64) {
        let passed = || self.done[lane].load(Ordering::SeqCst) >= tick;
        if spin_for(self.world.pause(), || passed().then_some(())).is_some() {
            return;
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.mutex.lock().unwrap_or_else(|e| e.into_inner());
        while !passed() {
            guard = self.changed.wait(guard).unwrap_or_else(|e| e.into_inner());
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
