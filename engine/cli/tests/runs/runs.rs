//! `onebox train` and `onebox generate` from the view of a user.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{Folder, OVERFLOWING};
use std::time::{Duration, Instant};

#[test]
fn a_run_leaves_metrics_config_and_weights() {
    let folder = Folder::new();
    let done = folder.train("run", &[]).ok();
    assert_eq!(done.stdout, "", "messages go to stderr");
    for text in
        ["model ", "TP 2 x DP 2", "step     4/4", "eval ", "done ", "it writes:", "next, try:"]
    {
        assert!(done.stderr.contains(text), "`{text}` is not in:\n{}", done.stderr);
    }
    let lines = folder.metrics("run");
    let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["step", "step", "eval", "step", "step", "eval", "end"]);
    for (step, line) in lines.iter().filter(|line| line["kind"] == "step").enumerate() {
        assert_eq!(line["step"], step + 1);
        assert!(line["loss"].as_f64().unwrap() > 1.0 && line["grad_norm"].as_f64().unwrap() > 0.0);
        assert!(line["loss_scale"] == 1.0 && line["skipped"] == false);
        assert!(line["lr"].as_f64().unwrap() > 0.0);
        assert!(line["step_seconds"].as_f64().unwrap() > 0.0);
        assert!(line["tokens_per_second"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(lines[6]["step"], 4);
    assert_eq!(folder.hash("run").len(), 16);
    // The resolved config gives the same run.
    folder.onebox(&["train", "run/config.ron", "--run-dir", "again", "-q"]).ok();
    assert_eq!(folder.hash("again"), folder.hash("run"));
    let names = |run: &str| {
        let mut names: Vec<_> =
            std::fs::read_dir(folder.path(run)).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(
        names("run"),
        [".lock", "checkpoints", "config.ron", "metrics.jsonl", "weights.safetensors"]
    );
}

#[test]
fn the_layout_is_a_matter_of_set_and_a_bit_equal_one_has_the_same_hash() {
    let folder = Folder::new();
    folder.train("overlapped", &["-q"]).ok();
    folder.train("serial", &["-q", "--set", "offload.update=Serial"]).ok();
    folder.train("device", &["-q", "--set", "offload.optimizer=Device"]).ok();
    assert_eq!(folder.hash("overlapped"), folder.hash("serial"));
    assert_eq!(folder.hash("overlapped"), folder.hash("device"));
    let one = ["parallel.tensor=1", "parallel.data=1", "device.count=1", "precision=Fp32"];
    let four = ["parallel.tensor=4", "parallel.data=1", "precision=Fp32"];
    let train = |run: &str, sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>();
        folder.train(run, &[&["-q"], &sets[..]].concat()).ok();
        folder.metrics(run)[5]["loss"].as_f64().unwrap()
    };
    let (one, four) = (train("one", &one), train("four", &four));
    assert!((one - four).abs() < 1e-5 * one, "{one} {four}");
}

#[test]
fn the_suggested_commands_work() {
    let folder = Folder::new();
    let done = folder.train("my run", &["--set", "train.steps=3"]).ok();
    let hints: Vec<&str> = done.stderr.split("next, try:").nth(1).unwrap().trim().lines().collect();
    assert_eq!(hints.len(), 3, "{hints:?}");
    for hint in hints {
        let shell = folder.shell(hint);
        assert_eq!(shell.code, 0, "{hint}: {}", shell.stderr);
    }
}

#[test]
fn quiet_says_nothing_and_a_dry_run_writes_nothing() {
    let folder = Folder::new();
    let done = folder.train("quiet", &["--quiet"]).ok();
    // A quiet run still reports faults of the machine, such as cores that it cannot bind.
    let mut output = done.stderr.lines();
    let warns = |line: &str| line.trim_start().starts_with("WARN") || line.starts_with("warning:");
    assert!(done.stdout.is_empty() && output.all(warns), "{}{}", done.stdout, done.stderr);
    let done = folder.train("dry", &["--dry-run"]).ok();
    assert!(done.stdout.contains("it fits") && done.stderr.contains("nothing was written"));
    assert!(!folder.path("dry").exists());
}

#[test]
fn a_dry_run_refuses_what_a_run_refuses_of_its_directory_and_changes_nothing() {
    let folder = Folder::new();
    let sets = ["--set", "train.checkpoint_every=2"];
    folder.train("run", &[&["-q"], &sets[..]].concat()).ok();
    let files = || folder.shell("find . -type f | sort | xargs sha256sum; ls -d run* no*").stdout;
    let dry = |run: &str, more: &[&str]| {
        let before = files();
        let done = folder.train(run, &[&["--dry-run"], &sets[..], more].concat());
        assert_eq!(files(), before, "{more:?}");
        done
    };
    dry("run", &[]).refused(73, &["run already holds a run"]);
    dry("nosuch", &["--fork"]).refused(73, &["nosuch holds no run"]);
    folder.onebox(&["train", "tiny.ron", "--dry-run", "--resume"]).refused(73, &["--run-dir"]);
    let longer = ["--resume", "--set", "train.steps=6", "--set", "schedule.decay_steps=4"];
    let other = [&longer[..], &["--set", "optimizer.lr=1e-3"]].concat();
    dry("run", &other).refused(78, &["optimizer.lr", "0.003 -> 0.001"]);
    let fork = [&["--fork"], &other[1..]].concat();
    let order = "dry run: everything is in order; nothing was written";
    let newest = "run/checkpoints/step-00000004: going on after step 4";
    dry("run", &fork).refused(0, &["optimizer.lr", newest, order]);
    dry("run", &longer).refused(0, &[newest, order]);
    dry("nosuch", &longer).refused(0, &["no complete checkpoint there", order]);
    dry("run", &["--overwrite"]).refused(0, &[order]);
    // A broken checkpoint is named, and stays where it is.
    let manifest = folder.path("run/checkpoints/step-00000004/MANIFEST");
    std::fs::write(&manifest, "{}").unwrap();
    let texts = ["MANIFEST is broken", "step-00000004: a run sets it aside", order];
    dry("run", &longer).refused(0, &[&texts[..], &["going on after step 2"]].concat());
    std::fs::remove_dir_all(folder.path("run/checkpoints/step-00000002")).unwrap();
    dry("run", &longer).refused(82, &["no checkpoint can be used"]);
    // Files of others are no run that can be overwritten.
    std::fs::remove_file(folder.path("run/metrics.jsonl")).unwrap();
    dry("run", &["--overwrite"]).refused(73, &["that is no run of onebox"]);
}

#[test]
fn phases_of_a_run_are_shown_with_their_times() {
    let folder = Folder::new();
    let done = folder.train("run", &["--log", "debug"]).ok();
    let closed = |phase: &str| {
        let lines = done.stderr.lines().filter(|line| line.contains(phase));
        lines.filter(|line| line.contains("time.busy=")).count()
    };
    for (phase, times) in [("layout", 1), ("data", 1), (":open", 4), (":load", 4)] {
        assert_eq!(closed(&format!("{phase}: close")), times, "{phase}: {}", done.stderr);
    }
    for (phase, times) in [("step{number=1}", 4), ("step{number=4}", 4), ("save{step=4}", 4)] {
        assert_eq!(closed(&format!(":{phase}: close")), times, "{phase}: {}", done.stderr);
    }
    assert!(!folder.train("other", &[]).ok().stderr.contains("close"));
    let asked = |level| {
        let command = format!("ONEBOX_LOG={level} {} doctor", env!("CARGO_BIN_EXE_onebox"));
        folder.shell(&command)
    };
    asked("loud").refused(2, &["ONEBOX_LOG", "`loud`", "debug"]);
    asked("debug").ok();
    asked("").ok();
}

#[test]
fn a_config_from_the_standard_input_is_read_once_and_named_by_the_runs_own() {
    let folder = Folder::new();
    let onebox = env!("CARGO_BIN_EXE_onebox");
    let done = folder.shell(&format!("{onebox} train - --run-dir run < tiny.ron")).ok();
    let hints = done.stderr.split("next, try:").nth(1).unwrap();
    assert!(hints.contains(" train run/config.ron --set parallel.tensor="), "{hints}");
    let hint = hints.lines().find(|line| line.contains(" train ")).unwrap();
    folder.shell(&format!("{hint} --set train.steps=1")).ok();
}

#[test]
fn a_directory_with_a_run_is_refused_unless_the_user_says_what_to_do() {
    let folder = Folder::new();
    folder.train("run", &["-q", "--set", "train.checkpoint_overhead=None"]).ok();
    let before = folder.read("run/metrics.jsonl");
    folder
        .train("run", &[])
        .refused(73, &["already holds a run", "--resume", "--fork", "--overwrite"]);
    std::fs::rename(folder.path("text.txt"), folder.path("moved.txt")).unwrap();
    let done = folder.train("run", &["--resume"]).ok();
    std::fs::rename(folder.path("moved.txt"), folder.path("text.txt")).unwrap();
    assert!(done.stderr.contains("finished at step 4; nothing to do"), "{}", done.stderr);
    assert_eq!(folder.read("run/metrics.jsonl"), before);
    folder
        .train("run", &["--fork"])
        .refused(82, &["no checkpoint to start from", "without --fork"]);
    folder.train("run", &["-q", "--overwrite", "--set", "train.steps=2"]).ok();
    assert_eq!(folder.metrics("run").last().unwrap()["step"], 2);
    folder.train("run", &["--resume", "--fork"]).refused(2, &["cannot be used with"]);
    folder.onebox(&["train", "tiny.ron", "--resume"]).refused(73, &["needs --run-dir"]);
}

#[test]
fn an_interrupt_ends_the_run_in_order_and_resume_never_starts_over_what_it_left() {
    let folder = Folder::new();
    let args = [
        "train",
        "tiny.ron",
        "--run-dir",
        "run",
        "--set",
        "train.steps=1000000",
        "--set",
        "train.checkpoint_overhead=None",
        "--set",
        "schedule.kind=Constant",
    ];
    let child = folder.command(&args).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let lines = || {
        std::fs::read_to_string(folder.path("run/metrics.jsonl")).map_or(0, |t| t.lines().count())
    };
    while lines() < 5 {
        assert!(started.elapsed() < Duration::from_secs(180), "no steps in three minutes");
        std::thread::sleep(Duration::from_millis(10));
    }
    // No other process may use the directory meanwhile.
    folder.train("run", &["--overwrite"]).refused(73, &["in use by another onebox"]);
    let killed =
        std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{stderr}");
    assert!(stderr.contains("interrupted after step"), "{stderr}");
    assert!(folder.path("run/weights.safetensors").exists());
    let metrics = folder.metrics("run");
    assert!(metrics.iter().all(|line| line["kind"] != "end"));
    let read = || std::fs::read(folder.path("run/weights.safetensors")).unwrap();
    let weights = read();
    folder.train("run", &["--resume"]).refused(82, &["kept its weights", "--overwrite"]);
    assert!(read() == weights && folder.metrics("run") == metrics);
    folder.train("run", &["--overwrite", "-q"]).ok();
    folder.train("whole", &["-q"]).ok();
    assert_eq!(folder.hash("run"), folder.hash("whole"));
}

#[test]
fn a_model_writes_the_same_text_for_the_same_seed() {
    let folder = Folder::new();
    folder.train("run", &["-q", "--set", "train.steps=60"]).ok();
    let generate = |more: &[&str]| {
        folder
            .onebox(&[&["generate", "run", "--prompt", "the box", "--tokens", "40"], more].concat())
            .ok()
            .stdout
    };
    let text = generate(&[]);
    assert!(text.starts_with("the box") && text.len() >= 47, "{text}");
    assert_eq!(generate(&[]), text);
    assert_ne!(generate(&["--seed", "1"]), text);
    assert_eq!(generate(&["--temperature", "0"]), generate(&["--temperature", "0", "--seed", "1"]));
    folder.onebox(&["generate", "run", "--prompt", ""]).refused(2, &["empty"]);
    folder.onebox(&["generate", "run", "--temperature", "-1"]).refused(2, &["0 to 10"]);
    folder.onebox(&["generate", "nowhere"]).refused(66, &["nowhere is not a run directory"]);
    for wrong in [&b"not weights at all"[..], &[0xff; 64], b"short"] {
        std::fs::write(folder.path("run/weights.safetensors"), wrong).unwrap();
        folder.onebox(&["generate", "run"]).refused(66, &["weights.safetensors is not the model"]);
    }
}

#[test]
fn a_run_that_diverges_ends_with_advice() {
    let folder = Folder::new();
    let sets = [
        "optimizer.lr=10.0",
        "optimizer.clip=None",
        "optimizer.kind=Sgd",
        "train.steps=3000",
        "precision=Fp16",
        "loss_scale.initial=16777216",
        "loss_scale.floor=16777216",
    ];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let done = folder.train("run", &sets);
    done.refused(
        79,
        &[
            "training has diverged",
            "optimizer.lr",
            "came down to 16777216 (its floor",
            "came to such a gradient first in `",
        ],
    );
    let lines = folder.metrics("run");
    let steps: Vec<_> = lines.iter().filter(|line| line["kind"] == "step").collect();
    assert!(steps.len() < 3000);
    assert!(steps.iter().rev().take(100).all(|line| line["skipped"] == true));
}

/// A growing learning rate makes good states first, and then ruins them.
#[test]
fn advice_after_a_divergence_leads_to_states_that_are_good() {
    let folder = Folder::new();
    let sets = |more: &[&'static str]| -> Vec<&str> {
        let all = [
            "train.eval_every=0",
            "train.checkpoint_every=20",
            "train.steps=600",
            "data.order=Random",
        ];
        all.iter().chain(more).flat_map(|set| ["--set", *set]).collect()
    };
    let growing = [
        "optimizer.lr=10",
        "optimizer.weight_decay=0",
        "optimizer.clip=None",
        "schedule.warmup_steps=600",
        "train.stop_after_skipped=3",
    ];
    let growing_with_many = [&growing[..], &["train.checkpoint_keep=300"]].concat();
    let stderr = folder
        .train("run", &sets(&growing_with_many))
        .refused(79, &["training has diverged"])
        .stderr;
    let (_, step) = stderr.split_once("--fork starts from that of step ").unwrap();
    let step: u64 = step.split(' ').next().unwrap().parse().unwrap();
    assert!(
        stderr.contains(&format!("move the checkpoints after step {step} out of run/checkpoints,"))
    );
    // The next step shows the loss of these states.
    let loss = |line: &&serde_json::Value| line["step"] == step + 1 && line["kind"] == "step";
    let loss = folder.metrics("run").iter().find(loss).unwrap()["loss"].as_f64().unwrap();
    assert!(loss < 1.1 * 5.56, "{loss} after step {step}");
    let newer = |name: &str| name.trim_start_matches("step-").parse().is_ok_and(|n: u64| n > step);
    for entry in std::fs::read_dir(folder.path("run/checkpoints")).unwrap() {
        let entry = entry.unwrap();
        if newer(&entry.file_name().to_string_lossy()) {
            std::fs::remove_dir_all(entry.path()).unwrap();
        }
    }
    let calm = format!("train.steps={}", step + 2);
    let forked =
        folder.train("run", &["--fork", "--set", &calm, "--set", "train.eval_every=0"]).ok();
    assert!(forked.stderr.contains(&format!("going on after step {step}\n")), "{}", forked.stderr);
    // A rate that ruins the states in the first step leaves no checkpoint to propose.
    let once =
        sets(&[&growing[..3], &["train.stop_after_skipped=3", "schedule.kind=Constant"]].concat());
    let few = folder.train("few", &once).refused(79, &["no checkpoint is older"]).stderr;
    assert!(!few.contains("--fork"), "{few}");
}

/// Some samples make gradients that overflow in fp16 with this loss scale, others do not.
#[test]
fn a_run_is_taken_back_as_often_as_it_may_be() {
    let folder = Folder::new();
    folder.write_letters();
    let train = |run: &str, rollbacks: usize| {
        let rollbacks = format!("train.rollbacks={rollbacks}");
        let sets = [&OVERFLOWING[..], &["train.steps=40", &rollbacks]].concat();
        folder.train(run, &sets.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>())
    };
    let taken_back =
        |text: &str| text.matches("the run is taken back to the checkpoint of step").count();

    let never = train("never", 0).refused(79, &["training has diverged"]);
    let once = train("once", 1).refused(79, &["training has diverged"]);
    assert_eq!((taken_back(&never.stderr), taken_back(&once.stderr)), (0, 1));

    let often = train("often", 1000);
    assert_eq!(often.code, 0, "{}", often.stderr);
    assert!(taken_back(&often.stderr) > 1, "{}", often.stderr);
    let lines = folder.metrics("often");
    let steps = lines.iter().filter(|line| line["kind"] == "step");
    let steps: Vec<_> =
        steps.map(|line| (line["step"].as_u64(), line["skipped"] == true)).collect();
    let whole: Vec<_> = (1..=40).map(|step| (Some(step), false)).collect();
    assert_eq!(steps, whole);
    // The second try has the same result as the first, and one rollback more.
    let first =
        |text: &str| text.lines().find(|line| line.contains("taken back")).map(str::to_owned);
    let cut = |line: Option<String>| {
        line.and_then(|line| line.split_once(';').map(|(a, _)| a.to_owned()))
    };
    assert_eq!(cut(first(&once.stderr)), cut(first(&often.stderr)));
}
