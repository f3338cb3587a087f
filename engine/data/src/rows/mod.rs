//! Turns rows of JSON lines into documents: tokens, and which tokens are targets.
//! The template of the model writes the text of a chat. Only the assistant's answers are targets.

mod calls;
mod columns;
mod contents;
mod control;
mod forms;
mod learned;
mod lines;
mod lists;
mod messages;
#[cfg(test)]
mod oracle;
mod pairs;
mod probe;
mod reader;
#[cfg(test)]
mod rendered;
#[cfg(test)]
mod robust;
mod talk;
mod targets;
#[cfg(test)]
mod tests;
mod texts;

pub(super) use lines::{LONGEST, Lines};

use super::cache_file::hash_of_parts;
use super::document::Document;
use super::ignored_keys::IgnoredKeys;
use super::problem::Problem;
use super::tokenizer::Tokenizer;
use crate::chat::{ANSWER, Template};
use config::{ChatColumns, ChatTargets, ControlTokens, in_line};
use control::Control;
use files::foreign_text::foreign;
use files::json::{Json, Map, shown};
use forms::{ChatSettings, Form, form};
use reader::ChatReader;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::OnceLock;
use talk::Conversation;
use targets::{Targets, has_role};
use xxhash_rust::xxh3::xxh3_128;

/// Character inserted into the text of a control token in a row, so that the text stays text.
pub(super) const CUT: char = '\u{FDD2}';
/// Characters that onebox uses as marks: noncharacters of Unicode, which onebox refuses in rows.
const MARKS: Range<char> = '\u{FDD0}'..'\u{FDF0}';
/// Marks that stand for control tokens of one character.
const LETTERS: Range<char> = '\u{FDD5}'..MARKS.end;

/// Key of an object in place of a value that onebox does not read. The value says what it is.
pub(super) const UNREAD: &str = "onebox does not read this value";

/// Version of the rules for tokens and targets of a chat. onebox rebuilds tokens of other versions.
const RULES: u32 = 6;
/// Name of [`RULES`] among the inputs of a document.
pub(super) const CHAT_RULES: &str = "rules for chats";
/// Name of the chat template among the inputs of a document.
pub(super) const CHAT_TEMPLATE: &str = "chat template";

/// Form of all rows: a text in a field, or a chat.
#[derive(Debug)]
enum RowContent<'a> {
    /// A text in the field of this name.
    Text(String),
    /// A chat, or a question with its answer.
    Chat(ChatSettings<'a>),
}

/// Converts rows into documents.
#[derive(Debug)]
pub struct Rows<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    control: Control,
    /// How to read the text of a control token in texts that no template writes.
    in_texts: ControlTokens,
    /// Token that ends each text.
    end: Option<u32>,
    /// Text of the end token, if the tokenizer does not have this token.
    no_end: Option<String>,
    kind: RowContent<'a>,
    hash: OnceLock<u128>,
}

impl<'a> Rows<'a> {
    /// Converter of rows with a text in `field`. `end` is the text of the token that ends a text.
    pub fn of_texts(tokenizer: &'a Tokenizer, field: &str, end: Option<&str>) -> Self {
        Self::new(tokenizer, end, RowContent::Text(field.into()))
    }

    /// Converter of chats that `template` writes. A chat without a system message begins with
    /// `system`, unless `system` is empty.
    pub fn of_chats(tokenizer: &'a Tokenizer, template: &'a Template, system: &str) -> Self {
        let system = (!system.is_empty()).then(|| system.to_owned());
        let reader = Some(ChatReader::new(template));
        Self::new(
            tokenizer,
            template.end_of_text(),
            RowContent::Chat(ChatSettings::new(reader, system)),
        )
    }

    /// Converter of questions and answers for a model without a chat template. `end` is the text of
    /// the token that ends a text.
    pub fn of_pairs(tokenizer: &'a Tokenizer, end: Option<&str>) -> Self {
        Self::new(tokenizer, end, RowContent::Chat(ChatSettings::new(None, None)))
    }

