//! A chat in the form that templates know.

use crate::chat::Chat;
use files::json::Json;

/// Keys of thoughts in transformers; templates read the first or the second key.
pub(super) const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A chat as its template gets it.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Json>,
    pub(super) tools: Option<Json>,
    /// Whether each message is a target.
    pub(super) learned: Vec<bool>,
}

impl Conversation {
    pub(super) fn chat(&self) -> Chat<'_> {
        Chat { messages: &self.messages, tools: self.tools.as_ref() }
    }
}
