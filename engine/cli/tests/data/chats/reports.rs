//! Reports of rows that onebox leaves out or shortens.

use crate::common::{Folder, with_chats};
use serde_json::json;
use std::fs;
use std::path::Path;

/// Copies the fixture's model to `model`, with another chat template.
fn put_model(folder: &Folder, template: &str) {
    let model = folder.path("model");
    fs::create_dir(&model).unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    fs::write(model.join("chat_template.jinja"), template).unwrap();
}

/// Cached tokens and prepared parts give the same reports as the first start.
#[test]
fn what_nothing_reads_is_said_once_at_every_start() {
    let folder = with_chats();
    let row = |i: usize, thoughts: &str| {
        let more = format!("{thoughts}it is {i}");
        let turns = [("user", "a"), ("assistant", &more), ("user", "b"), ("assistant", "c")];
        let turns = turns.map(|(role, content)| json!({ "role": role, "content": content }));
        format!(
            "{}\n",
            json!({ "id": i, "source": "x", "text": "y".repeat(400), "messages": turns })
        )
    };
    let rows: String =
        (0..100).map(|i| row(i, if i < 7 { "<think>z</think>" } else { "" })).collect();
    assert!(rows.len() > 32 << 10, "it is kept in the cache");
    fs::write(folder.path("rows.jsonl"), rows).unwrap();
    let template = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}\
        {%- if loop.last %}{{- m.content }}{%- else %}{{- m.content.split('</think>')[-1] }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}\
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";
    put_model(&folder, template);
    let ron = "(model: (from: \"model/\", seq_len: 64), device: Cpu(memory: \"64MiB\"), precision: Fp32, batch: (micro: 8),
        data: (train: \"rows.jsonl\", format: Chat), train: (steps: 4))";
    fs::write(folder.path("notes.ron"), ron).unwrap();
    let keys = "100 of 100 rows have `id`, `source`, `text`, which nothing reads";
    let thoughts =
        "7 of 100 rows have thoughts in earlier answers, which the chat template leaves out";
    let expected = format!("{keys}; {thoughts}");
    let onebox = |args: &[&str]| {
        let report = folder.onebox(args).ok().stderr;
        assert_eq!(report.matches(&expected).count(), 1, "{report}");
        assert_eq!(report.matches("which nothing reads").count(), 1, "{report}");
    };
    onebox(&["data", "check", "notes.ron"]);
    onebox(&["data", "check", "notes.ron"]);
    // A sample is shown without reports, since programs read it too.
    assert_eq!(folder.onebox(&["data", "show", "notes.ron"]).ok().stderr, "");
    onebox(&["train", "notes.ron", "--dry-run"]);
    onebox(&["data", "prepare", "notes.ron", "tokens"]);
    onebox(&["data", "prepare", "notes.ron", "tokens"]);
}

#[test]
fn lists_in_lines_are_no_array_and_a_reason_stands_once() {
    let folder = with_chats();
    let good = folder.read("chats.jsonl");
    let same_first = format!("{}7\n{good}", "{\"text\": \"a\"}\n".repeat(4));
    for (rows, expected) in [
        (
            "[{\"role\": \"user\"}]\n[{\"role\": \"user\"}]",
            "it is JSON lines with a list in each, not an object: make an object of each, with jq -c '{messages: .}'",
        ),
        ("[{\"from\": \"human\", \"value\": \"a\"}]", "it is JSON lines with a list in each"),
        // A reason is printed once.
        (&same_first, "rows.jsonl line 5: it is a number"),
        (
            "[\n{\"messages\": []},\n{\"messages\": []}]",
            "2 of 2 rows cannot be used (rows.jsonl rows 1, 2: `messages` is empty)",
        ),
    ] {
        fs::write(folder.path("rows.jsonl"), rows).unwrap();
        let args = ["train", "chat.ron", "--dry-run", "--set", "data.train=rows.jsonl"];
        let report = folder.onebox(&args).refused(66, &[]).stderr;
        assert!(report.contains(expected), "{expected}: {report}");
    }
}

