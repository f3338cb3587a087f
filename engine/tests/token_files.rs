//! Files of tokens that stay where they are: long ones, many, and those that others change.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod common;

use common::{Done, Folder};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// Kibibytes of address space that a process gets: half of the file that it reads.
const ROOM: usize = 1 << 20;

/// A file of zeros that takes no room, with some bytes in it, written long ago.
fn sparse(path: &Path, bytes: u64, parts: &[(u64, &[u8])]) {
    File::create(path).unwrap().set_len(bytes).unwrap();
    write_unseen(path, parts);
}

/// Writes into a file as if that had been long ago, at the same time as each other such write.
fn write_unseen(path: &Path, parts: &[(u64, &[u8])]) {
    let file = File::options().write(true).open(path).unwrap();
    for (at, bytes) in parts {
        file.write_all_at(bytes, *at).unwrap();
    }
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)).unwrap();
}

/// `onebox data check` in JSON, with a cache folder of the test's own.
fn check(folder: &Folder, cache: &str, sets: &[&str]) -> Done {
    let sets: Vec<_> = sets.iter().map(|set| format!("--set '{set}'")).collect();
    let onebox = env!("CARGO_BIN_EXE_onebox");
    folder.shell(&format!(
        "ulimit -v {ROOM}; XDG_CACHE_HOME=$PWD/{cache} {onebox} data check tiny.ron --json {}",
        sets.join(" ")
    ))
}

fn hashes(done: Done) -> [String; 2] {
    let json: serde_json::Value = serde_json::from_str(&done.ok().stdout).unwrap();
    ["train_hash", "held_out_hash"].map(|key| json[key].as_str().unwrap().to_owned())
}

/// Files of the cache folder.
fn kept(folder: &Folder, cache: &str) -> usize {
    fs::read_dir(folder.path(cache).join("onebox/tokens")).map_or(0, Iterator::count)
}

#[test]
fn a_file_of_gigabytes_is_read_through_once_and_is_never_in_memory() {
    let folder = Folder::new();
    let path = folder.path("tokens.bin");
    let bytes = 2 << 30;
    sparse(&path, bytes, &[(4 << 20, &[7]), (1 << 30, &[9])]);
    let sets = ["data.train=\"tokens.bin\"", "data.format=U32"];
    let first = hashes(check(&folder, "cache", &sets));
    assert_eq!(kept(&folder, "cache"), 1);
    // Whoever changes a file and hides it is not noticed: the file is not read through again.
    write_unseen(&path, &[(1 << 29, &[8])]);
    assert_eq!(hashes(check(&folder, "cache", &sets)), first);
    // The largest token is known, too, for any vocabulary.
    let small = [&sets[..], &["model.vocab=9"]].concat();
    check(&folder, "cache", &small).refused(66, &["token 268435456, at byte 1073741824, is 9,"]);
    // Whoever does not hide it is.
    File::options().write(true).open(&path).unwrap().set_modified(SystemTime::now()).unwrap();
    let changed = hashes(check(&folder, "cache", &sets));
    assert!(changed[0] != first[0] && changed[1] == first[1], "{changed:?}");
    assert_eq!(kept(&folder, "cache"), 1, "a file that was just written may change unnoticed");
}

#[test]
fn a_cache_that_is_no_folder_costs_only_time() {
    let folder = Folder::new();
    fs::write(folder.path("cache"), "").unwrap();
    let zeros = 20 << 20;
    sparse(&folder.path("tokens.bin"), zeros, &[]);
    let sets = ["data.train=\"tokens.bin\"", "data.format=U32"];
    let done = check(&folder, "cache", &sets);
    assert!(done.stderr.contains("will be checked again"), "{}", done.stderr);
    let there = hashes(check(&folder, "other", &sets));
    assert_eq!((hashes(done), kept(&folder, "other")), (there.clone(), 1));
    // What is broken is made again.
    let entry = fs::read_dir(folder.path("other/onebox/tokens")).unwrap().next().unwrap().unwrap();
    let good = fs::read(entry.path()).unwrap();
    fs::write(entry.path(), &good[1..]).unwrap();
    let again = check(&folder, "other", &sets);
    assert!(again.stderr.contains("it is made again"), "{}", again.stderr);
    assert_eq!(fs::read(entry.path()).unwrap(), good);
    // Another cut of the same file is other data.
    let other = [&sets[..], &["data.validation_fraction=0.2"]].concat();
    let other = hashes(check(&folder, "other", &other));
    assert!(other[0] != there[0] && other[1] != there[1], "{other:?}");
    // A dry run leaves no trace.
    let all: Vec<_> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let mut dry = folder.command(&[&["train", "tiny.ron", "--dry-run", "-q"], &all[..]].concat());
    dry.env("XDG_CACHE_HOME", folder.path("dry"));
    Folder::done(dry).ok();
    assert!(!folder.path("dry").exists());
}

