//! `onebox generate --chat` without a prompt: a conversation, at a terminal or through pipes.

use super::super::{CommandError, code, say, seen};
use super::turns::{Turn, TurnReader};
use super::{GenerateArgs, LoadedModel, TextProgress, print_text, sampling, template};
use crate::generate::{End, Generator, ModelSource, Piece, Sampling};
use crate::report::stderr;
use config::Config;
use data::chat::{Chat, Template, message};
use files::path_text::lines;
use std::io::{self, IsTerminal, Write};
use topology::counted;

/// Default for the maximum number of tokens of a conversation, unless the model has fewer.
const CONTEXT: usize = 8192;

const HELP: &str = "\
/reset   start anew, with the same system message
/exit    end, as Ctrl-D does
/help    list this
Ctrl-C   stop an answer
A \\ at the end of a line continues the message in the next line.";

/// Keeps a conversation until the input ends.
pub(super) fn run(
    args: &GenerateArgs,
    config: &Config,
    from: &LoadedModel<'_>,
    model: &ModelSource<'_>,
) -> Result<(), CommandError> {
    let (template, sampling) = (template(args, from)?, sampling(args, from)?);
    let context = context(args, config)?;
    let generator = Generator::open(config, model, context)?;
    let mut conversation =
        Conversation { args, from, template, sampling, context, generator, past: Vec::new() };
    let turns = TurnReader::open();
    let mut turns = turns.map_err(|e| CommandError::new(code::INTERNAL, e))?;
    let is_terminal = turns.is_terminal();
    if is_terminal {
        say(&format!(
            "a conversation of at most {}: Ctrl-C stops an answer, /reset starts anew, /help lists the commands, Ctrl-D ends",
            counted(context, "token")
        ));
    }
    let mut was_interrupted = false;
    loop {
        let turn = turns.next()?;
        if turn == Turn::Interrupt && !is_terminal {
            return Err(CommandError::silent(code::ABORTED));
        }
        if turn == Turn::Interrupt {
            stderr::offer(b"\n".to_vec());
            if std::mem::replace(&mut was_interrupted, true) {
                return Ok(());
            }
            say("Press Ctrl-C again, or Ctrl-D, to end.");
            continue;
        }
        was_interrupted = false;
        let refused = match turn {
            Turn::End => break,
            Turn::Interrupt => continue,
            Turn::Reset => {
                conversation.past.clear();
                continue;
            }
            Turn::Help => {
                say(HELP);
                continue;
            }
            Turn::Refused(why) => CommandError::new(code::DATA, why),
            Turn::Message(text) => match conversation.prompt(&text) {
                Ok(prompt) => match conversation.answer(text, &prompt, &turns)? {
                    AnswerEnd::Unread => return Ok(()),
                    // What sends the messages does not know that an answer is not complete.
                    AnswerEnd::Interrupted if !is_terminal => {
                        return Err(CommandError::silent(code::ABORTED));
                    }
                    AnswerEnd::Complete | AnswerEnd::Interrupted => continue,
                },
                Err(refused) => refused,
            },
        };
        // A person goes on with another message; a program must notice that one is missing.
        if !is_terminal {
            return Err(refused);
        }
        say(&format!("error: {}", refused.message));
    }
    if is_terminal {
        stderr::offer(b"\n".to_vec());
    }
    Ok(())
}

/// Maximum number of tokens of the conversation.
fn context(args: &GenerateArgs, config: &Config) -> Result<usize, CommandError> {
    let seq_len = config.model.seq_len;
    match args.context.map(|context| context as usize) {
        None => Ok(seq_len.min(CONTEXT)),
        Some(context) if context <= seq_len => Ok(context),
        Some(context) => {
            let why = format!("--context {context}: the model has model.seq_len {seq_len}");
            Err(CommandError::new(code::USAGE, why))
        }
    }
}

/// How the printing of an answer ended.
enum AnswerEnd {
    Complete,
    /// A Ctrl-C stopped the answer.
    Interrupted,
    /// The reader of the answers has gone.
    Unread,
}

/// A message of the user, and its answer.
struct Exchange {
    message: String,
    answer: String,
}

/// A model and the messages so far.
struct Conversation<'a> {
    args: &'a GenerateArgs,
    from: &'a LoadedModel<'a>,
    template: Template,
    sampling: Sampling,
    /// Maximum number of tokens of a prompt and its answer.
    context: usize,
    generator: Generator<'a>,
    past: Vec<Exchange>,
}

