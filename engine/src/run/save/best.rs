//! The best checkpoint of a run: the saved one with the least validation loss. It stays on the disk
//! besides the newest checkpoints, and the manifest of every checkpoint names it.
//!
//! Invariant: the best checkpoint that a kept checkpoint names is on the disk. A run that goes back
//! to the kept checkpoint finds it.

use super::{SaveJob, SaveState, Saver, lock};
use checkpoint::evaluations::{Evaluation, EvaluationHistory};
use checkpoint::{Checkpoint, RunFolder};
use files::names::checkpoint_name;
use files::path_text::ShownPath;

/// A complete checkpoint of this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SavedCheckpoint {
    pub(super) step: u64,
    /// Step of the best checkpoint that it names.
    pub(super) best: Option<u64>,
}

/// Evaluations of a run up to the checkpoint `from`, which it resumes from. A fork counts anew. A
/// best checkpoint that is not in the `folder` any more is forgotten, with a warning.
pub(crate) fn stored_history(from: Option<&Checkpoint>, folder: &RunFolder) -> EvaluationHistory {
    let own = from.filter(|from| folder.has(from));
    let stored = own.and_then(|from| from.manifest().evaluations).unwrap_or_default();
    let Some(best) = stored.best() else { return stored };
    let found = folder.find().ok().flatten();
    if found.is_some_and(|found| found.has(&checkpoint_name(best.step))) {
        return stored;
    }
    tracing::warn!(
        "{}: the best checkpoint, of step {}, is not there any more; the next evaluation decides which checkpoint is the best",
        folder.path().shown(),
        best.step
    );
    stored.with_best(None)
}

impl Saver {
    /// Evaluation of the best checkpoint, also if it is being written.
    pub(crate) fn best(&self) -> Option<Evaluation> {
        lock(&self.shared).best_or_pending()
    }

    /// Forgets the best checkpoint: later losses cannot be compared with its loss.
    pub(crate) fn forget_best(&self) {
        let shared = &mut *lock(&self.shared);
        (shared.best, shared.pending) = (None, None);
    }

    /// Notes that a checkpoint of an evaluated step is about to be written.
    pub(super) fn note_evaluation(&self, job: &SaveJob) {
        let shared = &mut *lock(&self.shared);
        let better = |found: &Evaluation| found.is_better_than(shared.best.as_ref());
        shared.pending = job.evaluation.filter(|_| self.keeps_best).filter(better);
    }
}

impl SaveState {
    fn best_or_pending(&self) -> Option<Evaluation> {
        self.pending.or(self.best)
    }

    /// Notes that the checkpoint of `step` is complete. Returns the step of the oldest of the `keep`
    /// newest checkpoints, if there are as many. `needs_all`: no checkpoint may be removed.
    pub(super) fn complete(&mut self, step: u64, keep: usize, needs_all: bool) -> Option<u64> {
        self.best = self.pending.take().or(self.best);
        self.good.retain(|good| good.step < step);
        self.good.push(SavedCheckpoint { step, best: self.best.map(|best| best.step) });
        let surplus = if needs_all { 0 } else { self.good.len().saturating_sub(keep) };
        self.good.drain(..surplus);
        (!needs_all && self.good.len() == keep).then(|| self.good[0].step)
    }

    /// Steps of the best checkpoints that the kept ones name. At most one of them is older than all
    /// kept ones, since a better checkpoint is a newer one.
    pub(super) fn kept_best(&self) -> Vec<u64> {
        let named = self.good.iter().filter_map(|good| good.best);
        named.chain(self.best.map(|best| best.step)).collect()
    }

    /// Steps of the best checkpoints that stay if the disk has no room for another checkpoint: the
    /// best of the run and that of the newest checkpoint.
    pub(super) fn needed_best(&self) -> Vec<u64> {
        let newest = self.good.last().and_then(|good| good.best);
        newest.into_iter().chain(self.best.map(|best| best.step)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_of_every_kept_checkpoint_is_kept_and_at_most_one_is_older() {
        let mut state = SaveState::default();
        let mut disk: Vec<u64> = Vec::new();
        let losses = [5.0, 4.0, 4.5, 4.6, 4.7, 3.0, 3.5, 3.6, 2.0];
        for (step, loss) in (10..).step_by(10).zip(losses) {
            let evaluation = Evaluation::new(step, loss);
            state.pending = Some(evaluation).filter(|it| it.is_better_than(state.best.as_ref()));
            let oldest = state.complete(step, 2, false);
            disk.push(step);
            let kept = state.kept_best();
            disk.retain(|at| kept.contains(at) || oldest.is_none_or(|oldest| *at >= oldest));
            let named = state.good.iter().filter_map(|good| good.best);
            assert!(named.into_iter().all(|best| disk.contains(&best)), "{disk:?}");
            assert!(disk.len() <= 3 && disk.ends_with(&[step]), "{disk:?}");
        }
        assert_eq!(disk, [60, 80, 90]);
    }

    #[test]
    fn without_room_the_oldest_of_improving_checkpoints_is_not_needed() {
        let mut state = SaveState::default();
        for (step, loss) in [(10, 5.0), (20, 4.0)] {
            state.pending = Some(Evaluation::new(step, loss));
            state.complete(step, 2, false);
        }
        assert_eq!(state.kept_best(), [10, 20, 20]);
        assert_eq!(state.needed_best(), [20, 20]);
        // The best of the run is older than the newest checkpoint.
        state.complete(30, 2, false);
        assert_eq!(state.needed_best(), [20, 20]);
    }

    #[test]
    fn a_best_checkpoint_that_is_not_saved_leaves_the_best_before_it() {
        let pending = Some(Evaluation::new(10, 4.0));
        let mut state = SaveState { pending, ..SaveState::default() };
        state.complete(10, 2, false);
        state.pending = Some(Evaluation::new(20, 3.0));
        assert_eq!(state.best_or_pending().unwrap().step, 20);
        // The disk refuses it.
        state.pending = None;
        state.complete(30, 2, false);
        assert_eq!((state.best.unwrap().step, state.kept_best()), (10, vec![10, 10, 10]));
    }
}
