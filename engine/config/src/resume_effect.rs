//! Effect of a changed key on a run that is resumed.

use serde::Serialize;

/// Effect of a changed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ResumeEffect {
    /// The results of training stay the same.
    Harmless,
    /// The mathematics and the order of sums stay the same: parts of a step run in another place or
    /// at another time.
    Placement,
    /// The mathematics stays the same, but sums may add in another order, or numbers may be stored
    /// in another form.
    Layout,
    /// The run becomes another experiment.
    Experiment,
}

impl ResumeEffect {
    /// Text about the effect, for users.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Harmless => "of no consequence for what is computed",
            Self::Placement => "same experiment, different placement (virtual GPUs keep every bit)",
            Self::Layout => "same experiment, different layout (results may differ by rounding)",
            Self::Experiment => "another experiment: --resume refuses it, --fork does not",
        }
    }
}
