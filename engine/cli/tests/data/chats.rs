//! Chats and texts in JSON lines, from the view of a user.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod reports;

use crate::common::{Folder, with_chats};
use std::fs;
use std::path::Path;

#[test]
fn a_model_learns_the_answers_of_chats() {
    let folder = with_chats();
    let shown = |args: &[&str]| {
        let all = [&["data", "show", "chat.ron"], args].concat();
        folder.onebox(&all).ok().stdout
    };
    let sample: serde_json::Value =
        serde_json::from_str(&shown(&["--json", "--sample", "5"])).unwrap();
    let list = |key: &str| sample[key].as_array().unwrap().clone();
    let (tokens, counted) = (list("tokens"), list("counted"));
    assert_eq!((tokens.len(), list("documents")), (counted.len(), vec![0.into()]));
    let targets = counted.iter().filter(|counts| **counts == true).count();
    let text = shown(&["--sample", "5"]);
    let head = format!(
        "sample 5 of the run, one of 54 of an epoch: {} tokens, {targets} targets",
        tokens.len()
    );
    assert!(text.starts_with(&head), "{text}");
    assert!(
        text.contains("«<|im_start|>»assistant\n[[") && text.contains("«<|im_end|>»]]\n"),
        "{text}"
    );
    let sets = ["--set", "model.seq_len=256"];
    let wasteful = folder.onebox(&[&["data", "check", "chat.ron"], &sets[..]].concat()).ok().stdout;
    assert!(wasteful.contains(" % full: several rows share one with data.packing: Documents"));
    let checked = folder.onebox(&["data", "check", "chat.ron"]).ok().stdout;
    assert!(checked.contains("60 rows: 54 to train, 6 for validation"), "{checked}");
    assert!(checked.contains("an epoch has 54 samples, which are 6.8 steps of 8"), "{checked}");
    let args = ["train", "chat.ron", "--run-dir", "run"];
    let done = folder.onebox(&args).ok();
    assert!(done.stderr.contains("54 to train, 6 for validation"), "{}", done.stderr);
    assert!(done.stderr.contains("0.59 epochs of 54 samples"), "{}", done.stderr);
    let first = &folder.metrics("run")[0];
    assert!(first["targets"].as_u64().is_some_and(|n| n > 16 && n < 8 * 64), "{first}");
    for packing in ["None", "Documents"] {
        let set = format!("data.packing={packing}");
        let dir = format!("held-{packing}");
        folder.onebox(&["train", "chat.ron", "--run-dir", &dir, "--set", &set]).ok();
        // Counts as `data show` prints them: the last token of a document is only a target.
        let (mut documents, mut filled) = (0, 0);
        for sample in 0..8 {
            let sample = sample.to_string();
            let args = ["data", "show", "chat.ron", "--json", "--sample", &sample, "--set", &set];
            let shown: serde_json::Value =
                serde_json::from_str(&folder.onebox(&args).ok().stdout).unwrap();
            let many = |key: &str| shown[key].as_array().unwrap().len();
            documents += many("documents");
            filled += many("tokens") - many("documents");
        }
        let first = &folder.metrics(&dir)[0];
        assert_eq!(first["documents"], documents, "{packing}: {first}");
        let padding = 1.0 - filled as f64 / (8.0 * 64.0);
        assert!((first["padding"].as_f64().unwrap() - padding).abs() < 1e-12, "{packing}: {first}");
    }
    let losses = |run: &str| -> Vec<f64> {
        let lines = folder.metrics(run);
        let steps = lines.iter().filter(|line| line["kind"] == "step");
        steps.map(|line| line["loss"].as_f64().unwrap()).collect()
    };
    let other = [
        &["train", "chat.ron", "--run-dir", "other", "--set", "parallel.tensor=2"][..],
        &["--set", "parallel.data=1", "--set", "batch.micro=1"],
    ];
    folder.onebox(&other.concat()).ok();
    for (a, b) in losses("run").iter().zip(losses("other")) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
    let args = ["generate", "run", "--chat", "--prompt", "what holds?", "--tokens", "3"];
    folder.onebox(&args).ok();
}

