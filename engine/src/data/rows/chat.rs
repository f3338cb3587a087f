//! The text of a chat, and where its targets stand in it.

use super::control::Control;
use super::has_role;
use super::spans::Spans;
use super::talk::Talk;
use crate::chat::{CLOSE, Chat, OPEN, Template};
use std::ops::Range;

/// The text of a chat by `template`, whose control tokens have these texts, and its bytes that are targets.
pub(super) fn targets(
    template: &Template,
    control: &Control,
    talk: Talk,
) -> Result<(String, Vec<Range<usize>>), String> {
    let Talk { mut messages, tools, learned } = talk;
    let tools = tools.as_ref();
    let is_answer = |i: &usize| has_role(&messages[*i], "assistant");
    let answers: Vec<usize> = (0..messages.len()).filter(is_answer).collect();
    if template.has_marks() {
        let whole = Chat { messages: &messages, tools };
        let (text, mut counted) = unmarked(&template.marked(whole, false)?);
        // A template may mark an answer in several parts.
        let before = |i: usize| match i {
            0 => Ok(0),
            _ => {
                let chat = Chat { messages: &messages[..i], tools };
                Ok::<_, String>(template.marked(chat, true)?.matches(CLOSE).count())
            }
        };
        for i in answers.into_iter().rev().filter(|i| !learned[*i]) {
            let end = before(i + 1)?.min(counted.len());
            counted.drain(before(i)?.min(end)..end);
        }
        return Ok((text, counted));
    }
    let text = template.text(Chat { messages: &messages, tools }, false)?;
    let first = learned.iter().position(|learned| *learned).unwrap_or(messages.len());
    let answers: Vec<usize> = answers.into_iter().filter(|i| *i >= first).collect();
    let spans = Spans { template, control, text: &text, tools }.of(&mut messages, &answers)?;
    let counted = spans.into_iter().zip(answers).filter(|(_, i)| learned[*i]);
    let counted = counted.map(|(span, _)| span).collect();
    Ok((text, counted))
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
