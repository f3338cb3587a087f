//! Marks around what an assistant says.

/// The mark in front of what an assistant says, where a template tells it. Unicode promises that it is no character of a text.
pub(super) const OPEN: char = '\u{FDD0}';
/// The mark behind it.
pub(super) const CLOSE: char = '\u{FDD1}';
/// The filter that writes both, in place of `{% generation %}`.
pub(super) const FILTER: &str = "generation";
