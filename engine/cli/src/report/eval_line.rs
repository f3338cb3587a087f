//! The line of an evaluation.

/// An evaluation after a step.
#[derive(Clone, Copy, Debug)]
pub struct EvalLine<'a> {
    /// Number of the step.
    pub step: u64,
    /// Number of steps of the run.
    pub steps: u64,
    /// Mean validation loss.
    pub loss: f64,
    /// Whether the loss covers the whole validation set.
    pub whole: bool,
    /// Name and loss of each data set, if there are several.
    pub sets: &'a [(String, f64)],
}

impl EvalLine<'_> {
    /// The line; `standing` is a text about its comparison with earlier ones.
    pub(super) fn text(&self, standing: &str) -> String {
        let EvalLine { step, steps, loss, whole, sets } = *self;
        let of = if whole { "" } else { "  over a part" };
        // "nan" and "inf" are in small letters.
        let fixed = |loss: f64| format!("{loss:.4}").to_lowercase();
        let sets = sets.iter().map(|(name, loss)| format!("  {name} {}", fixed(*loss)));
        let sets: String = sets.collect();
        format!("eval {step:>5}/{steps}  loss {}{sets}{of}{standing}", fixed(loss))
    }
}
