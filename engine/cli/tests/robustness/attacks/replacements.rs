//! Files and directories that are replaced while a program works with them.

use super::plants::{differences, remove, tree};
use super::program::{PATIENCE, Program};
use super::{Findings, Folder, full, sample};
use rustix::process::Signal;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SETS: &str = "--set model.layers=1 --set train.eval_every=0 --set schedule.decay_steps=400 --set sample.tokens=0 \
    --set train.checkpoint_every=5 --set train.checkpoint_keep=99 --set train.tensorboard=true";

/// Shell lines that run during a run, with a word that this run or the next one must print.
const LINES: [(&str, &str); 18] = [
    ("mv run away; cp -a other run", "another directory"),
    ("mv run gone; cp -a other run; rm -rf gone", "another directory"),
    ("mv run away; ln -s other run", "another directory"),
    ("mv run away", "gone"),
    ("mv run gone; rm -rf gone; rm -rf gone", "gone"),
    ("mv run/checkpoints away; ln -s ../other/checkpoints run/checkpoints", "another folder"),
    ("mv run/checkpoints away; mkdir run/checkpoints", "checkpoints"),
    ("rm -rf run/checkpoints", "checkpoints"),
    ("sed -i s/nothing/nothing/ run/metrics.jsonl", "metrics.jsonl"),
    ("rm run/metrics.jsonl", "metrics.jsonl"),
    ("rm run/metrics.jsonl; ln -s ../other/metrics.jsonl run/metrics.jsonl", "metrics.jsonl"),
    ("rm run/metrics.jsonl; mkfifo run/metrics.jsonl", "metrics.jsonl"),
    ("rm run/metrics.jsonl; mkdir run/metrics.jsonl", "metrics.jsonl"),
    ("for f in run/events*; do mv $f away; cp away $f; done", "events"),
    ("rm run/config.ron; ln -s ../other/config.ron run/config.ron", ""),
    ("rm run/.lock; ln -s ../other/.lock run/.lock", ""),
    (
        "rm -f run/checkpoints/latest; ln -s ../../other/checkpoints/latest run/checkpoints/latest",
        "",
    ),
    ("mv text.txt away; mkfifo text.txt; sleep 0.3; rm text.txt; mv away text.txt", ""),
];

/// Last step and state hash in a run's metrics.
fn steps(folder: &Folder, run: &str) -> Option<(u64, String)> {
    let text = fs::read_to_string(folder.path(run).join("metrics.jsonl")).ok()?;
    let last: serde_json::Value = serde_json::from_str(text.lines().last()?).ok()?;
    Some((last["step"].as_u64()?, last["state_hash"].as_str().unwrap_or_default().to_owned()))
}

/// Another run with the same settings, and with files of an unfinished save.
fn other_run(folder: &Folder) {
    let ending =
        folder.attempt(&format!("train tiny.ron -q --run-dir other {SETS} --set train.steps=12"));
    assert_eq!(ending.code, 0, "{ending}");
    for name in ["checkpoints/step-00000015.tmp", "checkpoints/step-00000010.old"] {
        fs::create_dir(folder.path("other").join(name)).unwrap();
        fs::write(folder.path("other").join(name).join("MANIFEST"), "theirs").unwrap();
    }
}

