//! Text through a tokenizer.json: training, generation, cache, export.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use std::path::PathBuf;

const SETS: [&str; 4] = [
    "data.tokenizer=\"tokenizer.json\"",
    "model.vocab=300",
    "train.checkpoint_every=2",
    "sample.tokens=20",
];

/// A folder with a tokenizer and its own cache folder.
fn folder() -> Folder {
    let folder = Folder::new();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tokenizer-tiny.json");
    std::fs::copy(fixture, folder.path("tokenizer.json")).unwrap();
    folder
}

fn onebox(folder: &Folder, args: &[&str]) -> CommandOutput {
    let mut command = folder.command(args);
    command.env("XDG_CACHE_HOME", folder.path("cache"));
    Folder::done(command)
}

fn train(folder: &Folder, run: &str, how: &[&str], more: &[&str]) -> CommandOutput {
    let sets = SETS.iter().chain(more).flat_map(|set| ["--set", *set]);
    let start = ["train", "tiny.ron", "--run-dir", run];
    onebox(folder, &start.into_iter().chain(how.iter().copied()).chain(sets).collect::<Vec<_>>())
}

fn cached(folder: &Folder) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.path("cache/onebox/tokens"));
    let mut all: Vec<_> =
        entries.map_or_else(|_| Vec::new(), |all| all.map(|e| e.unwrap().path()).collect());
    all.sort();
    all
}

#[test]
fn a_run_learns_tokens_keeps_them_and_writes_text() {
    let folder = folder();
    let dry = train(&folder, "run", &["--dry-run"], &[]).ok();
    assert!(dry.stderr.contains("bytes per token"), "{}", dry.stderr);
    assert!(cached(&folder).is_empty() && !folder.path("cache").exists());
    let done = train(&folder, "run", &[], &[]).ok();
    let output = &done.stderr;
    assert!(output.contains("nats per token") && output.contains("bytes per token"), "{output}");
    // The prompt and the words consist of tokens, not of numbers.
    let text = output.split("it writes:").nth(1).unwrap();
    assert!(text.trim_start().starts_with("the "), "{text}");
    assert_eq!(folder.read("run/tokenizer.json"), folder.read("tokenizer.json"));
    let drawn = |run: &str| {
        let args = ["generate", run, "--prompt", "the box", "--tokens", "30", "--temperature", "0"];
        onebox(&folder, &args).ok().stdout
    };
    let text = drawn("run");
    assert!(text.starts_with("the box") && text.len() > 30, "{text}");
    // The run uses its own copy, even if the original is gone.
    std::fs::rename(folder.path("tokenizer.json"), folder.path("moved.json")).unwrap();
    assert_eq!(drawn("run"), text);
    std::fs::rename(folder.path("moved.json"), folder.path("tokenizer.json")).unwrap();

    let all = cached(&folder);
    // The tokens and their list.
    assert_eq!(all.len(), 2, "{all:?}");
    let bytes = all.iter().map(|path| std::fs::metadata(path).unwrap().len()).sum();
    let bytes = topology::format_bytes(bytes);
    let looked = onebox(&folder, &["doctor"]).stdout;
    assert!(looked.contains(&format!("data cache    {bytes} of at most ")), "{looked}");
    assert!(looked.contains(" in 1 part in "), "{looked}");
    let good = std::fs::read(&all[0]).unwrap();
    let mut bad = good.clone();
    bad[40] ^= 1;
    std::fs::write(&all[0], bad).unwrap();
    let again = train(&folder, "again", &["-q"], &[]).ok();
    assert!(again.stderr.contains("it is made again"), "{}", again.stderr);
    assert_eq!(folder.hash("run"), folder.hash("again"));
    assert_eq!(std::fs::read(&all[0]).unwrap(), good);

    let args = ["checkpoint", "export", "run", "hf", "--to", "safetensors"];
    onebox(&folder, &args).ok();
    assert_eq!(folder.read("hf/tokenizer.json"), folder.read("tokenizer.json"));
    let sets: Vec<&str> = SETS.iter().flat_map(|set| ["--set", *set]).collect();
    let import = ["checkpoint", "import", "hf", "new", "tiny.ron"];
    onebox(&folder, &[&import, &sets[..]].concat()).ok();
    assert_eq!(drawn("new"), text);
}

