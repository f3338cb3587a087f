//! Limits how far a rank's thread runs ahead of a stream. A GPU's queue of launches holds some
//! 1,000 entries. A thread that enqueues one more spins inside the driver and keeps other threads
//! of the process from enqueuing, or from querying events. The thread therefore sleeps before the
//! queue is full, on an event recorded every 64 entries.
//!
//! The sleep always ends. A stream waits only for earlier ops on this rank and, for collectives, on
//! the peers. The peers submit the same program and sleep only for the same reason.

use super::driver::{Event, Failure, Stream};

/// Entries between two milestones.
const STRIDE: u64 = 64;
/// Milestones ahead of the stream at which the thread sleeps: 512 entries.
const MOST: usize = 8;
/// Milestones ahead of the stream at which the thread wakes.
const LEFT: usize = 4;
/// Number of events. The oldest event in use is `MOST` milestones before the newest.
const RING: usize = 2 * MOST;

/// The pace of one stream.
#[derive(Debug)]
pub(super) struct Pace {
    milestones: Vec<Event>,
    /// Number of milestones so far.
    passed: usize,
    /// Entries of the stream at the next milestone.
    next: u64,
}

impl Pace {
    /// Makes the events on the bound context.
    pub(super) fn new() -> Result<Self, Failure> {
        let milestones = (0..RING).map(|_| Event::new()).collect::<Result<_, _>>()?;
        Ok(Self { milestones, passed: 0, next: STRIDE })
    }

    /// Waits for room in the queue before an entry is enqueued. Returns whether it set a milestone.
    pub(super) fn keep(&mut self, stream: &Stream) -> Result<bool, Failure> {
        if stream.entries() < self.next {
            return Ok(false);
        }
        stream.record(&self.milestones[self.passed % RING])?;
        self.next = stream.entries() + STRIDE;
        let newest = self.passed;
        self.passed += 1;
        if newest >= MOST && !self.milestones[(newest - MOST) % RING].has_passed()? {
            self.milestones[(newest - LEFT) % RING].synchronize()?;
        }
        Ok(true)
    }
}
