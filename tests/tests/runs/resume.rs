//! A run that continues from a checkpoint equals the run that never stopped, bit for bit.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod places;
mod run_log;

use checkpoint::rollback::RollbackHistory;
use checkpoint::{Checkpoint, RunFolder, newest};
use engine::run::{FaultPoint, Message, ReadFailure, RunOptions, Watcher, train};
use run_log::{assert_goes_on_as, at, open, run, run_by};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tests::compare::{contents, excerpt, full, with};
use tests::{lay_out, tiny};

/// Settings of all runs: accumulation, warm-up, dropout, clipping, and an fp16 loss scale that
/// overflows (skipped steps), is halved and grows again.
const BASE: &[&str] = &[
    "precision=Fp16",
    "loss_scale.initial=1048576",
    "loss_scale.hysteresis=2",
    "loss_scale.window=2",
    "model.dropout=0.1",
    "model.vocab=257",
    "batch.micro=1",
    "train.steps=14",
    "train.eval_every=3",
    "train.eval_batches=1",
    "train.checkpoint_keep=1000",
];
const TP2_DP2: &[&str] = &["parallel.tensor=2", "parallel.data=2"];

fn at_every_step(sets: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let straight = run(sets, 1, folder.path(), None);
    let steps = straight.outcome.step;
    assert!(straight.saved.iter().copied().eq(1..=steps));
    for step in 1..=steps {
        let again = tempfile::tempdir().unwrap();
        let resumed = run(sets, 1, again.path(), Some(open(folder.path(), step)));
        assert_goes_on_as(&straight, &resumed, step, &format!("{sets:?} after step {step}"));
    }
}

#[test]
fn a_run_goes_on_at_every_step_as_if_it_had_never_stopped() {
    let sets = with(BASE, TP2_DP2);
    let folder = tempfile::tempdir().unwrap();
    let straight = run(&sets, 0, folder.path(), None);
    let skipped = straight.steps.values().filter(|s| s.skipped).count();
    let scales: Vec<f64> = straight.steps.values().map(|s| s.loss_scale).collect();
    let grows = scales.windows(2).any(|pair| pair[0] < pair[1]);
    assert!((1..10).contains(&skipped) && grows, "{skipped} skipped, scales {scales:?}");
    assert!(straight.saved.is_empty() && !folder.path().join("checkpoints").exists());
    // Checkpoints change no result either.
    let saving = tempfile::tempdir().unwrap();
    assert_goes_on_as(&straight, &run(&sets, 1, saving.path(), None), 0, "saving");
    at_every_step(&sets);
}

#[test]
fn a_run_that_comes_to_nothing_ends_at_the_same_step_from_wherever_it_goes_on() {
    let hopeless = ["loss_scale.initial=16777216", "loss_scale.floor=16777216"];
    let sets =
        with(&with(BASE, TP2_DP2), &[hopeless[0], hopeless[1], "train.stop_after_skipped=4"]);
    let folder = tempfile::tempdir().unwrap();
    let straight = run(&sets, 1, folder.path(), None);
    assert_eq!((straight.outcome.step, straight.outcome.diverged), (4, Some((1, 4))));
    for step in 1..4 {
        let again = tempfile::tempdir().unwrap();
        let from = open(folder.path(), step);
        assert_eq!(from.manifest().skipped_in_a_row, step);
        let resumed = run(&sets, 1, again.path(), Some(from));
        assert_goes_on_as(&straight, &resumed, step, &format!("after step {step}"));
    }
}

#[test]
fn a_run_that_is_taken_back_goes_another_way_and_whoever_goes_on_follows() {
    let sets = with(BASE, TP2_DP2);
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let straight = run(&sets, 5, folders[0].path(), None);
    let way = RollbackHistory::default().with_rollback(5);
    let from = (Some(open(folders[0].path(), 5)), Some(way.clone()));
    let taken_back = run_by(&sets, 1, folders[1].path(), from);
    for (step, report) in &taken_back.steps {
        assert_ne!(report.loss.to_bits(), straight.steps[step].loss.to_bits(), "step {step}");
    }
    let stored = open(folders[1].path(), 9);
    assert_eq!(stored.manifest().rollback_history, way);
    let resumed = run(&sets, 1, folders[2].path(), Some(stored));
    assert_goes_on_as(&taken_back, &resumed, 9, "after a rollback");
    assert_eq!(open(folders[2].path(), 11).manifest().rollback_history, way);
}

