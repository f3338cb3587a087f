//! A file that is one JSON array, the format of Alpaca and ShareGPT: each element becomes a line.
//! The text of an element does not change, so that numbers keep their digits.

use super::output::Output;
use crate::rows::LONGEST;
use crate::unpack_error::UnpackError;
use serde::de::IgnoredAny;
use std::io::BufRead;

/// The part of the array that may follow in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArrayPart {
    Array,
    /// The first element, or the end of an empty array.
    First,
    Element,
    Comma,
    Nothing,
}

/// The elements of an array, read byte by byte.
struct Elements {
    next: ArrayPart,
    /// The element that is being read, without its line breaks.
    element: Vec<u8>,
    depth: usize,
    in_text: bool,
    is_escaped: bool,
    /// Number of the element, from 1.
    number: u64,
    /// Line of the file, from 1.
    line: u64,
    /// Line in which the element begins.
    begins: u64,
}

/// Writes each element of the array in `from` as a line.
pub(super) fn rows(from: &mut dyn BufRead, out: &mut Output<'_>) -> Result<(), UnpackError> {
    let mut elements = Elements {
        next: ArrayPart::Array,
        element: Vec::new(),
        depth: 0,
        in_text: false,
        is_escaped: false,
        number: 0,
        line: 1,
        begins: 1,
    };
    super::each_byte(from, out, |byte, out| elements.take(byte, out))?;
    elements.end()
}

impl Elements {
    fn take(&mut self, byte: u8, out: &mut Output<'_>) -> Result<(), UnpackError> {
        self.line += u64::from(byte == b'\n');
        if !self.element.is_empty() {
            return self.go_on(byte, out);
        }
        if byte.is_ascii_whitespace() {
            return Ok(());
        }
        match (self.next, byte) {
            (ArrayPart::Array, b'[') => self.next = ArrayPart::First,
            (ArrayPart::First | ArrayPart::Comma, b']') => self.next = ArrayPart::Nothing,
            (ArrayPart::Comma, b',') => self.next = ArrayPart::Element,
            (ArrayPart::First | ArrayPart::Element, byte) if !b",]}:".contains(&byte) => {
                self.number += 1;
                self.begins = self.line;
                self.begin(byte);
            }
            (ArrayPart::Nothing, byte) => {
                return Err(UnpackError::Unusable(format!(
                    "its array ends before line {}, where more follows ({}): if each line is a list, make an object of each, \
                     with jq -c '{{messages: .}}'",
                    self.line,
                    shown(byte)
                )));
            }
            (_, byte) => {
                let (found, line, number) = (shown(byte), self.line, self.number);
                let why = format!("{found} stands in line {line}, behind row {number}");
                return Err(UnpackError::Damaged(why));
            }
        }
        Ok(())
    }

    fn begin(&mut self, byte: u8) {
        self.element.push(byte);
        self.depth = usize::from(b"{[".contains(&byte));
        self.in_text = byte == b'"';
        self.is_escaped = false;
    }

