//! Shapes of rows, names of columns and `data.targets`, from the view of a user.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder, with_chats};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Number of rows of each file.
const ROWS: usize = 60;

/// Writes [`ROWS`] rows into a file.
fn put(folder: &Folder, name: &str, row: impl Fn(usize) -> Value) {
    let rows: String = (0..ROWS).map(|i| format!("{}\n", row(i))).collect();
    fs::write(folder.path(name), rows).unwrap();
}

/// `onebox` with a `--set` before each of `sets`.
fn with(folder: &Folder, args: &[&str], sets: &[&str]) -> CommandOutput {
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    folder.onebox(&args.iter().copied().chain(sets).collect::<Vec<_>>())
}

fn check(folder: &Folder, sets: &[&str]) -> CommandOutput {
    with(folder, &["data", "check", "chat.ron", "--json"], sets)
}

/// Hashes of the tokens and targets that `data check` finds.
fn hashes(folder: &Folder, sets: &[&str]) -> [Value; 2] {
    let output: Value = serde_json::from_str(&check(folder, sets).ok().stdout).unwrap();
    ["train_hash", "held_out_hash"].map(|key| output[key].clone())
}

fn chat(i: usize) -> Value {
    json!({ "messages": [
        { "role": "user", "content": format!("what holds {i}?") },
        { "role": "assistant", "content": format!("the box {i}") },
    ]})
}

