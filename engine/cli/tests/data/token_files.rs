//! Token files that are read in place: long, many, and changed by other programs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod mapping;

use crate::common::{CommandOutput, Folder};
use mapping::Mapping;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};
use xxhash_rust::xxh3::xxh3_128;

/// Kibibytes of address space that a process gets: half of the file that it reads.
const ROOM: usize = 1 << 20;

/// A sparse file of zeros with some other bytes; all such files have the same time of change.
fn sparse(path: &Path, bytes: u64, parts: &[(u64, &[u8])]) {
    File::create(path).unwrap().set_len(bytes).unwrap();
    write_hidden(path, parts);
}

/// Writes into a file, and resets its time of change to the same fixed value.
fn write_hidden(path: &Path, parts: &[(u64, &[u8])]) {
    let file = File::options().write(true).open(path).unwrap();
    for (at, bytes) in parts {
        file.write_all_at(bytes, *at).unwrap();
    }
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)).unwrap();
}

/// Waits until a further change of the files gets another time.
fn settle() {
    sleep(Duration::from_millis(3100));
}

/// Changes the text of a file in the cache folder, and seals it with the hash of its new contents.
fn forge(path: &Path, change: impl Fn(&str) -> String) {
    let mut bytes = fs::read(path).unwrap();
    bytes.truncate(bytes.len() - 16);
    let text = String::from_utf8(bytes).unwrap();
    let mut forged = change(&text).into_bytes();
    assert!(forged != text.as_bytes(), "{text}");
    let name = path.file_name().unwrap().as_encoded_bytes();
    let sealed = [name, &forged].map(|part| [&part.len().to_le_bytes(), part].concat()).concat();
    forged.extend(xxh3_128(&sealed).to_le_bytes());
    fs::write(path, forged).unwrap();
}

/// Flips a bit of the hash of the validation tokens.
fn other_validation_hash(text: &str) -> String {
    let start = text.find("\"held_out\":").unwrap() + 11;
    let digits = text[start..].find(|c: char| !c.is_ascii_digit()).unwrap();
    let hash: u128 = text[start..start + digits].parse().unwrap();
    format!("{}{}{}", &text[..start], hash ^ 1, &text[start + digits..])
}

/// The only file in the cache folder.
fn only(folder: &Folder, cache: &str) -> PathBuf {
    let mut all = fs::read_dir(folder.path(cache).join("onebox/tokens")).unwrap();
    let one = all.next().unwrap().unwrap().path();
    assert!(all.next().is_none());
    one
}

/// Runs `onebox data check` with JSON output and the test's own cache folder.
fn check(folder: &Folder, cache: &str, sets: &[&str]) -> CommandOutput {
    let sets: Vec<_> = sets.iter().map(|set| format!("--set '{set}'")).collect();
    let onebox = env!("CARGO_BIN_EXE_onebox");
    folder.shell(&format!(
        "ulimit -v {ROOM}; XDG_CACHE_HOME=$PWD/{cache} {onebox} data check tiny.ron --json {}",
        sets.join(" ")
    ))
}

fn hashes(done: CommandOutput) -> [String; 2] {
    let json: serde_json::Value = serde_json::from_str(&done.ok().stdout).unwrap();
    ["train_hash", "held_out_hash"].map(|key| json[key].as_str().unwrap().to_owned())
}

/// Number of files in the cache folder.
fn cached_files(folder: &Folder, cache: &str) -> usize {
    fs::read_dir(folder.path(cache).join("onebox/tokens")).map_or(0, Iterator::count)
}

#[test]
fn a_file_of_gigabytes_is_read_through_once_and_is_never_in_memory() {
    let folder = Folder::on_disk();
    let path = folder.path("tokens.bin");
    let bytes = 2 << 30;
    sparse(&path, bytes, &[(4 << 20, &[7]), (1 << 30, &[9])]);
    let sets = ["data.train=\"tokens.bin\"", "data.format=U32"];
    let unsettled = hashes(check(&folder, "cache", &sets));
    assert_eq!(
        cached_files(&folder, "cache"),
        0,
        "a file that was just written may change unnoticed"
    );
    settle();
    let first = hashes(check(&folder, "cache", &sets));
    assert_eq!(first, unsettled);
    // The contents of the cache folder are trusted: the file is not read completely again.
    let known = only(&folder, "cache");
    forge(&known, other_validation_hash);
    let forged = hashes(check(&folder, "cache", &sets));
    assert!(forged[0] == first[0] && forged[1] != first[1], "{forged:?}");
    forge(&known, other_validation_hash);
    // The cache also knows the largest token, for any vocabulary.
    let small = [&sets[..], &["model.vocab=9"]].concat();
    check(&folder, "cache", &small).refused(66, &["token 268435456, at byte 1073741824, is 9,"]);
    // A change of a file is noticed, even if its time of change is the same.
    write_hidden(&path, &[(1 << 29, &[8])]);
    let changed = hashes(check(&folder, "cache", &sets));
    assert!(changed[0] != first[0] && changed[1] == first[1], "{changed:?}");
    assert_eq!(cached_files(&folder, "cache"), 1);
}

