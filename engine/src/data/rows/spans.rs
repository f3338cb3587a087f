//! Where answers stand in the text of a template that does not mark them: from the end of an answer's prompt to the control token
//! behind it. Templates write earlier answers otherwise than the last one, so answers are looked for in the whole text: they are
//! where other answers change it.

use super::contents::of_text;
use super::control::Control;
use super::{ANSWER, CUT};
use crate::chat::{Chat, Template};
use crate::json::Json;
use std::ops::Range;

/// Bytes that a template writes for a row: each answer alone takes its whole text several times.
const MOST: usize = 256 << 20;

/// A template and the text that it makes of messages.
pub(super) struct Spans<'a> {
    pub(super) template: &'a Template,
    pub(super) control: &'a Control,
    pub(super) text: &'a str,
    pub(super) tools: Option<&'a Json>,
}

impl Spans<'_> {
    /// What the template makes of these messages.
    fn written_of(&self, messages: &[Json], answer: bool) -> Result<String, String> {
        self.template.text(Chat { messages, tools: self.tools }, answer)
    }

    /// Those of these answers, in the order of the text.
    pub(super) fn of(
        &self,
        messages: &mut [Json],
        answers: &[usize],
    ) -> Result<Vec<Range<usize>>, String> {
        if let Some(spans) = self.at_once(messages, answers) {
            return Ok(spans);
        }
        if answers.len().saturating_mul(self.text.len()) > MOST {
            let (many, bytes) = (answers.len(), self.text.len());
            return Err(format!(
                "the chat template changes its {many} answers, which are too many in {bytes} bytes: divide the row"
            ));
        }
        let spans: Result<Vec<_>, String> =
            answers.iter().map(|i| self.alone(messages, *i)).collect();
        let mut spans = spans?;
        spans.sort_by_key(|span| span.end);
        Ok(spans)
    }

    /// By one text in which all answers are others, if what is between them stays as it is.
    fn at_once(&self, messages: &[Json], answers: &[usize]) -> Option<Vec<Range<usize>>> {
        let is_said = |one: &Json| has_role(one, "assistant");
        if messages.iter().any(|one| calls(one).is_some()) {
            return None;
        }
        let others: Vec<Json> = messages
            .iter()
            .map(|one| if is_said(one) { another(one) } else { one.clone() })
            .collect();
        let other = self.written_of(&others, false).ok()?;
        let parts: Vec<&str> = other.split(ANSWER).collect();
        let said: Vec<usize> = (0..messages.len()).filter(|i| is_said(&messages[*i])).collect();
        if parts.len() != said.len() + 1 {
            return None;
        }
        let header = self.header(&others, &other, answers);
        let mut at = self.text.starts_with(parts[0]).then_some(parts[0].len())?;
        let mut spans = Vec::with_capacity(answers.len());
        for (n, i) in said.iter().enumerate() {
            let (before, behind) = (parts[n], parts[n + 1]);
            let end = if n + 1 == said.len() {
                let end = self.text.len().checked_sub(behind.len()).filter(|end| *end >= at)?;
                self.text.ends_with(behind).then_some(end)?
            } else {
                // An answer has no control token, so that it ends at the first place of what has one.
                self.control.find(behind, 0)?;
                at + self.text[at..].find(behind)?
            };
            if answers.first() <= Some(i) {
                let start = at - header.as_ref().map_or(0, |header| self.written(before, header));
                spans.push(start..end + self.end_of_turn(end));
            }
            at = end + behind.len();
        }
        Some(spans)
    }

    /// How a prompt ends that asks for an answer, and what the template puts between it and the last of these answers.
    fn header(&self, messages: &[Json], text: &str, answers: &[usize]) -> Option<[String; 2]> {
        let last = *answers.last()?;
        let prompt = self.written_of(&messages[..last], true).ok()?;
        let without = self.written_of(&messages[..last], false).ok()?;
        let behind = text.strip_prefix(&prompt).and_then(|rest| rest.split(ANSWER).next());
        let header = prompt.strip_prefix(&without)?.to_owned();
        Some([header, behind.unwrap_or_default().to_owned()])
    }

    /// Bytes at the end of `before` that a prompt does not give.
    fn written(&self, before: &str, [header, behind]: &[String; 2]) -> usize {
        if before.strip_suffix(behind).is_some_and(|before| before.ends_with(header)) {
            return behind.len();
        }
        self.behind_header(before, header).map_or(0, |at| before.len() - at)
    }

    /// Where `header` ends in a text that goes on without a control token.
    fn behind_header(&self, text: &str, header: &str) -> Option<usize> {
        let at = text.rfind(header).filter(|_| !header.is_empty())? + header.len();
        self.control.find(text, at).is_none().then_some(at)
    }

    /// Where answer `i` stands, by a text in which it alone is another one.
    fn alone(&self, messages: &mut [Json], i: usize) -> Result<Range<usize>, String> {
        let another = another(&messages[i]);
        let answer = std::mem::replace(&mut messages[i], another);
        let other = self.written_of(messages, false);
        messages[i] = answer;
        let other = other?;
        if !other.contains(ANSWER) {
            return Err(format!("the chat template does not show message {}", i + 1));
        }
        let same = |(a, b): &(char, char)| a == b;
        let length = |pairs: &mut dyn Iterator<Item = (char, char)>| -> usize {
            pairs.take_while(same).map(|(c, _)| c.len_utf8()).sum()
        };
        let from = length(&mut self.text.chars().zip(other.chars()));
        let rest = &self.text[from..];
        let behind = length(&mut rest.chars().rev().zip(other[from..].chars().rev()));
        let to = self.text.len() - behind;
        let to = match calls(&messages[i]) {
            // Their arguments are the same in the other answer.
            Some(_) => self.control.find(self.text, to).map_or(self.text.len(), |token| token.end),
            None => to + self.end_of_turn(to),
        };
        Ok(self.prompted(from, &messages[..i]).unwrap_or(from)..to)
    }

    /// Where the prompt of an answer ends in the text up to `from`. The beginning of an answer that a prompt gives is no target;
    /// what the template puts behind it is.
    fn prompted(&self, from: usize, asked: &[Json]) -> Option<usize> {
        let before = &self.text[..from];
        let prompt = self.written_of(asked, true).ok()?;
        if before.starts_with(&prompt) {
            return Some(prompt.len());
        }
        // A template may write the question otherwise where an answer follows: only the end of the prompt is the same.
        let header = prompt.strip_prefix(&self.written_of(asked, false).ok()?)?;
        self.behind_header(before, header)
    }

    /// Bytes of the control token at `at`: `<...>` or `[...]` without blanks.
    fn end_of_turn(&self, at: usize) -> usize {
        let text = &self.text[at..];
        let close = match text.chars().next() {
            Some('<') => '>',
            Some('[') => ']',
            _ => return 0,
        };
        let end = text.find(close).map_or(0, |end| end + 1);
        let is_one = !text[..end].contains(|c: char| c.is_whitespace() || c == CUT);
        if is_one { end } else { 0 }
    }
}

/// Whether a message has this role.
pub(super) fn has_role(message: &Json, role: &str) -> bool {
    message.get("role").and_then(Json::as_str) == Some(role)
}

/// The calls of tools in a message.
fn calls(message: &Json) -> Option<&Vec<Json>> {
    match message.get("tool_calls") {
        Some(Json::Array(calls)) if !calls.is_empty() => Some(calls),
        _ => None,
    }
}

/// The message with other words and calls of tools of other names.
fn another(message: &Json) -> Json {
    let mut other = message.clone();
    let Json::Object(fields) = &mut other else { unreachable!("a message is an object") };
    let word = || Json::String(ANSWER.into());
    let content = match fields.get("content") {
        Some(Json::Array(_)) => of_text(ANSWER.into()),
        _ => word(),
    };
    fields.insert("content".into(), content);
    let Some(Json::Array(calls)) = fields.get_mut("tool_calls") else { return other };
    for call in calls {
        let Json::Object(call) = call else { continue };
        let call = match call.get_mut("function") {
            Some(Json::Object(function)) => {
                function.insert("name".into(), word());
                continue;
            }
            _ => call,
        };
        call.insert("name".into(), word());
    }
    other
}
