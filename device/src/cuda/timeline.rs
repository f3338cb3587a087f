//! Times of the ops of streams, for a trace: a pair of events around each op of the traced steps.
//! The events are created on demand, so traced steps allocate memory.

use super::driver::{Failure, Stream, TimedEvent};
use crate::ranks::rank_state::RankState;
use crate::ranks::trace::{Span, Trace};
use crate::{AdmittedOp, Lane};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The beginning of a traced step on the GPU. The driver's times are less exact for events that are
/// farther apart. An op is therefore timed from its step's anchor, and an anchor from the previous
/// anchor.
#[derive(Debug)]
struct Anchor {
    step: u64,
    event: TimedEvent,
    /// Time of the anchor on the trace's clock, in seconds.
    at: f64,
}

#[derive(Debug)]
struct TimedOp {
    lane: Lane,
    name: &'static str,
    wrote: String,
    anchor: Rc<Anchor>,
    start: TimedEvent,
    end: TimedEvent,
}

impl TimedOp {
    fn times(&self) -> Result<[Duration; 2], Failure> {
        let at = |event: &TimedEvent| {
            let seconds = self.anchor.at + event.since(&self.anchor.event)?;
            Ok(Duration::from_secs_f64(seconds.max(0.0)))
        };
        Ok([at(&self.start)?, at(&self.end)?])
    }
}

#[derive(Debug)]
pub(super) struct Timeline {
    trace: Arc<Trace>,
    /// A stream that is idle during steps.
    stream: Rc<Stream>,
    newest: RefCell<Option<Rc<Anchor>>>,
    ran: RefCell<Vec<TimedOp>>,
}

impl Timeline {
    /// Makes a timeline; `None` without a trace. `own` is a stream that no lane uses.
    pub(super) fn of(shared: &RankState, own: &Rc<Stream>) -> Option<Self> {
        let (trace, stream) = (shared.work.trace.clone()?, Rc::clone(own));
        Some(Self { trace, stream, newest: RefCell::default(), ran: RefCell::default() })
    }

    /// The anchor of `step`, created for the step's first op.
    fn anchor(&self, step: u64) -> Result<Rc<Anchor>, Failure> {
        let mut newest = self.newest.borrow_mut();
        if let Some(anchor) = newest.as_ref().filter(|anchor| anchor.step == step) {
            return Ok(Rc::clone(anchor));
        }
        let event = TimedEvent::record(&self.stream)?;
        self.stream.synchronize()?;
        let at = match newest.as_ref() {
            // Uses the GPU's clock again, since otherwise the spans of two steps could overlap.
            Some(before) => before.at + event.since(&before.event)?,
            None => self.trace.now().as_secs_f64(),
        };
        Ok(Rc::clone(newest.insert(Rc::new(Anchor { step, event, at }))))
    }

    /// Enqueues an op with `enqueue`, between two events if the step is traced.
    pub(super) fn around<E>(
        &self,
        shared: &RankState,
        op: &AdmittedOp,
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let step = shared.step.load(Ordering::Relaxed);
        if !self.trace.covers(step) {
            return enqueue();
        }
        // A driver's refusal to trace does not end a run.
        let started =
            self.anchor(step).and_then(|anchor| Ok((anchor, TimedEvent::record(stream)?)));
        enqueue()?;
        if let (Ok((anchor, start)), Ok(end)) = (started, TimedEvent::record(stream)) {
            let (lane, name) = (op.lane, op.op.name());
            let wrote = Trace::first_written(op, &shared.plan);
            self.ran.borrow_mut().push(TimedOp { lane, name, wrote, anchor, start, end });
        }
        Ok(())
    }

    /// Adds the spans to the trace, after all streams have finished.
    pub(super) fn finish(&self, shared: &RankState) {
        let rank = shared.rank.index();
        for ran in self.ran.take() {
            let Ok([start, end]) = ran.times() else { continue };
            let TimedOp { lane, name, wrote, .. } = ran;
            self.trace.add(Span { rank, lane, name, wrote, start, end, computed: 0 });
        }
    }
}