impl Conversation<'_> {
    /// Tokens of the conversation up to the start of the answer to `text`. The oldest turns are
    /// left out until the answer has room.
    fn prompt(&mut self, text: &str) -> Result<Vec<i32>, CommandError> {
        let room = self.args.tokens.unwrap_or(usize::MAX).min(self.context / 4).max(1);
        let mut length = 0;
        for first in 0..=self.past.len() {
            let rendered = self.rendered(&self.past[first..], text)?;
            let tokens = self.generator.tokens(&rendered)?;
            length = tokens.len();
            let fits = length + room <= self.context;
            if fits || first == self.past.len() && length < self.context {
                if first > 0 {
                    self.past.drain(..first);
                    say(&format!(
                        "note: {} left out from here on: the conversation has room for {}",
                        match first {
                            1 => "the oldest turn is".to_owned(),
                            some => format!("the oldest {some} turns are"),
                        },
                        counted(self.context, "token")
                    ));
                }
                return Ok(tokens);
            }
        }
        let why = format!(
            "this message has {} in the chat template, and the conversation has room for {}: write \
             less, or raise --context (at most model.seq_len)",
            counted(length, "token"),
            counted(self.context, "token")
        );
        Err(CommandError::new(code::DATA, why))
    }

    /// Text of the chat template for some turns and a new message.
    fn rendered(&self, past: &[Exchange], text: &str) -> Result<String, CommandError> {
        let system = self.args.system.iter().map(|text| message("system", text));
        let past = past
            .iter()
            .flat_map(|turn| [message("user", &turn.message), message("assistant", &turn.answer)]);
        let messages: Vec<_> = system.chain(past).chain([message("user", text)]).collect();
        let rendered = self.template.text(Chat::of(&messages), true);
        rendered.map_err(|why| self.from.unusable(&why))
    }

    /// Prints the answer to `text` as it comes, and adds both to the conversation. With `--json`,
    /// prints the answer, or the part before a Ctrl-C, as one object.
    fn answer(
        &mut self,
        text: String,
        prompt: &[i32],
        turns: &TurnReader,
    ) -> Result<AnswerEnd, CommandError> {
        let left = self.context - prompt.len();
        let tokens = self.args.tokens.unwrap_or(usize::MAX).min(left);
        let sampling = Sampling { tokens, ..self.sampling.clone() };
        let (mut answer, shown) = (TextProgress::default(), !self.args.json);
        let (mut printed, mut is_interrupted) = (Ok(true), false);
        let mut emit = |piece: Piece<'_>| {
            match piece {
                Piece::Prompt(_) => {}
                Piece::Text(bytes) => {
                    answer.bytes.extend_from_slice(bytes);
                    if shown {
                        printed = print_piece(bytes);
                    }
                }
                Piece::End(end, tokens) => {
                    (answer.end, answer.tokens) = (Some(end), tokens.to_vec());
                }
            }
            is_interrupted |= turns.was_interrupted();
            matches!(printed, Ok(true)) && !is_interrupted
        };
        let reused = self.generator.extend(prompt, &sampling, &mut emit)?;
        if answer.end.is_none() {
            answer.tokens = self.generator.tokens_from(prompt.len()).to_vec();
        }
        tracing::debug!("{reused} of {} of the prompt were known", counted(prompt.len(), "token"));
        if shown && matches!(printed, Ok(true)) {
            printed = print_piece(b"\n");
        } else if !shown {
            print_text(&text, &answer)?;
        }
        if answer.end == Some(End::Length) && answer.tokens.len() == left {
            let of = counted(self.context, "token");
            say(&format!("note: the answer ends here: the conversation has room for {of}"));
        }
        let answer = String::from_utf8_lossy(&answer.bytes).into_owned();
        self.past.push(Exchange { message: text, answer });
        Ok(match printed? {
            _ if is_interrupted => AnswerEnd::Interrupted,
            true => AnswerEnd::Complete,
            false => AnswerEnd::Unread,
        })
    }
}

/// Prints a part of an answer. A terminal gets no control characters. Returns false if the reader
/// has gone.
fn print_piece(bytes: &[u8]) -> Result<bool, CommandError> {
    let mut out = io::stdout().lock();
    let written = match out.is_terminal() {
        true => out.write_all(lines(&String::from_utf8_lossy(bytes)).as_bytes()),
        false => out.write_all(bytes),
    };
    seen(written.and_then(|()| out.flush()))
}
