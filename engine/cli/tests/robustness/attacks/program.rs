//! A supervised program: its time, its memory and its end.

use super::MEMORY;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Maximum time of a case. On an idle machine each case ends in seconds, so a longer one hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum bytes of a program's output that are kept.
const KEPT: u64 = 1 << 20;

/// Maximum bytes of stderr that count as messages.
const MESSAGES: usize = 64 << 10;

/// Exit codes that `onebox --help` documents, except those of a bug (70) and of an abort (134).
const CODES: [i32; 15] = [0, 1, 2, 66, 73, 74, 75, 76, 78, 79, 80, 81, 82, 83, 130];

/// Words of a bug in stderr.
const BUGS: [&str; 5] = [
    "panicked",
    "internal error",
    "overflowed its stack",
    "memory allocation of",
    "RUST_BACKTRACE",
];

/// How a program ended.
pub(crate) struct ProgramEnd {
    /// Exit code; for a signal, 128 plus its number, as in a shell.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) time: Duration,
    /// Largest memory of one of its processes, in bytes.
    pub(crate) memory: u64,
    /// Whether it was killed because it did not end.
    pub(crate) is_hung: bool,
    /// Whether it got a signal to stop.
    is_stopped: bool,
}

impl fmt::Display for ProgramEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, memory) = (self.time.as_secs_f64(), self.memory >> 20);
        let output: String = self.stderr.chars().take(300).collect();
        write!(
            f,
            "exit {}, {seconds:.1} s, {memory} MiB: {}",
            self.code,
            output.replace('\n', " / ")
        )
    }
}

impl ProgramEnd {
    /// Faults that no program may show.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.is_hung {
            faults.push("HANGS".to_owned());
        }
        if self.memory > MEMORY {
            faults.push(format!("MEMORY: {} MiB", self.memory >> 20));
        }
        // A program without a signal handler ends with this code.
        let is_ended = self.is_stopped && self.code == 128 + Signal::TERM.as_raw();
        if !CODES.contains(&self.code) && !is_ended && faults.is_empty() {
            faults.push(format!("exit code {}", self.code));
        }
        faults.extend(
            BUGS.iter().filter(|bug| self.stderr.contains(**bug)).map(|bug| format!("`{bug}`")),
        );
        if self.stderr.len() > MESSAGES {
            faults.push(format!("{} bytes of messages", self.stderr.len()));
        }
        faults
    }

    /// Whether the program refused `name` and named it.
    pub(crate) fn is_refusal_of(&self, name: &str) -> bool {
        self.code != 0 && self.stderr.contains(name)
    }
}

/// Largest memory so far of a process and its children, in bytes; a program's threads start no
/// children.
fn memory(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let own = most.and_then(|most| most.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|id| id.parse().ok());
    children.map(memory).fold(own.unwrap_or(0) << 10, u64::max)
}

/// Reads a pipe to its end, and keeps the beginning.
fn collected(mut pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.by_ref().take(KEPT).read_to_end(&mut bytes);
        let _ = io::copy(&mut pipe, &mut io::sink());
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// A running program.
pub(crate) struct Program {
    child: std::process::Child,
    texts: [Receiver<String>; 2],
    since: Instant,
    memory: u64,
    is_stopped: bool,
}

impl Program {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.process_group(0).spawn().unwrap();
        let texts =
            [collected(child.stdout.take().unwrap()), collected(child.stderr.take().unwrap())];
        Self { child, texts, since: Instant::now(), memory: 0, is_stopped: false }
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        self.is_stopped = true;
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Whether the program has ended by now.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.memory = self.memory.max(memory(self.child.id()));
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until `condition` holds, the program ends, or time is over. Returns whether the
    /// condition holds.
    pub(crate) fn wait_for(&mut self, condition: impl Fn() -> bool, patience: Duration) -> bool {
        let since = Instant::now();
        while !condition() {
            if self.has_ended() || since.elapsed() > patience {
                return condition();
            }
            std::thread::sleep(Duration::from_millis(4));
        }
        true
    }

    /// Waits for the end. Kills the program after `patience`, or if it exhausts memory.
    pub(crate) fn end(mut self, patience: Duration) -> ProgramEnd {
        let since = Instant::now();
        let mut is_hung = false;
        while !self.has_ended() {
            is_hung = since.elapsed() > patience;
            if is_hung || self.memory > 4 * MEMORY {
                break;
            }
            // Short programs are polled often, and long programs are not disturbed.
            std::thread::sleep(
                (since.elapsed() / 16).clamp(Duration::from_millis(1), Duration::from_millis(20)),
            );
        }
        let time = self.since.elapsed();
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let status = self.child.wait().unwrap();
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        let [stdout, stderr] =
            self.texts.map(|text| text.recv_timeout(Duration::from_secs(10)).unwrap_or_default());
        ProgramEnd {
            code: code.unwrap(),
            stdout,
            stderr,
            time,
            memory: self.memory,
            is_hung,
            is_stopped: self.is_stopped,
        }
    }
}

/// Runs a program to its end, for at most `patience`.
pub(crate) fn ending(command: Command, patience: Duration) -> ProgramEnd {
    Program::start(command).end(patience)
}

/// Runs a program, and stops it by a signal if it has not ended before.
pub(crate) fn stopped_after(command: Command, after: Duration) -> ProgramEnd {
    let mut program = Program::start(command);
    program.wait_for(|| false, after);
    program.signal(Signal::TERM);
    program.end(PATIENCE)
}
