//! Random whole runs. Each run has several phases with different layouts, update modes,
//! checkpoints, stops and crashes. The test compares it with a run of the same phases under
//! `Serial`.

use super::by_hand::{SeededNumbers, seeds};
use checkpoint::rollback::RollbackHistory;
use checkpoint::{Checkpoint, RunFolder, newest};
use device::cpu::Lanes;
use engine::run::{
    FaultPoint, Message, RunOptions, SpeculationOutcome, StepReport, Watcher, train,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tests::compare::{contents, excerpt};
use tests::{lay_out, tiny};

/// Settings of a run, or of a phase of a run.
type Sets = Vec<String>;

/// Part of a run, from one resumption to the next.
#[derive(Debug)]
struct Phase {
    /// Settings of both runs.
    sets: Sets,
    /// Settings of the compared run that the `Serial` run does not have.
    own: Sets,
    /// Step from which the next phase resumes, and whether the next phase uses other samples.
    next: (u64, bool),
    lanes: Lanes,
    fault: Option<Fault>,
}

/// Stop request or crash at a fault point of a step.
#[derive(Clone, Copy, Debug)]
struct Fault {
    rank: usize,
    place: FaultPoint,
    step: u64,
    /// Whether the run gets a stop request. If not, a rank crashes.
    stops: bool,
}

/// Draws the settings of both runs in all phases.
fn model(d: &SeededNumbers) -> Sets {
    let mut sets = vec!["batch.global=12".to_owned(), "model.vocab=257".to_owned()];
    let mut set = |text: String| sets.push(text);
    set(format!("model.layers={}", d.of(&[1, 2, 3, 4])));
    if d.one_in(3) {
        set("model.family=Llama".into());
        set(format!("model.tied={}", d.one_in(2)));
    }
    set(format!("model.dropout={}", d.of(&["0.0", "0.1"])));
    let precision = d.of(&["Fp32", "Bf16", "Bf16", "Fp16"]);
    set(format!("precision={precision}"));
    set(format!("loss_scale.initial={}", d.of(&["65536", "1048576", "16777216"])));
    set(format!("loss_scale.hysteresis={}", d.of(&[1, 2])));
    set(format!("loss_scale.window={}", d.of(&[1, 2, 5])));
    set(format!("optimizer.clip={}", d.of(&["None", "1e-3", "0.8", "1.1", "1.3", "1.5"])));
    let kind = d.of(&["AdamW", "AdamW", "Sgd"]);
    set(format!("optimizer.kind={kind}"));
    set(format!("optimizer.weight_decay={}", d.of(&["0.0", "0.1"])));
    set(format!("schedule.warmup_steps={}", d.of(&[0, 3])));
    set(format!("schedule.decay_steps={}", d.of(&[4, 40])));
    set("schedule.min_lr=0.0".into());
    if precision == "Bf16" {
        set(format!("offload.master={}", d.of(&["Fp32", "Split"])));
        if kind == "AdamW" && d.one_in(2) {
            set("offload.moments=Bf16".into());
        }
    }
    sets
}

fn phases(d: &SeededNumbers, model: &Sets) -> Vec<Phase> {
    let mut phases: Vec<Phase> = Vec::new();
    for _ in 0..1 + d.below(3) {
        let from = phases.last().map_or(0, |phase| phase.next.0);
        let until = from + 1 + d.below(6) as u64;
        let (tp, dp) = d.of(&[(1, 1), (1, 1), (2, 1), (2, 1), (1, 2), (1, 2), (2, 2), (1, 3)]);
        let micro = if dp == 3 { d.of(&[1, 2, 4]) } else { d.of(&[1, 2, 3, 6]) };
        let mut sets = vec![
            format!("parallel.tensor={tp}"),
            format!("parallel.data={dp}"),
            format!("parallel.sequence={}", tp > 1 && d.one_in(2)),
            format!("batch.micro={micro}"),
            format!("train.eval_every={}", d.of(&[0, 1, 2])),
            "train.eval_batches=1".to_owned(),
            format!("offload.accumulate={}", d.of(&["Auto", "Host", "Device"])),
            format!("offload.bucket_elements={}", d.of(&[1500, 4096, 20_000])),
            format!("train.steps={until}"),
            "train.checkpoint_every=1".to_owned(),
            "train.checkpoint_keep=1000".to_owned(),
        ];
        if d.one_in(3) {
            sets.push("recompute=Block".into());
            sets.push(format!("offload.first_forward={}", d.of(&[1, 2, 3])));
        }
        let is_delayed = d.one_in(6);
        let mode = if is_delayed {
            sets.push(format!(
                "offload.update=Delayed(after_step: {})",
                d.of(&[0, until, until + 1])
            ));
            "offload.lookahead=1".to_owned()
        } else {
            let modes = ["Speculative", "Speculative", "Speculative", "Overlapped"];
            format!("offload.update={}", d.of(&modes))
        };
        // The host alone can keep bf16 moments.
        if !model.iter().any(|set| set == "offload.moments=Bf16") {
            let fraction = d.of(&["0.0", "0.0", "0.3", "0.7"]);
            sets.push(format!("offload.optimizer=Split(device_fraction: {fraction})"));
        }
        let chaos_us = d.of(&[0, 30]);
        let fault = d.one_in(2).then(|| Fault {
            rank: d.below(tp * dp),
            place: d.of(&[
                FaultPoint::Step,
                FaultPoint::Decided,
                FaultPoint::Saving,
                FaultPoint::Writing,
                FaultPoint::Saved,
            ]),
            step: from + 1 + d.below(until - from) as u64,
            stops: d.one_in(2),
        });
        // If a background writer crashes, the run only loses a checkpoint.
        let in_background =
            fault.is_none_or(|fault| fault.place != FaultPoint::Writing) && d.one_in(2);
        let writer = if in_background { "Background" } else { "Foreground" };
        let own = vec![
            mode,
            format!("offload.speculated_fraction={}", d.of(&["1", "1", "0.5", "0.3"])),
            format!("offload.tile_elements={}", d.of(&[1024, 3000, 100_000])),
            format!("offload.lookahead={}", d.of(&[1, 2, 3])),
            format!("train.verify_every={}", d.of(&[0, 0, 2])),
            format!("train.checkpoint_writer={writer}"),
        ];
        phases.push(Phase {
            sets,
            own,
            next: (from + 1 + d.below(until - from) as u64, d.one_in(4)),
            lanes: d.of(&[Lanes::Inline, Lanes::Inline, Lanes::Threads { chaos_us }]),
            fault,
        });
    }
    phases
}

/// Reports of a run by step, and the hash of its last states.
#[derive(Default)]
struct RunLog {
    steps: BTreeMap<u64, StepReport>,
    evals: BTreeMap<u64, u64>,
    hash: String,
}

/// Trains to the end of a phase, and starts again after each fault.
fn trained(
    sets: &[&str],
    (phase, is_serial): (&Phase, bool),
    folder: &Path,
    mut from: (Option<Checkpoint>, Option<RollbackHistory>),
) -> RunLog {
    let config = tiny(sets);
    let built = lay_out(&config);
    let mut log = RunLog::default();
    let mut fault = phase.fault.filter(|_| !is_serial);
    loop {
        let stop = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&stop);
        let watcher = fault.take().map(|fault| {
            Watcher::new(move |rank, place, step| {
                if (rank, place, step) == (fault.rank, fault.place, fault.step) {
                    assert!(fault.stops, "a fault");
                    tell.store(true, Ordering::SeqCst);
                }
            })
        });
        let options = RunOptions {
            lanes: if is_serial { Lanes::Inline } else { phase.lanes },
            watcher,
            stop,
            timeout: Some(Duration::from_secs(120)),
            checkpoints: Some(RunFolder::at(folder).unwrap()),
            resume: from.0.take().map(Arc::new),
            rollback_history: from.1.clone(),
            checkpoint_pause: Some(Duration::ZERO),
            ..RunOptions::default()
        };
        let ran = train(&config, &built, &excerpt(), &options, &mut |m| match m {
            Message::Step(report) => drop(log.steps.insert(report.step, report)),
            Message::Eval { step, loss, .. } => drop(log.evals.insert(step, loss.to_bits())),
            Message::Evaluating { .. }
            | Message::Differs { .. }
            | Message::Saving { .. }
            | Message::Saved { .. }
            | Message::NotSaved { .. } => {}
        });
        match ran {
            Ok(outcome) if outcome.complete => {
                log.hash = outcome.state_hash;
                return log;
            }
            Ok(_) => {}
            Err(error) => assert!(error.to_string().contains("a fault"), "{error}"),
        }
        let (found, refused) = newest(folder).unwrap();
        assert!(refused.is_empty(), "{refused:?}");
        // Without a checkpoint of this phase, the phase begins again.
        from.0 = found;
    }
}

