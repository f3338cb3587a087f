//! Turns the messages of a run into metrics, progress lines and warnings.

use super::guess::GuessWatch;
use super::{Session, first_loss};
use crate::report::progress::{EvalLine, Progress, ProgressCount, StepLine};
use config::{Precision, UpdateMode};
use engine::metrics::{MetricsWriter, StepMetrics};
use engine::run::{Difference, EvaluationRank, Message, StepReport};
use layout::build::{device_bytes, update_mode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use topology::counted;

/// Results of the messages of a run so far.
pub(super) struct Watch {
    pub(super) metrics: MetricsWriter,
    pub(super) progress: Progress,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) last: Option<StepReport>,
    /// Step of the newest checkpoint.
    pub(super) saved: Option<u64>,
    /// Newest step that could not be saved, with the reason.
    pub(super) not_saved: Option<(u64, String)>,
    /// Step and loss of the last evaluation, and whether it covers the whole validation set.
    pub(super) validation: Option<(u64, f64, bool)>,
    /// Whether the training loss is above that of a guess.
    pub(super) guess: GuessWatch,
    pub(super) train_seconds: f64,
    /// Number of steps by the outcome of their speculative updates: none, committed, redone.
    pub(super) speculation: [u64; 3],
    /// Number of steps that ran twice, and how many of these gave different bits.
    pub(super) verified: [u64; 2],
}

impl Watch {
    pub(super) fn hear(&mut self, session: &Session<'_>, message: Message) {
        let config = &session.run.loaded.config;
        match message {
            Message::Step(step) => self.step(session, &step),
            Message::Eval { step, loss, whole, sets, standing } => {
                self.metrics.eval(step, loss, whole, &sets);
                let standing = standing.map_or_else(String::new, words);
                let line = EvalLine { step, steps: config.train.steps, loss, whole, sets: &sets };
                self.progress.eval(&line, &standing);
                // The last one counts: `train.patience` may end the run after any evaluation.
                self.validation = Some((step, loss, whole));
            }
            Message::Evaluating { step, done, batches } => {
                let steps = ProgressCount { done: step, of: config.train.steps };
                self.progress.evaluating(steps, ProgressCount { done, of: batches });
            }
            Message::Differs { step, places } => {
                self.progress.warn(&format!(
                    "step {step} ran twice and DIFFERS: {}; a GPU, a core, memory or a link is faulty, and the run goes on with the second result",
                    Difference::all(&places)
                ));
                self.metrics.differs(step, &places);
            }
            Message::Saving { .. } => self.metrics.sync(),
            Message::Saved { step, waited, seconds, hashing, bytes } => {
                self.saved = Some(step);
                let size = topology::format_bytes(bytes);
                let text = format!(
                    "checkpoint of step {step} saved: {size} in {seconds:.3} s, training waited {waited:.3} s, checksums took {hashing:.3} s"
                );
                self.progress.message(&text);
            }
            Message::NotSaved { step, why } => {
                self.progress.warn(&format!("checkpoint of step {step} NOT SAVED: {why}"));
                self.metrics.checkpoint_failed(step, &why);
                self.not_saved = Some((step, why));
            }
        }
    }

    fn step(&mut self, session: &Session<'_>, step: &StepReport) {
        let config = &session.run.loaded.config;
        let tokens = (config.batch.global * config.model.seq_len) as u64;
        let tokens_per_second = tokens as f64 / step.seconds.max(1e-9);
        self.train_seconds += step.seconds;
        self.last = Some(*step);
        let device_memory = device_bytes(config, &session.run.built.plan);
        let speculates = update_mode(config) == UpdateMode::Speculative;
        if speculates {
            self.speculation[step.speculation as usize] += 1;
        }
        let metrics = StepMetrics {
            step: step.step,
            loss: step.loss,
            grad_norm: step.grad_norm,
            loss_scale: step.loss_scale as f32,
            lr: step.lr as f32,
            step_seconds: step.seconds,
            tokens_per_second,
            skipped: step.skipped,
            tokens: step.step * tokens,
            skipped_total: step.skipped_total,
            device_memory,
            host_memory: topology::resident_memory(),
            targets: session.run.data.is_uneven().then_some(step.targets),
            documents: step.contents.map(|held| held.documents),
            padding: step.contents.map(|held| held.padding),
            verified: step.verified,
            expert_load: step.expert_load,
        };
        if let Some(same) = step.verified {
            self.verified[0] += 1;
            self.verified[1] += u64::from(!same);
        }
        self.metrics.step(&metrics, speculates.then_some(step.speculation));
        let shape = session.run.built.decoder.shape();
        let activity = step.activity;
        let overlap = activity.overlapped_seconds.map(|o| o / activity.host_seconds.max(1e-9));
        let left = config.train.steps.saturating_sub(step.step) as f64;
        let limit = layout::build::device_limit(config, &session.run.built).unwrap_or(u64::MAX);
        self.progress.step(&StepLine {
            step: step.step,
            steps: config.train.steps,
            epoch: self.metrics.epoch(step.step),
            loss: step.loss as f32,
            grad_norm: step.grad_norm as f32,
            loss_scale: (config.precision == Precision::Fp16).then_some(step.loss_scale as f32),
            lr: step.lr as f32,
            tokens_per_second,
            flops_per_second: tokens_per_second * shape.model_flops_per_token(),
            device_memory: (device_memory, limit),
            overlap,
            skipped: step.skipped_total,
            speculation: speculates.then(|| {
                let [no, committed, redone] = self.speculation;
                [committed, redone, no]
            }),
            eta_seconds: left * self.train_seconds / (step.step - session.done()).max(1) as f64,
        });
        if step.step == 1
            && let Some(warning) = first_loss::warning(config, session.imported(), step.loss)
        {
            self.progress.warn(&warning);
        }
        if let Some(rise) = self.guess.step(step.step, step.loss) {
            let rise = rise.words(config.optimizer.lr);
            self.progress.warn(&format!("warning: after step {}, {rise}", step.step));
        }
    }
}

/// Text about an evaluation that is compared with those before it.
fn words(EvaluationRank { improves, without_improvement }: EvaluationRank) -> String {
    match (improves, without_improvement) {
        (true, _) => "  the least so far".into(),
        (false, 0) => String::new(),
        (false, count) => format!("  not the least for {}", counted(count, "evaluation")),
    }
}
