//! Crashes while a checkpoint is saved: the process is killed at every system call, power is lost
//! at every call, and every call is refused once. Needs strace; without strace these checks are
//! skipped with a message, which is a failure if CI=true. Runs of all modes and preparations of
//! data are also killed at random moments.
//!
//! By default, a quick sample of the cases runs; with ONEBOX_FULL=1, all cases.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]
#![allow(clippy::integer_division, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

mod commands;
mod disk;
mod modes;
mod preparations;
mod trace;

use crate::common::{CommandOutput, Folder, has_strace};
use checkpoint::{Checkpoint, newest};
use disk::{Disk, Tree};
use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::path::Path;
use std::process::Command;
use trace::Op;

/// The smallest possible model, saved in every step, on two data-parallel groups of two ranks.
const SETS: [&str; 7] = [
    "model.layers=1",
    "model.hidden=8",
    "train.steps=4",
    "train.checkpoint_every=1",
    "train.eval_every=0",
    "sample.tokens=0",
    "batch.micro=1",
];

fn full() -> bool {
    std::env::var_os("ONEBOX_FULL").is_some_and(|value| value == "1")
}

impl Folder {
    /// Trains in `run`, an absolute path, under strace.
    fn traced(&self, strace: &[&str], run: &str, more: &[&str]) -> CommandOutput {
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o"]).arg(self.path("strace.log")).args(strace);
        command.arg(env!("CARGO_BIN_EXE_onebox")).args(["train", "tiny.ron", "--run-dir", run]);
        command.args(SETS.iter().flat_map(|set| ["--set", set])).args(more);
        command.current_dir(self.path("")).stdin(std::process::Stdio::null());
        Self::done(command)
    }

    fn plain(&self, run: &str, more: &[&str]) -> CommandOutput {
        let sets: Vec<&str> = SETS.iter().flat_map(|set| ["--set", set]).collect();
        self.train(run, &[&sets, more].concat())
    }

    fn absolute(&self, run: &str) -> String {
        self.path(run).display().to_string()
    }

    /// Metrics and bytes that a run wrote, without measured values and without failures to save.
    fn left(&self, run: &str) -> (Vec<serde_json::Value>, Vec<u8>) {
        let mut lines = self.metrics(run);
        lines.retain(|line| line["kind"] != "checkpoint_failed");
        for line in &mut lines {
            let line = line.as_object_mut().unwrap();
            let measured = ["step_seconds", "tokens_per_second", "host_memory", "time"];
            line.retain(|key, _| !measured.contains(&key.as_str()));
        }
        (lines, std::fs::read(self.path(&format!("{run}/weights.safetensors"))).unwrap())
    }
}

/// Changes that a run makes to the files of its directory.
fn recorded() -> Vec<Op> {
    let folder = Folder::new();
    let run = folder.absolute("run");
    let calls = format!("trace={}", trace::CALLS);
    folder.traced(&["-xx", "-s", "100000000", "-e", &calls], &run, &[]).ok();
    let ops = trace::ops(&trace::calls(&folder.read("strace.log")), &run);
    let saved = ops.iter().filter(|op| matches!(op, Op::Saved(_))).count();
    assert_eq!(saved, 4, "every step is saved");
    ops
}

/// Checks the states that power cuts left, each directory with the same contents only once.
#[derive(Default)]
struct Inspector {
    /// By the contents of a directory: the reason why it is no checkpoint.
    torn: HashMap<u64, Option<String>>,
    /// By the contents of a state and the saved step: the fault of the state.
    states: HashMap<u64, Option<String>>,
}

