//! onebox under mpirun, and the files of its runs.

use crate::common::{CommandOutput, Folder};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub(crate) const SAVES: &[&str] =
    &["train.steps=6", "train.checkpoint_every=2", "train.checkpoint_keep=9", "batch.micro=1"];

pub(crate) const ACROSS: &str = "parallel.tensor_across_nodes=true";

/// Launcher of the MPI library that this test is built with.
pub(crate) fn mpirun() -> String {
    std::env::var("ONEBOX_MPIRUN").unwrap_or_else(|_| "mpirun".into())
}

/// Whether the launcher is MPICH's and not Open MPI's.
pub(crate) fn is_mpich() -> bool {
    let version = Command::new(mpirun()).arg("--version").output().unwrap().stdout;
    String::from_utf8_lossy(&version).contains("HYDRA")
}

/// Whether there is a launcher. Without one a test is skipped, or fails in continuous integration.
pub(crate) fn has_mpirun() -> bool {
    let found = Command::new(mpirun()).arg("--version").output().is_ok();
    assert!(found || std::env::var_os("CI").is_none(), "no {}: scripts/setup mpi", mpirun());
    if !found {
        println!("SKIPPED: no {}", mpirun());
    }
    found
}

/// Command that starts `count` processes of `program`.
pub(crate) fn launch(folder: &Folder, count: usize, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(mpirun());
    command.args(["-n", &count.to_string()]);
    if !is_mpich() {
        command.args(["--oversubscribe", "--bind-to", "none"]);
        // Tests in a container run as root.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        // Two processes on one machine need no network.
        command.args(["--mca", "btl", "self,vader"]);
    }
    command.arg(program).current_dir(folder.path(""));
    command
}

/// Sets the path of the stand-in driver, with four GPUs for all processes together.
pub(crate) fn on_gpus(folder: &Folder, command: &mut Command) {
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", folder.path("cache")).env("FAKECUDA_DEVICES", "4");
    command.env("FAKECUDA_QUEUE", "1000").env("FAKECUDA_CONNECTIONS", "1");
    command.env("FAKECUDA_BLOCKING", "1").env("FAKECUDA_NCCL_HOPS", "1");
}

/// Command that starts `onebox` in `count` processes.
pub(crate) fn command(folder: &Folder, count: usize, args: &[&str]) -> Command {
    let mut command = launch(folder, count, env!("CARGO_BIN_EXE_onebox"));
    command.args(args);
    command
}

/// Variables in which launchers give the number of a process.
pub(crate) const NUMBER: [&str; 2] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"];

pub(crate) fn sets(sets: &[&str]) -> Vec<String> {
    sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]).collect()
}

pub(crate) fn train(
    folder: &Folder,
    count: usize,
    run: &str,
    more: &[&str],
    set: &[&str],
) -> CommandOutput {
    let set = sets(set);
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let args = [&["train", "tiny.ron", "--run-dir", run, "--silence", "20"], more, &set].concat();
    if count == 0 {
        return folder.onebox(&args);
    }
    Folder::done(command(folder, count, &args))
}

/// Steps of the metrics with their losses and norms, then evaluations, then the hash of the end.
pub(crate) fn metrics(run: &Path) -> Vec<String> {
    let lines = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let keep = ["kind", "step", "loss", "grad_norm", "lr", "skipped", "state_hash"];
    let line = |line: &str| {
        let all: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        let all = all.into_iter().filter(|(key, _)| keep.contains(&key.as_str()));
        all.map(|(key, value)| format!("{key}={value} ")).collect::<String>()
    };
    lines.lines().map(line).collect()
}

/// Contents of every file of checkpoints and weights, by name.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
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

pub(crate) fn assert_same(folder: &Folder, one: &str, other: &str, what: &str) {
    let [one, other] = [one, other].map(|run| folder.path(run));
    assert_eq!(metrics(&one), metrics(&other), "{what}");
    let [one, other] = [one, other].map(|run| files(&run));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>(), "{what}");
    one.iter().for_each(|(name, bytes)| assert!(*bytes == other[name], "{what}: {name} differs"));
}

/// Asserts that no process is left, not even a stopped one.
pub(crate) fn assert_gone<'a>(processes: impl IntoIterator<Item = &'a String>) {
    for id in processes {
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
}

/// Asserts that the newest checkpoint is complete.
pub(crate) fn assert_whole(folder: &Folder, run: &str) {
    let verified = folder.onebox(&["checkpoint", "verify", run]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
}

/// Asserts that Open MPI's launcher names the killed process.
pub(crate) fn assert_killed(stderr: &str, victim: usize) {
    let words = [format!("rank {victim} with"), "Killed".to_owned()];
    words.iter().for_each(|words| assert!(stderr.contains(words), "no `{words}` in\n{stderr}"));
}

/// Asserts that the other processes name a stopped process.
pub(crate) fn assert_silent(stderr: &str, victim: usize) {
    let words = ["no sign of life for".to_owned(), format!("from process {victim} on ")];
    words.iter().for_each(|words| assert!(stderr.contains(words), "no `{words}` in\n{stderr}"));
}
