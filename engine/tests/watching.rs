//! Curves of runs: the event files that TensorBoard reads.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod common;

use common::Folder;
use std::path::Path;
use std::process::Command;

/// With event files, and a checkpoint after every second step.
const WATCHED: [&str; 10] = [
    "-q",
    "--set",
    "train.tensorboard=true",
    "--set",
    "schedule.decay_steps=6",
    "--set",
    "train.checkpoint_every=2",
    "--set",
    "train.checkpoint_keep=9",
    "--set",
];

/// The files of a run, by name.
fn event_files(run: &Path) -> Vec<String> {
    let names = std::fs::read_dir(run).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.retain(|name| name.contains("tfevents"));
    names.sort();
    names
}

/// The payload of every whole record.
fn records(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    let (mut at, mut records) = (0, Vec::new());
    while let Some(length) = bytes.get(at..at + 8) {
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        let Some(record) = bytes.get(at + 12..at + 12 + length + 4) else { break };
        records.push(record[..length].to_vec());
        at += 16 + length;
    }
    records
}

/// TensorBoard's reader finds the curves of `metrics.jsonl`, where it is installed.
fn tensorboard_reads(run: &Path) {
    let Some(python) = std::env::var_os("ONEBOX_TENSORBOARD") else {
        let none = "ONEBOX_TENSORBOARD names no Python with tensorboard; scripts/check-tensorboard --fetch installs one";
        let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!in_ci, "{none}");
        println!("SKIPPED: {none}");
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/check_tensorboard.py");
    let read = Command::new(python).arg(script).arg(run).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
}

#[test]
fn the_curves_of_a_run_that_crashed_and_went_on_are_whole() {
    let folder = Folder::new();
    folder.train("run", &[&WATCHED[..], &["train.steps=5"]].concat()).ok();
    let run = folder.path("run");
    tensorboard_reads(&run);
    // As if it had crashed in its fifth step, after the checkpoint of step 2 and before that of step 4.
    for step in [4, 5] {
        std::fs::remove_dir_all(run.join(format!("checkpoints/step-{step:08}"))).unwrap();
    }
    let metrics = folder.read("run/metrics.jsonl");
    let unfinished = metrics.rsplit_once("{\"kind\":\"step\",\"step\":5").unwrap().0;
    std::fs::write(run.join("metrics.jsonl"), unfinished).unwrap();
    let first = run.join(&event_files(&run)[0]);
    let whole = records(&first).len();
    let length = std::fs::metadata(&first).unwrap().len();
    let torn = std::fs::File::options().write(true).open(&first).unwrap();
    torn.set_len(length - 5).unwrap();
    assert_eq!(records(&first).len(), whole - 1);
    let before = std::fs::read(&first).unwrap();

    folder.train("run", &[&WATCHED[..], &["train.steps=6", "--resume"]].concat()).ok();
    let files = event_files(&run);
    assert_eq!(
        files,
        ["events.out.tfevents.0000000001.onebox", "events.out.tfevents.0000000002.onebox"]
    );
    assert_eq!(std::fs::read(&first).unwrap(), before, "an earlier file stays as it is");
    // A version, a session, the evaluation after step 2, four steps and two evaluations.
    assert_eq!(records(&run.join(&files[1])).len(), 9);
    tensorboard_reads(&run);

    folder.train("run", &[&WATCHED[..], &["train.steps=2", "--overwrite"]].concat()).ok();
    assert_eq!(event_files(&run), ["events.out.tfevents.0000000001.onebox"]);
    tensorboard_reads(&run);
}

#[test]
fn a_loss_that_is_not_finite_is_in_the_curves() {
    let folder = Folder::new();
    let broken = ["optimizer.lr=10", "--set", "optimizer.clip=None", "--set", "precision=Fp16"];
    folder.train("run", &[&WATCHED[..], &broken].concat());
    assert!(folder.read("run/metrics.jsonl").contains(":null,"));
    tensorboard_reads(&folder.path("run"));
}

#[test]
fn a_first_loss_that_the_weights_cannot_have_is_warned_of_once() {
    let folder = Folder::new();
    let steps = ["-q", "--set", "train.steps=2", "--set"];
    let quiet = folder.train("usual", &[&steps[..], &["train.seed=7"]].concat()).ok();
    assert!(!quiet.stderr.contains("warning"), "{}", quiet.stderr);
    let wide = folder.train("wide", &[&steps[..], &["model.init_std=0.9"]].concat()).ok();
    assert_eq!(wide.stderr.matches("warning: the loss of step 1 is").count(), 1, "{}", wide.stderr);
    assert!(wide.stderr.contains("model.init_std (0.9)"), "{}", wide.stderr);

    // Weights that were hardly trained, which then count as a model from elsewhere.
    folder.onebox(&["checkpoint", "export", "usual", "hf", "--to", "safetensors"]).ok();
    let from = "(model: (from: \"hf\"), data: (train: \"text.txt\"), train: (steps: 1))";
    std::fs::write(folder.path("from.ron"), from).unwrap();
    let imported = folder.onebox(&["train", "from.ron", "-q", "--run-dir", "imported"]).ok();
    let said = imported.stderr;
    assert!(said.contains("as if the model had not been trained on such text"), "{said}");
}
