//! Declarations and descriptions of keys.

use crate::ResumeEffect;

/// Declaration of a key.
#[derive(Clone, Copy)]
pub(crate) struct Declaration {
    /// Name of the key in its section.
    pub(crate) name: &'static str,
    /// Meaning of the key, and its unit.
    pub(crate) doc: &'static str,
    /// Effect of a change of the key. None: the effect of the choice that has the key.
    pub(crate) resume: Option<ResumeEffect>,
}

impl Declaration {
    /// Declares the key `name`.
    pub(crate) const fn new(name: &'static str, doc: &'static str) -> Self {
        Self { name, doc, resume: None }
    }

    /// Returns the declaration with the effect of a change.
    pub(crate) const fn resume(self, effect: ResumeEffect) -> Self {
        Self { resume: Some(effect), ..self }
    }
}

/// Description of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Dotted name, such as `model.layers`.
    pub name: String,
    /// Variant that has the key: `Cpu` for `device.count`.
    pub of: Option<&'static str>,
    /// Allowed values in words; `a section` if the key holds other keys.
    pub values: String,
    /// Default in RON or in words; `None` for a required key.
    pub default: Option<String>,
    /// Meaning of the key, and its unit.
    pub doc: &'static str,
    /// Effect of a change on a run that is resumed; `None` for a section and for a key of a box.
    pub resume: Option<ResumeEffect>,
}

impl Key {
    /// Whether the key holds other keys.
    pub fn is_section(&self) -> bool {
        self.values == "a section"
    }
}