fn hash(what: impl Hash) -> u64 {
    let mut hasher = std::collections::hash_map::DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

impl Inspector {
    /// Fault of `tree`, if `saved` was the newest step that was reported as saved.
    fn problem(&mut self, tree: &Tree, saved: u64) -> Option<String> {
        let key = hash((tree, saved));
        if let Some(known) = self.states.get(&key) {
            return known.clone();
        }
        let found = self.inspect(tree, saved);
        self.states.insert(key, found.clone());
        found
    }

    fn inspect(&mut self, tree: &Tree, saved: u64) -> Option<String> {
        let mut newest = 0;
        for name in tree.keys().filter_map(|path| path.strip_prefix("checkpoints/step-")) {
            let Ok(step) = name.parse::<u64>() else { continue };
            let inside = format!("checkpoints/step-{name}/");
            let files =
                tree.iter().filter_map(|(p, b)| Some((p.strip_prefix(&inside)?, b.as_ref()?)));
            let files: Vec<_> = files.collect();
            let torn = self.torn.entry(hash((step, &files))).or_insert_with(|| open(step, &files));
            if let Some(why) = torn {
                return Some(format!("torn: {why}"));
            }
            newest = newest.max(step);
        }
        if newest < saved {
            return Some(format!("lost: step {saved} was saved, the newest is {newest}"));
        }
        let metrics = tree.get("metrics.jsonl").cloned().flatten().unwrap_or_default();
        let lines = lines_of_steps(&metrics);
        (lines < newest).then(|| format!("lost: the metrics after step {lines} of {newest}"))
    }
}

/// Reason why onebox does not accept files as a checkpoint.
fn open(step: u64, files: &[(&str, &Vec<u8>)]) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("step-{step:08}"));
    std::fs::create_dir(&path).unwrap();
    files.iter().for_each(|(name, bytes)| std::fs::write(path.join(name), bytes).unwrap());
    Checkpoint::open(&path, step).err().map(|why| why.to_string())
}

/// Number of steps 1, 2, .. that have a line.
fn lines_of_steps(metrics: &[u8]) -> u64 {
    let lines = metrics.split_inclusive(|byte| *byte == b'\n').filter(|l| l.ends_with(b"\n"));
    let steps = lines.map_while(|line| {
        let line: serde_json::Value = serde_json::from_slice(line).ok()?;
        Some((line["kind"] == "step").then(|| line["step"].as_u64()).flatten())
    });
    (1..).zip(steps.flatten()).take_while(|(expected, step)| expected == step).count() as u64
}

/// Loses power after every op, until a problem of kind `until` occurs. Returns the number of
/// states, and the first problem of each kind.
fn lose_power(ops: &[Op], most: usize, until: Option<&str>) -> (usize, BTreeMap<String, String>) {
    let (mut disk, mut saved, mut inspector) = (Disk::new(), 0, Inspector::default());
    let mut problems = BTreeMap::new();
    for (at, op) in ops.iter().enumerate() {
        disk.apply(op);
        if let Op::Saved(step) = op {
            saved = *step;
        }
        for tree in disk.after_power_cut(most) {
            let Some(why) = inspector.problem(&tree, saved) else { continue };
            let kind = why.split(':').next().unwrap().to_owned();
            problems.entry(kind).or_insert_with(|| format!("after op {at}, {op:.200?}: {why}"));
        }
        if until.is_some_and(|kind| problems.contains_key(kind)) {
            break;
        }
    }
    (inspector.states.len(), problems)
}

#[test]
fn no_power_cut_tears_or_loses_a_checkpoint() {
    if !has_strace() {
        return;
    }
    let ops = recorded();
    let (states, problems) = lose_power(&ops, if full() { 10 } else { 5 }, None);
    println!("{} ops, {states} states of the disk", ops.len());
    assert!(states > 100 && problems.is_empty(), "{problems:#?}");
}

/// The model must find the faults that it is made for: they are planted in a recorded run.
#[test]
fn the_model_of_a_power_cut_finds_planted_faults() {
    if !has_strace() {
        return;
    }
    let good = recorded();
    let synced = |end: &'static str| move |op: &Op| matches!(op, Op::Sync { path, .. } if path.trim_end_matches(char::is_numeric).ends_with(end));
    let without = |gone: &dyn Fn(&Op) -> bool| -> Vec<Op> {
        let rest: Vec<Op> = good.iter().filter(|op| !gone(op)).cloned().collect();
        assert!(rest.len() < good.len(), "nothing was taken out");
        rest
    };
    let early = |moved: &dyn Fn(&Op) -> bool, before: &dyn Fn(&Op) -> bool| -> Vec<Op> {
        let mut ops = good.clone();
        for at in 0..ops.len() {
            if moved(&ops[at]) {
                let to = ops[..at].iter().rposition(before).unwrap();
                ops[to..=at].rotate_right(1);
            }
        }
        ops
    };
    let named = |op: &Op| matches!(op, Op::Rename { to, .. } if to.starts_with("step-") && !to.ends_with(".old"));
    let parent = synced("/checkpoints");
    for (fault, ops, kind) in [
        ("no fsync of ranks' files", without(&synced(".safetensors")), "torn"),
        ("no fsync of the manifest", without(&synced("MANIFEST")), "torn"),
        ("no fsync of the directory", without(&synced(".tmp")), "torn"),
        ("no fsync of the parent", without(&parent), "lost"),
        ("the name before the fsync", early(&named, &synced("MANIFEST")), "torn"),
        ("said before the fsync", early(&|op| matches!(op, Op::Saved(_)), &named), "lost"),
        ("no fsync of metrics", without(&synced("metrics.jsonl")), "lost"),
    ] {
        let (_, problems) = lose_power(&ops, 3, Some(kind));
        assert!(problems.contains_key(kind), "{fault}: {problems:?}");
    }
}

