//! What is said of a key.

use crate::ResumeEffect;

/// What is said of a key where it is declared.
#[derive(Clone, Copy)]
pub(crate) struct Declaration {
    /// Its name in its section.
    pub(crate) name: &'static str,
    /// What it means, and its unit.
    pub(crate) doc: &'static str,
    /// What a change of it means. None: the same as of the choice that has it.
    pub(crate) resume: Option<ResumeEffect>,
}

impl Declaration {
    /// The key called `name`.
    pub(crate) const fn new(name: &'static str, doc: &'static str) -> Self {
        Self { name, doc, resume: None }
    }

    /// The same, with what a change of it means.
    pub(crate) const fn resume(self, effect: ResumeEffect) -> Self {
        Self { resume: Some(effect), ..self }
    }
}

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
    /// What a change of it means for a run that is resumed; none of a section, and of a box.
    pub resume: Option<ResumeEffect>,
}

impl Key {
    /// Whether it holds other keys.
    pub fn is_section(&self) -> bool {
        self.values == "a section"
    }
}
