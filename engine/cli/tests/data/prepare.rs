//! `onebox data prepare` from the view of a user.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod links;
mod lists;

use crate::common::{self, CommandOutput, Folder};
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TOKENIZER: [&str; 2] = ["data.tokenizer=\"tokenizer.json\"", "model.vocab=300"];

fn folder() -> Folder {
    let folder = Folder::new();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tokenizer-tiny.json");
    fs::copy(fixture, folder.path("tokenizer.json")).unwrap();
    folder
}

fn onebox(folder: &Folder, args: &[&str], sets: &[&str]) -> CommandOutput {
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

/// Trains on the text and on its prepared tokens, in `parts` parts.
fn prepared_as(folder: &Folder, more: &[&str], parts: usize) {
    let sets = [&TOKENIZER[..], more].concat();
    let made = format!("made-{}", more[0].len());
    let prepare = ["data", "prepare", "tiny.ron", &made];
    let output = onebox(folder, &prepare, &sets).ok().stdout;
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    let [first, _, data, "model: (.., vocab: 300),"] = lines[..] else { panic!("{output}") };
    let end = format!("in {}", topology::counted(parts, "part"));
    assert!(first.ends_with(&end), "{output}");
    // The printed lines are pasted into a config.
    let pasted = common::TINY.replace("data: (train: \"text.txt\"),", data);
    let pasted = pasted.replace("heads: 4,", "heads: 4, vocab: 300,");
    assert!(pasted.contains(data) && pasted.contains("vocab: 300"));
    let pasted_ron = format!("{made}.ron");
    fs::write(folder.path(&pasted_ron), pasted).unwrap();
    let tokens = (pasted_ron.as_str(), &[][..]);
    let text = ("tiny.ron", &sets[..]);
    let stdout = |args: &[&str], (ron, sets): (&str, &[&str])| {
        let args: Vec<_> =
            args.iter().map(|arg| if *arg == "CONFIG" { ron } else { *arg }).collect();
        onebox(folder, &args, sets).ok().stdout
    };
    let train = |run: &str, of| {
        let run = format!("{run}-{made}");
        stdout(&["train", "CONFIG", "-q", "--run-dir", &run], of);
        folder.hash(&run)
    };
    let same = |args: &[&str], keys: [&str; 3]| {
        let [one, other] = [tokens, text].map(|of| {
            let output = stdout(args, of);
            let output: serde_json::Value = serde_json::from_str(&output).unwrap();
            keys.map(|key| output[key].clone())
        });
        assert_eq!(one, other);
    };
    let shown = |of| {
        let shown = stdout(&["data", "show", "CONFIG", "--sample", "2"], of);
        // The first line names the data set, and headings name the files of documents.
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

/// A name that is too short must not train on validation data or on an unfinished folder.
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
    let refused = |named: &str, message: &str| {
        let train = format!("data.train={named:?}");
        for args in [&["data", "check", "tiny.ron"][..], &["train", "tiny.ron", "--run-dir", "run"]]
        {
            let sets = ["model.vocab=300", "data.format=U16", &train];
            onebox(&folder, args, &sets).refused(66, &[message]);
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
    // The part counts a moment after its file appears.
    std::thread::sleep(Duration::from_millis(20));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{printed}");
    assert!(
        printed.contains("interrupted; 1 part is kept: the same command goes on behind it"),
        "{printed}"
    );
    assert!(!folder.path("made/train").exists(), "nobody trains on a half");
    folder.shell("cp long.txt new.txt && mv new.txt long.txt").ok();
    let again = folder.onebox(&args).ok().stdout;
    assert!(again.contains("in 2 parts, 1 of them from before"), "{again}");
}

/// Prepares `text.txt` into `made` with a validation set, and returns the settings of a run on it.
fn made(folder: &Folder) -> [String; 4] {
    let sets = [&TOKENIZER[..], &["data.validation=\"text.txt\""]].concat();
    onebox(folder, &["data", "prepare", "tiny.ron", "made"], &sets).ok();
    let [train, validation] = ["train", "validation"].map(|name| folder.path("made").join(name));
    [
        "model.vocab=300".into(),
        "data.format=U16".into(),
        format!("data.train={train:?}"),
        format!("data.validation={validation:?}"),
    ]
}

/// Output of `data check` with these settings.
fn checked(folder: &Folder, sets: &[String; 4]) -> CommandOutput {
    onebox(folder, &["data", "check", "tiny.ron"], &sets.each_ref().map(String::as_str))
}

/// The command that a remedy names.
fn again(folder: &Folder) -> String {
    let [config, made] = ["tiny.ron", "made"].map(|name| folder.path(name).display().to_string());
    format!(
        "; copy all files of {made} again, or make them again: cd {}",
        folder.path("").display()
    )
    .trim_end_matches('/')
    .to_owned()
        + &format!(
            " && onebox data prepare {config} --set 'data.tokenizer=\"tokenizer.json\"' --set model.vocab=300 --set \
             'data.validation=\"text.txt\"' {made}"
        )
}

#[test]
fn a_part_that_is_gone_or_has_another_length_is_refused_with_the_command_that_makes_it() {
    let folder = folder();
    let sets = made(&folder);
    checked(&folder, &sets).ok();
    let refused = |message: &str| {
        let message = format!("{message}{}", again(&folder));
        let sets = sets.each_ref().map(String::as_str);
        for args in [
            &["data", "check", "tiny.ron"][..],
            &["config", "check", "tiny.ron"],
            &["train", "tiny.ron", "--run-dir", "run"],
            &["train", "tiny.ron", "--dry-run"],
        ] {
            onebox(&folder, args, &sets).refused(66, &[&message]);
        }
        let plan = onebox(&folder, &["plan", "tiny.ron"], &sets).ok().stdout;
        assert!(plan.contains("data: not counted: ") && plan.contains(&message), "{plan}");
    };
    for part in ["made/train/000000.bin", "made/validation/000000.bin"] {
        let path = folder.path(part);
        let good = fs::read(&path).unwrap();
        let (has, list) = (good.len(), folder.path("made/prepared.json"));
        let says = format!(", and {} says {has} bytes", list.display());
        fs::write(&path, &good[..1000]).unwrap();
        refused(&format!("{part}: it has 1000 bytes{says}"));
        fs::write(&path, "").unwrap();
        refused(&format!("{part}: it has 0 bytes{says}"));
        fs::remove_file(&path).unwrap();
        refused(&format!("{part}: it is not there{says}"));
        fs::write(&path, [&good[..], &good].concat()).unwrap();
        refused(&format!("{part}: it has {} bytes{says}", 2 * has));
        fs::write(&path, good).unwrap();
    }
    checked(&folder, &sets).ok();
    // A link to the folder and a glob lead to the same list.
    fs::remove_file(folder.path("made/train/000000.bin")).unwrap();
    folder.shell("cp made/validation/000000.bin made/train/1.bin; ln -s made/train linked").ok();
    for named in ["linked", "made/train/*.bin"] {
        let train = format!("data.train={named:?}");
        let sets = ["model.vocab=300", "data.format=U16", &train];
        let gone = [&format!("{}/000000.bin: it is not there", named.trim_end_matches("/*.bin"))];
        let gone = gone.map(String::as_str);
        onebox(&folder, &["data", "check", "tiny.ron"], &sets).refused(66, &gone);
    }
    // The list itself may be truncated.
    fs::write(folder.path("made/prepared.json"), "{\"version\": 3, \"pa").unwrap();
    checked(&folder, &sets).refused(66, &["made/prepared.json: it is damaged"]);
}

#[test]
fn a_part_with_another_token_is_found_and_made_again() {
    let folder = folder();
    let sets = made(&folder);
    let before = checked(&folder, &sets).ok().stdout;
    let path = folder.path("made/train/000000.bin");
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[500] ^= 1;
    fs::write(&path, &bad).unwrap();
    let hash = |bytes: &[u8]| format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes));
    let (is, was) = (hash(&bad), hash(&good));
    let list = folder.path("made/prepared.json");
    let message = format!(
        "made/train/000000.bin: its bytes have the xxh3-128 {is}, and {} says {was}",
        list.display()
    );
    checked(&folder, &sets).refused(66, &[&format!("{message}{}", again(&folder))]);
    // The command in the error is for a shell.
    let command = again(&folder).split_once("again: ").unwrap().1.to_owned();
    let command = command.replace("onebox data", &format!("{} data", env!("CARGO_BIN_EXE_onebox")));
    let done = folder.shell(&command).ok();
    assert!(
        done.stderr.contains(&message) && done.stderr.contains("made again"),
        "{}",
        done.stderr
    );
    assert!(done.stdout.contains("in 2 parts, 1 of them from before"), "{}", done.stdout);
    assert_eq!(fs::read(&path).unwrap(), good);
    assert_eq!(checked(&folder, &sets).ok().stdout, before);
}

/// The folder is as onebox wrote it before there were hashes.
#[test]
fn a_folder_of_an_older_onebox_is_refused_with_the_command_that_makes_it_again() {
    let folder = folder();
    let sets = made(&folder);
    let before = checked(&folder, &sets).ok().stdout;
    let list = folder.path("made/prepared.json");
    let new: serde_json::Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
    let mut old = serde_json::json!({ "version": 1, "of": "0".repeat(32), "parts": new["parts"] });
    for part in old["parts"].as_array_mut().unwrap().iter_mut().flat_map(|set| set.as_array_mut()) {
        part[0].as_object_mut().unwrap().remove("files").unwrap();
        part[0]["documents"] = serde_json::Value::Null;
    }
    fs::write(&list, old.to_string()).unwrap();
    let made = folder.path("made").display().to_string();
    let remedy = format!("rm -r {made} && onebox data prepare CONFIG {made}");
    let message = format!(
        "made/prepared.json: an older onebox wrote it, in format 1 without hashes; make the tokens again: {remedy}"
    );
    checked(&folder, &sets).refused(66, &[&message]);
    let prepare = ["data", "prepare", "tiny.ron", "made"];
    let older =
        "made/prepared.json: another onebox wrote it, in format 1, and this one writes format 3";
    onebox(&folder, &prepare, &TOKENIZER).refused(73, &[older]);
    // The remedy works.
    let tokens = "--set 'data.tokenizer=\"tokenizer.json\"' --set model.vocab=300 --set 'data.validation=\"text.txt\"'";
    let remedy = remedy.replace("CONFIG", &format!("tiny.ron {tokens}"));
    folder
        .shell(&remedy.replace("onebox data", &format!("{} data", env!("CARGO_BIN_EXE_onebox"))))
        .ok();
    assert_eq!(checked(&folder, &sets).ok().stdout, before);
}

#[test]
fn text_is_known_by_its_bytes_wherever_it_stands_and_whenever_it_was_written() {
    let folder = folder();
    folder.shell("mkdir pp; cp text.txt pp/a.txt; echo 'the box' > pp/b.txt").ok();
    let prepare = |train: &str, more: &[&str]| {
        let train = format!("data.train={train:?}");
        let sets = [&TOKENIZER[..], &[&train], more].concat();
        onebox(&folder, &["data", "prepare", "tiny.ron", "made"], &sets)
    };
    let assert_reused = |train: &str| {
        let stdout = prepare(train, &[]).ok().stdout;
        assert!(stdout.contains("in 1 part, 1 of them from before"), "{stdout}");
    };
    prepare("pp", &[]).ok();
    folder.shell("touch pp/a.txt").ok();
    assert_reused("pp");
    folder.shell("cp -rp pp moved").ok();
    assert_reused("moved");
    folder.shell("mkdir anew; cat pp/a.txt > anew/x.md; cat pp/b.txt > anew/y.md").ok();
    assert_reused("anew");
    // An unchanged file is not read again; a file with a reset time counts as changed.
    let settle = || std::thread::sleep(Duration::from_millis(3100));
    settle();
    assert_reused("pp");
    folder.shell("touch -r pp/a.txt time; tr t T < pp/a.txt | dd of=pp/a.txt conv=notrunc; touch -r time pp/a.txt").ok();
    settle();
    prepare("pp", &[]).refused(73, &["/pp/a.txt has 9920 bytes"]);
    folder.shell("cp moved/a.txt pp").ok();
    // A changed file is named, with its old and its new hash.
    let hash = |name: &str| {
        format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&fs::read(folder.path(name)).unwrap()))
    };
    let list = "made/prepared.json: it is of";
    let made = folder.path("made");
    let remedy = format!("; name another folder, or delete the folder {}", made.display());
    folder.shell("echo 'a model' > moved/b.txt; echo more > pp/c.txt; rm anew/y.md").ok();
    let [b, before] = ["moved/b.txt", "pp/b.txt"].map(|name| folder.path(name));
    let changed = format!(
        "{list} another text: {} is new, and {} is gone{remedy}",
        b.display(),
        before.display()
    );
    prepare("moved", &[]).refused(73, &[&changed]);
    let c = format!("{list} another text: {} is new{remedy}", folder.path("pp/c.txt").display());
    prepare("pp", &[]).refused(73, &[&c]);
    prepare("anew", &[]).refused(73, &[&format!("{list} another text: "), "/b.txt is gone"]);
    let held = "data.validation=\"text.txt\"";
    let sets = format!("{list} other data sets: train then, and train, validation now{remedy}");
    prepare("moved", &[held]).refused(73, &[&sets]);
    let was = hash("tokenizer.json");
    folder.shell("echo >> tokenizer.json").ok();
    let is = hash("tokenizer.json");
    let other =
        format!("{list} another tokenizer: xxh3-128 {was} then, and xxh3-128 {is} now{remedy}");
    prepare("moved", &[]).refused(73, &[&other]);
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
