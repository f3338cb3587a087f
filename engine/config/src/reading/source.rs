//! Texts of a configuration, and places in them.

use std::path::PathBuf;

/// Origin of a text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SourceKind {
    /// A RON file.
    File {
        /// Absolute directory of the file, to which its relative paths are relative. `None` for a
        /// bundled file: its relative paths stay unchanged.
        dir: Option<PathBuf>,
    },
    /// One `--set key=value`; the text is `key=value`.
    Set,
    /// `--box FILE`; the text is `FILE`.
    Box,
}

/// A text of a configuration.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSource {
    pub(crate) kind: SourceKind,
    /// File as the user named it, or the option: `--set` or `--box`.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// A range of bytes of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) source: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// Place for messages: 1-based line and column, and the text of that line.
#[derive(Debug)]
pub(crate) struct LinePlace<'a> {
    pub(crate) line: usize,
    pub(crate) col: usize,
    pub(crate) text: &'a str,
    /// Byte range of the place within `text`; it ends at the end of the line at the latest.
    pub(crate) within: std::ops::Range<usize>,
}

impl ConfigSource {
    /// The text at `place`; empty if `place` is outside of it.
    pub(crate) fn at(&self, place: Span) -> &str {
        self.text.get(place.start..place.end).unwrap_or_default()
    }

    /// Line, column and line text of a place.
    pub(crate) fn spot(&self, place: Span) -> LinePlace<'_> {
        let start = floor_char(&self.text, place.start);
        let before = self.text.get(..start).unwrap_or_default();
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let rest = self.text.get(line_start..).unwrap_or_default();
        let text = rest.split('\n').next().unwrap_or_default().trim_end_matches('\r');
        let from = (start - line_start).min(text.len());
        let to = (floor_char(&self.text, place.end).max(start) - line_start).min(text.len());
        LinePlace {
            line: before.matches('\n').count() + 1,
            col: text.get(..from).unwrap_or_default().chars().count() + 1,
            text,
            within: from..to.max(from),
        }
    }

    /// Byte offset of a 1-based line and column (in characters).
    pub(crate) fn offset(&self, line: usize, col: usize) -> usize {
        let start: usize =
            self.text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
        let rest = self.text.get(start..).unwrap_or_default();
        let column =
            rest.char_indices().nth(col.saturating_sub(1)).map_or(rest.len(), |(at, _)| at);
        start + column
    }
}

fn floor_char(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
