//! Marks around the assistant's text.

/// Mark before the text of a `{% generation %}` block: a noncharacter of Unicode.
pub(super) const OPEN: char = '\u{FDD0}';
/// Mark after the assistant's text.
pub(super) const CLOSE: char = '\u{FDD1}';
/// Name of the filter that writes [`OPEN`] and [`CLOSE`] around a text. It replaces the tag
/// `{% generation %}` of a template.
pub(super) const FILTER: &str = "generation";