#[test]
fn what_is_written_while_training_goes_on_is_what_it_waits_for_otherwise() {
    let updates = ["update=Overlapped", "update=Serial", "update=Speculative", "optimizer=Device"];
    for mode in updates.map(|set| [format!("offload.{set}")]) {
        let mode = mode.each_ref().map(String::as_str);
        let sets = with(&with(BASE, TP2_DP2), &mode);
        let ran = |writer: &'static str, kept: &Path| run(&with(&sets, &[writer]), 1, kept, None);
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [waits, goes_on] = [
            ran("train.checkpoint_writer=Foreground", folders[0].path()),
            ran("train.checkpoint_writer=Background", folders[1].path()),
        ];
        assert_goes_on_as(&waits, &goes_on, 0, &format!("{mode:?}"));
        assert_eq!(waits.saved, goes_on.saved);
        for step in waits.saved {
            let [a, b] = folders.each_ref().map(|folder| contents(&at(folder.path(), step)));
            assert!(a.keys().eq(b.keys()) && a.len() == 5, "{mode:?}");
            for (name, bytes) in a {
                assert!(bytes == b[&name], "{mode:?}: {name} of step {step}");
            }
        }
    }
}

#[test]
fn a_checkpoint_has_no_name_before_all_is_heard_that_was_told() {
    let folder = tempfile::tempdir().unwrap();
    for writer in ["train.checkpoint_writer=Foreground", "train.checkpoint_writer=Background"] {
        let every = ["train.checkpoint_every=1", "train.steps=3", writer];
        let config = tiny(&with(BASE, &every));
        let here = folder.path().join(writer);
        std::fs::create_dir(&here).unwrap();
        let checkpoints = Some(RunFolder::at(&here.join("checkpoints")).unwrap());
        let options = RunOptions { checkpoints, ..RunOptions::default() };
        let (mut heard, mut saved) = (0, 0);
        let outcome = train(&config, &lay_out(&config), &excerpt(), &options, &mut |m| match m {
            Message::Step(report) => heard = report.step,
            Message::Saving { step } => {
                assert!(heard >= step);
                std::thread::sleep(Duration::from_millis(200));
                assert!(!at(&here, step).exists(), "{writer}: step {step}");
            }
            Message::Saved { .. } => saved += 1,
            Message::Evaluating { .. }
            | Message::Eval { .. }
            | Message::Differs { .. }
            | Message::NotSaved { .. } => {}
        });
        assert_eq!((outcome.unwrap().step, saved), (3, 3));
    }
}

/// Steps that a run saves with the default time between checkpoints, until a stop after `stop`.
fn saved_by(sets: &[&str], stop: Option<u64>) -> Vec<u64> {
    let folder = tempfile::tempdir().unwrap();
    let (config, mut saved) = (tiny(sets), Vec::new());
    let checkpoints = Some(RunFolder::at(&folder.path().join("checkpoints")).unwrap());
    let options = RunOptions { checkpoints, ..RunOptions::default() };
    train(&config, &lay_out(&config), &excerpt(), &options, &mut |m| match m {
        Message::Saved { step, .. } => saved.push(step),
        Message::Step(report) if Some(report.step) == stop => {
            options.stop.store(true, std::sync::atomic::Ordering::SeqCst);
        }
        _ => {}
    })
    .unwrap();
    saved
}

#[test]
fn a_run_that_is_told_nothing_of_checkpoints_saves_at_its_end_and_at_an_interrupt() {
    let sets =
        with(BASE, &["train.steps=100000", "schedule.decay_steps=100", "train.eval_every=0"]);
    let saved = saved_by(&sets, Some(3));
    assert!(saved.len() == 1 && saved[0] >= 3 && saved[0] < 100_000, "{saved:?}");
    assert_eq!(saved_by(&with(&sets, &["train.checkpoint_overhead=None"]), Some(3)), [0; 0]);
}

