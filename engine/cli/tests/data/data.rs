//! The data of a run for a user: equal data, omitted files, and files that are no text.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{self, CommandOutput, Folder};
use std::fs;

const SAVED: [&str; 3] = ["train.steps=2", "schedule.decay_steps=4", "train.checkpoint_every=2"];

fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|set| ["--set", *set]).collect()
}

/// Trains a saved run of two steps on `train`, which may continue.
fn start(folder: &Folder, run: &str, train: &str) {
    let train = format!("data.train={train:?}");
    folder.train(run, &[&["-q"], &sets(&[&SAVED[..], &[&train]].concat())[..]].concat()).ok();
}

/// Trains two more steps.
fn go_on(folder: &Folder, run: &str, how: &str, train: &str) -> CommandOutput {
    let train = format!("data.train={train:?}");
    let four = ["train.steps=4", "schedule.decay_steps=4", "train.checkpoint_every=2", &train];
    folder.train(run, &[&[how], &sets(&four)[..]].concat())
}

#[test]
fn other_text_of_equal_length_is_another_experiment() {
    let folder = Folder::new();
    start(&folder, "run", "text.txt");
    let text = folder.read("text.txt");
    let metrics = folder.read("run/metrics.jsonl");
    // The same bytes in another order, and one changed byte in the validation set.
    let (a, b) = text.split_at(text.len() / 3);
    let mut validation = text.clone().into_bytes();
    *validation.last_mut().unwrap() ^= 1;
    for other in [format!("{b}{a}").into_bytes(), validation] {
        fs::write(folder.path("text.txt"), other).unwrap();
        let texts =
            ["this config differs from the one", "data (what the files hold)", "xxh3", "--fork"];
        let refused = go_on(&folder, "run", "--resume", "text.txt").refused(78, &texts);
        let line = refused.stderr.lines().find(|line| line.contains("xxh3")).unwrap();
        assert!(line.contains(" -> ") && line.len() < 200, "{line}");
        assert_eq!(folder.read("run/metrics.jsonl"), metrics);
    }
    let fork = go_on(&folder, "run", "--fork", "text.txt").ok().stderr;
    assert!(fork.contains("another experiment from here on") && fork.contains("xxh3"), "{fork}");
    fs::write(folder.path("text.txt"), &text).unwrap();
    go_on(&folder, "run", "--resume", "text.txt").ok();
}