    fn new(tokenizer: &'a Tokenizer, end: Option<&str>, kind: RowContent<'a>) -> Self {
        let token = end.and_then(|text| tokenizer.token(text));
        let no_end = end.filter(|_| token.is_none()).map(str::to_owned);
        let control = Control::new(tokenizer.control());
        let in_texts = ControlTokens::Text;
        Self { tokenizer, control, in_texts, end: token, no_end, kind, hash: OnceLock::new() }
    }

    /// Sets how to read the text of a control token in texts that no template writes.
    #[must_use]
    pub fn with_control_tokens(self, in_texts: ControlTokens) -> Self {
        Self { in_texts, hash: OnceLock::new(), ..self }
    }

    /// Sets the names of the columns of chats, and the tokens of a chat that are targets.
    #[must_use]
    pub fn with_columns(mut self, columns: &ChatColumns, targets: ChatTargets) -> Self {
        if let RowContent::Chat(with) = &mut self.kind {
            (with.columns, with.targets) = (columns.clone(), targets);
        }
        Self { hash: OnceLock::new(), ..self }
    }

    /// Checks that the tokenizer has the token that ends a text.
    ///
    /// # Errors
    /// [`Problem`] names the missing token.
    pub fn check_end(&self) -> Result<(), Problem> {
        self.no_end.clone().map_or(Ok(()), |text| Err(Problem::NoEnd { text }))
    }

    /// xxh3 hash, 128 bits, of all inputs of a document except the row.
    pub(super) fn hash(&self) -> u128 {
        *self.hash.get_or_init(|| {
            let kind = match &self.kind {
                RowContent::Text(field) => format!("text {:?} {field}", self.end),
                RowContent::Chat(with) => {
                    let ChatSettings { system, columns, targets, .. } = with;
                    format!(
                        "chat {RULES} {:?} {system:?} {columns:?} {targets:?} {:?}",
                        self.end,
                        with.template_identity()
                    )
                }
            };
            let kind = format!("{:?} {kind}", self.in_texts);
            hash_of_parts([self.tokenizer.bytes(), kind.as_bytes()])
        })
    }

    /// Names and values of the inputs of a document, except the row and the tokenizer.
    pub(super) fn makers(&self) -> Vec<(&'static str, String)> {
        let end = self.end.map_or_else(|| "none".into(), |token| token.to_string());
        let mut makers = vec![("token that ends a text", end)];
        match &self.kind {
            RowContent::Text(field) => makers.push(("field of a text", format!("{field:?}"))),
            RowContent::Chat(with) => {
                let template = with.template_identity().map(|text| xxh3_128(text.as_bytes()));
                let template = template.map(|hash| format!("xxh3-128 {hash:032x}"));
                makers.extend([
                    (CHAT_RULES, RULES.to_string()),
                    ("data.system", format!("{:?}", with.system.as_deref().unwrap_or_default())),
                    (CHAT_TEMPLATE, template.unwrap_or_else(|| "none".into())),
                ]);
                if !with.columns.is_empty() {
                    makers.push(("data.columns", in_line(&with.columns)));
                }
                if with.targets != ChatTargets::Answers {
                    makers.push(("data.targets", in_line(&with.targets)));
                }
            }
        }
        // Older versions did not have these settings, so their folders lack these entries.
        if self.in_texts == ControlTokens::Parsed {
            makers.push(("data.control_tokens", format!("{:?}", self.in_texts)));
        }
        if self.tokenizer.has_control_pieces() {
            makers.push(("pieces of a text like a control token", "without it".into()));
        }
        makers
    }

    /// Converts a row into a document.
    ///
    /// # Errors
    /// The fault of the row, in words that complete "line 3: ".
    pub fn document(&self, row: &str) -> Result<Document, String> {
        self.read(row).map(|(document, _)| document)
    }

