//! Contents that are lists of texts, `{"type": "text", "text": ..}`. If a template reads no lists,
//! a text replaces its list of one. Several texts stay apart: programs join them differently.

use super::talk::Conversation;
use super::{ANSWER, CUT, has, kind_of, name_of, object};
use crate::chat::{Chat, Template};
use crate::ignored_keys::IgnoredKeys;
use files::json::{Json, Map};
use std::collections::HashSet;

/// Refuses an empty list, and parts that are no texts.
pub(super) fn check(parts: &[Json]) -> Result<(), String> {
    if parts.is_empty() {
        return Err("`content` is an empty list".into());
    }
    for (i, part) in parts.iter().enumerate() {
        let number = i + 1;
        let Json::Object(fields) = part else {
            return Err(format!("part {number} of `content` is {}, not an object", kind_of(part)));
        };
        match (part.get("type").and_then(Json::as_str), part.get("text")) {
            (Some("text"), Some(Json::String(_))) => {}
            (Some(other), _) if other != "text" => {
                return Err(format!(
                    "part {number} of `content` is of the type {}, and onebox trains on texts alone: remove it",
                    name_of(other)
                ));
            }
            _ => {
                let has = has(fields);
                return Err(format!(
                    "part {number} of `content` is not {{\"type\": \"text\", \"text\": \"..\"}}{has}"
                ));
            }
        }
    }
    Ok(())
}

/// Content that is a list of one text.
pub(super) fn of_text(text: String) -> Json {
    Json::Array(vec![object([("type", Json::String("text".into())), ("text", Json::String(text))])])
}

/// If the template reads no lists: replaces lists of one text by the text, refuses longer lists.
pub(super) fn fit(
    template: &Template,
    talk: &mut Conversation,
    unread: &mut IgnoredKeys,
) -> Result<(), String> {
    if check_read(template, talk.chat()).is_ok() {
        return Ok(());
    }
    for message in &mut talk.messages {
        let Json::Object(fields) = message else { continue };
        let Some(Json::Array(parts)) = fields.get("content") else { continue };
        let [Json::Object(part)] = &parts[..] else { continue };
        let others = part.keys().filter(|key| !["type", "text"].contains(&key.as_str()));
        unread.of_messages.extend(others.map(|key| name_of(key)));
        let text = part.get("text").cloned().unwrap_or_else(|| unreachable!("a part has a text"));
        fields.insert("content".into(), text);
    }
    check_read(template, talk.chat())
}

/// Refuses a list if the template prints it as a list, or omits a text of the list that it would
/// write from a content that is a text.
fn check_read(template: &Template, chat: Chat<'_>) -> Result<(), String> {
    let messages = chat.messages;
    let is_list = |one: &Json| matches!(one.get("content"), Some(Json::Array(_)));
    let Some(first) = messages.iter().position(is_list) else { return Ok(()) };
    let [parts, joined] = [each_part, all_parts].map(|write: fn(usize, &[Json]) -> Json| {
        let each = messages.iter().enumerate();
        let messages: Vec<Json> = each.map(|(i, one)| with_content(i, one, write)).collect();
        template.text(Chat { messages: &messages, ..chat }, false)
    });
    let unread = |message: usize| {
        let number = message + 1;
        format!(
            "the `content` of message {number} is a list, which the chat template does not read: join its texts into one text"
        )
    };
    match (parts, joined) {
        (Err(_), Ok(_)) => Err(unread(first)),
        // The template refuses the row with any content.
        (Err(_), Err(_)) => Ok(()),
        (Ok(parts), joined) => {
            let wanted = joined.unwrap_or_default();
            let shown: HashSet<&str> = parts.split(ANSWER).collect();
            let lost = wanted.split(ANSWER).skip(1).step_by(2).find(|name| !shown.contains(name));
            let printed = parts.split(CUT).nth(1);
            let message = lost.or(printed).and_then(|name| name.split('.').next()?.parse().ok());
            message.map_or(Ok(()), |message| Err(unread(message)))
        }
    }
}

/// The message with a content from `write`, if its content is a list.
fn with_content(number: usize, message: &Json, write: fn(usize, &[Json]) -> Json) -> Json {
    let mut other = message.clone();
    if let Json::Object(fields) = &mut other
        && let Some(content) = fields.get_mut("content")
        && let Json::Array(parts) = content
    {
        *content = write(number, parts);
    }
    other
}

/// Text that names a part of a content.
fn name(message: usize, part: usize) -> String {
    format!("{ANSWER}{message}.{part}{ANSWER}")
}

/// Content in which each text names its part. Each part has one more key, which no template reads.
fn each_part(message: usize, parts: &[Json]) -> Json {
    let part = |(i, part): (usize, &Json)| {
        let Json::Object(fields) = part else { unreachable!("a part is an object") };
        let mut fields: Map = fields.clone();
        fields.insert("text".into(), Json::String(name(message, i)));
        fields.insert(format!("{CUT}{message}.{i}{CUT}"), Json::Bool(true));
        Json::Object(fields)
    };
    Json::Array(parts.iter().enumerate().map(part).collect())
}

/// The texts of [`each_part`], joined into one text.
fn all_parts(message: usize, parts: &[Json]) -> Json {
    Json::String((0..parts.len()).map(|i| name(message, i)).collect())
}
