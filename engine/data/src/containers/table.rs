//! A table of texts (CSV, TSV) with a header: each row becomes a line with an object of texts, in the
//! line of the copy in which the row begins in the table. Quotes follow RFC 4180.

use super::output::Output;
use crate::rows::LONGEST;
use crate::unpack_error::UnpackError;
use files::foreign_text::foreign;
use std::io::BufRead;
use topology::{counted, format_bytes};

/// Place of a byte in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// At the beginning of a field.
    Start,
    Plain,
    Quoted,
    /// After a quote in a quoted field: the quote ends the field, or another quote follows.
    Quote,
    /// After a carriage return.
    Return,
}

/// A row, and the state of the reader.
struct Table {
    delimiter: u8,
    place: Place,
    /// The fields of the row, one after another.
    bytes: Vec<u8>,
    /// End of each field in `bytes`.
    ends: Vec<usize>,
    /// Line of the file, from 1.
    line: u64,
    /// Line in which the row begins.
    begins: u64,
    /// Line in which the last quote was opened.
    quote: u64,
    has_quotes: bool,
    /// The beginning of each field of an object: a sign, the name in quotes, and a colon.
    keys: Vec<String>,
    /// Lines of the copy so far.
    written: u64,
}

/// Writes each row of the table in `from` as a line.
pub(super) fn rows(
    from: &mut dyn BufRead,
    delimiter: u8,
    out: &mut Output<'_>,
) -> Result<(), UnpackError> {
    let mut table = Table {
        delimiter,
        place: Place::Start,
        bytes: Vec::new(),
        ends: Vec::new(),
        line: 1,
        begins: 1,
        quote: 1,
        has_quotes: false,
        keys: Vec::new(),
        written: 0,
    };
    super::each_byte(from, out, |byte, out| table.take(byte, out))?;
    table.end(out)
}

impl Table {
    fn take(&mut self, byte: u8, out: &mut Output<'_>) -> Result<(), UnpackError> {
        use Place::{Plain, Quote, Quoted, Return, Start};
        self.place = match (self.place, byte) {
            (Quoted, b'"') => Quote,
            (Quoted, byte) => {
                self.line += u64::from(byte == b'\n');
                self.push(byte)?;
                Quoted
            }
            (Start, b'"') => {
                (self.quote, self.has_quotes) = (self.line, true);
                Quoted
            }
            (Quote, b'"') => {
                self.push(byte)?;
                Quoted
            }
            (_, b'\n') => {
                self.finish(out)?;
                self.line += 1;
                self.begins = self.line;
                Start
            }
            (Return, _) => {
                return Err(self.unusable(
                    "has a carriage return without a line feed: write the line ends anew, with tr '\\r' '\\n'",
                ));
            }
            (_, b'\r') => Return,
            (_, byte) if byte == self.delimiter => {
                self.ends.push(self.bytes.len());
                Start
            }
            (Quote, _) => {
                return Err(self.unusable(
                    "has text behind a closing quote: write a quote inside of a text as two quotes",
                ));
            }
            (Start | Plain, byte) => {
                self.push(byte)?;
                Plain
            }
        };
        Ok(())
    }

    fn push(&mut self, byte: u8) -> Result<(), UnpackError> {
        if self.bytes.len() == LONGEST {
            let (begins, most) = (self.begins, format_bytes(LONGEST as u64));
            let why = format!(
                "the row that begins in line {begins} is longer than {most}: look for a quote that nothing closes"
            );
            return Err(UnpackError::Unusable(why));
        }
        self.bytes.push(byte);
        Ok(())
    }

    fn unusable(&self, why: &str) -> UnpackError {
        UnpackError::Unusable(format!("line {} {why}", self.line))
    }

    /// The fields of the row as texts.
    fn fields(&self) -> Result<Vec<&str>, UnpackError> {
        let mut start = 0;
        let field = |end: &usize| {
            let bytes = &self.bytes[std::mem::replace(&mut start, *end)..*end];
            str::from_utf8(bytes).map_err(|error| {
                let byte = bytes[error.valid_up_to()];
                UnpackError::Unusable(format!(
                    "the row that begins in line {} is not UTF-8 (byte {byte:#04x}): convert the file, such as with iconv -f LATIN1 -t UTF-8",
                    self.begins
                ))
            })
        };
        self.ends.iter().map(field).collect()
    }

    /// Reads the header, or writes a row. An empty line is no row.
    fn finish(&mut self, out: &mut Output<'_>) -> Result<(), UnpackError> {
        self.ends.push(self.bytes.len());
        let is_blank = self.bytes.is_empty() && self.ends.len() == 1 && !self.has_quotes;
        if !is_blank {
            let fields = self.fields()?;
            if self.keys.is_empty() {
                self.keys = self.header(&fields)?;
            } else {
                let line = self.object(&fields)?;
                // The row has the same line in the copy, which blank lines fill up.
                let blank = self.begins - 1 - self.written;
                let line = "\n".repeat(blank as usize) + &line;
                out.write(line.as_bytes())?;
                self.written = self.begins;
            }
        }
        self.bytes.clear();
        self.ends.clear();
        self.has_quotes = false;
        Ok(())
    }

