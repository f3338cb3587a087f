//! How a run that is told to stop ends: after the same step, or the same batch of an evaluation, on all ranks.
//!
//! Ranks do not meet for it. The first rank that is done with a step looks whether the run was told to stop; the others
//! do as it did, whatever they would see. That is exact where the ranks are threads of one process, and no rank is done
//! with the next step before all have asked about this one: each step and each batch ends in a sum over ranks. Ranks in
//! several processes tell each other.

use device::{Communicator, Error, Rank};
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
    /// Of a rank that others in other processes ask with.
    spread: Option<(&'a Communicator, Rank)>,
    turn: u64,
}

/// Bits of what ranks in several processes tell each other.
const TOLD: u64 = 1;
const DUE: u64 = 2;

impl Stop {
    pub(crate) const fn new(told: Arc<AtomicBool>) -> Self {
        Self { told, verdict: Mutex::new((0, false)), abandoned: AtomicBool::new(false) }
    }

    pub(crate) fn turns<'a>(&'a self, world: &'a Communicator, rank: Rank) -> Turns<'a> {
        let spread = world.has_remote_ranks().then_some((world, rank));
        Turns { stop: self, spread, turn: 0 }
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
    pub(crate) fn end_here(&mut self) -> Result<bool, Error> {
        self.after_step(false).map(|(ends, _)| ends)
    }

    /// The same, and whether the states are to be saved, as is `due` here: ranks of other processes do not see the wishes
    /// of rank 0.
    pub(crate) fn after_step(&mut self, due: bool) -> Result<(bool, bool), Error> {
        self.turn += 1;
        let Some((world, rank)) = self.spread else {
            return Ok((self.stop.ends_after(self.turn), due));
        };
        let told = if self.stop.is_told() { TOLD } else { 0 } | if due { DUE } else { 0 };
        let all = world.agree(rank, "stop", told)?.into_iter().fold(0, |all, told| all | told);
        Ok((all & TOLD != 0, all & DUE != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_agree_whenever_the_run_is_told_to_stop() {
        let told = Arc::new(AtomicBool::new(false));
        let stop = Stop::new(Arc::clone(&told));
        let world = Communicator::new(2, 1, std::time::Duration::from_secs(1));
        let turns = |rank| stop.turns(&world, rank);
        let [mut first, mut second] =
            Rank::all(2, 1).map(turns).collect::<Vec<_>>().try_into().ok().unwrap();
        let ask = |turns: &mut Turns<'_>| turns.end_here().unwrap();
        assert_eq!((ask(&mut first), ask(&mut second)), (false, false));
        assert!(!ask(&mut first));
        told.store(true, Ordering::Relaxed);
        assert!(!ask(&mut second), "the first rank went on");
        assert_eq!((ask(&mut second), ask(&mut first)), (true, true));
    }
}
