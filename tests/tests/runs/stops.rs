//! A run that receives a stop request ends after the current step, on all ranks.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use checkpoint::{RunFolder, newest};
use device::cpu::Lanes;
use engine::run::{FaultPoint, Message, RunOptions, Watcher, train};
use files::held::LockedRunDir;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tests::compare::with;
use tests::{RunRecord, lay_out, text, tiny, try_run};

/// Number of ranks, and their layout.
const GRIDS: [(usize, &[&str]); 4] = [
    (1, &[]),
    (2, &["parallel.tensor=2"]),
    (2, &["parallel.data=2"]),
    (4, &["parallel.tensor=2", "parallel.data=2"]),
];
const UPDATES: [&str; 4] = [
    "offload.update=Overlapped",
    "offload.update=Serial",
    "offload.update=Speculative",
    "offload.update=Delayed(after_step: 1)",
];
const LANES: [Lanes; 2] = [Lanes::Inline, Lanes::Threads { chaos_us: 20 }];

/// Record of a run with a stop request at (rank, fault point, step); `None` is any rank.
fn run_with_stop(sets: &[&str], lanes: Lanes, at: (Option<usize>, FaultPoint, u64)) -> RunRecord {
    let stop = Arc::new(AtomicBool::new(false));
    let stop_request = Arc::clone(&stop);
    let watcher = Watcher::new(move |rank, place, step| {
        if at == (Some(rank), place, step) || at == (None, place, step) {
            stop_request.store(true, Ordering::SeqCst);
        }
    });
    let options = RunOptions { lanes, stop, watcher: Some(watcher), ..RunOptions::default() };
    try_run(&tiny(sets), &options).unwrap_or_else(|e| panic!("{sets:?}, {at:?}: {e}"))
}

#[test]
fn a_run_that_is_told_to_stop_during_a_step_ends_after_it() {
    for (ranks, grid) in GRIDS {
        for update in &UPDATES[..if ranks == 4 { UPDATES.len() } else { 1 }] {
            let sets = with(grid, &[update, "train.eval_batches=1"]);
            let whole = try_run(&tiny(&sets), &RunOptions::default()).unwrap();
            let stopped = |lanes, at| {
                let ran = run_with_stop(&sets, lanes, at);
                assert_eq!(ran.outcome.step, 3, "{sets:?}, {lanes:?}, {at:?}");
                assert!(!ran.outcome.complete);
                // The steps equal the steps of a run without a stop request.
                let losses = |ran: &RunRecord| -> Vec<u64> {
                    ran.steps.iter().take(3).map(|s| s.loss.to_bits()).collect()
                };
                assert_eq!((losses(&ran), ran.steps.len()), (losses(&whole), 3));
            };
            (0..ranks).for_each(|rank| stopped(LANES[0], (Some(rank), FaultPoint::Step, 3)));
            LANES.iter().for_each(|lanes| stopped(*lanes, (None, FaultPoint::Decided, 3)));
        }
    }
}

/// Evaluations as (step, over the whole validation set), and whether the run is complete.
fn evaluated(sets: &[&str], options: &RunOptions) -> (Vec<(u64, bool)>, bool) {
    let (config, mut evals) = (tiny(sets), Vec::new());
    let outcome = train(&config, &lay_out(&config), &text(), options, &mut |message| {
        if let Message::Eval { step, whole, .. } = message {
            evals.push((step, whole));
        }
    });
    (evals, outcome.unwrap().complete)
}

#[test]
fn every_evaluation_has_a_bound_and_hears_a_stop() {
    let sets = ["train.steps=2", "train.eval_every=1"];
    let bounded = |bound: &str| evaluated(&with(&sets, &[bound]), &RunOptions::default()).0;
    assert_eq!(bounded("train.eval_batches=1"), [(1, false), (2, false)]);
    assert_eq!(bounded("train.eval_batches=0"), [(1, true), (2, true)]);
    // At the end, a small validation set is evaluated completely.
    assert_eq!(bounded("train.eval_batches=None"), [(1, false), (2, true)]);
    for (step, heard) in [(1, vec![]), (2, vec![(1, false)])] {
        let stop = Arc::new(AtomicBool::new(false));
        let stop_request = Arc::clone(&stop);
        let watcher = Some(Watcher::new(move |_, place, at| {
            stop_request.fetch_or((place, at) == (FaultPoint::Evaluating, step), Ordering::SeqCst);
        }));
        let options = RunOptions { stop, watcher, ..RunOptions::default() };
        let sets = with(&sets, &["parallel.data=2"]);
        assert_eq!(evaluated(&sets, &options), (heard, false), "step {step}");
    }
}

