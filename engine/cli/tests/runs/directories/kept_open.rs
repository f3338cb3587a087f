//! Files and folders removed, replaced and linked during a run: losses are reported.

use super::replaced::{ANOTHER_FOLDER, other_run, strike_during_run};
use crate::common::{Folder, OVERFLOWING};
use engine::run::FaultPoint;
use std::fs;
use std::process::Command;

/// Waits until the lines of the steps before are written.
const WRITTEN: &str =
    "until [ $(grep -c '\"kind\":\"step\"' run/metrics.jsonl) -ge 4 ]; do sleep 0.01; done";

const SETS: [&str; 4] =
    ["train.steps=8", "train.eval_every=0", "train.tensorboard=true", "train.checkpoint_every=4"];

fn steps(folder: &Folder) -> Vec<u64> {
    let text = folder.read("run/metrics.jsonl");
    let lines =
        text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    lines.filter(|line| line["kind"] == "step").filter_map(|line| line["step"].as_u64()).collect()
}

#[test]
fn metrics_that_are_removed_or_replaced_under_a_run_are_whole_at_its_end() {
    let folder = Folder::new();
    other_run(&folder);
    for (line, message, lost) in [
        (
            "rm run/metrics.jsonl run/events.*",
            "it was removed under the run; it is written again",
            0,
        ),
        ("sed -i s/nothing/nothing/ run/metrics.jsonl", "it was replaced under the run", 0),
        (
            "echo mine > run/new && mv run/new run/metrics.jsonl",
            "with other contents, which stay",
            4,
        ),
        (": > run/metrics.jsonl", "it was cut off under the run", 4),
    ] {
        let how = format!("sh:{WRITTEN}; {line}");
        let done = strike_during_run(&folder, (FaultPoint::Step, 5), &[&how], &SETS).ok();
        assert_eq!(
            done.stderr.matches("metrics.jsonl: it was").count(),
            1,
            "{line}: {}",
            done.stderr
        );
        assert!(done.stderr.contains(message), "{line}: {}", done.stderr);
        assert_eq!(steps(&folder), (lost + 1..=8).collect::<Vec<_>>(), "{line}");
        let more = ["--resume", "-q", "--set", "train.steps=9", "--set", "schedule.decay_steps=8"];
        let more = more.into_iter().chain(SETS[1..].iter().flat_map(|set| ["--set", set]));
        let done = folder.train("run", &more.collect::<Vec<_>>()).ok();
        let gap =
            "run/metrics.jsonl: no line of 4 of 8 steps: 1 to 4; the run goes on after step 8";
        assert_eq!(done.stderr.contains(gap), lost > 0, "{line}: {}", done.stderr);
    }
    // Nothing is written through a link, or into a file that another process has locked meanwhile.
    for (line, code, why) in [
        (
            "ln -sf ../victim run/metrics.jsonl",
            74,
            ["a symbolic link", "metrics.jsonl: 6 lines could not be written"],
        ),
        (
            "rm run/.lock && echo 1 > run/.lock",
            83,
            ["another process has locked the run's directory", "NOT SAVED"],
        ),
    ] {
        fs::write(folder.path("victim"), "theirs").unwrap();
        let how = format!("sh:{WRITTEN}; {line}");
        let done = strike_during_run(&folder, (FaultPoint::Step, 5), &[&how], &SETS[..3]);
        let done = done.refused(code, &why);
        assert_eq!(
            done.stderr.matches("cannot write run/metrics.jsonl").count(),
            1,
            "{}",
            done.stderr
        );
        assert_eq!(folder.read("victim"), "theirs");
    }
}

