//! How far a rank's streams have come, as pinned words tell it without a call of the driver: for messages, for traces
//! and for the display of what the Host lane did beside Compute. A stream writes its word at milestones, where the rank's
//! thread waits, and around what may take long to wait for.

use super::driver::{Failure, Stream, Word};
use super::marks::STREAMS;
use crate::Lane;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// In a word: the stream waits for another lane. The rest is the low part of a tick.
const WAITS: u32 = 1;

/// The rank's thread's side.
#[derive(Debug)]
pub(super) struct Progress {
    /// By lane.
    streams: Vec<Passed>,
    /// By lane: what its word will say when all of it has run.
    told: [u64; STREAMS],
}

/// How far one stream has come.
#[derive(Clone, Debug)]
pub(super) struct Passed {
    word: Word,
    submitted: Arc<AtomicU64>,
}

/// What is known of a stream at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sight {
    /// Its last op that is known to be over; the low 31 bits of its number.
    pub(super) tick: u64,
    /// It has work, and waits for none of what may take long.
    pub(super) busy: bool,
}

impl Passed {
    pub(super) fn look(&self) -> Sight {
        let word = self.word.get();
        let tick = word >> 1;
        let submitted = (self.submitted.load(Ordering::Relaxed) as u32) << 1 >> 1;
        Sight { tick: u64::from(tick), busy: word & WAITS == 0 && tick != submitted }
    }
}

impl Progress {
    pub(super) fn new(words: &[Word]) -> Self {
        let passed = |word: &Word| Passed { word: word.clone(), submitted: Arc::default() };
        Self { streams: words.iter().map(passed).collect(), told: [0; STREAMS] }
    }

    pub(super) fn of(&self, lane: Lane) -> Passed {
        self.streams[lane as usize].clone()
    }

    /// Op `tick` of `lane` is enqueued.
    pub(super) fn submit(&self, lane: Lane, tick: u64) {
        self.streams[lane as usize].submitted.store(tick, Ordering::Relaxed);
    }

    /// The stream of `lane` tells its progress when it comes here.
    pub(super) fn tell(&mut self, lane: Lane, stream: &Stream, waits: bool) -> Result<(), Failure> {
        let Passed { word, submitted } = &self.streams[lane as usize];
        let tick = submitted.load(Ordering::Relaxed);
        self.told[lane as usize] = tick;
        stream.write_word(word, (tick as u32) << 1 | if waits { WAITS } else { 0 })
    }

    /// The word says already, or will, that all of `lane` is over.
    pub(super) fn is_told(&self, lane: Lane) -> bool {
        let submitted = self.streams[lane as usize].submitted.load(Ordering::Relaxed);
        self.told[lane as usize] == submitted
    }
}
