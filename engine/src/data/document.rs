//! A row as a model sees it.

/// A row as a model sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// By token: whether the loss counts it as a target. Never the first.
    pub counted: Vec<bool>,
}

impl Document {
    /// Documents of at most `most` tokens. Each begins with the last token of the one before, so that every target counts once.
    pub(super) fn divided(&self, most: usize) -> impl Iterator<Item = Self> {
        (0..self.tokens.len().saturating_sub(1)).step_by(most - 1).map(move |start| {
            let part = start..self.tokens.len().min(start + most);
            let mut counted = self.counted[part.clone()].to_vec();
            counted[0] = false;
            Self { tokens: self.tokens[part].to_vec(), counted }
        })
    }
}
