//! Files of a run are no links, and no plant is written through, awaited or read without a bound.

use super::plants::{Plant, Trap, differences, remove, tree, with_rights};
use super::program::{PATIENCE, ending};
use super::{Findings, Folder, full, sample};
use std::fs;

/// A run on tokens that saves every other step and continues to step 6.
const SETS: &str = "--set data.tokenizer=\"tokenizer.json\" --set model.vocab=300 --set train.checkpoint_every=2 \
    --set train.checkpoint_keep=9 --set train.eval_every=0 --set schedule.decay_steps=6 --set train.tensorboard=true \
    --set model.layers=1";

/// Files and folders of a run, and names that it will use.
const FILES: [&str; 20] = [
    "config.ron",
    "metrics.jsonl",
    ".lock",
    "weights.safetensors",
    "tokenizer.json",
    "checkpoints",
    "checkpoints/latest",
    "checkpoints/step-00000002",
    "checkpoints/step-00000004",
    "checkpoints/step-00000004/MANIFEST",
    "checkpoints/step-00000004/rank-00000.safetensors",
    "checkpoints/step-00000006",
    "checkpoints/step-00000006.tmp",
    "checkpoints/step-00000004.old",
    "checkpoints/step-00000004.broken",
    "checkpoints/.latest.tmp",
    ".config.ron.tmp",
    ".weights.safetensors.tmp",
    "metrics.jsonl.damaged",
    "EVENTS",
];

/// Commands that read a run, and parts of the names of the files that they read.
const READERS: [(&str, &[&str]); 8] = [
    (
        "generate run --prompt a --tokens 2",
        &["config.ron", "weights", "tokenizer", "checkpoints", "step-00000004"],
    ),
    ("report run -o new.html", &["config.ron", "metrics"]),
    ("checkpoint show run", &["checkpoints", "latest", "step-00000004", "config.ron"]),
    ("checkpoint verify run", &["checkpoints", "latest", "step-00000004"]),
    ("checkpoint diff run run", &["checkpoints", "latest", "MANIFEST", "rank"]),
    (
        "checkpoint export run new --to safetensors",
        &["checkpoints", "MANIFEST", "rank", "config.ron", "tokenizer"],
    ),
    (
        "checkpoint reshard run new --tp 1 --dp 1",
        &["checkpoints", "MANIFEST", "rank", "config.ron"],
    ),
    ("simulate tiny.ron --box dgx-a100 --no-schedules --compare run", &["config.ron", "metrics"]),
];

fn train(run: &str, steps: u64, how: &str) -> String {
    format!("train tiny.ron -q --run-dir {run} {SETS} --set train.steps={steps} {how}")
}

/// Event file of a run, whose name contains a time; without such a file, a similar name.
fn events(folder: &Folder) -> String {
    let names = fs::read_dir(folder.path("whole")).unwrap();
    let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.find(|name| name.starts_with("events.")).unwrap_or_else(|| "events.out".to_owned())
}

/// State of a run at its end: the state hash and the weights.
fn state(folder: &Folder, run: &str) -> Option<(String, Vec<u8>)> {
    let text = fs::read_to_string(folder.path(run).join("metrics.jsonl")).ok()?;
    let last: serde_json::Value = serde_json::from_str(text.lines().last()?).ok()?;
    let weights = fs::read(folder.path(run).join("weights.safetensors")).ok()?;
    Some((last["state_hash"].as_str()?.to_owned(), weights))
}

/// Restores the run from before the attack.
fn renew(folder: &Folder) {
    ["run", "new", "new.html"].iter().for_each(|name| remove(&folder.path(name)));
    folder.shell("cp -a whole run").ok();
}

