//! A row as a model sees it.

/// A row as a model sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// By token: whether the loss counts it as a target. Never the first.
    pub counted: Vec<bool>,
}