/// Runs the phases. Each phase has its own folder of checkpoints.
fn all(model: &Sets, phases: &[Phase], folder: &Path, is_serial: bool) -> Vec<RunLog> {
    let mut from = (None, None);
    let mut all = Vec::new();
    for (number, phase) in phases.iter().enumerate() {
        let here = folder.join(format!("{number}"));
        if let Some(checkpoint) = &from.0 {
            // A run that crashes before its first save resumes from the previous phase.
            let checkpoint: &Checkpoint = checkpoint;
            let name = checkpoint.path().file_name().unwrap();
            copied(checkpoint.path(), &here.join(name));
        } else {
            std::fs::create_dir_all(&here).unwrap();
        }
        let own: &[String] =
            if is_serial { &["offload.update=Serial".to_owned()] } else { &phase.own };
        let update = phase.sets.iter().find(|set| set.starts_with("offload.update"));
        let sets = model.iter().chain(own).chain(&phase.sets).map(String::as_str);
        let sets: Vec<&str> = sets.chain(update.map(String::as_str)).collect();
        all.push(trained(&sets, (phase, is_serial), &here, from));
        let (next, rollback_history) = phase.next;
        let path = here.join(format!("step-{next:08}"));
        let checkpoint = Checkpoint::open(&path, next).unwrap();
        let rollback_history = rollback_history
            .then(|| checkpoint.manifest().rollback_history.clone().with_rollback(next));
        from = (Some(checkpoint), rollback_history);
    }
    all
}