#[test]
fn which_files_are_text_is_found_once() {
    let folder = Folder::new();
    fs::create_dir(folder.path("texts")).unwrap();
    let bad = folder.path("texts/bad.txt");
    fs::write(folder.path("texts/good.txt"), "good ".repeat(6 << 20)).unwrap();
    fs::write(&bad, [&b"x".repeat(100_000)[..], b"\xff"].concat()).unwrap();
    for name in ["good.txt", "bad.txt"] {
        write_unseen(&folder.path("texts").join(name), &[]);
    }
    let tokens = |done: Done| {
        let json: serde_json::Value = serde_json::from_str(&done.ok().stdout).unwrap();
        json["tokens"].as_u64().unwrap()
    };
    let sets = ["data.train=\"texts\""];
    assert_eq!(tokens(check(&folder, "cache", &sets)), 5 * (6 << 20));
    write_unseen(&bad, &[(100_000, b"x")]);
    assert_eq!(tokens(check(&folder, "cache", &sets)), 5 * (6 << 20));
    File::options().write(true).open(&bad).unwrap().set_modified(SystemTime::now()).unwrap();
    assert_eq!(tokens(check(&folder, "cache", &sets)), 5 * (6 << 20) + 100_001);
}

/// Trains two steps on it; the hash of the states.
fn trained(folder: &Folder, run: &str, train: &str, limit: &str) -> String {
    let onebox = env!("CARGO_BIN_EXE_onebox");
    let line = format!(
        "{limit} {onebox} train tiny.ron -q --run-dir {run} --set train.steps=2 --set model.vocab=500 \
         --set data.format=U16 --set 'data.train={train}'"
    );
    folder.shell(&line).ok();
    folder.hash(run)
}

#[test]
fn many_small_files_train_as_one_and_few_of_them_are_open() {
    let folder = Folder::new();
    fs::create_dir(folder.path("many")).unwrap();
    let mut all = Vec::new();
    for i in 0..900u32 {
        let tokens = (0..1 + i % 9).map(|k| ((i * 31 + k * 7) % 500) as u16);
        let bytes: Vec<u8> = tokens.flat_map(u16::to_le_bytes).collect();
        fs::write(folder.path("many").join(format!("{i:04}.bin")), &bytes).unwrap();
        all.extend(bytes);
    }
    fs::write(folder.path("one.bin"), all).unwrap();
    let limit = "ulimit -n 400;";
    let many = trained(&folder, "run-many", "\"many\"", limit);
    assert_eq!(many, trained(&folder, "run-one", "\"one.bin\"", ""));
    // So for all data sets of a run together.
    let twice = |path: &str| format!("[(path: {path:?}), (name: \"b\", path: {path:?})]");
    let many = trained(&folder, "run-mixed", &twice("many"), limit);
    assert_eq!(many, trained(&folder, "run-mixed-one", &twice("one.bin"), ""));
}

#[test]
fn a_file_that_shrinks_under_a_run_ends_it_with_its_name() {
    let folder = Folder::new();
    let path = folder.path("tokens.bin");
    let tokens: Vec<u8> =
        (0..20_000u32).flat_map(|i| ((i * 31 % 256) as u16).to_le_bytes()).collect();
    fs::write(&path, tokens).unwrap();
    let args = ["train", "tiny.ron", "--run-dir", "run", "--set", "data.train=\"tokens.bin\""];
    let long =
        ["data.format=U16", "train.steps=1000000", "train.eval_every=0", "schedule.kind=Constant"];
    let long: Vec<_> = long.iter().flat_map(|set| ["--set", set]).collect();
    let command = folder.command(&[&args[..], &long[..]].concat());
    let run = std::thread::spawn(move || Folder::done(command));
    let since = Instant::now();
    let metrics = folder.path("run/metrics.jsonl");
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 3 {
        assert!(since.elapsed() < Duration::from_secs(180) && !run.is_finished(), "no three steps");
        std::thread::sleep(Duration::from_millis(5));
    }
    File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let ended = run.join().unwrap();
    ended.refused(
        66,
        &["tokens.bin: cannot read the tokens at byte", "it has 1000 bytes now, and had 40000"],
    );
}
