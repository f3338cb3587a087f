//! Forms of a chat row: keys of messages and tools, and keys that decide what the model learns.

use super::messages::{is_call, read, texts};
use super::reader::ChatReader;
use super::talk::Conversation;
use super::{calls, has, is_system, kind_of, learned, name_of, shown};
use crate::chat::message;
use crate::ignored_keys::IgnoredKeys;
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

/// Keys of preference pairs.
const PREFERENCES: [&str; 5] =
    ["chosen", "rejected", "rejected_response", "rejected_messages", "rejected_conversations"];
/// Keys that change what a model sees, but that no chat gets here; empty values are allowed.
const FOREIGN: [&str; 8] =
    ["chat_template_kwargs", "documents", "images", "videos", "audios", "image", "video", "audio"];
/// Keys that other programs use for a `prompt`; [`COMPLETIONS`] are keys for a `completion`.
const PROMPTS: [&str; 2] = ["question", "query"];
const COMPLETIONS: [&str; 3] = ["answer", "response", "output"];

/// Reads a row, and notes its ignored keys. `system` begins a chat without a system message.
///
/// # Errors
/// The fault of the row.
pub(super) fn form(
    reader: &ChatReader<'_>,
    mut row: Map,
    system: Option<&str>,
    unread: &mut IgnoredKeys,
) -> Result<Form, String> {
    // As in transformers, a null value means that the key is missing.
    row.retain(|_, value| *value != Json::Null);
    check(&mut row)?;
    if let Some(word) = learned::of_row(&mut row)?.filter(|word| !word.learns) {
        let key = word.shown;
        return Err(format!("its {key} says that nothing of it is learned: leave the row out"));
    }
    let tools = tools(&mut row)?;
    let own = own_system(&mut row)?;
    let (turns, asked) = match row.shift_remove("messages") {
        Some(messages) => (list("messages", messages)?, 0),
        None => match (row.shift_remove("prompt"), row.shift_remove("completion")) {
            (Some(Json::String(prompt)), Some(Json::String(completion))) => {
                if tools.is_some() || own.is_some() {
                    let key = if tools.is_some() { "tools" } else { "system" };
                    return Err(format!(
                        "it has `{key}` beside texts, which no chat template writes: make lists of messages of `prompt` and `completion`"
                    ));
                }
                note_keys(&row, unread);
                return Ok(Form::Texts { prompt, completion });
            }
            (Some(prompt), Some(completion)) => {
                let mut turns = list("prompt", prompt)?;
                let asked = turns.len();
                turns.extend(list("completion", completion)?);
                (turns, asked)
            }
            (Some(_), None) => {
                let rename = match first_of(&row, &COMPLETIONS) {
                    Some(key) => format!(": rename `{key}` to `completion`"),
                    None => has(&row),
                };
                return Err(format!("it has a `prompt` and no `completion`{rename}"));
            }
            (None, completion) => match row.shift_remove("conversations") {
                Some(turns) => (list("conversations", turns)?, 0),
                None => return Err(without_messages(&row, completion.is_some())),
            },
        },
    };
    note_keys(&row, unread);
    let (mut messages, mut learned) = (Vec::with_capacity(turns.len()), Vec::new());
    let (mut after_call, mut first) = (false, 0);
    for (i, turn) in turns.into_iter().enumerate() {
        let wrong = |why: String| format!("message {}: {why}", i + 1);
        let is_call = is_call(&turn);
        let (message, learns) = read(turn, reader).map_err(wrong)?;
        if i == asked {
            first = messages.len();
        }
        let learns = i >= asked && super::has_role(&message, "assistant") && learns;
        match messages.last_mut().filter(|_| is_call && after_call && i != asked) {
            // Consecutive calls are one answer.
            Some(last) => {
                if learned.last() != Some(&learns) {
                    return Err(wrong(
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
    if !learned.contains(&true) {
        return Err(without_targets(&messages[first..]));
    }
    put_system(&mut messages, own, system)?;
    while learned.len() < messages.len() {
        learned.insert(0, false);
    }
    Ok(Form::Talk(Conversation { messages, tools, learned }))
}

/// Refuses preference pairs, and rows with a [`FOREIGN`] key that has a value.
fn check(row: &mut Map) -> Result<(), String> {
    if let Some(key) = first_of(row, &PREFERENCES) {
        return Err(format!(
            "it has `{key}`: it is a preference pair, and onebox has no DPO. To learn the better answer alone, write `prompt` and `completion`"
        ));
    }
    for key in FOREIGN {
        match row.shift_remove(key) {
            Some(value) if !is_empty(&value) => {
                return Err(format!(
                    "it has `{key}`, which no chat gets here, so that the model would learn to answer without it: leave the row out"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_empty(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::String(text) => text.trim().is_empty(),
        Json::Array(values) => values.is_empty(),
        Json::Object(fields) => fields.is_empty(),
        Json::Bool(_) | Json::Number(_) | Json::Digits(_) => false,
    }
}

fn note_keys(row: &Map, unread: &mut IgnoredKeys) {
    unread.keys.extend(row.keys().map(|key| name_of(key)));
}

fn list(key: &str, value: Json) -> Result<Vec<Json>, String> {
    match value {
        Json::Array(messages) if messages.is_empty() => Err(format!("`{key}` is empty")),
        Json::Array(messages) => Ok(messages),
        other => Err(format!("`{key}` is {}, not a list of messages", kind_of(&other))),
    }
}

/// The first of these keys that a row has.
fn first_of<'a>(row: &Map, keys: &[&'a str]) -> Option<&'a str> {
    keys.iter().find(|key| row.contains_key(**key)).copied()
}

fn without_messages(row: &Map, completes: bool) -> String {
    let completion = if completes { Some("completion") } else { first_of(row, &COMPLETIONS) };
    if let (Some(prompt), Some(completion)) = (first_of(row, &PROMPTS), completion) {
        let second = match completion {
            "completion" => String::new(),
            other => format!(", and `{other}` to `completion`"),
        };
        return format!(
            "it has no `messages`, and no `prompt`: rename `{prompt}` to `prompt`{second}"
        );
    }
    if row.get("text").is_some_and(|text| matches!(text, Json::String(_))) {
        return "it has a `text`, which is no chat: set data.format: Jsonl(text: \"text\")".into();
    }
    format!("it has no `messages`, and no `prompt`{}", has(row))
}

/// Error message for messages without a target.
fn without_targets(messages: &[Json]) -> String {
    if messages.iter().any(|one| super::has_role(one, "assistant")) {
        return "each of its answers is marked as not to be learned, so that none is a target: leave the row out".into();
    }
    let roles: BTreeSet<String> = messages
        .iter()
        .filter_map(|one| one.get("role").and_then(Json::as_str))
        .map(name_of)
        .collect();
    let some: Vec<String> = roles.into_iter().take(6).collect();
    format!(
        "no message has the role `assistant`, so there is nothing to learn; the roles are {}",
        some.join(", ")
    )
}

/// Text of the system message, from a key next to the messages.
fn own_system(row: &mut Map) -> Result<Option<String>, String> {
    let mut own: Option<String> = None;
    for key in ["system", "system_prompt"] {
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

/// Tools of a row in the form of OpenAI: `tools`, or the older `functions`.
fn tools(row: &mut Map) -> Result<Option<Json>, String> {
    let mut take = |key| row.shift_remove(key).filter(|value| !is_empty(value));
    let (key, value) = match (take("tools"), take("functions")) {
        (None, None) => return Ok(None),
        (Some(tools), None) => ("tools", tools),
        (None, Some(functions)) => ("functions", functions),
        (Some(_), Some(_)) => {
            return Err("it has `tools` and `functions`: remove one of them".into());
        }
    };
    let is_text = value.as_str().is_some();
    let tools = match value {
        Json::String(text) => {
            Json::read(&text).map_err(|e| format!("`{key}` is a text, and that is no JSON: {e}"))?
        }
        other => other,
    };
    let mut tools = match tools {
        Json::Null => return Ok(None),
        Json::Array(tools) if tools.is_empty() => return Ok(None),
        Json::Array(tools) => tools,
        other => return Err(format!("`{key}` is {}, not a list of tools", kind_of(&other))),
    };
    for (i, tool) in tools.iter_mut().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        if function.get("name").and_then(Json::as_str).is_none() {
            return Err(format!("tool {} of `{key}` has no `name`", i + 1));
        }
        // In texts of LLaMA-Factory, and in `functions`, a tool is the function alone.
        if is_text || key == "functions" {
            *tool = calls::of_function(std::mem::replace(tool, Json::Null));
        }
    }
    Ok(Some(Json::Array(tools)))
}

#[cfg(test)]
mod tests;