/// Record of a run that is stopped before its start, and the number of ranks with all states.
fn run_stopped_at_once(sets: &[&str], options: RunOptions) -> (RunRecord, usize) {
    let loaded = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&loaded);
    let watcher = Watcher::new(move |_, place, _| {
        count.fetch_add(usize::from(place == FaultPoint::Loaded), Ordering::SeqCst);
    });
    let stop = Arc::new(AtomicBool::new(true));
    let ran = try_run(&tiny(sets), &RunOptions { stop, watcher: Some(watcher), ..options });
    (ran.unwrap(), loaded.load(Ordering::SeqCst))
}

#[test]
fn a_stop_is_heard_while_initial_weights_are_made_and_while_states_are_read() {
    for (ranks, grid) in GRIDS {
        let (ran, loaded) = run_stopped_at_once(grid, RunOptions::default());
        assert_eq!((ran.outcome.step, ran.steps.len(), loaded), (0, 0, 0), "{grid:?}");
        // Only one rank gets the request, while another rank may have loaded all its states.
        for rank in 0..ranks {
            let ran = run_with_stop(grid, Lanes::Inline, (Some(rank), FaultPoint::Opened, 0));
            assert_eq!((ran.outcome.step, ran.steps.len()), (0, 0), "{grid:?}, rank {rank}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoints");
        let checkpoints = || Some(RunFolder::at(&path).unwrap());
        let sets =
            with(grid, &["train.steps=2", "train.checkpoint_every=2", "train.eval_batches=1"]);
        let options = RunOptions { checkpoints: checkpoints(), ..RunOptions::default() };
        try_run(&tiny(&sets), &options).unwrap();
        let from = || newest(&path).unwrap().0.map(Arc::new);
        let sets = with(&sets, &["train.steps=5"]);
        let weights = folder.path().join("weights.safetensors");
        let options = RunOptions {
            checkpoints: checkpoints(),
            resume: from(),
            weights: Some(LockedRunDir::unlocked(folder.path()).unwrap()),
            ..RunOptions::default()
        };
        let (ran, loaded) = run_stopped_at_once(&sets, options.clone());
        assert_eq!((ran.outcome.step, ran.steps.len(), loaded), (2, 0, 0), "{grid:?}");
        // The checkpoint stays, and the run does not write weights that the checkpoint holds.
        assert!(!ran.outcome.complete && !weights.exists());
        assert_eq!(from().unwrap().step(), 2);
        let ran = try_run(&tiny(&sets), &options).unwrap();
        assert!(ran.outcome.complete && ran.outcome.step == 5 && weights.exists());
    }
}

#[test]
fn weights_are_written_when_the_run_is_done_and_at_an_interrupt_where_nothing_else_holds_them() {
    // (weights, checkpoints, stop request): weights written, hash computed
    let cases = [
        ("Complete", true, false, true, true),
        ("Complete", true, true, false, false),
        ("Complete", false, true, true, true),
        ("Always", true, true, true, true),
        ("Never", true, false, false, true),
        ("Never", true, true, false, false),
    ];
    for (policy, saves, stops, written, hashed) in cases {
        let folder = tempfile::tempdir().unwrap();
        let weights = folder.path().join("weights.safetensors");
        let (key, every) = (
            format!("train.weights={policy}"),
            format!("train.checkpoint_every={}", 4 * u8::from(saves)),
        );
        let mut sets = vec!["parallel.tensor=2", "parallel.data=2", "train.eval_batches=1"];
        // Without this setting, a run also saves by the cost of a save.
        sets.extend([&every, &key, "train.checkpoint_overhead=None"]);
        let config = tiny(&sets);
        let stop = Arc::new(AtomicBool::new(false));
        let stop_request = Arc::clone(&stop);
        let watcher = Watcher::new(move |_, place, step| {
            stop_request
                .fetch_or(stops && (place, step) == (FaultPoint::Step, 3), Ordering::SeqCst);
        });
        let options = RunOptions {
            stop,
            watcher: Some(watcher),
            weights: Some(LockedRunDir::unlocked(folder.path()).unwrap()),
            checkpoints: Some(RunFolder::at(&folder.path().join("checkpoints")).unwrap()),
            ..RunOptions::default()
        };
        let built = lay_out(&config);
        let ran = tests::try_run_built(&config, &built, &options).unwrap();
        let what = (policy, saves, stops);
        assert_eq!((weights.exists(), ran.outcome.weights_written), (written, written), "{what:?}");
        assert_eq!(!ran.outcome.state_hash.is_empty(), hashed, "{what:?}");
        assert_eq!(ran.outcome.complete, !stops, "{what:?}");
    }
}
