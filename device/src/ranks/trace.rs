//! Times and overlap of lanes' ops, for tests and displays. Random delays, for tests.

use crate::{Activity, AdmittedOp, Lane, Mode, Plan, Rank};
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The execution of one op.
#[derive(Clone, Debug)]
pub struct Span {
    /// Index of the rank.
    pub rank: usize,
    /// Lane of the op.
    pub lane: Lane,
    /// Name of the op.
    pub name: &'static str,
    /// Name of the first range that the op wrote.
    pub wrote: String,
    /// Start, since the trace began.
    pub start: Duration,
    /// End, since the trace began.
    pub end: Duration,
    /// Number of Compute ops that this lane knew to be finished when the op started.
    pub computed: u64,
}

/// Spans of all ranks, in order of their ends.
#[derive(Debug)]
pub struct Trace {
    steps: RangeInclusive<u64>,
    zero: Instant,
    spans: Mutex<Vec<Span>>,
}

impl Default for Trace {
    fn default() -> Self {
        Self::of_steps(0..=u64::MAX)
    }
}

impl Trace {
    /// A trace of these steps.
    pub fn of_steps(steps: RangeInclusive<u64>) -> Self {
        Self { steps, zero: Instant::now(), spans: Mutex::default() }
    }

    pub(crate) fn note(
        &self,
        rank: Rank,
        step: u64,
        op: &AdmittedOp,
        plan: &Plan,
        started: Instant,
        computed: u64,
    ) {
        if self.covers(step) {
            let (rank, lane, name) = (rank.index(), op.lane, op.op.name());
            let (start, end) = (started - self.zero, self.now());
            let wrote = Self::first_written(op, plan);
            self.add(Span { rank, lane, name, wrote, start, end, computed });
        }
    }

    pub(crate) fn covers(&self, step: u64) -> bool {
        self.steps.contains(&step)
    }

    /// Time since the trace began.
    pub(crate) fn now(&self) -> Duration {
        self.zero.elapsed()
    }

    /// Name of the first range that `op` writes.
    pub(crate) fn first_written(op: &AdmittedOp, plan: &Plan) -> String {
        let mut wrote = None;
        op.op.accesses(&mut |mode, t| {
            if mode != Mode::Read && wrote.is_none() {
                wrote = Some(plan.name(t).to_owned());
            }
        });
        wrote.unwrap_or_default()
    }

    pub(crate) fn add(&self, span: Span) {
        self.spans.lock().unwrap_or_else(|e| e.into_inner()).push(span);
    }

    /// All spans so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

/// Measures the time in which the Host lane works, alone and together with Compute.
#[derive(Debug)]
pub(crate) struct Meter {
    concurrent: bool,
    now: Mutex<MeterState>,
}

#[derive(Debug)]
struct MeterState {
    host: bool,
    compute: bool,
    since: Instant,
    host_seconds: f64,
    both_seconds: f64,
}

impl MeterState {
    fn advance(&mut self, at: Instant) {
        let seconds = at.saturating_duration_since(self.since).as_secs_f64();
        self.since = at;
        if self.host {
            self.host_seconds += seconds;
            self.both_seconds += if self.compute { seconds } else { 0.0 };
        }
    }

    fn set(&mut self, lane: Lane, active: bool) {
        match lane {
            Lane::Host => self.host = active,
            Lane::Compute => self.compute = active,
            Lane::TpComm
            | Lane::DpComm
            | Lane::H2d
            | Lane::D2h
            | Lane::ActivationsUp
            | Lane::ActivationsDown => {}
        }
    }
}

impl Meter {
    pub(crate) fn new(concurrent: bool) -> Self {
        let since = Instant::now();
        let now =
            MeterState { host: false, compute: false, since, host_seconds: 0.0, both_seconds: 0.0 };
        Self { concurrent, now: Mutex::new(now) }
    }

    pub(crate) fn start(&self, lane: Lane) -> Instant {
        let at = Instant::now();
        self.turn(lane, true, at);
        at
    }

    pub(crate) fn stop(&self, lane: Lane) {
        self.turn(lane, false, Instant::now());
    }

    fn turn(&self, lane: Lane, active: bool, at: Instant) {
        if matches!(lane, Lane::Host | Lane::Compute) {
            let mut now = self.now.lock().unwrap_or_else(|e| e.into_inner());
            now.advance(at);
            now.set(lane, active);
        }
    }

    /// Adds to the time in which Host and Compute worked together, for lanes that are not threads.
    pub(crate) fn add_overlap(&self, time: Duration) {
        let mut now = self.now.lock().unwrap_or_else(|e| e.into_inner());
        now.both_seconds += time.as_secs_f64();
    }

    pub(crate) fn activity(&self) -> Activity {
        let now = self.now.lock().unwrap_or_else(|e| e.into_inner());
        let overlapped_seconds = self.concurrent.then_some(now.both_seconds);
        Activity { host_seconds: now.host_seconds, overlapped_seconds }
    }
}

/// Seeded random delays before ops, so that tests see other interleavings.
pub(crate) struct Chaos {
    state: u64,
    limit_us: u64,
}

impl Chaos {
    pub(crate) const fn new(rank: Rank, lane: Lane, limit_us: u64) -> Self {
        Self { state: crate::random::key(rank.index() as u64, lane as u64), limit_us }
    }

    pub(crate) fn pause(&mut self) {
        if self.limit_us > 0 {
            self.state = crate::random::key(self.state, 0);
            std::thread::sleep(Duration::from_micros(self.state % self.limit_us));
        }
    }
}
