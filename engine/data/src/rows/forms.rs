//! Forms of a chat row: keys of messages and tools, and keys that decide what the model learns.

use super::columns::{self, called};
use super::messages::{is_call, name_roles, read, texts};
use super::pairs::{self, Pair, is_empty};
use super::reader::ChatReader;
use super::talk::Conversation;
use super::{calls, has, has_role, is_system, kind_of, learned, lists, name_of, shown};
use crate::chat::message;
use crate::ignored_keys::IgnoredKeys;
use config::{ChatColumns, ChatTargets};
use files::json::{Json, Map};
use std::collections::BTreeSet;

/// Content of a chat row.
pub(super) enum Form {
    Talk(Conversation),
    /// Two texts that no template writes.
    Texts {
        prompt: String,
        completion: String,
    },
}

/// Settings for reading rows of chats.
#[derive(Debug)]
pub(super) struct ChatSettings<'a> {
    /// Reader with the chat template; `None` if the model has no template, so that rows are texts.
    pub(super) reader: Option<ChatReader<'a>>,
    /// First message of each chat without a system message.
    pub(super) system: Option<String>,
    pub(super) columns: ChatColumns,
    pub(super) targets: ChatTargets,
}

impl<'a> ChatSettings<'a> {
    pub(super) fn new(reader: Option<ChatReader<'a>>, system: Option<String>) -> Self {
        Self { reader, system, columns: ChatColumns::default(), targets: ChatTargets::Answers }
    }

    /// All inputs of the template's texts; `None` without a template.
    pub(super) fn template_identity(&self) -> Option<String> {
        self.reader.as_ref().map(|reader| reader.template.identity())
    }
}

/// Keys of preference pairs.
const PREFERENCES: [&str; 5] =
    ["chosen", "rejected", "rejected_response", "rejected_messages", "rejected_conversations"];
/// Keys that change what a model sees, but that no chat gets here; empty values are allowed.
const FOREIGN: [&str; 2] = ["chat_template_kwargs", "documents"];
/// Keys of things that are no texts; empty values are allowed.
const NO_TEXTS: [&str; 6] = ["images", "videos", "audios", "image", "video", "audio"];

