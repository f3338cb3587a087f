//! Evaluation of the held-out part, by all ranks together.

use crate::config::TrainConfig;
use crate::run::Ranks;
use crate::run::fault_point::Place;
use crate::run::messages::{Listener, Message};
use crate::run::stop::Turns;
use crate::step::Trainer;
use device::{Device, Error};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Global batches of an evaluation between steps, unless `train.eval_batches` says otherwise.
const BETWEEN: u64 = 8;
/// And of the last one: all of a small held-out part, and at most the time of 200 steps.
const LAST: u64 = 600;

/// How far an evaluation has come is told so often.
const NEWS: Duration = Duration::from_millis(200);

/// Global batches that an evaluation after `step` may take.
pub(crate) fn bound(train: &TrainConfig, step: u64) -> u64 {
    let default = if step >= train.steps { LAST } else { BETWEEN };
    match train.eval_batches {
        None => default,
        Some(0) => u64::MAX,
        Some(batches) => batches as u64,
    }
}

impl Ranks<'_> {
    /// Whether an evaluation follows `step`, which is not the last.
    pub(crate) const fn is_eval_due(&self, step: u64) -> bool {
        let train = &self.config.train;
        train.eval_every > 0
            && step > 0
            && step.is_multiple_of(train.eval_every)
            && step < train.steps
    }

    /// Mean held-out loss over as many batches as [`bound`] allows. False: the run was told to stop meanwhile.
    pub(crate) fn evaluate(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        step: u64,
        (turns, listener): (&mut Turns<'_>, Listener<'_>),
    ) -> Result<bool, Error> {
        let _evaluating = tracing::debug_span!("evaluate", step).entered();
        self.passes(dev.rank(), Place::Evaluating, step);
        let per_batch = (self.config.batch.micro * self.config.parallel.data) as u64;
        let all = (self.data.num_eval_windows() as u64).div_ceil(per_batch);
        // Counted in global batches, so that every layout sees the same windows.
        let bound = bound(&self.config.train, step);
        let batches = bound.saturating_mul(self.built.micro_batches as u64).min(all);
        let (mut sum, mut stopped, mut told) = (0.0, false, Instant::now());
        for index in 0..batches {
            if told.elapsed() >= NEWS {
                told = Instant::now();
                listener.tell(Message::Evaluating { step, done: index, batches });
            }
            let losses_on_host = trainer.evaluate(dev, index);
            dev.sync(losses_on_host)?;
            let mut loss = [0.0];
            let last = self.built.micro_batches;
            dev.read(trainer.losses_host().slice(last..last + 1), &mut loss)?;
            sum += loss[0];
            stopped = turns.end_here();
            if stopped && index + 1 < batches {
                return Ok(false);
            }
        }
        let tokens = self.data.num_eval_targets(batches * per_batch);
        let whole = batches == all;
        if step == self.config.train.steps {
            self.evaluated.store(true, Ordering::SeqCst);
        }
        listener.tell(Message::Eval { step, loss: sum / tokens as f64, whole });
        Ok(!stopped)
    }
}
