//! Answers to keys of other tools: the key here, with the value if it can be converted, or the
//! reason why there is none.

use files::foreign_text::foreign;
use files::shell::quoted;

/// The table; its head describes the lines.
const TABLE: &str = include_str!("other_tools.txt");

/// Most keys of a file of another tool that a message answers.
const ANSWERED: usize = 12;

/// Value of an unknown key, and the place where it stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GivenValue<'a> {
    /// Text of a number, a word or a string with its quotes; empty for a longer value.
    pub(crate) text: &'a str,
    /// Whether it is from `--set`.
    pub(crate) is_set: bool,
}

/// A line of the table.
#[derive(Clone, Copy)]
struct Row {
    names: &'static str,
    /// Key here; empty if there is none.
    key: &'static str,
    /// Their values with the values here: `true>Block false>None`.
    values: &'static str,
    sentence: &'static str,
}

impl Row {
    /// Reads a line; `None` for comments.
    fn of(line: &'static str) -> Option<Self> {
        let (names, answer) = line.split_once(" = ").filter(|_| !line.starts_with('#'))?;
        let row = Self { names, key: "", values: "", sentence: "" };
        if let Some(sentence) = answer.strip_prefix("- ") {
            return Some(Self { sentence, ..row });
        }
        if let Some((key, sentence)) = answer.split_once(": ") {
            return Some(Self { key, sentence, ..row });
        }
        let (key, values) = answer.split_once(' ').unwrap_or((answer, ""));
        Some(Self { key, values: values.trim_matches(['{', '}']), ..row })
    }

    /// Value here for their value `text`.
    fn converted(self, text: &str) -> Option<&str> {
        if self.values.is_empty() {
            return (!text.is_empty()).then_some(text);
        }
        let theirs = normalized(text.trim_matches('"'));
        let mut pairs = self.values.split(' ').filter_map(|pair| pair.split_once('>'));
        pairs.find(|(name, _)| *name == theirs).map(|(_, ours)| ours)
    }
}

fn rows() -> impl Iterator<Item = Row> {
    TABLE.lines().filter_map(Row::of)
}

/// Spelling of a key or value in the table: `--Seq-Length` is `seq_length`.
fn normalized(name: &str) -> String {
    name.trim_start_matches('-').replace('-', "_").to_lowercase()
}

/// Row of the key `name` of another tool.
fn row(name: &str) -> Option<Row> {
    let name = normalized(name);
    rows().find(|row| row.names.split(' ').any(|known| known == name))
}

/// Answer to the key `name` of another tool in a config; `None` if the table lacks it.
pub(crate) fn answer(name: &str, value: GivenValue<'_>) -> Option<String> {
    let row = row(name)?;
    let plain = row.sentence.replace("{}", if value.text.is_empty() { "N" } else { value.text });
    if row.key.is_empty() {
        return Some(plain);
    }
    let here = format!("here it is called `{}`", row.key);
    if !plain.is_empty() {
        return Some(format!("{here}: {plain}"));
    }
    Some(match (row.converted(value.text), row.values) {
        (Some(text), _) => {
            format!("{here}: write `{}`", foreign(written(row.key, text, value.is_set)))
        }
        (None, "") => here,
        (None, values) => {
            let ours = values.split(' ').filter_map(|pair| pair.split_once('>'));
            let mut ours: Vec<&str> = ours.map(|(_, ours)| ours).collect();
            ours.sort_unstable();
            ours.dedup();
            format!("{here}, with values such as {}", super::ticked(&ours))
        }
    })
}

/// A key with its value, as a config or `--set` has it: `train: (epochs: 3)`.
fn written(key: &str, value: &str, is_set: bool) -> String {
    if is_set {
        return format!("--set {}", quoted(&format!("{key}={value}")));
    }
    match key.rsplit_once('.') {
        Some((section, leaf)) => {
            let sections: Vec<&str> = section.split('.').collect();
            let close = ")".repeat(sections.len());
            format!("{}: ({leaf}: {value}{close}", sections.join(": ("))
        }
        None => format!("{key}: {value}"),
    }
}

