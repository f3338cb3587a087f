//! `onebox data prepare` as a user meets it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod common;

use common::{Done, Folder};
use std::fs;

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
    let data = data.strip_suffix(',').unwrap().replacen("data: ", "data=", 1);
    let train = |run: &str, sets: &[&str]| {
        let run = format!("{run}-{made}");
        onebox(folder, &["train", "tiny.ron", "-q", "--run-dir", &run], sets).ok();
        folder.hash(&run)
    };
    let tokens = ["model.vocab=300", &data];
    let same = |args: &[&str], keys: [&str; 3]| {
        let [one, other] = [&tokens[..], &sets].map(|sets| {
            let said = onebox(folder, args, sets).ok().stdout;
            let said: serde_json::Value = serde_json::from_str(&said).unwrap();
            keys.map(|key| said[key].clone())
        });
        assert_eq!(one, other);
    };
    let told = |args: &[&str], sets: &[&str]| onebox(folder, args, sets).ok().stdout;
    let shown = |sets: &[&str]| {
        let shown = told(&["data", "show", "tiny.ron", "--sample", "2"], sets);
        // The first line names the data set.
        shown.split_once('\n').unwrap().1.to_owned()
    };
    assert_eq!(shown(&tokens), shown(&sets));
    same(&["data", "check", "tiny.ron", "--json"], ["train_hash", "held_out_hash", "samples"]);
    for sample in ["0", "3", "11"] {
        same(
            &["data", "show", "tiny.ron", "--json", "--sample", sample],
            ["tokens", "counted", "documents"],
        );
    }
    assert_eq!(train("tokens", &tokens), train("text", &sets));
    let [of_tokens, of_text] = ["tokens", "text"].map(|run| format!("{run}-{made}"));
    let write = |run: &str| told(&["generate", run, "--prompt", "the box ", "--tokens", "9"], &[]);
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
