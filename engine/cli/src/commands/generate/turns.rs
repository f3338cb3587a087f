//! Reads the user's turns of a conversation from the standard input: a person at a terminal, or a
//! pipe.

use super::super::signals::is_ignored;
use super::super::{CommandError, code};
use super::LONGEST_PROMPT;
use crate::report::stderr;
use signal_hook::consts::SIGINT;
use signal_hook::flag::{register, register_conditional_shutdown};
use std::io::{self, BufRead, IsTerminal, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use topology::format_bytes;

/// Time between two looks for a Ctrl-C.
const LOOK_UP: Duration = Duration::from_millis(20);

/// The user's next turn.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A message for the model.
    Message(String),
    /// `/reset`: the conversation starts anew.
    Reset,
    /// `/help`: the commands are listed.
    Help,
    /// A Ctrl-C instead of a line.
    Interrupt,
    /// Lines that cannot be a message, with the reason.
    Refused(String),
    /// `/exit`, or the end of the input.
    End,
}

impl Turn {
    /// The turn in a text without its last line end.
    fn of(text: String) -> Self {
        let command = text.trim_end().strip_prefix('/');
        let is_word =
            |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase());
        match command.filter(is_word) {
            None => Self::Message(text),
            Some("reset") => Self::Reset,
            Some("help") => Self::Help,
            Some("exit") => Self::End,
            Some(word) => Self::Refused(format!(
                "/{word} is no command here; /help lists them. To send it as a message, write a blank before it"
            )),
        }
    }
}

/// A line of the input.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// The bytes of the line without its end.
    Bytes(Vec<u8>),
    Interrupt,
    TooLong,
    End,
}

/// Reader of the user's turns. A thread reads, so that a Ctrl-C is noticed meanwhile.
#[derive(Debug)]
pub(super) struct TurnReader {
    is_terminal: bool,
    /// True after a Ctrl-C.
    interrupted: Arc<AtomicBool>,
    requests: Sender<()>,
    lines: Receiver<io::Result<Line>>,
    /// Whether a line was requested and has not come.
    is_waiting: bool,
}

impl TurnReader {
    /// Reads the standard input. A Ctrl-C no longer ends the process, unless it is the second one
    /// before anybody has noticed the first. A Ctrl-C that is ignored, as in the background of a
    /// script, stays ignored.
    pub(super) fn open() -> io::Result<Self> {
        let (is_terminal, interrupted) = (io::stdin().is_terminal(), Arc::<AtomicBool>::default());
        if !is_ignored(SIGINT) {
            let aborted = i32::from(code::ABORTED);
            register_conditional_shutdown(SIGINT, aborted, Arc::clone(&interrupted))?;
            register(SIGINT, Arc::clone(&interrupted))?;
        }
        let (requests, requested) = channel::<()>();
        let (found, lines) = channel();
        // The thread ends with the process, since nothing else ends its reading.
        std::thread::Builder::new().name("input".into()).spawn(move || {
            requested.iter().take_while(|()| found.send(read_line()).is_ok()).for_each(drop);
        })?;
        Ok(Self { is_terminal, interrupted, requests, lines, is_waiting: false })
    }

    /// Whether a person at a terminal writes the turns.
    pub(super) const fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// Whether a Ctrl-C came since the last call.
    pub(super) fn was_interrupted(&self) -> bool {
        self.interrupted.swap(false, Ordering::SeqCst)
    }

    /// The next turn. Blank lines are no turns. A `\\` at the end of a line continues the message in
    /// the next line.
    pub(super) fn next(&mut self) -> Result<Turn, CommandError> {
        let mut text = String::new();
        loop {
            if self.is_terminal {
                stderr::offer(if text.is_empty() { b"> ".to_vec() } else { b". ".to_vec() });
            }
            let line = self.line();
            let line = line.map_err(|e| {
                CommandError::new(code::IO, format!("the standard input cannot be read: {e}"))
            })?;
            let line = match line {
                Line::Bytes(bytes) => bytes,
                Line::Interrupt => return Ok(Turn::Interrupt),
                Line::End if text.trim().is_empty() => return Ok(Turn::End),
                Line::End => return Ok(Turn::of(text)),
                Line::TooLong => {
                    let most = format_bytes(LONGEST_PROMPT);
                    let why = format!("a line of the standard input has more than {most}");
                    return Err(CommandError::new(code::DATA, why));
                }
            };
            let Ok(line) = String::from_utf8(line) else {
                return Ok(Turn::Refused("a line of the standard input is not UTF-8".into()));
            };
            if let Some(line) = line.strip_suffix('\\') {
                text = text + line + "\n";
                continue;
            }
            text += &line;
            if !text.trim().is_empty() {
                return Ok(Turn::of(text));
            }
            text.clear();
        }
    }

    fn line(&mut self) -> io::Result<Line> {
        let panicked = || io::Error::other("its thread has panicked");
        // After a Ctrl-C, the thread still waits for the line that was requested before.
        if !self.is_waiting {
            self.requests.send(()).map_err(|_| panicked())?;
            self.is_waiting = true;
        }
        loop {
            let received = self.lines.recv_timeout(LOOK_UP);
            self.is_waiting &= received.is_err();
            match received {
                // The program that sends the lines may have got the Ctrl-C, too, and have ended.
                Ok(_) | Err(RecvTimeoutError::Timeout) if self.was_interrupted() => {
                    return Ok(Line::Interrupt);
                }
                Ok(line) => return line,
                Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

fn read_line() -> io::Result<Line> {
    let mut line = Vec::new();
    io::stdin().lock().take(LONGEST_PROMPT + 1).read_until(b'\n', &mut line)?;
    if line.len() as u64 > LONGEST_PROMPT {
        return Ok(Line::TooLong);
    }
    if line.is_empty() {
        return Ok(Line::End);
    }
    line.pop_if(|last| *last == b'\n');
    line.pop_if(|last| *last == b'\r');
    Ok(Line::Bytes(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_word_behind_a_slash_is_a_command_and_anything_else_a_message() {
        let message = |text: &str| Turn::Message(text.into());
        assert_eq!(Turn::of("/reset ".into()), Turn::Reset);
        assert_eq!(Turn::of("/help".into()), Turn::Help);
        assert_eq!(Turn::of("/exit".into()), Turn::End);
        for text in [" /reset", "/reset it", "/etc/passwd", "/", "/Reset", "what is /reset?"] {
            assert_eq!(Turn::of(text.into()), message(text));
        }
        let refused = Turn::of("/bye".into());
        assert!(matches!(&refused, Turn::Refused(why) if why.starts_with("/bye is no command")));
    }
}
