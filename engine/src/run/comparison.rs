//! Comparison of a run's evaluations: which one asks for a checkpoint (`train.keep_best`), and which
//! one ends the run (`train.patience`). Rank 0 decides for all ranks.
//!
//! A run that compares evaluates before it saves, so that the checkpoint of an evaluated step holds
//! the result. Any other run saves first.

use crate::run::evaluate::{EvaluationEnd, Verdict};
use crate::run::messages::EvaluationRank;
use crate::run::rank_progress::RankProgress;
use crate::run::save::{SavePoint, best::stored_history};
use crate::run::{ControlLink, Ranks, RunOptions};
use crate::step::Trainer;
use checkpoint::evaluations::{Evaluation, EvaluationHistory};
use config::Config;
use device::{Device, Error, Rank};
use std::sync::MutexGuard;

/// Result of an evaluation that rank 0 counts. One that is counted already has none.
#[derive(Clone, Copy, Default)]
struct CountedEvaluation {
    /// Whether its loss is the least so far.
    improves: bool,
    /// Whether a checkpoint of its step would be the best.
    is_best: bool,
}

/// Bits of a verdict that rank 0 tells the other ranks.
const BEST: u64 = 1;
const ENDS: u64 = 2;

/// Evaluations of the run that `options` resume, if the run compares evaluations.
pub(super) fn initial_history(config: &Config, options: &RunOptions) -> EvaluationHistory {
    let folder = options.checkpoints.as_ref().filter(|_| config.train.compares_evaluations());
    let stored = |folder| stored_history(options.resume.as_deref(), folder);
    let history = folder.map_or_else(EvaluationHistory::default, stored);
    let best = history.best().filter(|_| config.train.keep_best);
    history.with_best(best)
}