/// A call on a path of a save, in the form in which strace can inject a fault. For a name in an
/// open directory, the path is that of the directory.
struct Target {
    path: String,
    call: String,
    count: usize,
}

/// Finds every path of a save and every call on it, by recording a run. Names are below `run`.
fn targets(folder: &Folder) -> Vec<Target> {
    let run = folder.absolute("recorded");
    let calls = "openat,write,fsync,renameat,renameat2,mkdirat,unlinkat";
    folder.traced(&["-y", "-e", &format!("trace={calls}")], &run, &[]).ok();
    let found = trace::changes(&folder.read("strace.log"), &format!("{run}/checkpoints"));
    let target = |(path, call, count): (String, _, _)| {
        let path = path[run.len() + 1..].to_owned();
        Target { path, call, count }
    };
    found.into_iter().map(target).collect()
}

/// Every n-th case unless the run is a full one.
fn sample<T>(all: Vec<T>, most: usize) -> Vec<T> {
    let stride = if full() { 1 } else { all.len().div_ceil(most).max(1) };
    all.into_iter().step_by(stride).collect()
}

#[test]
fn killed_at_any_system_call_of_a_save_it_goes_on_from_the_newest() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let straight = {
        folder.plain("straight", &["-q"]).ok();
        folder.left("straight")
    };
    let cases: Vec<(Target, usize)> = targets(&folder)
        .into_iter()
        .flat_map(|t| {
            (1..=t.count)
                .map(move |nth| (Target { path: t.path.clone(), call: t.call.clone(), ..t }, nth))
        })
        .collect();
    let all = cases.len();
    let (mut killed, cases) = (0, sample(cases, 8));
    let tried = cases.len();
    for (number, (Target { path, call, .. }, nth)) in cases.into_iter().enumerate() {
        let what = format!("{call} {nth} of {path}");
        let run = format!("run-{number}");
        let (here, path) = (folder.absolute(&run), folder.absolute(&format!("{run}/{path}")));
        let inject = format!("inject={call}:signal=KILL:when={nth}");
        let traced = format!("trace={call}");
        let done = folder.traced(&["-P", &path, "-e", &traced, "-e", &inject], &here, &[]);
        killed += usize::from(done.code != 0);
        let saved_step = saved(&done.stderr).last().copied().unwrap_or(0);
        let resumed = folder.plain(&run, &["--resume"]).ok();
        if done.code != 0 {
            let after = resumed.stderr.split("going on after step ").nth(1);
            let after =
                after.map_or(0, |rest| rest.lines().next().unwrap().parse::<u64>().unwrap());
            assert!(after >= saved_step, "{what}: {saved_step} was saved\n{}", resumed.stderr);
            assert!(!resumed.stderr.contains("broken"), "{what}\n{}", resumed.stderr);
        }
        assert!(folder.left(&run) == straight, "{what}: another end\n{}", resumed.stderr);
        std::fs::remove_dir_all(&here).unwrap();
    }
    println!("{all} points, {tried} tried, {killed} killed");
    assert!(4 * killed > 3 * tried, "{killed} of {tried} were killed");
}

/// Steps that a run reported as saved.
fn saved(stderr: &str) -> Vec<u64> {
    let steps = stderr.split("checkpoint of step ").skip(1).filter_map(|rest| {
        let (step, rest) = rest.split_once(' ')?;
        rest.starts_with("saved").then(|| step.parse().unwrap())
    });
    steps.collect()
}

