//! Reader of the lines of a file.

use std::io::{self, BufRead, Read, Seek};

/// Maximum bytes of a row.
pub(crate) const LONGEST: usize = 64 << 20;

/// Reads the lines that are not blank. All lines have numbers, from 1.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    from: R,
    number: u64,
    line: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub(crate) const fn new(from: R) -> Self {
        Self::after(from, 0)
    }

    /// Continues in the middle of a file, after `lines` lines.
    pub(crate) const fn after(from: R, lines: u64) -> Self {
        Self { from, number: lines, line: Vec::new() }
    }

    /// Byte at which the next line begins in the file, and the number of lines before it.
    pub(crate) fn place(&mut self) -> io::Result<(u64, u64)>
    where
        R: Seek,
    {
        Ok((self.from.stream_position()?, self.number))
    }

    /// The next line that is not blank, and its number.
    ///
    /// # Errors
    /// The outer error: the file cannot be read. The inner error: this line is no text, or too long.
    pub(crate) fn next(&mut self) -> io::Result<Option<(u64, Result<String, String>)>> {
        loop {
            self.line.clear();
            let most = LONGEST as u64 + 1;
            let read = self.from.by_ref().take(most).read_until(b'\n', &mut self.line)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read as u64 == most {
                self.from.skip_until(b'\n')?;
                let most = topology::format_bytes(LONGEST as u64);
                return Ok(Some((self.number, Err(format!("it is longer than {most}")))));
            }
            let mark: &[u8] = if self.number == 1 { "\u{FEFF}".as_bytes() } else { b"" };
            let line = self.line.strip_prefix(mark).unwrap_or(&self.line).trim_ascii();
            if !line.is_empty() {
                let line = str::from_utf8(line).map(str::to_owned);
                let line = line.map_err(|e| format!("it is not UTF-8: {e}"));
                return Ok(Some((self.number, line)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_their_numbers_and_a_bad_one_does_not_end_them() {
        let long = "x".repeat(LONGEST + 10);
        let text = [b"\xef\xbb\xbfone\r\n\n  \ntwo\n\xff\n", long.as_bytes(), b"\nlast"].concat();
        let mut lines = Lines::new(&text[..]);
        let mut next =
            || lines.next().unwrap().map(|(i, line)| (i, line.map_err(|e| e[..12].to_owned())));
        assert_eq!(next(), Some((1, Ok("one".into()))));
        assert_eq!(next(), Some((4, Ok("two".into()))));
        assert_eq!(next(), Some((5, Err("it is not UT".into()))));
        assert_eq!(next(), Some((6, Err("it is longer".into()))));
        assert_eq!(next(), Some((7, Ok("last".into()))));
        assert_eq!(next(), None);
    }
}
