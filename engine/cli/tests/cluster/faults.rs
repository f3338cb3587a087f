//! A process is killed, stopped or cut off at a place that all pass; the run continues later.

use super::launch::{
    ACROSS, NUMBER, assert_gone, assert_killed, assert_silent, assert_whole, files, has_mpirun,
    launch, metrics, on_gpus, sets, train,
};
use crate::common::{CommandOutput, Folder};
use engine::run::{FaultPoint, Watcher};
use rustix::process::{Signal, getpid, kill_process};
use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Name of the link between two machines, on both machines.
pub(crate) const LINK: &str = "wire";

/// Message of a process after [`FaultAction::Blink`].
pub(crate) const BLINKED: &str = "the link was down for a second";

/// Variable with the words of `onebox` for [`a_process`], as JSON.
const WORDS: &str = "ONEBOX_TEST_WORDS";
/// Variable with the fault for [`a_process`].
const FAULT: &str = "ONEBOX_TEST_FAULT";
/// Variable with the folder into which [`a_process`] writes its id.
const IDS: &str = "ONEBOX_TEST_IDS";

pub(crate) const ON_GPUS: &str = "device=Cuda";

/// Seconds until a stopped process is lost; a process that does not join has ten times as long.
const SILENCE: &str = "4";
const SILENCE_AT_START: &str = "2";

pub(crate) const BASE: &[&str] = &[
    ACROSS,
    "batch.micro=1",
    "batch.global=4",
    "schedule.decay_steps=100",
    "train.checkpoint_every=1",
    "train.checkpoint_keep=3",
    "train.weights=Complete",
];

/// Kind of fault that happens to a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FaultAction {
    Kill,
    Stop,
    /// The link of its machine goes down, and the process continues.
    Cut,
    /// The link goes down for a second.
    Blink,
}

impl FaultAction {
    const ALL: [Self; 4] = [Self::Kill, Self::Stop, Self::Cut, Self::Blink];
}

/// A fault of process `victim`. It happens when the process passes `place` for the `time`-th time,
/// counted from 1. If `place` is `None`, it happens before the process joins the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault {
    pub(crate) how: FaultAction,
    pub(crate) victim: usize,
    pub(crate) place: Option<FaultPoint>,
    pub(crate) time: usize,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { how, victim, place, time } = self;
        write!(f, "{how:?} {victim} {place:?} {time}")
    }
}

impl Fault {
    fn read(text: &str) -> Self {
        let words: Vec<&str> = text.split(' ').collect();
        let [how, victim, place, time] = words[..] else { panic!("a fault is four words: {text}") };
        let place_of = |known: &FaultPoint| format!("{:?}", Some(*known)) == place;
        let how_of = |known: &FaultAction| format!("{known:?}") == how;
        Self {
            how: FaultAction::ALL.into_iter().find(how_of).unwrap(),
            victim: victim.parse().unwrap(),
            place: FaultPoint::ALL.into_iter().find(place_of),
            time: time.parse().unwrap(),
        }
    }

