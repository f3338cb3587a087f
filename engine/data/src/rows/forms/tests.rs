use super::super::{Document, IgnoredKeys, Rows};
use crate::Tokenizer;
use crate::chat::Template;
use crate::model_files::ModelFiles;
use serde_json::{Value as Json, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny")
}

/// Chat template that writes messages of every role, but no calls.
const PLAIN: &str = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/// Chat template that writes calls and tools; code for the arguments replaces `ARGUMENTS`.
const CALLS: &str = "{%- if tools %}{%- for t in tools %}{{- t | tojson + '\n' }}{%- endfor %}{%- endif %}\
    {%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.content %}{{- m.content }}{%- endif %}\
    {%- for c in m.tool_calls %}{{- 'call ' + c.function.name + ' ' }}ARGUMENTS{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

fn with_template<T>(text: &str, then: impl FnOnce(&Rows<'_>) -> T) -> T {
    let tokenizer = Tokenizer::open(&folder().join("tokenizer.json")).unwrap();
    let into = tempfile::tempdir().unwrap();
    std::fs::write(into.path().join("chat_template.jinja"), text).unwrap();
    let template = Template::of_data(&ModelFiles::open(into.path()).unwrap()).unwrap();
    then(&Rows::of_chats(&tokenizer, &template, ""))
}

fn text(rows: &Rows<'_>, row: &Json) -> Result<String, String> {
    let Document { tokens, .. } = rows.document(&row.to_string())?;
    let mut decoder = rows.tokenizer.decoder();
    Ok(tokens.into_iter().map(|token| decoder.push(token)).collect())
}

fn turn(role: &str, content: &str) -> Json {
    json!({ "role": role, "content": content })
}

/// Checks that each row is refused in these words.
fn refused(template: &str, all: &[(Json, &str)]) {
    with_template(template, |rows| {
        for (row, expected) in all {
            match rows.document(&row.to_string()) {
                Ok(_) => panic!("taken: {row}"),
                Err(why) => assert!(why.contains(expected), "{row}\n{expected}\n{why}"),
            }
        }
    });
}

#[test]
fn a_key_that_says_what_is_learned_is_obeyed_or_refused() {
    let user = turn("user", "a");
    let with = |role: &str, key: &str, value: Json| json!({ "messages": [user, { "role": role, "content": "b", key: value }, turn("assistant", "c")] });
    let row = |key: &str, value: Json| json!({ "prompt": "a", "completion": "b", key: value });
    let mut all = vec![
        (
            json!({ "messages": [user, { "role": "assistant", "content": "b", "weight": 1, "train": false }] }),
            "message 2: `weight` 1 and `train` false contradict each other",
        ),
        (
            json!({ "conversations": [{ "from": "human", "value": "a" }, { "from": "gpt", "value": "b", "weight": 0 }] }),
            "each of its answers is marked as not to be learned",
        ),
        (
            with("assistant", "train_detail", json!([{ "train": false }])),
            "message 2: it has `train_detail`",
        ),
        (row("label", json!(false)), "its `label` false says that nothing of it is learned"),
        (row("label", json!("False")), "says that nothing of it is learned"),
        (row("kto_tag", json!("0")), "says that nothing of it is learned"),
        (
            json!({ "messages": [user, turn("assistant", "b")], "label": false }),
            "its `label` false",
        ),
        (row("weight", json!(0.5)), "it has `weight` 0.5, and onebox learns a message whole"),
    ];
    for key in ["weight", "train", "training", "loss", "label"] {
        for (value, shown) in
            [(json!(0.5), "0.5"), (json!(-1), "-1"), (json!("no"), "\"no\""), (json!([]), "[]")]
        {
            let expected =
                format!("message 2: it has `{key}` {shown}, and onebox learns a message whole");
            all.push((with("assistant", key, value), expected.leak()));
        }
        for role in ["user", "system", "tool"] {
            let expected = format!(
                "message 2: it has `{key}` true, and onebox learns what the assistant says, not the role `{role}`"
            );
            all.push((with(role, key, json!(true)), expected.leak()));
        }
    }
    refused(PLAIN, &all);
    with_template(PLAIN, |rows| {
        let counts = |row: Json| -> Vec<bool> { rows.document(&row.to_string()).unwrap().counted };
        let whole =
            counts(json!({ "messages": [user, turn("assistant", "b"), turn("assistant", "c")] }));
        for (value, is_all) in [
            (json!(1), true),
            (json!(true), true),
            (json!(1.0), true),
            (Json::Null, true),
            (json!(0), false),
        ] {
            for key in ["weight", "train", "training", "loss", "label"] {
                let counted = counts(with("assistant", key, value.clone()));
                assert_eq!(counted == whole, is_all, "{key} {value}");
                assert_eq!(counted.len(), whole.len());
            }
        }
        // These keys do not change messages of other roles.
        let asked = counts(
            json!({ "messages": [{ "role": "user", "content": "a", "weight": 0 }, turn("assistant", "b")] }),
        );
        assert_eq!(
            asked,
            counts(json!({ "messages": [user, turn("assistant", "b")], "label": true }))
        );
        // A question without words is its input.
        let alpaca = |instruction: &str, input: &str| json!({ "instruction": instruction, "input": input, "output": "b" });
        assert_eq!(text(rows, &alpaca(" ", "x")), text(rows, &alpaca("x", "")));
        // A class does not decide what is learned.
        let (_, unread) = rows.read(&row("label", json!("fine")).to_string()).unwrap();
        assert_eq!(unread.keys, BTreeSet::from(["`label`".to_owned()]));
    });
}

#[test]
fn a_row_of_another_form_is_refused_with_its_remedy() {
    let chat = json!([turn("user", "a"), turn("assistant", "b")]);
    refused(
        PLAIN,
        &[
            (json!({ "text": "a" }), "set data.format: Jsonl(text: \"text\")"),
            (
                json!({ "prompt": "a", "chosen": "b", "rejected": "c" }),
                "it is a preference pair, and onebox has no DPO",
            ),
            (
                json!({ "messages": chat, "rejected_response": "c" }),
                "it has `rejected_response`: it is a preference pair",
            ),
            (
                json!({ "messages": [turn("User", "a"), turn("bot", "b"), turn("ai", "c")] }),
                "no message has the role `assistant`, so there is nothing to learn; the roles are `ai`, `bot`, `user`: name one",
            ),
            (
                json!({ "messages": chat, "documents": [{}] }),
                "it has `documents`, which no chat gets here",
            ),
            (
                json!({ "messages": chat, "chat_template_kwargs": { "a": 1 } }),
                "it has `chat_template_kwargs`",
            ),
            (json!({ "messages": chat, "images": ["a.png"] }), "it has `images`"),
            (json!({ "messages": chat, "system": ["a"] }), "`system` is a list, not a text"),
            (
                json!({ "messages": [turn("system", "x"), turn("assistant", "b")], "system": "y" }),
                "a message of the system beside a `system` with another text, \"y\"",
            ),
            (
                json!({ "messages": chat, "system": "x", "system_prompt": "y" }),
                "are different texts",
            ),
            (
                json!({ "prompt": "a", "completion": "b", "system": "y" }),
                "it has `system` beside texts",
            ),
            (
                json!({ "prompt": "a", "completion": "b", "tools": [{ "name": "f" }] }),
                "it has `tools` beside texts",
            ),
            (json!({ "messages": chat, "tools": "[" }), "`tools` is a text, and that is no JSON"),
            (
                json!({ "messages": chat, "tools": { "a": 1 } }),
                "`tools` is an object, not a list of tools",
            ),
            (json!({ "messages": chat, "tools": [{}] }), "tool 1 of `tools` has no `name`"),
            (
                json!({ "conversations": [{ "from": "human", "value": 3 }] }),
                "`content` is a number, not a text",
            ),
            (
                json!({ "a\u{1b}\nerror: b": 1, "c".repeat(100_000): 2 }),
                "; it has `a\\u{1b}\\nerror: b`, `ccc",
            ),
        ],
    );
    let long = with_template(PLAIN, |rows| {
        let row = json!({ "c".repeat(100_000): 2 }).to_string();
        rows.document(&row).unwrap_err()
    });
    assert!(long.len() < 300, "{}", long.len());
}

#[test]
fn what_the_template_does_not_show_is_refused_by_name() {
    let chat = |second: Json| json!({ "messages": [turn("user", "b"), second, turn("user", "b"), turn("assistant", "b")] });
    let call = json!({ "function": { "name": "f", "arguments": { "a": 1 } } });
    // The short content also appears elsewhere in the text.
    let deaf = PLAIN.replace("messages %}", "messages if m.role != 'critic' %}");
    refused(
        &deaf,
        &[
            (
                chat(turn("critic", "b")),
                "does not show message 2, or not all of it, of the role `critic`",
            ),
            (
                chat(json!({ "role": "assistant", "content": "b", "tool_calls": [call] })),
                "does not show the calls in `tool_calls` of message 2",
            ),
            (
                json!({ "messages": [turn("user", "b"), turn("assistant", "b")], "tools": [{ "type": "function", "function": { "name": "assistant" } }] }),
                "it has `tools`, and the chat template does not show tool 1",
            ),
            (
                json!({ "messages": [turn("user", "b"), { "role": "assistant", "content": "b", "thinking": "b" }] }),
                "does not show the thoughts of message 2, the last answer",
            ),
        ],
    );
    // A template may leave out the thoughts of an earlier answer, but not the answer.
    let split = PLAIN.replace("m.content", "m.content.split('</think>')[-1]");
    with_template(&split, |rows| {
        let answer = |content: &str| chat(turn("assistant", content)).to_string();
        let (_, unread) = rows.read(&answer("<think>c</think>d")).unwrap();
        assert_eq!(unread, IgnoredKeys { thoughts: true, ..IgnoredKeys::default() });
        let why = rows.read(&answer("c<think>d</think>e")).unwrap_err();
        assert!(why.contains("does not show message 2"), "{why}");
        let last =
            json!({ "messages": [turn("user", "b"), turn("assistant", "<think>c</think>d")] });
        let why = rows.read(&last.to_string()).unwrap_err();
        assert!(why.contains("the thoughts of message 2, the last answer"), "{why}");
        // The last answer is no target.
        let last = json!({ "messages": [turn("user", "b"), turn("assistant", "d"),
            { "role": "assistant", "content": "<think>c</think>d", "weight": 0 }] });
        assert!(rows.read(&last.to_string()).unwrap().1.thoughts);
        // A row without thoughts does not get the thoughts of the previous row.
        assert!(!rows.read(&answer("d")).unwrap().1.thoughts);
    });
    // Templates of Qwen recognize the answer of a tool by these marks.
    let marked = PLAIN.replace(
        "m.content",
        "(m.content if m.role != 'tool' or m.content.startswith('<tool_response>') else '')",
    );
    with_template(&marked, |rows| {
        assert!(
            rows.read(&chat(turn("tool", "<tool_response>\nc\n</tool_response>")).to_string())
                .is_ok()
        );
        assert!(rows.read(&chat(turn("tool", "c")).to_string()).is_err());
    });
    // If a template refuses the words of a probe, the check uses the texts themselves.
    let strict = PLAIN.replace(
        "{{- '<|im_start|>'",
        "{%- if m.role == 'critic' and m.content != 'c\"' %}{{- raise_exception('no') }}{%- endif %}{{- '<|im_start|>'",
    );
    with_template(&strict, |rows| {
        assert!(rows.document(&chat(turn("critic", "c\"")).to_string()).is_ok());
    });
    refused(
        &strict.replace("messages %}", "messages if m.role != 'critic' %}"),
        &[(chat(turn("critic", "c\"")), "does not show message 2")],
    );
}

#[test]
fn keys_that_nothing_reads_are_noted() {
    let names = PLAIN.replace("m.role +", "m.role + (m.name or '') +");
    let row = json!({
        "id": 7, "source": "x", "gone": null, "uuid\n": "y",
        "messages": [{ "role": "user", "content": "a", "name": "n", "at": 3 }, turn("assistant", "b")],
    })
    .to_string();
    let set = |all: &[&str]| all.iter().map(|key| (*key).to_owned()).collect::<BTreeSet<_>>();
    let keys = set(&["`id`", "`source`", "`uuid\\n`"]);
    for (template, of_messages) in [(PLAIN, set(&["`name`", "`at`"])), (&names, set(&["`at`"]))] {
        with_template(template, |rows| {
            // The second call finds the shape in the cache.
            for _ in 0..2 {
                let (_, unread) = rows.read(&row).unwrap();
                let of_messages = of_messages.clone();
                assert_eq!(
                    unread,
                    IgnoredKeys { keys: keys.clone(), of_messages, thoughts: false }
                );
            }
        });
    }
}

#[test]
fn arguments_take_the_form_that_the_template_reads() {
    let call = |arguments: Json| {
        json!({ "messages": [turn("user", "a"),
            { "role": "assistant", "tool_calls": [{ "type": "function", "function": { "name": "f", "arguments": arguments } }] }] })
    };
    let (object, given) = (json!({ "b": 1 }), json!("{\"b\":1}"));
    let encodes = CALLS.replace("ARGUMENTS", "{{- c.function.arguments | tojson }}");
    let both = CALLS.replace(
        "ARGUMENTS",
        "{%- if c.function.arguments is string %}{{- c.function.arguments }}{%- else %}{{- c.function.arguments | tojson }}{%- endif %}",
    );
    let walks = CALLS.replace(
        "ARGUMENTS",
        "{%- for k, v in c.function.arguments.items() %}{{- k ~ '=' ~ v }}{%- endfor %}",
    );
    let joins = CALLS.replace("ARGUMENTS", "{{- '' + c.function.arguments }}");
    let prints = CALLS.replace("ARGUMENTS", "{{- c.function.arguments }}");
    for (template, of_object, of_text) in [
        (&encodes, Some("call f {\"b\": 1}"), "call f {\"b\": 1}"),
        (&both, Some("call f {\"b\": 1}"), "call f {\"b\":1}"),
        (&walks, Some("call f b=1"), "call f b=1"),
        (&joins, None, "call f {\"b\":1}"),
        (&prints, None, "call f {\"b\":1}"),
    ] {
        with_template(template, |rows| {
            let text = |arguments: &Json| text(rows, &call(arguments.clone()));
            assert!(text(&given).unwrap().contains(of_text), "{:?}", text(&given));
            match of_object {
                Some(of_object) => assert!(text(&object).unwrap().contains(of_object)),
                None => {
                    let why = text(&object).unwrap_err();
                    assert!(why.contains("give the JSON of the object as a text"), "{why}");
                }
            }
            for (bad, expected) in [
                (
                    json!("{\"b\":"),
                    "message 2: call 1 of `tool_calls`: `arguments` is a text, and that is no JSON",
                ),
                (json!("[1]"), "`arguments` is the JSON of a list, not of an object"),
                (json!(3), "`arguments` is a number, not an object"),
            ] {
                let why = text(&bad).unwrap_err();
                assert!(why.contains(expected), "{why}");
            }
        });
    }
    // A control token in a JSON escape is text.
    with_template(&encodes, |rows| {
        let control = |row: &Json| {
            let tokens = rows.document(&row.to_string()).unwrap().tokens;
            tokens.into_iter().filter(|token| *token >= 300).count()
        };
        let forged = json!("{\"b\": \"\\u003c|im_end|>\"}");
        assert_eq!(control(&call(forged)), control(&call(json!("{\"b\": \"\"}"))));
        let tools = |name: &str| {
            let tools = format!("[{{\"name\": \"{name}\"}}]");
            json!({ "messages": [turn("user", "a"), turn("assistant", "b")], "tools": tools })
        };
        assert_eq!(control(&tools("\\u003c|im_end|>")), control(&tools("f")));
    });
}

#[test]
fn faulty_calls_are_named() {
    let encodes = CALLS.replace("ARGUMENTS", "{{- c.function.arguments | tojson }}");
    let row_with = |more: Json| {
        let mut message = json!({ "role": "assistant", "content": "b" });
        message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({ "messages": [turn("user", "a"), message] })
    };
    let shared =
        |value: &str| json!({ "conversations": [{ "from": "function_call", "value": value }] });
    let function = json!({ "name": "f", "arguments": "{}" });
    refused(
        &encodes,
        &[
            (
                row_with(json!({ "tool_calls": "[]" })),
                "message 2: `tool_calls` is a text, not a list",
            ),
            (
                row_with(json!({ "tool_calls": [3] })),
                "call 1 of `tool_calls`: it is a number, not an object",
            ),
            (
                row_with(json!({ "tool_calls": [{ "function": 3 }] })),
                "`function` is a number, not an object",
            ),
            (row_with(json!({ "tool_calls": [{ "function": {} }] })), "it has no `name`"),
            (
                row_with(
                    json!({ "tool_calls": [{ "function": function }], "function_call": function }),
                ),
                "it has `tool_calls` and the older `function_call`",
            ),
            (shared("f(a)"), "message 1: it is a call, and its content is no JSON"),
            (shared("3"), "`function` is a number, not an object"),
        ],
    );
    let plain = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}\
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";
    let call = row_with(json!({ "content": null, "function_call": function }));
    refused(plain, &[(call, "message 2 calls a tool and has no text: take a chat template that")]);
    // An empty list and null mean that a message has no calls.
    with_template(&encodes, |rows| {
        let row = |more: Json| rows.document(&row_with(more).to_string()).unwrap();
        assert_eq!(row(json!({ "tool_calls": [] })), row(json!({})));
        assert_eq!(row(json!({ "tool_calls": null, "function_call": null })), row(json!({})));
    });
}
