//! Checks which parts of a chat its template writes. The template runs once for each shape of a
//! chat, with words in place of texts. If a word is missing, the model would not see the text.

use super::probe::{self, ChatPart, Probe, WORD};
use super::talk::Conversation;
use super::targets::with_silent_call;
use super::{has_role, object};
use crate::chat::{Chat, Template, message};
use crate::ignored_keys::IgnoredKeys;
use files::json::Json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{OnceLock, PoisonError, RwLock};

/// Maximum number of cached shapes.
const MOST: usize = 1 << 14;

/// Form of a call's arguments: a text of JSON as in OpenAI, or an object as in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arguments {
    /// The template writes both forms, or neither form.
    Both,
    /// Only objects: the template would encode a text a second time, or refuses a text.
    Objects,
    /// Only texts: the template would print an object as Python does, or refuses an object.
    Texts,
}

/// Parts of a chat that the template shows, for one shape of chats.
#[derive(Clone, Debug)]
enum Visibility {
    /// The template refuses the probe, a chat with a word in place of each text.
    Unknown,
    Known {
        /// First part that the template does not show.
        lost: Option<ChatPart>,
        /// Messages with thoughts that the template does not show.
        thoughts: BTreeSet<usize>,
        /// Keys of messages that the template does not read.
        unread: BTreeSet<String>,
    },
}

/// How a template writes messages of a role.
#[derive(Clone, Copy, Debug)]
pub(super) struct Role {
    pub(super) is_written: bool,
    /// Whether the template writes a token of the role's name, such as `<|observation|>`.
    pub(super) has_token: bool,
}

/// Chat template, with a cache of its properties.
#[derive(Debug)]
pub(super) struct ChatReader<'a> {
    pub(super) template: &'a Template,
    roles: RwLock<BTreeMap<&'static str, Role>>,
    arguments: OnceLock<Arguments>,
    shapes: RwLock<BTreeMap<u128, Visibility>>,
}

impl<'a> ChatReader<'a> {
    pub(super) fn new(template: &'a Template) -> Self {
        let (roles, arguments, shapes) = Default::default();
        Self { template, roles, arguments, shapes }
    }

    /// How the template writes messages of this role.
    pub(super) fn role(&self, role: &'static str) -> Role {
        if let Some(known) = self.roles.read().unwrap_or_else(PoisonError::into_inner).get(role) {
            return *known;
        }
        let one = message(role, WORD);
        let rest = [message("user", "a"), message("assistant", "b")];
        let written = |messages: &[Json]| {
            let text = self.template.text(Chat::of(messages), false).ok();
            text.filter(|text| text.contains(WORD))
        };
        let first = written(&[std::slice::from_ref(&one), &rest].concat());
        let last = written(&[&rest[..], &[one]].concat());
        let token = format!("<|{role}|>");
        let found = Role {
            is_written: first.is_some() || last.is_some(),
            has_token: last.is_some_and(|text| text.contains(&token)),
        };
        self.roles.write().unwrap_or_else(PoisonError::into_inner).insert(role, found);
        found
    }

    /// Form of arguments that the template accepts.
    pub(super) fn arguments(&self) -> Arguments {
        *self.arguments.get_or_init(|| {
            let object = object([(WORD, Json::String("a".into()))]);
            let text = Json::String(format!("{{\"{WORD}\": \"a\"}}"));
            match (self.writes_arguments(&object), self.writes_arguments(&text)) {
                (true, false) => Arguments::Objects,
                (false, true) => Arguments::Texts,
                _ => Arguments::Both,
            }
        })
    }

    /// Whether the template writes the key [`WORD`] of these arguments as JSON or in its own form.
    /// JSON that is encoded twice and a Python dict do not count.
    fn writes_arguments(&self, arguments: &Json) -> bool {
        let text = |text: &str| Json::String(text.into());
        let function = object([("name", text("f")), ("arguments", arguments.clone())]);
        let (id, kind) = (("id", text("000000001")), ("type", text("function")));
        let call = object([id, kind, ("function", function)]);
        let (role, calls) = (("role", text("assistant")), ("tool_calls", Json::Array(vec![call])));
        let replies =
            [object([role.clone(), ("content", text("")), calls.clone()]), object([role, calls])];
        replies.into_iter().any(|reply| {
            let written = self.template.text(Chat::of(&[message("user", "a"), reply]), false);
            written.is_ok_and(|written| {
                let mut places =
                    written.match_indices(WORD).map(|(at, _)| &written[..at]).peekable();
                let is_other = |before: &str| before.ends_with("\\\"") || before.ends_with('\'');
                places.peek().is_some() && !places.any(is_other)
            })
        })
    }

