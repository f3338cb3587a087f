//! A chat with a word in place of each text.

use super::talk::{Conversation, THOUGHTS};
use super::{has_role, object};
use files::json::Json;
use std::collections::{BTreeSet, HashSet};
use xxhash_rust::xxh3::xxh3_128;

/// Word that no template contains.
pub(super) const WORD: &str = "zq0qz";
/// Marks around the thoughts in a content.
const THOUGHT_MARKS: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
];
/// Marks around a tool's answer in a content, by which templates of Qwen recognize the answer.
const TOOL_ANSWER: [&str; 2] = ["<tool_response>", "</tool_response>"];
/// Message keys that a probe replaces or copies; [`Probe::keys`] does not list them.
const KNOWN: [&str; 7] =
    ["role", "content", "tool_calls", "tool_call_id", THOUGHTS[0], THOUGHTS[1], THOUGHTS[2]];

/// Part of a chat for which a word stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChatPart {
    /// The content of a message.
    Text(usize),
    /// The thoughts of a message.
    Thoughts(usize),
    /// The calls of a message.
    Call(usize),
    Tool(usize),
}

/// Chat with a word in place of each text; chats of the same shape have equal probes.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) messages: Vec<Json>,
    pub(super) tools: Option<Json>,
    pub(super) words: Vec<(String, ChatPart)>,
    /// Keys of messages that a template may read.
    pub(super) keys: BTreeSet<String>,
    /// Ids of calls, in the order of their first occurrence.
    ids: Vec<String>,
    /// Whether each text is its own word.
    is_itself: bool,
}

impl Probe {
    /// Probe with generated words.
    pub(super) fn of_words(talk: &Conversation) -> Self {
        Self::of(talk, false)
    }

    /// Probe with the texts as words and with empty texts in the messages.
    pub(super) fn of_texts(talk: &Conversation) -> Self {
        Self::of(talk, true)
    }

    fn of(talk: &Conversation, is_itself: bool) -> Self {
        let (messages, words, keys, ids) = Default::default();
        let mut probe = Self { messages, tools: None, words, keys, ids, is_itself };
        let messages = talk.messages.iter().enumerate();
        probe.messages = messages.map(|(i, message)| probe.message(i, message)).collect();
        probe.tools = talk.tools.as_ref().map(|tools| probe.all_tools(tools));
        probe
    }

    /// Hash of everything by which a template could distinguish this chat from another chat.
    pub(super) fn key(&self) -> u128 {
        let json = serde_json::to_vec(&(&self.messages, &self.tools));
        xxh3_128(&json.unwrap_or_else(|_| unreachable!("values of JSON are JSON")))
    }