#[test]
fn data_sets_take_turns_by_their_weights_and_each_has_a_loss_of_its_own() {
    let folder = Folder::new();
    fs::write(folder.path("other.txt"), "0123456789 ".repeat(400)).unwrap();
    fs::write(folder.path("third.txt"), "xyz\n".repeat(400)).unwrap();
    let mixed = [
        "data.train=[(path: \"text.txt\", weight: 3), (path: \"other.txt\", name: \"numbers\")]",
        "train.steps=6",
        "schedule.decay_steps=6",
        "train.eval_every=3",
        "train.checkpoint_every=2",
        "precision=Fp32",
    ];
    let all = [&sets(&mixed)[..], &["--run-dir", "none"]].concat();
    let checked =
        folder.onebox(&[&["data", "check", "tiny.ron"], &all[..all.len() - 2]].concat()).ok();
    for text in ["text: 75.0 % of the samples; 1 file", "numbers: 25.0 % of the samples; 1 file"] {
        assert!(checked.stdout.contains(text), "{}", checked.stdout);
    }
    // A data set with a small share needs more steps for an epoch than one with every sample.
    let numbers = |text: &str| -> Vec<f64> {
        let (_, rest) = checked.stdout.split_once(text).unwrap();
        let words = rest.lines().next().unwrap().split([' ', ',']);
        words.filter_map(|word| word.parse().ok()).collect()
    };
    let [epoch, steps, global] = numbers("an epoch of numbers has ")[..] else { panic!() };
    assert!((steps - epoch / (0.25 * global)).abs() <= 0.051, "{}", checked.stdout);
    assert_eq!(numbers("as all have together:")[0], epoch + numbers("an epoch of text has ")[0]);
    let json = [&["data", "check", "tiny.ron", "--json"], &all[..all.len() - 2]].concat();
    let json: serde_json::Value = serde_json::from_str(&folder.onebox(&json).ok().stdout).unwrap();
    assert_eq!(
        (&json["sets"][1]["name"], &json["sets"][1]["share"]),
        (&"numbers".into(), &0.25.into())
    );
    assert_eq!(json["held_out_sets"].as_array().unwrap().len(), 2);
    let done = folder.train("mixed", &sets(&mixed)).ok();
    assert!(
        done.stderr.contains(" of text, ") && done.stderr.contains(" of numbers"),
        "{}",
        done.stderr
    );
    let evaluations = |run: &str| {
        let all = folder.metrics(run).into_iter().filter(|line| line["kind"] == "eval");
        all.collect::<Vec<_>>()
    };
    let [first, last] = &evaluations("mixed")[..] else { panic!("two evaluations") };
    for (line, names) in [(first, ["numbers", "text"]), (last, ["numbers", "text"])] {
        let sets = line["sets"].as_object().unwrap();
        assert_eq!(sets.keys().collect::<Vec<_>>(), names);
        let losses: Vec<f64> = sets.values().map(|loss| loss.as_f64().unwrap()).collect();
        let mean = line["loss"].as_f64().unwrap();
        assert!(losses[0].min(losses[1]) <= mean && mean <= losses[0].max(losses[1]));
    }
    let table = folder.onebox(&["report", "mixed", "--csv"]).ok().stdout;
    assert_eq!(table.matches(",eval/numbers,").count(), 2, "{table}");
    // Other ranks and an interruption give the same result.
    let ranks = [&mixed[..], &["parallel.tensor=1", "device.count=2"]].concat();
    folder.train("ranks", &sets(&ranks)).ok();
    let losses = |run: &str| -> Vec<f64> {
        let steps = folder.metrics(run).into_iter().filter(|line| line["kind"] == "step");
        steps.map(|line| line["loss"].as_f64().unwrap()).collect()
    };
    for (one, other) in losses("mixed").iter().zip(losses("ranks")) {
        assert!((one - other).abs() < 2e-5, "{one} {other}");
    }
    let parts = |steps: &'static str, how: &[&'static str]| {
        let sets_of = [&mixed[..1], &[steps], &mixed[2..]].concat();
        folder.train("parts", &[how, &sets(&sets_of)].concat()).ok();
    };
    parts("train.steps=2", &[]);
    parts("train.steps=6", &["--resume"]);
    assert_eq!(losses("mixed"), losses("parts"));
    // Other weights are other data.
    let other = mixed[0].replace("weight: 3", "weight: 2");
    let other = [&[other.as_str()], &mixed[1..]].concat();
    let refused = folder.train("mixed", &[&["--resume"], &sets(&other)[..]].concat());
    refused.refused(78, &["data.train", "differs from the one"]);

    let named = [
        "data.validation=[(name: \"third\", path: \"third.txt\"), (path: \"other.txt\")]",
        "train.steps=2",
        "train.eval_every=1",
        "train.eval_batches=0",
    ];
    folder.train("named", &sets(&named)).ok();
    let last = evaluations("named").pop().unwrap();
    assert_eq!(last["sets"].as_object().unwrap().keys().collect::<Vec<_>>(), ["other", "third"]);
    assert_eq!(last["whole"], true);
    let alone = ["data.validation=other.txt", named[1], named[2], named[3]];
    folder.train("alone", &sets(&alone)).ok();
    assert_eq!(last["sets"]["other"], evaluations("alone").pop().unwrap()["loss"]);
    assert_ne!(last["sets"]["other"], last["sets"]["third"]);

    // A file in both the training and the validation data is named, also among several.
    let of = |train: &str, validation: &str| {
        let sets = [format!("data.train={train}"), format!("data.validation={validation}")];
        let sets = sets.each_ref().map(String::as_str);
        folder.onebox(&[&["data", "check", "tiny.ron"], &self::sets(&sets)[..]].concat()).ok()
    };
    let both = "[(path: \"text.txt\"), (path: \"other.txt\")]";
    for (train, validation, file) in [
        (
            both,
            "[(path: \"third.txt\"), (path: \"other.txt\")]",
            Some("other.txt is in data.train"),
        ),
        (both, "third.txt", None),
        (both, "None", None),
        (
            "[(path: \"text.txt\"), (path: \"te*.txt\")]",
            "None",
            Some("text.txt is in two data sets"),
        ),
    ] {
        let output = of(train, validation).stderr;
        assert_eq!(output.contains("evaluation uses training data"), file.is_some(), "{output}");
        assert!(output.contains(file.unwrap_or("")), "{output}");
    }
    // The same file is there twice, each with its own loss.
    let twice = "data.validation=[(path: \"third.txt\"), (path: \"third.txt\")]";
    folder.train("twice", &sets(&[twice, named[1], named[2], named[3]])).ok();
    assert_eq!(evaluations("twice").pop().unwrap()["sets"].as_object().unwrap().len(), 2);
}

