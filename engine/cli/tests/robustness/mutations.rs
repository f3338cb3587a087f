//! Foreign bytes, changed at random. Every parser returns. An accepted value means the same after
//! it is written and read again. The reason of a refusal is a part of a line, for any names. Each
//! parser gets some thousand changes, or a minute with ONEBOX_FULL=1. `fuzz/` uses coverage.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use checkpoint::parsers::{checkpoint_header, config_json, foreign_header, index, manifest};
use config::{ControlTokens, DataFormat, load_str};
use data::chat::Template;
use data::model_files::ModelFiles;
use data::{Corpus, Rows, Tokenizer};
use device::random::below;
use files::foreign_text::is_line;
use files::shell::words;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Words that often break parsers.
const WORDS: [&str; 32] = [
    "0",
    "1",
    "-1",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "1e-308",
    "1e999",
    "NaN",
    "null",
    "true",
    "\"\"",
    "\"F32\"",
    "\"../x\"",
    "{}",
    "[]",
    "()",
    "[[[[[[[[",
    "((((((((",
    "{\"a\":",
    ",",
    ":",
    "\\u0000",
    "\u{1b}[2J",
    "\u{202e}",
    "\\nerror: forged",
    "\\u001b[2J",
    "\nerror: forged",
    "Some(",
    "r#\"",
    "//",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// Some changes of `seed`: bits, bytes, words, long names, and lost, repeated or moved pieces.
fn changed(seed: &[u8], key: u64) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    let mut drawn = 0;
    let mut draw = |n: usize| {
        drawn += 1;
        below(key, drawn, n.max(1) as u64) as usize
    };
    for _ in 0..=draw(4) {
        let (from, other) = (draw(bytes.len()), draw(bytes.len()));
        let to = (from + draw(24)).min(bytes.len());
        match draw(9) {
            0 if !bytes.is_empty() => bytes[from] ^= 1 << draw(8),
            1 if !bytes.is_empty() => bytes[from] = draw(256) as u8,
            2 => drop(bytes.drain(from..to)),
            3 => drop(
                bytes.splice(other..other, seed[from.min(seed.len())..to.min(seed.len())].to_vec()),
            ),
            4 => drop(bytes.splice(from..to, WORDS[draw(WORDS.len())].bytes())),
            5 => bytes.truncate(from),
            6 => {
                // A number becomes another number.
                let is_digit = |b: &u8| b.is_ascii_digit();
                let start = bytes[from..].iter().position(is_digit).map_or(from, |n| from + n);
                let rest = bytes[start..].iter().take_while(|b| is_digit(b)).count();
                let word = WORDS[draw(10)];
                drop(bytes.splice(start..start + rest, word.bytes()));
            }
            7 => drop(bytes.splice(from..from, WORDS[draw(WORDS.len())].repeat(2000).bytes())),
            _ => drop(bytes.splice(from..from, WORDS[draw(WORDS.len())].bytes())),
        }
    }
    bytes
}

/// Tries changes of `seed`. `parse` returns whether the value holds, or why it is refused.
fn survive(name: &str, seed: &[u8], parse: &dyn Fn(&[u8]) -> Result<bool, String>) {
    assert_eq!(parse(seed), Ok(true), "{name}: the seed itself");
    let full = std::env::var_os("ONEBOX_FULL").is_some_and(|v| v == "1");
    let (started, mut tried, mut accepted) = (Instant::now(), 0u64, 0u64);
    while if full { started.elapsed() < Duration::from_secs(60) } else { tried < 3000 } {
        let bytes = changed(seed, tried);
        match parse(&bytes) {
            Ok(holds) => {
                accepted += 1;
                assert!(holds, "{name}, change {tried}: {}", String::from_utf8_lossy(&bytes));
            }
            Err(why) => assert!(!why.is_empty() && is_line(&why), "{name}, change {tried}: {why}"),
        }
        tried += 1;
    }
    println!("{name}: {tried} changes, {accepted} accepted");
}

/// The JSON of a safetensors file.
fn json_of(file: &[u8]) -> Vec<u8> {
    file[8..8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize].to_vec()
}

/// A file with the right length word and `data` zeros as its data.
fn as_file(json: &[u8], data: usize) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json, &vec![0; data]].concat()
}

#[test]
fn headers_survive() {
    let own = std::fs::read(fixture("checkpoint-format-1/step-00000003/rank-00003.safetensors"));
    let (own, theirs) = (own.unwrap(), std::fs::read(fixture("hf-gpt2-tiny/model.safetensors")));
    let theirs = theirs.unwrap();
    for (name, file, parse) in [
        ("own header", &own, checkpoint_header as fn(&[u8]) -> Result<bool, String>),
        ("foreign header", &theirs, foreign_header),
    ] {
        let json = json_of(file);
        let data = file.len() - 8 - json.len();
        survive(name, &json, &|json| parse(&as_file(json, data)));
        survive(&format!("{name}, whole"), &file[..8 + json.len()], &|start| {
            parse(&[start, &vec![0; data]].concat())
        });
    }
}

#[test]
fn manifests_survive() {
    let file = std::fs::read(fixture("checkpoint-format-1/step-00000003/MANIFEST")).unwrap();
    let json = file.split(|b| *b == b'\n').next().unwrap();
    survive("manifest", json, &manifest);
}

