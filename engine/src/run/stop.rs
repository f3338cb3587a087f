//! How a run that is told to stop ends: after the same step, or the same batch of an evaluation, on all ranks.
//!
//! Ranks do not meet for it. The first rank that is done with a step looks whether the run was told to stop; the others
//! do as it did, whatever they would see. That is exact because the ranks are threads of one process, and no rank is done
//! with the next step before all have asked about this one: each step and each batch ends in a sum over ranks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What the ranks of a run share.
pub(crate) struct Stop {
    /// Set by whoever wants the run to end.
    told: Arc<AtomicBool>,
    /// The last turn that was asked about, from 1, and whether the run ends after it.
    verdict: Mutex<(u64, bool)>,
    /// A rank left its start unfinished.
    abandoned: AtomicBool,
}

/// What one rank asks with. Every rank asks as often as the others.
pub(crate) struct Turns<'a> {
    stop: &'a Stop,
    turn: u64,
}

impl Stop {
    pub(crate) const fn new(told: Arc<AtomicBool>) -> Self {
        Self { told, verdict: Mutex::new((0, false)), abandoned: AtomicBool::new(false) }
    }

    pub(crate) const fn turns(&self) -> Turns<'_> {
        Turns { stop: self, turn: 0 }
    }

    /// Whether the run was told to stop. Ranks may see different answers.
    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// For a rank that stops before its states are whole. All ranks must meet before one asks
    /// [`is_abandoned`](Self::is_abandoned).
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    /// Whether no step can follow, since a rank lacks its states.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    fn ends_after(&self, turn: u64) -> bool {
        let mut verdict = self.verdict.lock().unwrap_or_else(|e| e.into_inner());
        if verdict.0 < turn {
            *verdict = (turn, self.is_told());
        }
        verdict.1
    }
}

impl Turns<'_> {
    /// Asked after each step and each batch: whether the run ends here. The same answer on all ranks.
    pub(crate) fn end_here(&mut self) -> bool {
        self.turn += 1;
        self.stop.ends_after(self.turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_agree_whenever_the_run_is_told_to_stop() {
        let told = Arc::new(AtomicBool::new(false));
        let stop = Stop::new(Arc::clone(&told));
        let (mut first, mut second) = (stop.turns(), stop.turns());
        assert_eq!((first.end_here(), second.end_here()), (false, false));
        assert!(!first.end_here());
        told.store(true, Ordering::Relaxed);
        assert!(!second.end_here(), "the first rank went on");
        assert_eq!((second.end_here(), first.end_here()), (true, true));
    }
}