    fn header(&self, names: &[&str]) -> Result<Vec<String>, UnpackError> {
        let other = |sign: &char| *sign as u32 != u32::from(self.delimiter);
        if let [name] = names
            && let Some(sign) = [',', ';', '\t'].iter().find(|s| other(s) && name.contains(**s))
        {
            return Err(self.unusable(&format!(
                "is the header, and has one column, \"{}\": write the table with {} between its columns, not {sign:?}",
                foreign(name),
                if self.delimiter == b'\t' { "tabs" } else { "commas" }
            )));
        }
        for (i, name) in names.iter().enumerate() {
            if names[..i].contains(name) {
                let why = format!("is the header, and has the column \"{}\" twice", foreign(name));
                return Err(self.unusable(&why));
            }
        }
        let key = |(i, name): (usize, &&str)| {
            let name = serde_json::Value::from(*name);
            format!("{}{name}: ", if i == 0 { "{" } else { ", " })
        };
        Ok(names.iter().enumerate().map(key).collect())
    }

    fn object(&self, fields: &[&str]) -> Result<String, UnpackError> {
        let (found, columns) = (fields.len(), self.keys.len());
        if found != columns {
            return Err(UnpackError::Unusable(format!(
                "the row that begins in line {} has {}, and the header {columns}: put quotes around a text with the sign between columns",
                self.begins,
                counted(found, "column")
            )));
        }
        let field =
            |(key, text): (&String, &&str)| format!("{key}{}", serde_json::Value::from(*text));
        let fields: String = self.keys.iter().zip(fields).map(field).collect();
        Ok(fields + "}\n")
    }

    /// Writes the last row, which needs no line end.
    fn end(&mut self, out: &mut Output<'_>) -> Result<(), UnpackError> {
        if self.place == Place::Quoted {
            let line = self.quote;
            let why =
                format!("it ends inside of the quotes that line {line} opens, and was cut off");
            return Err(UnpackError::Damaged(why));
        }
        self.finish(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    fn lines(text: &[u8], delimiter: u8) -> Result<String, String> {
        let mut made = Vec::new();
        let mut out = Output::beginning(&mut made, 1 << 20, u64::MAX);
        let done = rows(&mut BufReader::with_capacity(5, text), delimiter, &mut out);
        done.map(|()| String::from_utf8(made).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn each_row_is_an_object_in_the_line_in_which_it_begins() {
        let text = "\u{FEFF}a,\"b \"\"c\"\"\"\r\n1,\"x,\ny\"\n\n\"\",5\" é\r\n\"\\\",";
        let made = "\n{\"a\": \"1\", \"b \\\"c\\\"\": \"x,\\ny\"}\n\n\n{\"a\": \"\", \"b \\\"c\\\"\": \"5\\\" é\"}\n{\"a\": \"\\\\\", \"b \\\"c\\\"\": \"\"}\n";
        assert_eq!(lines(text.as_bytes(), b',').unwrap(), made);
        assert_eq!(
            lines(b"a\tb\nx,\t\"1\t2\"", b'\t').unwrap(),
            "\n{\"a\": \"x,\", \"b\": \"1\\t2\"}\n"
        );
        assert_eq!(
            lines(b"text\n\"\"\n\nx\n", b',').unwrap(),
            "\n{\"text\": \"\"}\n\n{\"text\": \"x\"}\n"
        );
        assert_eq!(lines(b"a,b\n", b',').unwrap(), "");
    }

    #[test]
    fn a_table_that_programs_read_differently_is_refused_with_its_line() {
        for (text, message) in [
            (&b"a,b\n1,2\n3\n"[..], "the row that begins in line 3 has 1 column, and the header 2"),
            (b"a,b\n\"1\n\",2\n3,4,5\n", "the row that begins in line 4 has 3 columns"),
            (b"a,b\n1,\"2\n3,4\n", "it ends inside of the quotes that line 2 opens"),
            (b"a,b\n1,\"2\"3\n", "line 2 has text behind a closing quote"),
            (b"a,b\r1,2\r", "line 1 has a carriage return"),
            (b"a,b\n1,caf\xe9\n", "line 2 is not UTF-8 (byte 0xe9)"),
            (b"a;b\n1;2\n", "line 1 is the header, and has one column, \"a;b\""),
            (b"a,a\n", "has the column \"a\" twice"),
        ] {
            let error = lines(text, b',').unwrap_err();
            assert!(error.contains(message), "{message}: {error}");
        }
    }
}