fn copied(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn drawn_runs_have_the_bits_of_serial_through_resumptions_crashes_and_other_layouts() {
    let mut became = BTreeMap::new();
    for seed in seeds(6, 300) {
        let d = SeededNumbers::new(device::random::key(seed, 2));
        let model = model(&d);
        let phases = phases(&d, &model);
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let what = || format!("seed {seed}: {model:?} {phases:#?}");
        let serial = all(&model, &phases, folders[0].path(), true);
        let ran = all(&model, &phases, folders[1].path(), false);
        println!("seed {seed}");
        for (number, (want, got)) in serial.iter().zip(&ran).enumerate() {
            assert!(want.steps.keys().eq(got.steps.keys()), "steps of {number} of {}", what());
            for (a, b) in want.steps.values().zip(got.steps.values()) {
                let bits = |r: &StepReport| {
                    let words = [r.loss, r.grad_norm, r.loss_scale, r.lr].map(f64::to_bits);
                    (words, r.skipped, r.skipped_total)
                };
                assert_eq!(bits(a), bits(b), "step {} of {number} of {}", a.step, what());
                *became.entry(b.speculation as usize).or_insert(0) += 1;
            }
            assert_eq!(want.evals, got.evals, "evaluations of {number} of {}", what());
            assert_eq!(want.hash, got.hash, "states of {number} of {}", what());
            for step in want.steps.keys() {
                let [a, b] = folders.each_ref().map(|f| f.path().join(format!("{number}")));
                // A background writer may have lost a checkpoint when a rank crashed.
                if b.join(format!("step-{step:08}")).exists() {
                    let of = |folder: &Path| contents(&folder.join(format!("step-{step:08}")));
                    let same = of(&a) == of(&b);
                    assert!(same, "checkpoint {step} of {number} of {}", what());
                }
            }
        }
    }
    let all = [SpeculationOutcome::None, SpeculationOutcome::Committed, SpeculationOutcome::Redone];
    let each = all.iter().all(|one| became.contains_key(&(*one as usize)));
    assert!(each || seeds(6, 300).count() < 6, "{became:?}");
}