    /// Converts a row into a document, and lists the parts of the row that the document ignores.
    ///
    /// # Errors
    /// The same errors as [`document`](Self::document).
    pub(super) fn read(&self, row: &str) -> Result<(Document, IgnoredKeys), String> {
        self.control.check()?;
        let json = Json::read(row).map_err(|why| format!("it is no JSON: {why}"))?;
        let mut row = match json {
            Json::Object(row) => row,
            other => {
                let example = match self.kind {
                    RowContent::Text(_) => "{\"text\": \"...\"}",
                    RowContent::Chat(_) => "{\"messages\": [..]}",
                };
                return Err(format!("it is {}, not an object such as {example}", kind_of(&other)));
            }
        };
        self.check_end().map_err(|problem| problem.to_string())?;
        let mut unread = IgnoredKeys::default();
        let document = match &self.kind {
            RowContent::Text(field) => match row.get_mut(field) {
                Some(Json::String(text)) => {
                    self.plain_text(text)?;
                    self.ended(text, 0..text.len())?
                }
                Some(other) => {
                    return Err(format!("`{}` is {}, not a text", foreign(field), kind_of(other)));
                }
                None => return Err(format!("it has no `{}`{}", foreign(field), has(&row))),
            },
            RowContent::Chat(with) => match form(with, row, &mut unread)? {
                Form::Talk(talk) => self.talk(with, talk, &mut unread)?,
                Form::Texts { mut prompt, mut completion } => {
                    self.plain_text(&mut prompt)?;
                    self.plain_text(&mut completion)?;
                    let asked = if with.targets == ChatTargets::All { 0 } else { prompt.len() };
                    let counted = asked..prompt.len() + completion.len();
                    self.ended(&(prompt + &completion), counted)?
                }
            },
        };
        match document.counted.contains(&true) {
            true => Ok((document, unread)),
            false => Err("it has no target: no answer, or an empty text".into()),
        }
    }

    /// Converts a chat into a document.
    fn talk(
        &self,
        with: &ChatSettings<'_>,
        mut talk: Conversation,
        unread: &mut IgnoredKeys,
    ) -> Result<Document, String> {
        let Some(reader) = &with.reader else { unreachable!("a template writes each chat") };
        talk.messages.iter_mut().chain(&mut talk.tools).try_for_each(|json| self.defuse(json))?;
        contents::fit(reader.template, &mut talk, unread)?;
        reader.check(&talk, unread)?;
        let (template, learned) = (reader.template, &talk.learned[..]);
        let whole = with.targets == ChatTargets::All;
        let of = Targets { template, control: &self.control, chat: talk.chat(), learned, whole };
        let (text, counted) = of.of()?;
        self.spoken(&text, &counted, false)
    }

    /// Cuts the texts of control tokens in a text that no template writes, unless they are parsed.
    fn plain_text(&self, text: &mut String) -> Result<(), String> {
        match self.in_texts {
            ControlTokens::Text => self.defuse_text(text),
            ControlTokens::Parsed => check_marks(text),
        }
    }

    /// Cuts the texts of control tokens in every string and key.
    fn defuse(&self, value: &mut Json) -> Result<(), String> {
        match value {
            Json::String(text) => self.defuse_text(text),
            Json::Array(values) => values.iter_mut().try_for_each(|value| self.defuse(value)),
            Json::Object(fields) => {
                for (mut key, mut value) in std::mem::take(fields) {
                    self.defuse_text(&mut key)?;
                    self.defuse(&mut value)?;
                    fields.insert(key, value);
                }
                Ok(())
            }
            Json::Null | Json::Bool(_) | Json::Number(_) | Json::Digits(_) => Ok(()),
        }
    }

    fn defuse_text(&self, text: &mut String) -> Result<(), String> {
        check_marks(text)?;
        if let Some(cut) = self.control.cut(text) {
            *text = cut;
        }
        // The tokenizer may create a control token when it normalizes the text.
        let mut before = usize::MAX;
        while let Some(found) = self.tokenizer.normalized_control(text)? {
            let mut signs = text[found.clone()].char_indices().filter(|(_, c)| !c.is_whitespace());
            let first = signs.next().filter(|_| found.start != before);
            let Some((at, first)) = first else {
                let found = foreign(&text[found]);
                return Err(format!(
                    "the tokenizer makes a control token of its text \"{found}\", and no cut hinders it: change the text"
                ));
            };
            text.insert(found.start + at + first.len_utf8(), CUT);
            before = found.start;
        }
        Ok(())
    }