#[test]
fn what_a_folder_of_transformers_holds_survives() {
    let ron = "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16, vocab: 61, ffn_hidden: 96),
                data: (train: \"x\", format: U16), train: (steps: 1))";
    let model =
        load_str(ron, "a.ron", Path::new("/"), &["device=Cpu".into()]).unwrap().config.model;
    let config = std::fs::read(fixture("hf-gpt2-tiny/config.json")).unwrap();
    assert_eq!(config_json(&config, &model), 0);
    survive("config.json", &config, &|json| Ok(config_json(json, &model) < 1000));
    let map = br#"{"metadata":{"total_size":8},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
    survive("index", map, &|json| index(json).map(|()| true));
}

/// First line of the error about a config; the other lines have their own checks.
fn refused(why: &str) -> String {
    assert!(why.len() < 128 << 10 && why.lines().all(is_line), "{why}");
    why.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn configs_survive() {
    let ron = include_str!("../../../../configs/quickstart.ron");
    let whole = load_str(ron, "seed.ron", Path::new("/"), &[]).unwrap().config.to_ron();
    for (name, seed) in [("config", ron), ("resolved config", &whole)] {
        survive(name, seed.as_bytes(), &|bytes| {
            let text = str::from_utf8(bytes).map_err(|e| e.to_string())?;
            if text.contains("Sim") {
                return Err("it would read a box".into());
            }
            let read = |text: &str| load_str(text, "x.ron", Path::new("/"), &[]);
            let config = read(text).map_err(|e| refused(&e.to_string()))?.config;
            Ok(read(&config.to_ron()).is_ok_and(|again| again.config == config))
        });
    }
}

#[test]
fn rows_and_what_stands_beside_a_tokenizer_survive() {
    let folder = fixture("hf-chat-tiny");
    let template = Template::of_data(&ModelFiles::open(&folder).unwrap()).unwrap();
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let rows = Rows::of_chats(&tokenizer, &template, "").with_control_tokens(ControlTokens::Text);
    let row = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "weight": 1}], "tools": [], "label": true}"#;
    let holds = |document: data::Document| document.tokens.len() == document.counted.len();
    let text = |bytes: &[u8]| str::from_utf8(bytes).map(str::to_owned).map_err(|e| e.to_string());
    survive("row", row.as_bytes(), &|row| rows.document(&text(row)?).map(holds));
    let into = tempfile::tempdir().unwrap();
    let seed = r#"{"chat_template": "{% for m in messages %}{{ m['role'] | upper }}{{ m.content ~ eos_token }}{% endfor %}",
        "eos_token": "<|im_end|>", "added_tokens_decoder": {"301": {"content": "<|im_end|>", "special": true}}}"#;
    std::fs::copy(folder.join("tokenizer.json"), into.path().join("tokenizer.json")).unwrap();
    survive("settings of a tokenizer", seed.as_bytes(), &|settings| {
        std::fs::write(into.path().join("tokenizer_config.json"), settings).unwrap();
        let model_files = ModelFiles::open(into.path()).map_err(|e| e.to_string())?;
        let template = Template::of_data(&model_files)?;
        let rows = Rows::of_chats(&tokenizer, &template, "");
        rows.document(r#"{"messages": [{"role": "assistant", "content": "b"}]}"#).map(holds)
    });
}

/// A folder of tokens with a missing file, so that the error names the remedy.
#[test]
fn lists_of_prepared_tokens_survive() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("made");
    std::fs::create_dir_all(made.join("train")).unwrap();
    std::fs::write(made.join("train/000000.bin"), [0; 400]).unwrap();
    let part = |name: &str| {
        json!({
            "tokens": 200, "files": [{ "name": name, "bytes": 400, "hash": "0" }], "text": 10,
            "next": { "file": 0, "offset": 0, "lines": 0 },
            "rows": { "rows": 1, "bad": 0, "long": 0, "longest": 0, "cut": 0, "divided": 0 },
        })
    };
    let list = |parts: &[serde_json::Value]| {
        let list = json!({
            "version": 3, "command": "cd /a && onebox data prepare /c.ron --set model.vocab=3 /x", "out": made,
            "makers": {}, "folders": ["train"], "texts": [[]], "parts": [parts],
        });
        list.to_string()
    };
    let train = made.join("train").to_str().unwrap().to_owned();
    let open = |list: &[u8]| {
        std::fs::write(made.join("prepared.json"), list).unwrap();
        let opened = Corpus::open(&train, None, DataFormat::U16, 0.2, 1000, 4);
        opened.map(|_| true).map_err(|e| e.to_string())
    };
    let commands = std::cell::Cell::new(0);
    let whole = list(&[part("000000.bin")]);
    let lacking = list(&[part("000000.bin"), part("000001.bin")]);
    for (name, seed) in [("list", whole), ("list of what is lost", lacking)] {
        let is_whole = name == "list";
        survive(name, seed.as_bytes(), &|changed| {
            let opened = open(changed);
            let command = opened.as_ref().err().and_then(|why| why.split_once("make them again: "));
            if let Some((_, command)) = command {
                commands.set(commands.get() + 1);
                let words = words(command).unwrap_or_else(|| panic!("{command}"));
                let own = if words[0] == "cd" { &words[3..] } else { &words };
                assert_eq!(own[..3], ["onebox", "data", "prepare"], "{command}");
                assert_eq!(own.last().map(Path::new), Some(made.as_path()), "{command}");
            }
            // The unchanged seed gives its known result.
            if changed == seed.as_bytes() {
                assert_eq!(opened.is_ok(), is_whole, "{opened:?}");
                return Ok(true);
            }
            opened
        });
    }
    assert!(commands.get() > 100, "{} remedies", commands.get());
}
