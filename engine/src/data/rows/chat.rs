//! The text of a chat, and what an assistant says in it.

use super::contents;
use super::control::Control;
use super::targets::{Targets, has_role};
use super::{has, kind_of};
use crate::chat::{Chat, Template, message};
use crate::json::{Json, Map};
use std::ops::Range;

/// A text, and its bytes that count.
pub(super) enum Said {
    /// Of a template, with all its control tokens.
    Text { text: String, counted: Vec<Range<usize>> },
    /// A prompt and what completes it, as they are.
    Completion { text: String, counted: Range<usize> },
}

/// The text of a row by `template`, whose control tokens have these texts. A chat without a message of the system gets `system`.
pub(super) fn said(
    template: &Template,
    control: &Control,
    mut row: Map,
    system: Option<&str>,
) -> Result<Said, String> {
    let none = |tools: &Json| *tools == Json::Null || *tools == Json::Array(Vec::new());
    if row.get("tools").is_some_and(|tools| !none(tools)) {
        return Err("it has `tools`, which no chat gets here: remove them from the row".into());
    }
    let (mut messages, asked) = match (row.shift_remove("messages"), row.shift_remove("prompt")) {
        (Some(messages), _) => (list("messages", messages)?, 0),
        (None, Some(prompt)) => {
            let completion = row.shift_remove("completion");
            let completion = completion.ok_or("it has a `prompt` and no `completion`")?;
            match (prompt, completion) {
                (Json::String(prompt), Json::String(completion)) => {
                    let counted = prompt.len()..prompt.len() + completion.len();
                    return Ok(Said::Completion { text: prompt + &completion, counted });
                }
                (prompt, completion) => {
                    let mut messages = list("prompt", prompt)?;
                    let asked = messages.len();
                    messages.extend(list("completion", completion)?);
                    (messages, asked)
                }
            }
        }
        (None, None) => match row.shift_remove("conversations") {
            Some(turns) => (list("conversations", turns)?.into_iter().map(renamed).collect(), 0),
            None => return Err(format!("it has no `messages`, and no `prompt`{}", has(&row))),
        },
    };
    for (i, one) in messages.iter_mut().enumerate() {
        check(one).map_err(|why| format!("message {}: {why}", i + 1))?;
        // As in transformers: what is null is not there.
        let Json::Object(one) = one else { continue };
        one.retain(|_, value| *value != Json::Null);
        if let Some(Json::Array(parts)) = one.get_mut("content") {
            for part in parts {
                let Json::Object(part) = part else { continue };
                part.retain(|_, value| *value != Json::Null);
            }
        }
        // Thoughts have three names there; templates read the first or the second.
        let names = ["reasoning_content", "thinking", "reasoning"];
        if let Some(thoughts) = names.iter().find_map(|name| one.get(*name)).cloned() {
            let second = one.shift_remove(names[1]).unwrap_or_else(|| thoughts.clone());
            one.shift_insert(0, names[1].into(), second);
            one.insert(names[0].into(), thoughts);
        }
    }
    let is_of = |role: &'static str| move |one: &Json| has_role(one, role);
    let mut asked = asked;
    if let Some(system) = system
        && !messages.iter().any(is_of("system"))
    {
        messages.insert(0, message("system", system));
        asked += 1;
    }
    let answers: Vec<usize> =
        (asked..messages.len()).filter(|i| is_of("assistant")(&messages[*i])).collect();
    if answers.is_empty() {
        return Err("no message has the role `assistant`, so there is nothing to learn".into());
    }
    let tools = None;
    let chat = |messages| Chat { messages, tools };
    contents::check_read(template, chat(&messages))?;
    let learned: Vec<bool> = (0..messages.len()).map(|i| answers.contains(&i)).collect();
    let chat = chat(&messages);
    let (text, counted) = Targets { template, control, chat, learned: &learned }.of()?;
    Ok(Said::Text { text, counted })
}

fn list(key: &str, value: Json) -> Result<Vec<Json>, String> {
    match value {
        Json::Array(messages) if messages.is_empty() => Err(format!("`{key}` is empty")),
        Json::Array(messages) => Ok(messages),
        other => Err(format!("`{key}` is {}, not a list of messages", kind_of(&other))),
    }
}

/// A turn of a shared conversation as a message.
fn renamed(turn: Json) -> Json {
    let role = match turn.get("from").and_then(Json::as_str) {
        Some("human") => "user",
        Some("gpt") => "assistant",
        Some(role) => role,
        None => return turn,
    };
    match turn.get("value").and_then(Json::as_str) {
        Some(value) => message(role, value),
        None => turn,
    }
}

fn check(message: &Json) -> Result<(), String> {
    let Json::Object(fields) = message else {
        return Err(format!("it is {}, not an object", kind_of(message)));
    };
    for key in ["role", "content"] {
        match fields.get(key) {
            Some(Json::String(_)) => {}
            Some(Json::Array(parts)) if key == "content" => contents::check(parts)?,
            // Calls of tools have no content.
            Some(Json::Null) if key == "content" && fields.contains_key("tool_calls") => {}
            Some(other) => return Err(format!("`{key}` is {}, not a text", kind_of(other))),
            None => return Err(format!("it has no `{key}`{}", has(fields))),
        }
    }
    // Files for OpenAI's fine-tuning mark so what is not to be learned.
    if matches!(fields.get("weight"), Some(Json::Number(weight)) if weight.as_f64() == Some(0.0)) {
        return Err(
            "it has a `weight` of 0, and onebox learns every answer: leave the row out".into()
        );
    }
    Ok(())
}