#[test]
fn a_run_of_epochs_has_as_many_steps_as_they_need() {
    let folder = with_chats();
    let ron = folder.read("chat.ron").replace("steps: 4, eval_every: 2", "epochs: 1.5");
    fs::write(folder.path("epochs.ron"), &ron).unwrap();
    let train = |args: &[&str]| folder.onebox(&[&["train", "epochs.ron"], args].concat());
    // 81 samples of 54 per epoch, 8 per step, need 11 steps.
    let stderr = train(&["--run-dir", "run"]).ok().stderr;
    assert!(stderr.contains("done    11 steps"), "{stderr}");
    let config = folder.read("run/config.ron");
    for expected in ["steps: 11,", "decay_steps: 11,", "epochs: None,"] {
        assert!(config.contains(expected), "{expected}: {config}");
    }
    let stderr = train(&["--run-dir", "run", "--resume"]).ok().stderr;
    assert!(stderr.contains("finished at step 11"), "{stderr}");
    train(&["--dry-run", "--set", "train.steps=3"])
        .refused(78, &["a run has steps or epochs, not both", "3 steps", "1.5 epochs"]);
    train(&["--dry-run", "--set", "schedule.warmup_steps=12"]).refused(78, &["warmup_steps"]);
}

/// A model without a folder gets the template from the folder of its tokenizer.
#[test]
fn a_new_model_learns_chats_by_the_template_beside_its_tokenizer() {
    let folder = with_chats();
    let from = Path::new(env!("CARGO_MANIFEST_DIR"));
    let from = from.join("../../tests/fixtures/hf-chat-tiny");
    let ron = format!(
        "(model: (layers: 1, hidden: 32, heads: 4, vocab: 307, seq_len: 64), device: Cpu(memory: \"64MiB\"),
          precision: Fp32, batch: (micro: 8), train: (steps: 2),
          data: (train: \"chats.jsonl\", format: Chat, tokenizer: {from:?}))"
    );
    fs::write(folder.path("new.ron"), ron).unwrap();
    let stderr = folder.onebox(&["train", "new.ron", "--run-dir", "new"]).ok().stderr;
    assert!(stderr.contains("generate new --chat\n"), "{stderr}");
    let args = ["generate", "new", "--chat", "--prompt", "what?", "--tokens", "2", "--json"];
    folder.onebox(&args).ok();
    let is_kept = |name: &str| folder.path("new/model.from").join(name).exists();
    assert!(is_kept("tokenizer_config.json") && !is_kept("config.json"));
}

/// Packed chats need fewer steps for 54 samples, and a long run resumes inside of an epoch.
#[test]
fn chats_side_by_side_fill_samples_and_resume() {
    let folder = with_chats();
    let packed = ["--set", "data.packing=Documents", "--set", "model.seq_len=256"];
    let onebox = |args: &[&str]| folder.onebox(&[args, &packed].concat()).ok();
    let checked = onebox(&["data", "check", "chat.ron"]).stdout;
    let samples = |text: &str| -> usize {
        let (_, rest) = text.split_once("an epoch has ").unwrap();
        rest.split_once(" samples").unwrap().0.parse().unwrap()
    };
    assert!(checked.contains("60 rows: 54 to train, 6 for validation; samples: "), "{checked}");
    assert!((6..20).contains(&samples(&checked)), "{checked}");
    let shown = onebox(&["data", "show", "chat.ron", "--json"]).stdout;
    let sample: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let list = |key: &str| sample[key].as_array().unwrap().clone();
    let (tokens, counted, starts) = (list("tokens"), list("counted"), list("documents"));
    assert!(starts.len() > 2 && starts[0] == 0 && tokens.len() == counted.len());
    for start in &starts {
        let start = start.as_u64().unwrap() as usize;
        // Every document begins with the control token of its first turn.
        assert_eq!((&tokens[start], &counted[start]), (&tokens[0], &false.into()));
    }
    let text = onebox(&["data", "show", "chat.ron"]).stdout;
    let parts = text.matches("\n---- document ").count();
    assert_eq!(parts, starts.len());
    assert!(text.contains(&format!("{parts} documents, {} tokens", tokens.len())), "{text}");

    let losses = |run: &str| -> Vec<String> {
        let lines = folder.metrics(run);
        let steps = lines.iter().filter(|line| line["kind"] == "step");
        steps.map(|line| line["loss"].to_string()).collect()
    };
    let train = |args: &[&str]| {
        let sets = [
            "batch.micro=1",
            "batch.global=2",
            "train.checkpoint_every=1",
            "schedule.decay_steps=8",
        ];
        let sets: Vec<&str> = sets.into_iter().flat_map(|set| ["--set", set]).collect();
        onebox(&[&["train", "chat.ron"], &*sets, &["--set"], args].concat())
    };
    train(&["train.steps=8", "--run-dir", "whole"]);
    train(&["train.steps=3", "--run-dir", "parts"]);
    train(&["train.steps=8", "--run-dir", "parts", "--resume"]);
    assert_eq!(losses("whole"), losses("parts"));
    assert_eq!(losses("whole").len(), 8);
}

#[test]
fn chats_are_tokenized_once_and_anew_with_another_system_prompt() {
    let folder = with_chats();
    let rows = folder.read("chats.jsonl").repeat(8) + "{\"messages\": []}\n";
    fs::write(folder.path("chats.jsonl"), rows).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let check = |sets: &[&str]| {
        let all = [&["data", "check", "chat.ron"], sets].concat();
        let mut command = folder.command(&all);
        command.env("XDG_CACHE_HOME", cache.path());
        let done = Folder::done(command).ok();
        (done.stdout, done.stderr)
    };
    let cached_files = || {
        let folder = fs::read_dir(cache.path().join("onebox/tokens")).unwrap();
        folder.filter(|entry| !entry.as_ref().unwrap().path().is_dir()).count()
    };
    let first = check(&[]);
    assert!(first.1.contains("1 of 481 rows cannot be used (chats.jsonl line 481"), "{}", first.1);
    let after_first = cached_files();
    assert!(after_first > 0);
    assert_eq!((check(&[]), cached_files()), (first.clone(), after_first));
    let other = check(&["--set", "data.system=\"a system\""]);
    assert!(other.0 != first.0 && cached_files() > after_first);
    // Other samples use the same rows.
    let packed = check(&["--set", "data.packing=Documents"]);
    assert!(packed.0.contains("% full") && cached_files() == 2 * after_first, "{}", packed.0);
}

#[test]
fn long_texts_are_divided_and_lose_no_target() {
    let folder = with_chats();
    let text =
        |i: usize| format!("{{\"text\": \"{}\"}}\n", "the box holds a model ".repeat(1 + i % 9));
    fs::write(folder.path("texts.jsonl"), (0..40).map(text).collect::<String>()).unwrap();
    let check = |seq_len: &str| {
        let texts = ["data.train=texts.jsonl", "data.format=Jsonl(text: \"text\")"];
        let sets = texts.into_iter().chain(["data.packing=Documents", seq_len]);
        let all = ["data", "check", "chat.ron", "--json"].into_iter();
        folder.onebox(&all.chain(sets.flat_map(|set| ["--set", set])).collect::<Vec<_>>()).ok()
    };
    let checked = check("model.seq_len=32");
    let divided = "of 40 rows have more tokens than model.seq_len + 1 and are divided";
    assert!(checked.stderr.contains(divided), "{}", checked.stderr);
    let whole = check("model.seq_len=256");
    assert!(!whole.stderr.contains("divided"), "{}", whole.stderr);
    let tokens = |stdout: &str| {
        let output: serde_json::Value = serde_json::from_str(stdout).unwrap();
        output["tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(&checked.stdout), tokens(&whole.stdout));
}

/// Prepares the chats of `chat.ron` into `out`, and returns the config line that trains on them.
fn prepared(folder: &Folder, out: &str, sets: &[&str]) -> String {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let all: Vec<&str> = ["data", "prepare", "chat.ron", out].into_iter().chain(sets).collect();
    let output = folder.onebox(&all).ok().stdout;
    let data = output.lines().find_map(|line| line.trim().strip_prefix("data: ")).unwrap();
    format!("data={}", data.strip_suffix(',').unwrap())
}

#[test]
fn prepared_chats_train_as_the_chats_do_on_any_layout() {
    let folder = with_chats();
    let more = [
        serde_json::json!({ "prompt": "a box of", "completion": " one model, and a half" }),
        serde_json::json!({ "messages": [] }),
        serde_json::json!({ "messages": [
            { "role": "user", "content": "a" },
            { "role": "assistant", "content": "b" },
            { "role": "user", "content": "and what is in the other box?" },
            { "role": "assistant", "content": "c" },
        ]}),
    ];
    let chats = folder.read("chats.jsonl");
    let held: String = chats.lines().skip(40).flat_map(|line| [line, "\n"]).collect();
    fs::write(folder.path("held.jsonl"), held).unwrap();
    let rows = more.iter().fold(chats, |all, row| format!("{all}{row}\n"));
    fs::write(folder.path("chats.jsonl"), rows).unwrap();
    let onebox = |args: &[&str], sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        folder.onebox(&args.iter().copied().chain(sets).collect::<Vec<_>>()).ok()
    };
    let alone = "data.packing=None";
    let packed = "data.packing=Documents";
    let held = "data.validation=\"held.jsonl\"";
    for (number, (sets, layout)) in [
        (&[alone][..], [1, 2, 2]),
        (&[alone, "data.truncate=true", "model.seq_len=48", held], [2, 1, 4]),
        (&[packed, "model.seq_len=256"], [2, 2, 1]),
        (&[packed, "model.seq_len=128", "data.system=\"a box\""], [1, 2, 1]),
    ]
    .into_iter()
    .enumerate()
    {
        let data = prepared(&folder, &format!("made-{number}"), sets);
        assert!(data.contains("format: Megatron, packing: "), "{data}");
        let keys = ["parallel.tensor", "parallel.data", "batch.micro", "device.count"];
        let layout = layout.into_iter().chain([layout[0] * layout[1]]);
        let layout: Vec<_> = keys.iter().zip(layout).map(|(key, n)| format!("{key}={n}")).collect();
        let mut shape: Vec<&str> = layout.iter().map(String::as_str).collect();
        shape.extend(sets.iter().filter(|set| set.starts_with("model.")));
        let (mut of_rows, mut of_tokens) = (shape.clone(), shape);
        of_rows.extend(sets.iter().filter(|set| set.starts_with("data.")));
        of_tokens.push(&data);
        let same = |args: &[&str], keys: &[&str]| {
            let [one, other] = [&of_rows, &of_tokens].map(|sets| {
                let output =
                    onebox(&[&["data", args[0], "chat.ron", "--json"], &args[1..]].concat(), sets);
                let output: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
                keys.iter().map(|key| output[key].clone()).collect::<Vec<_>>()
            });
            assert_eq!(one, other, "{sets:?}");
        };
        same(&["check"], &["train_hash", "held_out_hash", "samples", "held_out_samples"]);
        for sample in ["0", "1", "7"] {
            same(&["show", "--sample", sample], &["tokens", "counted", "documents"]);
        }
        let run = |name: &str, sets: &[&str], args: &[&str]| {
            let run = format!("{name}-{number}");
            onebox(&[&["train", "chat.ron", "-q", "--run-dir", &run], args].concat(), sets);
            folder.hash(&run)
        };
        let whole = run("rows", &of_rows, &[]);
        assert_eq!(run("tokens", &of_tokens, &[]), whole, "{sets:?}");
        // Both runs give the same answers and exports.
        let talk = |name: &str| {
            let run = format!("{name}-{number}");
            let args = ["generate", &run, "--chat", "--prompt", "what holds?", "--tokens", "4"];
            let out = format!("out-{run}");
            onebox(&["checkpoint", "export", &run, &out, "--to", "safetensors"], &[]);
            let exported = fs::read_dir(folder.path(&out)).unwrap().map(|entry| {
                let path = entry.unwrap().path();
                (path.file_name().unwrap().to_owned(), fs::read(path).unwrap())
            });
            let exported: std::collections::BTreeMap<_, _> = exported.collect();
            assert!(exported.contains_key(std::ffi::OsStr::new("tokenizer_config.json")));
            (onebox(&args, &[]).stdout, exported)
        };
        assert_eq!(talk("tokens"), talk("rows"));
        // Documents are equal except for the names of their files.
        let text = |sets: &[&str]| {
            let text = onebox(&["data", "show", "chat.ron"], sets).stdout;
            text.lines()
                .filter(|line| !line.starts_with("----"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(text(&of_tokens), text(&of_rows));
        // Each kind of data continues a run that the other kind has begun.
        let both = [&of_rows, &of_tokens];
        let (first, then) = (both[number % 2], both[(number + 1) % 2]);
        let some = ["schedule.decay_steps=4", "train.checkpoint_every=1"];
        run("both", &[&first[..], &some, &["train.steps=2"]].concat(), &[]);
        let hash = run("both", &[&then[..], &some].concat(), &["--resume"]);
        assert_eq!(hash, whole, "{sets:?}");
    }
}

/// Puts `--set` before `data` and before each of `more`.
fn with<'a>(data: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&[data], more].concat().into_iter().flat_map(|set| ["--set", set]).collect()
}

#[test]
fn a_mask_is_asked_for_and_looked_at() {
    let folder = with_chats();
    let data = prepared(&folder, "made", &[]);
    let check = |more: &[&str]| {
        folder.onebox(&[&["data", "check", "chat.ron"], &with(&data, more)[..]].concat())
    };
    let output = check(&[]).ok().stdout;
    assert!(output.contains("60 documents: 54 to train, 6 for validation"), "{output}");
    check(&["data.packing=Windows"])
        .refused(66, &["000000.chat.mask says which of its tokens count"]);
    let mask = folder.path("made/train/000000.chat.mask");
    let good = fs::read(&mask).unwrap();
    let mut bad = good.clone();
    bad[300] ^= 4;
    fs::write(&mask, &bad).unwrap();
    check(&[]).refused(
        66,
        &["000000.chat.bin: its mask ", "000000.chat.mask is damaged, at byte 0: the "],
    );
    fs::write(&mask, &good[..99]).unwrap();
    check(&[]).refused(66, &["000000.chat.mask is damaged, at byte 99: the file has 99 bytes"]);
    // An incomplete mask is rebuilt.
    assert!(!prepared(&folder, "made", &[]).is_empty());
    assert_eq!(fs::read(&mask).unwrap(), good);
    let other = ["data", "prepare", "chat.ron", "made", "--set", "data.system=\"another\""];
    folder.onebox(&other).refused(73, &["another data.system: \"\" then, and \"another\" now; "]);
}

#[test]
fn prepared_chats_without_their_masks_are_refused_wherever_they_are() {
    let folder = with_chats();
    let data = prepared(&folder, "made", &[]);
    let onebox =
        |args: &[&str], more: &[&str]| folder.onebox(&[args, &with(&data, more)[..]].concat());
    folder.shell("mkdir bare && cp made/train/*.bin made/train/*.idx bare").ok();
    let lost =
        ["bare/000000.chat.bin: it is a part of chats", "bare/000000.chat.mask is not there"];
    let windows = "data.packing=Windows";
    for more in [&[][..], &[windows], &[windows, "data.format=U16"]] {
        for named in ["bare", "bare/000000.chat.bin"] {
            let named = format!("data.train={named:?}");
            let more = [&[&named[..]], more].concat();
            for args in [["data", "check", "chat.ron"], ["config", "check", "chat.ron"]] {
                onebox(&args, &more).refused(66, &lost);
            }
            onebox(&["train", "chat.ron", "--run-dir", "run"], &more).refused(66, &lost);
        }
    }
    // A user who removes the word from the names accepts the files without masks.
    folder.shell("cd bare && mv 000000.chat.bin 0.bin && mv 000000.chat.idx 0.idx").ok();
    let all = onebox(&["data", "check", "chat.ron"], &["data.train=\"bare\""]).ok().stdout;
    assert!(all.contains("60 documents"), "{all}");
    // Parts of chats had this name in earlier versions.
    folder.shell("cp made/train/*.mask bare/0.mask").ok();
    let hashes = |more: &[&str]| {
        let output = onebox(&["data", "check", "chat.ron", "--json"], more).ok().stdout;
        let output: serde_json::Value = serde_json::from_str(&output).unwrap();
        ["train_hash", "held_out_hash"].map(|key| output[key].clone())
    };
    assert_eq!(hashes(&["data.train=\"bare\""]), hashes(&[]));
}

/// A model without a folder gets the tokenizer and template of prepared chats.
#[test]
fn a_run_on_prepared_chats_keeps_their_tokenizer_and_template() {
    let folder = with_chats();
    let data = prepared(&folder, "made", &[]);
    assert!(data.contains("tokenizer: \""), "{data}");
    let ron = format!(
        "(model: (layers: 1, hidden: 32, heads: 4, vocab: 307, seq_len: 64), device: Cpu(memory: \"64MiB\"),
          precision: Fp32, batch: (micro: 8), train: (steps: 2), {})",
        data.replacen("data=", "data: ", 1)
    );
    fs::write(folder.path("new.ron"), ron).unwrap();
    folder.onebox(&["config", "check", "new.ron"]).ok();
    let stderr = folder.onebox(&["train", "new.ron", "--run-dir", "new"]).ok().stderr;
    assert!(stderr.contains("generate new --chat\n"), "{stderr}");
    folder.onebox(&["generate", "new", "--chat", "--prompt", "what?", "--tokens", "2"]).ok();
    let is_kept = |name: &str| folder.path("new/model.from").join(name).exists();
    assert!(is_kept("tokenizer_config.json") && !is_kept("config.json"));
    let without = ["train", "new.ron", "--run-dir", "none", "--set", "data.tokenizer=None"];
    let stderr = folder.onebox(&without).ok().stderr;
    assert!(!stderr.contains("--chat"), "{stderr}");
    let numbers = ["generate", "none", "--prompt", "5 6", "--tokens", "2"];
    folder.onebox(&numbers).ok();
}