/// A fork has no lines of its source's steps.
#[test]
fn a_resumed_run_says_which_steps_have_no_line() {
    let folder = Folder::new();
    let sets = |steps: &'static str| {
        let sets =
            [steps, "schedule.decay_steps=8", "train.eval_every=0", "train.checkpoint_every=4"];
        sets.into_iter().flat_map(|set| ["--set", set]).chain(["-q"]).collect::<Vec<_>>()
    };
    folder.train("run", &sets("train.steps=8")).ok();
    folder.shell("sed -i 4,6d run/metrics.jsonl").ok();
    let resume =
        |run: &str, steps| folder.train(run, &[&["--resume"], &sets(steps)[..]].concat()).ok();
    let gap = "run/metrics.jsonl: no line of 3 of 8 steps: 3 to 5; the run goes on after step 8";
    assert!(resume("run", "train.steps=10").stderr.contains(gap));
    let fork = folder.train("run", &[&["--fork"], &sets("train.steps=12")[..]].concat()).ok();
    let again = resume("run-2", "train.steps=14");
    for stderr in [&fork.stderr, &again.stderr] {
        assert!(!stderr.contains("no line of"), "{stderr}");
    }
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_reported_and_neither_renamed_nor_passed_over() {
    let folder = Folder::new();
    let sets = ["-q", "--set", "train.checkpoint_every=2"];
    folder.train("run", &sets).ok();
    let newest = "run/checkpoints/step-00000004";
    let names = || folder.shell("ls run/checkpoints").stdout;
    let before = names();
    let more = ["--resume", "--set", "train.steps=6", "--set", "schedule.decay_steps=4"];
    let resume = || folder.train("run", &[&sets[..], &more].concat());
    let to_file =
        "a symbolic link, which onebox does not follow here: put the file itself in its place";
    let to_folder = "step-00000004: it is a symbolic link to ../../kept, which onebox does not follow here: put the directory itself";
    for (what, plant, message) in [
        ("", "ln -s ../../kept", to_folder),
        ("/MANIFEST", "mkfifo", "MANIFEST: not a regular file"),
        ("/MANIFEST", "ln -s ../../../kept", to_file),
        ("/rank-00001.safetensors", "ln -s ../../../kept", to_file),
        ("/rank-00001.safetensors", "mkfifo", "rank-00001.safetensors: not a regular file"),
    ] {
        let at = format!("{newest}{what}");
        folder.shell(&format!("mv {at} kept && {plant} {at}")).ok();
        resume().refused(
            74,
            &[message, "nothing is set aside", "move it away to go on from the one before"],
        );
        folder
            .onebox(&["checkpoint", "verify", "run"])
            .refused(74, &["1 of 2 checkpoints could not be read"]);
        assert_eq!(names(), before, "{plant} {at}");
        folder.shell(&format!("rm {at} && mv kept {at}")).ok();
    }
    // A missing entry or an entry that is no folder was not written in this form.
    folder
        .shell(&format!("rm {newest}/MANIFEST && echo a file > run/checkpoints/step-00000008"))
        .ok();
    let done = resume().ok();
    for text in ["step-00000008.broken", "step-00000004.broken", "going on after step 2"] {
        assert!(done.stderr.contains(text), "`{text}` is not in:\n{}", done.stderr);
    }
}

#[test]
fn a_link_in_the_place_of_the_folder_of_checkpoints_is_said_or_refused() {
    let folder = Folder::new();
    other_run(&folder);
    let sets = [
        "train.steps=8",
        "train.eval_every=0",
        "train.checkpoint_every=2",
        "train.checkpoint_writer=Foreground",
    ];
    // A move to a larger disk keeps the same folder.
    let moved = "sh:mv run/checkpoints away && ln -s ../away run/checkpoints";
    let done = strike_during_run(&folder, (FaultPoint::Step, 5), &[moved], &sets).ok();
    let now = "run/checkpoints: it is a symbolic link now; it leads to the folder that it replaces";
    assert_eq!(done.stderr.matches(now).count(), 1, "{}", done.stderr);
    assert!(folder.path("away/step-00000008").exists());
    // The link leads to another run's folder; the own folder was moved or removed.
    for away in ["mv run/checkpoints away", "rm -r run/checkpoints"] {
        let line = format!("sh:{away} && ln -s ../other/checkpoints run/checkpoints");
        let done = strike_during_run(&folder, (FaultPoint::Step, 5), &[&line], &sets);
        let why = match away.starts_with("mv") {
            true => ANOTHER_FOLDER,
            false => {
                "a link is in the place of the folder of the run's checkpoints, which was removed"
            }
        };
        done.refused(83, &["NOT SAVED: run/checkpoints: ", why]);
    }
}

#[test]
fn a_hint_that_cannot_be_written_is_said_once_and_stops_nothing() {
    let folder = Folder::new();
    other_run(&folder);
    let sets = ["train.steps=6", "train.eval_every=0", "train.checkpoint_every=1"];
    let plant = ["sh:rm -f run/checkpoints/latest; mkdir run/checkpoints/latest"];
    let done = strike_during_run(&folder, (FaultPoint::Step, 2), &plant, &sets).ok();
    let message = "cannot write run/checkpoints/latest: Is a directory";
    assert_eq!(done.stderr.matches(message).count(), 1, "{}", done.stderr);
    assert!(!folder.path("run/checkpoints/.latest.tmp").exists());
    folder.write_letters();
    let sets = [&OVERFLOWING[..], &["train.steps=40", "train.rollbacks=1000"]].concat();
    let done = strike_during_run(&folder, (FaultPoint::Step, 1), &plant, &sets).ok();
    assert!(done.stderr.contains("the run is taken back"), "{}", done.stderr);
    // A pipe is not waited for, either.
    let hint = folder.path("run/checkpoints/latest");
    fs::remove_dir(&hint).unwrap();
    assert!(Command::new("mkfifo").arg(&hint).status().unwrap().success());
    folder.shell("rm -r run/checkpoints/step-* && sed -i '/\"end\"/d' run/metrics.jsonl").ok();
    let sets: Vec<_> = sets.iter().flat_map(|set| ["--set", set]).collect();
    folder.train("run", &[&["--resume"], &sets[..]].concat()).refused(82, &[]);
}
