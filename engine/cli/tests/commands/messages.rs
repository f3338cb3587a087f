//! Foreign texts in messages: each is one line of bounded length, begins no line of its own, and is
//! no command. Commands that onebox proposes work without changes, for any names in them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder, TINY, with_chats};
use files::shell::{quoted, quoted_path};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Lines that look like messages of onebox, and characters that a terminal obeys.
const FORGED: &str = "a\nerror: forged\n WARN forged\rnote: forged\u{1b}[2Jforged\u{202e}";

/// The forged lines, followed by a very long text.
fn hostile() -> String {
    format!("{FORGED}{}", "A".repeat(100_000))
}

/// Beginnings of message lines, except the log's; for configs, also the places and source lines.
const BEGINNINGS: [&str; 12] = [
    "error: ",
    "warning: ",
    "note: ",
    " WARN ",
    "  ",
    "1 error in ",
    "bad/",
    "it is set aside as bad/",
    "data: ",
    "dry run: ",
    "Usage: ",
    "For more information",
];

/// Asserts that messages are bounded, and that onebox has begun each line. They must contain `all`.
#[track_caller]
fn check(what: &str, output: &CommandOutput, all: &[&str]) {
    let CommandOutput { code, stdout, stderr } = output;
    assert!(stderr.len() < 20_000 && stdout.len() < 1_000_000, "{what}: {}", stderr.len());
    for message in all {
        assert!(stderr.contains(message), "{what}, {code}: `{message}` is not in:\n{stderr}");
    }
    for line in stderr.lines() {
        let of_config = line.trim_start().starts_with(|c: char| c == '|' || c.is_ascii_digit())
            || line.starts_with(" --> ");
        let begun = BEGINNINGS.iter().any(|words| line.starts_with(words));
        assert!(line.is_empty() || of_config || begun, "{what}: `{line}` in:\n{stderr}");
    }
    for line in stderr.lines().chain(stdout.lines()) {
        let acts = |c: char| c.is_control() && c != '\t' || c == '\u{202e}';
        assert!(!line.contains(acts), "{what}: {line:?}");
        let line = line.trim_start_matches([' ', '|']);
        let forged = ["error: forged", "WARN forged", "note: forged"];
        assert!(!forged.iter().any(|text| line.starts_with(text)), "{what}: {line:?}");
    }
    assert!(!stderr.contains("panicked"), "{what}: {stderr}");
}

