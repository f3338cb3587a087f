//! Ranges of the messages in the text of a chat. A loop over messages writes a note before each
//! turn and after the last turn; onebox removes the notes from the text.

use super::marks::{CLOSE, OPEN};
use super::source::{Tag, Token};
use super::value::Dict;
use minijinja::{Environment, Value};
use std::ops::Range;

/// Character around a note: a noncharacter of Unicode.
const NOTE: char = '\u{FDD4}';
/// Filter that notes the beginning of a message's turn.
const BEGIN: &str = "turn_begins";
/// Filter that notes the end of a loop's last turn.
const END: &str = "turns_end";

/// Text of a chat, with the ranges of its parts.
#[derive(Debug, Default, PartialEq)]
pub struct RenderedChat {
    pub(crate) text: String,
    /// Byte range of each `{% generation %}` block.
    pub(crate) generated: Vec<Range<usize>>,
    /// Ranges of text that loops over messages write, in the order of the text.
    pub(crate) turns: Vec<Turn>,
}

/// Range of text that a loop writes for a message.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Index of the message in the chat, from 0.
    pub(crate) message: usize,
    pub(crate) place: Range<usize>,
}

impl RenderedChat {
    /// Reads the output of a template, and removes its notes.
    pub(super) fn of(written: &str) -> Self {
        let mut of = Self { text: String::with_capacity(written.len()), ..Self::default() };
        // Running loops, outermost first: the number of a loop, and the message of its turn.
        let (mut running, mut generated): (Vec<(&str, usize)>, Option<usize>) = (Vec::new(), None);
        // Number of the loop that wrote the last range.
        let mut before = "";
        for (i, part) in written.split(NOTE).enumerate() {
            if i % 2 == 1 {
                let (number, message) = part.split_once(' ').unwrap_or((part, ""));
                if let Some(at) = running.iter().position(|(other, _)| *other == number) {
                    running.truncate(at);
                }
                running.extend(message.parse().ok().map(|message| (number, message)));
                continue;
            }
            let start = of.text.len();
            for c in part.chars() {
                match c {
                    OPEN => generated = Some(of.text.len()),
                    CLOSE => {
                        let span = generated.take().map(|start| start..of.text.len());
                        of.generated.extend(span);
                    }
                    c => of.text.push(c),
                }
            }
            let place = start..of.text.len();
            let Some((number, message)) = running.last().filter(|_| !place.is_empty()) else {
                continue;
            };
            match of.turns.last_mut() {
                Some(last)
                    if (last.message, before) == (*message, *number) && last.place.end == start =>
                {
                    last.place.end = place.end;
                }
                _ => of.turns.push(Turn { message: *message, place }),
            }
            before = *number;
        }
        // A loop that only searches the messages may write blanks.
        of.turns.retain(|turn| !of.text[turn.place.clone()].trim().is_empty());
        of
    }
}

/// Open loops of a template, while its tags are read in order.
#[derive(Debug, Default)]
pub(super) struct Loops {
    /// Number of each open loop. None: the loop notes no turns.
    open: Vec<Option<usize>>,
    many: usize,
    /// Number of open blocks that capture text (variable, macro, filter) and would see notes.
    caught: usize,
}

impl Loops {
    /// Filter that writes a note directly after this tag, if the tag needs a note.
    pub(super) fn note(&mut self, tag: &Tag<'_>) -> Option<String> {
        match tag.keyword()? {
            "for" => {
                let number = variable(tag).filter(|_| self.caught == 0).map(|name| {
                    self.many += 1;
                    (self.many, name)
                });
                self.open.push(number.map(|(number, _)| number));
                number.map(|(number, name)| format!("{BEGIN}({number}, {name})"))
            }
            "endfor" => self.open.pop()?.map(|number| format!("{END}({number})")),
            "macro" | "call" | "filter" | "set" if tag.is_open() => {
                self.caught += 1;
                None
            }
            "endmacro" | "endcall" | "endfilter" | "endset" => {
                self.caught = self.caught.saturating_sub(1);
                None
            }
            _ => None,
        }
    }
}

/// Variable of a loop that has only one variable.
fn variable<'a>(tag: &'a Tag<'_>) -> Option<&'a str> {
    match &tag.tokens[..] {
        [_, Token::Name(name), Token::Name("in"), ..] => Some(name),
        _ => None,
    }
}

/// Adds the filters that write notes.
pub(super) fn add_filters(env: &mut Environment<'_>) {
    env.add_filter(BEGIN, |_: &str, number: usize, turn: &Value| {
        let message = turn.downcast_object_ref::<Dict>().and_then(|dict| dict.message);
        // An item that is no message ends the previous turn, too.
        let message = message.map_or_else(String::new, |message| format!(" {message}"));
        format!("{NOTE}{number}{message}{NOTE}")
    });
    env.add_filter(END, |_: &str, number: usize| format!("{NOTE}{number}{NOTE}"));
}