impl Ranks<'_> {
    fn compares(&self) -> bool {
        self.config.train.compares_evaluations()
    }

    fn evaluations(&self) -> MutexGuard<'_, EvaluationHistory> {
        self.evaluations.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The evaluations so far, with the best complete checkpoint; `None` if the run compares none.
    pub(super) fn compared(&self) -> Option<EvaluationHistory> {
        let best = self.saver.as_ref().and_then(|saver| saver.best());
        self.compares().then(|| self.evaluations().with_best(best))
    }

    /// Compares an evaluation over `targets` targets with those before it.
    pub(super) fn judge(
        &self,
        rank: Rank,
        evaluation: Evaluation,
        targets: u64,
    ) -> Result<(Verdict, Option<EvaluationRank>), Error> {
        if !self.compares() {
            return Ok((Verdict::default(), None));
        }
        let (mut own, mut standing) = (0, None);
        if rank.index() == 0 {
            let counted = self.count(evaluation, targets);
            let without_improvement = self.evaluations().without_improvement();
            standing = Some(EvaluationRank { improves: counted.improves, without_improvement });
            own = if counted.is_best { BEST } else { 0 } | self.ends();
        }
        Ok((self.agree_on_verdict(rank, own)?, standing))
    }

    /// Counts an evaluation on rank 0.
    fn count(&self, evaluation: Evaluation, targets: u64) -> CountedEvaluation {
        let mut history = self.evaluations();
        if history.is_over_other_targets(targets) {
            tracing::warn!(
                "the evaluation after step {} covers another part of the validation set than those before it (train.eval_batches): \
                 the comparison begins anew",
                evaluation.step
            );
            *history = EvaluationHistory::default();
            self.saver.iter().for_each(|saver| saver.forget_best());
        }
        let least = history.least();
        if !history.count(evaluation, targets) {
            return CountedEvaluation::default();
        }
        let improves = evaluation.is_better_than(least.as_ref());
        let best = self.saver.as_ref().map(|saver| saver.best());
        let is_best = self.config.train.keep_best
            && best.is_some_and(|best| evaluation.is_better_than(best.as_ref()));
        CountedEvaluation { improves, is_best }
    }

    /// The bit of a run that is out of patience.
    fn ends(&self) -> u64 {
        let patience = self.config.train.patience.map_or(u64::MAX, |patience| patience as u64);
        if self.evaluations().without_improvement() >= patience { ENDS } else { 0 }
    }

    /// Tells all ranks the decision of rank 0.
    fn agree_on_verdict(&self, rank: Rank, own: u64) -> Result<Verdict, Error> {
        let all = self.world.agree(rank, "evaluated", own)?;
        Ok(Verdict { is_best: all[0] & BEST != 0, ends: all[0] & ENDS != 0 })
    }

    /// Evaluates before the first step of this start, if the step before it asks for an evaluation.
    /// A stop during the evaluation ends the run, and the resumed run repeats the evaluation.
    pub(super) fn before_steps(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        reached: &mut RankProgress,
        link: &mut ControlLink<'_>,
    ) -> Result<(), Error> {
        let step = reached.step;
        let last = self.compares() && step == self.config.train.steps;
        if !reached.stopped && (self.is_eval_due(step) || last) {
            let end = self.evaluate(dev, trainer, step, link)?;
            self.take(reached, &end);
            if end.verdict.is_best {
                let skipped_in_a_row = self.options.skipped_in_a_row();
                let after = self.save_point(step, skipped_in_a_row, end.evaluation);
                self.save(dev, trainer, after, link.listener)?;
            }
        }
        // The run that this one resumes may have been out of patience.
        if self.config.train.patience.is_some() && !reached.stopped && !reached.out_of_patience {
            let own = if dev.rank().index() == 0 { self.ends() } else { 0 };
            reached.out_of_patience = self.agree_on_verdict(dev.rank(), own)?.ends;
        }
        Ok(())
    }

    /// Evaluates and saves after a step, if each is due.
    pub(super) fn after_step(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        reached: &mut RankProgress,
        due: SaveDue,
        link: &mut ControlLink<'_>,
    ) -> Result<(), Error> {
        let SaveDue { is_due, skipped_in_a_row } = due;
        let step = reached.step;
        let last = step == self.config.train.steps;
        let mut after = self.save_point(step, skipped_in_a_row, None);
        if !self.compares() {
            let saves = is_due || !reached.goes_on() || last;
            if saves {
                self.save(dev, trainer, after, link.listener)?;
            }
            if reached.goes_on() && self.is_eval_due(step) {
                reached.stopped = self.evaluate(dev, trainer, step, link)?.stopped;
                if reached.stopped && !saves {
                    self.save(dev, trainer, after, link.listener)?;
                }
            }
            return Ok(());
        }
        let mut saves = is_due || last;
        if reached.goes_on() && (self.is_eval_due(step) || last) {
            let end = self.evaluate(dev, trainer, step, link)?;
            self.take(reached, &end);
            saves |= end.verdict.is_best;
            after = self.save_point(step, skipped_in_a_row, end.evaluation);
        }
        if saves || !reached.goes_on() {
            self.save(dev, trainer, after, link.listener)?;
        }
        Ok(())
    }

    fn take(&self, reached: &mut RankProgress, end: &EvaluationEnd) {
        reached.out_of_patience = end.verdict.ends;
        // A run that has just ended is not interrupted.
        let ended = end.done
            && (reached.out_of_patience
                || self.compares() && reached.step == self.config.train.steps);
        reached.stopped = end.stopped && !ended;
    }

    fn save_point(
        &self,
        step: u64,
        skipped_in_a_row: u64,
        evaluation: Option<Evaluation>,
    ) -> SavePoint {
        SavePoint { step, skipped_in_a_row, evaluations: self.compared(), evaluation }
    }
}

/// Whether a save after a step is due, and the number of skipped steps in a row up to the step.
#[derive(Clone, Copy)]
pub(super) struct SaveDue {
    pub(super) is_due: bool,
    pub(super) skipped_in_a_row: u64,
}
