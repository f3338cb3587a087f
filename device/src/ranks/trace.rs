//! What tests and displays want to know of lanes: when ops ran, how much ran at once, and random delays.

use crate::{Activity, Admitted, Lane, Mode, Plan, Rank};
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One op as it ran.
#[derive(Clone, Debug)]
pub struct Span {
    /// Index of the rank.
    pub rank: usize,
    /// On which lane.
    pub lane: Lane,
    /// The op.
    pub name: &'static str,
    /// Name of the first range that it wrote.
    pub wrote: String,
    /// Since the trace was made.
    pub start: Duration,
    /// Since the trace was made.
    pub end: Duration,
    /// Ops of the Compute lane that were over when it started, as far as this lane knew.
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
    /// Of what runs in these steps.
    pub fn of_steps(steps: RangeInclusive<u64>) -> Self {
        Self { steps, zero: Instant::now(), spans: Mutex::default() }
    }

    pub(crate) fn note(
        &self,
        (rank, step): (Rank, u64),
        op: &Admitted,
        plan: &Plan,
        (started, computed): (Instant, u64),
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

    /// Since the trace was made.
    pub(crate) fn now(&self) -> Duration {
        self.zero.elapsed()
    }

    /// Name of the first range that `op` writes.
    pub(crate) fn first_written(op: &Admitted, plan: &Plan) -> String {
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

    /// What has run so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

/// Adds up how long the Host lane worked, alone and beside Compute.
#[derive(Debug)]
pub(crate) struct Meter {
    concurrent: bool,
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    host: bool,
    compute: bool,
    since: Instant,
    host_seconds: f64,
    both_seconds: f64,
}

impl Now {
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
            Lane::TpComm | Lane::DpComm | Lane::H2d | Lane::D2h => {}
        }
    }
}

impl Meter {
    pub(crate) fn new(concurrent: bool) -> Self {
        let since = Instant::now();
        let now = Now { host: false, compute: false, since, host_seconds: 0.0, both_seconds: 0.0 };
        Self { concurrent, now: Mutex::new(now) }
    }

    pub(crate) fn start(&self, lane: Lane) -> Instant {
        let at = Instant::now();
        self.turn(lane, true, at);
        at
    }

    pub(crate) fn stop(&self, lane: Lane, _started: Instant) {
        self.turn(lane, false, Instant::now());
    }

    fn turn(&self, lane: Lane, active: bool, at: Instant) {
        if matches!(lane, Lane::Host | Lane::Compute) {
            let mut now = self.now.lock().unwrap_or_else(|e| e.into_inner());
            now.advance(at);
            now.set(lane, active);
        }
    }

    /// Of the time that the Host lane worked, so much was beside Compute: for lanes that are not threads.
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

/// Seeded delays before ops, so that tests see other interleavings.
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
