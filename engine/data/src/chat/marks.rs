//! Marks around the assistant's text.

/// Mark before the text of a `{% generation %}` block: a noncharacter of Unicode.
pub(super) const OPEN: char = '\u{FDD0}';
/// Mark after the assistant's text.
pub(super) const CLOSE: char = '\u{FDD1}';
/// Filter that writes both marks, in place of `{% generation %}`.
pub(super) const FILTER: &str = "generation";