#[test]
fn a_cache_that_is_no_folder_costs_only_time() {
    let folder = Folder::on_disk();
    fs::write(folder.path("cache"), "").unwrap();
    let zeros = 20 << 20;
    sparse(&folder.path("tokens.bin"), zeros, &[]);
    settle();
    let sets = ["data.train=\"tokens.bin\"", "data.format=U32"];
    let done = check(&folder, "cache", &sets);
    assert!(done.stderr.contains("will be checked again"), "{}", done.stderr);
    let elsewhere = hashes(check(&folder, "other", &sets));
    assert_eq!((hashes(done), cached_files(&folder, "other")), (elsewhere.clone(), 1));
    // A broken entry is rebuilt.
    let entry = fs::read_dir(folder.path("other/onebox/tokens")).unwrap().next().unwrap().unwrap();
    let good = fs::read(entry.path()).unwrap();
    fs::write(entry.path(), &good[1..]).unwrap();
    let again = check(&folder, "other", &sets);
    assert!(again.stderr.contains("it is made again"), "{}", again.stderr);
    assert_eq!(fs::read(entry.path()).unwrap(), good);
    // Another split of the same file is other data.
    let other = [&sets[..], &["data.validation_fraction=0.2"]].concat();
    let other = hashes(check(&folder, "other", &other));
    assert!(other[0] != elsewhere[0] && other[1] != elsewhere[1], "{other:?}");
    // A dry run writes nothing.
    let all: Vec<_> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let mut dry = folder.command(&[&["train", "tiny.ron", "--dry-run", "-q"], &all[..]].concat());
    dry.env("XDG_CACHE_HOME", folder.path("dry"));
    Folder::done(dry).ok();
    assert!(!folder.path("dry").exists());
}

/// A mapped write changes a file's time only until the first write to its page is on the disk.
#[test]
fn what_another_program_writes_through_its_memory_is_noticed_at_the_next_start() {
    for folder in [Some(Folder::on_disk()), Folder::in_memory()].into_iter().flatten() {
        sparse(&folder.path("tokens.bin"), 20 << 20, &[]);
        let mapping = Mapping::of(&folder.path("tokens.bin"));
        mapping.set(5 << 20, 1);
        settle();
        let sets = ["data.train=\"tokens.bin\"", "data.format=U32"];
        let first = hashes(check(&folder, "cache", &sets));
        mapping.set((5 << 20) + 4, 2);
        let second = hashes(check(&folder, "cache", &sets));
        assert!(first[0] != second[0] && first[1] == second[1], "{first:?}");
        drop(mapping);
    }
}

#[test]
fn which_files_are_text_is_found_once() {
    let folder = Folder::on_disk();
    fs::create_dir(folder.path("texts")).unwrap();
    let bad = folder.path("texts/bad.txt");
    fs::write(folder.path("texts/good.txt"), "good ".repeat(6 << 20)).unwrap();
    fs::write(&bad, [&b"x".repeat(100_000)[..], b"\xff"].concat()).unwrap();
    write_hidden(&bad, &[]);
    settle();
    let tokens = |done: CommandOutput| {
        let json: serde_json::Value = serde_json::from_str(&done.ok().stdout).unwrap();
        json["tokens"].as_u64().unwrap()
    };
    let sets = ["data.train=\"texts\""];
    assert_eq!(tokens(check(&folder, "cache", &sets)), 5 * (6 << 20));
    let cached = fs::read_dir(folder.path("cache/onebox/tokens")).unwrap();
    let texts =
        cached.map(|entry| entry.unwrap().path()).find(|path| path.extension().unwrap() == "texts");
    // The cached fault of bad.txt is trusted.
    let (texts, fault) = (texts.unwrap(), "{\"BadByte\":{\"offset\":100000,\"byte\":255}}");
    let mended = "null ";
    forge(&texts, |text| text.replace(fault, mended));
    assert_eq!(tokens(check(&folder, "cache", &sets)), 5 * (6 << 20) + 100_001);
    forge(&texts, |text| text.replace(mended, fault));
    assert_eq!(tokens(check(&folder, "cache", &sets)), 5 * (6 << 20));
    write_hidden(&bad, &[(100_000, b"x")]);
    settle();
    assert_eq!(tokens(check(&folder, "cache", &sets)), 5 * (6 << 20) + 100_001);
}