#[test]
fn checkpoints_come_by_the_clock_too() {
    let saved_in = |steps: &str, more: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        run(&with(&with(BASE, more), &[steps]), 0, folder.path(), None).saved
    };
    let saved = |more: &[&str]| saved_in("train.steps=9", more);
    // Every step is longer than the short time, and the run ends before the long time.
    assert_eq!(saved(&["train.checkpoint_minutes=1e-9"]), Vec::from_iter(1..=9));
    assert_eq!(saved(&["train.checkpoint_minutes=1e6"]), [9]);
    // The first checkpoint, after step 1, shows the cost. Saves may need as much time as training,
    // so that a slow disk also saves several checkpoints in 400 steps.
    let often = ["train.checkpoint_overhead=1", "train.checkpoint_writer=Foreground"];
    let cheap = saved_in("train.steps=400", &often);
    let rare = saved(&["train.checkpoint_overhead=1e-6"]);
    assert!(cheap[0] == 1 && cheap.len() > 2, "{cheap:?}");
    // Without settings for checkpoints, a short run only saves at its end.
    assert_eq!(saved_by(&with(BASE, &["train.steps=9"]), None), [9]);
    assert_eq!(rare, [1, 9]);
}

#[test]
fn every_update_mode_and_placement_goes_on() {
    let modes: [&[&str]; 13] = [
        &["offload.update=Speculative", "offload.speculated_fraction=1"],
        &["precision=Bf16", "offload.master=Split", "offload.update=Speculative"],
        &["offload.update=Serial"],
        &["offload.optimizer=Device"],
        &["offload.accumulate=Host", "parallel.sequence=true"],
        &["offload.update=Serial", "offload.transfer=Blocking"],
        &["precision=Bf16", "optimizer.kind=Sgd", "recompute=Block"],
        &["offload.optimizer=Split(device_fraction: 0.4)", "offload.accumulate=Host"],
        &["offload.update=Delayed(after_step: 3)", "offload.accumulate=Host"],
        &["offload.first_forward=3", "recompute=Block"],
        &["precision=Bf16", "offload.master=Split", "offload.moments=Bf16"],
        &[
            "precision=Bf16",
            "offload.master=Split",
            "offload.moments=Bf16",
            "offload.update=Delayed(after_step: 3)",
        ],
        &[
            "precision=Bf16",
            "offload.master=Split",
            "offload.optimizer=Split(device_fraction: 0.4)",
        ],
    ];
    for mode in modes {
        let sets = with(&with(BASE, TP2_DP2), mode);
        if full() {
            at_every_step(&sets);
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let straight = run(&sets, 5, folder.path(), None);
        let again = tempfile::tempdir().unwrap();
        let resumed = run(&sets, 5, again.path(), Some(open(folder.path(), 5)));
        assert_goes_on_as(&straight, &resumed, 5, &format!("{mode:?}"));
    }
}

/// From step to step, the states are in their first or in their second arrays.
#[test]
fn a_run_with_updates_ahead_of_the_decision_goes_on_at_every_step_and_as_serial() {
    let clipped = ["train.steps=8", "loss_scale.initial=65536", "optimizer.clip=1.3"];
    let base = with(&with(BASE, TP2_DP2), &clipped);
    let speculative = with(&base, &["offload.update=Speculative"]);
    at_every_step(&speculative);
    let folder = tempfile::tempdir().unwrap();
    let straight = run(&speculative, 3, folder.path(), None);
    let (again, serial) = (tempfile::tempdir().unwrap(), with(&base, &["offload.update=Serial"]));
    let resumed = run(&serial, 3, again.path(), Some(open(folder.path(), 3)));
    assert_eq!(straight.outcome.state_hash, resumed.outcome.state_hash);
}

#[test]
fn a_run_with_an_update_that_waits_goes_on_at_every_step() {
    let delayed = ["offload.update=Delayed(after_step: 3)", "train.steps=9"];
    at_every_step(&with(&with(BASE, TP2_DP2), &delayed));
    let split =
        ["offload.update=Delayed(after_step: 0)", "offload.optimizer=Split(device_fraction: 0.4)"];
    let one_batch =
        ["parallel.data=2", "batch.micro=4", "train.steps=6", "loss_scale.initial=1024"];
    at_every_step(&with(&with(BASE, &one_batch), &split));
}

/// The checkpoint holds the gradient of a pending update, and another layout applies this update.
#[test]
fn an_update_that_waits_goes_to_every_layout_and_update_mode() {
    let first = tempfile::tempdir().unwrap();
    let delayed = "offload.update=Delayed(after_step: 2)";
    let trained = with(&with(BASE, TP2_DP2), &["precision=Bf16", "train.steps=5", delayed]);
    let straight = run(&trained, 5, first.path(), None);
    // From here on every gradient overflows, so that only the pending update changes the states.
    let overflow =
        with(BASE, &["loss_scale.initial=16777216", "loss_scale.floor=16777216", "train.steps=6"]);
    let layouts: [&[&str]; 6] = [
        &["parallel.data=2", "offload.update=Speculative", "offload.speculated_fraction=1"],
        &["parallel.tensor=1", "parallel.data=4", delayed],
        &["parallel.tensor=4", "offload.optimizer=Split(device_fraction: 0.3)", delayed],
        &["offload.optimizer=Device"],
        &["parallel.data=2", "offload.accumulate=Host"],
        &["parallel.data=2", "offload.update=Serial", "offload.transfer=Blocking"],
    ];
    for layout in layouts {
        let next = tempfile::tempdir().unwrap();
        let ran = run(&with(&overflow, layout), 1, next.path(), Some(open(first.path(), 5)));
        assert!(ran.steps[&6].skipped, "{layout:?}");
        assert_eq!(ran.outcome.state_hash, straight.outcome.state_hash, "{layout:?}");
    }
}

#[test]
fn a_checkpoint_goes_from_layout_to_layout_and_back() {
    goes_from_layout_to_layout(BASE);
}

/// With four tensor-parallel ranks, two ranks share each key and value head.
#[test]
fn a_checkpoint_of_shared_heads_goes_from_layout_to_layout_and_back() {
    goes_from_layout_to_layout(&with(BASE, &["model.family=Llama", "model.kv_heads=2"]));
}

/// The parts of Gemma 3 and of OLMo 3: layers with and without a window have tables of their own, and
/// branches have norms at their ends. Ranks that share a head of keys share its gains in OLMo 3.
#[test]
fn a_checkpoint_of_two_kinds_of_layers_goes_from_layout_to_layout_and_back() {
    let kinds = [
        "model.family=Llama",
        "model.kv_heads=2",
        "model.layer_pattern=WF",
        "model.window=5",
        "model.window_rope.theta=100",
        "model.qk_norm=true",
    ];
    let gemma =
        ["model.norm_place=Around", "model.norm_offset=true", "model.gate=Gelu", "model.tied=true"];
    let olmo = ["model.norm_place=After", "model.qk_norm_width=true"];
    for parts in [&gemma[..], &olmo] {
        goes_from_layout_to_layout(&with(&with(BASE, &kinds), parts));
    }
}

fn goes_from_layout_to_layout(base: &[&str]) {
    let layouts: [&[&str]; 6] = [
        &["parallel.tensor=1", "parallel.data=4"],
        &["parallel.tensor=4", "parallel.data=1", "offload.optimizer=Device"],
        &["parallel.tensor=1", "parallel.data=1"],
        &["parallel.tensor=4", "parallel.data=2", "parallel.sequence=true"],
        &["parallel.tensor=1", "parallel.data=8"],
        TP2_DP2,
    ];
    let first = tempfile::tempdir().unwrap();
    let trained = with(&with(base, TP2_DP2), &["precision=Bf16", "train.steps=5"]);
    let hash = run(&trained, 5, first.path(), None).outcome.state_hash;
    // From here on every gradient overflows, so that a step passes and no state changes.
    let overflow = with(base, &["loss_scale.initial=16777216", "loss_scale.floor=16777216"]);
    let mut folder = first.path().to_owned();
    let mut kept = Vec::new();
    for (step, layout) in (6..).zip(layouts) {
        let steps = format!("train.steps={step}");
        let next = tempfile::tempdir().unwrap();
        let sets = with(&with(&overflow, layout), &[&steps]);
        let ran = run(&sets, 1, next.path(), Some(open(&folder, step - 1)));
        assert!(ran.steps[&step].skipped && ran.saved == [step], "{layout:?}");
        assert_eq!(ran.outcome.state_hash, hash, "{layout:?}");
        folder = next.path().to_owned();
        kept.push(next);
    }
    for rank in 0..4 {
        let name = format!("rank-{rank:05}.safetensors");
        let [was, is] =
            [at(first.path(), 5), at(&folder, 11)].map(|f| std::fs::read(f.join(&name)));
        assert!(was.unwrap() == is.unwrap(), "{name}");
    }
}

#[test]
fn a_checkpoint_of_small_states_goes_from_layout_to_layout() {
    let small = ["precision=Bf16", "offload.master=Split", "offload.moments=Bf16"];
    let layouts: [&[&str]; 3] = [
        &["parallel.tensor=1", "parallel.data=4"],
        &["parallel.tensor=4", "parallel.data=1", "offload.master=Fp32", "offload.moments=Fp32"],
        &["parallel.tensor=1", "parallel.data=1"],
    ];
    let first = tempfile::tempdir().unwrap();
    let trained = with(&with(BASE, TP2_DP2), &with(&small, &["train.steps=5"]));
    let hash = run(&trained, 5, first.path(), None).outcome.state_hash;
    let (mut folder, mut kept) = (first.path().to_owned(), Vec::new());
    // The resumed run has no step, so that it gathers the restored states.
    for layout in layouts {
        let next = tempfile::tempdir().unwrap();
        let sets = with(&with(BASE, &small), &with(layout, &["train.steps=5"]));
        let ran = run(&sets, 5, next.path(), Some(open(&folder, 5)));
        assert_eq!(ran.outcome.state_hash, hash, "{layout:?}");
        if !ran.saved.is_empty() {
            folder = next.path().to_owned();
        }
        kept.push(next);
    }
}

/// Changes every byte with ONEBOX_FULL, and a sample of the bytes otherwise.
#[test]
fn no_byte_of_a_checkpoint_can_change_unseen() {
    let folder = tempfile::tempdir().unwrap();
    let small = ["model.layers=1", "model.hidden=8", "model.heads=4", "train.steps=1"];
    let sets = with(&with(BASE, TP2_DP2), &small);
    let config = tiny(&with(&sets, &["train.checkpoint_every=1"]));
    let options = RunOptions {
        checkpoints: Some(RunFolder::at(&folder.path().join("checkpoints")).unwrap()),
        ..RunOptions::default()
    };
    train(&config, &lay_out(&config), &excerpt(), &options, &mut |_| {}).unwrap();
    let path = at(folder.path(), 1);
    Checkpoint::open(&path, 1).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 5);
    for file in files {
        let good = std::fs::read(&file).unwrap();
        let header = if file.ends_with("MANIFEST") {
            good.len()
        } else {
            8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize
        };
        let name = file.file_name().unwrap().to_str().unwrap();
        let refused = |bytes: &[u8], at: usize| {
            std::fs::write(&file, bytes).unwrap();
            let why = Checkpoint::open(&path, 1).unwrap_err().to_string();
            assert!(why.contains(name), "byte {at} of {name}: {why}");
            let states = [".master`", ".momentum`", ".variance`"];
            let named = at < header || states.iter().any(|state| why.contains(state));
            assert!(named, "byte {at} of {name}: {why}");
        };
        for i in (0..good.len()).step_by(if full() { 1 } else { 41 }) {
            let mut bytes = good.clone();
            bytes[i] ^= 1 << (i % 8);
            refused(&bytes, i);
        }
        refused(&good[..good.len() - 1], 0);
        refused(&[&good[..], &[0]].concat(), 0);
        std::fs::remove_file(&file).unwrap();
        assert!(Checkpoint::open(&path, 1).unwrap_err().to_string().contains(name));
        std::fs::write(&file, good).unwrap();
    }
    Checkpoint::open(&path, 1).unwrap();
    assert!(Checkpoint::open(&path, 2).is_err(), "its name says another step");
}

