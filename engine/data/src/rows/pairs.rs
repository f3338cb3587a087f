//! Rows with a question and its answer, such as the rows of Alpaca.

use super::columns::called;
use super::{has, kind_of, lists};
use crate::chat::message;
use config::ChatColumns;
use files::json::{Json, Map};

/// Names of a question. The first is the name of Alpaca and of `data.columns`.
const QUESTIONS: [&str; 5] = ["instruction", "question", "query", "problem", "prompt"];
/// Names of an answer. The first is the name of Alpaca and of `data.columns`.
const ANSWERS: [&str; 5] = ["output", "answer", "response", "solution", "completion"];
/// Names of a text that belongs to an instruction: the name of Alpaca, and the name of Dolly.
const INPUTS: [&str; 2] = ["input", "context"];

/// A question with its answer, and the questions and answers before it.
#[derive(Debug, PartialEq)]
pub(super) struct Pair {
    history: Vec<[String; 2]>,
    question: String,
    /// Text that belongs to the question; empty if the row has no such text.
    input: String,
    answer: String,
}

impl Pair {
    /// Removes the keys of a pair from a row and returns the pair; `None` if the row has no question
    /// or no answer.
    ///
    /// # Errors
    /// Two keys may be the question or the answer, or a value is no text.
    pub(super) fn take(row: &mut Map, columns: &ChatColumns) -> Result<Option<Self>, String> {
        let Some([question, answer]) = keys(row, columns)? else { return Ok(None) };
        let mut input = INPUTS
            .into_iter()
            .find(|key| *key != question && row.get(*key).is_some_and(|value| !is_empty(value)));
        if columns.get("input").is_some() {
            input = Some("input").filter(|key| *key != question);
        } else if let Some(key) = input
            && question != QUESTIONS[0]
        {
            return Err(format!(
                "it has `{key}` beside {}: if `{key}` belongs to the question, set data.columns: (instruction: \"{question}\", input: \
                 \"{key}\"); if not, remove it from the row",
                called(columns, question)
            ));
        }
        let history = history(row.shift_remove("history"), columns)?;
        let mut text = |key: &str| match row.shift_remove(key) {
            Some(Json::String(text)) => Ok(text),
            None | Some(Json::Null) => Ok(String::new()),
            Some(other) => {
                Err(format!("{} is {}, not a text", called(columns, key), kind_of(&other)))
            }
        };
        let (question, answer) = (text(question)?, text(answer)?);
        let input = input.map_or(Ok(String::new()), text)?;
        Ok(Some(Self { history, question, input, answer }))
    }

    /// Messages of the chat that a chat template writes.
    pub(super) fn messages(self) -> Vec<Json> {
        let question = match (self.question.trim(), self.input.trim()) {
            (_, "") => self.question,
            ("", _) => self.input,
            _ => format!("{}\n\n{}", self.question, self.input),
        };
        let last = [question, self.answer];
        let turn = |[question, answer]: [String; 2]| {
            [message("user", &question), message("assistant", &answer)]
        };
        self.history.into_iter().chain([last]).flat_map(turn).collect()
    }

    /// Prompt and answer for a model without a chat template: the published prompt of Alpaca
    /// (`PROMPT_DICT` in `train.py` of Stanford Alpaca).
    ///
    /// # Errors
    /// The prompt has no place for earlier answers.
    pub(super) fn texts(self) -> Result<[String; 2], String> {
        if !self.history.is_empty() {
            return Err(
                "it has a `history`, and Alpaca's prompt for a model without a chat template has no place for it: write `prompt` and \
                 `completion`"
                    .into(),
            );
        }
        let Self { question, input, answer, .. } = self;
        let prompt = match input.trim() {
            "" => format!(
                "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n\
                 ### Instruction:\n{question}\n\n### Response:"
            ),
            _ => format!(
                "Below is an instruction that describes a task, paired with an input that provides further context. Write a \
                 response that appropriately completes the request.\n\n\
                 ### Instruction:\n{question}\n\n### Input:\n{input}\n\n### Response:"
            ),
        };
        Ok([prompt, answer])
    }
}