#[test]
fn the_cache_has_a_limit_and_is_shown_and_emptied() {
    let folder = folder();
    let limited = |args: &[&str], limit: &str| {
        let mut command = folder.command(args);
        command.env("XDG_CACHE_HOME", folder.path("cache")).env("ONEBOX_CACHE_LIMIT", limit);
        Folder::done(command)
    };
    let check = |name: &str, limit: &str| {
        std::fs::write(folder.path(name), format!("{name} ") + &folder.read("text.txt")).unwrap();
        let train = format!("data.train={name:?}");
        let sets: Vec<&str> = SETS[..2].iter().flat_map(|set| ["--set", *set]).collect();
        let start = ["data", "check", "tiny.ron", "--set", &train];
        limited(&start.into_iter().chain(sets).collect::<Vec<_>>(), limit)
    };
    let shown = |more: &[&str]| {
        let args = [&["data", "cache", "--json"], more].concat();
        let output = onebox(&folder, &args).ok().stdout;
        let json: serde_json::Value = serde_json::from_str(&output).unwrap();
        let keys = ["parts", "bytes", "parts_removed", "bytes_removed", "parts_in_use"];
        keys.map(|key| json[key].as_u64().unwrap())
    };
    assert_eq!(shown(&[]), [0; 5]);
    assert!(!folder.path("cache").exists());
    for name in ["a.txt", "b.txt", "c.txt"] {
        check(name, "").ok();
    }
    let bytes = cached(&folder).iter().map(|path| std::fs::metadata(path).unwrap().len()).sum();
    let [parts, counted_bytes, ..] = shown(&[]);
    assert_eq!((parts, counted_bytes), (3, bytes));
    // The first entry is used last.
    let pause = || std::thread::sleep(std::time::Duration::from_millis(1100));
    let small = format!("{}B", bytes - 1);
    pause();
    assert!(!check("a.txt", &small).ok().stderr.contains("limit"));
    assert_eq!(shown(&[])[0], 2);
    assert!(!check("a.txt", &small).ok().stderr.contains("limit"));
    pause();
    let output = check("d.txt", "1kB").ok().stderr;
    assert!(output.contains("its limit is ") && output.contains("ONEBOX_CACHE_LIMIT"), "{output}");
    assert_eq!(shown(&[])[0], 1, "what the command itself has used stays");
    check("a.txt", "much").refused(78, &["ONEBOX_CACHE_LIMIT", "much"]);
    let text = onebox(&folder, &["data", "cache"]).ok().stdout;
    assert!(text.contains("cache/onebox/tokens: ") && text.contains("; its limit is "), "{text}");
    let [_, left, ..] = shown(&[]);
    std::fs::write(folder.path("cache/onebox/tokens/mine.bin"), "mine").unwrap();
    assert_eq!(shown(&["--clear"]), [0, 0, 1, left, 0]);
    assert_eq!(cached(&folder).len(), 1, "{:?}", cached(&folder));
    let text = onebox(&folder, &["data", "cache", "--clear"]).ok().stdout;
    assert!(text.starts_with("removed: 0 B in 0 parts\n"), "{text}");
    let mut without = folder.command(&["data", "cache"]);
    without.env_remove("XDG_CACHE_HOME").env_remove("HOME");
    Folder::done(without).refused(78, &["there is no cache folder", "XDG_CACHE_HOME"]);
}

