//! `onebox data prepare` as a user meets it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod common;

use common::{Done, Folder};
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TOKENIZER: [&str; 2] = ["data.tokenizer=\"tokenizer.json\"", "model.vocab=300"];

fn folder() -> Folder {
    let folder = Folder::new();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tokenizer-tiny.json");
    fs::copy(fixture, folder.path("tokenizer.json")).unwrap();
    folder
}

fn onebox(folder: &Folder, args: &[&str], sets: &[&str]) -> Done {
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let args: Vec<_> = args.iter().copied().chain(sets).collect();
    let mut command = folder.command(&args);
    command.env("XDG_CACHE_HOME", folder.path("cache"));
    Folder::done(command)
}

#[test]
fn the_lines_that_it_prints_train_as_the_text_does() {
    let folder = folder();
    prepared_as(&folder, &["data.validation=\"text.txt\""], 2);
    let rows = "{\"text\": \"the box holds a model\"}\n".repeat(40);
    fs::write(folder.path("rows.jsonl"), rows).unwrap();
    prepared_as(&folder, &["data.train=\"rows.jsonl\"", "data.format=Jsonl(text: \"text\")"], 1);
    let long = (0..60)
        .map(|i| format!("{{\"text\": \"{}\"}}\n", "the box holds a model ".repeat(1 + i % 9)));
    fs::write(folder.path("long.jsonl"), long.collect::<String>()).unwrap();
    let rows = ["data.train=\"long.jsonl\"", "data.format=Jsonl(text: \"text\")"];
    prepared_as(&folder, &[&["data.packing=Documents"], &rows[..]].concat(), 1);
    prepared_as(&folder, &[&["data.packing=None", "data.truncate=true"], &rows[..]].concat(), 1);
    fs::write(folder.path("other.txt"), "that is too large for one card ".repeat(60)).unwrap();
    let sources =
        "data.train=[(path: \"text.txt\", weight: 0.5), (name: \"b\", path: \"other.txt\")]";
    prepared_as(&folder, &[sources, "data.validation_fraction=0.2"], 2);
    let named = "data.validation=[(name: \"one\", path: \"text.txt\"), (path: \"other.txt\")]";
    prepared_as(&folder, &[named, sources, "data.order=Random"], 4);
}

