//! A program that is watched: its time, its memory and its end.

use super::MEMORY;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// On an idle machine each case ends in seconds. What takes longer hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Most of what a program says that is kept, in bytes.
const KEPT: u64 = 1 << 20;

/// More on stderr than this is no message.
const MESSAGES: usize = 64 << 10;

/// Exit codes that `onebox --help` documents, but those of a bug (70) and of an abort (134).
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
    /// The exit code; of a signal 128 and its number, as a shell has it.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) time: Duration,
    /// The most that one of its processes held, in bytes.
    pub(crate) memory: u64,
    /// Whether it was killed because it did not end.
    pub(crate) is_hung: bool,
    /// Whether it was told to stop.
    is_stopped: bool,
}

impl fmt::Display for ProgramEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, memory) = (self.time.as_secs_f64(), self.memory >> 20);
        let said: String = self.stderr.chars().take(300).collect();
        write!(f, "exit {}, {seconds:.1} s, {memory} MiB: {}", self.code, said.replace('\n', " / "))
    }
}

impl ProgramEnd {
    /// What no program may do.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.is_hung {
            faults.push("HANGS".to_owned());
        }
        if self.memory > MEMORY {
            faults.push(format!("MEMORY: {} MiB", self.memory >> 20));
        }
        // Of who does not hear the signal.
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

    /// Whether it refused what `name` is, and said so.
    pub(crate) fn is_refusal_of(&self, name: &str) -> bool {
        self.code != 0 && self.stderr.contains(name)
    }
}

/// The most memory that a process and those that it started have held so far; a thread of a program starts none.
fn memory(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let own = most.and_then(|most| most.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|id| id.parse().ok());
    children.map(memory).fold(own.unwrap_or(0) << 10, u64::max)
}

/// The start of all that a pipe gives, which is read to its end.
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

/// A program that runs.
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

    /// Whether it has ended, looked at now.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.memory = self.memory.max(memory(self.child.id()));
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until `condition` holds, it ends, or time is over; whether the condition holds.
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

    /// Waits for its end; kills it behind `patience`, or where it takes the machine's memory.
    pub(crate) fn end(mut self, patience: Duration) -> ProgramEnd {
        let since = Instant::now();
        let mut is_hung = false;
        while !self.has_ended() {
            is_hung = since.elapsed() > patience;
            if is_hung || self.memory > 4 * MEMORY {
                break;
            }
            // What ends at once is not waited for, and what takes long is not disturbed.
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

/// Runs a program to its end, for so long.
pub(crate) fn ending(command: Command, patience: Duration) -> ProgramEnd {
    Program::start(command).end(patience)
}

/// Runs a program, and tells it to stop where it has not ended before.
pub(crate) fn stopped_after(command: Command, after: Duration) -> ProgramEnd {
    let mut program = Program::start(command);
    program.wait_for(|| false, after);
    program.signal(Signal::TERM);
    program.end(PATIENCE)
}