    /// Word for a text, with the blanks around the text.
    fn word(&mut self, text: &str, of: ChatPart) -> String {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return text.to_owned();
        }
        if self.is_itself {
            self.words.push((trimmed.to_owned(), of));
            return String::new();
        }
        let word = format!("zq{}qz", self.words.len() + 1);
        self.words.push((word.clone(), of));
        let before = text.len() - text.trim_start().len();
        [&text[..before], &word, &text[before + trimmed.len()..]].concat()
    }

    fn message(&mut self, i: usize, message: &Json) -> Json {
        let mut thoughts: Option<Json> = None;
        mapped(message, |key, value| {
            Some(match (key, value) {
                ("role", role) => role.clone(),
                ("content", Json::String(text)) => {
                    Json::String(self.pieces(text, i, has_role(message, "assistant")))
                }
                ("content", Json::Array(parts)) => {
                    Json::Array(parts.iter().map(|part| self.part(part, i)).collect())
                }
                ("tool_calls", Json::Array(calls)) => {
                    Json::Array(calls.iter().map(|call| self.call(call, i)).collect())
                }
                ("tool_call_id", Json::String(id)) => self.id(id),
                (key, Json::String(text)) if THOUGHTS.contains(&key) => {
                    let word = || Json::String(self.word(text, ChatPart::Thoughts(i)));
                    thoughts.get_or_insert_with(word).clone()
                }
                (key, other) => {
                    if !KNOWN.contains(&key) {
                        self.keys.insert(key.to_owned());
                    }
                    plain(other)
                }
            })
        })
    }

    /// Content with a word in place of each text between marks.
    fn pieces(&mut self, text: &str, i: usize, is_answer: bool) -> String {
        let (mut out, mut left) = (String::new(), text);
        loop {
            let marks =
                THOUGHT_MARKS.iter().flat_map(|(open, close)| [(*open, false), (*close, true)]);
            let marks = marks.chain(TOOL_ANSWER.map(|mark| (mark, false)));
            let found = marks.filter_map(|(mark, ends)| Some((left.find(mark)?, mark, ends)));
            let Some((at, mark, ends)) = found.min() else {
                return out + &self.word(left, ChatPart::Text(i));
            };
            let of = if ends && is_answer { ChatPart::Thoughts(i) } else { ChatPart::Text(i) };
            out += &self.word(&left[..at], of);
            out += mark;
            left = &left[at + mark.len()..];
        }
    }

    fn part(&mut self, part: &Json, i: usize) -> Json {
        mapped(part, |key, value| {
            Some(match (key, value) {
                ("text", Json::String(text)) => Json::String(self.word(text, ChatPart::Text(i))),
                ("type", kind) => kind.clone(),
                (_, other) => plain(other),
            })
        })
    }

    fn call(&mut self, call: &Json, i: usize) -> Json {
        mapped(call, |key, value| {
            Some(match (key, value) {
                ("function", Json::Object(_)) => self.call(value, i),
                ("name", Json::String(name)) => Json::String(self.word(name, ChatPart::Call(i))),
                ("arguments", Json::Object(all)) if all.is_empty() => value.clone(),
                ("arguments", Json::Object(_)) => {
                    let [key, value] = self.argument(i);
                    object([(&key, Json::String(value))])
                }
                ("arguments", Json::String(text)) if text.trim() == "{}" => value.clone(),
                ("arguments", Json::String(_)) => {
                    let [key, value] = self.argument(i);
                    Json::String(format!("{{\"{key}\": \"{value}\"}}"))
                }
                ("id", Json::String(id)) => self.id(id),
                ("type", kind) => kind.clone(),
                (_, other) => plain(other),
            })
        })
    }

    /// Key and value that stand for all arguments.
    fn argument(&mut self, i: usize) -> [String; 2] {
        if self.is_itself {
            return Default::default();
        }
        ["key", "value"].map(|text| self.word(text, ChatPart::Call(i)))
    }

    /// Id in the form that templates of Mistral require.
    fn id(&mut self, id: &str) -> Json {
        let known = self.ids.iter().position(|known| known == id);
        let number = known.unwrap_or_else(|| {
            self.ids.push(id.to_owned());
            self.ids.len() - 1
        });
        Json::String(format!("{number:09}"))
    }

    fn all_tools(&mut self, tools: &Json) -> Json {
        let Json::Array(tools) = tools else { unreachable!("tools are a list") };
        Json::Array(tools.iter().enumerate().map(|(i, tool)| self.tool(i, tool)).collect())
    }

    /// Tool with parameters that stand for all parameters.
    fn tool(&mut self, i: usize, tool: &Json) -> Json {
        let text = |text: &str| Json::String(text.into());
        mapped(tool, |key, value| {
            Some(match (key, value) {
                ("function", Json::Object(_)) => self.tool(i, value),
                ("name", Json::String(name)) => Json::String(self.word(name, ChatPart::Tool(i))),
                ("type", kind) => kind.clone(),
                ("description", Json::String(_)) => text("a"),
                ("parameters", Json::Object(_)) => {
                    let a = object([("type", text("string")), ("description", text("a"))]);
                    let properties = ("properties", object([("a", a)]));
                    let required = ("required", Json::Array(vec![text("a")]));
                    object([("type", text("object")), properties, required])
                }
                // A template that prints a whole tool also prints its other fields.
                _ => return None,
            })
        })
    }
}

/// Object with new values of its fields, without the fields that get no value.
fn mapped(object: &Json, mut value: impl FnMut(&str, &Json) -> Option<Json>) -> Json {
    let Json::Object(fields) = object else { unreachable!("it is an object") };
    let other = |(key, field): (&String, &Json)| Some((key.clone(), value(key, field)?));
    Json::Object(fields.iter().filter_map(other).collect())
}

/// Words of a probe in a text, found in one pass.
pub(super) fn words_of(text: &str) -> HashSet<&str> {
    let word = |(at, _): (usize, &str)| {
        let digits = text[at + 2..].find(|c: char| !c.is_ascii_digit())?;
        let end = at + 2 + digits;
        text[end..].starts_with("qz").then(|| &text[at..end + 2])
    };
    text.match_indices("zq").filter_map(word).collect()
}

/// Value of the same kind.
fn plain(value: &Json) -> Json {
    match value {
        Json::String(_) => Json::String(WORD.into()),
        Json::Number(_) | Json::Digits(_) => Json::Number(1.into()),
        Json::Array(values) => Json::Array(values.iter().map(plain).collect()),
        Json::Object(_) => mapped(value, |_, value| Some(plain(value))),
        Json::Null | Json::Bool(_) => value.clone(),
    }
}
