//! What is said of a key.

/// A key, and what can be said of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Dotted: `model.layers`.
    pub name: String,
    /// The variant that has it: `Cpu`, for `device.count`.
    pub of: Option<&'static str>,
    /// The values that it takes, in words; `a section` of one that holds others.
    pub values: String,
    /// What it is where it is left out, in RON or in words; none of a required key.
    pub default: Option<String>,
    /// What it means, and its unit.
    pub doc: &'static str,
}

impl Key {
    /// Whether it holds other keys.
    pub fn is_section(&self) -> bool {
        self.values == "a section"
    }
}