/// Config of the model without its chat template.
fn with_base() -> Folder {
    let folder = with_chats();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    folder.shell(&format!("cp -r '{}' base", from.display())).ok();
    let settings = folder.path("base/tokenizer_config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&settings).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("chat_template");
    fs::write(&settings, json.to_string()).unwrap();
    let ron = folder.read("chat.ron").replace(&format!("{from:?}"), "\"base\"");
    fs::write(folder.path("chat.ron"), ron.replace("seq_len: 64", "seq_len: 256")).unwrap();
    folder
}

/// Rows of other programs give the tokens and targets of the chats that they stand for.
#[test]
fn rows_of_other_programs_train_as_chats_do() {
    let folder = with_chats();
    put(&folder, "chats.jsonl", chat);
    let wanted = hashes(&folder, &[]);
    let (ask, say) = (|i: usize| format!("what holds {i}?"), |i: usize| format!("the box {i}"));
    put(
        &folder,
        "alpaca.jsonl",
        |i| json!({ "instruction": ask(i), "input": "", "output": say(i) }),
    );
    put(&folder, "pairs.jsonl", |i| json!({ "question": ask(i), "answer": say(i) }));
    put(
        &folder,
        "shared.jsonl",
        |i| json!({ "conversations": [{ "from": "human", "value": ask(i) }, { "from": "gpt", "value": say(i) }] }),
    );
    put(
        &folder,
        "roles.jsonl",
        |i| json!({ "messages": [{ "role": "User", "content": ask(i) }, { "role": "bot", "content": say(i) }] }),
    );
    put(&folder, "named.jsonl", |i| json!({ "q": ask(i), "reply": say(i), "id": i }));
    let names = "data.columns=(instruction: \"q\", output: \"reply\")";
    for (file, more) in
        [("alpaca", &[][..]), ("pairs", &[]), ("shared", &[]), ("roles", &[]), ("named", &[names])]
    {
        let train = format!("data.train={file}.jsonl");
        assert_eq!(hashes(&folder, &[&[&*train], more].concat()), wanted, "{file}");
    }
    let sets = ["data.train=named.jsonl", names];
    let shown = with(&folder, &["data", "show", "chat.ron"], &sets).ok().stdout;
    assert!(shown.contains("«<|im_start|>»assistant\n[[the box "), "{shown}");
    with(&folder, &["train", "chat.ron", "--run-dir", "run"], &sets).ok();
    // The run's own config has the names.
    assert!(folder.read("run/config.ron").contains("instruction: \"q\""));
    let unnamed = check(&folder, &["data.train=named.jsonl"]);
    let remedy = "name the columns of the question and of the answer, data.columns: (instruction: \"..\", output: \"..\")";
    unnamed.refused(66, &["it has `id`, `q`, `reply`", remedy]);
    let wrong = check(&folder, &["data.train=named.jsonl", "data.columns.output=\"answer\""]);
    wrong.refused(
        66,
        &[
            "named.jsonl lines 1, 2, 3 and 57 more: it has no `answer`, which data.columns names as `output`; it has `id`, `q`, `reply`",
        ],
    );
}

/// Questions and answers train a model without a chat template; messages do not.
#[test]
fn a_base_model_learns_from_plain_texts() {
    let folder = with_base();
    put(
        &folder,
        "texts.jsonl",
        |i| json!({ "prompt": format!("the box {i}"), "completion": " holds a model" }),
    );
    let texts = ["data.train=texts.jsonl"];
    let shown = with(&folder, &["data", "show", "chat.ron"], &texts).ok().stdout;
    assert!(shown.contains("[[ holds a model«<|im_end|>»]]"), "{shown}");
    let done = with(&folder, &["train", "chat.ron", "--run-dir", "run"], &texts).ok().stderr;
    assert!(done.contains("generate run") && !done.contains("--chat"), "{done}");
    put(
        &folder,
        "alpaca.jsonl",
        |i| json!({ "instruction": "name it", "input": format!("box {i}"), "output": "a box" }),
    );
    let shown =
        with(&folder, &["data", "show", "chat.ron"], &["data.train=alpaca.jsonl"]).ok().stdout;
    assert!(shown.contains("\n\n### Instruction:\nname it\n\n### Input:\nbox "), "{shown}");
    assert!(shown.contains("\n\n### Response:[[a box«<|im_end|>»]]"), "{shown}");
    check(&folder, &[]).refused(
        66,
        &[
            "chats.jsonl lines 1, 2, 3 and 57 more: it has messages, and the model has no chat template that writes them",
            "put the chat_template.jinja of such a model beside the tokenizer, or write `prompt` and `completion`",
        ],
    );
    let system = ["data.train=texts.jsonl", "data.system=\"be short\""];
    check(&folder, &system).refused(66, &["no chat template, which alone writes data.system"]);
}

/// Targets are a part of what a run learns: of the hashes, the cache, prepared folders and checkpoints.
#[test]
fn other_targets_are_other_data() {
    let folder = with_chats();
    put(&folder, "chats.jsonl", |i| {
        let mut two = chat(i)["messages"].as_array().unwrap().clone();
        two.extend(chat(i + 1)["messages"].as_array().unwrap().clone());
        json!({ "messages": two })
    });
    let ron = folder.read("chat.ron").replace("seq_len: 64", "seq_len: 128");
    fs::write(folder.path("chat.ron"), ron).unwrap();
    let kinds = ["data.targets=Answers", "data.targets=LastAnswer", "data.targets=All"];
    let found = kinds.map(|kind| hashes(&folder, &[kind]));
    assert_eq!(found[0], hashes(&folder, &[]));
    assert!(found[0] != found[1] && found[1] != found[2] && found[0] != found[2]);
    let show = |kind: &str| with(&folder, &["data", "show", "chat.ron"], &[kind]).ok().stdout;
    let runs = kinds.map(|kind| show(kind).matches("[[").count());
    // The heading explains the marks, which are left out where every token is a target.
    assert_eq!(runs, [3, 2, 0]);
    assert!(show(kinds[2]).contains(": 66 tokens, 65 targets, "), "{}", show(kinds[2]));
    for (kind, wanted) in kinds.iter().zip(&found) {
        let out = format!("made-{}", &kind[13..]);
        let output = with(&folder, &["data", "prepare", "chat.ron", &out], &[kind]).ok().stdout;
        let data = output.lines().find_map(|line| line.trim().strip_prefix("data: ")).unwrap();
        let data = format!("data={}", data.strip_suffix(',').unwrap());
        assert_eq!(hashes(&folder, &[&data]), *wanted, "{kind}");
    }
    with(&folder, &["data", "prepare", "chat.ron", "made-All"], &[])
        .refused(73, &["another data.targets: All then, and none now"]);
    let train = |kind: &str, args: &[&str]| {
        let steps = ["train.checkpoint_every=1", kind];
        with(&folder, &[&["train", "chat.ron", "--run-dir", "run"], args].concat(), &steps)
    };
    train(kinds[0], &[]).ok();
    train(kinds[2], &["--resume"]).refused(78, &["data.targets", "Answers", "All"]);
    let first = &folder.metrics("run")[0];
    let all = with(&folder, &["train", "chat.ron", "--run-dir", "all"], &[kinds[2]]);
    all.ok();
    let of_all = &folder.metrics("all")[0];
    assert!(of_all["targets"].as_u64() > first["targets"].as_u64(), "{of_all} {first}");
}

/// onebox names each kind of row that it does not train on once, with the lines and the remedy.
#[test]
fn rows_that_onebox_does_not_train_on_are_named_with_their_remedy() {
    let folder = with_chats();
    let refused = |row: Value, printed: &str| {
        put(&folder, "rows.jsonl", |_| row.clone());
        let printed = format!("rows.jsonl lines 1, 2, 3 and 57 more: {printed}");
        check(&folder, &["data.train=rows.jsonl"]).refused(66, &[&printed]);
    };
    refused(
        json!({ "prompt": "a", "chosen": "b", "rejected": "c" }),
        "it has `chosen`: it is a preference pair, and onebox has no DPO. To learn the better answer alone, set data.columns: \
         (output: \"chosen\")",
    );
    refused(
        json!({ "prompt": "a", "completion": "b", "label": false }),
        "its `label` false says that nothing of it is learned, such as a bad answer of unpaired preferences (KTO)",
    );
    refused(
        json!({ "text": "a" }),
        "it has a `text`, which is no chat: set data.format: Jsonl(text: \"text\")",
    );
    let user = json!({ "role": "user", "content": [{ "type": "image", "url": "x" }] });
    refused(
        json!({ "messages": [user] }),
        "message 1: part 1 of `content` is of the type `image`, and onebox trains on texts alone",
    );
    refused(
        json!({ "question": "a", "answer": "b", "images": ["x"] }),
        "it has `images`, and onebox trains on texts",
    );
    put(
        &folder,
        "better.jsonl",
        |i| json!({ "prompt": format!("{i}?"), "chosen": "b", "rejected": "c" }),
    );
    let sets = ["data.train=better.jsonl", "data.columns=(output: \"chosen\")"];
    let shown = with(&folder, &["data", "show", "chat.ron"], &sets).ok().stdout;
    assert!(shown.contains("[[b«<|im_end|>»]]"), "{shown}");
}

/// A name of the hub that is no folder gets the command that downloads it.
#[test]
fn a_data_set_of_the_hub_is_refused_with_the_command_that_downloads_it() {
    let folder = with_chats();
    let command = "nothing is downloaded; run `hf download --repo-type dataset tatsu-lab/alpaca --local-dir alpaca`";
    for args in [["data", "check", "chat.ron"], ["config", "check", "chat.ron"]] {
        with(&folder, &args, &["data.train=tatsu-lab/alpaca"]).refused(66, &[command]);
    }
    folder.shell("mkdir tatsu-lab").ok();
    for other in ["tatsu-lab/alpaca", "no/such/folder", "no/such.jsonl", "/no/such"] {
        let set = format!("data.train={other}");
        let output = check(&folder, &[&set]).refused(66, &["no such file"]).stderr;
        assert!(!output.contains("hf download"), "{output}");
    }
}

/// A table has lists of messages as texts: they are the chats of the same lists in JSON lines.
#[test]
fn lists_in_the_cells_of_a_table_are_lists() {
    let folder = with_chats();
    let message = |role: &str, text: String| json!([{ "role": role, "content": text }]);
    let lists = |i: usize| {
        json!({
            "prompt": message("user", format!("what holds {i}?")),
            "completion": message("assistant", format!("the box {i}")),
        })
    };
    let pair = |i: usize, history: Value| json!({ "instruction": format!("what {i}?"), "output": format!("a box {i}"), "history": history });
    let earlier = |i: usize| pair(i, json!([["the box", "holds"]]));
    let none = |i: usize| pair(i, json!([]));
    let cell = |value: &Value| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        format!("\"{}\"", text.replace('"', "\"\""))
    };
    let table = |name: &str, keys: &[&str], row: &dyn Fn(usize) -> Value| {
        let sign = if name.ends_with(".tsv") { "\t" } else { "," };
        let line = |i: usize| {
            let row = row(i);
            keys.iter().map(|key| cell(&row[*key])).collect::<Vec<_>>().join(sign) + "\n"
        };
        let rows: String = (0..ROWS).map(line).collect();
        fs::write(folder.path(name), keys.join(sign) + "\n" + &rows).unwrap();
    };
    let of = |file: &str| {
        let train = format!("data.train={file}");
        hashes(&folder, &[train.as_str(), "model.seq_len=256"])
    };
    type Row<'a> = &'a dyn Fn(usize) -> Value;
    let kinds: [(&str, &[&str], Row<'_>); 4] = [
        ("lists", &["prompt", "completion"], &lists),
        ("chats", &["messages"], &chat),
        ("earlier", &["instruction", "output", "history"], &earlier),
        ("none", &["instruction", "output", "history"], &none),
    ];
    for (name, keys, row) in kinds {
        put(&folder, &format!("{name}.jsonl"), row);
        let wanted = of(&format!("{name}.jsonl"));
        for file in [format!("{name}.csv"), format!("{name}.tsv")] {
            table(&file, keys, row);
            assert_eq!(of(&file), wanted, "{file}");
        }
    }
    // A list that is cut off, and lists as Python prints them, are no texts to learn.
    let keys = ["prompt", "completion"];
    let expected = "`prompt` is a text, and that is no JSON: ";
    table("cut.csv", &keys, &|i| {
        let mut row = lists(i);
        if i == ROWS - 1 {
            row["prompt"] = json!("[{\"role\": \"user\", \"content\": \"what");
        }
        row
    });
    let dry = ["train", "chat.ron", "--dry-run"];
    let stderr = with(&folder, &dry, &["data.train=cut.csv"]).ok().stderr;
    let line = format!("1 of 60 rows cannot be used (cut.csv line 61: {expected}");
    assert!(stderr.contains(&line), "{stderr}");
    table("python.csv", &keys, &|i| {
        let mut row = lists(i);
        row["prompt"] = json!(row["prompt"].to_string().replace('"', "'"));
        row
    });
    let refused = check(&folder, &["data.train=python.csv"]);
    refused.refused(66, &["data.train", "python.csv", expected, "json.dumps"]);
}
