//! Foreign text in messages: keys and names that others chose, and errors of libraries. It becomes
//! one line of bounded length, without characters that control a terminal.

use super::path_text::acts;
use std::fmt::{self, Display, Write};

/// Characters of a name or a value that a message shows.
const LONGEST: usize = 200;
/// Characters of a library's error that a message shows. The error may quote foreign text.
const LONGEST_REASON: usize = 400;
/// Bytes of the longest line of a message. A line with two paths is shorter.
pub const LONGEST_LINE: usize = 16 << 10;

/// Foreign text for messages: its beginning on one line, and the number of characters left out.
#[derive(Clone, Copy, Debug)]
pub struct ForeignText<T> {
    text: T,
    longest: usize,
}

impl<T: Display> ForeignText<T> {
    /// Shows at most `longest` characters of `text`.
    pub const fn new(text: T, longest: usize) -> Self {
        Self { text, longest }
    }
}

/// A foreign name, key or value.
pub const fn foreign<T: Display>(text: T) -> ForeignText<T> {
    ForeignText::new(text, LONGEST)
}

/// A library's reason for not reading foreign text.
pub const fn reason<T: Display>(text: T) -> ForeignText<T> {
    ForeignText::new(text, LONGEST_REASON)
}

impl<T: Display> Display for ForeignText<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = Line { to: f, left: self.longest, cut: 0 };
        write!(line, "{}", self.text)?;
        match line.cut {
            0 => Ok(()),
            1 => f.write_str(".. (1 more character)"),
            more => write!(f, ".. ({more} more characters)"),
        }
    }
}

/// Writer that passes on the text that fits and counts the rest.
struct Line<'a, 'b> {
    to: &'a mut fmt::Formatter<'b>,
    left: usize,
    cut: usize,
}

impl Write for Line<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text.chars();
        while self.cut == 0 {
            let Some(c) = rest.next() else { return Ok(()) };
            let shown = shown(c);
            match self.left.checked_sub(shown.chars().count()) {
                Some(left) => self.left = left,
                None => self.cut = 1,
            }
            if self.cut == 0 {
                self.to.write_str(&shown)?;
            }
        }
        self.cut += rest.count();
        Ok(())
    }
}

/// A character in the form that a message shows.
fn shown(c: char) -> String {
    match c {
        '\n' => "\\n".into(),
        '\r' => "\\r".into(),
        '\t' => "\\t".into(),
        c if acts(c) => format!("\\u{:04x}", u32::from(c)),
        c => c.into(),
    }
}

/// Whether a message line may contain `text`. Tests and fuzzers check each parser error with this.
pub fn is_line(text: &str) -> bool {
    text.len() <= LONGEST_LINE && !text.chars().any(acts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_wrote_is_one_line_of_bounded_length() {
        let of = |text: &str| foreign(text).to_string();
        assert_eq!(of("model.é 漢\"\\"), "model.é 漢\"\\");
        assert_eq!(of("a\nerror: b\r\tc\u{1b}[2J\u{202e}"), "a\\nerror: b\\r\\tc\\u001b[2J\\u202e");
        let whole = "漢".repeat(LONGEST);
        assert_eq!(of(&whole), whole);
        assert_eq!(of(&format!("{whole}x")), format!("{whole}.. (1 more character)"));
        assert_eq!(of(&format!("{whole}{whole}")), format!("{whole}.. (200 more characters)"));
        // An escape is cut as a whole, and the characters after it are not shown.
        let text = format!("{}\u{1b}a", "x".repeat(LONGEST - 1));
        assert_eq!(of(&text), format!("{}.. (2 more characters)", "x".repeat(LONGEST - 1)));
        for text in ["\n".repeat(100_000), "\u{202e}".repeat(100_000), "A".repeat(10_000_000)] {
            for shown in [of(&text), reason(&text).to_string()] {
                assert!(is_line(&shown) && shown.chars().count() < 450, "{shown}");
            }
        }
    }

    /// The precision of a format string does not cut the text.
    #[test]
    fn what_comes_in_pieces_is_cut_as_a_whole() {
        let text = "a".repeat(500);
        assert_eq!(
            format!("{:.200}", foreign(text.escape_debug())),
            format!("{}.. (300 more characters)", "a".repeat(LONGEST))
        );
    }

    #[test]
    fn a_line_is_told_from_others() {
        assert!(is_line("a: b, c") && is_line(""));
        for other in ["a\nb", "a\r", "\u{1b}[2J", "\u{202e}", "\t", &"a".repeat(LONGEST_LINE + 1)] {
            assert!(!is_line(other), "{other:.20}");
        }
    }
}
