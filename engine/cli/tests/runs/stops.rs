//! Runs that shells, schedulers or terminals stop.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{self, CommandOutput, Folder};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A run that would continue for hours.
const LONG: [&str; 6] = [
    "--set",
    "train.steps=1000000",
    "--set",
    "schedule.kind=Constant",
    "--set",
    "train.eval_every=0",
];

/// A process that is killed if a test fails meanwhile.
struct RunningProcess(Option<Child>);

impl RunningProcess {
    fn spawn(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }
}

impl Drop for RunningProcess {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// Trains `tiny.ron` for hours in `run`.
fn start(folder: &Folder, run: &str, more: &[&str]) -> RunningProcess {
    let mut command = folder.command(&["train", "tiny.ron", "--run-dir", run]);
    command.args(LONG).args(more);
    RunningProcess::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// Waits until `run` has `lines` lines of metrics.
fn until(folder: &Folder, run: &str, lines: usize) {
    let path = folder.path(run).join("metrics.jsonl");
    let since = Instant::now();
    while std::fs::read_to_string(&path).map_or(0, |text| text.lines().count()) < lines {
        assert!(since.elapsed() < Duration::from_secs(180), "no {lines} lines in three minutes");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn send(signal: &str, to: &str) {
    let sent = Command::new("kill").args([signal, "--", to]).status();
    assert!(sent.unwrap().success());
}

/// Waits for the end of the process and returns its result; kills it if it does not end.
fn ended(mut child: RunningProcess) -> CommandOutput {
    let (id, child) = (child.id(), child.0.take().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let output = receiver.recv_timeout(Duration::from_secs(180)).unwrap_or_else(|_| {
        send("-9", &id.to_string());
        receiver.recv().unwrap()
    });
    let output = output.unwrap();
    CommandOutput {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn an_interrupt_is_no_divergence_and_the_summary_does_not_say_done() {
    let folder = Folder::new();
    // Every step is skipped, for longer than this test waits.
    let skipped = [
        "--set",
        "precision=Fp16",
        "--set",
        "optimizer.lr=1e-3",
        "--set",
        "loss_scale.initial=16777216",
        "--set",
        "loss_scale.floor=16777216",
        "--set",
        "train.stop_after_skipped=1000000",
        "--set",
        "train.checkpoint_every=1000000",
    ];
    let child = start(&folder, "run", &skipped);
    until(&folder, "run", 3);
    send("-TERM", &child.id().to_string());
    let done = ended(child).refused(75, &["interrupted after ", "--resume goes on after step"]);
    let lines = folder.metrics("run");
    assert!(lines.iter().all(|line| line["skipped"] == true), "{lines:?}");
    assert!(!done.stderr.contains("done "), "{}", done.stderr);
    // The checkpoint contains the states.
    assert!(!folder.path("run/weights.safetensors").exists());
    folder.onebox(&["generate", "run", "--tokens", "4"]).ok();
}

/// The run saves a checkpoint at its end, and no other.
const SAVES: [&str; 2] = ["--set", "train.checkpoint_every=1000000"];

/// Asserts that the checkpoint of the run's last step exists.
fn saved(folder: &Folder, run: &str, done: &CommandOutput) {
    assert!(done.stderr.contains("--resume goes on after step"), "{}", done.stderr);
    let steps = folder.metrics(run).iter().filter(|line| line["kind"] == "step").count();
    assert!(folder.path(run).join(format!("checkpoints/step-{steps:08}")).exists());
}

#[test]
fn a_signal_that_is_sent_twice_at_once_loses_nothing() {
    use std::os::unix::process::CommandExt;
    let folder = Folder::new();
    // `timeout` sends SIGTERM to the child, then its group. A closed terminal does so with SIGHUP.
    for (run, signals) in [
        ("timeout", ["-TERM", "-TERM"]),
        ("terminal", ["-HUP", "-HUP"]),
        ("both", ["-HUP", "-INT"]),
        ("slurm", ["-USR1", "-TERM"]),
    ] {
        let mut command = folder.command(&["train", "tiny.ron", "--run-dir", run]);
        command.args(LONG).args(SAVES).process_group(0);
        let child = RunningProcess::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        until(&folder, run, 3);
        let id = child.id();
        let line = format!("kill {} {id} && kill {} -{id}", signals[0], signals[1]);
        assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
        // The kernel chooses the order of two pending signals, so either may be named.
        let done = ended(child).refused(75, &["topping after this step and saving"]);
        saved(&folder, run, &done);
    }
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    let folder = Folder::new();
    let line = format!("trap '' HUP; exec {} \"$@\"", env!("CARGO_BIN_EXE_onebox"));
    let mut command = Command::new("sh");
    command.args(["-c", &line, "nohup", "train", "tiny.ron", "--run-dir", "run"]);
    command.args(LONG).args(SAVES).current_dir(folder.path("."));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = RunningProcess::spawn(&mut command);
    until(&folder, "run", 3);
    send("-HUP", &child.id().to_string());
    let lines = folder.metrics("run").len();
    until(&folder, "run", lines + 20);
    send("-TERM", &child.id().to_string());
    let done = ended(child).refused(75, &["SIGTERM: stopping"]);
    assert!(!done.stderr.contains("SIGHUP"), "{}", done.stderr);
}

/// Runs with a full stderr that nobody reads: training continues, and signals have their effect.
fn stalled(signals: &[(&str, u64)]) -> (Folder, Option<i32>) {
    let folder = Folder::new();
    let (_reader, mut writer) = std::io::pipe().unwrap();
    // A pipe holds 16 pages.
    std::io::Write::write_all(&mut writer, &vec![b' '; 15 * 4096]).unwrap();
    let mut command = folder.command(&["train", "tiny.ron", "--run-dir", "run"]);
    // Each checkpoint writes a line.
    command.args(LONG).args(["--set", "train.checkpoint_every=1"]);
    let mut child = RunningProcess::spawn(command.stdout(Stdio::null()).stderr(writer));
    drop(command);
    until(&folder, "run", 100);
    for (signal, after) in signals {
        std::thread::sleep(Duration::from_millis(*after));
        send(signal, &child.id().to_string());
    }
    let since = Instant::now();
    let code = loop {
        match child.0.as_mut().unwrap().try_wait().unwrap() {
            Some(status) => break status.code(),
            None if since.elapsed() > Duration::from_secs(40) => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    (folder, code)
}

#[test]
fn a_reader_of_stderr_that_stalls_stops_neither_training_nor_its_end() {
    let (folder, code) = stalled(&[("-TERM", 0), ("-TERM", 1100)]);
    assert_eq!(code, Some(75), "it waits for its reader");
    let steps = folder.metrics("run").iter().filter(|line| line["kind"] == "step").count();
    assert!(folder.path(&format!("run/checkpoints/step-{steps:08}")).exists());
}

#[test]
fn a_second_ctrl_c_ends_the_process_at_once() {
    let (folder, code) = stalled(&[("-INT", 0), ("-INT", 1100)]);
    assert_eq!(code, Some(130));
    let dry = folder.train("run", &[&["--resume", "--dry-run"], &LONG[..]].concat()).ok();
    assert!(dry.stderr.contains(": going on after step "), "{}", dry.stderr);
    // The lock is free after any end.
    let other = ["--resume", "--set", "optimizer.lr=1.0"];
    folder.train("run", &[&other, &LONG[..]].concat()).refused(78, &["optimizer.lr"]);
}

/// Waits at most three minutes for an event.
fn wait_for(what: &str, mut came: impl FnMut() -> bool) {
    let since = Instant::now();
    while !came() {
        assert!(since.elapsed() < Duration::from_secs(180), "not within three minutes: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends SIGTERM to `onebox train` when it holds `open` open. One kind of system call, on `path` if
/// that is given, lasts longer than this test waits: no thread that makes this call continues.
fn stuck(
    folder: &Folder,
    (call, path): (&str, Option<&str>),
    open: &str,
    more: &[&str],
) -> CommandOutput {
    let (calls, delay) = (format!("trace={call}"), format!("inject={call}:delay_enter=100000000"));
    let mut command = Command::new("strace");
    // The process itself is the child, and the tracer is detached.
    command.args(["-D", "-f", "-qq", "-o", "/dev/null", "-e", &calls, "-e", &delay]);
    if let Some(path) = path {
        command.arg("-P").arg(folder.path(path));
    }
    command.arg(env!("CARGO_BIN_EXE_onebox")).args(["train", "tiny.ron", "--run-dir", "run"]);
    command.args(more).current_dir(folder.path(".")).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(std::fs::File::create(folder.path("stderr")).unwrap());
    let mut child = RunningProcess::spawn(&mut command);
    let (process, open) = (format!("/proc/{}", child.id()), folder.path(open));
    wait_for("the file is open", || {
        let fds = std::fs::read_dir(format!("{process}/fd"));
        let all = fds.into_iter().flatten().flatten();
        let mut all = all.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == open));
        // The metrics are also read before. Only a descriptor for appending counts.
        all.any(|fd| !open.ends_with("metrics.jsonl") || appends(&process, &fd.file_name()))
    });
    send("-TERM", &child.id().to_string());
    wait_for("the last words", || folder.read("stderr").contains("interrupted "));
    // The tracer keeps even dead threads until the end of their calls.
    let status = std::fs::read_to_string(format!("{process}/status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    if let Some(tracer) = tracer.map(str::trim).filter(|tracer| *tracer != "0") {
        send("-9", tracer);
    }
    let status = child.0.take().unwrap().wait().unwrap();
    let stderr = folder.read("stderr");
    CommandOutput { code: status.code().unwrap_or(-1), stdout: String::new(), stderr }
}

/// Whether a process has a descriptor open for appending, by its flags in octal.
fn appends(process: &str, descriptor: &std::ffi::OsStr) -> bool {
    let info = format!("{process}/fdinfo/{}", descriptor.display());
    let info = std::fs::read_to_string(info).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & rustix::fs::OFlags::APPEND.bits() != 0)
}

#[test]
fn a_signal_is_heard_before_the_first_step_whatever_the_process_waits_for() {
    if !common::has_strace() {
        return;
    }
    let folder = Folder::new();
    let nothing = "interrupted before the first step; nothing is lost\n";
    let done = stuck(&folder, ("read", Some("text.txt")), "text.txt", &[]).refused(75, &[nothing]);
    assert!(done.stderr.starts_with(nothing), "{}", done.stderr);
    assert!(!folder.path("run").exists());
    // Memory of the ranks, which is requested after the metrics are open.
    let step_0 = ["interrupted after step 0; nothing is lost: --resume starts at step 1\n"];
    stuck(&folder, ("madvise", None), "run/metrics.jsonl", &[]).refused(75, &step_0);
    let every = ["--set", "train.checkpoint_every=4"];
    folder.train("run", &[&["--resume", "-q"], &every[..]].concat()).ok();
    let more = ["--resume", "--set", "train.steps=6", "--set", "schedule.decay_steps=4"];
    let file = "run/checkpoints/step-00000004/rank-00000.safetensors";
    let hashed = stuck(&folder, ("pread64", Some(file)), file, &more);
    hashed.refused(75, &[nothing]);
    let step_4 = ["interrupted after step 4; --resume goes on after step 4\n"];
    stuck(&folder, ("madvise", None), "run/metrics.jsonl", &more).refused(75, &step_4);
    // No state is lost.
    folder.train("run", &[&more[..], &["-q"]].concat()).ok();
    folder.train("whole", &[&more[1..], &every[..], &["-q"]].concat()).ok();
    assert_eq!(folder.hash("run"), folder.hash("whole"));
}

#[test]
fn without_a_thread_to_hear_it_a_signal_ends_the_process() {
    if !common::has_strace() {
        return;
    }
    let folder = Folder::new();
    let mut command = Command::new("strace");
    // The second thread is the one that handles signals.
    let refused = "inject=clone3,clone:error=EAGAIN:when=2";
    command.args(["-D", "-qq", "-o", "/dev/null", "-e", "trace=clone3,clone", "-e", refused]);
    command.arg(env!("CARGO_BIN_EXE_onebox")).args(["train", "tiny.ron", "--run-dir", "run"]);
    command.args(LONG).current_dir(folder.path(".")).stdin(Stdio::null());
    command.stdout(Stdio::null());
    command.stderr(std::fs::File::create(folder.path("stderr")).unwrap());
    let mut child = RunningProcess::spawn(&mut command);
    until(&folder, "run", 3);
    send("-TERM", &child.id().to_string());
    let mut status = None;
    wait_for("the end", || {
        status = child.0.as_mut().unwrap().try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status.unwrap()), Some(15));
    assert!(
        folder.read("stderr").contains("Ctrl-C will end the run at once: Resource temporarily")
    );
}
