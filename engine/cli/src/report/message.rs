//! Bounds messages before they leave the program, and marks inner lines that look like the
//! beginning of another message. Foreign texts are escaped when a message quotes them.

use files::foreign_text::LONGEST_LINE;
use files::path_text::lines;
use std::fmt;
use tracing::field::Field;
use tracing_subscriber::fmt::format::Writer;

/// Maximum bytes of a message. The longest message of onebox itself lists fifty errors of a config.
const LONGEST: usize = 128 << 10;
/// Mark before a line that would look like another message.
const INSIDE: &str = "  | ";
/// Words at the beginning of onebox's messages and of log lines.
const BEGINNINGS: [&str; 8] =
    ["error", "warning", "warn ", "info ", "debug ", "trace ", "note:", "fail "];

/// Words of the log for the events of a span.
const SPAN_EVENTS: [&str; 4] = ["new", "enter", "exit", "close"];

/// Bounds one message. Only its first line may look like the beginning of a message.
pub(crate) fn message(text: &str) -> String {
    bounded(text, |number, line| number > 0 && looks_begun(line))
}

/// Bounds several messages or a table. Foreign text in them must be escaped already.
pub(crate) fn report(text: &str) -> String {
    bounded(text, |_, _| false)
}

/// Writes a value into the log.
pub(crate) fn field(to: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let value = message(&format!("{value:?}"));
    match field.name() {
        "message" => {
            // The event of a span is a text, and `Debug` puts quotes around it.
            let word = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
            let word = word.filter(|word| SPAN_EVENTS.contains(word));
            write!(to, "{}", word.unwrap_or(&value))
        }
        name => write!(to, "{name}={value}"),
    }
}

/// Whether a line looks like the start of a message: a word of onebox, or the log's seconds.
fn looks_begun(line: &str) -> bool {
    let line = line.trim_start();
    let is_word =
        |word: &&str| line.get(..word.len()).is_some_and(|l| l.eq_ignore_ascii_case(word));
    let seconds = line.split(' ').next().and_then(|first| first.split_once('.'));
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    BEGINNINGS.iter().any(is_word) || seconds.is_some_and(|(a, b)| are_digits(a) && are_digits(b))
}

fn bounded(text: &str, is_inside: impl Fn(usize, &str) -> bool) -> String {
    let mut out = String::new();
    let text = lines(text);
    for (number, line) in text.split('\n').enumerate() {
        if out.len() > LONGEST {
            let more = text.split('\n').count() - number;
            out += &format!("\n  .. ({more} more lines)");
            break;
        }
        if number > 0 {
            out.push('\n');
        }
        if is_inside(number, line) {
            out += INSIDE;
        }
        let end = line.floor_char_boundary(LONGEST_LINE);
        out += &line[..end];
        if end < line.len() {
            out += &format!(".. ({} more bytes)", line.len() - end);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex};
    use tracing_subscriber::field::MakeExt;
    use tracing_subscriber::fmt::format::debug_fn;

    #[test]
    fn no_line_inside_of_a_message_begins_another() {
        let forged = [
            "error: a",
            " WARN a",
            "ERROR a",
            "\twarning: a",
            "Error [a]",
            "note: a",
            "  0.000123 INFO a",
            "fail  a",
        ];
        for line in forged {
            let text = message(&format!("error: x\n{line}\n  and more"));
            assert_eq!(text, format!("error: x\n  | {line}\n  and more"));
            assert_eq!(message(line), line);
        }
        let own =
            "error: x:\n  a -> b\nset them back\n 3 | model: 1.5 2\nrun     a\n\nnext, try:\n  b\n";
        assert_eq!(message(own), own);
        let list = "error: a\n --> b\n\nerror: c\n";
        assert_eq!(report(list), list);
    }

    /// Buffer that keeps the log.
    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn no_line_inside_of_a_line_of_the_log_begins_another() {
        let buffer = LogBuffer::default();
        let to = buffer.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || to.clone())
            .with_ansi(false)
            .with_target(false)
            .without_time()
            .fmt_fields(debug_fn(field).delimited(" "))
            .finish();
        tracing::subscriber::with_default(log, || {
            tracing::warn!("{}", "a\nerror: b\n WARN c\u{1b}[2J");
            tracing::warn!(rank = 3, name = "a\nb", "d");
        });
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        let wanted =
            " WARN a\n  | error: b\n  |  WARN c\\u001b[2J\n WARN d rank=3 name=\"a\\nb\"\n";
        assert_eq!(text, wanted);
    }

    #[test]
    fn a_message_is_bounded() {
        let text = message(&format!("a {}\nb", "漢".repeat(1_000_000)));
        let (first, last) = text.split_once('\n').unwrap();
        assert!(first.len() < LONGEST_LINE + 30 && last == "b", "{first}");
        assert!(first.ends_with("漢.. (2983620 more bytes)"), "{first}");
        for text in ["a\n".repeat(1_000_000), format!("{}\n", "b".repeat(100_000)).repeat(100)] {
            for text in [message(&text), report(&text)] {
                assert!(text.len() < LONGEST + 2 * LONGEST_LINE, "{}", text.len());
                assert!(text.ends_with(" more lines)"), "{text}");
            }
        }
        assert_eq!(message("a\u{1b}[2J\rb\n\tc"), "a\\u001b[2J\\u000db\n\tc");
    }
}
