//! The [`Device`] of a rank's thread. It checks and orders every op and passes it to an executor.

use crate::error::Site;
use crate::op::lane::{Clock, join};
use crate::submit::hazard::{Hazards, Submission};
use crate::{
    Error, Event, Group, HostOp, LANES, Lane, Mode, Op, Plan, Tensor, ThreadTeam, View, ViewMut,
};
use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A place in the grid of ranks. Tensor-parallel neighbours are adjacent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank {
    /// Index in the TP group, in `0..tp_size`.
    pub tp: usize,
    /// TP degree.
    pub tp_size: usize,
    /// Index in the DP group, in `0..dp_size`.
    pub dp: usize,
    /// DP degree.
    pub dp_size: usize,
}

impl Rank {
    /// The rank's index in the grid: `dp * tp_size + tp`.
    pub const fn index(self) -> usize {
        self.dp * self.tp_size + self.tp
    }

    /// Number of ranks.
    pub const fn world_size(self) -> usize {
        self.tp_size * self.dp_size
    }

    /// The rank's index in its group, and the number of ranks in the group.
    pub const fn within(self, group: Group) -> (usize, usize) {
        match group {
            Group::Tp => (self.tp, self.tp_size),
            Group::Dp => (self.dp, self.dp_size),
            Group::World => (self.index(), self.world_size()),
        }
    }

    /// The grid index of member `i` of the rank's group.
    pub const fn member(self, group: Group, i: usize) -> usize {
        match group {
            Group::Tp => Self { tp: i, ..self }.index(),
            Group::Dp => Self { dp: i, ..self }.index(),
            Group::World => i,
        }
    }

    /// Every rank of a grid, by index.
    pub fn all(tp_size: usize, dp_size: usize) -> impl Iterator<Item = Self> {
        let of_dp = move |dp| (0..tp_size).map(move |tp| Self { tp, tp_size, dp, dp_size });
        (0..dp_size).flat_map(of_dp)
    }
}

/// An op that the hazard check has accepted. Only [`Device::submit`] makes one, so an executor may
/// form references to the op's ranges while it runs the op.
#[derive(Debug)]
pub struct AdmittedOp {
    /// The op that the executor runs.
    pub op: Op,
    pub(crate) site: Site,
    /// The lane that the op runs on.
    pub lane: Lane,
    /// The op's number on its lane, from 1.
    pub(crate) tick: u64,
}

/// Totals of a backend's work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Activity {
    /// Seconds in which the Host lane worked.
    pub host_seconds: f64,
    /// Seconds in which the Host lane and Compute worked at the same time. `None` if lanes run
    /// inline.
    pub overlapped_seconds: Option<f64>,
}

/// The interface of a backend. It executes ops. Between steps it gives the rank's thread access to
/// tensors.
pub trait Executor {
    /// Queues (or runs) the op after everything on its lane.
    fn submit(&self, op: AdmittedOp);
    /// Marks the point after op `tick` of `lane`, if the backend needs a mark of its own.
    fn record(&self, _lane: Lane, _tick: u64) {}
    /// Makes later ops of `lane` start after all ops in the event's clock. A wait for the last op
    /// of the event's lane is not enough: the lane may have got more waits since.
    fn wait(&self, lane: Lane, event: &Event);
    /// Blocks the caller until op `tick` of `lane` is finished, or the run has failed.
    fn sync(&self, lane: Lane, tick: u64) -> Result<(), Error>;
    /// Whether the backend holds data. Otherwise callers need not compute values to write.
    fn holds_data(&self) -> bool {
        true
    }
    /// Whether ops pass the hazard check. An executor that runs no op may skip the check.
    fn is_checked(&self) -> bool {
        true
    }
    /// A view of `t`, if the CPU can access its memory. No op conflicts while the caller holds it.
    fn in_memory(&self, _t: Tensor) -> Option<View<'_>> {
        None
    }
    /// A writable view of `t`, if the CPU can access its memory. No op in the lanes conflicts with
    /// the view, and the caller forms one view of a range at a time.
    fn in_memory_mut(&self, _t: Tensor) -> Option<ViewMut<'_>> {
        None
    }
    /// The rank's kernel threads, if it has any in addition to its own thread.
    fn team(&self) -> Option<&ThreadTeam> {
        None
    }
    /// Reads a tensor that is not [`in_memory`](Self::in_memory). No op in the lanes conflicts.
    fn read(&self, _t: Tensor, _out: &mut [f64]) -> Result<(), Error> {
        Err(Error::NoData)
    }
    /// Writes a tensor that is not [`in_memory`](Self::in_memory). No op in the lanes conflicts.
    fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error>;
    /// Writes fp32 values as [`write`](Self::write) does.
    fn write_f32(&self, t: Tensor, values: &[f32]) -> Result<(), Error> {
        self.write(t, &|i| f64::from(values[i]))
    }
    /// Informs the peers that this rank submits no more ops, and why.
    fn fail(&self, step: u64, error: &Error);
    /// Stores the step for the lanes' error messages.
    fn begin_step(&self, _step: u64) {}
    /// Leaves the run in order.
    fn finish(&self);
    /// The backend's [`Activity`].
    fn activity(&self) -> Activity {
        Activity::default()
    }
}