/// Trains on the text and on what becomes of it, in so many parts.
fn prepared_as(folder: &Folder, more: &[&str], parts: usize) {
    let sets = [&TOKENIZER[..], more].concat();
    let made = format!("made-{}", more[0].len());
    let prepare = ["data", "prepare", "tiny.ron", &made];
    let said = onebox(folder, &prepare, &sets).ok().stdout;
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    let [first, _, data, "model: (.., vocab: 300),"] = lines[..] else { panic!("{said}") };
    let end = format!("in {}", topology::counted(parts, "part"));
    assert!(first.ends_with(&end), "{said}");
    // The lines as they are printed, in a config.
    let pasted = common::TINY.replace("data: (train: \"text.txt\"),", data);
    let pasted = pasted.replace("heads: 4,", "heads: 4, vocab: 300,");
    assert!(pasted.contains(data) && pasted.contains("vocab: 300"));
    let pasted_ron = format!("{made}.ron");
    fs::write(folder.path(&pasted_ron), pasted).unwrap();
    let tokens = (pasted_ron.as_str(), &[][..]);
    let text = ("tiny.ron", &sets[..]);
    let told = |args: &[&str], (ron, sets): (&str, &[&str])| {
        let args: Vec<_> =
            args.iter().map(|arg| if *arg == "CONFIG" { ron } else { *arg }).collect();
        onebox(folder, &args, sets).ok().stdout
    };
    let train = |run: &str, of| {
        let run = format!("{run}-{made}");
        told(&["train", "CONFIG", "-q", "--run-dir", &run], of);
        folder.hash(&run)
    };
    let same = |args: &[&str], keys: [&str; 3]| {
        let [one, other] = [tokens, text].map(|of| {
            let said = told(args, of);
            let said: serde_json::Value = serde_json::from_str(&said).unwrap();
            keys.map(|key| said[key].clone())
        });
        assert_eq!(one, other);
    };
    let shown = |of| {
        let shown = told(&["data", "show", "CONFIG", "--sample", "2"], of);
        // The first line names the data set, headings the files that documents are from.
        let lines = shown.lines().skip(1).filter(|line| !line.starts_with("----"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(shown(tokens), shown(text));
    same(&["data", "check", "CONFIG", "--json"], ["train_hash", "held_out_hash", "samples"]);
    for sample in ["0", "3", "11"] {
        same(
            &["data", "show", "CONFIG", "--json", "--sample", sample],
            ["tokens", "counted", "documents"],
        );
    }
    assert_eq!(train("tokens", tokens), train("text", text));
    let [of_tokens, of_text] = ["tokens", "text"].map(|run| format!("{run}-{made}"));
    let write = |run: &str| {
        let args = ["generate", run, "--prompt", "the box ", "--tokens", "9"];
        onebox(folder, &args, &[]).ok().stdout
    };
    assert_eq!(write(&of_tokens), write(&of_text));
    assert_eq!(folder.read(&format!("{of_tokens}/tokenizer.json")), folder.read("tokenizer.json"));
    let again = onebox(folder, &prepare, &sets).ok().stdout;
    assert!(again.contains(&format!("{end}, {parts} of them from before")), "{again}");
}

/// Held-out data and halves are not trained on by a name that is too short.
#[test]
fn the_folder_of_all_data_sets_and_a_half_are_refused() {
    let folder = folder();
    let sets = [&TOKENIZER[..], &["data.validation=\"text.txt\""]].concat();
    onebox(&folder, &["data", "prepare", "tiny.ron", "all/made"], &sets).ok();
    let made = folder.path("all/made");
    let remedy = format!(
        "/all/made: `onebox data prepare` wrote it, and each of its folders is a data set: set data.train to {0}/train, and \
         data.validation to {0}/validation",
        made.display()
    );
    let refused = |named: &str, said: &str| {
        let train = format!("data.train={named:?}");
        for args in [&["data", "check", "tiny.ron"][..], &["train", "tiny.ron", "--run-dir", "run"]]
        {
            let sets = ["model.vocab=300", "data.format=U16", &train];
            onebox(&folder, args, &sets).refused(66, &[said]);
        }
    };
    for named in ["all/made", "all/made/", "all"] {
        refused(named, &remedy);
    }
    fs::rename(made.join("train"), made.join("train-2.partial")).unwrap();
    let half = "/train-2.partial: `onebox data prepare` has not finished it";
    for named in ["all/made", "all/made/train-2.partial", "all/made/*/*.bin"] {
        refused(named, half);
    }
}

#[test]
fn an_interrupted_one_says_what_is_kept_and_goes_on() {
    let folder = folder();
    fs::write(folder.path("long.txt"), "the box holds a model ".repeat(300_000)).unwrap();
    let sets = [&TOKENIZER[..], &["data.validation=\"long.txt\""]].concat();
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let args = [&["data", "prepare", "tiny.ron", "made"], &sets[..]].concat();
    let mut command = folder.command(&args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let since = Instant::now();
    while !folder.path("made/prepared.json").exists() {
        assert!(since.elapsed() < Duration::from_secs(180), "no part in three minutes");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The part counts a moment after the file is there.
    std::thread::sleep(Duration::from_millis(20));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{said}");
    assert!(
        said.contains("interrupted; 1 part is kept: the same command goes on behind it"),
        "{said}"
    );
    assert!(!folder.path("made/train").exists(), "nobody trains on a half");
    let again = folder.onebox(&args).ok().stdout;
    assert!(again.contains("in 2 parts, 1 of them from before"), "{again}");
}

#[test]
fn what_a_file_of_tokens_cannot_hold_is_refused() {
    let folder = folder();
    fs::create_dir(folder.path("texts")).unwrap();
    fs::write(folder.path("texts/a.txt"), "the box holds a model").unwrap();
    let refused = |out: &str, sets: &[&str], code: i32, text: &str| {
        onebox(&folder, &["data", "prepare", "tiny.ron", out], sets).refused(code, &[text]);
        assert!(!folder.path(out).join("prepared.json").exists());
    };
    let with = |more: &[&'static str]| [&TOKENIZER[..], more].concat();
    refused("made", &[], 78, "data.tokenizer is not set");
    refused("made", &["data.format=U16"], 78, "the files hold tokens");
    refused("texts/made", &with(&["data.train=\"texts\""]), 78, "it is in a folder of the data");
    refused("made", &with(&["data.train=\"nosuch\""]), 66, "data.train: ");
    let small = ["data.tokenizer=\"tokenizer.json\"", "model.vocab=299"];
    refused("made", &small, 66, "model.vocab is 299");
}