#[test]
fn a_run_directory_that_refuses_ends_the_run_before_it_starts() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    for (call, error, name, texts) in [
        ("mkdir", "EROFS", "run", ["cannot create ", "Read-only file system"]),
        ("mkdir", "EACCES", "run", ["cannot create ", "Permission denied"]),
        ("openat", "EACCES", "run/.lock", ["cannot lock ", "Permission denied"]),
        ("openat", "EROFS", "run/.config.ron.tmp", ["cannot write ", "Read-only file system"]),
        ("openat", "EACCES", "run/metrics.jsonl", ["cannot write ", "Permission denied"]),
        ("mkdirat", "EACCES", "run/checkpoints", ["cannot create ", "Permission denied"]),
    ] {
        let (path, run) = (folder.absolute(name), folder.absolute("run"));
        let (traced, inject) = (format!("trace={call}"), format!("inject={call}:error={error}"));
        // The name is relative to the open directory.
        let inside = name.strip_prefix("run/").unwrap_or(&path);
        let done = folder.traced(&["-P", inside, "-e", &traced, "-e", &inject], &run, &[]);
        done.refused(74, &[&texts[..], &[&run]].concat());
        let _ = std::fs::remove_dir_all(run);
    }
    // Later faults cost checkpoints, which is reported, but not the run.
    let run = folder.absolute("run");
    let paths = [1, 2, 3, 4].map(|step| format!("{run}/checkpoints/step-{step:08}.tmp"));
    let names = paths.iter().map(|path| path.rsplit('/').next().unwrap());
    let mut strace: Vec<_> = names.flat_map(|name| ["-P", name]).collect();
    strace.extend(["-e", "trace=mkdirat", "-e", "inject=mkdirat:error=EACCES"]);
    let done = folder.traced(&strace, &run, &[]).refused(83, &["whose checkpoint is NOT SAVED"]);
    let refused = |path: &String| format!("NOT SAVED: {path}: Permission denied");
    let counts = paths.iter().map(|path| done.stderr.matches(&refused(path)).count());
    assert_eq!(counts.sum::<usize>(), 5, "four, and the end: {}", done.stderr);
}

#[test]
fn a_slow_disk_holds_the_next_save_up_and_loses_none() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    folder.plain("straight", &["-q"]).ok();
    let slow = ["-e", "trace=fsync", "-e", "inject=fsync:delay_enter=50000"];
    let done = folder.traced(&slow, &folder.absolute("run"), &[]).ok();
    assert_eq!(saved(&done.stderr), [1, 2, 3, 4], "{}", done.stderr);
    assert!(folder.left("run") == folder.left("straight"), "{}", done.stderr);
}

#[test]
fn an_unfinished_checkpoint_that_cannot_be_removed_costs_no_other() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let path = folder.absolute("run/checkpoints/step-00000001.tmp");
    let strace = ["-P", &path, "-e", "trace=openat", "-e", "inject=openat:error=EIO"];
    let done = folder.traced(&strace, &folder.absolute("run"), &[]).ok();
    assert_eq!(saved(&done.stderr), [2, 3, 4], "{}", done.stderr);
    assert!(done.stderr.contains("cannot remove an unfinished checkpoint"), "{}", done.stderr);
}

#[test]
fn a_call_that_fails_costs_a_checkpoint_and_nothing_else() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    folder.plain("straight", &["-q"]).ok();
    let straight = folder.left("straight");
    let mut cases = Vec::new();
    for target in targets(&folder) {
        // An open of a directory only to read it is no part of a save.
        let of_one = target.path.contains("/step-");
        let writes = of_one || target.call != "openat";
        for nth in (1..=target.count).filter(|_| writes) {
            for error in ["ENOSPC", "EIO", "EINTR"] {
                cases.push((target.path.clone(), target.call.clone(), nth, error));
            }
        }
    }
    let all = cases.len();
    let (mut lost, cases) = (0, sample(cases, 10));
    let tried = cases.len();
    for (number, (name, call, nth, error)) in cases.into_iter().enumerate() {
        let what = format!("{error} from {call} {nth} of {name}");
        let run = format!("run-{number}");
        let (here, path) = (folder.absolute(&run), folder.absolute(&format!("{run}/{name}")));
        let inject = format!("inject={call}:error={error}:when={nth}");
        let traced = format!("trace={call}");
        let done = folder.traced(&["-P", &path, "-e", &traced, "-e", &inject], &here, &[]);
        let saved_steps = saved(&done.stderr);
        let expected = if saved_steps.contains(&4) { 0 } else { 83 };
        assert_eq!(done.code, expected, "{what}\n{}", done.stderr);
        let noted = folder.metrics(&run);
        let noted = noted.iter().filter(|line| line["kind"] == "checkpoint_failed").count();
        assert_eq!(noted, 4 - saved_steps.len(), "{what}\n{}", done.stderr);
        for step in 1..=4 {
            let not = format!("checkpoint of step {step} NOT SAVED: ");
            let not = done.stderr.split(&not).nth(1).map(|rest| rest.lines().next().unwrap());
            assert!(
                saved_steps.contains(&step) != not.is_some(),
                "{what}: step {step}\n{}",
                done.stderr
            );
            let Some(why) = not else { continue };
            lost += 1;
            assert!(
                why.contains(&format!("{run}/checkpoints")) && why.contains("os error"),
                "{why}"
            );
        }
        // In the folder of all checkpoints, the n-th call is refused in every save.
        let one = saved_steps.len() >= 3 || !name.contains("/step-");
        assert!(one, "{what}: one fault, one checkpoint\n{}", done.stderr);
        let (found, broken) = newest(Path::new(&here).join("checkpoints").as_path()).unwrap();
        let found = found.map_or(0, |checkpoint| checkpoint.step());
        assert!(broken.is_empty() && found >= saved_steps.last().copied().unwrap_or(0), "{what}");
        assert!(folder.left(&run) == straight, "{what}: another end\n{}", done.stderr);
        std::fs::remove_dir_all(&here).unwrap();
    }
    println!("{all} faults, {tried} tried, {lost} checkpoints not saved");
    assert!(lost > 0, "none of {tried}");
}

