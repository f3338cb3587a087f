//! Runs whose directory changes, or was never fit for a run.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod kept_open;
pub(crate) mod replaced;

use crate::common::Folder;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time of a wait; no command needs as much.
const PATIENCE: Duration = Duration::from_secs(300);

/// Calls `meanwhile` during a run, then ends the run by SIGTERM. Returns its code and messages.
fn during_run(folder: &Folder, meanwhile: impl FnOnce()) -> (Option<i32>, String) {
    let mut command = folder.command(&["train", "tiny.ron", "--run-dir", "run"]);
    for set in [
        "train.steps=1000000",
        "schedule.kind=Constant",
        "train.eval_every=0",
        "train.checkpoint_every=20",
    ] {
        command.args(["--set", set]);
    }
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let (since, saved) = (Instant::now(), folder.path("run/checkpoints/step-00000020"));
    while !saved.exists() {
        assert!(since.elapsed() < PATIENCE, "no checkpoint of step 20");
        std::thread::sleep(Duration::from_millis(5));
    }
    meanwhile();
    let (sender, lines) = std::sync::mpsc::channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || {
        stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    // The next checkpoint has no place any more.
    let mut message: Vec<String> = Vec::new();
    while !message.last().is_some_and(|line| line.contains("NOT SAVED")) {
        message.push(lines.recv_timeout(PATIENCE).unwrap());
    }
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    message.extend(lines);
    (child.wait().unwrap().code(), message.join("\n"))
}

fn checkpoints(folder: &Folder, run: &str) -> String {
    folder.path(run).canonicalize().unwrap().join("checkpoints").display().to_string()
}

#[test]
fn a_run_whose_directory_is_moved_or_removed_makes_no_other_one() {
    let folder = Folder::new();
    let (code, stderr) =
        during_run(&folder, || std::fs::rename(folder.path("run"), folder.path("moved")).unwrap());
    assert!(!folder.path("run").exists(), "{stderr}");
    assert!(stderr.contains("NOT SAVED: the run's directory is gone"), "{stderr}");
    assert!(code.is_some_and(|code| ![0, 75].contains(&code)), "{code:?}: {stderr}");
    // The message names the present place, not the earlier one.
    let place = format!("in {} the newest that is whole is of step", checkpoints(&folder, "moved"));
    assert!(stderr.contains(&place) && !stderr.contains("in run/"), "{stderr}");
    // A complete checkpoint stays complete.
    folder.onebox(&["checkpoint", "verify", "moved"]).ok();
    // Another run gets the place meanwhile.
    let (_, stderr) = during_run(&folder, || {
        std::fs::rename(folder.path("run"), folder.path("gone")).unwrap();
        let sets = ["--set", "train.steps=2", "--set", "train.checkpoint_overhead=None"];
        folder.train("run", &[&["-q"], &sets[..]].concat()).ok();
    });
    assert!(stderr.contains("NOT SAVED: another directory is in the place"), "{stderr}");
    assert!(!folder.path("run/checkpoints").exists(), "{stderr}");
    let place = format!("in {} the newest", checkpoints(&folder, "gone"));
    assert!(stderr.contains(&place) && !stderr.contains("in run/"), "{stderr}");
    assert_eq!(folder.metrics("run").last().unwrap()["step"], 2);
    std::fs::remove_dir_all(folder.path("run")).unwrap();
    let (_, stderr) = during_run(&folder, || {
        let removed = folder.path("removed");
        std::fs::rename(folder.path("run"), &removed).unwrap();
        // A file that is being written may appear meanwhile.
        while removed.exists() {
            let _ = std::fs::remove_dir_all(&removed);
        }
    });
    let unknown = "NOT SAVED: the run's directory is gone: it was removed or moved; where its checkpoints are is not known";
    assert!(stderr.contains(unknown) && !stderr.contains("in run/"), "{stderr}");
}

#[test]
fn nothing_that_is_planted_in_a_run_directory_is_overwritten_or_waited_for() {
    let folder = Folder::new();
    let sets = ["-q", "--set", "train.checkpoint_every=2"];
    folder.train("run", &sets).ok();
    let victim = folder.path("victim");
    let plant = |name: &str, pipe: bool| {
        std::fs::write(&victim, "theirs").unwrap();
        let path = folder.path("run").join(name);
        let _ = std::fs::remove_file(&path);
        if pipe {
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        } else {
            symlink(&victim, &path).unwrap();
        }
    };
    let temporary = [".config.ron.tmp", ".weights.safetensors.tmp", "checkpoints/.latest.tmp"];
    for (steps, pipe) in [("train.steps=6", false), ("train.steps=8", true)] {
        temporary.iter().for_each(|name| plant(name, pipe));
        let keeps = ["--resume", "--set", steps, "--set", "schedule.decay_steps=4"];
        folder.train("run", &[&sets[..], &keeps].concat()).ok();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "theirs");
    }
    for name in [".lock", "metrics.jsonl"] {
        for pipe in [false, true] {
            std::fs::rename(folder.path("run").join(name), folder.path("kept")).unwrap();
            plant(name, pipe);
            let more = ["--resume", "--set", "train.steps=10", "--set", "schedule.decay_steps=4"];
            let done = folder.train("run", &more);
            done.refused(74, &[name, if pipe { "file" } else { "symbolic link" }]);
            assert_eq!(std::fs::read_to_string(&victim).unwrap(), "theirs");
            std::fs::rename(folder.path("kept"), folder.path("run").join(name)).unwrap();
        }
    }
    plant("config.ron", true);
    folder.onebox(&["generate", "run"]).refused(66, &["config.ron"]);
}