#[test]
fn files_that_sort_otherwise_are_other_data_and_another_place_is_not() {
    let folder = Folder::new();
    let text = folder.read("text.txt");
    let (a, b) = text.split_at(text.len() / 3);
    for (name, text) in [("one/a.txt", a), ("one/b.txt", b), ("two/b.txt", a), ("two/a.txt", b)] {
        fs::create_dir_all(folder.path(name).parent().unwrap()).unwrap();
        fs::write(folder.path(name), text).unwrap();
    }
    start(&folder, "run", "one");
    go_on(&folder, "run", "--resume", "two").refused(78, &["data (what the files hold)", "two"]);
    // Another mount, and another division into files: the tokens are the same.
    fs::create_dir(folder.path("mnt")).unwrap();
    fs::rename(folder.path("one"), folder.path("mnt/one")).unwrap();
    let moved = go_on(&folder, "run", "--resume", "mnt/one").ok().stderr;
    assert!(moved.contains("data.train") && moved.contains("mnt/one"), "{moved}");
    assert!(!moved.contains("another experiment"), "{moved}");
    start(&folder, "whole", "text.txt");
    go_on(&folder, "whole", "--resume", "mnt/one").ok();
    assert_eq!(folder.hash("run"), folder.hash("whole"));
}

#[test]
fn a_checkpoint_without_the_hash_of_its_data_is_compared_by_what_it_has() {
    let folder = Folder::new();
    start(&folder, "run", "text.txt");
    let manifest = folder.path("run/checkpoints/step-00000002/MANIFEST");
    let mut json: serde_json::Value =
        serde_json::from_str(fs::read_to_string(&manifest).unwrap().lines().next().unwrap())
            .unwrap();
    let seen = json["data"].as_object_mut().unwrap();
    let hashes = ["train_hash", "held_out_hash"].map(|key| seen.remove(key).unwrap());
    assert!(hashes.iter().all(|hash| hash.as_str().unwrap().len() == 32), "{hashes:?}");
    let json = json.to_string();
    let seal = xxhash_rust::xxh3::xxh3_128(json.as_bytes());
    fs::write(&manifest, format!("{json}\n{seal:032x}\n")).unwrap();
    fs::copy(folder.path("text.txt"), folder.path("copy.txt")).unwrap();
    // The checkpoint knows only the path, not the contents of the files.
    go_on(&folder, "run", "--resume", "copy.txt").refused(78, &["data.train", "copy.txt"]);
    let text = folder.read("text.txt");
    fs::write(folder.path("text.txt"), &text[1..]).unwrap();
    go_on(&folder, "run", "--resume", "text.txt").refused(78, &["tokens"]);
    fs::write(folder.path("text.txt"), text).unwrap();
    let output = go_on(&folder, "run", "--resume", "text.txt").ok().stderr;
    assert!(output.contains("has no hash of its data"), "{output}");
}

/// Runs `--dry-run --quiet` on this `data.train`.
fn dry(folder: &Folder, train: &str, more: &[&str]) -> CommandOutput {
    let train = format!("data.train={train:?}");
    let args = ["--dry-run", "-q", "--set", &train];
    folder.train("run", &[&args[..], &sets(more)].concat())
}

/// Files with a header or a name of something that is no text, then enough bytes.
fn foreign() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let record = b"{\"text\": \"the box holds\"}\n".repeat(100);
    let with = |head: &[u8]| [head, b"the box holds a model ".repeat(50).as_slice()].concat();
    vec![
        ("rows.jsonl", record.clone(), "JSON lines"),
        ("rows.txt", record, "JSON lines"),
        ("one.json", with(b"[\"a\", "), "JSON"),
        ("table.csv", b"question,answer\nwhere?,here\n".repeat(50), "a table"),
        ("table.tsv", b"question\tanswer\nwhere?\there\n".repeat(50), "data.format: Chat"),
        ("text.gz", with(b""), "gzip"),
        ("text.zst", with(b""), "zstd"),
        ("packed.txt", with(b"\xfd7zXZ\x00"), "xz"),
        ("table.parquet", with(b""), "Parquet"),
        ("table", with(b"PAR1"), "Parquet"),
        ("array.npy", with(b""), "NumPy"),
        ("array", with(b"\x93NUMPY\x01\x00"), "NumPy"),
        ("train.bin", with(b""), "data.format: U16"),
        ("corpus.idx", with(b"MMIDIDX\x00\x00"), "Megatron"),
        ("utf16.txt", with(b"\xff\xfeT\x00"), "UTF-16"),
        ("raw", with(b"a\x00b\x00"), "zero bytes"),
    ]
}