/// A thread can start nine threads; the machine refuses the threads that write the copies.
#[test]
fn a_machine_that_gives_no_thread_costs_time_and_no_checkpoint() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let more = ["--set", "train.steps=12", "-q"];
    folder.plain("straight", &more).ok();
    let refused = ["-e", "trace=clone3,clone", "-e", "inject=clone3,clone:error=EAGAIN:when=10+"];
    let more = ["--set", "train.steps=12"];
    let done = folder.traced(&refused, &folder.absolute("run"), &more).ok();
    assert_eq!(saved(&done.stderr), Vec::from_iter(1..=12), "{}", done.stderr);
    assert!(done.stderr.contains("no thread to write it"), "{}", done.stderr);
    assert!(folder.left("run") == folder.left("straight"), "{}", done.stderr);
}

/// strace changes the report about the disk: this number of blocks of 4 KiB is free.
#[test]
fn a_disk_without_room_is_refused_before_the_first_step_and_a_small_one_is_said() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let train = |blocks: u64| {
        let words = [0xef53, 4096, 1000, blocks, blocks];
        let bytes: String = words
            .iter()
            .flat_map(|word: &u64| word.to_le_bytes())
            .map(|b| format!("{b:02x}"))
            .collect();
        let inject = format!("inject=statfs,fstatfs:poke_exit=@arg2={bytes}");
        let run = folder.absolute(&format!("run-{blocks}"));
        folder.traced(&["-e", "trace=statfs,fstatfs", "-e", &inject], &run, &[])
    };
    // A checkpoint needs 40 KiB, and a tenth more.
    train(9).refused(74, &["no room on the disk: a checkpoint takes 39.", "36.00 KiB are free"]);
    assert!(!folder.path("run-9").exists());
    train(900).refused(0, &["checkpoint of step 4 saved"]);
    let small = train(20).refused(0, &["warning: the disk may get full", "step 4 saved"]);
    assert!(small.stderr.contains("80.00 KiB are free"), "{}", small.stderr);
}

/// A checkpoint that cannot be read at the moment may be complete.
#[test]
fn a_checkpoint_that_the_system_does_not_read_is_not_set_aside() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let three = ["-q", "--set", "train.steps=3", "--set", "schedule.decay_steps=4"];
    folder.plain("run", &three).ok();
    let run = folder.absolute("run");
    let names = || {
        let all = std::fs::read_dir(folder.path("run/checkpoints")).unwrap();
        all.map(|entry| entry.unwrap().file_name()).collect::<std::collections::BTreeSet<_>>()
    };
    let before = names();
    let file = folder.absolute("run/checkpoints/step-00000003/rank-00002.safetensors");
    // The faults hit the header and the states.
    for (call, error, nth) in
        [("pread64", "EIO", 1), ("pread64", "EACCES", 3), ("pread64", "ESTALE", 6)]
    {
        let inject = format!("inject={call}:error={error}:when={nth}");
        let traced = format!("trace={call}");
        let done = folder.traced(&["-P", &file, "-e", &traced, "-e", &inject], &run, &["--resume"]);
        assert_eq!(names(), before, "{call} {error} {nth}: {}", done.stderr);
        done.refused(74, &["rank-00002.safetensors", "os error", "nothing is set aside"]);
    }
}
