//! What a change of a key means for a run that is resumed.

use serde::Serialize;

/// How far a change of a key reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ResumeEffect {
    /// Nothing that training computes changes.
    Harmless,
    /// The same mathematics in the same order: parts of a step run elsewhere or at another time.
    Placement,
    /// The same mathematics: sums may add in another order, or numbers be stored otherwise.
    Layout,
    /// Another experiment.
    Experiment,
}

impl ResumeEffect {
    /// The meaning in words, for a person.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Harmless => "of no consequence for what is computed",
            Self::Placement => "same experiment, different placement (virtual GPUs keep every bit)",
            Self::Layout => "same experiment, different layout (results may differ by rounding)",
            Self::Experiment => "another experiment: --resume refuses it, --fork does not",
        }
    }
}
