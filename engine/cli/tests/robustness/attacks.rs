//! Files and folders under attack, on the built program: links, pipes, devices, sockets and files of a terabyte in every place
//! where onebox opens a file; small disks; files and directories that are replaced; limits of the system.
//!
//! Each case must end in time, in little memory, with a documented exit code and without a panic; what belongs to others keeps
//! every byte, and a run that was attacked goes on to the end of an undisturbed run. All failures are printed together.
//!
//! A quick sample by default; all of it with ONEBOX_FULL=1.

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

/// What a program may hold in memory, in bytes.
const MEMORY: u64 = 256 << 20;

fn full() -> bool {
    std::env::var_os("ONEBOX_FULL").is_some_and(|value| value == "1")
}

/// Every n-th of them where the run is not a full one, so that each plant has its turn.
fn sample<T>(all: Vec<T>, most: usize) -> Vec<T> {
    let stride = if full() { 1 } else { all.len().div_ceil(most).max(1) };
    let stride = stride + usize::from(stride.is_multiple_of(plants::Plant::ALL.len()));
    all.into_iter().step_by(stride).collect()
}

/// Says loudly that cases are left out; a failure where continuous integration runs and the tool for them is not installed.
fn skip(what: &str, why: &str) {
    let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(!in_ci || !why.starts_with("no unshare"), "SKIPPED: {what}: {why}");
    println!("SKIPPED: {what}: {why}");
}

/// All cases of one test, and what is wrong with them.
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

    /// What holds for every program: it ended in time and memory, as it documents.
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

    /// As [`add`](Self::add), with how the program ended.
    fn blame(&mut self, case: &str, fault: &str, ending: &ProgramEnd) {
        self.add(case, &format!("{fault}: {ending}"));
    }

    /// What is lost or changed of others.
    fn harm(&mut self, case: &str, harm: &[String], ending: &ProgramEnd) {
        if !harm.is_empty() {
            let first = &harm[..harm.len().min(4)];
            self.blame(case, &format!("HARMS {}: {first:?}", harm.len()), ending);
        }
    }

    /// Prints the table's end, and fails with all faults.
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

/// The words of a line, without quotes.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

impl Folder {
    /// What becomes of `onebox` with the words of this line, with a cache of its own.
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
