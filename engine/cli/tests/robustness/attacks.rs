//! Files and folders under attack: links, pipes, devices, sockets and files of a terabyte at every
//! place that onebox opens; small disks; replaced files and directories; limits of the system.
//!
//! Each case must end in time, in little memory, with a documented exit code and without a panic.
//! Files of others stay unchanged, and an attacked run continues to the usual end.
//!
//! By default, a quick sample of the cases runs; with ONEBOX_FULL=1, all cases.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod disks;
mod inputs;
mod limits;
mod outputs;
mod plants;
mod preparations;
mod program;
mod replacements;
mod runs;

use crate::common::Folder;
use program::ProgramEnd;
use std::time::Duration;

/// Maximum bytes of memory that a program may hold.
const MEMORY: u64 = 256 << 20;

fn full() -> bool {
    std::env::var_os("ONEBOX_FULL").is_some_and(|value| value == "1")
}

/// Every n-th case unless the run is a full one; n is chosen so that each plant occurs.
fn sample<T>(all: Vec<T>, most: usize) -> Vec<T> {
    let stride = if full() { 1 } else { all.len().div_ceil(most).max(1) };
    let stride = stride + usize::from(stride.is_multiple_of(plants::Plant::ALL.len()));
    all.into_iter().step_by(stride).collect()
}

/// Reports that cases are left out. Fails in continuous integration if their tool is not installed.
fn skip(what: &str, why: &str) {
    let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(!in_ci || !why.starts_with("no unshare"), "SKIPPED: {what}: {why}");
    println!("SKIPPED: {what}: {why}");
}

/// All cases of one test, with their faults.
struct Findings {
    title: &'static str,
    tried: usize,
    slowest: (Duration, String),
    largest: (u64, String),
    faults: Vec<String>,
}

impl Findings {
    const fn new(title: &'static str) -> Self {
        Self {
            title,
            tried: 0,
            slowest: (Duration::ZERO, String::new()),
            largest: (0, String::new()),
            faults: Vec::new(),
        }
    }

    /// Checks what holds for every program: it ended in time, in memory and as documented.
    fn look_at(&mut self, case: &str, ending: &ProgramEnd) {
        self.tried += 1;
        println!("{case}: {ending}");
        if ending.time > self.slowest.0 {
            self.slowest = (ending.time, case.to_owned());
        }
        if ending.memory > self.largest.0 {
            self.largest = (ending.memory, case.to_owned());
        }
        ending.faults().iter().for_each(|fault| self.blame(case, fault, ending));
    }

    fn add(&mut self, case: &str, fault: &str) {
        println!("FAULT: {case}: {fault}");
        self.faults.push(format!("{case}: {fault}"));
    }

    /// Same as [`add`](Self::add), with the end of the program.
    fn blame(&mut self, case: &str, fault: &str, ending: &ProgramEnd) {
        self.add(case, &format!("{fault}: {ending}"));
    }

    /// Reports files of others that are lost or changed.
    fn harm(&mut self, case: &str, harm: &[String], ending: &ProgramEnd) {
        if !harm.is_empty() {
            let first = &harm[..harm.len().min(4)];
            self.blame(case, &format!("HARMS {}: {first:?}", harm.len()), ending);
        }
    }

    /// Prints the end of the table, and fails if there are faults.
    #[track_caller]
    fn end(self) {
        let Self { title, tried, slowest, largest, faults } = self;
        println!(
            "{title}: {tried} programs; the slowest took {:.1} s ({}), the largest {} MiB ({})",
            slowest.0.as_secs_f64(),
            slowest.1,
            largest.0 >> 20,
            largest.1
        );
        assert!(tried > 0, "{title}: nothing was tried");
        let count = faults.len();
        assert!(faults.is_empty(), "{title}: {count} faults in {tried}:\n{}", faults.join("\n"));
    }
}

/// Words of a line, without quotes.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

impl Folder {
    /// Runs `onebox` with the words of this line and a cache of its own, and returns its end.
    fn attempt(&self, line: &str) -> ProgramEnd {
        program::ending(self.attacked(line), program::PATIENCE)
    }

    fn attacked(&self, line: &str) -> std::process::Command {
        let mut command = self.command(&words(line));
        command.env("XDG_CACHE_HOME", self.path("cache"));
        command
    }
}

#[test]
fn a_program_that_hangs_grows_or_panics_is_noticed() {
    let folder = Folder::new();
    let sh = |line: &str, patience: u64| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", line]).current_dir(folder.path(""));
        program::ending(command, Duration::from_secs(patience))
    };
    for (line, patience, fault) in [
        ("sleep 100 & wait", 1, "HANGS"),
        ("head -c 400M /dev/zero | tail -c 400M | wc -c", 60, "MEMORY"),
        ("echo panicked >&2", 60, "panicked"),
        ("exit 70", 60, "exit code 70"),
        ("kill -ABRT $$", 60, "exit code 134"),
    ] {
        let faults = sh(line, patience).faults().join("; ");
        assert!(faults.contains(fault), "{line}: {faults}");
    }
    assert_eq!(sh("exit 66", 60).faults(), [""; 0]);
}