    /// Applies the fault to this process. A killed or stopped thread does not continue.
    fn strike(self) {
        let signal = match self.how {
            FaultAction::Kill => Signal::KILL,
            FaultAction::Stop => Signal::STOP,
            FaultAction::Cut => return set_link("down"),
            FaultAction::Blink => {
                set_link("down");
                std::thread::sleep(Duration::from_secs(1));
                set_link("up");
                return println!("{BLINKED}");
            }
        };
        kill_process(getpid(), signal).unwrap();
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

/// Sets the link of this machine.
fn set_link(state: &str) {
    assert!(Command::new("ip").args(["link", "set", LINK, state]).status().unwrap().success());
}

/// Arguments of this test program for [`a_process`].
pub(crate) const A_PROCESS: [&str; 4] =
    ["--exact", "faults::a_process", "--ignored", "--nocapture"];

/// Runs `onebox` with a fault; mpirun starts this test.
#[test]
#[ignore = "a process of the tests below"]
#[expect(clippy::exit, reason = "the launcher reads the exit code")]
fn a_process() {
    let variable = |name| std::env::var(name).unwrap();
    let number = NUMBER.into_iter().find_map(|name| std::env::var(name).ok()).unwrap();
    let ids = std::path::PathBuf::from(variable(IDS));
    std::fs::write(ids.join(&number), std::process::id().to_string()).unwrap();
    let fault = Fault::read(&variable(FAULT));
    let number: usize = number.parse().unwrap();
    let mine = number == fault.victim;
    if mine && fault.place.is_none() {
        fault.strike();
    }
    let passed = AtomicUsize::new(0);
    let watcher = Watcher::new(move |_, place, _| {
        if mine && Some(place) == fault.place {
            let before = passed.fetch_add(1, Ordering::SeqCst);
            if before + 1 == fault.time {
                fault.strike();
            }
        }
    });
    let words: Vec<String> = serde_json::from_str(&variable(WORDS)).unwrap();
    let words = words.into_iter().map(OsString::from);
    std::process::exit(onebox::commands::run(words, Some(watcher)).into());
}

/// Continues a run of `count` processes until the fault, if it occurs.
pub(crate) fn suffer(
    folder: &Folder,
    count: usize,
    run: &str,
    set: &[&str],
    fault: Fault,
) -> CommandOutput {
    let mut command = launch(folder, count, std::env::current_exe().unwrap());
    command.args(A_PROCESS);
    if set.contains(&ON_GPUS) {
        on_gpus(folder, &mut command);
    }
    suffer_by(command, folder, count, run, set, fault)
}

/// Same as [`suffer`] with `command`, which starts [`A_PROCESS`] `count` times.
pub(crate) fn suffer_by(
    mut command: Command,
    folder: &Folder,
    count: usize,
    run: &str,
    set: &[&str],
    fault: Fault,
) -> CommandOutput {
    let silence = if fault.place.is_some() { SILENCE } else { SILENCE_AT_START };
    let words = ["onebox", "train", "tiny.ron", "--run-dir", run, "--resume", "--silence", silence];
    let words: Vec<String> = words.into_iter().map(str::to_owned).chain(sets(set)).collect();
    let ids = folder.path(&format!("ids-{run}"));
    let _ = std::fs::remove_dir_all(&ids);
    std::fs::create_dir(&ids).unwrap();
    command.env(WORDS, serde_json::to_string(&words).unwrap());
    command.env(FAULT, fault.to_string()).env(IDS, &ids);
    let done = Folder::done(command);
    let ids = std::fs::read_dir(&ids).unwrap().flatten();
    let ids: Vec<String> = ids.map(|id| std::fs::read_to_string(id.path()).unwrap()).collect();
    assert_eq!(ids.len(), count, "{}", done.stderr);
    assert_gone(&ids);
    done
}

/// Asserts that the run has failed, and that the victim is named.
pub(crate) fn assert_named(done: &CommandOutput, fault: Fault) {
    let stderr = &done.stderr;
    assert!(done.code != 0, "{fault}: {stderr}");
    match (fault.how, fault.place) {
        (FaultAction::Kill, _) => assert_killed(&format!("{stderr}{}", done.stdout), fault.victim),
        (_, None) => {
            assert_eq!(done.code, 76, "{fault}: {stderr}");
            assert!(stderr.contains("not all processes that the launcher has started"), "{stderr}");
        }
        (_, Some(_)) => {
            assert_eq!(done.code, 76, "{fault}: {stderr}");
            assert_silent(stderr, fault.victim);
        }
    }
}

pub(crate) fn full() -> bool {
    std::env::var_os("ONEBOX_FULL").is_some()
}

/// Faults at every place and at the start; each process is killed and stopped.
fn all_faults() -> Vec<Fault> {
    let places = [None].into_iter().chain(FaultPoint::ALL.map(Some));
    let of = |place| {
        let victims = if place == Some(FaultPoint::Naming) { 0..1 } else { 0..2 };
        let both = [FaultAction::Kill, FaultAction::Stop];
        victims.flat_map(move |victim| both.map(|how| Fault { how, victim, place, time: 1 }))
    };
    places.flat_map(of).collect()
}

/// Asserts equal metrics, weights and last checkpoints; the number of older ones may differ.
pub(crate) fn assert_same_end(folder: &Folder, one: &str, other: &str, what: &str) {
    let [one, other] = [one, other].map(|run| folder.path(run));
    assert_eq!(metrics(&one), metrics(&other), "{what}");
    let last = std::fs::read_to_string(one.join("checkpoints/latest")).unwrap();
    for name in ["checkpoints/latest", "weights.safetensors"] {
        let [one, other] = [&one, &other].map(|run| std::fs::read(run.join(name)).unwrap());
        assert!(one == other, "{what}: {name} differs");
    }
    let [one, other] = [one, other].map(|run| files(&run.join("checkpoints").join(last.trim())));
    assert!(one.len() == 5 && one == other, "{what}: {last} differs");
}

pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).map(drop).unwrap();
        }
    }
}

