//! The text of a chat, and what an assistant says in it.

use super::{CUT, has, kind_of};
use crate::chat::{CLOSE, OPEN, Template, message};
use serde_json::{Map, Value as Json};
use std::ops::Range;

/// Takes the place of an answer, to find it in the text.
const ANSWER: char = '\u{FDD3}';

/// A text, and its bytes that count.
pub(super) enum Said {
    /// Of a template, with all its control tokens.
    Text { text: String, counted: Vec<Range<usize>> },
    /// A prompt and what completes it, as they are.
    Completion { text: String, counted: Range<usize> },
}

/// The text of a row by `template`. A chat without a message of the system gets `system`.
pub(super) fn said(
    template: &Template,
    mut row: Map<String, Json>,
    system: Option<&str>,
) -> Result<Said, String> {
    let (mut messages, asked) = match (row.remove("messages"), row.remove("prompt")) {
        (Some(messages), _) => (list("messages", messages)?, 0),
        (None, Some(prompt)) => {
            let completion = row.remove("completion");
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
        (None, None) => match row.remove("conversations") {
            Some(turns) => (list("conversations", turns)?.into_iter().map(renamed).collect(), 0),
            None => return Err(format!("it has no `messages`, and no `prompt`{}", has(&row))),
        },
    };
    for (i, one) in messages.iter().enumerate() {
        check(one).map_err(|why| format!("message {}: {why}", i + 1))?;
    }
    let is_of = |role: &'static str| move |one: &Json| one["role"] == role;
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
    if template.has_marks() {
        let before = messages[..asked].iter().filter(|one| is_of("assistant")(one)).count();
        let (text, mut counted) = unmarked(&template.marked(&messages, false)?);
        counted.drain(..before.min(counted.len()));
        return Ok(Said::Text { text, counted });
    }
    let text = template.text(&messages, false)?;
    let spans = answers.into_iter().map(|i| span(template, &text, &mut messages, i));
    let counted = spans.collect::<Result<_, String>>()?;
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
    let role = match turn["from"].as_str() {
        Some("human") => "user",
        Some("gpt") => "assistant",
        Some(role) => role,
        None => return turn,
    };
    match turn["value"].as_str() {
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
            // Calls of tools have no content.
            Some(Json::Null) if key == "content" && fields.contains_key("tool_calls") => {}
            Some(other) => return Err(format!("`{key}` is {}, not a text", kind_of(other))),
            None => return Err(format!("it has no `{key}`{}", has(fields))),
        }
    }
    Ok(())
}

/// The text without its marks, and what stands between them.
fn unmarked(marked: &str) -> (String, Vec<Range<usize>>) {
    let (mut text, mut spans, mut start) = (String::with_capacity(marked.len()), Vec::new(), None);
    for c in marked.chars() {
        match c {
            OPEN => start = Some(text.len()),
            CLOSE => spans.extend(start.take().map(|start| start..text.len())),
            _ => text.push(c),
        }
    }
    (text, spans)
}

/// Where answer `i` stands in the text of all messages: from the end of its prompt to the control token behind it. Templates
/// write earlier answers otherwise than the last one, so the answer is looked for in the whole text: it is where
/// another answer changes the text.
fn span(
    template: &Template,
    text: &str,
    messages: &mut [Json],
    i: usize,
) -> Result<Range<usize>, String> {
    let answer = messages[i]["content"].take();
    messages[i]["content"] = Json::String(ANSWER.into());
    let other = template.text(messages, false);
    messages[i]["content"] = answer;
    let other = other?;
    if !other.contains(ANSWER) {
        return Err(format!("the chat template does not show message {}", i + 1));
    }
    let same = |(a, b): &(char, char)| a == b;
    let length = |pairs: &mut dyn Iterator<Item = (char, char)>| -> usize {
        pairs.take_while(same).map(|(c, _)| c.len_utf8()).sum()
    };
    let from = length(&mut text.chars().zip(other.chars()));
    let rest = &text[from..];
    let behind = length(&mut rest.chars().rev().zip(other[from..].chars().rev()));
    let to = text.len() - behind;
    let start = prompted(template, &text[..from], &messages[..i]).unwrap_or(from);
    Ok(start..to + end_of_turn(&text[to..]))
}

/// Where the prompt of an answer ends in the text before it. The beginning of an answer that a prompt gives is no target; what
/// the template puts behind it is.
fn prompted(template: &Template, before: &str, asked: &[Json]) -> Option<usize> {
    let prompt = template.text(asked, true).ok()?;
    if before.starts_with(&prompt) {
        return Some(prompt.len());
    }
    // What was asked looks otherwise where an answer follows: only the end of the prompt is the same.
    let end = prompt.strip_prefix(&template.text(asked, false).ok()?)?;
    let at = before.rfind(end).filter(|_| !end.is_empty())?;
    Some(at + end.len())
}

/// Bytes of the control token with which a text begins: `<...>` or `[...]` without blanks.
fn end_of_turn(text: &str) -> usize {
    let close = match text.chars().next() {
        Some('<') => '>',
        Some('[') => ']',
        _ => return 0,
    };
    let end = text.find(close).map_or(0, |end| end + 1);
    let is_one = !text[..end].contains(|c: char| c.is_whitespace() || c == CUT);
    if is_one { end } else { 0 }
}
