//! Answers to keys of other tools: the key of onebox, with the value if it can be converted, or the
//! reason why onebox lacks it.

use super::words::{ticked, value_answer};
use files::foreign_text::foreign;
use files::shell::quoted;

/// The table; its head describes the lines.
const TABLE: &str = include_str!("other_tools.txt");

/// Most keys of a file of another tool that a message answers.
const ANSWERED: usize = 12;
/// Most reasons in the answer to a file of another tool.
const REASONS: usize = 6;

/// Beginning of a sentence that says why there is no such key.
const HAS_NO: &str = "onebox has no ";
/// Values that leave a key of another tool unset, or leave the choice to the tool.
const UNSET: [&str; 5] = ["", "null", "none", "auto", "~"];

/// Keys of other tools whose values name a method of training.
const METHODS: [&str; 6] =
    ["adapter", "finetuning_type", "rl", "stage", "train_type", "tuner_type"];
/// Methods that train an adapter, and a key of their row.
const ADAPTERS: (&[&str], &str) =
    (&["lora", "dora", "adalora", "rslora", "longlora", "oft"], "peft");
/// Methods that train an adapter over quantized weights, and a key of their row.
const QUANTIZED: (&[&str], &str) = (&["qlora"], "load_in_4bit");
/// Methods that learn from preferences or rewards, and a key of their row.
const PREFERENCES: (&[&str], &str) = (
    &["dpo", "ipo", "kto", "orpo", "simpo", "cpo", "bco", "grpo", "gdpo", "ppo", "rm", "rlhf"],
    "dpo_beta",
);

/// Curves that end at 0 in other tools.
const TO_0: [&str; 4] = ["cosine", "linear", "warmup_stable_decay", "wsd"];
/// End of an answer about one of these curves.
const OTHER_END: &str = "; there the rate ends at 0, here at `schedule.min_lr`, which is a tenth of `optimizer.lr` by default: \
                         set it to 0 for the same curve";

/// Remedy if a key does not take the value that it has in a text; `None` if it does.
pub(crate) type Refusal = fn(key: &str, text: &str) -> Option<String>;

/// Value of an unknown key, and its source.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GivenValue<'a> {
    /// Text of a number, a word or a string with its quotes; empty for a longer value.
    pub(crate) text: &'a str,
    /// Whether it is from `--set`.
    pub(crate) is_set: bool,
    /// Reads a proposed value. `None`: every value is proposed unchanged.
    pub(crate) refusal: Option<Refusal>,
}

/// A line of the table.
#[derive(Clone, Copy)]
struct Row {
    names: &'static str,
    /// Key of onebox; empty if onebox lacks it.
    key: &'static str,
    /// Values of the other tool with those of onebox: `true>Block false>None`.
    values: &'static str,
    sentence: &'static str,
    /// Remedy if the other tool's value is not valid for the key of onebox.
    refused: &'static str,
}

impl Row {
    /// Reads a line; `None` for comments.
    fn of(line: &'static str) -> Option<Self> {
        let (names, answer) = line.split_once(" = ").filter(|_| !line.starts_with('#'))?;
        let row = Self { names, key: "", values: "", sentence: "", refused: "" };
        if let Some(sentence) = answer.strip_prefix("- ") {
            return Some(Self { sentence, ..row });
        }
        if let Some((key, refused)) = answer.split_once(" | ") {
            return Some(Self { key, refused, ..row });
        }
        if let Some((key, sentence)) = answer.split_once(": ") {
            return Some(Self { key, sentence, ..row });
        }
        let (key, values) = answer.split_once(' ').unwrap_or((answer, ""));
        Some(Self { key, values: values.trim_matches(['{', '}']), ..row })
    }

    /// Values of the other tool, each with the value of onebox.
    fn pairs(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.values.split(' ').filter_map(|pair| pair.split_once('>'))
    }

