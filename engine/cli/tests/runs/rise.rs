//! A training loss that rises above that of a guess.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;

const SETS: [&str; 5] = [
    "train.steps=40",
    "schedule.kind=Constant",
    "schedule.warmup_steps=20",
    "train.eval_every=0",
    "sample.tokens=0",
];

fn train(folder: &Folder, run: &str, sets: &[&str], more: &[&str]) -> crate::common::CommandOutput {
    let sets = SETS.iter().chain(sets).flat_map(|set| ["--set", set]);
    folder.train(run, &more.iter().copied().chain(sets).collect::<Vec<_>>())
}

#[test]
fn a_run_that_ends_above_a_guess_is_warned_of_once_and_is_no_success() {
    let folder = Folder::new();
    let too_fast = ["optimizer.lr=3.0", "optimizer.clip=None"];
    for vocab in ["256", "4096"] {
        let vocab_set = format!("model.vocab={vocab}");
        let sets = [&too_fast[..], &[&vocab_set]].concat();
        let done = train(&folder, &format!("run-{vocab}"), &sets, &[]);
        let texts =
            ["training has diverged", "lower optimizer.lr (it is 3)", &format!("ln({vocab})")];
        let done = done.refused(79, &texts);
        let warned = done.stderr.matches("warning: after step").count();
        assert_eq!(warned, 1, "{}", done.stderr);
        assert!(!done.stderr.contains("next, try"), "{}", done.stderr);
        // The files of the run stay, and its end is recorded.
        let run = format!("run-{vocab}");
        assert_eq!(folder.metrics(&run).last().unwrap()["kind"], "end");
        assert!(folder.path(&format!("{run}/weights.safetensors")).exists());
    }
    let usual = train(&folder, "usual", &["optimizer.lr=3e-3"], &[]).ok().stderr;
    assert!(!usual.contains("warning") && usual.contains("next, try"), "{usual}");
}

#[test]
fn a_resumed_run_knows_the_losses_before_it() {
    let folder = Folder::new();
    let sets = ["optimizer.lr=3.0", "optimizer.clip=None", "train.checkpoint_every=34"];
    let whole = train(&folder, "whole", &sets, &["-q"]).refused(79, &["since step"]);
    let since = |text: &str| {
        let rest = text.split("error: training has diverged").nth(1).unwrap();
        rest.split("since step ").nth(1).unwrap().split(':').next().unwrap().to_owned()
    };
    // The run looks as if it had been killed after the checkpoint of step 34.
    std::fs::remove_dir_all(folder.path("whole/checkpoints/step-00000040")).unwrap();
    let metrics = folder.read("whole/metrics.jsonl");
    let lines = metrics.lines().filter(|line| !line.contains("\"kind\":\"end\""));
    let lines: String = lines.map(|line| line.to_owned() + "\n").collect();
    std::fs::write(folder.path("whole/metrics.jsonl"), lines).unwrap();
    let again = train(&folder, "whole", &sets, &["-q", "--resume"]).refused(79, &["since step"]);
    assert_eq!(since(&again.stderr), since(&whole.stderr));
    assert!(!again.stderr.contains("warning: after step"), "it was warned of: {}", again.stderr);
}