/// One rank's GPU: real, virtual or simulated. A `Device` stays on the rank's thread.
pub struct Device {
    /// Number of the device. Events of other devices are refused, since their clocks count other
    /// ops.
    id: u32,
    rank: Rank,
    plan: Arc<Plan>,
    executor: Box<dyn Executor>,
    state: RefCell<State>,
    finished: Cell<bool>,
    /// The current step, for error messages.
    step: Cell<u64>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("rank", &self.rank).finish_non_exhaustive()
    }
}

struct State {
    /// For each lane, the ops that are finished when its next op starts.
    clocks: [Clock; LANES],
    /// The ops that the rank's own thread has seen finish.
    main: Clock,
    /// State of the hazard check. `None`: ranges, overlaps and hazards of ops are not checked.
    hazards: Option<Hazards>,
    /// The first error. After it, `submit` does nothing and `sync` returns the error.
    error: Option<Error>,
    accesses: Vec<(Mode, Tensor)>,
}

impl Device {
    /// A device of `rank` with the memory layout `plan`. `executor` runs the admitted ops.
    pub fn new(rank: Rank, plan: Arc<Plan>, executor: Box<dyn Executor>) -> Self {
        static NEXT_ID: AtomicU32 = AtomicU32::new(1);
        let state = State {
            clocks: [[0; LANES]; LANES],
            main: [0; LANES],
            hazards: executor.is_checked().then(Hazards::new),
            error: None,
            accesses: Vec::with_capacity(16),
        };
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self {
            id,
            rank,
            plan,
            executor,
            state: RefCell::new(state),
            finished: Cell::new(false),
            step: Cell::new(0),
        }
    }

    /// The device's rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// The layout of the device's memory.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Submits an op; this is the only way to start work. It returns immediately, but if lanes run
    /// inline, it returns when the op has run. An error here or later in the lane is kept, and the
    /// next blocking call returns it. Ops after an error do not run.
    #[track_caller]
    pub fn submit(&self, lane: Lane, op: Op) {
        self.submit_at(lane, op, Location::caller());
    }

    /// Submits an op on behalf of the source line `site`.
    pub(crate) fn submit_at(&self, lane: Lane, op: Op, site: Site) {
        let mut state = self.state.borrow_mut();
        if state.error.is_some() {
            return;
        }
        match state.admit(lane, op, site, &self.plan) {
            Ok(op) => self.executor.submit(op),
            Err(error) => {
                self.executor.fail(self.step.get(), &error);
                state.error = Some(error);
            }
        }
    }

    /// Submits host work to the Host lane.
    #[track_caller]
    pub fn submit_host(&self, task: &Arc<HostOp>, arg: u64) {
        self.submit(Lane::Host, Op::Host { task: Arc::clone(task), arg });
    }

    /// The point on `lane` after all ops submitted to it so far.
    pub fn record(&self, lane: Lane) -> Event {
        let clock = self.state.borrow().clocks[lane as usize];
        let event = Event { lane: lane as u8, device: self.id, clock };
        if event.tick() > 0 {
            self.executor.record(lane, event.tick());
        }
        event
    }

