//! When the ops of streams ran, for a trace: a pair of events around each op of the steps that it covers. These are
//! made as they are needed: only steps that are not traced allocate nothing.

use super::driver::{Failure, Stream, TimedEvent};
use crate::cpu::{Shared, Span, Trace};
use crate::{Admitted, Lane};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[derive(Debug)]
struct Ran {
    lane: Lane,
    name: &'static str,
    wrote: String,
    start: TimedEvent,
    end: TimedEvent,
}

#[derive(Debug)]
pub(super) struct Timeline {
    trace: Arc<Trace>,
    /// The GPU's zero, and when that was by the trace's clock.
    zero: TimedEvent,
    at: Duration,
    ran: RefCell<Vec<Ran>>,
}

impl Timeline {
    /// `None`: nothing is traced.
    pub(super) fn of(shared: &Shared, stream: &Stream) -> Result<Option<Self>, Failure> {
        let Some(trace) = shared.work.trace.clone() else { return Ok(None) };
        let zero = TimedEvent::record(stream)?;
        stream.synchronize()?;
        let at = trace.now();
        Ok(Some(Self { trace, zero, at, ran: RefCell::default() }))
    }

    /// Enqueues an op by `enqueue`, between two events where the step is traced.
    pub(super) fn around<E>(
        &self,
        shared: &Shared,
        (op, stream): (&Admitted, &Stream),
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.trace.covers(shared.step.load(Ordering::Relaxed)) {
            return enqueue();
        }
        // A trace that the driver refuses is no reason to end a run.
        let start = TimedEvent::record(stream);
        enqueue()?;
        if let (Ok(start), Ok(end)) = (start, TimedEvent::record(stream)) {
            let (lane, name) = (op.lane, op.op.name());
            let wrote = Trace::first_written(op, &shared.plan);
            self.ran.borrow_mut().push(Ran { lane, name, wrote, start, end });
        }
        Ok(())
    }

    /// After all streams have ended: into the trace.
    pub(super) fn finish(&self, shared: &Shared) {
        for Ran { lane, name, wrote, start, end } in self.ran.take() {
            let (Ok(start), Ok(end)) = (start.since(&self.zero), end.since(&self.zero)) else {
                continue;
            };
            let (rank, start, end) = (shared.rank.index(), self.at + start, self.at + end);
            self.trace.add(Span { rank, lane, name, wrote, start, end, computed: 0 });
        }
    }
}
