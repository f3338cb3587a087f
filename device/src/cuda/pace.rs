//! How far a rank's thread runs ahead of a stream. A GPU's queue of launches holds some 1,000 entries; who enqueues
//! one more spins inside the driver and keeps other threads of the process from enqueuing, or from asking for events.
//! So the thread sleeps before that: on an event of its own, every so many entries.
//!
//! It never sleeps forever: what a stream waits for was submitted before, on this rank and, where it is a collective, by
//! the peers, which submit the same program and sleep for the same reason at most.

use super::driver::{Event, Failure, Stream};

/// Entries from one milestone to the next.
const STRIDE: u64 = 64;
/// With so many milestones ahead of the stream the thread sleeps: 512 entries.
const MOST: usize = 8;
/// Until there are so many.
const LEFT: usize = 4;
/// Events; the oldest that is still asked for is `MOST` behind.
const RING: usize = 2 * MOST;

/// Of one stream.
#[derive(Debug)]
pub(super) struct Pace {
    milestones: Vec<Event>,
    /// Milestones so far.
    passed: usize,
    /// Entries of the stream at the next one.
    next: u64,
}

impl Pace {
    /// On the bound context.
    pub(super) fn new() -> Result<Self, Failure> {
        let milestones = (0..RING).map(|_| Event::new()).collect::<Result<_, _>>()?;
        Ok(Self { milestones, passed: 0, next: STRIDE })
    }

    /// Something is about to be enqueued. True: a milestone was set, and there is room behind it.
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