    /// Refuses a chat if the template does not write all of it. Adds message keys that the template
    /// does not read, and left-out thoughts of earlier answers, to `unread`.
    pub(super) fn check(
        &self,
        talk: &Conversation,
        unread: &mut IgnoredKeys,
    ) -> Result<(), String> {
        let probe = Probe::of_words(talk);
        let key = probe.key();
        let known = self.shapes.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let seen = known.unwrap_or_else(|| {
            let seen = self.visibility(&probe);
            let mut shapes = self.shapes.write().unwrap_or_else(PoisonError::into_inner);
            if shapes.len() < MOST {
                shapes.insert(key, seen.clone());
            }
            seen
        });
        let (lost, thoughts) = match seen {
            Visibility::Known { lost, thoughts, unread: keys } => {
                unread.of_messages.extend(keys);
                (lost, thoughts)
            }
            Visibility::Unknown => {
                let text = self.template.text(talk.chat(), false);
                let text = text.map_err(|why| with_silent_call(&talk.messages, why))?;
                lost(&Probe::of_texts(talk), &text)
            }
        };
        if let Some(lost) = lost {
            let [before, lost] = match lost {
                ChatPart::Tool(i) => ["it has `tools`, and ".into(), format!("tool {}", i + 1)],
                ChatPart::Call(i) => {
                    ["".into(), format!("the calls in `tool_calls` of message {}", i + 1)]
                }
                ChatPart::Text(i) | ChatPart::Thoughts(i) => {
                    let role = talk.messages[i].get("role").and_then(Json::as_str);
                    let role = super::name_of(role.unwrap_or_default());
                    ["".into(), format!("message {}, or not all of it, of the role {role}", i + 1)]
                }
            };
            return Err(format!(
                "{before}the chat template does not show {lost}: take a template that does, or leave the row out"
            ));
        }
        let last = talk.messages.iter().rposition(|one| has_role(one, "assistant"));
        if let Some(last) = last
            && thoughts.contains(&last)
            && talk.learned[last]
            && !talk.messages[last..].iter().any(|one| has_role(one, "user"))
        {
            return Err(format!(
                "the chat template does not show the thoughts of message {}, the last answer: take a template that does, or remove \
                 them from the row",
                last + 1
            ));
        }
        unread.thoughts |= !thoughts.is_empty();
        Ok(())
    }

    /// Parts of a probe that the template shows.
    fn visibility(&self, probe: &Probe) -> Visibility {
        let written = |messages: &[Json]| {
            self.template.text(Chat { messages, tools: probe.tools.as_ref() }, false)
        };
        let Ok(text) = written(&probe.messages) else { return Visibility::Unknown };
        let (lost, thoughts) = lost(probe, &text);
        let is_read = |key: &&String| {
            let without: Vec<Json> = probe.messages.iter().map(|one| without(one, key)).collect();
            written(&without).map_or(true, |other| other != text)
        };
        let unread = probe.keys.iter().filter(|key| !is_read(key));
        Visibility::Known {
            lost,
            thoughts,
            unread: unread.map(|key| super::name_of(key)).collect(),
        }
    }
}

/// First part that is missing in a text, and the messages with missing thoughts.
fn lost(probe: &Probe, text: &str) -> (Option<ChatPart>, BTreeSet<usize>) {
    let (mut first, mut thoughts) = (None, BTreeSet::new());
    let found = probe::words_of(text);
    for (word, of) in &probe.words {
        if found.contains(word.as_str())
            || text.contains(word.as_str())
            || in_json(word).is_some_and(|word| text.contains(&word))
        {
            continue;
        }
        match of {
            ChatPart::Thoughts(i) => drop(thoughts.insert(*i)),
            of => first = first.or(Some(*of)),
        }
    }
    (first, thoughts)
}

/// The word as JSON encodes it, if JSON changes it.
fn in_json(word: &str) -> Option<String> {
    let json = serde_json::to_string(word).ok()?;
    let inner = json.strip_prefix('"')?.strip_suffix('"')?;
    (inner != word).then(|| inner.to_owned())
}

/// The message without a key.
fn without(message: &Json, key: &str) -> Json {
    let mut message = message.clone();
    if let Json::Object(fields) = &mut message {
        fields.shift_remove(key);
    }
    message
}
