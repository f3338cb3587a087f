//! Stop of a run: all ranks end after the same step, or after the same batch of an evaluation.
//!
//! Ranks of one process need no barrier for a stop. The first rank that finishes a step reads the
//! request, and the other ranks follow its verdict. This is exact: each step and each batch ends
//! with a sum over ranks, so no rank can finish the next step before all ranks have read the
//! verdict on this step. Ranks of several processes send each other their votes.

use device::{Communicator, Error, Rank};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The request to stop, which the ranks of a run share.
pub(crate) struct StopSignal {
    /// Request of a caller to end the run.
    requested: Arc<AtomicBool>,
    /// Last turn with a verdict, from 1, and whether the run ends after this turn.
    verdict: Mutex<(u64, bool)>,
    /// Whether a rank stopped before its states were loaded.
    abandoned: AtomicBool,
}

/// A rank's vote. All ranks vote equally often.
pub(crate) struct StopVote<'a> {
    stop: &'a StopSignal,
    /// Communicator and rank, if ranks of other processes vote too.
    spread: Option<(&'a Communicator, Rank)>,
    turn: u64,
}

/// Bits of a vote between processes: a stop is requested, and a save is due.
const REQUESTED: u64 = 1;
const DUE: u64 = 2;

impl StopSignal {
    pub(crate) const fn new(requested: Arc<AtomicBool>) -> Self {
        Self { requested, verdict: Mutex::new((0, false)), abandoned: AtomicBool::new(false) }
    }

    pub(crate) fn vote<'a>(&'a self, world: &'a Communicator, rank: Rank) -> StopVote<'a> {
        let spread = world.has_remote_ranks().then_some((world, rank));
        StopVote { stop: self, spread, turn: 0 }
    }

    /// Whether a stop was requested. Ranks may see different answers.
    pub(crate) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Notes that a rank stops before its states are loaded. A barrier of all ranks must follow
    /// before [`is_abandoned`](Self::is_abandoned).
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    /// Whether no step can follow because a rank lacks its states.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    fn ends_after(&self, turn: u64) -> bool {
        let mut verdict = self.verdict.lock().unwrap_or_else(|e| e.into_inner());
        if verdict.0 < turn {
            *verdict = (turn, self.is_requested());
        }
        verdict.1
    }
}

impl StopVote<'_> {
    /// Whether the run ends here, the same on all ranks. All ranks call it after each step and each
    /// batch.
    pub(crate) fn ends_here(&mut self) -> Result<bool, Error> {
        self.after_step(false).map(|(ends, _)| ends)
    }

    /// Whether the run ends here, and whether to save the states. `due`: a save is due on this
    /// rank. Ranks of other processes learn only from the vote that a save is due on rank 0.
    pub(crate) fn after_step(&mut self, due: bool) -> Result<(bool, bool), Error> {
        self.turn += 1;
        let Some((world, rank)) = self.spread else {
            return Ok((self.stop.ends_after(self.turn), due));
        };
        let vote = if self.stop.is_requested() { REQUESTED } else { 0 } | if due { DUE } else { 0 };
        let all = world.agree(rank, "stop", vote)?.into_iter().fold(0, |all, vote| all | vote);
        Ok((all & REQUESTED != 0, all & DUE != 0))
    }
}

/// Guard that requests a stop of the run if the listener panics.
#[derive(Debug)]
pub(crate) struct PanicGuard<'a>(pub(crate) &'a AtomicBool);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_agree_whenever_the_run_is_told_to_stop() {
        let requested = Arc::new(AtomicBool::new(false));
        let stop = StopSignal::new(Arc::clone(&requested));
        let world = Communicator::new(2, 1, std::time::Duration::from_secs(1));
        let turns = |rank| stop.vote(&world, rank);
        let [mut first, mut second] =
            Rank::all(2, 1).map(turns).collect::<Vec<_>>().try_into().ok().unwrap();
        let ask = |turns: &mut StopVote<'_>| turns.ends_here().unwrap();
        assert_eq!((ask(&mut first), ask(&mut second)), (false, false));
        assert!(!ask(&mut first));
        requested.store(true, Ordering::Relaxed);
        assert!(!ask(&mut second), "the first rank went on");
        assert_eq!((ask(&mut second), ask(&mut first)), (true, true));
    }
}