#[test]
fn what_is_no_text_is_refused_by_name_and_by_content() {
    let folder = Folder::new();
    for (name, content, kind) in foreign() {
        fs::write(folder.path(name), content).unwrap();
        dry(&folder, name, &[]).refused(66, &["data.train", name, kind, "data.format: Bytes"]);
        // The user insists on bytes.
        let taken = dry(&folder, name, &["data.format=Bytes"]).ok().stderr;
        assert!(taken.contains(name) && taken.contains("WARN"), "{name}: {taken}");
        let tokenizer = ["data.tokenizer=\"text.txt\""];
        assert_eq!(dry(&folder, name, &tokenizer).code, 66, "{name}");
    }
    // What begins as a compressed file is one, whatever its name is; an Arrow file gets a command.
    for (name, head, message) in [
        ("other.txt", &b"\x1f\x8b\x08\x00"[..], "it is compressed (gzip), and it is damaged: "),
        ("other", b"\x28\xb5\x2f\xfd", "it is compressed (zstd), and it is damaged: "),
        ("rows.arrow", b"", "from datasets import Dataset; Dataset.from_file("),
    ] {
        let content = [head, b"the box holds a model ".repeat(50).as_slice()].concat();
        fs::write(folder.path(name), content).unwrap();
        dry(&folder, name, &[]).refused(66, &["data.train", name, message]);
        let taken = dry(&folder, name, &["data.format=Bytes"]).ok().stderr;
        assert!(taken.contains(name) && taken.contains("WARN"), "{name}: {taken}");
    }
    let plain = dry(&folder, "text.txt", &[]).ok().stderr;
    assert!(!plain.contains("WARN"), "{plain}");
    // A glob names each of its files.
    dry(&folder, "*.jsonl", &[]).refused(66, &["rows.jsonl", "JSON lines"]);
    // Files of tokens have no header either.
    for (name, kind) in [("array.npy", "NumPy"), ("text.gz", "gzip"), ("corpus.idx", "Megatron")] {
        dry(&folder, name, &["data.format=U16"]).refused(66, &["data.train", name, kind]);
    }
}

#[test]
fn a_directory_says_what_it_leaves_out_and_refuses_to_lose_most() {
    let folder = Folder::new();
    let latin = b"caf\xe9 and more\n".repeat(100);
    let put = |name: &str, content: &[u8]| {
        fs::create_dir_all(folder.path(name).parent().unwrap()).unwrap();
        fs::write(folder.path(name), content).unwrap();
    };
    put("c/long.txt", &b"the box holds a model\n".repeat((9 << 20) / 22));
    let long = dry(&folder, "c", &[]).ok().stderr;
    assert!(long.contains("1 file, 9.00 MiB, 9437") && !long.contains("WARN"), "{long}");
    put("c/latin.txt", &latin);
    put("c/small.txt", b"\xff\xff");
    put("c/rows.jsonl", b"{}\n");
    // A picture or a program is no lost text.
    put("c/picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR");
    let output = dry(&folder, "c", &[]).ok().stderr;
    for text in ["WARN", "3 files", "latin.txt", "1.37 KiB", "not UTF-8", "UTF-8"] {
        assert!(output.contains(text), "`{text}` is not in:\n{output}");
    }
    put("d/small.txt", &b"the box\n".repeat(100));
    put("d/latin.txt", &latin);
    let more = ["1.37 KiB", "left out", "latin.txt", "not UTF-8", "800 B"];
    dry(&folder, "d", &[]).refused(66, &more);
    // A file that is named itself is refused, unless its bytes are requested.
    let convert = ["latin.txt", "not UTF-8", "iconv", "data.format: Bytes"];
    dry(&folder, "d/latin.txt", &[]).refused(66, &convert);
    dry(&folder, "d/latin.txt", &[]).refused(66, &["byte 0xe9 at offset 3"]);
    put("d/cut.txt", &[&b"the box\n".repeat(100)[..], b"caf\xc3"].concat());
    let whole = ["ends inside a character", "offset 803", "get the whole file"];
    dry(&folder, "d/cut.txt", &[]).refused(66, &whole);
    dry(&folder, "d/latin.txt", &["data.format=Bytes"]).ok();
    put("e/rows.jsonl", &b"{\"text\": 1}\n".repeat(100));
    dry(&folder, "e", &[]).refused(66, &["no usable file", "rows.jsonl", "JSON lines"]);
    put("f/part.bin", &[1; 400]);
    put("f/part.npy", &[1; 800]);
    let u16 = ["data.format=U16", "model.vocab=300"];
    dry(&folder, "f", &u16).refused(66, &["left out", "part.npy", "NumPy"]);
}

