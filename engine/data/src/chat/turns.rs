//! Where each message stands in the text of a chat. Each loop of a template that runs over messages writes a note where the turn
//! of a message begins, and one behind its last turn. The notes are taken out of the text again.

use super::marks::{CLOSE, OPEN};
use super::source::{Tag, Token};
use super::value::Dict;
use minijinja::{Environment, Value};
use std::ops::Range;

/// Stands around a note. Unicode promises that it is no character of a text.
const NOTE: char = '\u{FDD4}';
/// The filter that notes where the turn of a message begins.
const BEGIN: &str = "turn_begins";
/// The filter that notes where the last turn of a loop ends.
const END: &str = "turns_end";

/// The text of a chat.
#[derive(Debug, Default, PartialEq)]
pub struct RenderedChat {
    pub(crate) text: String,
    /// The bytes of each block `{% generation %}`.
    pub(crate) generated: Vec<Range<usize>>,
    /// The stretches of the text that loops over messages write, in the order of the text.
    pub(crate) turns: Vec<Turn>,
}

/// A stretch of text that a loop writes for a message.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The number of the message, from 0.
    pub(crate) message: usize,
    pub(crate) place: Range<usize>,
}

impl RenderedChat {
    /// Reads what a template wrote, with its notes.
    pub(super) fn of(written: &str) -> Self {
        let mut of = Self { text: String::with_capacity(written.len()), ..Self::default() };
        // Loops that run, outermost first: a number of a loop, and the message of its turn.
        let (mut running, mut generated): (Vec<(&str, usize)>, Option<usize>) = (Vec::new(), None);
        // The loop of the last stretch.
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
        // A loop that looks for something may write blanks.
        of.turns.retain(|turn| !of.text[turn.place.clone()].trim().is_empty());
        of
    }
}

/// Loops of a template, while its tags are read in their order.
#[derive(Debug, Default)]
pub(super) struct Loops {
    /// Of each loop that is open: its number, if it notes turns.
    open: Vec<Option<usize>>,
    many: usize,
    /// Blocks around the tag whose text goes elsewhere first: into a variable, a macro, a filter. Notes would be seen there.
    caught: usize,
}

impl Loops {
    /// The block that is to stand right behind this tag, if any: a note.
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

/// The variable of a loop that has one alone.
fn variable<'a>(tag: &'a Tag<'_>) -> Option<&'a str> {
    match &tag.tokens[..] {
        [_, Token::Name(name), Token::Name("in"), ..] => Some(name),
        _ => None,
    }
}

/// Gives a template the filters that write notes.
pub(super) fn add_filters(env: &mut Environment<'_>) {
    env.add_filter(BEGIN, |_: &str, number: usize, turn: &Value| {
        let message = turn.downcast_object_ref::<Dict>().and_then(|dict| dict.message);
        // Something else ends the turn before it, too.
        let message = message.map_or_else(String::new, |message| format!(" {message}"));
        format!("{NOTE}{number}{message}{NOTE}")
    });
    env.add_filter(END, |_: &str, number: usize| format!("{NOTE}{number}{NOTE}"));
}