/// The seals of that version's files do not cover their names.
#[test]
fn parts_of_an_earlier_version_are_not_looked_at_and_go_with_the_others() {
    let folder = folder();
    let cache = folder.path("cache/onebox/tokens");
    std::fs::create_dir_all(&cache).unwrap();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/token-cache-3");
    for entry in std::fs::read_dir(fixture).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), cache.join(entry.file_name())).unwrap();
    }
    let before = cached(&folder);
    let text = "the box holds a model that is too large for one card\n".repeat(40);
    std::fs::write(folder.path("text.txt"), text).unwrap();
    let sets: Vec<&str> = SETS[..2].iter().flat_map(|set| ["--set", *set]).collect();
    let check = || {
        let args = [&["data", "check", "tiny.ron"], &sets[..]].concat();
        let done = onebox(&folder, &args).ok();
        assert!(!done.stderr.contains("made again"), "{}", done.stderr);
        done.stdout
    };
    let output = check();
    assert!(output.contains("aac7a50375aefd0cac1bc59dfde8e499 to train"), "{output}");
    let after = cached(&folder);
    assert!(after.len() == 4 && before.iter().all(|path| after.contains(path)), "{after:?}");
    assert_eq!(check(), output);
    let cleared = onebox(&folder, &["data", "cache", "--clear"]).ok().stdout;
    assert!(cleared.contains(" in 2 parts\n") && cached(&folder).is_empty(), "{cleared}");
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    let folder = folder();
    let with = |more: &[&str]| train(&folder, "run", &[], more);
    with(&["model.vocab=299"])
        .refused(66, &["data.tokenizer", "tokenizer.json", "model.vocab to 300"]);
    // A folder of transformers allows no other `model.vocab`.
    let larger =
        "if the folder of model.from gives the vocabulary, take the tokenizer of that model";
    with(&["data.format=U16", "model.vocab=299"])
        .refused(66, &["data.tokenizer", "tokenizer.json", "model.vocab to 300", larger]);
    with(&["data.tokenizer=\"none.json\""]).refused(66, &["none.json", "no such file"]);
    with(&["data.tokenizer=\"text.txt\""]).refused(66, &["text.txt", "tokenizer.json"]);
    std::fs::write(folder.path("text.txt"), b"\xff\xfe and more text").unwrap();
    with(&[]).refused(66, &["text.txt", "not UTF-8"]);
    assert!(!folder.path("run").exists() && cached(&folder).is_empty());
}

#[test]
fn another_tokenizer_under_the_same_name_is_another_experiment() {
    let folder = folder();
    train(&folder, "run", &["-q"], &[]).ok();
    let text = folder.read("tokenizer.json");
    // Without the last merge, the tokens differ, but the vocabulary has the same size.
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["model"]["merges"].as_array_mut().unwrap().pop();
    std::fs::write(folder.path("tokenizer.json"), value.to_string()).unwrap();
    let longer = ["train.steps=6", "schedule.decay_steps=4"];
    let metrics = folder.read("run/metrics.jsonl");
    let lines = metrics.lines().filter(|l| !l.contains("\"end\"")).map(|l| l.to_owned() + "\n");
    std::fs::write(folder.path("run/metrics.jsonl"), lines.collect::<String>()).unwrap();
    train(&folder, "run", &["--resume", "-q"], &longer)
        .refused(78, &["data.tokenizer", "differs from the one", "--fork"]);
    assert_eq!(folder.read("run/tokenizer.json"), text);
    let fork = train(&folder, "run", &["--fork", "-q"], &longer).ok();
    assert!(fork.stderr.contains("data.tokenizer"), "{}", fork.stderr);
    assert!(folder.read("run-2/tokenizer.json") != text);
}

