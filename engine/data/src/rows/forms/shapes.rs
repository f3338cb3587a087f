//! Tests of the shapes of rows: rows of other programs, names of columns, and targets.

use super::super::{Document, IgnoredKeys, Rows};
use crate::Tokenizer;
use crate::chat::{Template, end_of_text};
use crate::model_files::ModelFiles;
use config::{ChatColumns, ChatTargets};
use serde::Deserialize;
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Tokenizer and files of the model of all tests here.
fn model() -> (Tokenizer, ModelFiles) {
    let folder = fixtures().join("hf-chat-tiny");
    (Tokenizer::open(&folder).unwrap(), ModelFiles::open(&folder).unwrap())
}

fn columns(all: &[(&str, &str)]) -> ChatColumns {
    all.iter().fold(ChatColumns::default(), |all, (key, name)| all.with(key, name))
}

#[derive(Deserialize)]
struct Case {
    name: String,
    row: Json,
    columns: BTreeMap<String, String>,
    targets: String,
    base: bool,
    tokens: Vec<u32>,
    counted: Vec<u8>,
}

/// Expected values: `apply_chat_template` of transformers for the messages that a row stands for, and
/// the rule of TRL for a prompt and a completion (make_rows_fixture.py).
#[test]
fn rows_of_other_programs_are_the_chats_that_they_stand_for() {
    let (tokenizer, files) = model();
    let template = Template::of_data(&files).unwrap();
    let unmarked = template_text(&files).replace("{%- generation %}", "");
    let unmarked = template_of(&unmarked.replace("{% endgeneration %}", ""));
    let end = end_of_text(&files).unwrap();
    let cases = std::fs::read(fixtures().join("chat-rows.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
    assert!(cases.len() > 90);
    for Case { name, row, columns, targets, base, tokens, counted } in cases {
        let columns: Vec<_> = columns.iter().map(|(key, name)| (&**key, &**name)).collect();
        let columns = self::columns(&columns);
        let targets = match targets.as_str() {
            "Answers" => ChatTargets::Answers,
            "LastAnswer" => ChatTargets::LastAnswer,
            _ => ChatTargets::All,
        };
        let rows = match base {
            true => vec![Rows::of_pairs(&tokenizer, end.as_deref())],
            false => [&template, &unmarked].map(|of| Rows::of_chats(&tokenizer, of, "")).into(),
        };
        for rows in rows {
            let rows = rows.with_columns(&columns, targets);
            let made =
                rows.document(&row.to_string()).unwrap_or_else(|why| panic!("{name}: {why}"));
            assert_eq!(made.tokens, tokens, "{name}");
            let made: Vec<u8> = made.counted.into_iter().map(u8::from).collect();
            assert_eq!(made, counted, "{name}, {targets:?}");
        }
    }
}

fn template_text(files: &ModelFiles) -> String {
    let settings: Json =
        serde_json::from_slice(files.get("tokenizer_config.json").unwrap()).unwrap();
    settings["chat_template"].as_str().unwrap().to_owned()
}

/// Chat template with this text, from a folder without other files.
fn template_of(text: &str) -> Template {
    let into = tempfile::tempdir().unwrap();
    std::fs::write(into.path().join("chat_template.jinja"), text).unwrap();
    Template::of_data(&ModelFiles::open(into.path()).unwrap()).unwrap()
}

/// Document of a row of the model with or without its template; each run of targets in brackets.
fn shown(
    row: &Json,
    columns: &ChatColumns,
    targets: ChatTargets,
    is_base: bool,
) -> Result<(String, IgnoredKeys), String> {
    let (tokenizer, files) = model();
    let template = Template::of_data(&files).unwrap();
    let rows = match is_base {
        true => Rows::of_pairs(&tokenizer, template.end_of_text()),
        false => Rows::of_chats(&tokenizer, &template, ""),
    };
    let rows = rows.with_columns(columns, targets);
    let (Document { tokens, counted }, unread) = rows.read(&row.to_string())?;
    let (mut text, mut decoder, mut before) = (String::new(), tokenizer.decoder(), false);
    for (token, counts) in tokens.into_iter().zip(counted) {
        if counts != before {
            text.push(if counts { '[' } else { ']' });
        }
        text += &decoder.push(token);
        before = counts;
    }
    Ok((text, unread))
}

fn turn(role: &str, content: &str) -> Json {
    json!({ "role": role, "content": content })
}

#[test]
fn a_message_that_is_marked_is_no_target_of_all_targets() {
    let marked = |mut turn: Json| {
        turn["train"] = false.into();
        turn
    };
    let all = |messages: &[Json], targets| {
        shown(&json!({ "messages": messages }), &ChatColumns::default(), targets, false)
            .map(|(text, _)| text.replace("<|im_start|>", "<").replace("<|im_end|>\n", ">"))
    };
    let [a, b, c, d] =
        [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")];
    let whole = [a.clone(), b.clone(), c.clone(), d.clone()];
    let (all_of, last) = (ChatTargets::All, ChatTargets::LastAnswer);
    // The first token of a document is never a target.
    assert_eq!(all(&whole, all_of).unwrap(), "<[user\na><assistant\nb><user\nc><assistant\nd>");
    let text = all(&[a.clone(), marked(b.clone()), c.clone(), d.clone()], all_of).unwrap();
    assert_eq!(text, "<[user\na><assistant\n]b<|im_end|>[\n<user\nc><assistant\nd>");
    let text = all(&[a.clone(), b.clone(), marked(c.clone()), d.clone()], all_of).unwrap();
    assert_eq!(text, "<[user\na><assistant\nb>]<user\nc>[<assistant\nd>");
    // With all targets a message of the user may also be marked as one to learn.
    let mut learned = a.clone();
    learned["train"] = true.into();
    assert_eq!(all(&[learned.clone(), b.clone()], all_of), all(&[a.clone(), b.clone()], all_of));
    let why = all(&[learned, b.clone()], ChatTargets::Answers).unwrap_err();
    assert!(why.contains("onebox learns what the assistant says"), "{why}");
    let why = all(&[marked(a.clone()), marked(b.clone())], all_of).unwrap_err();
    assert!(why.contains("each of its messages is marked"), "{why}");
    let text = all(&[a.clone(), marked(b.clone()), c.clone(), d.clone()], last).unwrap();
    assert_eq!(text, "<user\na><assistant\nb><user\nc><assistant\n[d<|im_end|>]\n");
    let why = all(&[a, b, c, marked(d)], last).unwrap_err();
    assert!(why.contains("its last answer is marked") && why.contains("LastAnswer"), "{why}");
}

#[test]
fn a_row_of_a_base_model_has_no_place_for_messages() {
    let none = ChatColumns::default();
    let refused = |row: Json, message: &str| {
        let why = shown(&row, &none, ChatTargets::Answers, true).unwrap_err();
        assert!(why.contains(message), "{row}\n{message}\n{why}");
    };
    let chat = json!([turn("user", "a"), turn("assistant", "b")]);
    let message = "it has messages, and the model has no chat template that writes them";
    refused(json!({ "messages": chat }), message);
    refused(json!({ "conversations": [{ "from": "human", "value": "a" }] }), message);
    refused(json!({ "prompt": [chat[0]], "completion": [chat[1]] }), message);
    refused(
        json!({ "question": "a", "answer": "b", "system": "c" }),
        "it has `system`, and the model",
    );
    refused(
        json!({ "instruction": "a", "output": "b", "history": [["c", "d"]] }),
        "it has a `history`, and Alpaca's prompt",
    );
    let row = json!({ "prompt": "a b", "completion": " c", "id": 3 });
    let (text, unread) = shown(&row, &none, ChatTargets::Answers, true).unwrap();
    assert_eq!(text, "a b[ c<|im_end|>");
    assert_eq!(unread.keys, BTreeSet::from(["`id`".to_owned()]));
}

#[test]
fn what_may_be_meant_in_two_ways_is_refused_with_the_remedy() {
    let chat = json!([turn("user", "a"), turn("assistant", "b")]);
    for (row, names, expected) in [
        (
            json!({ "problem": "a", "solution": "b", "answer": "c" }),
            &[][..],
            "it has `answer` and `solution`, and each may be the answer: say which, as in data.columns: (output: \"answer\")",
        ),
        (
            json!({ "question": "a", "prompt": "b", "answer": "c" }),
            &[],
            "it has `question` and `prompt`, and each may be the question: say which, as in data.columns: (instruction: \"question\")",
        ),
        (
            json!({ "question": "a", "context": "b", "answer": "c" }),
            &[],
            "set data.columns: (instruction: \"question\", input: \"context\")",
        ),
        (json!({ "question": "a" }), &[], "it has `question` and no answer, such as `output`"),
        (json!({ "answer": "a" }), &[], "it has `answer` and no question"),
        (json!({ "question": "a", "answer": ["b"] }), &[], "`answer` is a list, not a text"),
        (
            json!({ "question": "a", "reply": ["b"] }),
            &[("output", "reply")],
            "`reply` is a list, not a text",
        ),
        (
            json!({ "question": "a", "answer": "b", "history": [["c"]] }),
            &[],
            "`history` is no list of pairs of texts",
        ),
        (
            json!({ "question": "a", "answer": "b" }),
            &[("output", "reply")],
            "it has no `reply`, which data.columns names as `output`; it has `answer`, `question`",
        ),
        (
            json!({ "messages": chat }),
            &[("content", "said")],
            "message 1: it has no `said`, which data.columns names as `content`; it has `content`, `role`",
        ),
        (
            json!({ "dialog": chat, "id": 1 }),
            &[],
            "; it has `dialog`, `id`: set data.columns: (messages: \"dialog\")",
        ),
        (
            json!({ "messages": "[{'role': 'user'}]" }),
            &[],
            "`messages` is a text, and that is no JSON",
        ),
        (
            json!({ "prompt": "a", "chosen": "b", "rejected": "c" }),
            &[],
            "onebox has no DPO. To learn the better answer alone, set data.columns: (output: \"chosen\")",
        ),
        (json!({ "prompt": "a", "chosen": chat, "rejected": chat }), &[], "(messages: \"chosen\")"),
        (
            json!({ "prompt": [chat[0]], "chosen": [chat[1]], "rejected": [chat[1]] }),
            &[],
            "(completion: \"chosen\")",
        ),
        (
            json!({ "question": "a", "answer": "b", "kto_tag": false }),
            &[],
            "unpaired preferences (KTO)",
        ),
        (
            json!({ "question": "a", "answer": "b", "image": "c" }),
            &[],
            "it has `image`, and onebox trains on texts alone",
        ),
    ] {
        match shown(&row, &columns(names), ChatTargets::Answers, false) {
            Ok((text, _)) => panic!("taken: {row}\n{text}"),
            Err(why) => assert!(why.contains(expected), "{row}\n{expected}\n{why}"),
        }
    }
    // A column that the config names decides, and other rows have one of the keys alone.
    let row = json!({ "problem": "a", "solution": "b", "answer": "c", "context": "" });
    let (text, unread) =
        shown(&row, &columns(&[("output", "solution")]), ChatTargets::Answers, false).unwrap();
    assert!(text.ends_with("assistant\n[b<|im_end|>]\n"), "{text}");
    // An empty context has nothing to read.
    assert_eq!(unread.keys, ["`answer`"].map(str::to_owned).into());
    let row = json!({ "problem": "a", "solution": "", "answer": "c", "question": null });
    let (text, _) = shown(&row, &ChatColumns::default(), ChatTargets::Answers, false).unwrap();
    assert!(text.ends_with("assistant\n[c<|im_end|>]\n"), "{text}");
}

/// The answer to a prompt of messages may have any name of an answer, and may be a text.
#[test]
fn a_prompt_of_messages_has_its_answer_in_any_column_of_answers() {
    let document = |row: &Json, names: &[(&str, &str)]| {
        shown(row, &columns(names), ChatTargets::Answers, false)
            .unwrap_or_else(|why| panic!("{row}: {why}"))
    };
    let prompt = json!([turn("user", "a"), turn("assistant", "b"), turn("user", "c")]);
    let whole = json!({ "prompt": prompt, "completion": [turn("assistant", "d")] });
    let expected = document(&whole, &[]);
    assert!(expected.0.ends_with("assistant\n[d<|im_end|>]\n"), "{}", expected.0);
    assert_eq!(expected.0.matches('[').count(), 1, "{}", expected.0);
    for key in ["output", "answer", "response", "solution", "completion"] {
        for answer in [json!("d"), json!([turn("assistant", "d")])] {
            let row = json!({ "prompt": prompt, key: answer });
            assert_eq!(document(&row, &[]), expected, "{row}");
        }
    }
    for question in ["question", "input", "instruction"] {
        let row = json!({ question: prompt, "output": "d" });
        assert_eq!(document(&row, &[]), expected, "{row}");
    }
    let row = json!({ "asked": prompt, "reply": "d" });
    for names in [["prompt", "completion"], ["instruction", "output"]] {
        let [first, second] = names;
        assert_eq!(document(&row, &[(first, "asked"), (second, "reply")]), expected);
    }
    // A table has the list as a text.
    let row = json!({ "prompt": prompt.to_string(), "response": "d" });
    assert_eq!(document(&row, &[]), expected);
    // The spelling of a role in the prompt does not depend on the answer.
    let shared = json!([
        { "from": "User", "value": "a" }, { "from": "Bot", "value": "b" }, { "from": "User", "value": "c" }
    ]);
    assert_eq!(document(&json!({ "prompt": shared, "response": "d" }), &[]), expected);

    let refused = |row: Json, is_base: bool, message: &str| match shown(
        &row,
        &ChatColumns::default(),
        ChatTargets::Answers,
        is_base,
    ) {
        Ok((text, _)) => panic!("taken: {row}\n{text}"),
        Err(why) => assert!(why.contains(message), "{row}\n{message}\n{why}"),
    };
    for key in ["input", "context", "history"] {
        let message =
            format!("it has `{key}` beside `prompt`, which is a list of messages: write it");
        refused(json!({ "prompt": prompt, "response": "d", key: "e" }), false, &message);
    }
    let row = json!({ "prompt": prompt, "response": "d" });
    refused(row, true, "it has messages, and the model has no chat template that writes them");
    let row = json!({ "prompt": prompt, "response": 3 });
    refused(row, false, "`response` is a number, not a list of messages");
    let row = json!({ "prompt": ["a"], "response": "d" });
    refused(row, false, "`prompt` is a list, not a text");
}

/// A spelling of a role is replaced only if it alone can mean the role.
#[test]
fn roles_keep_their_names_where_two_can_be_meant() {
    let text = |messages: Json| {
        let row = json!({ "messages": messages });
        shown(&row, &ChatColumns::default(), ChatTargets::Answers, false).unwrap().0
    };
    let several = text(json!([
        turn("Human", "a"),
        turn("user", "b"),
        turn("bot", "c"),
        turn("assistant", "d")
    ]));
    for role in ["Human", "user", "bot", "assistant"] {
        assert!(several.contains(&format!("<|im_start|>{role}\n")), "{several}");
    }
}

#[test]
fn columns_and_targets_are_inputs_of_a_document() {
    let (tokenizer, files) = model();
    let template = Template::of_data(&files).unwrap();
    let none = ChatColumns::default();
    let of = || Rows::of_chats(&tokenizer, &template, "");
    let usual = of().with_columns(&none, ChatTargets::Answers);
    assert_eq!((usual.hash(), usual.makers()), (of().hash(), of().makers()));
    let others = [
        of().with_columns(&none, ChatTargets::All),
        of().with_columns(&none, ChatTargets::LastAnswer),
        of().with_columns(&columns(&[("messages", "dialog")]), ChatTargets::Answers),
        of().with_columns(&columns(&[("messages", "chat")]), ChatTargets::Answers),
        Rows::of_pairs(&tokenizer, template.end_of_text()),
    ];
    let hashes: BTreeSet<u128> = others.iter().map(Rows::hash).collect();
    assert!(hashes.len() == others.len() && !hashes.contains(&usual.hash()));
    let makers: BTreeSet<_> = others.iter().map(Rows::makers).collect();
    assert!(makers.len() == others.len() && !makers.contains(&usual.makers()));
}
