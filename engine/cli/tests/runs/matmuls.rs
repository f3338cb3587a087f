//! Matmuls by the clock: the stand-in's algorithms have simulated times, and each rounds in another way.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use super::cuda::onebox;
use crate::common::{CommandOutput, Folder};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// Of cuBLASLt's two algorithms, the second or the first is the faster.
const SECOND: (&str, &str) = ("FAKECUDA_ALGORITHMS", "2000,1000");
const FIRST: (&str, &str) = ("FAKECUDA_ALGORITHMS", "1000,2000");

const TIMED: &str = "matmuls=Timed";
const ALL_STEPS: &str = "train.steps=4";
const HALF: &str = "train.steps=2";

/// Trains into `run`, with a schedule that does not depend on the number of steps.
fn train(folder: &Folder, run: &str, sets: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    train_with(folder, run, &[], sets, variables)
}

fn resume(folder: &Folder, run: &str, sets: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    train_with(folder, run, &["--resume"], sets, variables)
}

fn train_with(
    folder: &Folder,
    run: &str,
    words: &[&str],
    sets: &[&str],
    variables: &[(&str, &str)],
) -> CommandOutput {
    let usual =
        ["device=Cuda", "schedule.decay_steps=4", "train.checkpoint_every=2", "sample.tokens=0"];
    let sets = usual.iter().chain(sets).flat_map(|set| ["--set", *set]);
    let sets: Vec<&str> = sets.collect();
    let start = ["train", "tiny.ron", "--run-dir", run];
    onebox(folder, &[&start[..], words, &sets[..]].concat(), variables)
}

/// The choices in the checkpoint of `step`, by shape: the place of the algorithm in the heuristic's
/// list, or `None` for an epilogue that runs apart.
fn choices(folder: &Folder, run: &str, step: u64) -> BTreeMap<String, Option<u64>> {
    let manifest = folder.read(&format!("{run}/checkpoints/step-{step:08}/MANIFEST"));
    let manifest: serde_json::Value =
        serde_json::from_str(manifest.lines().next().unwrap()).unwrap();
    let lines = manifest["matmuls"].as_array().cloned().unwrap_or_default();
    let entry = |line: &serde_json::Value| {
        let (shape, choice) = line.as_str().unwrap().rsplit_once(" = ").unwrap();
        // The second word of the stand-in's algorithms is their place.
        let place = (choice != "apart").then(|| u64::from_str_radix(&choice[16..32], 16).unwrap());
        (shape.to_owned(), place)
    };
    lines.iter().skip(1).map(entry).collect()
}

#[track_caller]
fn assert_all(choices: &BTreeMap<String, Option<u64>>, place: u64) {
    let is_other = |(_, choice): &(&String, &Option<u64>)| **choice != Some(place);
    let others: Vec<_> = choices.iter().filter(is_other).collect();
    assert!(choices.len() > 10 && others.is_empty(), "of {}: {others:?}", choices.len());
}

fn remove_cache(folder: &Folder) {
    fs::remove_dir_all(folder.path("cache")).unwrap();
}

#[test]
fn a_resumed_run_has_the_algorithms_of_its_checkpoint_without_the_cache() {
    let folder = Folder::new();
    train(&folder, "straight", &[TIMED, ALL_STEPS], &[SECOND]).ok();
    assert_all(&choices(&folder, "straight", 4), 1);
    train(&folder, "half", &[TIMED, HALF], &[SECOND]).ok();
    remove_cache(&folder);
    // A new choice would be the first algorithm.
    resume(&folder, "half", &[TIMED, ALL_STEPS], &[FIRST]).ok();
    assert_eq!(folder.hash("half"), folder.hash("straight"));
    assert_eq!(choices(&folder, "half", 4), choices(&folder, "straight", 4));
    train(&folder, "other", &[TIMED, ALL_STEPS], &[FIRST]).ok();
    assert_all(&choices(&folder, "other", 4), 0);
    assert_ne!(folder.hash("other"), folder.hash("straight"));
    // The library's first algorithm needs no choice.
    train(&folder, "first", &[ALL_STEPS], &[SECOND]).ok();
    assert_eq!(choices(&folder, "first", 4), BTreeMap::new());
    assert_eq!(folder.hash("first"), folder.hash("other"));
}

#[test]
fn choices_that_this_machine_cannot_use_are_reported() {
    let folder = Folder::new();
    for run in ["fewer", "newer"] {
        train(&folder, run, &[TIMED, HALF], &[SECOND]).ok();
    }
    remove_cache(&folder);
    let one = [("FAKECUDA_ALGORITHMS", "1000")];
    let said = resume(&folder, "fewer", &[TIMED, ALL_STEPS], &one).ok().stderr;
    for text in ["cuBLASLt refuses", "stored choices for matmuls", "chooses anew for these"] {
        assert!(said.contains(text), "`{text}` is not in:\n{said}");
    }
    assert_all(&choices(&folder, "fewer", 4), 0);
    let newer = [FIRST, ("FAKECUDA_CUBLASLT", "120901")];
    let said = resume(&folder, "newer", &[TIMED, ALL_STEPS], &newer).ok().stderr;
    for text in ["for another machine", "cuBLASLt 120900,", "cuBLASLt 120901,"] {
        assert!(said.contains(text), "`{text}` is not in:\n{said}");
    }
    assert_all(&choices(&folder, "newer", 4), 0);
    let shown = folder.onebox(&["checkpoint", "show", "newer"]).ok().stdout;
    assert!(shown.contains("by the clock, for Fake GPU"), "{shown}");
}