/// Kind of a row.
enum Kind {
    /// A list of messages under this key.
    Messages(&'static str),
    /// `prompt` and `completion`: two texts, or two lists of messages.
    Completion,
    /// A question and an answer.
    Pair,
}

/// Content of a row before its messages are read.
enum Exchange {
    Turns(Turns),
    /// Two texts that no template writes.
    Texts {
        prompt: String,
        completion: String,
    },
}

/// Messages of a row, as the row has them.
struct Turns {
    messages: Vec<Json>,
    /// Number of the first messages, which are the prompt.
    asked: usize,
    /// Text that answers the messages, if the row has a separate answer.
    answer: Option<String>,
}

impl Turns {
    /// Messages without a prompt: each answer may be a target.
    const fn of_chat(messages: Vec<Json>) -> Self {
        Self { messages, asked: 0, answer: None }
    }
}

impl Kind {
    /// Kind that `columns` demands; without a demand, the kind that the keys of the row show.
    fn of(row: &Map, columns: &ChatColumns) -> Self {
        let list = if row.contains_key("messages") { "messages" } else { "conversations" };
        let [messages, completion, pair, _] =
            ChatColumns::FORMS.map(|form| form.iter().any(|key| columns.get(key).is_some()));
        let has = |key: &str| row.contains_key(key);
        match (messages, completion, pair) {
            (true, ..) => Self::Messages(list),
            (_, true, _) => Self::Completion,
            (.., true) => Self::Pair,
            _ if has("messages") => Self::Messages(list),
            _ if has("prompt") && has("completion") => Self::Completion,
            _ if has("conversations") => Self::Messages(list),
            _ => Self::Pair,
        }
    }
}

/// Reads a row, and notes its ignored keys.
///
/// # Errors
/// The fault of the row.
pub(super) fn form(
    with: &ChatSettings<'_>,
    row: Map,
    unread: &mut IgnoredKeys,
) -> Result<Form, String> {
    let columns = &with.columns;
    let mut row = columns::of_row(row, columns, unread)?;
    // As in transformers, a null value means that the key is missing.
    row.retain(|_, value| *value != Json::Null);
    check(&mut row, columns)?;
    if let Some(word) = learned::of_row(&mut row)?.filter(|word| !word.learns) {
        let key = word.shown;
        return Err(format!(
            "its {key} says that nothing of it is learned, such as a bad answer of unpaired preferences (KTO), on which onebox does \
             not train: leave the row out"
        ));
    }
    let tools = calls::of_row(&mut row)?;
    let own = own_system(&mut row, columns)?;
    let extra_key = if tools.is_some() { Some("tools") } else { own.as_ref().map(|_| "system") };
    let exchange = match Kind::of(&row, columns) {
        Kind::Messages(key) => {
            let Some(messages) = row.shift_remove(key) else {
                return Err(without_messages(&row));
            };
            Exchange::Turns(Turns::of_chat(list(&called(columns, key), messages, true)?))
        }
        Kind::Completion => of_completion(&mut row, columns, extra_key)?,
        Kind::Pair => of_pair(&mut row, with, extra_key)?,
    };
    note_keys(&row, unread);
    let turns = match exchange {
        Exchange::Turns(turns) => turns,
        Exchange::Texts { prompt, completion } => return Ok(Form::Texts { prompt, completion }),
    };
    let Some(reader) = &with.reader else {
        return Err(
            "it has messages, and the model has no chat template that writes them: take a model with one (its name often ends with \
             Instruct or Chat), or put the chat_template.jinja of such a model beside the tokenizer, or write `prompt` and `completion`"
                .into(),
        );
    };
    let (mut messages, mut learned) = talk(with, reader, turns, unread)?;
    put_system(&mut messages, own, with.system.as_deref())?;
    while learned.len() < messages.len() {
        learned.insert(0, with.targets == ChatTargets::All);
    }
    Ok(Form::Talk(Conversation { messages, tools, learned }))
}

/// Reads `prompt` and `completion`. `extra_key` is a key of the row that needs a chat template.
fn of_completion(
    row: &mut Map,
    columns: &ChatColumns,
    extra_key: Option<&str>,
) -> Result<Exchange, String> {
    const KEYS: [&str; 2] = ["prompt", "completion"];
    match both(row, columns, KEYS)? {
        [Some(Json::String(prompt)), Some(Json::String(completion))] => match extra_key {
            None => Ok(Exchange::Texts { prompt, completion }),
            Some(key) => Err(format!(
                "it has `{key}` beside texts, which no chat template writes: make lists of messages of `prompt` and `completion`"
            )),
        },
        [Some(prompt), Some(completion)] => {
            answered(prompt, completion, KEYS.map(|key| called(columns, key)))
        }
        [prompt, _] => {
            let (is, lacks) = match prompt {
                Some(_) => ("prompt", "completion"),
                None => ("completion", "prompt"),
            };
            let has = has(row);
            Err(format!("it has a `{is}` and no `{lacks}`{has}"))
        }
    }
}

/// Reads a question and its answer. `extra_key` is a key of the row that needs a chat template.
fn of_pair(
    row: &mut Map,
    with: &ChatSettings<'_>,
    extra_key: Option<&str>,
) -> Result<Exchange, String> {
    let columns = &with.columns;
    if let Some(keys) = pairs::keys_of_messages(row, columns, own_keys(columns))? {
        let [Some(prompt), answer] = both(row, columns, keys)? else {
            unreachable!("the row has the list of messages")
        };
        // As in a pair of texts, an answer that is null is empty.
        let answer = answer.unwrap_or_else(|| Json::String(String::new()));
        return answered(prompt, answer, keys.map(|key| called(columns, key)));
    }
    let Some(pair) = Pair::take(row, columns)? else { return Err(without_messages(row)) };
    if with.reader.is_some() {
        return Ok(Exchange::Turns(Turns::of_chat(pair.messages())));
    }
    if let Some(key) = extra_key {
        return Err(format!(
            "it has `{key}`, and the model has no chat template that writes it: write `prompt` and `completion`"
        ));
    }
    let [prompt, completion] = pair.texts()?;
    Ok(Exchange::Texts { prompt, completion })
}

/// A prompt that is a list of messages with its answer: a list of messages, or the text of the
/// assistant's message. `names` are the names of both columns, for messages.
fn answered(prompt: Json, answer: Json, names: [String; 2]) -> Result<Exchange, String> {
    let [prompts, answers] = names;
    let mut messages = list(&prompts, prompt, false)?;
    let asked = messages.len();
    let answer = match answer {
        Json::String(text) => Some(text),
        other => {
            messages.extend(list(&answers, other, false)?);
            None
        }
    };
    Ok(Exchange::Turns(Turns { messages, asked, answer }))
}

/// Keys of the role and of the content of a message, as `data.columns` names them.
fn own_keys(columns: &ChatColumns) -> [&str; 2] {
    ["role", "content"].map(|key| columns.get(key).unwrap_or(key))
}

/// Removes the values of two keys from a row and returns the values. A table has lists of messages
/// as texts.
fn both(
    row: &mut Map,
    columns: &ChatColumns,
    keys: [&'static str; 2],
) -> Result<[Option<Json>; 2], String> {
    let own = own_keys(columns);
    let mut take = |key: &'static str| {
        let value = row.shift_remove(key);
        let list = |value| lists::of_messages(&called(columns, key), value, own);
        value.map(list).transpose()
    };
    let [first, second] = keys;
    Ok([take(first)?, take(second)?])
}

/// Messages in the form of templates, and which of them are targets.
fn talk(
    with: &ChatSettings<'_>,
    reader: &ChatReader<'_>,
    turns: Turns,
    unread: &mut IgnoredKeys,
) -> Result<(Vec<Json>, Vec<bool>), String> {
    let Turns { messages: turns, asked, answer } = turns;
    let wrong = |i: usize, why: String| format!("message {}: {why}", i + 1);
    let rename =
        |(i, turn)| columns::of_message(turn, &with.columns, unread).map_err(|why| wrong(i, why));
    let mut turns: Vec<Json> =
        turns.into_iter().enumerate().map(rename).collect::<Result<_, _>>()?;
    name_roles(&mut turns);
    turns.extend(answer.map(|text| message("assistant", &text)));
    let all = with.targets == ChatTargets::All;
    let (mut messages, mut learned) = (Vec::with_capacity(turns.len()), Vec::new());
    let (mut after_call, mut first) = (false, 0);
    for (i, turn) in turns.into_iter().enumerate() {
        let is_call = is_call(&turn);
        let (message, learns) = read(turn, reader, all).map_err(|why| wrong(i, why))?;
        if i == asked {
            first = messages.len();
        }
        let learns = (all || i >= asked && has_role(&message, "assistant")) && learns;
        match messages.last_mut().filter(|_| is_call && after_call && i != asked) {
            // Consecutive calls are one answer.
            Some(last) => {
                if learned.last() != Some(&learns) {
                    return Err(wrong(
                        i,
                        "it and the call before it are one answer, of which one part is to be learned and the other is not".into(),
                    ));
                }
                calls::append(last, message);
            }
            None => {
                learned.push(learns);
                messages.push(message);
            }
        }
        after_call = is_call;
    }
    if with.targets == ChatTargets::LastAnswer {
        let last = messages.iter().rposition(|one| has_role(one, "assistant"));
        if last.is_some_and(|last| !learned[last]) && learned.contains(&true) {
            return Err(
                "its last answer is marked as not to be learned, and data.targets is LastAnswer: leave the row out".into(),
            );
        }
        learned.iter_mut().enumerate().for_each(|(i, learns)| *learns &= Some(i) == last);
    }
    if !learned.contains(&true) {
        return Err(without_targets(&messages[first..], all));
    }
    Ok((messages, learned))
}

/// Refuses preference pairs, and rows with a [`FOREIGN`] key that has a value.
fn check(row: &mut Map, columns: &ChatColumns) -> Result<(), String> {
    // A config that names one of these columns has chosen the answer to learn.
    let is_chosen = columns.iter().any(|(_, name)| PREFERENCES.contains(&name));
    if let Some(key) = first_of(row, &PREFERENCES).filter(|_| !is_chosen) {
        let is_list = |key: &str| matches!(row.get(key), Some(Json::Array(_)));
        let column = match row.get("chosen") {
            Some(Json::Array(_)) if is_list("prompt") => Some("completion"),
            Some(Json::Array(_)) => Some("messages"),
            Some(Json::String(_)) if pairs::has_question(row) => Some("output"),
            _ => None,
        };
        let alone = match column {
            Some(column) => format!("set data.columns: ({column}: \"chosen\")"),
            None => "write `messages`, or `prompt` and `completion`".into(),
        };
        return Err(format!(
            "it has `{key}`: it is a preference pair, and onebox has no DPO. To learn the better answer alone, {alone}"
        ));
    }
    for key in FOREIGN.into_iter().chain(NO_TEXTS) {
        match row.shift_remove(key) {
            Some(value) if !is_empty(&value) => {
                let why = match NO_TEXTS.contains(&key) {
                    true => "and onebox trains on texts alone",
                    false => "which no chat gets here",
                };
                return Err(format!(
                    "it has `{key}`, {why}, so that the model would learn to answer without it: leave the row out"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

fn note_keys(row: &Map, unread: &mut IgnoredKeys) {
    // An empty value has nothing to read, such as the `input` of many Alpaca rows.
    let filled = row.iter().filter(|(_, value)| !is_empty(value));
    unread.keys.extend(filled.map(|(key, _)| name_of(key)));
}

/// The messages of a list, which may be JSON in a text if `parses`.
fn list(name: &str, value: Json, parses: bool) -> Result<Vec<Json>, String> {
    let value = match value {
        Json::String(text) if parses && text.trim_start().starts_with('[') => {
            lists::parsed(name, &text)?
        }
        other => other,
    };
    match value {
        Json::Array(messages) if messages.is_empty() => Err(format!("{name} is empty")),
        Json::Array(messages) => Ok(messages),
        other => Err(format!("{name} is {}, not a list of messages", kind_of(&other))),
    }
}

/// The first of these keys that a row has.
fn first_of<'a>(row: &Map, keys: &[&'a str]) -> Option<&'a str> {
    keys.iter().find(|key| row.contains_key(**key)).copied()
}

/// Error message for a row of no known form.
fn without_messages(row: &Map) -> String {
    const NAMES: &str = ": name the columns of the question and of the answer, \
                         data.columns: (instruction: \"..\", output: \"..\")";
    if let Some(missing) = pairs::missing(row) {
        return missing + NAMES;
    }
    if row.get("text").is_some_and(|text| matches!(text, Json::String(_))) {
        return "it has a `text`, which is no chat: set data.format: Jsonl(text: \"text\")".into();
    }
    let is_turn = |turn: &Json| {
        [["role", "content"], ["from", "value"]]
            .iter()
            .any(|keys| keys.iter().all(|key| turn.get(key).is_some()))
    };
    let is_chat =
        |value: &Json| matches!(value, Json::Array(turns) if turns.first().is_some_and(is_turn));
    let is_name = |key: &str| {
        key.len() < 60 && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-. ".contains(c))
    };
    let mut chats = row.iter().filter(|(key, value)| is_name(key) && is_chat(value));
    let remedy = match chats.next() {
        Some((key, _)) => format!(": set data.columns: (messages: \"{key}\")"),
        None => NAMES.into(),
    };
    format!("it has no `messages`, and no `prompt`{}{remedy}", has(row))
}

/// Error message for messages without a target.
fn without_targets(messages: &[Json], all: bool) -> String {
    if all {
        return "each of its messages is marked as not to be learned, so that none is a target: leave the row out".into();
    }
    if messages.iter().any(|one| has_role(one, "assistant")) {
        return "each of its answers is marked as not to be learned, so that none is a target: leave the row out".into();
    }
    let roles: BTreeSet<String> = messages
        .iter()
        .filter_map(|one| one.get("role").and_then(Json::as_str))
        .map(name_of)
        .collect();
    let some: Vec<String> = roles.into_iter().take(6).collect();
    format!(
        "no message has the role `assistant`, so there is nothing to learn; the roles are {}: name one of them `assistant`",
        some.join(", ")
    )
}

/// Text of the system message, from a key next to the messages.
fn own_system(row: &mut Map, columns: &ChatColumns) -> Result<Option<String>, String> {
    let mut own: Option<String> = None;
    let other = Some("system_prompt").filter(|_| columns.get("system").is_none());
    for key in ["system"].into_iter().chain(other) {
        let text = match row.shift_remove(key) {
            Some(Json::String(text)) if !text.trim().is_empty() => text,
            Some(Json::String(_)) | None => continue,
            Some(other) => return Err(format!("`{key}` is {}, not a text", kind_of(&other))),
        };
        if own.as_ref().is_some_and(|own| *own != text) {
            return Err(
                "`system` and `system_prompt` are different texts: remove one of them".into()
            );
        }
        own = Some(text);
    }
    Ok(own)
}

/// Puts the system message in front, unless the chat has one. The text is `own`, or else `of_all`.
fn put_system(
    messages: &mut Vec<Json>,
    own: Option<String>,
    of_all: Option<&str>,
) -> Result<(), String> {
    let there = messages.iter().position(is_system);
    match (there, own) {
        (None, own) => {
            let first = own.as_deref().or(of_all).map(|text| message("system", text));
            messages.splice(0..0, first);
            Ok(())
        }
        (Some(there), Some(own)) if texts(&messages[there]).concat().trim().is_empty() => {
            messages[there] = message("system", &own);
            Ok(())
        }
        (Some(there), Some(own)) if texts(&messages[there]).concat() != own => Err(format!(
            "it has a message of the system beside a `system` with another text, {}: remove one of them",
            shown(&Json::String(own))
        )),
        (Some(_), _) => Ok(()),
    }
}

#[cfg(test)]
mod shapes;
#[cfg(test)]
mod tests;
