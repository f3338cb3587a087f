//! Evaluation on the validation set, by all ranks together.

use crate::run::fault_point::FaultPoint;
use crate::run::messages::Message;
use crate::run::{ControlLink, Ranks};
use crate::step::Trainer;
use crate::train::batch::EvalBatch;
use checkpoint::evaluations::Evaluation;
use config::TrainConfig;
use data::Corpus;
use device::{Device, Error};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Default of `train.eval_batches` between steps, in global batches.
const BETWEEN_STEPS: u64 = 8;
/// Default of `train.eval_batches` after the last step, in global batches. They need at most the
/// time of 200 steps.
const AFTER_LAST_STEP: u64 = 600;

/// Time between two messages about the progress of an evaluation.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// Largest number of global batches in an evaluation after `step`.
pub(crate) fn bound(train: &TrainConfig, step: u64) -> u64 {
    let default = if step >= train.steps { AFTER_LAST_STEP } else { BETWEEN_STEPS };
    match train.eval_batches {
        None => default,
        Some(0) => u64::MAX,
        Some(batches) => batches as u64,
    }
}

/// Decision after an evaluation, the same on all ranks.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Whether a checkpoint of this step would be the best.
    pub(crate) is_best: bool,
    /// Whether the run ends, since it has not improved for `train.patience` evaluations.
    pub(crate) ends: bool,
}

/// End of an evaluation, the same on all ranks.
#[derive(Clone, Copy, Default)]
pub(crate) struct EvaluationEnd {
    /// Whether all batches were evaluated.
    pub(crate) done: bool,
    /// Whether a stop was requested meanwhile.
    pub(crate) stopped: bool,
    pub(crate) verdict: Verdict,
    /// The step with its loss over the batches that are compared; `None` if it is not done.
    pub(crate) evaluation: Option<Evaluation>,
}

impl Ranks<'_> {
    /// Whether an evaluation follows `step`. The evaluation after the last step does not count.
    pub(crate) const fn is_eval_due(&self, step: u64) -> bool {
        let train = &self.config.train;
        train.eval_every > 0
            && step > 0
            && step.is_multiple_of(train.eval_every)
            && step < train.steps
    }

    /// Computes the mean validation loss of each corpus, over at most [`bound`] global batches, and
    /// reports it.
    pub(crate) fn evaluate(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        step: u64,
        link: &mut ControlLink<'_>,
    ) -> Result<EvaluationEnd, Error> {
        let _evaluating = tracing::debug_span!("evaluate", step).entered();
        self.reach(dev.rank(), FaultPoint::Evaluating, step);
        let per_batch = (self.config.batch.micro * self.config.parallel.data) as u64;
        // The limit counts global batches, so that every layout uses the same windows.
        let micro = |most: u64| most.saturating_mul(self.layout.micro_batches as u64);
        let most = micro(bound(&self.config.train, step));
        // The evaluation after the last step may have more batches. Only those of every evaluation
        // are compared.
        let of_every = micro(bound(&self.config.train, 0));
        let batches = |corpus: &Corpus| {
            let all = (corpus.num_eval_windows() as u64).div_ceil(per_batch);
            (most.min(all), all)
        };
        let every: Vec<_> = self.data.evaluations().collect();
        let all_batches: u64 = every.iter().map(|(_, corpus)| batches(corpus).0).sum();
        let (mut stopped, mut last_report, mut done) = (false, Instant::now(), 0);
        let (mut losses, mut sum, mut tokens, mut whole) = (Vec::new(), 0.0, 0, true);
        let (mut compared_sum, mut compared_tokens) = (0.0, 0);
        for (number, (name, corpus)) in every.iter().enumerate() {
            let (of_corpus, all) = batches(corpus);
            let (mut loss_of_corpus, mut compared_of_corpus) = (0.0, 0.0);
            for index in 0..of_corpus {
                if last_report.elapsed() >= REPORT_INTERVAL {
                    last_report = Instant::now();
                    link.listener.tell(Message::Evaluating { step, done, batches: all_batches });
                }
                let losses_on_host = trainer.evaluate(dev, EvalBatch { corpus: number, index });
                dev.sync(losses_on_host)?;
                let mut loss = [0.0];
                let last = self.layout.micro_batches;
                dev.read(trainer.losses_host.slice(last..last + 1), &mut loss)?;
                loss_of_corpus += loss[0];
                compared_of_corpus += if index < of_every { loss[0] } else { 0.0 };
                done += 1;
                stopped = link.vote.ends_here()?;
                if stopped && done < all_batches {
                    return Ok(EvaluationEnd { stopped, ..EvaluationEnd::default() });
                }
            }
            let targets = corpus.num_eval_targets(of_corpus * per_batch);
            compared_sum += compared_of_corpus;
            compared_tokens += corpus.num_eval_targets(of_every.min(of_corpus) * per_batch);
            losses.push(((*name).to_owned(), loss_of_corpus / targets as f64));
            (sum, tokens, whole) =
                (sum + loss_of_corpus, tokens + targets, whole && of_corpus == all);
        }
        if step == self.config.train.steps {
            self.evaluated.store(true, Ordering::SeqCst);
        }
        let sets = if losses.len() > 1 { losses } else { Vec::new() };
        let compared = Evaluation::new(step, compared_sum / compared_tokens as f64);
        let (verdict, standing) = self.judge(dev.rank(), compared, compared_tokens)?;
        let loss = sum / tokens as f64;
        link.listener.tell(Message::Eval { step, loss, whole, sets, standing });
        Ok(EvaluationEnd { done: true, stopped, verdict, evaluation: Some(compared) })
    }
}