    /// Ops submitted to `lane` from now on start after `event`. This call does not block.
    #[track_caller]
    pub fn wait(&self, lane: Lane, event: Event) {
        let mut state = self.state.borrow_mut();
        if self.is_foreign(&event) {
            let error = Error::ForeignEvent { site: Location::caller() };
            self.executor.fail(self.step.get(), &error);
            state.error.get_or_insert(error);
            return;
        }
        let clock = &mut state.clocks[lane as usize];
        if clock.iter().zip(&event.clock).any(|(known, tick)| known < tick) {
            join(clock, &event.clock);
            self.executor.wait(lane, &event);
        }
    }

    /// Makes `lane` wait for the present end of `other`: `wait(lane, record(other))`.
    #[track_caller]
    pub fn follow(&self, lane: Lane, other: Lane) {
        self.wait(lane, self.record(other));
    }

    /// Makes every lane wait for every lane.
    #[track_caller]
    pub fn fence(&self) {
        let all = Lane::ALL.map(|lane| self.record(lane));
        for lane in Lane::ALL {
            for event in all {
                self.wait(lane, event);
            }
        }
    }

    /// Whether `event` belongs to another device. The default event belongs to all devices.
    fn is_foreign(&self, event: &Event) -> bool {
        event.device != self.id && event.clock != Clock::default()
    }

    /// Blocks until `event` has passed.
    ///
    /// # Errors
    /// The first error on this rank, or `PeerFailed`.
    #[track_caller]
    pub fn sync(&self, event: Event) -> Result<(), Error> {
        if self.is_foreign(&event) {
            return Err(Error::ForeignEvent { site: Location::caller() });
        }
        let mut state = self.state.borrow_mut();
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        // Waits for all lanes of the clock: the event's lane may have got waits since its last op.
        for (lane, tick) in Lane::ALL.into_iter().zip(event.clock) {
            let pending = tick > state.main[lane as usize] || lane as u8 == event.lane;
            if pending && let Err(error) = self.executor.sync(lane, tick) {
                state.error = Some(error.clone());
                return Err(error);
            }
        }
        join(&mut state.main, &event.clock);
        Ok(())
    }

    /// Blocks until all submitted ops of every lane have finished.
    ///
    /// # Errors
    /// The errors of `sync`.
    #[track_caller]
    pub fn sync_all(&self) -> Result<(), Error> {
        Lane::ALL.into_iter().try_for_each(|lane| self.sync(self.record(lane)))
    }

    /// Copies `t` to `out`, widened to fp64 (exact for every storage type). Callers first `sync`
    /// with an event after its last write; the hazard check enforces it.
    ///
    /// # Errors
    /// The errors of `sync`. Also a missing `sync`, and a backend without data.
    #[track_caller]
    pub fn read(&self, t: Tensor, out: &mut [f64]) -> Result<(), Error> {
        self.look(t, out.len(), Location::caller())?;
        match self.executor.in_memory(t) {
            Some(view) => view.widen(out),
            None => self.executor.read(t, out)?,
        }
        Ok(())
    }

    /// Copies `t` to `out` as fp32, rounded if fp32 is not exact; otherwise like
    /// [`read`](Self::read). Reads host memory at full speed.
    ///
    /// # Errors
    /// The errors of `read`.
    #[track_caller]
    pub fn read_f32(&self, t: Tensor, out: &mut [f32]) -> Result<(), Error> {
        self.look(t, out.len(), Location::caller())?;
        if let Some(view) = self.executor.in_memory(t) {
            view.load(0, out);
            return Ok(());
        }
        let mut exact = vec![0.0; out.len().min(1 << 18)];
        for (i, out) in out.chunks_mut(1 << 18).enumerate() {
            let (from, exact) = (i << 18, &mut exact[..out.len()]);
            self.executor.read(t.slice(from..from + out.len()), exact)?;
            out.iter_mut().zip(exact).for_each(|(to, from)| *to = *from as f32);
        }
        Ok(())
    }

    /// Checks that the rank's thread may read `t` into `room` elements.
    fn look(&self, t: Tensor, room: usize, site: Site) -> Result<(), Error> {
        self.touch(Mode::Read, t, site)?;
        if room != t.len() {
            let problem = format!("{} elements into {room}", t.len());
            return Err(Error::Op { op: "read", site, problem });
        }
        Ok(())
    }

