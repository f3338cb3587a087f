//! Tests of randomly changed rows and templates: each soon gives a whole document or a reason.

use super::{CUT, Document, MARKS, Rows};
use crate::Tokenizer;
use crate::chat::Template;
use crate::model_files::ModelFiles;
use device::random::below;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};

/// Pieces of text that are hard for parsers.
const WORDS: [&str; 20] = [
    "{",
    "}",
    "[[[[[[[[",
    "\"",
    "\\u0000",
    "\\ud800",
    "null",
    "1e999",
    ",",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if true %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ messages }}",
    "{{ x | tojson(indent=9) }}",
    "{{ messages[-1]['content'] * 99 }}",
    "<|im_end|>",
    "[/INST]",
    "\u{FDD0}",
];

fn folders() -> Vec<PathBuf> {
    let chats = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/chats");
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(chats).unwrap().map(|folder| folder.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders
}

/// Applies one to four random changes to `seed`.
fn changed(seed: &str, key: u64) -> String {
    let mut bytes = seed.as_bytes().to_vec();
    let mut drawn = 0;
    let mut draw = |n: usize| {
        drawn += 1;
        below(key, drawn, n.max(1) as u64) as usize
    };
    for _ in 0..=draw(4) {
        let from = draw(bytes.len());
        let to = (from + draw(24)).min(bytes.len());
        match draw(5) {
            0 if !bytes.is_empty() => bytes[from] = draw(256) as u8,
            1 => drop(bytes.drain(from..to)),
            2 => bytes.truncate(from),
            3 => bytes.extend_from_within(from..to),
            _ => drop(bytes.splice(from..from, WORDS[draw(WORDS.len())].bytes())),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Row with random changes of its texts.
fn with_other_words(row: &Json, key: u64) -> Json {
    let mut row = row.clone();
    let messages = row.get_mut("messages").and_then(Json::as_array_mut);
    for (n, message) in messages.into_iter().flatten().enumerate() {
        let texts = match &mut message["content"] {
            Json::Array(parts) => parts.iter_mut().map(|part| &mut part["text"]).collect(),
            Json::Null => vec![],
            text => vec![text],
        };
        for text in texts {
            let other = changed(text.as_str().unwrap(), key + ((n as u64) << 32));
            *text = other.into();
        }
    }
    if let Some(Json::String(text)) = row.get_mut("text") {
        *text = changed(text, key);
    }
    row
}

fn check(made: Result<Document, String>) -> bool {
    match made {
        Ok(Document { tokens, counted }) => {
            assert_eq!(tokens.len(), counted.len());
            assert!(!counted[0] && counted.contains(&true));
            true
        }
        Err(why) => {
            assert!(!why.is_empty());
            false
        }
    }
}

#[test]
fn a_changed_row_gives_a_document_or_a_reason() {
    let (mut good, mut bad) = (0, 0);
    for (f, folder) in folders().iter().enumerate() {
        let tokenizer = Tokenizer::open(&folder.join("tokenizer.json")).unwrap();
        let template = Template::of_data(&ModelFiles::open(folder).unwrap()).unwrap();
        let made = [
            Rows::of_chats(&tokenizer, &template, ""),
            Rows::of_chats(&tokenizer, &template, "s"),
            Rows::of_texts(&tokenizer, "text", None),
        ];
        let rows = std::fs::read(folder.join("rows.json")).unwrap();
        let rows: Vec<Json> = serde_json::from_slice(&rows).unwrap();
        for (i, row) in rows.iter().enumerate() {
            let row = &row["row"];
            for n in 0..12 {
                let key = ((f * 1000 + i) * 100 + n) as u64;
                let row = match n % 4 {
                    3 => changed(&row.to_string(), key),
                    _ => with_other_words(row, key).to_string(),
                };
                match check(made[n % 3].document(&row)) {
                    true => good += 1,
                    false => bad += 1,
                }
            }
        }
    }
    assert!(good > 100 && bad > 100, "{good} {bad}");
}

#[test]
fn a_changed_template_gives_a_document_or_a_reason() {
    let row = json!({ "messages": [
        { "role": "user", "content": "a" }, { "role": "assistant", "content": "<think>b</think>c" },
        { "role": "user", "content": "d" }, { "role": "assistant", "content": "e<|im_end|>" }
    ]})
    .to_string();
    let (mut good, mut bad) = (0, 0);
    for (f, folder) in folders().iter().enumerate() {
        let Ok(template) = std::fs::read_to_string(folder.join("chat_template.jinja")) else {
            continue;
        };
        let tokenizer = Tokenizer::open(&folder.join("tokenizer.json")).unwrap();
        let into = tempfile::tempdir().unwrap();
        for n in 0..60 {
            let template = changed(&template, (f * 1000 + n) as u64);
            std::fs::write(into.path().join("chat_template.jinja"), template).unwrap();
            let made = Template::of_data(&ModelFiles::open(into.path()).unwrap());
            let document = made.and_then(|t| Rows::of_chats(&tokenizer, &t, "").document(&row));
            match check(document) {
                true => good += 1,
                false => bad += 1,
            }
        }
    }
    assert!(good > 20 && bad > 20, "{good} {bad}");
}

/// A row with a mark of onebox is refused, so that no row can move its targets.
#[test]
fn a_row_has_no_marks() {
    let folder = &folders()[0];
    let tokenizer = Tokenizer::open(&folder.join("tokenizer.json")).unwrap();
    let template = Template::of_data(&ModelFiles::open(folder).unwrap()).unwrap();
    let rows = Rows::of_chats(&tokenizer, &template, "");
    for mark in MARKS.chain([CUT]) {
        for place in 0..3 {
            let mut parts = ["user".to_owned(), "a".into(), "b".into()];
            parts[place].push(mark);
            let [role, one, two] = parts;
            let row = json!({ "messages": [
                { "role": role, "content": one }, { "role": "assistant", "content": two }
            ]});
            let why = rows.document(&row.to_string()).unwrap_err();
            assert!(why.contains("which is no character"), "{why}");
        }
    }
}
