//! A document: the tokens of a row as the model sees them.

/// The tokens of a row and the targets among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// The tokens of the document.
    pub tokens: Vec<u32>,
    /// For each token, whether the loss counts it as a target. The first token is never a target.
    pub counted: Vec<bool>,
}