    /// Reads a byte inside of an element, or the byte after a number or a word.
    fn go_on(&mut self, byte: u8, out: &mut Output<'_>) -> Result<(), UnpackError> {
        if self.element.len() > LONGEST {
            let most = topology::format_bytes(LONGEST as u64);
            let why = format!("{} is longer than {most}", self.place());
            return Err(UnpackError::Unusable(why));
        }
        let is_word = self.depth == 0 && !self.in_text;
        if is_word && (byte.is_ascii_whitespace() || b",]".contains(&byte)) {
            self.finish(out)?;
            return if byte.is_ascii_whitespace() { Ok(()) } else { self.take(byte, out) };
        }
        // A line break between values is a blank. In a text it is an error, which is found below.
        self.element.push(if byte.is_ascii_whitespace() && !self.in_text { b' ' } else { byte });
        match byte {
            _ if std::mem::take(&mut self.is_escaped) => return Ok(()),
            b'\\' if self.in_text => self.is_escaped = true,
            b'"' => self.in_text = !self.in_text,
            _ if self.in_text => {}
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        let is_closed = self.depth == 0 && !self.in_text && b"}]\"".contains(&byte);
        if is_closed { self.finish(out) } else { Ok(()) }
    }

    fn finish(&mut self, out: &mut Output<'_>) -> Result<(), UnpackError> {
        let damaged = |why: String| UnpackError::Damaged(format!("{} {why}", self.place()));
        if let Err(error) = str::from_utf8(&self.element) {
            return Err(damaged(format!("is not UTF-8: {error}")));
        }
        if let Err(error) = serde_json::from_slice::<IgnoredAny>(&self.element) {
            if let Some(word) = word_at(&self.element, error.column()) {
                return Err(UnpackError::Unusable(format!(
                    "{} has the number {word}, which JSON has not: write null, in pandas with \
                     df.to_json(FILE, orient=\"records\")",
                    self.place()
                )));
            }
            let (error, column) = (error.to_string(), error.column());
            let why = error.split(" at line ").next().unwrap_or(&error);
            return Err(damaged(format!("is no JSON: {why}, at its byte {column}")));
        }
        self.element.push(b'\n');
        out.write(&self.element)?;
        self.element.clear();
        self.next = ArrayPart::Comma;
        Ok(())
    }

    fn place(&self) -> String {
        format!("row {}, which begins in line {},", self.number, self.begins)
    }

    /// Checks that the array has ended.
    fn end(&self) -> Result<(), UnpackError> {
        let why = match self.next {
            ArrayPart::Nothing => return Ok(()),
            _ if !self.element.is_empty() => format!("it ends inside of {}", self.place()),
            _ => format!("it ends behind row {} without a `]`", self.number),
        };
        Err(UnpackError::Damaged(format!("{} and was cut off", why.trim_end_matches(','))))
    }
}

/// The word of Python for no number or an infinite number that stands at column `column` of a row.
fn word_at(row: &[u8], column: usize) -> Option<&'static str> {
    let before = row.get(..column.max(1) - 1)?;
    let begin = before.iter().rposition(|byte| !byte.is_ascii_alphabetic()).map_or(0, |at| at + 1);
    // The column is that of the word or of the byte before it.
    let skip = row[begin..].iter().take(2).position(u8::is_ascii_alphabetic)?;
    let rest = &row[begin + skip..];
    ["NaN", "Infinity"].into_iter().find(|word| rest.starts_with(word.as_bytes()))
}

/// A byte for a message.
fn shown(byte: u8) -> String {
    format!("`{}`", byte.escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    fn lines(text: &[u8], block: usize) -> Result<String, String> {
        let mut made = Vec::new();
        let mut out = Output::beginning(&mut made, 1 << 20, u64::MAX);
        let done = rows(&mut BufReader::with_capacity(block, text), &mut out);
        done.map(|()| String::from_utf8(made).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn each_element_is_a_line_with_its_text_as_it_was() {
        let text = "\u{FEFF} [\n  {\"a\": 1.50,\n   \"b\": [\"x]},\\\"\", {}]} , 12345678901234567890123\n,true,\"é\\n\",\r\n[], -0.0]\n\n";
        let made = "{\"a\": 1.50,    \"b\": [\"x]},\\\"\", {}]}\n12345678901234567890123\ntrue\n\"é\\n\"\n[]\n-0.0\n";
        for block in [3, 7, 1000] {
            assert_eq!(lines(text.as_bytes(), block).unwrap(), made, "{block}");
        }
        assert_eq!(lines(b"[ ]", 9).unwrap(), "");
        // Python's json gives the same values.
        let values: Vec<serde_json::Value> =
            made.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let whole = text.trim_start_matches('\u{FEFF}');
        assert_eq!(serde_json::from_str::<Vec<serde_json::Value>>(whole).unwrap(), values);
    }

    #[test]
    fn a_damaged_array_is_refused_with_row_and_line() {
        for (text, message) in [
            (
                &b"[{\"a\": 1},\n{\"a\": "[..],
                "it ends inside of row 2, which begins in line 2 and was cut off",
            ),
            (b"[{\"a\": 1},\n", "it ends behind row 1 without a `]`"),
            (b"[", "it ends behind row 0"),
            (b"[{\"a\": 1}\n{\"a\": 2}]", "`{` stands in line 2, behind row 1"),
            (b"[1,,2]", "`,` stands in line 1, behind row 1"),
            (b"[1,]", "`]` stands in line 1, behind row 1"),
            (
                b"[\n\n{\"a\" 1}]",
                "row 1, which begins in line 3, is no JSON: expected `:`, at its byte 6",
            ),
            (b"[{\"a\": 1]}]", "row 1, which begins in line 1, is no JSON"),
            (b"[\"a\nb\"]", "row 1, which begins in line 1, is no JSON: control character"),
            (b"[\"caf\xe9\"]", "is not UTF-8"),
            (b"[{\"a\": NaN}]", "has the number NaN, which JSON has not: write null"),
            (b"[{\"a\": [-Infinity, 1]}]", "has the number Infinity, which JSON has not"),
            (b"[1]\n[2]", "its array ends before line 2, where more follows (`[`)"),
            (b"{\"a\": 1}", "`{` stands in line 1"),
        ] {
            let error = lines(text, 5).unwrap_err();
            assert!(error.contains(message), "{message}: {error}");
        }
    }
}
