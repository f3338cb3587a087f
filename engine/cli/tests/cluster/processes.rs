//! Tests that need MPI in the build and mpirun on the machine.

use super::launch::{
    ACROSS, NUMBER, SAVES, assert_gone, assert_killed, assert_same, assert_silent, assert_whole,
    command, files, has_mpirun, is_mpich, metrics, sets, train,
};
use crate::common::Folder;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

#[test]
fn processes_of_mpirun_leave_the_files_of_one_process() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let layouts: [(&[&str], &[usize]); 3] = [
        (&[ACROSS, "offload.update=Speculative"], &[1, 2, 4]),
        (&["parallel.tensor=1", "parallel.data=4", "offload.update=Delayed(after_step: 2)"], &[2]),
        (
            &[
                "parallel.tensor=4",
                "parallel.data=1",
                ACROSS,
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
    // The processes have different configs: only the second one's arguments name this file.
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

/// The plan counts the bytes of messages for the ranks of this machine.
#[test]
fn a_plan_counts_the_messages_between_processes() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let plan = |count: usize, more: &[&str]| {
        let args = [&["plan", "tiny.ron"], more].concat();
        Folder::done(command(&folder, count, &args)).ok().stdout
    };
    let json: serde_json::Value = serde_json::from_str(&plan(2, &["--json"])).unwrap();
    let buffers = json["gpu"]["buffers"].as_array().unwrap();
    let largest = buffers.iter().map(|buffer| buffer["bytes"].as_u64().unwrap()).max().unwrap();
    // Each of four ranks has two data-parallel partners, and one of them is in another process.
    assert_eq!(json["letters"], 4 * device::message_bytes(largest, 2, 1));
    assert_eq!(plan(2, &[]).matches("messages between processes take").count(), 1);
    assert!(!plan(1, &[]).contains("messages between processes"));
}

#[test]
fn a_script_trains_the_same_run_by_several_numbers_of_processes() {
    if !has_mpirun() || is_mpich() {
        return;
    }
    let folder = Folder::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/scale-gpus");
    let mut scale = Command::new(script);
    scale.args(["tiny.ron", "--processes", "1 2", "--out", "out"]).current_dir(folder.path(""));
    scale.env("ONEBOX", env!("CARGO_BIN_EXE_onebox"));
    scale.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    Folder::done(scale).ok();
    let csv = folder.read("out/processes.csv");
    let rows: Vec<Vec<&str>> = csv.lines().skip(1).map(|row| row.split(',').collect()).collect();
    assert_eq!(
        rows.iter().map(|row| row[..2].to_vec()).collect::<Vec<_>>(),
        [["1", "4"], ["2", "4"]]
    );
    assert!(rows.iter().all(|row| row[3].parse::<u64>().is_ok_and(|tokens| tokens > 0)), "{csv}");
    assert!(rows[0][5].len() == 16 && rows[0][5] == rows[1][5], "{csv}");
}

/// A run that continues until something happens to it.
struct LongRun {
    child: Child,
    lines: Receiver<String>,
    stderr: String,
}

impl LongRun {
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
        // A launcher that gives its processes time to save.
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut long = Self { child, lines, stderr: String::new() };
        long.until("saved");
        long
    }

    fn until(&mut self, words: &str) {
        while !self.stderr.contains(words) {
            let line = self.lines.recv_timeout(Duration::from_secs(120));
            self.stderr += &line.unwrap_or_else(|_| panic!("no `{words}` in\n{}", self.stderr));
            self.stderr.push('\n');
        }
    }

    /// Process ids of onebox, by process number.
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
            let environment = String::from_utf8_lossy(&environment);
            let mut all = environment.split('\0').filter_map(|line| line.split_once('='));
            let (_, number) = all.find(|(name, _)| NUMBER.contains(name))?;
            Some((number.parse().ok()?, id))
        };
        of(&self.child.id().to_string()).into_iter().filter_map(number).collect()
    }

    fn end(mut self) -> (i32, String) {
        for line in self.lines.iter() {
            self.stderr += &line;
            self.stderr.push('\n');
        }
        (self.child.wait().unwrap().code().unwrap_or(-1), self.stderr)
    }
}

fn signal(id: &str, signal: &str) {
    assert!(Command::new("kill").args([signal, id]).status().unwrap().success());
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
        let long = LongRun::start(&folder, 2, &run);
        let processes = long.processes();
        assert_eq!(processes.len(), 2);
        signal(&processes[&victim], how);
        let (code, stderr) = long.end();
        assert!(code != 0, "{stderr}");
        if how == "-STOP" {
            assert_eq!(code, 76, "{stderr}");
            let ranks = if victim == 0 { "2 ranks (0 to 1)" } else { "2 ranks (2 to 3)" };
            assert_silent(&stderr, victim);
            assert!(stderr.contains(ranks), "{stderr}");
        } else {
            assert_killed(&stderr, victim);
        }
        assert_gone(processes.values());
        assert_whole(&folder, &run);
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
        let long = LongRun::start(&folder, 2, &run);
        let processes = long.processes();
        signal(&processes[&victim], "-TERM");
        let (code, stderr) = long.end();
        assert_eq!(code, 75, "{stderr}");
        assert_eq!(stderr.matches("interrupted after step").count(), 1, "{stderr}");
        assert_gone(processes.values());
        assert_whole(&folder, &run);
    }
}
