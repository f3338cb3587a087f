//! With MPI in the build, and mpirun on the machine.

use crate::common::{Done, Folder};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const SAVES: &[&str] =
    &["train.steps=6", "train.checkpoint_every=2", "train.checkpoint_keep=9", "batch.micro=1"];

/// A test without mpirun is skipped, and fails where nothing may be missing.
fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").output().is_ok();
    assert!(found || std::env::var_os("CI").is_none(), "mpirun is missing: scripts/setup mpi");
    if !found {
        println!("SKIPPED: no mpirun");
    }
    found
}

/// `onebox` by `count` processes.
fn command(folder: &Folder, count: usize, args: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--bind-to", "none", "-n", &count.to_string()]);
    // As a container's tests run.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    // Two processes on one machine need no network.
    command.args(["--mca", "btl", "self,vader"]);
    command.arg(env!("CARGO_BIN_EXE_onebox")).args(args).current_dir(folder.path(""));
    command
}

fn sets(sets: &[&str]) -> Vec<String> {
    sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]).collect()
}

fn train(folder: &Folder, count: usize, run: &str, more: &[&str], set: &[&str]) -> Done {
    let set = sets(set);
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let args = [&["train", "tiny.ron", "--run-dir", run, "--silence", "20"], more, &set].concat();
    if count == 0 {
        return folder.onebox(&args);
    }
    Folder::done(command(folder, count, &args))
}

/// Steps of the metrics with their losses and norms, then evaluations, then the hash of the end.
fn metrics(run: &Path) -> Vec<String> {
    let lines = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let keep = ["kind", "step", "loss", "grad_norm", "lr", "skipped", "state_hash"];
    let line = |line: &str| {
        let all: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        let all = all.into_iter().filter(|(key, _)| keep.contains(&key.as_str()));
        all.map(|(key, value)| format!("{key}={value} ")).collect::<String>()
    };
    lines.lines().map(line).collect()
}

/// Every file of checkpoints and weights, by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let (name, path) = (entry.file_name().into_string().unwrap(), entry.path());
        if path.is_dir() {
            let inside = files(&path).into_iter();
            found.extend(inside.map(|(below, bytes)| (format!("{name}/{below}"), bytes)));
        } else if name != "metrics.jsonl" && name != ".lock" {
            found.insert(name, std::fs::read(path).unwrap());
        }
    }
    found
}

fn assert_same(folder: &Folder, one: &str, other: &str, what: &str) {
    let [one, other] = [one, other].map(|run| folder.path(run));
    assert_eq!(metrics(&one), metrics(&other), "{what}");
    let [one, other] = [one, other].map(|run| files(&run));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>(), "{what}");
    one.iter().for_each(|(name, bytes)| assert!(*bytes == other[name], "{what}: {name} differs"));
}

#[test]
fn processes_of_mpirun_leave_the_files_of_one_process() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let across = "parallel.tensor_across_nodes=true";
    let layouts: [(&[&str], &[usize]); 3] = [
        (&[across, "offload.update=Speculative"], &[1, 2, 4]),
        (&["parallel.tensor=1", "parallel.data=4", "offload.update=Delayed(after_step: 2)"], &[2]),
        (
            &[
                "parallel.tensor=4",
                "parallel.data=1",
                across,
                "parallel.sequence=true",
                "offload.update=Serial",
            ],
            &[2],
        ),
    ];
    for (number, (layout, counts)) in layouts.into_iter().enumerate() {
        let set = [SAVES, layout].concat();
        let one = format!("one-{number}");
        assert_eq!(train(&folder, 0, &one, &["-q"], &set).code, 0);
        assert!(files(&folder.path(&one)).len() > 3 * 5);
        for count in counts {
            let run = format!("run-{number}-{count}");
            let done = train(&folder, *count, &run, &[], &set);
            assert_eq!(done.code, 0, "{}", done.stderr);
            assert!(done.stderr.contains("processes 0 on "), "{}", done.stderr);
            assert_eq!(done.stderr.matches("it writes:").count(), 1, "{}", done.stderr);
            assert_same(&folder, &one, &run, &format!("{layout:?} by {count}"));
        }
    }
}

#[test]
fn a_run_goes_on_with_other_numbers_of_processes() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let layout = ["parallel.tensor=1", "parallel.data=4", "schedule.decay_steps=40"];
    let set = [SAVES, &layout].concat();
    assert_eq!(train(&folder, 0, "straight", &["-q"], &set).code, 0);
    for (count, steps) in
        [(1, "train.steps=2"), (2, "train.steps=4"), (4, "train.steps=5"), (1, "train.steps=6")]
    {
        let done =
            train(&folder, count, "run", &["--resume", "-q"], &[&set[..], &[steps]].concat());
        assert_eq!(done.code, 0, "{}", done.stderr);
    }
    let last = |run: &str| metrics(&folder.path(run)).pop().unwrap();
    assert!(last("run").contains("state_hash") && last("run") == last("straight"));
    let weights = |run: &str| std::fs::read(folder.path(run).join("weights.safetensors")).unwrap();
    assert!(weights("run") == weights("straight"));
}

