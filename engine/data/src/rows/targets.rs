//! Finds the bytes of a chat's text that are targets: the bytes that the template marks. Without
//! marks, an answer extends from the end of its prompt to the last text before the next message.

use super::contents::of_text;
use super::control::Control;
use crate::chat::{ANSWER, Chat, RenderedChat, Template, Turn, message};
use files::json::{Json, Map};
use std::ops::Range;

/// Maximum bytes that a template may write for a row; the prompt of each answer is a separate text.
const MOST: usize = 256 << 20;

/// Chat, and which of its messages the model learns.
pub(super) struct Targets<'a> {
    pub(super) template: &'a Template,
    pub(super) control: &'a Control,
    pub(super) chat: Chat<'a>,
    /// Whether the model learns each message of the chat.
    pub(super) learned: &'a [bool],
    /// Whether the whole text is a target, except messages that the model does not learn.
    pub(super) whole: bool,
}

impl Targets<'_> {
    /// Text of the chat, and the byte ranges of its targets in order.
    pub(super) fn of(&self) -> Result<(String, Vec<Range<usize>>), String> {
        let whole = self.template.rendered(self.chat, false);
        let whole = whole.map_err(|why| with_silent_call(self.chat.messages, why))?;
        let is_answer = |i: &usize| has_role(&self.chat.messages[*i], "assistant");
        let (answers, others): (Vec<usize>, Vec<usize>) =
            (0..self.learned.len()).filter(is_answer).partition(|i| self.learned[*i]);
        let many = match (self.whole, self.template.has_marks()) {
            (true, _) => self.learned.iter().filter(|learns| !**learns).count(),
            (_, true) => others.len(),
            (_, false) => answers.len(),
        };
        if many.saturating_mul(whole.text.len()) > MOST {
            let bytes = whole.text.len();
            return Err(format!(
                "its chat has {many} answers in {bytes} bytes, more than onebox looks for: divide the row"
            ));
        }
        if self.whole {
            return self.all(&whole);
        }
        if self.template.has_marks() {
            return self.marked(whole, &others);
        }
        let mut text = whole.text.clone();
        let mut spans = Vec::with_capacity(answers.len());
        for i in answers {
            let (mut span, ends) = self.answer(&whole, i)?;
            if !ends
                && i + 1 == self.learned.len()
                && text[span.end..].trim().is_empty()
                && let Some(token) = self.missing_end(i)
            {
                text.push_str(&token);
                span.end = text.len();
            }
            spans.push(span);
        }
        spans.sort_by_key(|span| span.end);
        if let Some(pair) = spans.windows(2).find(|pair| pair[0].end > pair[1].start) {
            let at = &whole.text[pair[1].start..].chars().take(40).collect::<String>();
            return Err(format!(
                "the chat template writes two answers into one, at {at:?}: mark answers in it with {{% generation %}}"
            ));
        }
        Ok((text, spans))
    }

    /// Text of the chat, and the ranges of all messages that the model learns.
    fn all(&self, whole: &RenderedChat) -> Result<(String, Vec<Range<usize>>), String> {
        let mut text = whole.text.clone();
        if let Some(last) = self.learned.len().checked_sub(1)
            && self.learned[last]
            && !self.template.has_marks()
            && has_role(&self.chat.messages[last], "assistant")
            && let Ok((span, false)) = self.answer(whole, last)
            && text[span.end..].trim().is_empty()
            && let Some(token) = self.missing_end(last)
        {
            text.push_str(&token);
        }
        let mut left_out = Vec::new();
        for i in (0..self.learned.len()).filter(|i| !self.learned[*i]) {
            left_out.extend(self.places(whole, i)?);
        }
        left_out.sort_by_key(|place| place.start);
        let (mut spans, mut at) = (Vec::new(), 0);
        for place in left_out {
            spans.push(at..place.start.max(at));
            at = at.max(place.end);
        }
        spans.push(at..text.len());
        spans.retain(|span| !span.is_empty());
        Ok((text, spans))
    }

    /// Ranges of a message: the words and the end of an answer, or all that the template writes for
    /// another message.
    fn places(&self, whole: &RenderedChat, i: usize) -> Result<Vec<Range<usize>>, String> {
        if has_role(&self.chat.messages[i], "assistant") {
            return Ok(vec![self.answer(whole, i)?.0]);
        }
        let turns = whole.turns.iter().filter(|turn| turn.message == i);
        let places: Vec<_> = turns.map(|turn| turn.place.clone()).collect();
        match places.is_empty() {
            true => Err(format!(
                "the chat template does not tell where message {} is, which is marked as not to be learned: remove its mark, or set \
                 data.targets to Answers",
                i + 1
            )),
            false => Ok(places),
        }
    }

    /// Text of the first messages of the chat. If `asked`, the prompt of the next message follows.
    fn beginning(&self, messages: usize, asked: bool) -> Result<RenderedChat, String> {
        let messages = &self.chat.messages[..messages];
        self.template.rendered(Chat { messages, ..self.chat }, asked)
    }

    /// Text of the chat, and the ranges that the template marks, except in the answers `others`.
    fn marked(
        &self,
        whole: RenderedChat,
        others: &[usize],
    ) -> Result<(String, Vec<Range<usize>>), String> {
        let mut spans = whole.generated.clone();
        if whole.turns.is_empty() {
            for i in others {
                let start = self.start(&whole, *i)?;
                let place = start..self.limit(&whole, *i, start)?;
                spans.retain(|span| !place.contains(&span.start));
            }
        } else {
            let owner = |place: usize| {
                let turn = whole.turns.iter().find(|turn| turn.place.contains(&place))?;
                Some(turn.message)
            };
            spans.retain(|span| owner(span.start).is_none_or(|i| !others.contains(&i)));
        }
        Ok((whole.text, spans))
    }

    /// Range of an answer with its end token, and whether the answer has an end token.
    fn answer(&self, whole: &RenderedChat, i: usize) -> Result<(Range<usize>, bool), String> {
        let start = self.start(whole, i)?;
        let limit = self.limit(whole, i, start)?;
        if limit < start {
            return Err(self.unclear(i, "ends"));
        }
        let (end, ends) = self.end(whole, i, start..limit);
        Ok((start..end, ends))
    }

    fn unclear(&self, i: usize, does: &str) -> String {
        format!(
            "the chat template does not tell where the answer of message {} {does}: mark answers in it with {{% generation %}}",
            i + 1
        )
    }

    /// First range that the template writes for message `i` and that ends at or after `place`.
    fn turn(whole: &RenderedChat, i: usize, place: usize) -> Option<Range<usize>> {
        let turns = whole.turns.iter().filter(|turn| turn.message == i);
        let mut turns = turns.map(|turn| turn.place.clone());
        turns.find(|turn| turn.end >= place)
    }

    /// Byte at which the prompt of an answer ends. Text of the answer in the prompt is no target;
    /// text that the template writes after the prompt is a target.
    fn start(&self, whole: &RenderedChat, i: usize) -> Result<usize, String> {
        let prompt = self.beginning(i, true);
        let text = &whole.text;
        // Earlier messages are skipped: a template may write them differently if others follow.
        let last = |of: &RenderedChat| {
            let mut turns = of.turns.iter().rev();
            turns.find(|turn| turn.message + 1 == i).map_or(0, |turn| turn.place.start)
        };
        if let Ok(prompt) = &prompt {
            let (here, there) = (last(whole), last(prompt));
            if text[here..].starts_with(&prompt.text[there..]) {
                let start = here + prompt.text.len() - there;
                let more =
                    if i == 0 { self.header_of_first(&prompt.text, &text[start..]) } else { 0 };
                return Ok(start + more);
            }
        }
        if whole.turns.is_empty() {
            return match prompt {
                Ok(_) => Err(self.unclear(i, "begins")),
                Err(why) => Err(why),
            };
        }
        let turns: Vec<&Turn> = whole.turns.iter().filter(|turn| turn.message == i).collect();
        let turn = match &turns[..] {
            [turn] => turn,
            [] => return Err(format!("the chat template does not show message {}", i + 1)),
            _ => return Err(self.unclear(i, "begins")),
        };
        let header = self.header(i, prompt.ok()).ok_or_else(|| self.unclear(i, "begins"))?;
        let turn = &turn.place;
        if text[turn.clone()].starts_with(&header) {
            return Ok(turn.start + header.len());
        }
        let (before, _) = self.probe(i).ok_or_else(|| self.unclear(i, "begins"))?;
        // A template may put a message of its own in front of the first message. Blanks around a
        // prompt's words belong to its block; shared blanks after the words belong to the prompt.
        let (words, blanks) = (header.trim(), &header[header.trim_end().len()..]);
        if let Some(at) = before.rfind(words).filter(|_| !words.is_empty()) {
            let at = at + words.len();
            let at = at + common(&before[at..], blanks);
            if text[turn.clone()].starts_with(&before[..at]) {
                return Ok(turn.start + at);
            }
        }
        // The prompt may be longer than the text in front of the answer: it may begin the thoughts.
        let same = common(&before, &header);
        let token = self.control.last(&before[..same]).map_or(0, |token| token.end);
        let line = before[..same].rfind('\n').map_or(0, |line| line + 1);
        match if same == before.len() { same } else { token.max(line) } {
            0 => Err(self.unclear(i, "begins")),
            bytes => Ok(turn.start + bytes),
        }
    }

    /// Text that a prompt adds after the messages in front of an answer.
    fn header(&self, i: usize, prompt: Option<RenderedChat>) -> Option<String> {
        let of_its_own = || {
            let without = self.beginning(i, false).ok()?;
            Some(prompt?.text.strip_prefix(without.text.as_str())?.to_owned())
        };
        // A template may refuse a prompt without messages.
        of_its_own().or_else(|| self.header_after_question())
    }

    /// Text that a prompt adds after a question.
    fn header_after_question(&self) -> Option<String> {
        let asked = [message("user", "a")];
        let text = |answer| self.template.text(Chat { messages: &asked, ..self.chat }, answer);
        Some(text(true).ok()?.strip_prefix(&text(false).ok()?)?.to_owned())
    }

    /// Bytes of the header at the beginning of `text`, an answer that is the first message, if the
    /// template adds nothing to the `prompt` without messages: a template that writes the header in
    /// its loop over messages writes it only behind a message.
    fn header_of_first(&self, prompt: &str, text: &str) -> usize {
        let adds_nothing = self.beginning(0, false).is_ok_and(|without| without.text == prompt);
        let header = if adds_nothing { self.header_after_question() } else { None };
        header.filter(|header| text.starts_with(header.as_str())).map_or(0, |header| header.len())
    }

    /// Byte at which the text of the next message begins.
    fn limit(&self, whole: &RenderedChat, i: usize, start: usize) -> Result<usize, String> {
        let text = &whole.text;
        let is_last = i + 1 == self.learned.len();
        let shown = |message: usize| whole.turns.iter().any(|turn| turn.message == message);
        match Self::turn(whole, i, start) {
            Some(turn) if is_last || shown(i + 1) => Ok(turn.end),
            None if is_last && whole.turns.is_empty() => Ok(text.len()),
            // The text of the next message may stand in the turn of the answer.
            turn => {
                let until = self.beginning(i + 1, false)?;
                let (from, of_answer) = match &turn {
                    Some(turn) => (turn.start, Self::turn(&until, i, 0)),
                    None => (0, Some(0..until.text.len())),
                };
                let until = of_answer.map_or("", |place| &until.text[place]);
                let bytes = match text[from..].starts_with(until) {
                    true => until.len(),
                    false => until.trim_end().len(),
                };
                match from + bytes > start && text[from..].starts_with(&until[..bytes]) {
                    true => Ok(from + bytes),
                    false => Err(self.unclear(i, "ends")),
                }
            }
        }
    }

    /// Byte at which an answer ends in `place`, and whether the template ends the answer.
    fn end(&self, whole: &RenderedChat, i: usize, place: Range<usize>) -> (usize, bool) {
        let text = &whole.text;
        let mut limit = place.end;
        let trimmed = |limit: usize| place.start + text[place.start..limit].trim_end().len();
        // The token that begins a text may follow each answer, because it begins the next question.
        let begins = self.template.beginning_of_text();
        while let Some(begins) = begins
            && self.template.end_of_text() != Some(begins)
            && text[place.start..trimmed(limit)].ends_with(begins)
        {
            limit = trimmed(limit) - begins.len();
        }
        let end = trimmed(limit);
        if self.template.end_of_answers().is_empty() {
            let words = self.end_of_words(whole, i, place.start..limit);
            let end = words.map_or(end, |(end, _)| end);
            let after = &text[place.end..];
            let from = text.len() - after.trim_start().len();
            let next = self.control.find(text, from).filter(|token| token.start == from);
            let next = next.filter(|token| Some(&text[token.clone()]) != begins);
            return next.map_or((end, false), |token| (token.end, true));
        }
        let is_token = self.control.last(&text[place.start..end]);
        if is_token.is_some_and(|token| place.start + token.end == end) {
            return (end, true);
        }
        // Blanks at the end of an answer's own words count; blanks of the template do not count.
        self.end_of_words(whole, i, place.start..limit).unwrap_or((end, true))
    }

    /// End byte of an answer with the template's text after it, and whether this text is not blank.
    fn end_of_words(
        &self,
        whole: &RenderedChat,
        i: usize,
        place: Range<usize>,
    ) -> Option<(usize, bool)> {
        if calls(&self.chat.messages[i]).is_some() {
            return None;
        }
        let (_, after) = self.probe(i)?;
        let end = whole.text[place.clone()].strip_suffix(after.as_str())?.len();
        let ends = after.trim_end();
        Some((place.start + end + ends.len(), !ends.is_empty()))
    }

    /// Control token that ends an answer before a message, but is missing after the last answer.
    fn missing_end(&self, i: usize) -> Option<String> {
        let end = self.template.end_of_answers();
        if end.is_empty() {
            return self.next_token(i);
        }
        let token = self.control.find(end, 0).filter(|token| token.start == 0)?;
        Some(end[token].to_owned())
    }

    /// Texts that the template writes in the turn of message `i`, before and after its words.
    fn probe(&self, i: usize) -> Option<(String, String)> {
        let mut messages = self.chat.messages.to_vec();
        let Json::Object(fields) = &mut messages[i] else { return None };
        put_answer(fields)?;
        let other =
            self.template.rendered(Chat { messages: &messages, ..self.chat }, false).ok()?;
        let turns = other.turns.iter().filter(|turn| turn.message == i);
        let mut turns = turns.map(|turn| &other.text[turn.place.clone()]);
        let turn = turns.find(|turn| turn.contains(ANSWER))?;
        let (before, _) = turn.split_once(ANSWER)?;
        let (_, after) = turn.rsplit_once(ANSWER)?;
        Some((before.to_owned(), after.to_owned()))
    }

    /// Token that would follow the last answer if another message followed.
    fn next_token(&self, i: usize) -> Option<String> {
        let answer = &self.chat.messages[i];
        let roles = if calls(answer).is_some() { &["tool", "user"][..] } else { &["user"] };
        let begins = self.template.beginning_of_text();
        roles.iter().find_map(|role| {
            let mut messages = self.chat.messages.to_vec();
            messages.push(message(role, "a"));
            let chat = Chat { messages: &messages, ..self.chat };
            let with = self.template.rendered(chat, false).ok()?;
            let turn = with.turns.iter().find(|turn| turn.message == i + 1)?;
            let text = with.text[turn.place.clone()].trim_start();
            let token = self.control.find(text, 0).filter(|token| token.start == 0)?;
            let token = &text[token];
            (Some(token) != begins).then(|| token.to_owned())
        })
    }
}