#[test]
fn the_newest_is_taken_and_older_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    let sets = with(BASE, &["train.steps=7", "train.checkpoint_keep=2"]);
    assert_eq!(run(&sets, 2, folder.path(), None).saved, [2, 4, 6, 7]);
    let here = folder.path().join("checkpoints");
    let mut names: Vec<_> =
        std::fs::read_dir(&here).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["latest", "step-00000006", "step-00000007"]);
    assert_eq!(std::fs::read_to_string(here.join("latest")).unwrap(), "step-00000007\n");
    let (found, refused) = newest(&here).unwrap();
    assert!(refused.is_empty());
    assert_eq!(found.unwrap().step(), 7);
    assert!(newest(&folder.path().join("nowhere")).unwrap().0.is_none());
}

/// A thread inherits the binding of the thread that starts it. Here this is the binding of rank 0.
#[test]
fn a_copy_is_written_on_the_cores_of_its_rank() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny(&[
        "parallel.data=2",
        "train.steps=1",
        "train.checkpoint_every=1",
        "train.checkpoint_writer=Background",
    ]);
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    let noted = Arc::clone(&seen);
    let watcher = Watcher::new(move |rank, place, _| {
        if matches!(place, FaultPoint::Saving | FaultPoint::Writing) {
            let cores = topology::current_binding().unwrap();
            noted.lock().unwrap().insert((rank, place == FaultPoint::Writing), cores);
        }
    });
    let options = RunOptions {
        checkpoints: Some(RunFolder::at(&folder.path().join("checkpoints")).unwrap()),
        bind: true,
        watcher: Some(watcher),
        ..RunOptions::default()
    };
    train(&config, &lay_out(&config), &excerpt(), &options, &mut |_| {}).unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 4, "{seen:?}");
    for rank in 0..2 {
        assert_eq!(seen[&(rank, false)], seen[&(rank, true)], "rank {rank}: {seen:?}");
    }
    let two = std::thread::available_parallelism().unwrap().get() > 1;
    assert_eq!(two, seen[&(0, true)] != seen[&(1, true)], "{seen:?}");
}