/// Continues a run with one process.
fn go_on(folder: &Folder, run: &str, set: &[&str]) {
    let done = train(folder, 0, run, &["-q", "--resume"], set);
    assert_eq!(done.code, 0, "{}", done.stderr);
}

/// Trains the run `begun` of two steps, and `straight`, which continues it without a fault.
pub(crate) fn begin(folder: &Folder, set: &[&str]) {
    go_on(folder, "begun", &[set, &["train.steps=2"]].concat());
    copy(&folder.path("begun"), &folder.path("straight"));
    go_on(folder, "straight", set);
}

#[test]
fn a_fault_at_any_place_of_any_process_ends_all_and_costs_no_bit() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let set = [BASE, &["train.steps=4"]].concat();
    begin(&folder, &set);
    let mut all = all_faults();
    if !full() {
        let kill =
            |victim, place| Fault { how: FaultAction::Kill, victim, place: Some(place), time: 1 };
        let stop = Fault { how: FaultAction::Stop, ..kill(1, FaultPoint::Saved) };
        all = vec![
            kill(1, FaultPoint::Opened),
            kill(0, FaultPoint::Naming),
            kill(1, FaultPoint::Writing),
            stop,
        ];
    }
    for (number, fault) in all.into_iter().enumerate() {
        let run = format!("run-{number}");
        copy(&folder.path("begun"), &folder.path(&run));
        let done = suffer(&folder, 2, &run, &set, fault);
        assert_named(&done, fault);
        assert_whole(&folder, &run);
        go_on(&folder, &run, &set);
        assert_same_end(&folder, "straight", &run, &fault.to_string());
    }
}

/// Numbers of a fixed pseudo-random sequence.
struct Dice(u64);

impl Dice {
    /// A number below `end`.
    fn roll(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

#[test]
fn cycles_of_faults_with_other_numbers_of_processes_end_with_the_same_bits() {
    if !has_mpirun() {
        return;
    }
    let cycles = if full() { 50 } else { 5 };
    let folder = Folder::new();
    let steps = format!("train.steps={}", 3 * cycles);
    let set = [BASE, &[&steps, "train.eval_every=3"]].concat();
    assert_eq!(train(&folder, 0, "straight", &["-q"], &set).code, 0);
    let places: Vec<FaultPoint> =
        FaultPoint::ALL.into_iter().filter(|place| *place != FaultPoint::Ending).collect();
    let (mut dice, mut struck) = (Dice(24), 0);
    for cycle in 0..cycles {
        let count = [1, 2, 4][dice.roll(3)];
        let place = places[dice.roll(places.len())];
        let victim = if place == FaultPoint::Naming { 0 } else { dice.roll(count) };
        // A single process has no partner that could miss it.
        let how =
            if count > 1 && dice.roll(3) == 0 { FaultAction::Stop } else { FaultAction::Kill };
        // Each rank passes the places of the start only once.
        let once = matches!(place, FaultPoint::Opened | FaultPoint::Loaded);
        let time = if once { 1 } else { 1 + dice.roll(2) };
        let fault = Fault { how, victim, place: Some(place), time };
        let done = suffer(&folder, count, "run", &set, fault);
        println!("cycle {cycle}: {fault} of {count}: {}", done.code);
        if done.code == 0 {
            break;
        }
        struck += 1;
        assert_named(&done, fault);
    }
    assert!(struck >= cycles / 2, "{struck} faults");
    assert_whole(&folder, "run");
    assert_eq!(train(&folder, 2, "run", &["-q", "--resume"], &set).code, 0);
    assert_same_end(&folder, "straight", "run", "after all cycles");
}