    /// Document of a text and its end token. The bytes `counted` and the end token are targets.
    fn ended(&self, text: &str, counted: Range<usize>) -> Result<Document, String> {
        let whole = counted.start == 0;
        let (mut document, ends) = match self.in_texts {
            ControlTokens::Text => (self.spoken(text, &[counted], true)?, false),
            ControlTokens::Parsed => self.parsed(text, counted)?,
        };
        if whole {
            // The tokenizer's tokens in front of a text have no bytes, so the range misses them.
            document.counted.iter_mut().skip(1).for_each(|counts| *counts = true);
        }
        if let Some(end) = self.end.filter(|_| !ends) {
            // The tokenizer may have added the end token, without a range in the text.
            if document.tokens.last() != Some(&end) {
                document.tokens.push(end);
                document.counted.push(true);
            }
            let first = document.tokens.len() == 1;
            document.counted.last_mut().into_iter().for_each(|counts| *counts = !first);
        }
        Ok(document)
    }

    /// Encodes a text that may have cut control tokens. The bytes `counted` are targets.
    fn spoken(
        &self,
        text: &str,
        counted: &[Range<usize>],
        special: bool,
    ) -> Result<Document, String> {
        let letter = |c| self.control.letter(c);
        let is_cut = text.contains(|c| c == CUT || LETTERS.contains(&c));
        let tokens = match is_cut || self.tokenizer.has_control_pieces() {
            true => self.tokenizer.encode_cut(text, CUT, &letter, special)?,
            false => self.tokenizer.encode_with_places(text, special)?,
        };
        Ok(document(tokens, counted))
    }
}

/// Document of tokens with ranges. Tokens that overlap `counted` are targets, except the first.
fn document(tokens: Vec<(u32, Range<usize>)>, counted: &[Range<usize>]) -> Document {
    let mut document = Document::default();
    for (token, place) in tokens {
        // The range is empty if the tokenizer leaves a blank out of the token.
        let place = place.start..place.end.max(place.start + 1);
        let next = counted.partition_point(|c| c.end <= place.start);
        let counts = counted.get(next).is_some_and(|c| c.start < place.end);
        let first = document.tokens.is_empty();
        document.tokens.push(token);
        document.counted.push(counts && !first);
    }
    document
}

/// Refuses a text with a mark of onebox.
fn check_marks(text: &str) -> Result<(), String> {
    match text.chars().find(|c| MARKS.contains(c)) {
        Some(mark) => {
            let code = u32::from(mark);
            Err(format!("it has U+{code:04X}, which is no character: remove it"))
        }
        None => Ok(()),
    }
}

/// JSON object with these fields.
fn object<const N: usize>(fields: [(&str, Json); N]) -> Json {
    Json::Object(fields.map(|(key, value)| (key.into(), value)).into())
}

/// Kind of a JSON value, in words for messages.
fn kind_of(value: &Json) -> Cow<'_, str> {
    if let Some(why) = value.get(UNREAD).and_then(Json::as_str) {
        return foreign(why).to_string().into();
    }
    let kind = match value {
        Json::Null => "null",
        Json::Bool(_) => "a truth value",
        Json::Number(_) | Json::Digits(_) => "a number",
        Json::String(_) => "a text",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    };
    kind.into()
}

/// Characters of a name that a message shows.
const SHOWN: usize = 60;

/// A name from a row, for messages: on one line, and at most [`SHOWN`] characters of it.
fn name_of(text: &str) -> String {
    let some: String = text
        .chars()
        .filter(|c| !MARKS.contains(c))
        .take(SHOWN)
        .flat_map(char::escape_debug)
        .collect();
    let more = if text.chars().nth(SHOWN).is_some() { ".." } else { "" };
    format!("`{some}{more}`")
}

/// Keys of a row, for error messages.
fn has(row: &Map) -> String {
    const SOME: usize = 6;
    let keys: Vec<String> = row.keys().take(SOME).map(|key| name_of(key)).collect();
    match keys.is_empty() {
        true => "; it is empty".into(),
        false => format!("; it has {}", keys.join(", ")),
    }
}

/// Whether a message has the role `system`, or the role `developer` as OpenAI calls it.
fn is_system(message: &Json) -> bool {
    has_role(message, "system") || has_role(message, "developer")
}