#[test]
fn what_cannot_be_dealt_to_processes_is_refused_once_and_writes_nothing() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let refused: [(usize, &[&str], &str); 4] = [
        (4, &[], "parallel.tensor_across_nodes=true"),
        (3, &[], "which 3 processes cannot share evenly"),
        (
            2,
            &["train.checkpoint_writer=Background", "train.checkpoint_every=2"],
            "train.checkpoint_writer",
        ),
        (2, &["optimizer.lr=wrong"], "found `wrong`"),
    ];
    for (count, set, words) in refused {
        let done = train(&folder, count, "run", &[], set);
        assert_eq!(done.code, 78, "{}", done.stderr);
        assert_eq!(done.stderr.matches(words).count(), 1, "{}", done.stderr);
        assert!(!folder.path("run").exists());
    }
    let check = ["config", "check", "tiny.ron"];
    let done = Folder::done(command(&folder, 4, &check));
    assert_eq!(done.code, 78, "{}", done.stderr);
    assert!(done.stderr.contains("tensor_across_nodes"), "{}", done.stderr);
    // Other configs in other processes: a file that only the second one's arguments name.
    let mut mixed = command(&folder, 1, &["train", "tiny.ron", "--run-dir", "run"]);
    mixed.args([
        ":",
        "-n",
        "1",
        env!("CARGO_BIN_EXE_onebox"),
        "train",
        "tiny.ron",
        "--run-dir",
        "run",
    ]);
    mixed.args(["--set", "train.seed=8"]);
    let done = Folder::done(mixed);
    assert_eq!(done.code, 78, "{}", done.stderr);
    assert!(done.stderr.contains("has the config"), "{}", done.stderr);
}

/// A run that goes on until something happens to it.
struct Long {
    child: Child,
    lines: Receiver<String>,
    said: String,
}

impl Long {
    fn start(folder: &Folder, count: usize, run: &str) -> Self {
        let set = sets(&[
            "parallel.tensor=1",
            "parallel.data=4",
            "train.steps=1000000",
            "train.checkpoint_every=5",
            "train.eval_every=0",
        ]);
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let args = [&["train", "tiny.ron", "--run-dir", run, "--silence", "3"], &set[..]].concat();
        let mut child = command(folder, count, &args);
        // A launcher that gives processes time to save.
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut long = Self { child, lines, said: String::new() };
        long.until("saved");
        long
    }

    fn until(&mut self, words: &str) {
        while !self.said.contains(words) {
            let line = self.lines.recv_timeout(Duration::from_secs(120));
            self.said += &line.unwrap_or_else(|_| panic!("no `{words}` in\n{}", self.said));
            self.said.push('\n');
        }
    }

    /// Process ids of onebox, by the number of the process.
    fn processes(&self) -> BTreeMap<usize, String> {
        let of = |id: &str| {
            let children = Command::new("pgrep").args(["-P", id]).output().unwrap().stdout;
            String::from_utf8(children)
                .unwrap()
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let number = |id: String| {
            let environment = std::fs::read(format!("/proc/{id}/environ")).ok()?;
            let mut all = environment.split(|byte| *byte == 0);
            let number = all.find_map(|line| line.strip_prefix(b"OMPI_COMM_WORLD_RANK="))?;
            Some((std::str::from_utf8(number).ok()?.parse().ok()?, id))
        };
        of(&self.child.id().to_string()).into_iter().filter_map(number).collect()
    }

    fn end(mut self) -> (i32, String) {
        for line in self.lines.iter() {
            self.said += &line;
            self.said.push('\n');
        }
        (self.child.wait().unwrap().code().unwrap_or(-1), self.said)
    }
}

fn signal(id: &str, signal: &str) {
    assert!(Command::new("kill").args([signal, id]).status().unwrap().success());
}

/// None of them is left, not even as a stopped one, and the newest checkpoint is whole.
fn assert_clean(folder: &Folder, run: &str, processes: &BTreeMap<usize, String>) {
    for id in processes.values() {
        let living = || {
            std::fs::read_to_string(format!("/proc/{id}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        let mut looks = 0;
        while living() {
            looks += 1;
            assert!(looks < 300, "process {id} is left");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    let verified = folder.onebox(&["checkpoint", "verify", run]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
}

#[test]
fn a_process_that_is_killed_or_stopped_ends_all_and_leaves_whole_checkpoints() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    for (number, (victim, how)) in
        [(1, "-STOP"), (0, "-STOP"), (1, "-KILL"), (0, "-KILL")].into_iter().enumerate()
    {
        let run = format!("run-{number}");
        let long = Long::start(&folder, 2, &run);
        let processes = long.processes();
        assert_eq!(processes.len(), 2);
        signal(&processes[&victim], how);
        let (code, said) = long.end();
        assert!(code != 0, "{said}");
        if how == "-STOP" {
            assert_eq!(code, 76, "{said}");
            let ranks = if victim == 0 { "2 ranks (0 to 1)" } else { "2 ranks (2 to 3)" };
            let named = format!("from process {victim} on ");
            assert!(said.contains("no sign of life for") && said.contains(&named), "{said}");
            assert!(said.contains(ranks), "{said}");
        } else {
            assert!(
                said.contains("Killed") && said.contains(&format!("rank {victim} with")),
                "{said}"
            );
        }
        assert_clean(&folder, &run, &processes);
    }
}

#[test]
fn a_signal_to_one_process_stops_all_after_the_same_step_and_saves_it() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    for (number, victim) in [1, 0].into_iter().enumerate() {
        let run = format!("run-{number}");
        let long = Long::start(&folder, 2, &run);
        let processes = long.processes();
        signal(&processes[&victim], "-TERM");
        let (code, said) = long.end();
        assert_eq!(code, 75, "{said}");
        assert_eq!(said.matches("interrupted after step").count(), 1, "{said}");
        assert_clean(&folder, &run, &processes);
    }
}
