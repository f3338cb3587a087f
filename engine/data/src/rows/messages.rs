//! One message of a row, as chat templates know it.

use super::reader::ChatReader;
use super::talk::THOUGHTS;
use super::{calls, contents, has, has_role, kind_of, learned, name_of};
use files::json::{Json, Map};
use std::collections::BTreeSet;

/// Roles under the key `from` of shared conversations, and their roles in templates.
const SHARED: [(&str, &str); 5] = [
    ("human", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
];
/// Roles of a message with JSON of calls as content.
const CALLS: [&str; 2] = ["function_call", "tool_call"];
/// Roles of a message with the answer of a tool.
const ANSWERS: [&str; 2] = ["observation", "tool_response"];

/// Other names of the roles that chat templates know, in lower case.
const SPELLINGS: [(&str, &[&str]); 3] = [
    ("user", &["human", "prompter"]),
    ("assistant", &["gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "ai", "model"]),
    ("system", &[]),
];

/// Key and text of a turn's role.
fn role_of(turn: &Json) -> Option<(&'static str, &str)> {
    let role = |key: &'static str| Some((key, turn.get(key)?.as_str()?));
    role("role").or_else(|| role("from"))
}

/// Role of a shared conversation, under its name in templates.
fn shared(role: &str) -> &str {
    SHARED.iter().find(|(name, _)| *name == role).map_or(role, |(_, known)| known)
}

/// Gives a role its name in templates if a chat has no message of that name, and only one other
/// spelling that can mean it, such as `User` or `bot`.
pub(super) fn name_roles(turns: &mut [Json]) {
    let known = |turn: &Json| match role_of(turn)? {
        ("from", role) => Some(shared(role).to_owned()),
        (_, role) => Some(role.to_owned()),
    };
    let roles: BTreeSet<String> = turns.iter().filter_map(known).collect();
    for (name, others) in SPELLINGS {
        let means = |role: &&String| {
            let lower = role.to_lowercase();
            lower == name || others.contains(&lower.as_str())
        };
        let mut spelled = roles.iter().filter(means);
        let (Some(spelling), None) = (spelled.next(), spelled.next()) else { continue };
        for turn in turns.iter_mut() {
            let Some((key, _)) = role_of(turn).filter(|(_, role)| role == spelling) else {
                continue;
            };
            if let Json::Object(fields) = turn {
                fields.insert(key.into(), Json::String(name.into()));
            }
        }
    }
}

/// Whether the role alone makes a turn a call.
pub(super) fn is_call(turn: &Json) -> bool {
    let role = turn.get("role").or_else(|| turn.get("from")).and_then(Json::as_str);
    role.is_some_and(|role| CALLS.contains(&role))
}

/// Reads a message, and whether its keys allow the model to learn it. With `learns_all` the model
/// learns messages of all roles.
///
/// # Errors
/// The fault of the message.
pub(super) fn read(
    turn: Json,
    reader: &ChatReader<'_>,
    learns_all: bool,
) -> Result<(Json, bool), String> {
    let Json::Object(fields) = turn else {
        return Err(format!("it is {}, not an object", kind_of(&turn)));
    };
    let mut fields = renamed(fields);
    let role = match fields.get("role") {
        Some(Json::String(role)) => role.clone(),
        Some(other) => return Err(format!("`role` is {}, not a text", kind_of(other))),
        None => return Err(format!("it has no `role`{}", has(&fields))),
    };
    if CALLS.contains(&role.as_str()) {
        let content = fields.shift_remove("content");
        let given = fields.insert("tool_calls".into(), calls::of_content(content.as_ref())?);
        if given.is_some() {
            return Err(format!(
                "its role is `{role}` and it has `tool_calls`: remove one of them"
            ));
        }
    }
    if let Some(call) = fields.shift_remove("function_call") {
        if fields.contains_key("tool_calls") {
            return Err("it has `tool_calls` and the older `function_call`: remove one".into());
        }
        fields.insert("tool_calls".into(), calls::of_one(call));
    }
    if fields.get("tool_calls") == Some(&Json::Array(Vec::new())) {
        fields.shift_remove("tool_calls");
    }
    if let Some(all) = fields.get_mut("tool_calls") {
        calls::check(all, reader)?;
    }
    let other = match role.as_str() {
        role if CALLS.contains(&role) => Some("assistant"),
        "developer" if !reader.role("developer").is_written => Some("system"),
        "function" if !reader.role("function").is_written => Some("tool"),
        role => {
            let answer = ANSWERS.iter().find(|name| **name == role);
            answer.filter(|name| !reader.role(name).has_token).map(|_| "tool")
        }
    };
    if let Some(other) = other {
        fields.insert("role".into(), Json::String(other.into()));
    }
    check_content(&fields)?;
    let word = learned::of_message(&mut fields)?;
    name_thoughts(&mut fields);
    let message = Json::Object(fields);
    let learns = word.as_ref().is_none_or(|word| word.learns);
    match word {
        Some(word) if learns && !learns_all && !has_role(&message, "assistant") => Err(format!(
            "it has {}, and onebox learns what the assistant says, not the role {}: remove this key",
            word.shown,
            name_of(&role)
        )),
        _ => Ok((message, learns)),
    }
}

/// Message with the keys that templates know, without null values.
fn renamed(fields: Map) -> Map {
    let has = |key: &str| fields.get(key).is_some_and(|value| *value != Json::Null);
    let (shares, values) = (!has("role") && has("from"), !has("content") && has("value"));
    let mut renamed = Map::new();
    for (key, value) in fields {
        // As in transformers, a null value means that the key is missing.
        if value == Json::Null {
            continue;
        }
        match (key.as_str(), value) {
            ("from", Json::String(from)) if shares => {
                renamed.insert("role".into(), Json::String(shared(&from).into()));
            }
            ("from", other) if shares => drop(renamed.insert("role".into(), other)),
            ("value", value) if values => drop(renamed.insert("content".into(), value)),
            (_, value) => drop(renamed.insert(key, value)),
        }
    }
    if let Some(Json::Array(parts)) = renamed.get_mut("content") {
        for part in parts {
            let Json::Object(part) = part else { continue };
            part.retain(|_, value| *value != Json::Null);
        }
    }
    renamed
}

fn check_content(fields: &Map) -> Result<(), String> {
    match fields.get("content") {
        Some(Json::String(_)) => Ok(()),
        Some(Json::Array(parts)) => contents::check(parts),
        Some(other) => Err(format!("`content` is {}, not a text", kind_of(other))),
        // A message with calls of tools may lack the content.
        None if fields.contains_key("tool_calls") => Ok(()),
        None => Err(format!("it has no `content`{}", has(fields))),
    }
}

/// Stores thoughts under both keys that templates read, as transformers does.
fn name_thoughts(fields: &mut Map) {
    let Some(thoughts) = THOUGHTS.iter().find_map(|name| fields.get(*name)).cloned() else {
        return;
    };
    let second = fields.shift_remove(THOUGHTS[1]).unwrap_or_else(|| thoughts.clone());
    fields.shift_insert(0, THOUGHTS[1].into(), second);
    fields.insert(THOUGHTS[0].into(), thoughts);
}

/// Texts in the content of a message.
pub(super) fn texts(message: &Json) -> Vec<&str> {
    match message.get("content") {
        Some(Json::String(text)) => vec![text],
        Some(Json::Array(parts)) => {
            parts.iter().filter_map(|part| part.get("text").and_then(Json::as_str)).collect()
        }
        _ => Vec::new(),
    }
}