/// Continues a run with a plant, or after a refusal without the plant, to the same end.
fn resumed(
    folder: &Folder,
    file: &str,
    plant: Plant,
    straight: &(String, Vec<u8>),
    findings: &mut Findings,
) {
    renew(folder);
    let Some(planted) = Trap::new(folder, &format!("run/{file}"), plant) else { return };
    let case = format!("{plant:?} as {file} of a run that is resumed");
    let line = train("run", 6, "--resume");
    let first = ending(with_rights(folder.attacked(&line), plant), PATIENCE);
    findings.look_at(&case, &first);
    // The folder of checkpoints may be on another disk.
    let is_elsewhere = file == "checkpoints" && plant == Plant::Link;
    if !is_elsewhere {
        findings.harm(&case, &planted.harm(), &first);
    }
    if first.code == 0 && state(folder, "run").as_ref() != Some(straight) {
        findings.blame(&case, "ends in another state", &first);
    }
    // No refusal is silent.
    if first.code != 0 && first.stderr.is_empty() && first.faults().is_empty() {
        findings.blame(&case, "is refused without a word", &first);
    }
    if file == "checkpoints/step-00000004" && plant == Plant::Link && !planted.is_there() {
        findings.blame(&case, "the link is not there any more", &first);
    }
    planted.undo();
    let second = folder.attempt(&line);
    findings.look_at(&format!("{case}, again without it"), &second);
    if state(folder, "run").as_ref() != Some(straight) {
        findings.blame(&case, "does not go on to the same end without it", &second);
    }
}

/// Runs a command that reads a run with a plant in it.
fn read(folder: &Folder, line: &str, file: &str, plant: Plant, findings: &mut Findings) {
    let Some(planted) = Trap::new(folder, &format!("run/{file}"), plant) else { return };
    let case = format!("{plant:?} as run/{file} of `onebox {line}`");
    let before = tree(&folder.path("run"));
    let read = ending(with_rights(folder.attacked(line), plant), PATIENCE);
    findings.look_at(&case, &read);
    let mut harm = planted.harm();
    harm.extend(differences(&before, &tree(&folder.path("run"))));
    findings.harm(&case, &harm, &read);
    planted.undo();
    ["new", "new.html"].iter().for_each(|name| remove(&folder.path(name)));
}

/// A folder with `whole`, a run of four steps, and an undisturbed run's state after six.
fn with_run() -> (Folder, (String, Vec<u8>)) {
    let folder = super::inputs::material();
    for (run, steps) in [("straight", 6), ("whole", 4)] {
        let ending = folder.attempt(&train(run, steps, ""));
        assert_eq!(ending.code, 0, "{ending}");
    }
    let straight = state(&folder, "straight").unwrap();
    (folder, straight)
}

#[test]
fn nothing_planted_among_the_files_of_a_run_harms_others_or_the_run() {
    let (folder, straight) = with_run();
    let mut findings = Findings::new("runs");
    let mut cases: Vec<(&str, Plant)> = Vec::new();
    for file in FILES {
        cases.extend(Plant::ALL.map(|plant| (file, plant)));
    }
    let events = events(&folder);
    for (file, plant) in sample(cases, 10) {
        let file = if file == "EVENTS" { &events } else { file };
        resumed(&folder, file, plant, &straight, &mut findings);
    }
    findings.end();
}

#[test]
fn commands_that_read_a_run_change_nothing_of_it_and_wait_for_nothing() {
    let (folder, _) = with_run();
    let mut findings = Findings::new("readers of runs");
    let mut cases = Vec::new();
    for (line, parts) in READERS {
        let files = FILES.iter().filter(|file| parts.iter().any(|part| file.contains(part)));
        let files = files.filter(|file| !file.ends_with(".tmp") && !file.ends_with(".old"));
        for file in files {
            cases.extend(Plant::ALL.map(|plant| (line, *file, plant)));
        }
    }
    renew(&folder);
    for (line, file, plant) in sample(cases, 14) {
        read(&folder, line, file, plant, &mut findings);
    }
    findings.end();
}

/// The run directory itself is planted.
#[test]
fn what_is_no_directory_is_no_place_for_a_run() {
    let folder = super::inputs::material();
    let mut findings = Findings::new("run directories");
    for plant in [
        Plant::Foreign,
        Plant::Dangling,
        Plant::Loop,
        Plant::Pipe,
        Plant::Socket,
        Plant::Zero,
        Plant::Full,
        Plant::Sparse,
    ] {
        for how in ["", "--resume", "--overwrite", "--fork"] {
            if !full() && how != "--overwrite" {
                continue;
            }
            let planted = Trap::new(&folder, "run", plant).unwrap();
            let case = format!("{plant:?} as the directory of a run, {how}");
            let ending = folder.attempt(&train("run", 2, how));
            findings.look_at(&case, &ending);
            // A dangling link may be followed, as a shell does.
            let mut harm = planted.harm();
            harm.retain(|harm| plant != Plant::Dangling || !harm.starts_with("new"));
            findings.harm(&case, &harm, &ending);
            planted.undo();
        }
    }
    findings.end();
}
