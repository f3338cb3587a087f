//! Checkpoints for a user: interrupted, killed, full, broken, or of another experiment.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const EVERY_2: [&str; 2] = ["--set", "train.checkpoint_every=2"];

fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|set| ["--set", *set]).collect()
}

fn checkpoints(folder: &Folder, run: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder.path(&format!("{run}/checkpoints"))) else {
        return Vec::new();
    };
    let name =
        |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

/// Lines of the metrics without the values that depend on time.
fn timeless(folder: &Folder, run: &str) -> Vec<serde_json::Value> {
    let mut lines = folder.metrics(run);
    for line in &mut lines {
        let line = line.as_object_mut().unwrap();
        let measured = ["step_seconds", "tokens_per_second", "host_memory", "time"];
        line.retain(|key, _| !measured.contains(&key.as_str()));
    }
    lines
}

/// Number of lines that `run` has written to its metrics.
fn written(folder: &Folder, run: &str) -> usize {
    let metrics = folder.path(&format!("{run}/metrics.jsonl"));
    std::fs::read_to_string(metrics).map_or(0, |text| text.lines().count())
}

fn wait_for_lines(folder: &Folder, run: &str, lines: usize) {
    let started = Instant::now();
    while written(folder, run) < lines {
        assert!(started.elapsed() < Duration::from_secs(180), "no {lines} lines in three minutes");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts an endless run that saves every step, and waits until it has trained `steps`.
fn start(folder: &Folder, run: &str, more: &[&str], steps: usize) -> Child {
    let args = ["train", "tiny.ron", "--run-dir", run, "--set", "train.checkpoint_every=1"];
    let child = folder.command(&[&args, more].concat()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_lines(folder, run, steps);
    child
}

#[test]
fn an_interrupted_run_is_saved_and_goes_on_as_if_it_had_not_been() {
    let folder = Folder::new();
    let long = sets(&["train.steps=1000000", "schedule.decay_steps=400"]);
    let child = start(&folder, "run", &long, 5);
    let pid = child.id().to_string();
    let killed = std::process::Command::new("kill").args(["-TERM", &pid]).status();
    assert!(killed.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{stderr}");
    assert!(stderr.contains("saved") && stderr.contains("--resume goes on after"), "{stderr}");
    let done = folder.metrics("run").last().unwrap()["step"].as_u64().unwrap();
    // The run is shortened so that the test ends; the schedule is unchanged.
    let end = format!("train.steps={}", done + 3);
    let rest = sets(&[&end, "schedule.decay_steps=400", "train.checkpoint_every=2"]);
    let resumed = folder.train("run", &[&["--resume"], &rest[..]].concat()).ok();
    assert!(resumed.stderr.contains("going on after step"), "{}", resumed.stderr);
    folder.train("straight", &[&["-q"], &rest[..]].concat()).ok();
    assert_eq!(timeless(&folder, "run"), timeless(&folder, "straight"));
    assert_eq!(folder.read_bytes("run"), folder.read_bytes("straight"));
    folder.train("run", &[&["--resume"], &rest[..]].concat()).refused(0, &["nothing to do"]);
}

#[test]
fn killed_at_any_moment_it_goes_on_to_the_same_end() {
    let folder = Folder::new();
    let cycles = if std::env::var_os("ONEBOX_FULL").is_some_and(|v| v == "1") { 200 } else { 20 };
    // This run is too long to end before its last kill on any machine.
    let shared = ["train.eval_every=7", "train.checkpoint_every=1", "schedule.decay_steps=400"];
    let endless = sets(&[&shared[..], &["train.steps=1000000", "sample.tokens=0"]].concat());
    let mut state = 88_172_645_463_325_252_u64;
    for _ in 0..cycles {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Every fourth run is killed during its start, the others between and within their steps.
        let lines = written(&folder, "run") + usize::try_from(state % 4).unwrap();
        let args = ["train", "tiny.ron", "--run-dir", "run", "--resume", "-q"];
        let command =
            folder.command(&[&args, &endless[..]].concat()).stderr(Stdio::piped()).spawn();
        let mut child = command.unwrap();
        wait_for_lines(&folder, "run", lines);
        std::thread::sleep(Duration::from_micros((state >> 8) % 40_000));
        // `kill` sends SIGKILL.
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), None, "{stderr}");
        assert!(!stderr.contains("broken"), "{stderr}");
    }
    // The kill may have torn the last line.
    let text = folder.read("run/metrics.jsonl");
    let steps = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let done = steps.map(|line: serde_json::Value| line["step"].as_u64().unwrap()).max().unwrap();
    assert!(done > cycles / 2, "{cycles} runs left {done} steps");
    let end = format!("train.steps={}", done + 3);
    let rest = sets(&[&shared[..], &[&end, "sample.tokens=0"]].concat());
    folder.train("run", &[&["--resume", "-q"], &rest[..]].concat()).ok();
    folder.train("straight", &[&["-q"], &rest[..]].concat()).ok();
    assert_eq!(timeless(&folder, "run"), timeless(&folder, "straight"));
    assert_eq!(folder.read_bytes("run"), folder.read_bytes("straight"));
}

#[test]
fn another_experiment_is_refused_and_another_layout_is_not() {
    let folder = Folder::new();
    let rest = sets(&["train.steps=2", "schedule.decay_steps=4"]);
    folder.train("run", &[&["-q"], &EVERY_2[..], &rest].concat()).ok();
    // The end line is removed, as if the run had been killed just before it.
    let metrics = folder.read("run/metrics.jsonl");
    let before_end: String = metrics.lines().take(2).map(|line| line.to_owned() + "\n").collect();
    let unfinish = || std::fs::write(folder.path("run/metrics.jsonl"), &before_end).unwrap();
    let resume = |how: &str, more: &[&str]| {
        unfinish();
        let decay = ["train.steps=4", "train.checkpoint_every=2"];
        folder.train("run", &[&[how], &sets(&[&decay, more].concat())[..]].concat())
    };
    for (set, texts) in [
        ("train.seed=1", &["train.seed", "1337 -> 1"][..]),
        ("model.hidden=64", &["model.hidden", "32 -> 64", "model.ffn_hidden"]),
        ("data.validation_fraction=0.2", &["data.validation_fraction", "validation windows"]),
        ("optimizer.lr=1e-3", &["optimizer.lr", "0.003 -> 0.001"]),
        ("batch.global=16", &["batch.global", "8 -> 16"]),
    ] {
        resume("--resume", &[set]).refused(78, &[texts, &["--fork"]].concat());
        assert_eq!(folder.read("run/metrics.jsonl"), before_end, "{set}");
        assert_eq!(checkpoints(&folder, "run"), ["latest", "step-00000002"]);
    }
    resume("--fork", &["model.hidden=64"]).refused(78, &["of another model", "wte"]);
    // A refused run leaves no directory.
    assert!(!folder.path("run-2").exists());
    let fork = resume("--fork", &["optimizer.lr=1e-3"]).ok();
    assert!(fork.stderr.contains("another experiment from here on"), "{}", fork.stderr);
    let forks: Vec<_> =
        folder.metrics("run-2").iter().map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(forks, [2, 3, 4, 4, 4], "an evaluation after 2 and 4, and the end");
    let moved = resume("--resume", &["parallel.tensor=1", "parallel.data=4"]).ok();
    assert!(moved.stderr.contains("same experiment, different layout"), "{}", moved.stderr);
    assert!(moved.stderr.contains("parallel.tensor"), "{}", moved.stderr);
    assert_eq!(folder.metrics("run").last().unwrap()["kind"], "end");
    folder.train("run", &["--overwrite", "-q"]).ok();
    assert_eq!(checkpoints(&folder, "run"), ["latest", "step-00000004"]);
}

impl Folder {
    fn read_bytes(&self, run: &str) -> Vec<u8> {
        std::fs::read(self.path(&format!("{run}/weights.safetensors"))).unwrap()
    }
}

#[test]
fn a_finished_run_goes_on_when_it_is_given_more_steps() {
    let folder = Folder::new();
    let keep = ["schedule.decay_steps=4", "train.checkpoint_every=3"];
    let trained = |run: &str, steps: &str, more: &[&str]| {
        folder.train(run, &[more, &sets(&[&keep[..], &[steps]].concat())].concat())
    };
    trained("run", "train.steps=4", &["-q"]).ok();
    trained("run", "train.steps=4", &["--resume"])
        .refused(0, &["finished at step 4; nothing to do"]);
    trained("run", "train.steps=3", &["--resume"])
        .refused(0, &["finished at step 4; nothing to do"]);
    let more = trained("run", "train.steps=7", &["--resume"]).ok();
    assert!(more.stderr.contains("going on after step 4"), "{}", more.stderr);
    trained("straight", "train.steps=7", &["-q"]).ok();
    assert_eq!(folder.hash("run"), folder.hash("straight"));
    assert_eq!(folder.read_bytes("run"), folder.read_bytes("straight"));
    let steps = |run: &str| {
        let lines = folder.metrics(run).into_iter().filter(|line| line["kind"] == "step");
        lines.map(|line| line["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(steps("run"), steps("straight"));
    // The schedule follows the steps unless it is set. Otherwise it is another experiment, and the
    // message says how to keep it.
    let args = ["--resume", "--set", "train.steps=9", "--set", "train.checkpoint_every=3"];
    folder.train("run", &args).refused(78, &["add --set schedule.decay_steps=4."]);

    // An unfinished run has more steps than requested.
    with_two(&folder, "further");
    trained("further", "train.steps=2", &["--resume"]).refused(78, &["its 4 steps", "train.steps"]);
    // A run without a checkpoint never starts over on its old files.
    let none = ["--set", "train.checkpoint_overhead=None"];
    let without = folder.train("without", &none).ok();
    assert!(without.stderr.contains("saves no checkpoints"), "{}", without.stderr);
    let weights = folder.read_bytes("without");
    let set = ["--resume", "--set", "train.steps=5", "--set", "schedule.decay_steps=4"];
    folder.train("without", &set).refused(82, &["finished at step 4 without a checkpoint"]);
    assert_eq!(folder.read_bytes("without"), weights);
}

/// A run with checkpoints of steps 2 and 4 that has not finished.
fn with_two(folder: &Folder, run: &str) {
    let set = sets(&["train.steps=4", "train.checkpoint_every=2"]);
    folder.train(run, &[&["-q"], &set[..]].concat()).ok();
    let metrics = folder.read(&format!("{run}/metrics.jsonl"));
    let lines = metrics.lines().filter(|l| !l.contains("\"end\"")).map(|l| l.to_owned() + "\n");
    let path = folder.path(&format!("{run}/metrics.jsonl"));
    std::fs::write(path, lines.collect::<String>()).unwrap();
}

fn resume(folder: &Folder) -> CommandOutput {
    folder.train("run", &[&["--resume"], &EVERY_2[..]].concat())
}

#[test]
fn a_broken_checkpoint_is_named_and_the_one_before_is_taken() {
    let folder = Folder::new();
    with_two(&folder, "run");
    let hash = |folder: &Folder| folder.hash("run");
    let newest = folder.path("run/checkpoints/step-00000004/rank-00001.safetensors");
    let mut bytes = std::fs::read(&newest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&newest, &bytes).unwrap();
    let done = resume(&folder).ok();
    for text in [
        "step-00000004/rank-00001.safetensors is broken",
        ".variance`",
        "set aside as",
        "going on after step 2",
    ] {
        assert!(done.stderr.contains(text), "`{text}` is not in:\n{}", done.stderr);
    }
    let names = ["latest", "step-00000002", "step-00000004", "step-00000004.broken"];
    assert_eq!(checkpoints(&folder, "run"), names);
    folder.train("straight", &["-q"]).ok();
    assert_eq!(hash(&folder), folder.hash("straight"));

    // No checkpoint is left: the run never starts from the beginning in silence.
    let other = Folder::new();
    with_two(&other, "run");
    for step in [2, 4] {
        std::fs::write(other.path(&format!("run/checkpoints/step-0000000{step}/MANIFEST")), "")
            .unwrap();
    }
    let before = other.read("run/metrics.jsonl");
    resume(&other).refused(82, &["step-00000002/MANIFEST", "step-00000004/MANIFEST", "cut short"]);
    assert_eq!(other.read("run/metrics.jsonl"), before);
    other.train("run", &[]).refused(73, &["already holds a run"]);
}

#[test]
fn a_disk_that_is_full_costs_a_checkpoint_and_no_run() {
    let folder = Folder::new();
    let line = |blocks: usize, run: &str| {
        let program = env!("CARGO_BIN_EXE_onebox");
        folder.shell(&format!(
            "ulimit -f {blocks}; exec '{program}' train tiny.ron --run-dir {run} --set train.checkpoint_every=2"
        ))
    };
    // Blocks of 512 or 1024 bytes: less than a rank's file or the weights, more than the metrics.
    let done = line(16, "run");
    assert_eq!(done.code, 83, "{}", done.stderr);
    for text in [
        "checkpoint of step 2 NOT SAVED",
        "rank-0000",
        "File too large",
        "step     4/4",
        "the weights are not written",
    ] {
        assert!(done.stderr.contains(text), "`{text}` is not in:\n{}", done.stderr);
    }
    assert!(!done.stderr.contains(" saved:") && checkpoints(&folder, "run").is_empty());
    // The existing checkpoint stays, and the next run continues from it.
    with_two(&folder, "kept");
    let to_six = line(16, "kept --resume --set train.steps=6 --set schedule.decay_steps=4");
    assert_eq!(to_six.code, 83, "{}", to_six.stderr);
    assert!(to_six.stderr.contains("checkpoint of step 6 NOT SAVED"), "{}", to_six.stderr);
    assert_eq!(checkpoints(&folder, "kept"), ["latest", "step-00000002", "step-00000004"]);
    let again = folder.train("kept", &[&["--resume"], &EVERY_2[..]].concat()).ok();
    assert!(again.stderr.contains("going on after step 4"), "{}", again.stderr);
}

#[test]
fn too_little_memory_ends_a_run_with_a_code_and_never_a_checkpoint() {
    let folder = Folder::new();
    folder.train("straight", &[&["-q"], &EVERY_2[..]].concat()).ok();
    let program = env!("CARGO_BIN_EXE_onebox");
    let mut codes = std::collections::BTreeSet::new();
    // KiB of address space; the order of allocations varies, and so does the failing one.
    for limit in [30_000, 60_000, 90_000, 140_000, 300_000, 4_000_000] {
        let run = format!("run-{limit}");
        let done = folder.shell(&format!(
            "ulimit -v {limit}; exec '{program}' train tiny.ron --run-dir {run} --set train.checkpoint_every=2"
        ));
        // A child that is aborted has no exit code.
        let code = if done.code == -1 { 134 } else { done.code };
        codes.insert(code);
        match code {
            0 => continue,
            // The program could not even start.
            127 => assert!(done.stderr.contains("loading shared libraries"), "{}", done.stderr),
            76 => assert!(done.stderr.contains("os error"), "{}", done.stderr),
            // The kernel ends the program without a message while it maps its 30 MB.
            134 if done.stderr.is_empty() => assert!(!folder.path(&run).exists()),
            80 | 134 => assert!(done.stderr.contains("memory"), "{}", done.stderr),
            _ => panic!("{code}: {}", done.stderr),
        }
        let resumed = folder.train(&run, &[&["--resume", "-q"], &EVERY_2[..]].concat()).ok();
        assert!(!resumed.stderr.contains("broken"), "{}", resumed.stderr);
        assert_eq!(folder.hash(&run), folder.hash("straight"));
    }
    assert!(codes.contains(&0) && codes.len() > 1, "{codes:?}");
}

#[test]
fn what_is_no_checkpoint_is_never_followed() {
    let folder = Folder::new();
    with_two(&folder, "run");
    let here = folder.path("run/checkpoints");
    // Foreign names, and links to other places.
    for stray in ["step-", "step-7", "step-0000000x", "STEP-00000009", "old-step-00000008"] {
        std::fs::create_dir(here.join(stray)).unwrap();
    }
    std::fs::write(here.join("step-00000008"), "a file").unwrap();
    let link = here.join("step-00000006");
    std::os::unix::fs::symlink(here.join("step-00000004"), &link).unwrap();
    let rank = here.join("step-00000004/rank-00002.safetensors");
    let outside = folder.path("outside");
    std::fs::rename(&rank, &outside).unwrap();
    std::os::unix::fs::symlink(&outside, &rank).unwrap();
    resume(&folder).refused(74, &["step-00000006: it is a symbolic link", "nothing is set aside"]);
    std::fs::remove_file(link).unwrap();
    resume(&folder).refused(74, &["step-00000004/rank-00002", "it is a symbolic link"]);
    std::fs::remove_dir_all(here.join("step-00000004")).unwrap();
    let done = resume(&folder).ok();
    for text in ["step-00000008", "going on after step 2"] {
        assert!(done.stderr.contains(text), "`{text}` is not in:\n{}", done.stderr);
    }
    assert!(here.join("step-7").exists() && outside.exists());
}

/// A file at the place of the folder: no checkpoint can be written, and the user must see that.
#[test]
fn a_run_that_ends_without_its_checkpoint_says_so_in_every_mode_and_by_its_exit_code() {
    let folder = Folder::new();
    for (run, quiet) in [("loud", &[][..]), ("quiet", &["-q"])] {
        std::fs::create_dir(folder.path(run)).unwrap();
        std::fs::write(folder.path(&format!("{run}/checkpoints")), "").unwrap();
        let done = folder.train(run, &[quiet, &EVERY_2[..]].concat());
        let done =
            done.refused(83, &["checkpoint of step 2 NOT SAVED", "checkpoint of step 4 NOT"]);
        let expected =
            format!("the run has ended after step 4, whose checkpoint is NOT SAVED: {run}");
        assert!(done.stderr.contains(&expected), "{}", done.stderr);
        let failed: Vec<_> = folder.metrics(run);
        let failed = failed.iter().filter(|line| line["kind"] == "checkpoint_failed");
        let steps: Vec<_> = failed
            .map(|line| (line["step"].as_u64().unwrap(), line["error"].as_str().unwrap()))
            .collect();
        assert!(matches!(steps[..], [(2, a), (4, b)] if a == b && a.contains(run)), "{steps:?}");
        assert!(folder.path(&format!("{run}/weights.safetensors")).exists());
    }
    // This run leaves only metrics. It is unfinished, and continues when it can write.
    let bare = [&EVERY_2[..], &["--set", "train.weights=Never"]].concat();
    std::fs::create_dir(folder.path("bare")).unwrap();
    std::fs::write(folder.path("bare/checkpoints"), "").unwrap();
    folder.train("bare", &bare).refused(83, &["NOT SAVED"]);
    assert!(folder.metrics("bare").iter().all(|line| line["kind"] != "end"));
    std::fs::remove_file(folder.path("bare/checkpoints")).unwrap();
    std::fs::create_dir(folder.path("bare/checkpoints")).unwrap();
    folder.train("bare", &[&["--resume"], &bare[..]].concat()).ok();
    assert_eq!(checkpoints(&folder, "bare"), ["latest", "step-00000002", "step-00000004"]);
    // A failure that a later save repairs has no cost.
    std::fs::remove_file(folder.path("quiet/checkpoints")).unwrap();
    folder.train("later", &[&["-q"], &EVERY_2[..]].concat()).ok();
    assert!(!folder.read("later/metrics.jsonl").contains("checkpoint_failed"));
}

/// A terminal without a cursor shows only lines.
#[test]
fn a_dumb_terminal_shows_what_a_pipe_shows() {
    let folder = Folder::new();
    let program = env!("CARGO_BIN_EXE_onebox");
    let line = format!("'{program}' train tiny.ron --run-dir run --set train.checkpoint_every=2");
    let on_terminal = format!("TERM=dumb script -qec \"{line}\" /dev/null");
    let done = folder.shell(&on_terminal).ok();
    for text in ["step     1/4", "eval     2/4", "checkpoint of step 2 saved", "step     4/4"] {
        assert!(done.stdout.contains(text), "`{text}` is not in:\n{}", done.stdout);
    }
}

#[test]
fn where_checkpoints_were_no_run_begins_at_step_1() {
    let folder = Folder::new();
    let rest = sets(&["train.steps=2", "schedule.decay_steps=4"]);
    folder.train("run", &[&["-q"], &EVERY_2[..], &rest].concat()).ok();
    let more = sets(&["train.steps=4", "train.checkpoint_every=2"]);
    let resume = || folder.train("run", &[&["--resume"], &more[..]].concat());
    let checkpoints = folder.path("run/checkpoints");
    let metrics = folder.read("run/metrics.jsonl");
    let unfinished: String = metrics.lines().take(2).map(|line| line.to_owned() + "\n").collect();
    std::fs::write(folder.path("run/metrics.jsonl"), &unfinished).unwrap();
    // The checkpoints are on a disk that is not mounted.
    std::fs::rename(&checkpoints, folder.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(folder.path("absent"), &checkpoints).unwrap();
    resume().refused(82, &["a link to", "absent", "bring the checkpoints back", "--overwrite"]);
    std::fs::remove_file(&checkpoints).unwrap();
    // The checkpoints were removed by hand, except for the hint.
    std::fs::create_dir(&checkpoints).unwrap();
    std::fs::copy(folder.path("elsewhere/latest"), checkpoints.join("latest")).unwrap();
    resume().refused(82, &["latest names step-00000002, which is not there"]);
    std::fs::remove_dir_all(&checkpoints).unwrap();
    // The folder was moved away as a whole.
    resume().refused(82, &["made this folder before its first step", "bring the checkpoints back"]);
    assert_eq!(folder.read("run/metrics.jsonl"), unfinished);
    // The folder is back again.
    std::fs::rename(folder.path("elsewhere"), &checkpoints).unwrap();
    resume().ok();
}

#[test]
fn a_fork_without_a_checkpoint_of_its_own_goes_on_from_its_source() {
    let folder = Folder::new();
    let rest = sets(&["train.steps=2", "schedule.decay_steps=4"]);
    folder.train("run", &[&["-q"], &EVERY_2[..], &rest].concat()).ok();
    let other = ["optimizer.lr=1e-3", "train.steps=4", "train.checkpoint_overhead=None"];
    let other = sets(&[&other[..], &["schedule.decay_steps=4"]].concat());
    folder.train("run", &[&["--fork", "-q"], &other[..]].concat()).ok();
    let (whole, metrics) = (timeless(&folder, "run-2"), folder.read("run-2/metrics.jsonl"));
    // The run looks as if it had been killed in its last step.
    let begun: String = metrics.lines().take(1).map(|line| line.to_owned() + "\n").collect();
    let killed = || {
        std::fs::write(folder.path("run-2/metrics.jsonl"), &begun).unwrap();
        std::fs::remove_file(folder.path("run-2/weights.safetensors")).unwrap();
    };
    killed();
    let resume = || folder.train("run-2", &[&["--resume"], &other[..]].concat());
    let set_otherwise = [&["--resume"], &other[..], &sets(&["optimizer.lr=2e-3"])].concat();
    let refused = folder.train("run-2", &set_otherwise);
    refused.refused(
        78,
        &["differs from the one that the fork was trained with", "optimizer.lr", "0.001 -> 0.002"],
    );
    let done = resume().ok();
    assert!(done.stderr.contains("going on after step 2"), "{}", done.stderr);
    assert_eq!(timeless(&folder, "run-2"), whole);
    killed();
    // The fork's own checkpoints are elsewhere, so it does not continue from its source.
    let own = folder.path("run-2/checkpoints");
    std::os::unix::fs::symlink(folder.path("absent"), &own).unwrap();
    resume().refused(82, &["a link to", "bring the checkpoints back"]);
    std::fs::remove_file(&own).unwrap();
    std::fs::rename(folder.path("run"), folder.path("gone")).unwrap();
    resume().refused(82, &["run/checkpoints/step-00000002", "is a fork of that checkpoint"]);
    assert_eq!(folder.read("run-2/metrics.jsonl"), begun);
}

/// The messages of a fork name its source's checkpoint as such, not as one of its own.
#[test]
fn a_fork_that_saves_nothing_does_not_name_the_checkpoint_of_its_source_as_its_own() {
    let folder = Folder::new();
    let rest = sets(&["train.steps=2", "schedule.decay_steps=4"]);
    folder.train("run", &[&["-q"], &EVERY_2[..], &rest].concat()).ok();
    // The limit is less than a rank's file, and more than the metrics.
    let program = env!("CARGO_BIN_EXE_onebox");
    let done = folder.shell(&format!(
        "ulimit -f 16; exec '{program}' train tiny.ron --run-dir run --fork --set train.checkpoint_every=2"
    ));
    let none = "run-2/checkpoints there is none before it; --resume starts again from ";
    done.refused(
        83,
        &["step 4, whose checkpoint is NOT SAVED", none, "run/checkpoints/step-00000002"],
    );
}

/// `/proc` is another file system, and never has room.
#[test]
fn room_is_looked_for_where_a_link_leads_to() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("run")).unwrap();
    std::os::unix::fs::symlink("/proc", folder.path("run/checkpoints")).unwrap();
    let text = ["no room on the disk of the checkpoints", "0 B are free", "nothing was written"];
    folder.train("run", &EVERY_2).refused(74, &text);
    // A run with weights alone does not write there.
    let none = ["--set", "train.checkpoint_overhead=None"];
    folder.train("run", &none).ok();
}