fn put(folder: &Folder, name: &str, content: impl AsRef<[u8]>) {
    let path = folder.path(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// A folder with the fixture of a chat model in `m`, and `chat.ron`, which trains it.
fn with_model() -> Folder {
    let folder = with_chats();
    let fixture = format!("{}/../../tests/fixtures/hf-chat-tiny", env!("CARGO_MANIFEST_DIR"));
    folder.shell(&format!("cp -r {fixture} m")).ok();
    let ron = fs::read_to_string(folder.path("chat.ron")).unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    put(&folder, "chat.ron", ron.replace(&format!("{fixture:?}"), "\"m\""));
    folder
}

type JsonChange<'a> = &'a dyn Fn(&mut Value);

/// Changes a JSON file.
fn change(folder: &Folder, name: &str, how: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_str(&folder.read(name)).unwrap();
    how(&mut json);
    put(folder, name, json.to_string());
}

#[test]
fn rows_of_others_begin_no_line() {
    let (folder, hostile) = (with_model(), hostile());
    let call = |name: &str| json!([{ "function": { "name": name, "arguments": name } }]);
    let (user, end) = (json!({ "role": "user", "content": "a" }), json!({ "role": "assistant" }));
    let rows = [
        ("no chat", json!({ &hostile: 1 })),
        ("no role", json!({ "messages": [{ &hostile: "a" }] })),
        ("role", json!({ "messages": [{ "role": hostile, "content": "a" }] })),
        ("type", json!({ "messages": [{ "role": "user", "content": [{ "type": hostile }] }] })),
        ("part", json!({ "messages": [{ "role": "user", "content": [{ &hostile: 1 }] }] })),
        ("weight", json!({ "messages": [user, end], "weight": hostile })),
        (
            "calls",
            json!({ "messages": [user, { "role": "assistant", "tool_calls": call(&hostile) }] }),
        ),
        ("tools", json!({ "messages": [user], "tools": hostile })),
        ("content", json!({ "messages": [{ "role": "user", &hostile: "a" }] })),
    ];
    for (what, row) in rows {
        let good = folder.read("chats.jsonl");
        put(&folder, "bad.jsonl", format!("{good}{row}\n"));
        for more in [&[][..], &["--all"]] {
            let args = ["data", "check", "chat.ron", "--set", "data.train=\"bad.jsonl\""];
            check(what, &folder.onebox(&[&args, more].concat()), &["bad.jsonl line 61"]);
        }
    }
    // A key that no code reads, and a file whose name has line breaks.
    let name = format!("{}.jsonl", FORGED.replace('/', ""));
    let row = json!({ &hostile: 1, "messages": [user, { "role": "assistant", "content": "b" }] });
    put(&folder, &format!("d/{name}"), format!("{row}\n").repeat(20) + "{}\n" + "[");
    let output = folder.onebox(&["data", "check", "chat.ron", "--set", "data.train=\"d/*\""]);
    check("file", &output, &["error: forged\\u000a WARN forged", "cannot be used"]);
}

#[test]
fn a_model_of_others_begins_no_line() {
    let hostile = hostile();
    let cases: [(&str, &str, JsonChange<'_>); 13] = [
        ("key", "config.json", &|json| json[&hostile] = json!(1)),
        ("model_type", "config.json", &|json| json["model_type"] = json!(hostile)),
        ("architectures", "config.json", &|json| json["architectures"] = json!([hostile])),
        ("number", "config.json", &|json| json["hidden_size"] = json!(hostile)),
        ("rope", "config.json", &|json| json["rope_scaling"]["rope_type"] = json!(hostile)),
        ("rope key", "config.json", &|json| json["rope_scaling"][&hostile] = json!(1)),
        ("tokenizer", "tokenizer.json", &|json| json["model"]["type"] = json!(hostile)),
        ("version", "tokenizer.json", &|json| json["version"] = json!(hostile)),
        ("vocabulary", "tokenizer.json", &|json| json["model"]["vocab"][&hostile] = json!("a")),
        ("end", "tokenizer_config.json", &|json| json["eos_token"] = json!(hostile)),
        ("token", "tokenizer_config.json", &|json| {
            json["added_tokens_decoder"] = json!({ &hostile: {} });
        }),
        ("flag", "tokenizer_config.json", &|json| {
            json["eos_token"] = json!({ "content": hostile, "special": 1 });
        }),
        ("template", "tokenizer_config.json", &|json| {
            let text = serde_json::to_string(FORGED).unwrap();
            json["chat_template"] = json!(format!("{{{{ raise_exception({text} * 10000) }}}}"));
        }),
    ];
    for (what, name, how) in cases {
        let folder = with_model();
        change(&folder, &format!("m/{name}"), how);
        for args in [&["data", "check", "chat.ron"][..], &["train", "chat.ron", "--dry-run"]] {
            let output = folder.onebox(args);
            let is_ok = ["version", "end"].contains(&what) && output.code == 0;
            check(what, &output, if is_ok { &[] } else { &["error: "] });
            assert!(is_ok || output.code != 0, "{what}");
        }
    }
    for (what, header) in [
        ("tensor", json!({ &hostile: { "dtype": "F32", "shape": [1], "data_offsets": [0, 4] } })),
        ("dtype", json!({ "a": { "dtype": hostile, "shape": [1], "data_offsets": [0, 4] } })),
        ("shape", json!({ "a": { "dtype": "F32", "shape": hostile, "data_offsets": [0, 4] } })),
        ("field", json!({ "a": { &hostile: 1 } })),
    ] {
        let (folder, header) = (with_model(), header.to_string());
        let length = (header.len() as u64).to_le_bytes();
        let file = [&length[..], header.as_bytes(), &[0; 4]].concat();
        put(&folder, "m/model.safetensors", file);
        check(what, &folder.onebox(&["train", "chat.ron", "--dry-run"]), &["m/model.safetensors"]);
    }
    for (what, map) in [
        ("file", json!({ "weight_map": { "a": hostile } })),
        ("name", json!({ "weight_map": { &hostile: "x.bin" } })),
        ("index", json!({ "weight_map": hostile })),
        ("lost", json!({ "weight_map": { &hostile: "model-1.safetensors" } })),
    ] {
        let folder = with_model();
        folder.shell("mv m/model.safetensors m/model-1.safetensors").ok();
        put(&folder, "m/model.safetensors.index.json", map.to_string());
        check(what, &folder.onebox(&["train", "chat.ron", "--dry-run"]), &["error: "]);
    }
}

#[test]
fn configs_and_boxes_of_others_begin_no_line() {
    let (folder, hostile) = (Folder::new(), hostile());
    let long = "a".repeat(100_000);
    let changed = |from: &str, to: String| {
        assert!(TINY.contains(from));
        TINY.replace(from, &to)
    };
    for (what, text) in [
        ("key", changed("layers: 2", format!("{long}: 2"))),
        ("section", changed("model:", format!("{long}:"))),
        ("word", changed("layers: 2", format!("layers: {long}"))),
        ("text", changed("layers: 2", format!("layers: {hostile:?}"))),
        ("variant", changed("Bf16", long.clone())),
        ("size", changed("16MiB", hostile.clone())),
        ("name", changed("model:", format!("name: {hostile:?}, model:"))),
        ("path", changed("\"text.txt\"", format!("{hostile:?}"))),
        ("list", changed("\"text.txt\"", format!("[(name: {hostile:?}, path: \"a\")]"))),
        ("entry", changed("\"text.txt\"", format!("[({long}: \"a\")]"))),
        ("model", changed("layers: 2", format!("from: {hostile:?}"))),
        ("comment", changed("layers: 2", format!("layers: /*{hostile}*/ x"))),
        ("tokenizer", changed("\"text.txt\"", format!("\"text.txt\", tokenizer: {hostile:?}"))),
    ] {
        put(&folder, "bad.ron", text);
        for args in [&["config", "check", "bad.ron"][..], &["train", "bad.ron", "--dry-run"]] {
            check(what, &folder.onebox(args), &["error: "]);
        }
    }
    put(&folder, "box.ron", format!("(name: {hostile:?}, {long}: 1, gpu_memory: {hostile:?})"));
    check("box", &folder.onebox(&["plan", "tiny.ron", "--box", "box.ron"]), &["error: "]);
    let xml = format!("<?xml version=\"1.0\"?><topology><object type=\"{hostile}\"/></topology>");
    put(&folder, "box.xml", xml);
    check("xml", &folder.onebox(&["topology", "--xml", "box.xml"]), &["error: "]);
    let mut command = folder.command(&["boxes"]);
    command.env("ONEBOX_LOG", &hostile);
    check("variable", &Folder::done(command), &["ONEBOX_LOG is `a\\nerror: forged\\n"]);
}

#[test]
fn a_run_of_others_begins_no_line() {
    let (folder, hostile) = (Folder::new(), hostile());
    folder.train("run", &["--set", "train.checkpoint_every=2"]).ok();
    let copy = |to: &str| folder.shell(&format!("rm -rf {to}; cp -r run {to}")).ok();
    // A manifest ends with the hash of the lines before.
    let sealed =
        |json: &str| format!("{json}\n{:032x}\n", xxhash_rust::xxh3::xxh3_128(json.as_bytes()));
    let manifest = folder.read("run/checkpoints/step-00000004/MANIFEST");
    let manifest: Value = serde_json::from_str(manifest.lines().next().unwrap()).unwrap();
    let cases: [(&str, JsonChange<'_>); 6] = [
        ("version", &|json| {
            json["format"] = json!(9);
            json["onebox"] = json!(hostile);
        }),
        ("onebox", &|json| json["onebox"] = json!(hostile)),
        ("tensor", &|json| json["tensors"][0]["name"] = json!(hostile)),
        ("field", &|json| json[&hostile] = json!(1)),
        ("step", &|json| json["step"] = json!(hostile)),
        ("config", &|json| {
            json["config"] = json!(format!("(model: ({}: 1))", "a".repeat(100_000)));
        }),
    ];
    for (what, how) in cases {
        copy("bad");
        let mut json = manifest.clone();
        how(&mut json);
        let at = "bad/checkpoints/step-00000004/MANIFEST";
        put(&folder, at, sealed(&json.to_string()));
        for args in [
            &["checkpoint", "show", "bad"][..],
            &["checkpoint", "verify", "bad/checkpoints/step-00000004"],
            &["checkpoint", "diff", "run", "bad"],
        ] {
            check(what, &folder.onebox(args), &[]);
        }
        let resumed = folder.train(
            "bad",
            &["--resume", "--set", "train.steps=5", "--set", "schedule.decay_steps=4"],
        );
        let output = resumed.stderr.split("run     ").next().unwrap_or_default().to_owned();
        check(what, &CommandOutput { stderr: output, ..resumed }, &[]);
    }
    copy("bad");
    folder.shell("rm -r bad/checkpoints/step-*").ok();
    put(&folder, "bad/checkpoints/latest", &hostile);
    let resumed = folder.train("bad", &["--resume", "--set", "train.steps=5"]);
    check("latest", &resumed, &["latest names a\\nerror: forged\\n"]);
    copy("bad");
    put(
        &folder,
        "bad/config.ron",
        folder.read("run/config.ron").replacen(
            "model: (",
            &format!("model: ({}: 1, ", "b".repeat(100_000)),
            1,
        ),
    );
    check("config", &folder.onebox(&["generate", "bad", "--tokens", "1"]), &["does not know"]);
    put(&folder, "bad/metrics.jsonl", format!("{{{hostile:?}: 1}}\n{}\n", json!({ &hostile: 1 })));
    check("metrics", &folder.onebox(&["report", "bad"]), &[]);
    let weights = "bad/weights.safetensors";
    for header in [json!({ "__metadata__": { "onebox": hostile } }), json!({ &hostile: 1 })] {
        let header = header.to_string();
        let length = (header.len() as u64).to_le_bytes();
        put(&folder, weights, [&length[..], header.as_bytes()].concat());
        check("weights", &folder.onebox(&["generate", "bad", "--tokens", "1"]), &[weights]);
    }
}

/// Every proposed command is one line, and runs without changes.
#[test]
fn proposed_commands_run_as_they_stand_whatever_the_names_are() {
    let whole = Folder::new();
    let nasty = "it's a 'box'; touch owned; $(touch owned)\n`touch owned`\"&\\é";
    let here = whole.path(nasty);
    fs::create_dir(&here).unwrap();
    for name in ["tiny.ron", "text.txt"] {
        fs::copy(whole.path(name), here.join(name)).unwrap();
    }
    let program = quoted(env!("CARGO_BIN_EXE_onebox"));
    let run = |line: &str| whole.shell(&format!("cd {} && {line}", quoted_path(&here)));
    let proposed = |text: &str, begins: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|line| line.trim_start().strip_prefix(begins));
        let lines: Vec<_> = lines.map(|rest| format!("{program} {rest}")).collect();
        assert!(!lines.is_empty(), "`{begins}` is not in {text}");
        lines
    };
    let config = quoted_path(&here.join("tiny.ron"));
    let output = run(&format!(
        "{program} train {config} --run-dir='-a b' --set 'sample.prompt=\"it'\\''s $\"'"
    ))
    .ok();
    let next = proposed(&output.stderr, &format!("{program} "));
    assert_eq!(next.len(), 3, "{}", output.stderr);
    for line in &next {
        run(line).ok();
    }
    fs::write(here.join("tokenizer.json"), tokenizer()).unwrap();
    let sets = "--set 'data.tokenizer=\"tokenizer.json\"' --set model.vocab=300";
    run(&format!("{program} data prepare tiny.ron 'my tokens' {sets}")).ok();
    let tokens = here.join("my tokens/train");
    fs::write(tokens.join("000000.bin"), "x").unwrap();
    let train = quoted(&format!("data.train={:?}", tokens.to_str().unwrap()));
    let check = format!(
        "{program} data check tiny.ron --set model.vocab=300 --set data.format=U16 --set {train}"
    );
    let refused = run(&check).refused(66, &["make them again: cd "]);
    let again = refused.stderr.lines().find_map(|line| line.split_once("again: ")).unwrap().1;
    let again = again.replace("onebox data", &format!("{program} data"));
    whole.shell(&again).ok();
    run(&check).ok();
    // A run is given to an option that expects a file name.
    let named =
        run(&format!("{program} report --csv 'a b'")).refused(2, &["onebox report 'a b' --csv"]);
    assert_eq!(named.stdout, "");
    for owned in [whole.path("owned"), here.join("owned")] {
        assert!(!owned.exists(), "a name was run");
    }
}

fn tokenizer() -> Vec<u8> {
    fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tokenizer-tiny.json"))
        .unwrap()
}

/// clap proposes `-- --config` by itself, which is a file of this name.
#[test]
fn a_config_as_an_option_gets_the_right_tip() {
    let folder = Folder::new();
    let done = folder.onebox(&["train", "--config", "tiny.ron"]);
    let done = done.refused(2, &["'--config'", "tip: the config is no option", "train my.ron"]);
    assert!(!done.stderr.contains("as a value"), "{}", done.stderr);
    folder.onebox(&["train", "--confg", "tiny.ron"]).refused(2, &["'--confg'"]);
}
