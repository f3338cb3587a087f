//! Names that others chose, such as those of files, on their way to a terminal: what would act there instead of being
//! shown is written out.

use std::fmt;
use std::path::Path;

/// Whether a terminal would obey it, or hide or turn around what stands beside it.
const fn acts(c: char) -> bool {
    c.is_ascii_control()
        || matches!(c, '\u{80}'..='\u{9f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// Such characters as `\u202e`, which is what they are in JSON too. All of them are below U+10000.
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

/// A path for messages, on one line.
#[derive(Clone, Copy, Debug)]
pub struct PathText<'a>(pub &'a Path);

impl fmt::Display for PathText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escape(f, &self.0.to_string_lossy(), &[])
    }
}

/// A text of several lines, as messages and reports are.
pub fn lines(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Writing to a String cannot fail.
    let _ = escape(&mut out, text, &['\n', '\t']);
    out
}

/// For a POSIX shell.
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
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
        // In JSON it stays the same text.
        let json = serde_json::json!({ "name": name }).to_string();
        let back: serde_json::Value = serde_json::from_str(&lines(&json)).unwrap();
        assert_eq!(back["name"], name);
    }
}
