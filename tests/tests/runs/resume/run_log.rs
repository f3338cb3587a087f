//! Records of runs, and the comparison of a resumed run with a run that never stopped.

use checkpoint::rollback::RollbackHistory;
use checkpoint::{Checkpoint, RunFolder};
use engine::run::{Message, Outcome, RunOptions, StepReport, train};
use files::held::LockedRunDir;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tests::compare::{excerpt, with};
use tests::{lay_out, tiny};

/// Shortest time between checkpoints by `train.checkpoint_overhead`.
pub(super) const PAUSE: Duration = Duration::ZERO;

/// Messages of a run, its outcome and its weights file.
pub(super) struct RunLog {
    pub(super) steps: BTreeMap<u64, StepReport>,
    pub(super) evals: BTreeMap<u64, u64>,
    pub(super) saved: Vec<u64>,
    pub(super) outcome: Outcome,
    pub(super) weights: Vec<u8>,
}

/// Trains `sets` in `folder`, with a checkpoint after each `every` steps.
pub(super) fn run(sets: &[&str], every: u64, folder: &Path, resume: Option<Checkpoint>) -> RunLog {
    run_by(sets, every, folder, (resume, None))
}

/// Does the same as [`run`], with the samples of a rollback history.
pub(super) fn run_by(
    sets: &[&str],
    every: u64,
    folder: &Path,
    (resume, rollback_history): (Option<Checkpoint>, Option<RollbackHistory>),
) -> RunLog {
    let paced = sets.iter().any(|set| set.starts_with("train.checkpoint_overhead"));
    let never = ["train.checkpoint_overhead=None"];
    let never = if every == 0 && !paced { &never[..] } else { &[] };
    let every = format!("train.checkpoint_every={every}");
    let config = tiny(&with(&with(sets, &[&every]), never));
    let weights = folder.join("weights.safetensors");
    let options = RunOptions {
        weights: Some(LockedRunDir::unlocked(folder).unwrap()),
        checkpoints: Some(RunFolder::at(&folder.join("checkpoints")).unwrap()),
        resume: resume.map(Arc::new),
        rollback_history,
        checkpoint_pause: Some(PAUSE),
        ..RunOptions::default()
    };
    let (mut steps, mut evals, mut saved) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    let outcome = train(&config, &lay_out(&config), &excerpt(), &options, &mut |m| match m {
        Message::Step(report) => drop(steps.insert(report.step, report)),
        Message::Eval { step, loss, .. } => drop(evals.insert(step, loss.to_bits())),
        Message::Saved { step, .. } => saved.push(step),
        Message::Evaluating { .. } | Message::Saving { .. } => {}
        Message::NotSaved { why, .. } => panic!("{why}"),
        Message::Differs { places, .. } => panic!("{places:?}"),
    });
    let outcome = outcome.unwrap_or_else(|e| panic!("{sets:?}: {e}"));
    RunLog { steps, evals, saved, outcome, weights: std::fs::read(weights).unwrap() }
}

pub(super) fn at(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("checkpoints/step-{step:08}"))
}

pub(super) fn open(folder: &Path, step: u64) -> Checkpoint {
    Checkpoint::open(&at(folder, step), step).unwrap_or_else(|e| panic!("{e}"))
}

/// All numbers of a report except times, as bits.
fn bits(report: &StepReport) -> [u64; 7] {
    let StepReport { step, loss, grad_norm, loss_scale, lr, skipped, skipped_total, .. } = *report;
    let [loss, grad_norm, loss_scale, lr] = [loss, grad_norm, loss_scale, lr].map(f64::to_bits);
    [step, loss, grad_norm, loss_scale, lr, u64::from(skipped), skipped_total]
}

pub(super) fn assert_goes_on_as(straight: &RunLog, resumed: &RunLog, after: u64, what: &str) {
    let later = straight.steps.range(after + 1..);
    assert!(later.clone().map(|(k, _)| k).eq(resumed.steps.keys()), "{what}: steps");
    for ((step, a), b) in later.zip(resumed.steps.values()) {
        assert_eq!(bits(a), bits(b), "{what}: step {step}");
    }
    let evals: BTreeMap<u64, u64> = straight.evals.range(after..).map(|(k, v)| (*k, *v)).collect();
    assert_eq!(evals, resumed.evals, "{what}: evaluations");
    let mut outcome = straight.outcome.clone();
    if resumed.steps.is_empty() {
        // `not_finite` describes the last step, which this run does not repeat.
        outcome.not_finite = None;
    }
    assert_eq!(outcome, resumed.outcome, "{what}");
    assert_eq!(straight.weights, resumed.weights, "{what}: weights");
}
