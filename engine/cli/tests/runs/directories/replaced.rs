//! Another run has the place of a run that is still alive: no file of the other run is touched.

use crate::common::{CommandOutput, Folder, OVERFLOWING};
use engine::run::{FaultPoint, Watcher};
use rustix::process::{Signal, getpid, kill_process};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Variable with the arguments of [`a_process`] as JSON: command line, rank 0's place, events.
const CASE: &str = "ONEBOX_TEST_CASE";

/// Trains another run, with files of an unfinished save.
pub(super) fn other_run(folder: &Folder) {
    let sets = ["train.checkpoint_every=1", "train.checkpoint_keep=9", "train.tensorboard=true"];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    folder.train("other", &["-q"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    for file in [
        "checkpoints/step-00000005.tmp/rank-00000.safetensors",
        "checkpoints/step-00000009.tmp/rank-00000.safetensors",
        "checkpoints/step-00000001.old/MANIFEST",
        "checkpoints/.latest.tmp",
        ".weights.safetensors.tmp",
        ".config.ron.tmp",
        "notes.txt",
    ] {
        let path = folder.path("other").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "theirs").unwrap();
    }
}

/// All names below `path`, with the bytes of files.
fn all(path: &Path) -> BTreeMap<OsString, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(path).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        let is_folder = entry.file_type().unwrap().is_dir();
        if is_folder {
            for (below, bytes) in all(&path) {
                found.insert(Path::new(&name).join(below).into(), bytes);
            }
        }
        found.insert(name, (!is_folder).then(|| fs::read(path).unwrap()));
    }
    found
}

/// Puts the other run in the place of `run`.
fn replace(how: &str) {
    let copied = || {
        assert!(Command::new("cp").args(["-a", "other", "run"]).status().unwrap().success());
    };
    match how {
        "moved" => {
            fs::rename("run", "away").unwrap();
            copied();
        }
        "removed" => {
            // The run may write into it meanwhile.
            while let Err(error) = fs::remove_dir_all("run") {
                assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty, "{error}");
            }
            copied();
        }
        "exchanged" => {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            renameat_with(CWD, "run", CWD, "other", RenameFlags::EXCHANGE).unwrap();
        }
        "linked" => {
            fs::rename("run", "away").unwrap();
            symlink("other", "run").unwrap();
        }
        // Only its checkpoints are replaced.
        "folder" => {
            fs::rename("run/checkpoints", "away").unwrap();
            symlink("../other/checkpoints", "run/checkpoints").unwrap();
        }
        other => {
            let line = other.strip_prefix("sh:").unwrap();
            assert!(Command::new("sh").args(["-c", line]).status().unwrap().success(), "{line}");
        }
    }
}

/// Runs `onebox` while another run gets the place of its directory.
#[test]
#[ignore = "a process of the tests below"]
#[expect(clippy::exit, reason = "the test reads the exit code")]
fn a_process() {
    let case = std::env::var(CASE).unwrap();
    let (words, at, step, how): (Vec<String>, String, u64, Vec<String>) =
        serde_json::from_str(&case).unwrap();
    let done = AtomicBool::new(false);
    let watcher = Watcher::new(move |rank, place, now| {
        let here = rank == 0 && format!("{place:?}") == at && now == step;
        if here && !done.swap(true, Ordering::SeqCst) {
            replace(&how[0]);
            if how.len() > 1 {
                kill_process(getpid(), Signal::TERM).unwrap();
            }
        }
    });
    let words = words.into_iter().map(OsString::from);
    std::process::exit(onebox::commands::run(words, Some(watcher)).into());
}

/// Trains with the arguments `words`, and applies `how` at this place and step.
pub(crate) fn struck(
    folder: &Folder,
    (place, step): (FaultPoint, u64),
    how: &[&str],
    words: &[&str],
) -> CommandOutput {
    let words = [&["onebox", "train", "tiny.ron"], words].concat();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "directories::replaced::a_process", "--ignored", "--nocapture"]);
    command.env(CASE, serde_json::json!([words, format!("{place:?}"), step, how]).to_string());
    command.current_dir(folder.path(""));
    Folder::done(command)
}