#[test]
fn a_file_that_is_named_as_a_validation_set_is_not_trained_on() {
    let folder = Folder::new();
    for name in ["d/train.bin", "d/val.bin", "e/train.bin", "e/other.bin"] {
        fs::create_dir_all(folder.path(name).parent().unwrap()).unwrap();
        fs::write(folder.path(name), [1, 0].repeat(400)).unwrap();
    }
    let u16 = ["data.format=U16", "model.vocab=300"];
    let texts = ["data.train", "train.bin", "val.bin", "data.validation"];
    dry(&folder, "d", &u16).refused(66, &texts);
    for train in ["e", "d/*.bin"] {
        dry(&folder, train, &u16).ok();
    }
}

#[test]
fn megatrons_prefix_and_index_are_understood() {
    let folder = Folder::new();
    fs::write(folder.path("corpus.bin"), [1, 0, 0, 0].repeat(400)).unwrap();
    // One sequence and one document, of `tokens` tokens.
    let index = |dtype: u8, tokens: u32| {
        let (head, counts) =
            ([b"MMIDIDX\0\0", &1u64.to_le_bytes()[..], &[dtype]].concat(), [1u64, 2]);
        let (counts, sizes) = (counts.map(u64::to_le_bytes), tokens.to_le_bytes());
        let ends = [0u64, 0, 1].map(u64::to_le_bytes);
        let all = [&head, counts.as_flattened(), &sizes, ends.as_flattened()].concat();
        fs::write(folder.path("corpus.idx"), all).unwrap();
    };
    index(4, 400);
    dry(&folder, "corpus", &[])
        .refused(66, &["corpus.bin", "data.format: Megatron", "does not exist"]);
    for name in ["corpus", "corpus.bin"] {
        let format = ["data.format=Megatron"];
        dry(&folder, name, &format).ok();
        let checked = folder.onebox(
            &[
                &["config", "check", "tiny.ron"],
                &sets(&[&format[..], &[&format!("data.train={name:?}")]].concat())[..],
            ]
            .concat(),
        );
        checked.ok();
    }
    // Numbers of 4 bytes, read as twice as many of 2 bytes, would make every other token 0.
    let u16 = ["data.format=U16", "model.vocab=300"];
    dry(&folder, "corpus.bin", &u16).refused(66, &["corpus.idx", "int32", "Megatron"]);
    dry(&folder, "corpus.bin", &["data.format=U32"]).ok();
    index(8, 800);
    dry(&folder, "corpus.bin", &u16).ok();
    let megatron = ["data.format=Megatron", "model.vocab=300"];
    dry(&folder, "corpus", &megatron).ok();
    // The file is longer than in its index.
    index(8, 700);
    dry(&folder, "corpus", &megatron).refused(66, &["corpus.idx counts 1400 bytes", "it has 1600"]);
    index(5, 200);
    dry(&folder, "corpus.bin", &u16).refused(66, &["corpus.idx", "int64"]);
    dry(&folder, "corpus.bin", &megatron).refused(66, &["corpus.idx", "int64"]);
    fs::remove_file(folder.path("corpus.idx")).unwrap();
    dry(&folder, "corpus.bin", &megatron).refused(66, &["corpus.idx is not there"]);
}

