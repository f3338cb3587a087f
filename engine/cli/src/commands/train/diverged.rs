//! Message of `onebox train` about a diverged run: the reason, and the states to restart from.

use super::Session;
use super::watch::Watch;
use checkpoint;
use config::Precision;
use engine::metrics::{LONGEST_METRICS, losses};
use engine::run::Outcome;
use files::input;
use files::names::METRICS;
use files::path_text::ShownPath;
use std::fmt;
use std::io;
use std::path::Path;

/// Factor above the worst loss of a sound model from which a loss means ruined states.
const MARGIN: f64 = 1.1;

impl Session<'_> {
    pub(super) fn diverged(
        &self,
        outcome: &Outcome,
        watch: &Watch,
        (from, to): (u64, u64),
    ) -> String {
        let config = &self.run.loaded.config;
        let (advice, scale) = match config.precision {
            Precision::Fp16 => {
                let scale = watch.last.map_or(f64::NAN, |last| last.loss_scale);
                let floor = config.loss_scale.floor;
                let scale =
                    format!(", with a loss scale that came down to {scale} (its floor is {floor})");
                ("lower optimizer.lr, or train in Bf16", scale)
            }
            Precision::Fp8 => ("lower optimizer.lr, or train in Bf16", String::new()),
            Precision::Bf16 | Precision::Fp32 => {
                ("lower optimizer.lr, or set optimizer.clip", String::new())
            }
        };
        let first = outcome.not_finite.as_ref().map_or_else(String::new, |name| {
            format!("; the backward pass came to such a gradient first in `{name}`")
        });
        let clip = config.optimizer.clip.map_or("off".to_owned(), |clip| clip.to_string());
        let back = self.way_back(from, watch.saved);
        format!(
            "the gradients of steps {from} to {to} were not finite{scale}{first}, and nothing was updated: training \
             has diverged. Remedy: {advice} (optimizer.lr is {}, optimizer.clip {clip}){back}",
            config.optimizer.lr
        )
    }

    /// Advice about the states to restart from. `skipped`: first of the steps that ended the run;
    /// `saved`: step of the newest checkpoint.
    fn way_back(&self, skipped: u64, saved: Option<u64>) -> String {
        let unknown = |path: &Path, why: io::Error| {
            let path = path.shown();
            format!("; which checkpoints are good is not known: {path} cannot be read: {why}")
        };
        let read = || input::rest(&self.dir.held().check()?.read(METRICS)?, LONGEST_METRICS);
        let text = match read() {
            Ok(text) => text,
            Err(why) => return unknown(&self.dir.held().called(METRICS), why),
        };
        let guess = (self.run.loaded.config.model.vocab as f64).ln();
        let ruin = Ruin::of(&losses(&text), guess);
        let last = ruin.map_or(u64::MAX, Ruin::last_good);
        let source = self.source().filter(|_| self.done() <= last);
        let folder = self.dir.folder().path();
        let found = self.dir.folder().find().and_then(|found| {
            found.map_or(Ok(None), |found| checkpoint::newest_step_until(&found, last))
        });
        let good = match found {
            Ok(good) => good,
            Err(why) => return unknown(&folder, why),
        };
        match (saved, good, source, ruin) {
            (Some(saved), Some(good), _, _) if saved == good => {
                let states = match saved >= skipped {
                    true => format!(", and the states are those of step {}", skipped - 1),
                    false => String::new(),
                };
                format!(
                    "; --fork starts from the checkpoint of step {saved} with other settings{states}"
                )
            }
            (_, Some(good), _, Some(ruin)) => format!(
                "; {ruin}: move the checkpoints after step {good} out of {}, and --fork starts from that of step {good} \
                 with other settings",
                folder.shown()
            ),
            (_, None, Some(source), _) => {
                let source = source.shown();
                format!("; it started from {source}, and --fork of that run tries other settings")
            }
            (Some(_), None, None, Some(ruin)) => {
                format!("; {ruin}, and no checkpoint is older: start again with other settings")
            }
            _ => String::new(),
        }
    }
}

/// Losses that stay above a limit until the end of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ruin {
    /// First step from which all losses are above the limit.
    since: u64,
    limit: f64,
}

impl Ruin {
    /// Finds the ruin in pairs of a step and its loss. A loss is sound unless it is well above both
    /// the first loss and `guess`.
    fn of(losses: &[(u64, f64)], guess: f64) -> Option<Self> {
        let (first, untrained) = *losses.first()?;
        let limit = MARGIN * guess.max(untrained);
        let sane = losses.iter().rposition(|(_, loss)| *loss <= limit);
        let since = sane.map_or(Some(first), |i| losses.get(i + 1).map(|(step, _)| *step))?;
        Some(Self { since, limit })
    }

    /// Last step with good states. The loss of a step shows the states that the previous step left.
    const fn last_good(self) -> u64 {
        self.since.saturating_sub(2)
    }
}

impl fmt::Display for Ruin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, limit } = self;
        let last = self.last_good();
        write!(
            f,
            "from step {since} on every loss is above {limit:.2}, so the states after step {last} are ruined"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_ruined_from_where_the_loss_stays_off_its_course() {
        let since = |losses: &[f64], from: u64| {
            let losses: Vec<_> = (from..).zip(losses.iter().copied()).collect();
            Ruin::of(&losses, 5.0).map(|ruin| (ruin.since, ruin.last_good()))
        };
        assert_eq!(since(&[], 1), None);
        assert_eq!(since(&[5.1, 4.0, 3.0], 1), None);
        // The loss recovered once.
        assert_eq!(since(&[5.1, 4.0, 90.0, 5.2, 7.0, f64::NAN, 9e9], 1), Some((5, 3)));
        assert_eq!(since(&[f64::NAN, f64::NAN], 11), Some((11, 9)));
        // Large models begin above the guess.
        assert_eq!(since(&[7.0, 7.1, 7.5], 1), None);
        assert_eq!(since(&[f64::NAN, 5.4, 5.6], 1), Some((3, 1)));
    }
}
