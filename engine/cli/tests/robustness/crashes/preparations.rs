//! `onebox data prepare`, killed at random moments (kill -9), continues to the same files.

use super::full;
use super::modes::Numbers;
use crate::common::{Folder, with_chats};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Preparations: a name, and the config with its settings.
const KINDS: [(&str, &[&str]); 3] = [
    (
        "text",
        &[
            "tiny.ron",
            "data.train=[(path: \"a.txt\"), (path: \"b.txt\"), (path: \"text.txt\")]",
            "data.tokenizer=\"tokenizer.json\"",
            "model.vocab=300",
        ],
    ),
    (
        "JSON lines",
        &[
            "tiny.ron",
            "data.train=\"rows.jsonl\"",
            "data.validation=\"held.jsonl\"",
            "data.format=Jsonl(text: \"text\")",
            "data.tokenizer=\"tokenizer.json\"",
            "model.vocab=300",
        ],
    ),
    ("chats", &["chat.ron", "data.validation=\"held-chats.jsonl\""]),
];

fn folder() -> Folder {
    let folder = with_chats();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tokenizer-tiny.json");
    fs::copy(fixture, folder.path("tokenizer.json")).unwrap();
    let line = |i: usize| format!("the box holds model {i} that is too large for one card.\n");
    let text = |range: std::ops::Range<usize>| range.map(line).collect::<String>();
    let rows = |range: std::ops::Range<usize>| {
        range.map(|i| format!("{{\"text\": {:?}}}\n", line(i))).collect::<String>()
    };
    // The quick selection uses a share of the data.
    let share = if full() { 1 } else { 8 };
    for (name, text) in [
        ("a.txt", text(0..2000 / share)),
        ("b.txt", text(2000..2000 + 3000 / share)),
        ("rows.jsonl", rows(0..3000 / share)),
        ("held.jsonl", rows(3000..3000 + 1000 / share)),
        ("chats.jsonl", folder.read("chats.jsonl").repeat(32 / share)),
        ("held-chats.jsonl", folder.read("chats.jsonl").repeat(8 / share)),
    ] {
        fs::write(folder.path(name), text).unwrap();
    }
    folder
}

/// All files below a folder, without the timestamps in the list.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
                continue;
            }
            let mut bytes = fs::read(&path).unwrap();
            if path.ends_with("prepared.json") {
                let mut list: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
                let texts = list["texts"].as_array_mut().unwrap().iter_mut();
                texts
                    .flat_map(|of| of.as_array_mut().unwrap())
                    .for_each(|text| drop(text["stamp"].take()));
                bytes = list.to_string().into_bytes();
            }
            found.insert(path.strip_prefix(folder).unwrap().to_owned(), bytes);
        }
    }
    found
}

#[test]
fn killed_at_any_moment_a_preparation_goes_on_to_the_same_files() {
    let mut numbers = Numbers(2_463_534_242);
    let (mut kills, mut faults) = (0, Vec::new());
    for (name, words) in KINDS {
        let folder = folder();
        let (config, sets) = words.split_first().unwrap();
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let words: Vec<&str> =
            ["data", "prepare", config, "made"].into_iter().chain(sets).collect();
        let command = || {
            let mut command = folder.command(&words);
            command.env("XDG_CACHE_HOME", folder.path("cache"));
            command
        };
        let since = Instant::now();
        Folder::done(command()).ok();
        let time = u64::try_from(since.elapsed().as_micros()).unwrap();
        let whole = files(&folder.path("made"));
        // Ten kills of each kind, two before each end; or one kill. Some kills come too late.
        let (most, chains) = if full() { (10, 20) } else { (1, 1) };
        let mut killed = 0;
        for chain in 0..chains {
            if killed >= most {
                break;
            }
            fs::remove_dir_all(folder.path("made")).unwrap();
            let _ = fs::remove_dir_all(folder.path("cache"));
            for _ in 0..most.min(2) {
                let mut child =
                    command().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
                std::thread::sleep(Duration::from_micros(numbers.below(time)));
                // `kill` sends SIGKILL.
                child.kill().unwrap();
                killed += usize::from(child.wait().unwrap().code().is_none());
            }
            let again = Folder::done(command());
            let made = folder.path("made");
            if again.code != 0 {
                faults.push(format!("{name}, chain {chain}: {}: {}", again.code, again.stderr));
            } else if files(&made) != whole {
                let names = files(&made).into_keys().collect::<Vec<_>>();
                faults.push(format!("{name}, chain {chain}: other files: {names:?}"));
            }
        }
        println!("{name}: {killed} kills");
        kills += killed;
    }
    println!("{kills} preparations were killed");
    assert!(faults.is_empty() && kills > 0, "{kills} kills: {}", faults.join("\n"));
}