#[test]
fn a_finished_run_says_what_differs_and_refuses_another_experiment() {
    let folder = Folder::new();
    for (run, saved) in
        [("saved", "train.checkpoint_every=2"), ("bare", "train.checkpoint_every=0")]
    {
        folder.train(run, &[&["-q"], &sets(&[saved])[..]].concat()).ok();
        let metrics = folder.read(&format!("{run}/metrics.jsonl"));
        let resume = |more: &[&str]| {
            let all = [&[saved], more].concat();
            folder.train(run, &[&["--resume"], &sets(&all)[..]].concat())
        };
        for (set, text) in [("optimizer.lr=1", "0.003 -> 1"), ("model.layers=3", "2 -> 3")] {
            resume(&[set]).refused(78, &["this config differs from the one", text, "--fork"]);
        }
        let same = resume(&[]).ok().stderr;
        assert!(same.contains("nothing to do") && !same.contains("no effect"), "{same}");
        let output =
            resume(&["train.eval_every=3", "parallel.tensor=1", "parallel.data=4"]).ok().stderr;
        for text in [
            "nothing to do",
            "no effect",
            "train.eval_every",
            "2 -> 3",
            "parallel.tensor",
            "train.steps",
        ] {
            assert!(output.contains(text), "`{text}` is not in:\n{output}");
        }
        assert_eq!(folder.read(&format!("{run}/metrics.jsonl")), metrics);
    }
    // The same tokens are under another name.
    fs::rename(folder.path("text.txt"), folder.path("moved.txt")).unwrap();
    let resume = |train: &str| {
        let train = format!("data.train={train:?}");
        let all = ["train.checkpoint_every=2", &train];
        folder.train("saved", &[&["--resume"], &sets(&all)[..]].concat())
    };
    assert!(resume("moved.txt").ok().stderr.contains("moved.txt"));
    fs::write(folder.path("moved.txt"), folder.read("moved.txt").to_uppercase()).unwrap();
    resume("moved.txt").refused(78, &["data (what the files hold)"]);
    // No data is read if no steps are left.
    folder.train("saved", &["--resume", "--set", "train.checkpoint_every=2"]).ok();
}

#[test]
fn config_check_looks_at_the_data_beside_everything_else() {
    let folder = Folder::new();
    let check = |more: &[&str]| {
        folder.onebox(&[&["config", "check", "tiny.ron"], &sets(more)[..]].concat())
    };
    check(&[]).ok();
    fs::write(folder.path("tokens.bin"), [44, 1].repeat(400)).unwrap();
    fs::write(folder.path("rows.jsonl"), "{}\n").unwrap();
    fs::write(folder.path("bad.json"), "[]").unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["data.train=\"nosuch.txt\""], "nosuch.txt: no such file"),
        (&["data.validation=\"nosuch.txt\""], "nosuch.txt: no such file"),
        (&["data.train=\"rows.jsonl\""], "JSON lines"),
        (&["data.train=\"tokens.bin\"", "data.format=U16"], "token 0, at byte 0, is 300"),
        (&["data.tokenizer=\"bad.json\""], "bad.json: cannot be used"),
        (&["model.seq_len=20000"], "training part has"),
    ];
    for (set, text) in cases {
        let checked = check(set).refused(66, &["error: data.", text, "1 error in tiny.ron"]);
        let dry = folder.train("run", &[&["--dry-run"], &sets(set)[..]].concat());
        // The words after the place are the same.
        assert!(dry.code == 66 && dry.stderr.contains(text), "{}", dry.stderr);
        assert_eq!(checked.stderr.contains("--set data."), set[0].starts_with("data."), "{set:?}");
    }
    let texts = ["optimizer.lr", "nosuch.txt: no such file", "2 errors in tiny.ron"];
    check(&["optimizer.lr=-1", "data.train=\"nosuch.txt\""]).refused(78, &texts);
    // The error has a place in the file.
    let config = common::TINY.replace("text.txt", "nosuch.txt");
    fs::write(folder.path("tiny.ron"), config).unwrap();
    check(&[]).refused(66, &["--> tiny.ron:8:", "data: (train: \"nosuch.txt\")"]);
}

#[test]
fn no_name_of_a_file_reaches_the_terminal_as_it_is() {
    let folder = Folder::new();
    let name = "a\u{1b}]0;pwn\u{7}\u{1b}[31m\u{202e}\nX.txt";
    fs::create_dir(folder.path("d")).unwrap();
    fs::write(folder.path("d").join(name), b"{}\n{}\n").unwrap();
    for command in [&["train", "tiny.ron", "--dry-run"][..], &["config", "check", "tiny.ron"]] {
        let refused = folder.onebox(&[command, &sets(&["data.train=\"d/*.txt\""])[..]].concat());
        let output = refused.refused(66, &["X.txt"]).stderr;
        assert!(!output.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{output:?}");
    }
}