#[test]
fn rows_that_are_no_samples_are_named_and_refused_above_a_share() {
    let folder = with_chats();
    let dry = |rows: &str, sets: &[&str]| {
        fs::write(folder.path("rows.jsonl"), rows).unwrap();
        let sets = ["data.train=rows.jsonl"].iter().chain(sets).flat_map(|set| ["--set", set]);
        let all = ["train", "chat.ron", "--dry-run"].into_iter().chain(sets);
        folder.onebox(&all.collect::<Vec<_>>())
    };
    let good = folder.read("chats.jsonl");
    let one_bad = format!("{good}{{\"messages\": []}}\n");
    let report = dry(&one_bad, &[]).ok().stderr;
    assert!(
        report.contains("1 of 61 rows cannot be used (rows.jsonl line 61: `messages` is empty)"),
        "{report}"
    );
    let many_bad = format!("7\n{good}\n{{\n{}", "{\"text\": \"a\"}\n".repeat(4));
    for (rows, sets, expected) in [
        (
            many_bad.as_str(),
            &[][..],
            "6 of 66 rows cannot be used (rows.jsonl line 1: it is a number, not an object",
        ),
        (&many_bad, &[], "rows.jsonl line 63: it is no JSON: "),
        (
            &many_bad,
            &[],
            "rows.jsonl lines 64, 65, 66 and 1 more: it has a `text`, which is no chat: set data.format: Jsonl(text: \"text\"); \
             `onebox data check --all` names each); at most 5 % of the rows",
        ),
        (
            &"7\n".repeat(300),
            &[],
            "none of the first 100 rows can be used (rows.jsonl lines 1, 2, 3 and 97 more: it is a number, not an object",
        ),
        (&good, &["model.seq_len=20"], "have more tokens than model.seq_len + 1, the longest"),
        ("", &[], "empty"),
        ("\n\n", &[], "empty"),
        (
            "[{\"messages\": []}]",
            &[],
            "1 of 1 row cannot be used (rows.jsonl row 1: `messages` is empty)",
        ),
        (
            &good[..good.find('\n').unwrap()],
            &[],
            "it has one row or document, and none is left for validation",
        ),
    ] {
        let report = dry(rows, sets).refused(66, &[]).stderr;
        assert!(report.contains(expected), "{expected}: {report}");
    }
    let cut = dry(&good, &["model.seq_len=50", "data.truncate=true"]).ok().stderr;
    assert!(cut.contains("60 to train") || cut.contains("54 to train"), "{cut}");
    let check = |sets: &[&str], expected: &str| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let all = ["config", "check", "chat.ron"].into_iter().chain(sets);
        let report = folder.onebox(&all.collect::<Vec<_>>()).refused(78, &[]).stderr;
        assert!(report.contains(expected), "{expected}: {report}");
    };
    check(&["data.packing=Windows"], "a window would cut chats anywhere");
    check(&["data.tokenizer=None"], "rows of text need a tokenizer");
    // Only the rules are reported, since the data cannot be read this way.
    for set in ["data.tokenizer=None", "data.format=Auto"] {
        let refusal = folder.onebox(&[
            "config",
            "check",
            "chat.ron",
            "--set",
            set,
            "--set",
            "data.packing=None",
        ]);
        assert!(!refusal.refused(78, &[]).stderr.contains("data.train"), "{set}");
    }
    check(
        &["data.format=Auto", "data.packing=None"],
        "these files do not say where documents begin",
    );
    check(
        &["data.format=Auto", "data.packing=Documents"],
        "these files do not say where documents begin",
    );
}

/// A chat template with too many steps ends the reading after four rows, unless all are named.
#[test]
fn rows_that_take_too_many_steps_are_given_up_or_all_named() {
    let folder = with_chats();
    put_model(&folder, "{{ 'a' * 1000000000 }}");
    let sets = ["--set", "model.from=\"model/\""];
    let onebox = |args: &[&str]| folder.onebox(&[args, &sets].concat()).refused(66, &[]).stderr;
    let report = onebox(&["data", "check", "chat.ron"]);
    assert!(report.contains("none of the first 4 rows can be used"), "{report}");
    let report = onebox(&["data", "check", "chat.ron", "--all"]);
    let rows = folder.read("chats.jsonl").lines().count();
    assert_eq!(
        report.matches("takes more steps than a template may").count(),
        rows + 1,
        "{report}"
    );
}

/// A chat template that prints a list as JSON prints all of its texts, and more.
#[test]
fn a_list_that_the_template_prints_is_refused() {
    let folder = with_chats();
    let template = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}\
        {{- m.content if m.content is string else m.content | tojson }}{{- '<|im_end|>\n' }}{%- endfor %}\
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";
    put_model(&folder, template);
    let check = |texts: &[&str]| {
        let parts: Vec<_> =
            texts.iter().map(|text| json!({ "type": "text", "text": text })).collect();
        let row = json!({ "messages": [
            { "role": "user", "content": parts },
            { "role": "assistant", "content": "c" },
        ] });
        fs::write(folder.path("lists.jsonl"), format!("{row}\n").repeat(3)).unwrap();
        let sets = ["--set", "model.from=\"model/\"", "--set", "data.train=\"lists.jsonl\""];
        folder.onebox(&[&["data", "check", "chat.ron"], &sets[..]].concat())
    };
    let report = check(&["a", "b"]).refused(66, &[]).stderr;
    let why = "the `content` of message 1 is a list, which the chat template does not read";
    assert!(report.contains(why), "{report}");
    // A list of one text is that text.
    check(&["a"]).ok();
}
