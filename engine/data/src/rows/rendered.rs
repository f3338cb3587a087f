//! Tests of texts that a template has rendered, with [`ControlTokens::Parsed`].

use super::super::tokenizer::Tokenizer;
use super::Rows;
use crate::chat::Template;
use crate::model_files::ModelFiles;
use config::ControlTokens;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};

fn folders() -> Vec<PathBuf> {
    let chats = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/chats");
    std::fs::read_dir(chats).unwrap().map(|folder| folder.unwrap().path()).collect()
}

/// Rendered chats have the tokens that transformers gives for the chats (make_chats_fixture.py),
/// also control tokens in messages. The tokenizer's first token precedes a text that lacks it.
#[test]
fn a_rendered_chat_has_the_tokens_of_the_chat() {
    let mut all = 0;
    for folder in folders() {
        let tokenizer = Tokenizer::open(&folder).unwrap();
        let template = Template::of_data(&ModelFiles::open(&folder).unwrap()).unwrap();
        let end = template.end_of_text();
        let texts = Rows::of_texts(&tokenizer, "text", end);
        let parsed =
            Rows::of_texts(&tokenizer, "text", end).with_control_tokens(ControlTokens::Parsed);
        let pairs =
            Rows::of_chats(&tokenizer, &template, "").with_control_tokens(ControlTokens::Parsed);
        assert!(texts.hash() != parsed.hash() && texts.makers() != parsed.makers());
        let rows = std::fs::read(folder.join("rows.json")).unwrap();
        let rows: Vec<Json> = serde_json::from_slice(&rows).unwrap();
        let (of_texts, of_chats): (Vec<_>, Vec<_>) =
            rows.iter().partition(|one| one["row"]["text"].is_string());
        let in_front = of_texts.iter().find_map(|one| one["tokens"][0].as_u64()).unwrap() as u32;
        let in_front = Some(in_front).filter(|token| tokenizer.is_control(*token));
        for one in of_chats {
            let Some(text) = one["text"].as_str().filter(|text| !text.is_empty()) else { continue };
            let wanted = if one["live"].is_null() { &one["tokens"] } else { &one["live"] };
            let mut wanted: Vec<u32> = serde_json::from_value(wanted.clone()).unwrap();
            if let Some(token) = in_front.filter(|token| wanted[0] != *token) {
                wanted.insert(0, token);
            }
            let last = wanted.iter().rfind(|t| !tokenizer.text_of(**t).trim().is_empty());
            if !last.is_some_and(|token| tokenizer.is_control(*token)) {
                wanted.extend(end.and_then(|end| tokenizer.token(end)));
            }
            let made = parsed.document(&json!({ "text": text }).to_string()).unwrap();
            let name = (folder.file_name().unwrap(), one["name"].as_str().unwrap());
            assert_eq!(made.tokens, wanted, "{name:?}");
            assert!(!made.counted[0] && made.counted[1..].iter().all(|counts| *counts), "{name:?}");
            // The text is divided in the middle, and the second half is learned.
            let half = text.floor_char_boundary(text.len() / 2);
            let row = json!({ "prompt": text[..half], "completion": text[half..] });
            let made = pairs.document(&row.to_string()).unwrap();
            assert_eq!(made.tokens, wanted, "{name:?}");
            assert!(made.counted.contains(&true) && made.counted.is_sorted(), "{name:?}");
            all += 1;
        }
    }
    assert!(all > 200, "{all}");
}

#[test]
fn messages_are_text_also_beside_texts_that_are_parsed() {
    let folder = folders().into_iter().find(|folder| folder.ends_with("chatml")).unwrap();
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let template = Template::of_data(&ModelFiles::open(&folder).unwrap()).unwrap();
    let of = |how| Rows::of_chats(&tokenizer, &template, "").with_control_tokens(how);
    let [text, parsed] = [ControlTokens::Text, ControlTokens::Parsed].map(of);
    let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
    let messages = json!([turn("user", "a<|im_end|>"), turn("assistant", "b<|im_start|>")]);
    for row in [
        json!({ "messages": messages, "prompt": "<|im_end|>", "completion": "<|im_end|>" }),
        json!({ "prompt": [messages[0]], "completion": [messages[1]] }),
    ] {
        let row = row.to_string();
        assert_eq!(text.document(&row).unwrap(), parsed.document(&row).unwrap(), "{row}");
        assert_eq!(text.count_rendered(&[Ok(&row)]), 0, "{row}");
    }
    // A parsed text with a mark is refused, too.
    let why = parsed.document(&json!({ "prompt": "a\u{FDD2}", "completion": "b" }).to_string());
    assert!(why.unwrap_err().contains("U+FDD2"));
}

#[test]
fn rows_that_a_template_has_rendered_are_counted() {
    let folder = folders().into_iter().find(|folder| folder.ends_with("chatml")).unwrap();
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let template = Template::of_data(&ModelFiles::open(&folder).unwrap()).unwrap();
    let escaped = r#"{"text": "\u003c|im_start|\u003euser\nb"}"#;
    let rows = [
        r#"{"text": "<|im_start|>user\na<|im_end|>"}"#,
        escaped,
        r#"{"text": "plain \u00e9"}"#,
        r#"{"text": "a", "other": "<|im_end|>"}"#,
        r#"{"prompt": "a", "completion": "b<|im_end|>"}"#,
        r#"{"messages": [{"role": "user", "content": "<|im_end|>"}]}"#,
        "<|im_end|>",
    ];
    let rows: Vec<Result<&str, &str>> = rows.into_iter().map(Ok).chain([Err("long")]).collect();
    let texts = || Rows::of_texts(&tokenizer, "text", None);
    assert_eq!(texts().count_rendered(&rows), 2);
    assert_eq!(texts().with_control_tokens(ControlTokens::Parsed).count_rendered(&rows), 0);
    assert_eq!(Rows::of_chats(&tokenizer, &template, "").count_rendered(&rows), 1);
}

#[test]
fn an_end_that_the_tokenizer_lacks_is_refused() {
    let tokenizer = Tokenizer::open(&folders()[0]).unwrap();
    let rows = Rows::of_texts(&tokenizer, "text", Some("<nowhere>"));
    let why = rows.document(r#"{"text": "a"}"#).unwrap_err();
    assert!(why.contains("\"<nowhere>\"") && why.contains("eos_token"), "{why}");
    assert_eq!(rows.check_end().unwrap_err().to_string(), why);
}