/// Trains two steps on `train`, and returns the hash of the states.
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
    // The limit holds for all data sets of a run together.
    let twice = |path: &str| format!("[(path: {path:?}), (name: \"b\", path: {path:?})]");
    let many = trained(&folder, "run-mixed", &twice("many"), limit);
    assert_eq!(many, trained(&folder, "run-mixed-one", &twice("one.bin"), ""));
    // The indexes of Megatron's files do not need more either.
    let onebox = env!("CARGO_BIN_EXE_onebox");
    let checked = |set: &str| {
        let set = format!("--set data.format={set} --set model.vocab=500");
        folder.shell(&format!("ulimit -n 400; {onebox} data check tiny.ron {set}")).ok().stdout
    };
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/megatron");
    fs::create_dir(folder.path("megatron")).unwrap();
    for (i, kind) in (0..500).flat_map(|i| ["bin", "idx"].map(|kind| (i, kind))) {
        let to = folder.path("megatron").join(format!("{i}.{kind}"));
        fs::copy(fixture.join(format!("mapped-u16.{kind}")), to).unwrap();
    }
    let output = checked("Megatron --set 'data.train=\"megatron\"'");
    assert!(output.contains("500 files") && output.contains("in 3500 documents"), "{output}");
}

/// Changes a file during a run, one change after another, with some steps between.
fn under_a_run(changes: &[&dyn Fn(&Path)]) -> CommandOutput {
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
    let steps = || fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
    for change in changes {
        // Lines that are written while the file is read completely belong to steps before.
        let before = steps();
        while steps() < before + 50 {
            let patient = since.elapsed() < Duration::from_secs(180);
            assert!(patient && !run.is_finished(), "{before} steps, and no more");
            sleep(Duration::from_millis(5));
        }
        change(&path);
    }
    run.join().unwrap()
}

#[test]
fn a_file_that_shrinks_under_a_run_ends_it_with_its_name() {
    let ended = under_a_run(&[&|path| {
        File::options().write(true).open(path).unwrap().set_len(1000).unwrap();
    }]);
    ended.refused(
        66,
        &["tokens.bin: cannot read the tokens at byte", "it has 1000 bytes now, and had 40000"],
    );
}

#[test]
fn a_file_that_is_touched_under_a_run_ends_it_only_where_its_bytes_are_others() {
    let touch = |path: &Path| {
        File::options().write(true).open(path).unwrap().set_modified(SystemTime::now()).unwrap();
    };
    // In place: a truncated file would have fewer bytes for a moment, and end the run.
    let rewrite = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        File::options().write(true).open(path).unwrap().write_all_at(&bytes, 0).unwrap();
    };
    let link = |path: &Path| fs::hard_link(path, path.with_extension("link")).unwrap();
    let change = |path: &Path| {
        let file = File::options().write(true).open(path).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&[9], 12_001).unwrap();
        file.set_modified(before).unwrap();
    };
    let ended = under_a_run(&[&touch, &rewrite, &link, &change]);
    let count = ended.stderr.matches("tokens.bin has another time of change: it is read").count();
    // Each rank may report the last change.
    assert!(count >= 4, "{}", ended.stderr);
    ended.refused(66, &["tokens.bin: cannot read the tokens at byte", "it was written to"]);
}

#[test]
fn documents_of_a_gigabyte_are_packed_by_their_index_alone() {
    let folder = Folder::on_disk();
    let (documents, tokens) = (1u64 << 15, 1u64 << 14);
    sparse(&folder.path("t.bin"), 2 * documents * tokens, &[]);
    let words = |words: &mut dyn Iterator<Item = u64>| -> Vec<u8> {
        words.flat_map(u64::to_le_bytes).collect()
    };
    let index = [
        [&b"MMIDIDX\0\0"[..], &1u64.to_le_bytes(), &[8]].concat(),
        words(&mut [documents, documents + 1].into_iter()),
        (0..documents).flat_map(|_| (tokens as u32).to_le_bytes()).collect(),
        words(&mut (0..documents).map(|i| 2 * tokens * i)),
        words(&mut (0..=documents)),
    ];
    fs::write(folder.path("t.idx"), index.concat()).unwrap();
    settle();
    let sets = [
        "data.train=\"t\"",
        "data.format=Megatron",
        "data.packing=Documents",
        "model.seq_len=8192",
    ];
    let done = check(&folder, "cache", &sets).ok();
    let warning =
        "32768 of 32768 documents have more tokens than model.seq_len + 1 and are divided";
    assert!(done.stderr.contains(warning), "{}", done.stderr);
    let output: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(
        output["samples"].as_u64().unwrap() + output["held_out_samples"].as_u64().unwrap(),
        2 * documents
    );
    // The cached result is trusted: the tokens are not read completely again.
    let known = only(&folder, "cache");
    forge(&known, other_validation_hash);
    let forged = hashes(check(&folder, "cache", &sets));
    let first = hashes(done);
    assert!(forged[0] == first[0] && forged[1] != first[1], "{forged:?}");
}
