//! The work of a run before its first step and after its last step: initial weights, states of a
//! checkpoint, the hash of all states, and the file of the weights. All cores of a rank share this
//! work, and their number changes no bit.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use checkpoint::{Checkpoint, RunFolder};
use engine::run::{FaultPoint, Outcome, RunOptions, Watcher, train};
use files::held::LockedRunDir;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tests::{lay_out, short_text, tiny};

/// Outcome of a run, and the time from each fault point to the next.
fn timed(
    sets: &[&str],
    folder: &Path,
    resume: Option<&Path>,
) -> (Outcome, HashMap<FaultPoint, Duration>) {
    let config = tiny(sets);
    let seen: Arc<Mutex<Vec<(FaultPoint, Instant)>>> = Arc::default();
    let note = Arc::clone(&seen);
    let from = |path: &Path| Arc::new(Checkpoint::open(path, 1).expect("a checkpoint"));
    let options = RunOptions {
        watcher: Some(Watcher::new(move |rank, place, _| {
            // Threads that write a checkpoint pass other fault points.
            use FaultPoint::{Ending, Evaluating, Loaded, Opened, Step};
            if rank == 0 && matches!(place, Opened | Loaded | Step | Evaluating | Ending) {
                note.lock().expect("notes").push((place, Instant::now()));
            }
        })),
        weights: Some(LockedRunDir::unlocked(folder).expect("a folder")),
        checkpoints: resume
            .is_none()
            .then(|| RunFolder::at(&folder.join("checkpoints")).expect("a folder")),
        resume: resume.map(from),
        ..RunOptions::default()
    };
    let outcome = train(&config, &lay_out(&config), &short_text(), &options, &mut |_| {});
    let outcome = outcome.unwrap_or_else(|e| panic!("{e}"));
    let seen = seen.lock().expect("notes");
    let ends = seen.iter().skip(1).map(|(_, at)| *at).chain([Instant::now()]);
    let took = seen.iter().zip(ends).map(|((place, from), to)| (*place, to - *from)).collect();
    (outcome, took)
}

/// Settings with odd sizes: padding, pieces that end inside tensors, and tensors that are cut by
/// rows, by columns and not at all.
const MANY: [&str; 4] = [
    "model.vocab=257",
    "offload.bucket_elements=5000",
    "train.steps=1",
    "train.checkpoint_every=1",
];

#[test]
fn kernel_threads_change_no_bit_of_start_restore_and_end() {
    let mut hashes = Vec::new();
    for layout in [&[][..], &["parallel.tensor=2", "parallel.data=2", "precision=Bf16"]] {
        for states in ["offload.optimizer=Host", "offload.optimizer=Device"] {
            let mut ends = ["device.threads=1", "device.threads=3"].map(|threads| {
                let sets = [&MANY[..], layout, &[states, threads]].concat();
                let folder = tempfile::tempdir().expect("a folder");
                let (outcome, _) = timed(&sets, folder.path(), None);
                let step = folder.path().join("checkpoints/step-00000001");
                let weights = std::fs::read(folder.path().join("weights.safetensors"));
                // The resumed run has no step, so that it gathers the restored states.
                let (again, _) = timed(&sets, folder.path(), Some(&step));
                assert_eq!(outcome.state_hash, again.state_hash, "{layout:?} {states} {threads}");
                (outcome.state_hash, weights.expect("weights"))
            });
            ends.sort();
            assert!(ends[0] == ends[1], "{layout:?} {states}");
            hashes.push(ends[0].0.clone());
        }
    }
    assert_eq!((&hashes[0], &hashes[2]), (&hashes[1], &hashes[3]));
}

/// Prints rates of cores for a large model, with ONEBOX_FULL=1 and `--nocapture`.
#[test]
fn rates_of_one_core_and_of_two() {
    if std::env::var_os("ONEBOX_FULL").is_none() {
        return;
    }
    const LARGE: [&str; 8] = [
        "model.layers=6",
        "model.hidden=768",
        "device.memory=4GiB",
        "batch.micro=1",
        "batch.global=1",
        "precision=Bf16",
        "train.steps=1",
        "train.checkpoint_every=1",
    ];
    for threads in ["device.threads=1", "device.threads=2"] {
        let sets = [&LARGE[..], &[threads]].concat();
        let parameters = lay_out(&tiny(&sets)).decoder.shape().parameters() as f64;
        let folder = tempfile::tempdir().expect("a folder");
        let (outcome, took) = timed(&sets, folder.path(), None);
        let step = folder.path().join("checkpoints/step-00000001");
        let more = [&sets[..], &["train.steps=2"]].concat();
        let (_, again) = timed(&more, folder.path(), Some(&step));
        let rate = |what: &str, of: f64, took: Duration| {
            println!("{threads}: {what}: {:.1} M/s", of / took.as_secs_f64() / 1e6);
        };
        println!("{threads}: {:.1} M parameters, {}", parameters / 1e6, outcome.state_hash);
        rate("parameters that start at random", parameters, took[&FaultPoint::Opened]);
        rate("parameters restored with their moments", parameters, again[&FaultPoint::Opened]);
        rate(
            "states gathered, hashed, a third written",
            3.0 * parameters,
            took[&FaultPoint::Ending],
        );
    }
}