/// Applies `how` at this place and step of a run; the other run stays unchanged.
pub(super) fn strike_during_run(
    folder: &Folder,
    (place, step): (FaultPoint, u64),
    how: &[&str],
    sets: &[&str],
) -> CommandOutput {
    for old in ["run", "away"].map(|name| folder.path(name)) {
        let _ = fs::remove_dir_all(&old);
        let _ = fs::remove_file(old);
    }
    let words = ["--run-dir", "run"].into_iter();
    let words: Vec<&str> = words.chain(sets.iter().flat_map(|set| ["--set", set])).collect();
    let before = all(&folder.path("other"));
    let done = struck(folder, (place, step), how, &words);
    let what = format!("{how:?} at {place:?} {step}, {sets:?}: {}", done.stderr);
    let now = match how[0] {
        "linked" | "folder" => "other",
        how if how.starts_with("sh:") => "other",
        _ => "run",
    };
    let after = all(&folder.path(now));
    let changed: Vec<_> = before
        .keys()
        .chain(after.keys())
        .filter(|name| before.get(*name) != after.get(*name))
        .collect();
    assert!(changed.is_empty(), "{changed:?} changed, {what}");
    if how[0] == "exchanged" {
        fs::remove_dir_all(folder.path("other")).unwrap();
        fs::rename(folder.path("run"), folder.path("other")).unwrap();
    }
    done
}

pub(super) const ANOTHER_FOLDER: &str = "another folder is in the place of the run's";
const ANOTHER: &str = "another directory is in the place of the run's: it was moved";

#[test]
fn a_run_that_is_taken_back_touches_nothing_of_the_run_in_its_place() {
    let folder = Folder::new();
    other_run(&folder);
    folder.write_letters();
    let sets = [&OVERFLOWING[..], &["train.steps=40", "train.rollbacks=1000"]].concat();
    for how in ["moved", "removed", "exchanged", "linked"] {
        let done = strike_during_run(&folder, (FaultPoint::Step, 1), &[how], &sets);
        done.refused(83, &[ANOTHER]);
    }
    // The run cannot be rolled back, and its advice is not about the other run.
    let sets = [&sets[..], &["train.rollbacks=0", "train.weights=Never"]].concat();
    let done = strike_during_run(&folder, (FaultPoint::Step, 1), &["moved"], &sets);
    let done = done.refused(83, &[ANOTHER, "training has diverged"]);
    assert!(!done.stderr.contains("--fork starts from"), "{}", done.stderr);
}

#[test]
fn a_run_that_saves_and_ends_touches_nothing_of_the_run_in_its_place() {
    let folder = Folder::new();
    other_run(&folder);
    let every = ["train.steps=6", "train.checkpoint_every=2", "train.checkpoint_keep=1"];
    for (place, step) in [(FaultPoint::Step, 3), (FaultPoint::Writing, 4), (FaultPoint::Naming, 4)]
    {
        for (writer, how) in [("Foreground", "moved"), ("Background", "linked")] {
            let writer = format!("train.checkpoint_writer={writer}");
            let sets = [&every[..], &[&writer]].concat();
            let done = strike_during_run(&folder, (place, step), &[how], &sets);
            done.refused(83, &[&format!("checkpoint of step 6 NOT SAVED: {ANOTHER}")]);
        }
    }
    // The run gets a signal to stop.
    let done = strike_during_run(&folder, (FaultPoint::Step, 3), &["removed", "TERM"], &every);
    done.refused(83, &["the run has ended after step ", &format!("NOT SAVED: {ANOTHER}")]);
    // At its end, the run has only the weights to write.
    let bare = ["train.checkpoint_overhead=None", "train.weights=Complete"];
    for (place, step) in [(FaultPoint::Step, 3), (FaultPoint::Ending, 4)] {
        let done = strike_during_run(&folder, (place, step), &["moved"], &bare);
        done.refused(74, &["the weights are not written to ", ANOTHER]);
    }
    // Only the folder of checkpoints is replaced.
    let done = strike_during_run(&folder, (FaultPoint::Step, 3), &["folder"], &every);
    done.refused(83, &["NOT SAVED: run/checkpoints: ", ANOTHER_FOLDER]);
}
