//! Points of a rank's streams that other lanes wait for, and the waits that each lane already has.
//!
//! A mark is a CUDA event from its lane's ring, which is created before step 1. If the event of a
//! mark has been reused, a lane that waits for its tick waits for the oldest later mark. This wait
//! ends later than necessary but never forms a cycle, because every marked op was submitted before.

use super::driver::{Event, Failure};
use crate::op::lane::{Clock, join};
use crate::{LANES, Lane};
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of lanes on streams: all but the last.
pub(super) const STREAMS: usize = LANES - 1;
/// Marks per lane.
const RING: usize = 1024;

/// An event recorded after op `tick`.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) tick: u64,
    pub(super) event: Arc<Event>,
    /// The ops of all lanes that have finished when the stream reaches the mark.
    clock: Clock,
    /// The Host lane's op that waits for the mark, or 0. Until it has run, the event is not reused.
    host_tick: u64,
}

#[derive(Debug)]
struct Ring {
    /// Recorded marks in order of ticks.
    recorded: VecDeque<Mark>,
    unused: Vec<Arc<Event>>,
}

#[derive(Debug)]
pub(super) struct Marks {
    rings: Vec<Ring>,
    /// For each lane, the ops that its stream's waits so far order before its next op.
    ordered: [Clock; LANES],
    /// The ops that the rank's thread has seen finish.
    finished: Clock,
}

/// A wait that a lane still needs.
#[derive(Debug)]
pub(super) enum PendingWait {
    Event(Arc<Event>),
    /// The number of an op of the Host lane.
    Host(u64),
}

impl Marks {
    /// Makes the events on the bound context.
    pub(super) fn new() -> Result<Self, Failure> {
        let ring = || {
            let unused = (0..RING).map(|_| Event::new().map(Arc::new)).collect::<Result<_, _>>()?;
            Ok(Ring { recorded: VecDeque::with_capacity(RING), unused })
        };
        let rings = (0..STREAMS).map(|_| ring()).collect::<Result<_, Failure>>()?;
        Ok(Self { rings, ordered: [[0; LANES]; LANES], finished: [0; LANES] })
    }

    /// An event to record after op `tick` of a stream. `None` if that op already has a mark.
    /// `host_done` waits until the Host lane has finished an op.
    pub(super) fn mark(
        &mut self,
        lane: Lane,
        tick: u64,
        host_done: &dyn Fn(u64),
    ) -> Option<Arc<Event>> {
        let ring = &mut self.rings[lane as usize];
        if ring.recorded.back().is_some_and(|last| last.tick >= tick) {
            return None;
        }
        let event = match ring.unused.pop() {
            Some(event) => event,
            None => {
                let oldest = ring.recorded.pop_front()?;
                host_done(oldest.host_tick);
                oldest.event
            }
        };
        let ordered = &mut self.ordered[lane as usize];
        ordered[lane as usize] = tick;
        let mark = Mark { tick, event: Arc::clone(&event), clock: *ordered, host_tick: 0 };
        ring.recorded.push_back(mark);
        Some(event)
    }

    /// The first mark at or after op `tick`.
    pub(super) fn find(&mut self, lane: usize, tick: u64) -> Option<&mut Mark> {
        let recorded = &mut self.rings.get_mut(lane)?.recorded;
        let at = recorded.partition_point(|mark| mark.tick < tick);
        recorded.get_mut(at)
    }

    /// Makes `lane`, a stream, wait for all of `clock`, the clock of an event on lane `first`.
    /// Calls `visit` for each missing wait. `host` is the number of ops that the Host lane has
    /// finished.
    pub(super) fn wait(
        &mut self,
        lane: Lane,
        first: usize,
        clock: &Clock,
        host: u64,
        visit: &mut dyn FnMut(PendingWait) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        const HOST: usize = Lane::Host as usize;
        self.finished[HOST] = self.finished[HOST].max(host);
        let finished = self.finished;
        let order = std::iter::once(first).chain((0..LANES).filter(|m| *m != first));
        for other in order {
            let (tick, ordered) = (clock[other], self.ordered[lane as usize][other]);
            if other == lane as usize || tick <= ordered || tick <= finished[other] {
                continue;
            }
            let mut known = [0; LANES];
            known[other] = tick;
            if other == HOST {
                visit(PendingWait::Host(tick))?;
            } else if let Some(mark) = self.find(other, tick) {
                known = mark.clock;
                let event = Arc::clone(&mark.event);
                visit(PendingWait::Event(event))?;
            }
            join(&mut self.ordered[lane as usize], &known);
        }
        Ok(())
    }

    /// The events that op `host_tick` of the Host lane waits for, by lane.
    pub(super) fn for_host(
        &mut self,
        clock: &Clock,
        host_tick: u64,
    ) -> [Option<(u64, Arc<Event>)>; STREAMS] {
        std::array::from_fn(|lane| {
            let tick = clock[lane];
            let ordered = &mut self.ordered[Lane::Host as usize][lane];
            if tick <= *ordered || tick <= self.finished[lane] {
                return None;
            }
            *ordered = tick;
            let mark = self.find(lane, tick)?;
            mark.host_tick = host_tick;
            Some((mark.tick, Arc::clone(&mark.event)))
        })
    }

    /// Records that the rank's thread has seen op `tick` finish.
    pub(super) fn finish(&mut self, lane: Lane, tick: u64) {
        let finished = &mut self.finished[lane as usize];
        *finished = tick.max(*finished);
    }
}
