//! Names that others chose, such as file names, for output on a terminal. Characters that control
//! the terminal are escaped.

use std::fmt;
use std::path::Path;

/// Whether the character controls a terminal, or hides or reverses the text next to the character.
pub(super) const fn acts(c: char) -> bool {
    c.is_ascii_control()
        || matches!(c, '\u{80}'..='\u{9f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{61c}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// Escapes control characters in the form `\u202e`, as JSON does. All are below U+10000.
fn escape(f: &mut impl fmt::Write, text: &str, kept: &[char]) -> fmt::Result {
    for c in text.chars() {
        if acts(c) && !kept.contains(&c) {
            write!(f, "\\u{:04x}", u32::from(c))?;
        } else {
            f.write_char(c)?;
        }
    }
    Ok(())
}

/// Characters of the longest path that a system opens. A list of files may contain a longer path.
const LONGEST: usize = 4096;

/// A path for messages, on one line.
#[derive(Clone, Copy, Debug)]
pub struct PathText<'a>(pub &'a Path);

impl fmt::Display for PathText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string_lossy();
        match text.char_indices().nth(LONGEST) {
            None => escape(f, &text, &[]),
            Some((end, _)) => {
                escape(f, &text[..end], &[])?;
                write!(f, ".. ({} more characters)", text[end..].chars().count())
            }
        }
    }
}

/// A path that messages name.
pub trait ShownPath {
    /// The path on one line, with control characters escaped.
    fn shown(&self) -> PathText<'_>;
}

impl ShownPath for Path {
    fn shown(&self) -> PathText<'_> {
        PathText(self)
    }
}

/// Escapes a text of several lines, for example a message or a report.
pub fn lines(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Writing to a String cannot fail.
    let _ = escape(&mut out, text, &['\n', '\t']);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_acts_on_a_terminal_is_left() {
        let name = "a\u{1b}]0;x\u{7}\u{202e}\u{9b}31m\n\u{2067}é 漢\t";
        let shown = PathText(Path::new(name)).to_string();
        assert_eq!(shown, "a\\u001b]0;x\\u0007\\u202e\\u009b31m\\u000a\\u2067é 漢\\u0009");
        assert_eq!(lines("one\n\ttwo\r\u{1b}[0m"), "one\n\ttwo\\u000d\\u001b[0m");
        // In JSON the escaped text has the same value.
        let json = serde_json::json!({ "name": name }).to_string();
        let back: serde_json::Value = serde_json::from_str(&lines(&json)).unwrap();
        assert_eq!(back["name"], name);
    }
}
