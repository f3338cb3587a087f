//! Today's onebox reads and continues the files that onebox of commit 5549319 wrote: its
//! checkpoint, its folders of prepared data, its cache.
//! tests/fixtures/make_compatibility_fixture.py has made the files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const TOKENS: [&str; 2] = ["data.tokenizer=\"tokenizer.json\"", "model.vocab=300"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// A copy of the files of that onebox, and of their sources.
fn made() -> Folder {
    let folder = Folder::new();
    copy(&fixtures().join("made-by-5549319"), &folder.path(""));
    copy(&fixtures().join("hf-chat-tiny"), &folder.path("model"));
    fs::copy(fixtures().join("tokenizer-tiny.json"), folder.path("tokenizer.json")).unwrap();
    let row = |i: usize| {
        let (layers, note) = (i * i % 97, "n".repeat(700));
        format!(
            "{{\"text\": \"box {i} holds a model of {layers} layers.\", \"note\": \"{note}\"}}\n"
        )
    };
    fs::write(folder.path("rows.jsonl"), (0..60).map(row).collect::<String>()).unwrap();
    folder
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), &to).unwrap();
        }
    }
}

/// Runs a command that must succeed without a report of damage.
fn onebox(folder: &Folder, args: &[&str], sets: &[&str]) -> CommandOutput {
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let args: Vec<_> = args.iter().copied().chain(sets).collect();
    let mut command = folder.command(&args);
    command.env("XDG_CACHE_HOME", folder.path("cache"));
    let done = Folder::done(command).ok();
    let output = format!("{}{}", done.stdout, done.stderr);
    for word in ["not what was written", "damaged", "broken"] {
        assert!(!output.contains(word), "{args:?}: {output}");
    }
    done
}

/// Trains into `run`, to the same state as the old run `name`.
fn trains_as(folder: &Folder, name: &str, args: &[&str], sets: &[&str]) {
    let run = args[args.len() - 1];
    onebox(folder, &[&["train"], args].concat(), sets);
    let hashes: serde_json::Value = serde_json::from_str(&folder.read("hashes.json")).unwrap();
    assert_eq!(folder.hash(run), hashes[name].as_str().unwrap(), "{name}");
}

#[test]
fn a_checkpoint_of_5549319_is_verified_exported_and_trained_on() {
    let folder = made();
    onebox(&folder, &["checkpoint", "verify", "run"], &[]);
    onebox(&folder, &["checkpoint", "export", "run", "exported", "--to", "safetensors"], &[]);
    let [is, was] = ["exported/model.safetensors", "export.safetensors"]
        .map(|name| fs::read(folder.path(name)).unwrap());
    assert_eq!(is, was);
    let args = ["old.ron", "-q", "--resume", "--run-dir", "run"];
    trains_as(&folder, "resumed", &args, &["train.steps=6"]);
    // The original run also ends in the same state.
    trains_as(&folder, "run", &["old.ron", "-q", "--run-dir", "again"], &[]);
}

#[test]
fn prepared_folders_of_5549319_are_checked_trained_on_and_kept() {
    let folder = made();
    let text: [&str; 4] =
        [TOKENS[0], TOKENS[1], "data.train=\"prepared-text/train\"", "data.format=U16"];
    let chats = [
        "data.tokenizer=\"model/tokenizer.json\"",
        "data.train=\"prepared-chats/train\"",
        "data.format=Megatron",
        "data.packing=None",
    ];
    for (name, config, sets) in [("text", "old.ron", text), ("chats", "chat.ron", chats)] {
        onebox(&folder, &["data", "check", config], &sets);
        trains_as(&folder, name, &[config, "-q", "--run-dir", &format!("{name}-run")], &sets);
    }
    // The copy has other times and another path than the original text.
    let before = parts(&folder.path("prepared-text"));
    let output = onebox(&folder, &["data", "prepare", "old.ron", "prepared-text"], &TOKENS).stdout;
    assert!(output.contains("in 1 part, 1 of them from before"), "{output}");
    assert!(before == parts(&folder.path("prepared-text")));
    trains_as(&folder, "text", &["old.ron", "-q", "--run-dir", "text-again"], &text);
    // The rules for tokens of chats have changed since then. The folder stays, and the message
    // names the command that rebuilds it.
    let before = parts(&folder.path("prepared-chats"));
    let made = folder.path("prepared-chats");
    let prepare = ["data", "prepare", "chat.ron", "prepared-chats"];
    let again = format!("delete the folder {} and make it again: ", made.display());
    let why = "another onebox made it, with other rules for chats than this one has";
    let refused = folder.onebox(&prepare).refused(73, &[why, &again]);
    assert!(before == parts(&made));
    let (_, command) = refused.stderr.split_once("and make it again: ").unwrap();
    assert!(command.contains("data prepare"), "{command}");
    fs::remove_dir_all(&made).unwrap();
    onebox(&folder, &prepare, &[]);
    trains_as(&folder, "chats", &["chat.ron", "-q", "--run-dir", "chats-again"], &chats);
}

/// Files of a prepared folder's tokens, with their bytes and times.
fn parts(folder: &Path) -> Vec<(PathBuf, Vec<u8>, SystemTime)> {
    let path = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().path();
    let mut all: Vec<_> = fs::read_dir(folder.join("train")).unwrap().map(path).collect();
    assert!(!all.is_empty());
    all.sort();
    let of = |path: PathBuf| {
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        (path.clone(), fs::read(&path).unwrap(), time)
    };
    all.into_iter().map(of).collect()
}

#[test]
fn a_cache_of_5549319_is_read_or_made_again_without_a_word() {
    let folder = made();
    let rows = ["data.train=\"rows.jsonl\"", "data.format=Jsonl(text: \"text\")"];
    let before = fs::read_dir(folder.path("cache/onebox/tokens")).unwrap().count();
    assert_eq!(before, 2, "the fixture has tokens of a text and of rows");
    // The second start uses the files that the first start has made.
    for start in ["first", "second"] {
        let run = |name: &str| format!("{name}-{start}");
        let sets = [&TOKENS[..], &rows].concat();
        trains_as(&folder, "text", &["old.ron", "-q", "--run-dir", &run("text")], &TOKENS);
        trains_as(&folder, "rows", &["old.ron", "-q", "--run-dir", &run("rows")], &sets);
    }
}
