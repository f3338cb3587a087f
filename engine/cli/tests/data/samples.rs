//! `onebox data show` and `onebox data check`: the origin of a sample, and the omitted rows.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::with_chats;
use std::fs;

/// Text like a control token stays text, and each document is named with its place.
#[test]
fn a_sample_shows_control_tokens_and_where_it_is_from() {
    let folder = with_chats();
    let chat = |i: usize| {
        let user = format!("{{\"role\": \"user\", \"content\": \"a<|im_end|>{i}\"}}");
        format!("{{\"messages\": [{user}, {{\"role\": \"assistant\", \"content\": \"b\"}}]}}\n")
    };
    let rows: String = (0..60).map(|i| if i == 4 { "\n{}\n".into() } else { chat(i) }).collect();
    fs::write(folder.path("rows.jsonl"), &rows).unwrap();
    let show = |more: &[&str]| {
        let args = ["data", "show", "chat.ron", "--set", "data.train=rows.jsonl"];
        folder.onebox(&[&args[..], more].concat()).ok().stdout
    };
    let rows: Vec<&str> = rows.lines().collect();
    for sample in ["0", "1", "2", "3", "4", "5", "6", "7"] {
        let text = show(&["--sample", sample]);
        let from = text.lines().find_map(|line| line.strip_prefix("---- ")).unwrap();
        let (file, line) = from.rsplit_once(':').unwrap();
        assert!(file.ends_with("rows.jsonl"), "{text}");
        let row = rows[line.parse::<usize>().unwrap() - 1];
        let (_, rest) = row.split_once("a<|im_end|>").unwrap();
        let (typed, _) = rest.split_once('"').unwrap();
        let turn = format!("user\na<|im_end|>{typed}«<|im_end|>»\n«<|im_start|>»assistant\n[[b«");
        assert!(text.contains(&turn), "no {turn} in {text}");
    }
    let packed = ["--set", "data.packing=Documents", "--set", "model.seq_len=256"];
    let text = show(&packed);
    let headings: Vec<&str> = text.lines().filter(|line| line.starts_with("---- ")).collect();
    assert!(headings.len() > 2, "{text}");
    assert!(headings.iter().all(|line| line.contains("rows.jsonl:")), "{text}");
    let output: serde_json::Value =
        serde_json::from_str(&show(&[&packed[..], &["--json"]].concat())).unwrap();
    let origins = output["origins"].as_array().unwrap();
    assert_eq!(origins.len(), headings.len(), "{output}");
    let ends =
        |(line, origin): (&&str, &serde_json::Value)| line.ends_with(origin.as_str().unwrap());
    assert!(headings.iter().zip(origins).all(ends), "{headings:?} {origins:?}");
}

#[test]
fn a_check_names_every_row_that_is_left_out_if_asked() {
    let folder = with_chats();
    let good = folder.read("chats.jsonl");
    let rows = |good: &str| format!("{good}{}{good}", "{\"messages\": []}\n".repeat(5));
    let named = |rows: &str, more: &[&str]| {
        fs::write(folder.path("rows.jsonl"), rows).unwrap();
        let args = ["data", "check", "chat.ron", "--set", "data.train=rows.jsonl"];
        let done = folder.onebox(&[&args[..], more].concat());
        let lines = done.stderr.lines().filter(|line| line.contains("rows.jsonl line 6"));
        let numbers = lines.filter(|line| line.ends_with(": `messages` is empty")).count();
        (done.code, numbers, done.stderr)
    };
    let (code, lines, message) = named(&rows(&good), &[]);
    assert_eq!((code, lines), (0, 0), "{message}");
    let rest =
        "lines 61, 62, 63 and 2 more: `messages` is empty; `onebox data check --all` names each)";
    assert!(
        message.contains("5 of 125 rows cannot be used") && message.contains(rest),
        "{message}"
    );
    let (code, lines, message) = named(&rows(&good), &["--all"]);
    assert_eq!((code, lines), (0, 5), "{message}");
    // Too many rows are bad, and too many are long.
    let (code, lines, message) = named(&rows(""), &["--all"]);
    assert!(
        code == 66 && lines == 0 && message.contains("rows.jsonl line 5: `messages`"),
        "{message}"
    );
    let long = ["--all", "--set", "model.seq_len=20"];
    let (code, _, message) = named(&good, &long);
    assert!(code == 66 && message.contains("tokens, more than a sample"), "{message}");
}
