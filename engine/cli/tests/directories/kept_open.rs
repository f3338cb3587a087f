//! Files and folders that are removed, replaced and linked under a run: what is lost is said, and what is not lost stays.

use super::common::Folder;
use super::replaced::{beside, other_run};
use engine::run::FaultPoint;
use std::fs;

/// Waits until the lines of the steps before are there.
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
    for (line, said, lost) in [
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
        let done = beside(&folder, (FaultPoint::Step, 5), &[&how], &SETS).ok();
        assert_eq!(
            done.stderr.matches("metrics.jsonl: it was").count(),
            1,
            "{line}: {}",
            done.stderr
        );
        assert!(done.stderr.contains(said), "{line}: {}", done.stderr);
        assert_eq!(steps(&folder), (lost + 1..=8).collect::<Vec<_>>(), "{line}");
        let more = ["--resume", "-q", "--set", "train.steps=9", "--set", "schedule.decay_steps=8"];
        let more = more.into_iter().chain(SETS[1..].iter().flat_map(|set| ["--set", set]));
        let done = folder.train("run", &more.collect::<Vec<_>>()).ok();
        let gap =
            "run/metrics.jsonl: no line of 4 of 8 steps: 1 to 4; the run goes on after step 8";
        assert_eq!(done.stderr.contains(gap), lost > 0, "{line}: {}", done.stderr);
    }
    // Nothing is written through a link, nor into what another process has locked meanwhile.
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
        let done = beside(&folder, (FaultPoint::Step, 5), &[&how], &SETS[..3]);
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

/// A fork has the lines of its source's steps nowhere.
#[test]
fn a_resumed_run_says_which_steps_have_no_line() {
    let folder = Folder::new();
    let sets = |steps: &'static str| {
        let sets =
            [steps, "schedule.decay_steps=8", "train.eval_every=0", "train.checkpoint_every=4"];
        sets.into_iter().flat_map(|set| ["--set", set]).chain(["-q"]).collect::<Vec<_>>()
    };
    folder.train("run", &sets("train.steps=8")).ok();
    folder.shell("sed -i 3,5d run/metrics.jsonl").ok();
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