    /// Sets `t` from values by index, rounded. Callers first `sync` with events after its last
    /// accesses.
    ///
    /// # Errors
    /// The errors of `read`.
    #[track_caller]
    pub fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        self.touch(Mode::Write, t, Location::caller())?;
        self.executor.write(t, value)
    }

    pub(crate) fn executor(&self) -> &dyn Executor {
        &*self.executor
    }

    /// Borrows the state. No op can be submitted while the borrow lives.
    pub(crate) fn lock(&self) -> impl Sized {
        self.state.borrow_mut()
    }

    /// Checks an access by the rank's own thread.
    pub(crate) fn touch(&self, mode: Mode, t: Tensor, site: Site) -> Result<(), Error> {
        let State { main, hazards, error, .. } = &mut *self.state.borrow_mut();
        if let Some(error) = error {
            return Err(error.clone());
        }
        let submission = Submission { op: "access", site, lane: None, clock: main };
        check_plan(&submission, t, &self.plan)?;
        match hazards {
            Some(hazards) => Ok(hazards.access(&submission, mode, t, &self.plan)?),
            None => Ok(()),
        }
    }

    /// The device's [`Activity`] since it was opened.
    pub fn activity(&self) -> Activity {
        self.executor.activity()
    }

    /// Sets the step that later errors name.
    pub fn begin_step(&self, step: u64) {
        self.step.set(step);
        self.executor.begin_step(step);
    }

    /// Waits for all ops and leaves the run in order. A device that is dropped without `finish`
    /// counts as failed, and its peers are informed.
    ///
    /// # Errors
    /// The errors of `sync`.
    pub fn finish(self) -> Result<(), Error> {
        self.leave()
    }

    /// Does the work of [`finish`](Self::finish) for an owner that keeps the device.
    pub(crate) fn leave(&self) -> Result<(), Error> {
        self.sync_all()?;
        self.finished.set(true);
        self.executor.finish();
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.finished.get() {
            let why = crate::threads::panics::last().unwrap_or_else(|| "it returned early".into());
            let died = || Error::RankDied { rank: self.rank.index(), step: self.step.get(), why };
            let error = self.state.borrow().error.clone().unwrap_or_else(died);
            self.executor.fail(self.step.get(), &error);
        }
    }
}

impl State {
    fn admit(&mut self, lane: Lane, op: Op, site: Site, plan: &Plan) -> Result<AdmittedOp, Error> {
        let name = op.name();
        op.check(lane).map_err(|problem| Error::Op { op: name, site, problem })?;
        let clock = &mut self.clocks[lane as usize];
        join(clock, &self.main);
        clock[lane as usize] += 1;
        let submission = Submission { op: name, site, lane: Some(lane), clock };
        let Some(hazards) = &mut self.hazards else {
            return Ok(AdmittedOp { op, site, lane, tick: clock[lane as usize] });
        };
        self.accesses.clear();
        op.accesses(&mut |mode, t| self.accesses.push((mode, t)));
        for (i, &(mode, t)) in self.accesses.iter().enumerate() {
            check_plan(&submission, t, plan)?;
            for &(other_mode, other) in &self.accesses[..i] {
                let both_read = mode == Mode::Read && other_mode == Mode::Read;
                if !both_read && t.overlaps(other) {
                    let (first, second) = (plan.name(other).to_owned(), plan.name(t).to_owned());
                    return Err(Error::Overlap { op: name, site, first, second });
                }
            }
        }
        for &(mode, t) in &self.accesses {
            hazards.access(&submission, mode, t, plan)?;
        }
        hazards.remember(&submission);
        Ok(AdmittedOp { op, site, lane, tick: clock[lane as usize] })
    }
}

fn check_plan(s: &Submission<'_>, t: Tensor, plan: &Plan) -> Result<(), Error> {
    if plan.contains(t) {
        return Ok(());
    }
    let (r, tensor) = (t.range(), plan.name(t).to_owned());
    Err(Error::OutOfPlan { op: s.op, site: s.site, tensor, start: r.start, end: r.end })
}