/// Keys of a question that is a list of messages, and of its answer; `None` if the question is
/// anything else. A table has the list of `prompt` as a text. `own` has the keys of a message by
/// `data.columns`.
///
/// # Errors
/// Two keys may be the question or the answer, or a key beside them belongs to a question of words.
pub(super) fn keys_of_messages(
    row: &Map,
    columns: &ChatColumns,
    own: [&str; 2],
) -> Result<Option<[&'static str; 2]>, String> {
    let Some([question, answer]) = keys(row, columns)? else { return Ok(None) };
    let name = called(columns, question);
    let is_messages = match row.get(question) {
        Some(Json::String(text)) if question == "prompt" && text.trim_start().starts_with('[') => {
            let value = lists::of_messages(&name, Json::String(text.clone()), own)?;
            matches!(value, Json::Array(_))
        }
        Some(value) => lists::is_messages(value, own),
        None => false,
    };
    if !is_messages {
        return Ok(None);
    }
    let extra_key = INPUTS
        .into_iter()
        .chain(["history"])
        .find(|key| *key != question && row.get(*key).is_some_and(|value| !is_empty(value)));
    match extra_key {
        Some(key) => Err(format!(
            "it has {} beside {name}, which is a list of messages: write it as one of the messages, or remove it from the row",
            called(columns, key)
        )),
        None => Ok(Some([question, answer])),
    }
}

/// Whether a row has a key of a question.
pub(super) fn has_question(row: &Map) -> bool {
    QUESTIONS.iter().any(|key| row.contains_key(*key))
}

/// Why a row is no pair: which of its keys is missing. `None`: it has no key of a question.
pub(super) fn missing(row: &Map) -> Option<String> {
    let first = |keys: &[&'static str]| keys.iter().find(|key| row.contains_key(**key)).copied();
    let has = has(row);
    match (first(&QUESTIONS), first(&ANSWERS)) {
        (Some("prompt"), _) => Some(format!("it has a `prompt` and no `completion`{has}")),
        (Some(question), _) => {
            Some(format!("it has `{question}` and no answer, such as `output` or `answer`{has}"))
        }
        (None, Some(answer)) => Some(format!(
            "it has `{answer}` and no question, such as `instruction` or `question`{has}"
        )),
        (None, None) => None,
    }
}

/// The keys of the question and of the answer; `None` if the row lacks one of them.
fn keys(row: &Map, columns: &ChatColumns) -> Result<Option<[&'static str; 2]>, String> {
    let question = match key_of(row, columns, &QUESTIONS, "question")? {
        None if row.contains_key("input") => Some("input"),
        other => other,
    };
    let answer = key_of(row, columns, &ANSWERS, "answer")?;
    Ok(question.zip(answer).map(|(question, answer)| [question, answer]))
}

/// The key of the question or of the answer. Keys with empty values give way to others.
fn key_of(
    row: &Map,
    columns: &ChatColumns,
    keys: &[&'static str],
    what: &str,
) -> Result<Option<&'static str>, String> {
    if columns.get(keys[0]).is_some() {
        return Ok(Some(keys[0]));
    }
    let there = || keys.iter().copied().filter(|key| row.contains_key(*key));
    let full: Vec<&'static str> = there().filter(|key| !is_empty(&row[*key])).collect();
    match full[..] {
        [] => Ok(there().next()),
        [one] => Ok(Some(one)),
        [one, other, ..] => Err(format!(
            "it has `{one}` and `{other}`, and each may be the {what}: say which, as in data.columns: ({}: \"{one}\")",
            keys[0]
        )),
    }
}

/// Earlier questions and answers.
fn history(value: Option<Json>, columns: &ChatColumns) -> Result<Vec<[String; 2]>, String> {
    let name = called(columns, "history");
    let wrong = || format!("{name} is no list of pairs of texts, [question, answer]");
    // A table has a list as a text.
    let value = match value {
        Some(Json::String(text)) if text.trim_start().starts_with('[') => {
            Some(lists::parsed(&name, &text)?)
        }
        other => other,
    };
    let turns = match value {
        None | Some(Json::Null) => return Ok(Vec::new()),
        Some(value) if is_empty(&value) => return Ok(Vec::new()),
        Some(Json::Array(turns)) => turns,
        Some(_) => return Err(wrong()),
    };
    let pair = |turn: Json| match turn {
        Json::Array(texts) => match <[Json; 2]>::try_from(texts) {
            Ok([Json::String(question), Json::String(answer)]) => Ok([question, answer]),
            _ => Err(wrong()),
        },
        _ => Err(wrong()),
    };
    turns.into_iter().map(pair).collect()
}

pub(super) fn is_empty(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::String(text) => text.trim().is_empty(),
        Json::Array(values) => values.is_empty(),
        Json::Object(fields) => fields.is_empty(),
        Json::Bool(_) | Json::Number(_) | Json::Digits(_) => false,
    }
}