#[test]
fn the_home_directory_is_no_place_for_a_run() {
    let folder = Folder::new();
    let mut command = folder.command(&["train", "tiny.ron", "--run-dir", "."]);
    command.env("HOME", folder.path(""));
    Folder::done(command).refused(73, &["your home directory", "such as ./run"]);
    assert!(!folder.path("metrics.jsonl").exists());
}

#[test]
fn a_name_that_no_directory_can_have_and_a_key_of_a_megabyte_are_refused_briefly() {
    let folder = Folder::new();
    for (length, fits) in [(230, true), (231, false), (255, false)] {
        let name = format!("name=\"{}\"", "n".repeat(length));
        let done = folder.onebox(&["config", "check", "tiny.ron", "--set", &name]);
        assert_eq!(done.code, if fits { 0 } else { 78 }, "{length}: {}", done.stderr);
        if fits {
            folder
                .onebox(&["train", "tiny.ron", "-q", "--set", &name, "--set", "train.steps=1"])
                .ok();
        }
    }
    std::fs::write(folder.path("long.ron"), format!("({}: 1)", "k".repeat(1_000_000))).unwrap();
    let done = folder.onebox(&["config", "check", "long.ron"]).refused(78, &["unknown key"]);
    assert!(done.stderr.len() < 10_000, "{} bytes", done.stderr.len());
}

#[test]
fn no_run_starts_among_the_checkpoints_of_another() {
    let folder = Folder::new();
    folder.train("r/a", &["-q", "--set", "train.checkpoint_every=2"]).ok();
    folder.shell("cp -r r/a/checkpoints/step-00000004 copy").ok();
    for mode in [&[][..], &["--resume"], &["--overwrite"], &["--fork"]] {
        for (place, what) in [
            ("r/a/checkpoints/step-00000004", "a checkpoint of the run r/a"),
            ("r/a/checkpoints/", "the folder of checkpoints of the run r/a"),
            ("r/a/../a/checkpoints/new", "in the folder of checkpoints of the run r/a"),
        ] {
            folder.train(place, mode).refused(73, &[what, "name r/a"]);
        }
        folder.train("copy", mode).refused(73, &["copy is a checkpoint, not a run"]);
    }
    for made in ["checkpoints/new", "checkpoints/.lock", "checkpoints/step-00000004/.lock"] {
        assert!(!folder.path("r/a").join(made).exists(), "{made}");
    }
    // A folder of runs may have the same name.
    folder.train("checkpoints/a", &["-q"]).ok();
}

#[test]
fn a_run_inside_of_its_data_goes_on() {
    let folder = Folder::new();
    folder.shell("mkdir -p text/more && cp text.txt text && cp text.txt text/more").ok();
    for (name, train) in [("dir", "text"), ("glob", "text/**"), ("stars", "text/*/*")] {
        let (run, data) = (format!("text/{name}"), format!("data.train={train:?}"));
        let steps = |steps| ["-q", "--set", &data, "--set", steps].map(str::to_owned);
        let first = steps("train.steps=2");
        let first: Vec<&str> = first.iter().map(String::as_str).collect();
        let saves = ["--set", "train.checkpoint_every=1", "--set", "schedule.decay_steps=4"];
        folder.train(&run, &[&first[..], &saves].concat()).ok();
        let more = ["--resume", "--set", &data, "--set", "train.steps=4"];
        let done = folder.train(&run, &[&more[..], &saves].concat()).ok();
        assert!(done.stderr.contains("going on after step 2"), "{}", done.stderr);
        assert!(done.stderr.contains(" of onebox left out"), "{}", done.stderr);
        // A fork gets a directory next to it, and continues there.
        folder.train(&run, &[&["--fork", "--set", &data], &saves[..]].concat()).ok();
        let more = ["--resume", "--set", &data, "--set", "train.steps=6"];
        let done = folder.train(&format!("{run}-2"), &[&more[..], &saves].concat()).ok();
        assert!(done.stderr.contains("going on after step 4"), "{}", done.stderr);
    }
    for train in ["text", "text/*", "text/**"] {
        let data = format!("data.train={train:?}");
        let done = folder.train("text/../text", &["--set", &data]);
        done.refused(73, &["text/../text", "data.train", "another --run-dir"]);
    }
    assert!(!folder.path("text/.lock").exists());
    // Data that is named file by file is accepted.
    folder.train("text", &["-q", "--set", "data.train=\"text/*.txt\""]).ok();
}
