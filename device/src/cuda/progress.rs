//! The progress of a rank's streams, read from pinned words without a call of the driver. Messages,
//! traces and the display of the overlap between Host lane and Compute use it. A stream writes its
//! word at milestones, before the rank's thread waits, and around long waits.

use super::driver::{Failure, Stream, Word};
use super::marks::STREAMS;
use crate::Lane;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bit of a word: the stream waits for another lane. The other bits are the low part of a tick.
const WAITS: u32 = 1;

/// The rank thread's record of the progress.
#[derive(Debug)]
pub(super) struct Progress {
    /// Progress of each lane's stream.
    streams: Vec<StreamProgress>,
    /// For each lane, the tick that the word will have after all enqueued entries.
    written: [u64; STREAMS],
}

/// The progress of one stream.
#[derive(Clone, Debug)]
pub(super) struct StreamProgress {
    word: Word,
    submitted: Arc<AtomicU64>,
}

/// The known state of a stream at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamSnapshot {
    /// The stream's last op that is known to have finished, as the low 31 bits of its number.
    pub(super) tick: u64,
    /// Whether the stream has work and is in no long wait.
    pub(super) busy: bool,
}

impl StreamProgress {
    pub(super) fn look(&self) -> StreamSnapshot {
        let word = self.word.get();
        let tick = word >> 1;
        let submitted = (self.submitted.load(Ordering::Relaxed) as u32) << 1 >> 1;
        StreamSnapshot { tick: u64::from(tick), busy: word & WAITS == 0 && tick != submitted }
    }
}

impl Progress {
    pub(super) fn new(words: &[Word]) -> Self {
        let passed = |word: &Word| StreamProgress { word: word.clone(), submitted: Arc::default() };
        Self { streams: words.iter().map(passed).collect(), written: [0; STREAMS] }
    }

    pub(super) fn of(&self, lane: Lane) -> StreamProgress {
        self.streams[lane as usize].clone()
    }

    /// Records that op `tick` of `lane` is enqueued.
    pub(super) fn submit(&self, lane: Lane, tick: u64) {
        self.streams[lane as usize].submitted.store(tick, Ordering::Relaxed);
    }

    /// Makes the stream of `lane` write its progress when it reaches this point.
    pub(super) fn write(
        &mut self,
        lane: Lane,
        stream: &Stream,
        waits: bool,
    ) -> Result<(), Failure> {
        let StreamProgress { word, submitted } = &self.streams[lane as usize];
        let tick = submitted.load(Ordering::Relaxed);
        self.written[lane as usize] = tick;
        stream.write_word(word, (tick as u32) << 1 | if waits { WAITS } else { 0 })
    }

    /// Whether the word shows, or will show, that all ops of `lane` have finished.
    pub(super) fn is_up_to_date(&self, lane: Lane) -> bool {
        let submitted = self.streams[lane as usize].submitted.load(Ordering::Relaxed);
        self.written[lane as usize] == submitted
    }
}