fn one(folder: &Folder, line: &str, word: &str, findings: &mut Findings) {
    ["run", "away", "gone"].iter().for_each(|name| remove(&folder.path(name)));
    let case = format!("`{line}` beside a run");
    let other = tree(&folder.path("other"));
    let train = format!("train tiny.ron -q --run-dir run {SETS} --set train.steps=1000000");
    let mut program = Program::start(folder.attacked(&train));
    let saved = folder.path("run/checkpoints/step-00000005");
    let has_begun = program.wait_for(|| saved.exists(), PATIENCE);
    folder.shell(line);
    // Time for some more saves.
    let time = Duration::from_millis(if full() { 1500 } else { 500 });
    program.wait_for(|| false, time);
    program.signal(Signal::TERM);
    let first = program.end(PATIENCE);
    findings.look_at(&case, &first);
    if !has_begun {
        findings.blame(&case, "saves nothing", &first);
        return;
    }
    let copy = line.contains("cp -a other run").then(|| tree(&folder.path("run")));
    for after in [Some(tree(&folder.path("other"))), copy].into_iter().flatten() {
        findings.harm(&case, &differences(&other, &after), &first);
    }
    // The run continues in its present place.
    let place = if folder.path("away/config.ron").exists() { "away" } else { "run" };
    let is_lost = line.starts_with("mv run gone");
    let (mut message, mut second_code) = (first.stderr.clone(), 0);
    if !is_lost {
        // The planted folder is removed, as by a user who reads the refusal.
        if line.starts_with("mv run/checkpoints") {
            folder.shell("rm -rf run/checkpoints; mv away run/checkpoints").ok();
        }
        folder.shell(&format!("cd {place}; for f in config.ron metrics.jsonl .lock checkpoints checkpoints/latest; do [ -f $f ] && [ ! -L $f ] || [ -d $f ] && [ ! -L $f ] && [ $f = checkpoints ] || rm -rf $f; done; touch .lock"));
        let end = newest(folder, place) + 4;
        let line =
            format!("train tiny.ron -q --run-dir {place} {SETS} --set train.steps={end} --resume");
        let second = folder.attempt(&line);
        findings.look_at(&format!("{case}, resumed"), &second);
        message += &second.stderr;
        second_code = second.code;
        remove(&folder.path("straight"));
        let straight = folder.attempt(&format!(
            "train tiny.ron -q --run-dir straight {SETS} --set train.steps={end}"
        ));
        findings.look_at(&format!("{case}, undisturbed"), &straight);
        if second.code != 0 || steps(folder, place) != steps(folder, "straight") {
            findings.blame(&case, "does not go on to the same end", &second);
        }
    }
    if !message.contains(word) {
        findings.add(
            &case,
            &format!(
                "nobody says `{word}` (exit {} and {second_code}): {message:.300}",
                first.code
            ),
        );
    }
}

/// The step of the newest checkpoint.
fn newest(folder: &Folder, run: &str) -> u64 {
    let names = fs::read_dir(folder.path(run).join("checkpoints"));
    let names = names.into_iter().flatten().map(|entry| entry.unwrap().file_name());
    let steps = names.filter_map(|name| name.to_str()?.strip_prefix("step-")?.parse().ok());
    steps.max().unwrap_or(0)
}

#[test]
fn what_is_replaced_beside_a_run_costs_nobody_anything_in_silence() {
    let folder = Folder::new();
    other_run(&folder);
    let mut findings = Findings::new("replacements beside a run");
    for (line, word) in sample(LINES.to_vec(), 3) {
        one(&folder, line, word, &mut findings);
    }
    findings.end();
}

/// A file alternates between two valid contents.
#[test]
fn a_file_that_is_replaced_while_it_is_read_is_one_or_the_other() {
    let folder = super::inputs::material();
    let mut findings = Findings::new("files that are replaced");
    let tokenizer =
        "data check tiny.ron --set data.tokenizer=\"tokenizer.json\" --set model.vocab=300";
    for (file, line) in [
        ("tiny.ron", "config check tiny.ron"),
        ("text.txt", "train tiny.ron -q --run-dir new"),
        ("tokenizer.json", tokenizer),
        ("chats.jsonl", "train chat.ron -q --run-dir new"),
        ("chat/model.safetensors", "train chat.ron -q --run-dir new"),
        (
            "u16.bin",
            "train tiny.ron -q --run-dir new --set data.train=\"u16.bin\" --set data.format=U16",
        ),
    ] {
        let contents = fs::read(folder.path(file)).unwrap();
        for round in 0..if full() { 10 } else { 1 } {
            let done = AtomicBool::new(false);
            let ending = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let new = folder.path("other");
                    while !done.load(Ordering::SeqCst) {
                        fs::write(&new, &contents).unwrap();
                        fs::rename(&new, folder.path(file)).unwrap();
                        std::thread::sleep(Duration::from_micros(200));
                    }
                });
                let ending = folder.attempt(line);
                done.store(true, Ordering::SeqCst);
                ending
            });
            let case = format!("{file} is replaced beside `onebox {line}`, round {round}");
            findings.look_at(&case, &ending);
            if ending.code != 0 && !ending.stderr.contains(file.rsplit('/').next().unwrap()) {
                findings.blame(&case, "the file is not named", &ending);
            }
            remove(&folder.path("new"));
        }
    }
    findings.end();
}
