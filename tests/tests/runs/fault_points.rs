//! A panic and a stall at every fault point of every rank: all ranks end soon, the error names the
//! right rank and point, and the checkpoints stay complete. The default run samples the ops;
//! ONEBOX_FULL=1 tests each op.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use checkpoint::{Checkpoint, RunFolder, newest};
use device::{Error, Lane};
use engine::run::{
    FaultPoint, Message, Outcome, RunError, RunOptions, StuckHandler, Watcher, train,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tests::compare::{excerpt, full, with};
use tests::{lay_out, text, tiny};

const SETS: [&str; 7] = [
    "parallel.tensor=2",
    "parallel.data=2",
    "train.steps=3",
    "train.eval_every=1",
    "train.eval_batches=1",
    "train.checkpoint_every=1",
    "train.checkpoint_keep=9",
];
const RANKS: usize = 4;

const WRITERS: [&str; 2] =
    ["train.checkpoint_writer=Foreground", "train.checkpoint_writer=Background"];

/// Limit that distinguishes a hang from a slow machine. The promise is one second.
const SOON: Duration = Duration::from_secs(120);

/// Runs with checkpoints in `folder`. Returns the outcome, the saved steps, and the reasons for
/// checkpoints that were not saved.
fn run(
    more: &[&str],
    folder: &Path,
    options: RunOptions,
) -> (Result<Outcome, RunError>, Vec<u64>, Vec<String>) {
    let config = tiny(&with(&SETS, more));
    let options = RunOptions { checkpoints: Some(RunFolder::at(folder).unwrap()), ..options };
    let (mut saved, mut not) = (Vec::new(), Vec::new());
    let began = Instant::now();
    let outcome = train(&config, &lay_out(&config), &excerpt(), &options, &mut |m| match m {
        Message::Saved { step, .. } => saved.push(step),
        Message::NotSaved { why, .. } => not.push(why),
        Message::Step(_)
        | Message::Differs { .. }
        | Message::Evaluating { .. }
        | Message::Eval { .. }
        | Message::Saving { .. } => {}
    });
    assert!(began.elapsed() < SOON, "{more:?}: {:?}", began.elapsed());
    (outcome, saved, not)
}

/// Newest checkpoint. Asserts that no checkpoint is broken, and that this one has the last saved
/// step or a later step.
fn intact(folder: &Path, saved: &[u64], what: &str) -> Option<Checkpoint> {
    let (found, broken) = newest(folder).unwrap();
    assert!(broken.is_empty(), "{what}: {broken:?}");
    let step = found.as_ref().map_or(0, Checkpoint::step);
    assert!(step >= saved.last().copied().unwrap_or(0), "{what}: {step} of {saved:?}");
    found
}

/// Asserts that every rank's error names the failed rank, and that the text has `texts`.
fn named(error: &RunError, culprit: usize, texts: &[&str], what: &str) {
    assert_eq!((error.rank, error.all.len()), (culprit, RANKS), "{what}: {error}");
    let text = error.to_string();
    assert!(texts.iter().all(|part| text.contains(part)), "{what}: {text}");
    for (rank, own) in error.all.iter().enumerate() {
        match own {
            Some(Error::PeerFailed { rank: whose, .. }) => {
                assert!(rank != culprit && *whose == culprit, "{what}: {own:?}");
            }
            Some(_) => assert_eq!(rank, culprit, "{what}: {own:?}"),
            // This rank had already ended its work.
            None => assert!(error.step == 3, "{what}: rank {rank} has no error"),
        }
    }
}

/// Whether rank 0 alone passes the fault point.
fn only_rank_0(place: FaultPoint) -> bool {
    place == FaultPoint::Naming
}

#[test]
fn a_panic_at_any_place_of_any_rank_ends_all_and_leaves_the_checkpoints_whole() {
    let good = tempfile::tempdir().unwrap();
    let (outcome, saved, _) = run(&[], good.path(), RunOptions::default());
    assert_eq!((outcome.unwrap().step, saved), (3, vec![1, 2, 3]));
    for writer in WRITERS {
        for place in FaultPoint::ALL {
            for culprit in 0..if only_rank_0(place) { 1 } else { RANKS } {
                // The run resumes from a checkpoint, so that it passes the fault points of loading.
                let from = Checkpoint::open(&good.path().join("step-00000001"), 1).unwrap();
                let what = format!("{place:?} of rank {culprit}, {writer}");
                let folder = tempfile::tempdir().unwrap();
                let fault = move |rank, at, step| {
                    let before = matches!(
                        place,
                        FaultPoint::Opened | FaultPoint::Loaded | FaultPoint::Ending
                    );
                    let now = before || step == 2;
                    assert!((rank, at) != (culprit, place) || !now, "a fault at {at:?}");
                };
                let watcher = Some(Watcher::new(fault));
                let resume = Some(Arc::new(from));
                let options = RunOptions { watcher, resume, ..RunOptions::default() };
                let (outcome, saved, not) = run(&[writer], folder.path(), options);
                intact(folder.path(), &saved, &what);
                let fault = format!("a fault at {place:?}");
                if matches!(place, FaultPoint::Naming | FaultPoint::Writing) && writer == WRITERS[1]
                {
                    // The fault is in a background thread: the run only loses its checkpoint.
                    assert_eq!((outcome.unwrap().step, &saved[..]), (3, &[3][..]), "{what}");
                    assert!(not.len() == 1 && not[0].contains(&fault), "{not:?}");
                    continue;
                }
                named(&outcome.unwrap_err(), culprit, &[&fault, "fault_points.rs:"], &what);
            }
        }
    }
}

/// Number of a lane's ops that the test gives a fault: one and a half steps.
fn ops(lane: Lane) -> u64 {
    let config = tiny(&SETS);
    let report = predict::plan::report(&config, &lay_out(&config)).unwrap();
    let lanes = report.step.unwrap().lanes;
    let ops = lanes.iter().find(|l| l.lane == format!("{lane:?}")).map_or(0, |l| l.ops);
    ops + ops / 2
}

#[test]
fn a_panic_at_any_op_of_any_rank_names_it() {
    let mut tried = 0;
    for lane in Lane::ALL {
        let (all, samples) = (ops(lane), if full() { u64::MAX } else { 2 });
        let stride = all.div_ceil(samples).max(1);
        for tick in (1..=all).step_by(stride as usize) {
            let culprit = (tick as usize + lane as usize) % RANKS;
            let culprits = if full() { 0..RANKS } else { culprit..culprit + 1 };
            for culprit in culprits {
                let what = format!("op {tick} on {lane:?} of rank {culprit}");
                let folder = tempfile::tempdir().unwrap();
                let panic_at = Some((culprit, lane, tick));
                let options = RunOptions { panic_at, ..RunOptions::default() };
                let (outcome, saved, _) = run(&[], folder.path(), options);
                named(&outcome.unwrap_err(), culprit, &["injected fault", ".rs:"], &what);
                intact(folder.path(), &saved, &what);
                tried += 1;
            }
        }
    }
    println!("{tried} ops");
    assert!(tried >= 2 * 5, "{tried}");
}

/// Asserts that the error of a waiting rank names the missing rank and the call that waits.
fn missing(error: &RunError, culprit: usize, what: &str) {
    let text = error.to_string();
    let named = format!("no answer for 4 s from rank(s) [{culprit}]");
    assert!(text.contains(&named) && text.contains(".rs:"), "{what}: {text}");
    assert_ne!(error.rank, culprit, "{what}");
}

/// Whether the run has failed. A stall ends then.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Missing rank that still runs when the process would end.
static STUCK: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Handler that ends the process in a real run. `error.all` has the ranks that still run.
fn note_failure(error: &RunError) {
    if let Error::Timeout { missing, .. } = &error.error
        && error.all[missing[0]].is_some()
    {
        STUCK.store(missing[0], Ordering::SeqCst);
    }
    FAILED.store(true, Ordering::SeqCst);
}

/// Sleeps until the run has failed.
fn stall() {
    let began = Instant::now();
    while !FAILED.load(Ordering::SeqCst) && began.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_that_stalls_is_named_by_those_that_wait_for_it() {
    let timeout = Duration::from_secs(4);
    let stuck = Some(StuckHandler { after: Duration::ZERO, call: note_failure });
    let places = [
        FaultPoint::Step,
        FaultPoint::Saving,
        FaultPoint::Evaluating,
        FaultPoint::Opened,
        FaultPoint::Decided,
        FaultPoint::Saved,
        FaultPoint::Ending,
    ];
    let places = &places[..if full() { places.len() } else { 2 }];
    for (number, place) in places.iter().copied().enumerate() {
        let culprit = RANKS - 1 - number % RANKS;
        let what = format!("a stall at {place:?} of rank {culprit}");
        let folder = tempfile::tempdir().unwrap();
        FAILED.store(false, Ordering::SeqCst);
        STUCK.store(usize::MAX, Ordering::SeqCst);
        let fault = move |rank, at, _| {
            if (rank, at) == (culprit, place) {
                stall();
            }
        };
        let watcher = Some(Watcher::new(fault));
        let options =
            RunOptions { watcher, timeout: Some(timeout), stuck, ..RunOptions::default() };
        let (outcome, saved, _) = run(&[], folder.path(), options);
        missing(&outcome.unwrap_err(), culprit, &what);
        assert_eq!(STUCK.load(Ordering::SeqCst), culprit, "{what}: it had not ended");
        intact(folder.path(), &saved, &what);
    }
    if !full() {
        return;
    }
    let used = Lane::ALL.into_iter().filter(|lane| ops(*lane) > 0);
    for (culprit, lane) in used.enumerate() {
        let (what, culprit) = (format!("a stall on {lane:?}"), culprit % RANKS);
        let folder = tempfile::tempdir().unwrap();
        let stall_at = Some((culprit, lane, 2, 3 * timeout));
        let options = RunOptions { stall_at, timeout: Some(timeout), ..RunOptions::default() };
        let (outcome, saved, _) = run(&[], folder.path(), options);
        missing(&outcome.unwrap_err(), culprit, &what);
        intact(folder.path(), &saved, &what);
    }
}

/// Whether the handler of a stuck run was called, which ends the process in a real run.
static ENDED: AtomicBool = AtomicBool::new(false);

fn ended(_: &RunError) {
    ENDED.store(true, Ordering::SeqCst);
}

/// The background writer is slow, and the run fails in the next step. The run ends after the save.
#[test]
fn a_run_that_fails_ends_after_the_save_under_way() {
    let folder = tempfile::tempdir().unwrap();
    let fault = |rank, at, step| {
        if (at, step) == (FaultPoint::Naming, 1) {
            std::thread::sleep(Duration::from_millis(1500));
        }
        assert!((rank, at, step) != (2, FaultPoint::Step, 2), "a fault beside the save");
    };
    let stuck = Some(StuckHandler { after: Duration::from_millis(300), call: ended });
    let watcher = Some(Watcher::new(fault));
    let options = RunOptions { watcher, stuck, ..RunOptions::default() };
    let (outcome, saved, not) = run(&[WRITERS[1]], folder.path(), options);
    named(&outcome.unwrap_err(), 2, &["a fault beside the save"], "a slow save");
    assert!(!ENDED.load(Ordering::SeqCst), "the process would have ended before the save");
    assert_eq!((saved, not.len()), (vec![1], 0));
    assert_eq!(intact(folder.path(), &[1], "a slow save").unwrap().step(), 1);
}

/// Number of stuck ranks when the process would end. [`WAS_WHOLE`] says whether the checkpoint was
/// complete then.
static WITHOUT: AtomicUsize = AtomicUsize::new(usize::MAX);
static WAS_WHOLE: AtomicBool = AtomicBool::new(false);
static SAVED: AtomicBool = AtomicBool::new(false);
static STALLED: AtomicBool = AtomicBool::new(false);

fn ended_without(error: &RunError) {
    WITHOUT.store(error.all.iter().flatten().count(), Ordering::SeqCst);
    WAS_WHOLE.store(SAVED.load(Ordering::SeqCst), Ordering::SeqCst);
}

fn wait_for_the_end(without: usize) {
    let began = Instant::now();
    while WITHOUT.load(Ordering::SeqCst) != without && began.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The run gives up a stuck rank after the current save, and a save without progress.
#[test]
fn a_stuck_rank_is_given_up_after_the_save_and_a_stuck_save_at_all() {
    let soon = Duration::from_millis(300);
    let stuck = Some(StuckHandler { after: soon, call: ended_without });
    let fails = |rank, at, step| {
        assert!((rank, at, step) != (2, FaultPoint::Step, 2), "a fault beside the save");
    };
    let folder = tempfile::tempdir().unwrap();
    let slow = move |rank, at, step| {
        if (at, step) == (FaultPoint::Naming, 1) {
            std::thread::sleep(Duration::from_millis(1200));
            SAVED.store(true, Ordering::SeqCst);
        }
        match (rank, at, step) {
            (1, FaultPoint::Step, 2) => {
                STALLED.store(true, Ordering::SeqCst);
                wait_for_the_end(1);
            }
            (2, FaultPoint::Step, 2) => {
                while !STALLED.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            _ => {}
        }
        fails(rank, at, step);
    };
    let options = RunOptions { watcher: Some(Watcher::new(slow)), stuck, ..RunOptions::default() };
    let (outcome, saved, _) = run(&[WRITERS[1]], folder.path(), options);
    assert_eq!((outcome.unwrap_err().rank, saved), (2, vec![1]));
    assert_eq!(WITHOUT.load(Ordering::SeqCst), 1, "the rank that is stuck was given up");
    assert!(WAS_WHOLE.load(Ordering::SeqCst), "before the save was whole");

    let hangs = move |rank, at, step| {
        if (at, step) == (FaultPoint::Naming, 1) {
            wait_for_the_end(0);
        }
        fails(rank, at, step);
    };
    let watcher = Some(Watcher::new(hangs));
    let options = RunOptions { watcher, stuck, stuck_save: Some(soon), ..RunOptions::default() };
    let (outcome, ..) = run(&[WRITERS[1]], tempfile::tempdir().unwrap().path(), options);
    assert_eq!(outcome.unwrap_err().rank, 2);
    assert_eq!(WITHOUT.load(Ordering::SeqCst), 0, "only the save was stuck");
}

/// The run keeps the plan's decision, because the free memory may change before the start.
#[test]
fn whether_states_are_copied_is_decided_once() {
    for copies in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let config =
            tiny(&["train.checkpoint_every=2", "train.steps=4", "train.checkpoint_keep=9"]);
        let options = RunOptions {
            checkpoints: Some(RunFolder::at(folder.path()).unwrap()),
            copies_states: Some(copies),
            ..RunOptions::default()
        };
        let mut background = Vec::new();
        let outcome = train(&config, &lay_out(&config), &text(), &options, &mut |message| {
            if let Message::Saved { waited, seconds, .. } = message {
                background.push(waited < seconds);
            }
        });
        assert!(outcome.is_ok_and(|outcome| outcome.complete));
        assert_eq!(background, [copies; 2]);
    }
}
