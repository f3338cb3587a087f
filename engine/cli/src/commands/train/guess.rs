//! Watches whether the training loss rises above the loss of a guess: after it was below that loss,
//! or far above it.

use std::collections::VecDeque;

/// Number of losses whose median decides, so that no single batch decides.
const WINDOW: usize = 9;
/// Smallest number of losses that decide.
const FEWEST: usize = 5;
/// Factor of the loss of a guess below which the model has learned something. The loss of random
/// weights varies around that of a guess.
const LEARNED: f64 = 0.95;
/// Factor of the loss of a guess above which a model that has learned nothing diverges.
const FAR: f64 = 1.5;

/// The losses of the last steps, compared with that of a guess.
#[derive(Debug)]
pub(super) struct GuessWatch {
    /// Number of tokens of the vocabulary.
    vocab: usize,
    /// Steps and losses, at most [`WINDOW`].
    recent: VecDeque<(u64, f64)>,
    /// Whether the median was below that of a guess.
    has_learned: bool,
    /// First step of the losses that are above that of a guess now.
    above_since: Option<u64>,
}

/// A loss that is above that of a guess.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rise {
    /// First step of the losses above that of a guess.
    pub(super) since: u64,
    /// Median of the last losses.
    pub(super) median: f64,
    vocab: usize,
}

impl GuessWatch {
    pub(super) const fn new(vocab: usize) -> Self {
        Self { vocab, recent: VecDeque::new(), has_learned: false, above_since: None }
    }

    fn guess(&self) -> f64 {
        (self.vocab as f64).ln()
    }

    /// Notes the loss of `step`. Returns the rise when it begins, and not again before the loss is
    /// well below that of a guess.
    pub(super) fn step(&mut self, step: u64, loss: f64) -> Option<Rise> {
        // A loss that is not a number is worse than any other.
        let loss = if loss.is_nan() { f64::INFINITY } else { loss };
        self.recent.push_back((step, loss));
        if self.recent.len() > WINDOW {
            self.recent.pop_front();
        }
        let (guess, median) = (self.guess(), self.median());
        if median < LEARNED * guess {
            (self.has_learned, self.above_since) = (true, None);
        }
        let rises = self.above_since.is_none() && median > self.limit();
        if !rises || self.recent.len() < FEWEST {
            return None;
        }
        let above = self.recent.iter().rev().take_while(|(_, loss)| *loss > guess);
        self.above_since = Some(above.last().map_or(step, |(step, _)| *step));
        self.rise()
    }

    /// Loss above which the model is worse than it should be.
    fn limit(&self) -> f64 {
        if self.has_learned { self.guess() } else { FAR * self.guess() }
    }

    /// The rise that lasts until now.
    pub(super) fn rise(&self) -> Option<Rise> {
        let median = self.median();
        let since = self.above_since.filter(|_| median > self.limit());
        since.map(|since| Rise { since, median, vocab: self.vocab })
    }

    fn median(&self) -> f64 {
        let losses = self.recent.iter().map(|(_, loss)| *loss);
        engine::metrics::median(losses).unwrap_or(f64::NAN)
    }
}

impl Rise {
    /// Text about the rise, with the remedy. `lr`: the learning rate of the config.
    pub(super) fn words(&self, lr: f32) -> String {
        let Self { since, median, vocab } = self;
        format!(
            "the training loss is above that of a guess, ln({vocab}) = {:.4}, since step {since}: the median of the last steps is \
             {median:.4}. Remedy: lower optimizer.lr (it is {lr})",
            (*vocab as f64).ln()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps at which a warning comes, and the first step of a rise that lasts until the end.
    fn seen(vocab: usize, losses: &[f64]) -> (Vec<u64>, Option<u64>) {
        let mut watch = GuessWatch::new(vocab);
        let warned = (1..).zip(losses).filter(|(step, loss)| watch.step(*step, **loss).is_some());
        let warned = warned.map(|(step, _)| step).collect();
        (warned, watch.rise().map(|rise| rise.since))
    }

    #[test]
    fn a_loss_that_rises_above_a_guess_is_warned_of_once_per_episode() {
        // ln(256) = 5.545: the loss falls, rises, falls and rises again.
        let fall = [5.6, 5.5, 5.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0];
        let rise = [17.0; 9];
        assert_eq!(seen(256, &fall), (vec![], None));
        assert_eq!(seen(256, &[&fall[..], &rise].concat()), (vec![14], Some(10)));
        let again = [&fall[..], &rise, &fall, &rise].concat();
        assert_eq!(seen(256, &again), (vec![14, 32], Some(28)));
        // Another vocabulary has another guess.
        assert_eq!(seen(1 << 40, &[&fall[..], &rise].concat()), (vec![], None));
    }

    #[test]
    fn a_noisy_batch_and_a_loss_that_was_never_below_are_no_rise() {
        let mut losses = vec![3.0; 20];
        (losses[7], losses[8], losses[15]) = (90.0, 90.0, f64::NAN);
        assert_eq!(seen(256, &losses), (vec![], None));
        assert_eq!(
            seen(256, &[5.6, 5.54, 5.5, 5.6, 5.55, 5.7, 6.0, 7.0, 9.0, 9.0]),
            (vec![], None)
        );
    }

    #[test]
    fn a_loss_that_is_far_above_a_guess_is_warned_of_in_a_model_that_has_learned_nothing() {
        let slow = [5.6, 5.5, 5.4, 5.3, 5.5];
        assert_eq!(seen(256, &[&slow[..], &[8.2; 9]].concat()), (vec![], None));
        assert_eq!(seen(256, &[&slow[..], &[8.4; 9]].concat()), (vec![10], Some(6)));
        // A loss that falls from there is no divergence at the end.
        assert_eq!(seen(256, &[&[9.0; 9][..], &[6.0; 9]].concat()), (vec![5], None));
    }

    #[test]
    fn a_model_that_was_trained_elsewhere_has_learned_before_step_1() {
        assert_eq!(seen(256, &[2.5, 17.0, 17.0, 17.0]), (vec![], None));
        assert_eq!(seen(256, &[2.5, 17.0, 17.0, 17.0, f64::NAN]), (vec![5], Some(2)));
    }
}