/// Bytes of the common beginning of two texts.
fn common(one: &str, other: &str) -> usize {
    let pairs = one.chars().zip(other.chars());
    pairs.take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
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

/// Reason `why` a template does not run on `messages`, with the first call of a tool that has no text:
/// most templates without calls join the text to others.
pub(super) fn with_silent_call(messages: &[Json], why: String) -> String {
    let is_silent = |one: &Json| {
        calls(one).is_some() && one.get("content").is_none_or(|text| *text == Json::Null)
    };
    match messages.iter().position(is_silent) {
        None => why,
        Some(i) => format!(
            "{why}; message {} calls a tool and has no text: take a chat template that writes calls, or leave the row out",
            i + 1
        ),
    }
}

/// Replaces the content by [`ANSWER`], or the names in calls if the message has no content.
fn put_answer(fields: &mut Map) -> Option<()> {
    let has_content = match fields.get("content") {
        Some(Json::String(text)) => !text.is_empty(),
        other => other.is_some(),
    };
    let Some(Json::Array(calls)) = fields.get_mut("tool_calls").filter(|_| !has_content) else {
        let content = fields.get_mut("content")?;
        *content = match content {
            Json::Array(_) => of_text(ANSWER.into()),
            _ => Json::String(ANSWER.into()),
        };
        return Some(());
    };
    for call in calls {
        let Json::Object(call) = call else { continue };
        let call = match call.get_mut("function") {
            Some(Json::Object(function)) => function,
            _ => call,
        };
        call.insert("name".into(), Json::String(ANSWER.into()));
    }
    Some(())
}