#[test]
fn a_hostile_tokenizer_is_refused_by_name() {
    let folder = folder();
    let mut value: serde_json::Value =
        serde_json::from_str(&folder.read("tokenizer.json")).unwrap();
    for normalizer in [
        serde_json::json!({ "type": "Replace", "pattern": { "Regex": "" }, "content": "zz" }),
        serde_json::json!({ "type": "Prepend", "prepend": "y".repeat(1 << 20) }),
    ] {
        value["normalizer"] = normalizer;
        std::fs::write(folder.path("tokenizer.json"), value.to_string()).unwrap();
        let refused =
            train(&folder, "run", &[], &[]).refused(66, &["tokenizer.json", "data.tokenizer"]);
        assert!(!refused.stderr.contains("backtrace"), "{}", refused.stderr);
    }
    std::fs::remove_file(folder.path("tokenizer.json")).unwrap();
    folder.shell("mkfifo tokenizer.json").ok();
    train(&folder, "run", &[], &[]).refused(66, &["tokenizer.json", "neither a regular file"]);
}

/// A forged run or checkpoint may name any file in its config.
#[test]
fn a_stored_config_opens_no_tokenizer_outside_of_its_run() {
    let folder = folder();
    train(&folder, "run", &["-q"], &[]).ok();
    let all: [&[&str]; 3] = [
        &["generate", "run", "--tokens", "4"],
        &["checkpoint", "export", "run", "out", "--to", "safetensors"],
        &["checkpoint", "reshard", "run", "resharded", "--tp", "1", "--dp", "1"],
    ];
    let outside = folder.path("tokenizer.json").display().to_string();
    for (left, why) in [
        ("rm run/tokenizer.json", "run/tokenizer.json is not there"),
        ("ln -s ../tokenizer.json run/tokenizer.json", "run/tokenizer.json is no file of it"),
    ] {
        folder.shell(left).ok();
        let words = [why, "opens no file outside", "to trust it, copy", &outside];
        all.iter().for_each(|args| drop(onebox(&folder, args).refused(66, &words)));
        assert!(!folder.path("out").exists() && !folder.path("resharded").exists());
    }
    folder.shell("rm run/tokenizer.json && cp tokenizer.json run/").ok();
    all.iter().for_each(|args| drop(onebox(&folder, args).ok()));
}

#[test]
fn tokens_that_a_file_beside_the_tokenizer_lists_are_in_data_cache_and_run() {
    let folder = folder();
    std::fs::write(folder.path("turns.txt"), "<|turn|>the box holds\n".repeat(100)).unwrap();
    let tokens = |tokenizer: &str| {
        let sets = [
            format!("data.tokenizer={tokenizer:?}"),
            "model.vocab=301".into(),
            "data.train=\"turns.txt\"".into(),
        ];
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args = ["data", "show", "tiny.ron", "--json"].into_iter().chain(sets);
        let shown = onebox(&folder, &args.collect::<Vec<_>>()).ok().stdout;
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        shown["tokens"].as_array().unwrap().clone()
    };
    let turn = serde_json::Value::from(300);
    assert!(!tokens("tokenizer.json").contains(&turn));
    let before = cached(&folder);
    std::fs::write(
        folder.path("tokenizer_config.json"),
        r#"{"additional_special_tokens": ["<|turn|>"]}"#,
    )
    .unwrap();
    let listed = tokens("tokenizer.json");
    assert!(listed.contains(&turn));
    assert!(cached(&folder).len() > before.len());
    let more = ["model.vocab=301", "data.train=\"turns.txt\""];
    train(&folder, "run", &[], &more).ok();
    // The file of the run has all tokens itself.
    assert!(folder.read("run/tokenizer.json").contains("<|turn|>"));
    assert_eq!(tokens("run/tokenizer.json"), listed);
    let stranger = r#"{"additional_special_tokens": ["the"]}"#;
    std::fs::write(folder.path("run/tokenizer_config.json"), stranger).unwrap();
    let drawn = ["generate", "run", "--prompt", "<|turn|>the", "--tokens", "3"];
    onebox(&folder, &drawn).ok();
    let refused = train(&folder, "small", &[], &["model.vocab=300", more[1]]);
    refused.refused(66, &["largest token is 300 (\"<|turn|>\")", "out of tokenizer_config.json"]);
}
