//! Routes by sigmoid scores, with a correction and groups for the choice.

use super::super::super::math::{sigmoid, vectorised};
use super::choose;
use crate::op::{LEAST_SUM, MOST_CHOICES, MOST_EXPERTS};

/// A [`SigmoidRule`](crate::SigmoidRule), with its correction in memory.
#[derive(Clone, Copy)]
pub(super) struct HostSigmoid<'a> {
    pub(super) correction: &'a [f32],
    pub(super) groups: usize,
    pub(super) kept_groups: usize,
    pub(super) factors: WeightFactors,
}

/// What multiplies the scores of a token's experts.
#[derive(Clone, Copy)]
pub(super) struct WeightFactors {
    /// Whether the scores are divided by their sum.
    pub(super) normalize: bool,
    pub(super) scale: f32,
}

impl WeightFactors {
    /// Divisor of the scores, whose sum in the order of the slots is `sum`.
    fn divisor(self, sum: f32) -> f32 {
        if self.normalize { sum + LEAST_SUM } else { 1.0 }
    }
}

/// Chooses experts of each row of logits, and weighs them.
pub(super) fn route(
    logits: &[f32],
    choices: &mut [i32],
    weights: &mut [f32],
    [experts, per_token]: [usize; 2],
    of: HostSigmoid<'_>,
) {
    vectorised(
        #[inline(always)]
        || {
            let (mut scores, mut corrected) = ([0.0; MOST_EXPERTS], [0.0; MOST_EXPERTS]);
            let (scores, corrected) = (&mut scores[..experts], &mut corrected[..experts]);
            let slots = choices.chunks_exact_mut(per_token);
            let slots = slots.zip(weights.chunks_exact_mut(per_token));
            for (logits, (choices, weights)) in logits.chunks_exact(experts).zip(slots) {
                scores.iter_mut().zip(logits).for_each(|(s, z)| *s = sigmoid(*z));
                let terms = scores.iter().zip(of.correction);
                corrected.iter_mut().zip(terms).for_each(|(c, (s, term))| *c = s + term);
                let kept = kept_groups(corrected, of);
                let size = experts / of.groups;
                let numbers = corrected.iter().copied().enumerate();
                choose(numbers.filter(|(expert, _)| kept[expert / size]), choices);
                let chosen = choices.iter().map(|expert| scores[*expert as usize]);
                weights.iter_mut().zip(chosen).for_each(|(weight, s)| *weight = s);
                let sum = weights.iter().fold(0.0f32, |sum, weight| sum + weight);
                let divisor = of.factors.divisor(sum);
                weights.iter_mut().for_each(|w| *w = *w / divisor * of.factors.scale);
            }
        },
    );
}

/// Whether the experts of each group can be chosen.
#[inline(always)]
fn kept_groups(corrected: &[f32], of: HostSigmoid<'_>) -> [bool; MOST_CHOICES] {
    let HostSigmoid { groups, kept_groups, .. } = of;
    let mut kept = [groups == kept_groups; MOST_CHOICES];
    if groups == kept_groups {
        return kept;
    }
    let size = corrected.len() / groups;
    let scores = corrected.chunks_exact(size).map(|group| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for number in group {
            if *number > first {
                (first, second) = (*number, first);
            } else if *number > second {
                second = *number;
            }
        }
        first + second
    });
    let mut best = [0; MOST_CHOICES];
    choose(scores.enumerate(), &mut best[..kept_groups]);
    best[..kept_groups].iter().for_each(|group| kept[*group as usize] = true);
    kept
}

/// Replaces logits (tokens, experts) by their gradient.
///
/// s are the scores, n is their divisor, and D is the sum of s / n times `d_weights`, or 0 if the
/// weights are not normalised. The gradient of a chosen expert is scale / n (d_weights - D) s (1 - s),
/// that of another one is 0.
pub(super) fn differentiate(
    logits: &mut [f32],
    choices: &[i32],
    d_weights: &[f32],
    [experts, per_token]: [usize; 2],
    factors: WeightFactors,
) {
    let pairs = choices.chunks_exact(per_token).zip(d_weights.chunks_exact(per_token));
    for (logits, (choices, d_weights)) in logits.chunks_exact_mut(experts).zip(pairs) {
        let mut scores = [0.0; MOST_CHOICES];
        let scores = &mut scores[..per_token];
        scores.iter_mut().zip(choices).for_each(|(s, e)| *s = sigmoid(logits[*e as usize]));
        let divisor = factors.divisor(scores.iter().fold(0.0f32, |sum, s| sum + s));
        let mut mean = 0.0f32;
        if factors.normalize {
            for (s, d) in scores.iter().zip(d_weights) {
                mean = (s / divisor).mul_add(*d, mean);
            }
        }
        logits.fill(0.0);
        for ((s, d), expert) in scores.iter().zip(d_weights).zip(choices) {
            logits[*expert as usize] = factors.scale / divisor * (d - mean) * (s * (1.0 - s));
        }
    }
}