/// Keys of onebox for the keys of a file of another tool, such as YAML or JSON, in the order of the
/// file; empty if the file has none that the table knows.
pub(crate) fn translation(text: &str) -> String {
    let mut found: Vec<String> = Vec::new();
    let lines = text.lines().filter_map(|line| line.trim().split_once([':', '=']));
    for (name, _) in lines {
        let name = normalized(name.trim().trim_matches(['"', '\'']));
        let Some(Row { key, .. }) = row(&name).filter(|row| !row.key.is_empty()) else { continue };
        let pair = format!("`{name}` is `{key}`");
        if found.len() < ANSWERED && !found.contains(&pair) {
            found.push(pair);
        }
    }
    if found.is_empty() { String::new() } else { format!(". Here {}", found.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::{LEAST, loaded};
    use super::*;
    use crate::keys;

    fn known() -> Vec<String> {
        keys().into_iter().map(|key| key.name).collect()
    }

    /// Keys that stand in backticks in a sentence, also with a value: `offload.parameters: Host`.
    fn keys_named(sentence: &str) -> Vec<&str> {
        let quoted = sentence.split('`').skip(1).step_by(2);
        let of_key = |c: char| c == '.' || c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit();
        quoted
            .map(|text| text.split(": ").next().unwrap_or(text))
            .filter(|text| text.contains('.') && text.chars().all(of_key))
            .filter(|text| !text.ends_with(".json") && !text.starts_with('.'))
            .collect()
    }

    #[test]
    fn every_key_that_an_answer_names_exists() {
        let known = known();
        let mut count = 0;
        for row in rows() {
            let key = Some(row.key).filter(|key| !key.is_empty());
            for key in key.into_iter().chain(keys_named(row.sentence)) {
                let exists = known.iter().any(|known| known == key);
                assert!(exists, "{}: `{key}`", row.names);
                count += 1;
            }
        }
        assert!(count > 100, "{count}");
    }

    #[test]
    fn a_name_stands_once_and_is_no_key_here() {
        let known = known();
        let mut names: Vec<&str> = rows().flat_map(|row| row.names.split(' ')).collect();
        assert!(names.len() > 150, "{}", names.len());
        for name in &names {
            assert_eq!(*name, normalized(name));
            let leaf = known.iter().find(|key| key.rsplit('.').next() == Some(name));
            assert_eq!(leaf, None, "{name}");
        }
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    /// Each value that the table offers is one that the key takes.
    #[test]
    fn every_converted_value_is_read() {
        for row in rows() {
            for (theirs, ours) in row.values.split(' ').filter_map(|pair| pair.split_once('>')) {
                assert_eq!(row.converted(theirs), Some(ours));
                let set = format!("{}={ours}", row.key);
                // Rules between keys may refuse the value in this small config.
                let why = loaded(LEAST, &[&set]).map_or_else(|e| e.to_string(), |_| String::new());
                assert!(!why.contains("expected") && !why.contains("unknown key"), "{set}: {why}");
            }
        }
    }

    #[test]
    fn an_answer_has_the_key_the_value_or_the_reason() {
        let told = |name: &str, text: &str, is_set| {
            answer(name, GivenValue { text, is_set }).unwrap_or_default()
        };
        for (name, value, said) in [
            (
                "num_train_epochs",
                "3",
                "here it is called `train.epochs`: write `train: (epochs: 3)`",
            ),
            (
                "bf16",
                "true",
                "here it is called `precision`: `Bf16` is the default; leave the key out",
            ),
            ("gradient_checkpointing", "true", "write `recompute: Block`"),
            ("lr_scheduler_type", "\"constant_with_warmup\"", "write `schedule: (kind: Constant)`"),
            ("lr_scheduler_type", "\"polynomial\"", "with values such as `Constant`, `Cosine`"),
            ("rope_theta", "5e5", "write `model: (rope: (theta: 5e5))`"),
            ("gradient_accumulation_steps", "8", "8 x `batch.micro` x `parallel.data`"),
            ("warmup_ratio", "0.03", "0.03 x `train.steps`"),
            ("warmup_ratio", "", "N x `train.steps`"),
            ("lora_r", "8", "onebox has no LoRA"),
            ("--tensor-model-parallel-size", "2", "write `parallel: (tensor: 2)`"),
        ] {
            assert!(
                told(name, value, false).contains(said),
                "{name}: {}",
                told(name, value, false)
            );
        }
        let named = told("base_model", "\"ORG/NAME\"", true);
        assert!(named.ends_with("write `--set 'model.from=\"ORG/NAME\"'`"), "{named}");
        assert!(told("num_epochs", "2", true).ends_with("write `--set train.epochs=2`"));
        assert_eq!(told("layers", "2", false), "");
    }

    #[test]
    fn a_file_of_another_tool_is_translated() {
        let yaml =
            "base_model: Qwen/Qwen3-8B\nnum_epochs: 3\nx: 1\nadapter: lora\n  - sequence_len: 2\n";
        let said = ". Here `base_model` is `model.from`, `num_epochs` is `train.epochs`";
        assert_eq!(translation(yaml), said);
        assert_eq!(
            translation("{\n  \"train_batch_size\": 8\n}"),
            ". Here `train_batch_size` is `batch.global`"
        );
        assert_eq!(translation("a: b"), "");
    }
}