/// A disk may lose a bit between the check of a checkpoint and its use.
#[test]
fn what_changes_after_it_was_checked_is_not_trained_on() {
    use std::os::unix::fs::FileExt;
    let first = tempfile::tempdir().unwrap();
    let sets = with(&with(BASE, TP2_DP2), &["train.steps=2"]);
    run(&sets, 1, first.path(), None);
    for layout in [TP2_DP2, &["parallel.tensor=4", "parallel.data=1"]] {
        let from = open(first.path(), 2);
        let file = at(first.path(), 2).join("rank-00001.safetensors");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
        let last = file.metadata().unwrap().len() - 1;
        let mut byte = [0];
        file.read_exact_at(&mut byte, last).unwrap();
        file.write_all_at(&[byte[0] ^ 1], last).unwrap();
        let config = tiny(&with(&with(BASE, layout), &["train.steps=3"]));
        let options = RunOptions { resume: Some(Arc::new(from)), ..RunOptions::default() };
        let failed = train(&config, &lay_out(&config), &excerpt(), &options, &mut |_| {});
        file.write_all_at(&byte, last).unwrap();
        let error = failed.unwrap_err();
        assert_eq!(error.read_failure, Some(ReadFailure::Changed), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank-00001") && text.contains("have changed since"), "{text}");
    }
}
