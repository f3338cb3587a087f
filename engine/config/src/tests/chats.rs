//! Tests of the keys of chats: names of columns, and targets.

use super::refusals::refuses;
use super::{LEAST, config, loaded};
use crate::{ChatColumns, ChatTargets};

const CHAT: [&str; 2] = ["data.format=Chat", "data.tokenizer=\"t.json\""];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&CHAT[..], more].concat()
}

#[test]
fn columns_and_targets_are_read_and_written() {
    let usual = config(LEAST, &CHAT).data;
    assert!(usual.columns.is_empty() && usual.targets == ChatTargets::Answers);
    let named = ChatColumns::default().with("messages", "a \"dialog\"").with("system", "sys");
    let whole = r#"data.columns=(system: "sys", messages: "a \"dialog\"")"#;
    let parts = [r#"data.columns.messages="a \"dialog\"""#, "data.columns.system=\"sys\""];
    for sets in [&[whole][..], &parts] {
        let sets = with(&[sets, &["data.targets=LastAnswer"]].concat());
        let config = config(LEAST, &sets);
        assert_eq!((&config.data.columns, config.data.targets), (&named, ChatTargets::LastAnswer));
        let text = config.to_ron();
        assert_eq!(super::config(&text, &[]), config, "{text}");
    }
    assert_eq!(
        config(LEAST, &with(&[whole, "data.columns=None"])).data.columns,
        ChatColumns::default()
    );
}

#[test]
fn columns_that_no_row_can_have_are_refused() {
    for (set, expected) in [
        (
            "data.columns=(mesages: \"a\")",
            &["no column \"mesages\"", "did you mean `messages`?"][..],
        ),
        ("data.columns=(zzz: \"a\")", &["no column \"zzz\"", "the columns are `messages`, `role`"]),
        (
            "data.columns=(messages: \"a\", output: \"b\")",
            &["no row has both `messages` and `output`"],
        ),
        ("data.columns=(prompt: \"a\", input: \"b\")", &["no row has both `prompt` and `input`"]),
        ("data.columns=(prompt: \"a\", completion: \"a\")", &["two columns have the name \"a\""]),
        ("data.columns=(messages: \"\")", &["the name of the column `messages` is empty"]),
        ("data.columns=(messages: 3)", &["expected a string, found the number 3"]),
        ("data.columns=\"messages\"", &["expected names of columns, found the string"]),
        ("data.columns=[\"messages\"]", &["expected names of columns, found a list"]),
    ] {
        refuses(&with(&[set]), "data.columns", expected);
    }
    let columns = "data.columns=(messages: \"a\")";
    let rows = ["data.tokenizer=\"t.json\"", "data.format=Jsonl()", columns];
    refuses(
        &rows,
        "data.columns",
        &["one column, which `data.format` names", "Jsonl(text: \"NAME\")"],
    );
    refuses(&["data.format=Megatron", columns], "data.columns", &["these files have no columns"]);
    let targets = ["data.targets=All", "data.format=Megatron"];
    refuses(&targets, "data.targets", &["tokens of prepared chats are made"]);
    refuses(&targets[..1], "data.targets", &["every token of other data is a target"]);
    loaded(LEAST, &["data.targets=Answers"]).unwrap();
}