/// The files of choices in the cache.
fn cached(folder: &Folder) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.path("cache/onebox")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.to_string_lossy().contains("/matmuls-")).collect()
}

#[test]
fn a_new_run_takes_the_algorithms_of_the_cache_if_the_file_is_sound() {
    let folder = Folder::new();
    let places = |run: &str, variables: &[(&str, &str)], place: u64| {
        let done = train(&folder, run, &[TIMED, HALF], variables).ok();
        assert_all(&choices(&folder, run, 2), place);
        done.stderr
    };
    places("timed", &[SECOND], 1);
    places("cached", &[FIRST], 1);
    let files = cached(&folder);
    let [file] = &files[..] else { panic!("{files:?}") };
    let mut bytes = fs::read(file).unwrap();
    bytes[40] ^= 1;
    fs::write(file, bytes).unwrap();
    places("damaged", &[FIRST], 0);
    places("replaced", &[SECOND], 0);
    // Another user could have written it.
    fs::set_permissions(file, Permissions::from_mode(0o666)).unwrap();
    let said = places("foreign", &[SECOND], 1);
    assert!(said.contains("others than you may write it"), "{said}");
    // Another library has choices of its own, and the others stay.
    places("newer", &[FIRST, ("FAKECUDA_CUBLASLT", "120901")], 0);
    assert_eq!(cached(&folder).len(), 2);
    places("older", &[FIRST], 1);
    // No folder can be made below a file.
    let nowhere = folder.path("text.txt/cache");
    let nowhere = ("XDG_CACHE_HOME", nowhere.to_str().unwrap());
    let said = places("nowhere", &[FIRST, nowhere], 0);
    assert!(said.contains("the matmuls of each new run are timed again"), "{said}");
}

/// The choices of matmuls with an epilogue.
fn fused(choices: &BTreeMap<String, Option<u64>>) -> Vec<Option<u64>> {
    let steps = ["Gelu", "GeluBackward", "SumsOfB"];
    let of = |step: &str| {
        let end = format!(", {step}");
        let found: Vec<_> = choices.iter().filter(|(shape, _)| shape.ends_with(&end)).collect();
        assert!(!found.is_empty(), "no {step} in {choices:?}");
        found.into_iter().map(|(_, choice)| *choice).collect::<Vec<_>>()
    };
    steps.into_iter().flat_map(of).collect()
}

#[test]
fn epilogues_run_apart_where_they_are_slower_or_where_the_library_has_none() {
    let folder = Folder::new();
    let one = ("FAKECUDA_ALGORITHMS", "1000");
    let slow = [one, ("FAKECUDA_EPILOGUE_US", "5000"), ("FAKECUDA_KERNEL_US", "100")];
    train(&folder, "slow", &[TIMED, HALF], &slow).ok();
    let slow = choices(&folder, "slow", 2);
    assert!(fused(&slow).iter().all(Option::is_none), "{slow:?}");
    let plain = slow.values().filter(|choice| choice.is_some()).count();
    assert!(plain > 10 && slow.values().flatten().all(|place| *place == 0), "{slow:?}");
    remove_cache(&folder);
    let fast = [one, ("FAKECUDA_EPILOGUE_US", "100"), ("FAKECUDA_KERNEL_US", "5000")];
    train(&folder, "fast", &[TIMED, HALF], &fast).ok();
    let fast = choices(&folder, "fast", 2);
    assert_all(&fast, 0);
    assert_eq!(fused(&fast).len(), fused(&slow).len());
    // A search with an epilogue that fails does not end a run.
    let none = ("FAKECUDA_EPILOGUES", "0");
    train(&folder, "none", &[HALF], &[none]).ok();
    assert_eq!(folder.hash("none"), folder.hash("slow"));
    remove_cache(&folder);
    train(&folder, "timed", &[TIMED, HALF], &[one, none]).ok();
    assert!(fused(&choices(&folder, "timed", 2)).iter().all(Option::is_none));
}

#[test]
fn an_algorithm_that_does_not_run_is_left_out() {
    let folder = Folder::new();
    train(&folder, "run", &[TIMED, HALF], &[("FAKECUDA_ALGORITHMS", "2000,0,1000")]).ok();
    assert_all(&choices(&folder, "run", 2), 2);
}

#[test]
fn noise_of_the_clock_changes_no_algorithm() {
    let folder = Folder::new();
    let times = ("FAKECUDA_ALGORITHMS", "1000,990,1010,1000,995,1005,1000,1000");
    let sets = [TIMED, HALF, "parallel.tensor=1", "parallel.data=1"];
    train(&folder, "run", &sets, &[times, ("FAKECUDA_NOISE", "22")]).ok();
    let found = choices(&folder, "run", 2);
    let others = found.values().filter(|choice| **choice != Some(0)).count();
    assert!(found.len() > 10 && others < 2, "{others} of {}: {found:?}", found.len());
}