    /// Value of onebox for the other tool's value `text`, if the table has it.
    fn converted(self, text: &str) -> Option<&'static str> {
        let theirs = normalized(text.trim_matches('"'));
        self.pairs().find(|(name, _)| *name == theirs).map(|(_, ours)| ours)
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

/// Row of the method of training that `value` names, if the key `name` of another tool names methods.
fn method(name: &str, value: &str) -> Option<Row> {
    let is_method = METHODS.contains(&normalized(name).as_str());
    let value = normalized(value.trim_matches('"'));
    let all = [ADAPTERS, QUANTIZED, PREFERENCES];
    let named = all.into_iter().find(|(values, _)| is_method && values.contains(&value.as_str()));
    row(named?.1)
}

/// A valid value of the key `key` for the value `text` of another tool; else the remedy.
fn proposed(key: &str, text: &str, refusal: Option<Refusal>) -> Result<String, String> {
    let refused = |value: &str| refusal?(key, &written(key, value, false));
    let Some(help) = refused(text) else { return Ok(text.to_owned()) };
    let bare = text.trim_matches('"');
    if UNSET.contains(&bare.to_lowercase().as_str()) {
        return Err("leave it out for its default".into());
    }
    let number = bare.parse::<f64>().ok().filter(|number| number.fract() == 0.0);
    let whole = number.filter(|number| (0.0..1e15).contains(number));
    let whole = whole.map(|number| (number as u64).to_string());
    let others =
        [Some(bare.to_owned()), Some(bare.to_lowercase()), whole, Some(format!("{bare:?}"))];
    others.into_iter().flatten().find(|value| refused(value).is_none()).ok_or(help)
}

/// Answer to the key `name` of another tool in a config; `None` if the table lacks it.
pub(crate) fn answer(name: &str, value: GivenValue<'_>) -> Option<String> {
    let row = method(name, value.text).or_else(|| row(name))?;
    let plain = row.sentence.replace("{}", if value.text.is_empty() { "N" } else { value.text });
    if row.key.is_empty() {
        return Some(plain);
    }
    let here = format!("here it is called `{}`", row.key);
    if !plain.is_empty() {
        return Some(format!("{here}: {plain}"));
    }
    let write =
        |ours: &str| format!("{here}: write `{}`", foreign(written(row.key, ours, value.is_set)));
    if row.values.is_empty() {
        return Some(match proposed(row.key, value.text, value.refusal) {
            _ if value.text.is_empty() => here,
            Ok(ours) => write(&ours),
            Err(_) if !row.refused.is_empty() => format!("{here}: {}", row.refused),
            Err(help) => format!("{here}: {help}"),
        });
    }
    let theirs = normalized(value.text.trim_matches('"'));
    if let Some(ours) = row.converted(&theirs) {
        let is_other = row.key == "schedule.kind" && TO_0.contains(&theirs.as_str());
        return Some(write(ours) + if is_other { OTHER_END } else { "" });
    }
    let mut ours: Vec<&str> = row.pairs().map(|(_, ours)| ours).collect();
    ours.sort_unstable();
    ours.dedup();
    Some(match value_answer(&theirs, ours.iter().copied()) {
        Some(answer) => format!("{here}: {answer}"),
        None => format!("{here}, with values such as {}", ticked(&ours)),
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

/// Value in a line of YAML, JSON or TOML, without a comment, a comma and quotes.
fn value_of_line(text: &str) -> &str {
    let value = text.split_once(" #").map_or(text, |(value, _)| value);
    value.trim().trim_end_matches(',').trim().trim_matches(['"', '\''])
}

/// Reasons why onebox lacks the features in a file of another tool, such as YAML or JSON, and keys of
/// onebox for its keys, in the order of the file; empty if the table knows none.
pub(crate) fn translation(text: &str) -> String {
    const OFF: [&str; 5] = ["false", "0", "1", "[]", "{}"];
    let (mut reasons, mut found): (Vec<&str>, Vec<String>) = (Vec::new(), Vec::new());
    let lines = text.lines().filter_map(|line| line.trim().split_once([':', '=']));
    for (name, value) in lines {
        let name = normalized(name.trim().trim_matches(['"', '\'']));
        let value = value_of_line(value).to_lowercase();
        let Some(row) = method(&name, &value).or_else(|| row(&name)) else { continue };
        if row.key.is_empty() {
            let is_off = UNSET.contains(&value.as_str()) || OFF.contains(&value.as_str());
            let is_reason = !is_off && row.sentence.starts_with(HAS_NO);
            if is_reason && reasons.len() < REASONS && !reasons.contains(&row.sentence) {
                reasons.push(row.sentence);
            }
            continue;
        }
        let pair = format!("`{name}` is `{}`", row.key);
        if found.len() < ANSWERED && !found.contains(&pair) {
            found.push(pair);
        }
    }
    let mut out: String = reasons.iter().map(|reason| format!(". {reason}")).collect();
    if !found.is_empty() {
        out += &format!(". Here {}", found.join(", "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::{LEAST, loaded};
    use super::*;
    use crate::keys;
    use crate::keys::refusal;

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
            let named = keys_named(row.sentence).into_iter().chain(keys_named(row.refused));
            for key in key.into_iter().chain(named) {
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
            for (theirs, ours) in row.pairs() {
                assert_eq!(row.converted(theirs), Some(ours));
                let set = format!("{}={ours}", row.key);
                // Rules between keys may refuse the value in this small config.
                let why = loaded(LEAST, &[&set]).map_or_else(|e| e.to_string(), |_| String::new());
                assert!(!why.contains("expected") && !why.contains("unknown key"), "{set}: {why}");
            }
        }
    }

    /// Answers propose only valid values of a key.
    #[test]
    fn every_proposed_value_is_read() {
        let mut count = 0;
        let is_plain = |row: &Row| row.values.is_empty() && row.sentence.is_empty();
        for Row { key, .. } in rows().filter(|row| !row.key.is_empty() && is_plain(row)) {
            for text in ["5e8", "-1", "500", "0", "0.1", "True", "\"8\"", "\"auto\"", "null", "x"] {
                let Ok(ours) = proposed(key, text, Some(refusal)) else { continue };
                let set = format!("{key}={ours}");
                let why = loaded(LEAST, &[&set]).map_or_else(|e| e.to_string(), |_| String::new());
                for wrong in ["expected", "unknown key", "must be a number", "must be a whole"] {
                    assert!(!why.contains(wrong), "{set}: {why}");
                }
                count += 1;
            }
        }
        assert!(count > 100, "{count}");
    }

    #[test]
    fn an_answer_has_the_key_the_value_or_the_reason() {
        let answer_to = |name: &str, text: &str, is_set| {
            answer(name, GivenValue { text, is_set, refusal: Some(refusal) }).unwrap_or_default()
        };
        for (name, value, expected) in [
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
            ("lr_scheduler_type", "\"polynomial\"", "onebox does not have this curve"),
            ("lr_scheduler_type", "\"x\"", "with values such as `Constant`, `Cosine`"),
            ("lr_scheduler_type", "\"cosine\"", "write `schedule: (kind: Cosine)`; there the rate"),
            ("lr_scheduler_type", "\"cosine\"", "ends at 0, here at `schedule.min_lr`"),
            ("reduce_bucket_size", "5e8", "write `offload: (bucket_elements: 500000000)`"),
            ("train_batch_size", "\"auto\"", "`batch.global`: leave it out for its default"),
            ("save_steps", "0.1", "`train.checkpoint_every`: write a whole number from 0"),
            ("max_steps", "-1", "`train.steps`: leave it out, and set `train.epochs`"),
            ("max_steps", "100", "write `train: (steps: 100)`"),
            ("val_size", "500", "above 0 and at most 0.5: for a number of rows"),
            ("val_size", "0.1", "write `data: (validation_fraction: 0.1)`"),
            ("max_grad_norm", "0", "`None` switches it off"),
            ("tie_word_embeddings", "True", "write `model: (tied: true)`"),
            ("optim", "\"adamw_bnb_8bit\"", "onebox has no 8-bit moments"),
            ("optim", "\"paged_adamw_8bit\"", "onebox has no 8-bit moments"),
            ("optim", "\"adamw_torch_fused\"", "write `optimizer: (kind: AdamW)`"),
            ("optim", "\"adafactor\"", "onebox does not have this optimizer"),
            ("optim", "\"lion_8bit\"", "onebox does not have this optimizer"),
            ("finetuning_type", "\"lora\"", "write `adapter: Lora(rank: 16, alpha: 32)`"),
            ("finetuning_type", "\"full\"", "leave it out"),
            ("rl", "\"dpo\"", "onebox has no preference"),
            ("rope_theta", "5e5", "write `model: (rope: (theta: 5e5))`"),
            ("gradient_accumulation_steps", "8", "8 x `batch.micro` x `parallel.data`"),
            ("warmup_ratio", "0.03", "0.03 x `train.steps`"),
            ("warmup_ratio", "", "N x `train.steps`"),
            ("lora_r", "8", "the key stands in `adapter: Lora(rank: 8)`"),
            ("use_dora", "true", "no DoRA"),
            ("finetuning_type", "\"qlora\"", "onebox has no quantized weights"),
            ("peft_type", "\"LORA\"", "write `adapter: Lora(rank: 16, alpha: 32)`"),
            ("modules_to_save", "", "onebox has no trained modules beside adapters"),
            ("lora_dropout", "0.05", "the key stands in `adapter: Lora(dropout: 0.05)`"),
            ("--tensor-model-parallel-size", "2", "write `parallel: (tensor: 2)`"),
        ] {
            assert!(
                answer_to(name, value, false).contains(expected),
                "{name}: {}",
                answer_to(name, value, false)
            );
        }
        let named = answer_to("base_model", "\"ORG/NAME\"", true);
        assert!(named.ends_with("write `--set 'model.from=\"ORG/NAME\"'`"), "{named}");
        assert!(answer_to("num_epochs", "2", true).ends_with("write `--set train.epochs=2`"));
        assert_eq!(answer_to("layers", "2", false), "");
    }

    #[test]
    fn a_file_of_another_tool_is_translated() {
        let yaml =
            "base_model: Qwen/Qwen3-8B\nnum_epochs: 3\nx: 1\nadapter: lora\n  - sequence_len: 2\n";
        let expected = ". Here `base_model` is `model.from`, `num_epochs` is `train.epochs`, `adapter` is `adapter`";
        assert_eq!(translation(yaml), expected);
        assert_eq!(
            translation("finetuning_type: lora  # or full\nlora_rank: 8\n"),
            ". Here `finetuning_type` is `adapter`, `lora_rank` is `adapter.rank`"
        );
        for text in ["stage: dpo", "rl: 'kto'", "  \"stage\": \"rm\",", "dpo_beta = 0.1"] {
            assert!(translation(text).starts_with(". onebox has no preference"), "{text}");
        }
        for none in ["adapter:", "load_in_8bit: false", "stage: sft", "rl: null"] {
            assert_eq!(translation(none), "", "{none}");
        }
        assert_eq!(
            translation("{\n  \"train_batch_size\": 8\n}"),
            ". Here `train_batch_size` is `batch.global`"
        );
        assert_eq!(translation("a: b"), "");
        assert!(translation("adapter: qlora").starts_with(". onebox has no quantized weights"));
    }
}
