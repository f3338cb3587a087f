//! Routes of tokens to experts: the choices, their gradient, and the load of the experts.

use super::super::math::{dot, exp, max, sum, vectorised};
use super::super::{Memory, not_a_kernel, slice, slice_mut};
use super::{ExpertOffsets, indices};
use crate::cpu::workers::{Slice, Workers};
use crate::op::{BalanceGradient, MOST_CHOICES, MOST_EXPERTS, Op, PADDING, ScoreRule, SigmoidRule};

mod sigmoid;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Route { logits, weights, choices, scoring } => {
            let ((tokens, experts), per_token) = (logits.shape(), choices.shape().1);
            let scoring = HostRule::of(scoring, m)?;
            let (work, logits) = (logits.len(), slice::<f32>(m, logits)?);
            let weights = Slice { data: slice_mut::<f32>(m, weights)?, each: per_token };
            let choices = Slice { data: slice_mut::<i32>(m, choices)?, each: per_token };
            workers.split(tokens, work, (weights, choices), &|tokens, (weights, choices), _| {
                let logits = &logits[tokens.start * experts..tokens.end * experts];
                let (choices, weights) = (choices.data, weights.data);
                let sizes = [experts, per_token];
                match scoring {
                    HostRule::Softmax { normalize } => {
                        let rows = logits.chunks_exact(experts);
                        for (logits, choices) in rows.zip(choices.chunks_exact_mut(per_token)) {
                            choose(logits.iter().copied().enumerate(), choices);
                        }
                        weigh(logits, choices, weights, sizes, normalize);
                    }
                    HostRule::Sigmoid(of) => sigmoid::route(logits, choices, weights, sizes, of),
                }
            });
        }
        Op::RouteBackward { logits, choices, d_weights, scoring, balance } => {
            let ((tokens, experts), per_token) = (logits.shape(), choices.shape().1);
            let choices = indices(m, choices, experts)?;
            let d_weights = slice::<f32>(m, d_weights)?;
            let balance = match balance {
                None => None,
                Some(BalanceGradient { of_experts, targets }) => {
                    Some((slice::<f32>(m, of_experts)?, slice::<i32>(m, targets)?))
                }
            };
            let work = logits.len();
            let logits = Slice { data: slice_mut::<f32>(m, logits)?, each: experts };
            workers.split(tokens, work, logits, &|tokens, logits, _| {
                let pairs = tokens.start * per_token..tokens.end * per_token;
                let (choices, d_weights) = (&choices[pairs.clone()], &d_weights[pairs]);
                let balance = balance.map(|(of_experts, targets)| (of_experts, &targets[tokens]));
                match scoring {
                    ScoreRule::Softmax { normalize } => {
                        let given =
                            RouteGradients { choices, d_weights, per_token, normalize, balance };
                        differentiate(logits.data, experts, given);
                    }
                    ScoreRule::Sigmoid(SigmoidRule { normalize, scale, .. }) => {
                        let factors = sigmoid::WeightFactors { normalize, scale };
                        let sizes = [experts, per_token];
                        sigmoid::differentiate(logits.data, choices, d_weights, sizes, factors);
                    }
                }
            });
        }
        Op::ExpertLoad { offsets, order, targets, logits, load, shares } => {
            let ((tokens, experts), rows) = (logits.shape(), order.len());
            let offsets = ExpertOffsets::new(slice(m, offsets)?, rows)?;
            let (order, targets) = (indices(m, order, rows)?, slice::<i32>(m, targets)?);
            let per_token = rows / tokens.max(1);
            let is_held = |pair: &&i32| targets[**pair as usize / per_token] != PADDING;
            for (expert, load) in slice_mut::<f64>(m, load)?.iter_mut().enumerate() {
                *load += order[offsets.rows(expert)].iter().filter(is_held).count() as f64;
            }
            if let Some(shares) = shares {
                let logits = slice::<f32>(m, logits)?;
                add_shares(logits, targets, experts, slice_mut::<f64>(m, shares)?);
            }
        }
        Op::BalanceLoss { counts, shares, value, grads, per_token, scale, factor } => {
            let experts = counts.shape().1;
            let (counts, shares) = (slice::<f64>(m, counts)?, slice::<f64>(m, shares)?);
            let rows = counts.chunks_exact(experts).zip(shares.chunks_exact(experts));
            let grads = slice_mut::<f32>(m, grads)?.chunks_exact_mut(experts);
            let mut loss = 0.0;
            for ((counts, shares), grads) in rows.zip(grads) {
                let tokens = counts.iter().sum::<f64>() / per_token as f64;
                let scale = if tokens > 0.0 { scale / (tokens * tokens) } else { 0.0 };
                let products = counts.iter().zip(shares).map(|(count, share)| count * share);
                loss += scale * products.sum::<f64>();
                let scale = factor * scale;
                grads.iter_mut().zip(counts).for_each(|(d, count)| *d = (scale * count) as f32);
            }
            slice_mut::<f64>(m, value)?[0] += loss;
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// A [`ScoreRule`], with numbers in memory.
#[derive(Clone, Copy)]
enum HostRule<'a> {
    Softmax { normalize: bool },
    Sigmoid(sigmoid::HostSigmoid<'a>),
}

impl<'a> HostRule<'a> {
    fn of(scoring: ScoreRule, m: &'a impl Memory) -> Result<Self, String> {
        Ok(match scoring {
            ScoreRule::Softmax { normalize } => Self::Softmax { normalize },
            ScoreRule::Sigmoid(SigmoidRule {
                correction,
                groups,
                kept_groups,
                normalize,
                scale,
            }) => {
                let correction = slice::<f32>(m, correction)?;
                let factors = sigmoid::WeightFactors { normalize, scale };
                Self::Sigmoid(sigmoid::HostSigmoid { correction, groups, kept_groups, factors })
            }
        })
    }
}

/// Sets `choices` to the indices of the largest numbers of a row, which are (index, number) in
/// ascending order of the indices: see [`Op::Route`].
fn choose(numbers: impl Iterator<Item = (usize, f32)>, choices: &mut [i32]) {
    let (most, mut kept) = (choices.len(), 0);
    let mut best = [f32::NEG_INFINITY; MOST_CHOICES];
    for (expert, logit) in numbers {
        let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        if kept == most && logit <= best[most - 1] {
            continue;
        }
        let place = best[..kept].iter().position(|other| logit > *other).unwrap_or(kept);
        kept = (kept + 1).min(most);
        best.copy_within(place..kept - 1, place + 1);
        choices.copy_within(place..kept - 1, place + 1);
        (best[place], choices[place]) = (logit, expert as i32);
    }
}

/// p = softmax(logits), in an order of sums that depends on the number of experts alone.
#[inline(always)]
fn softmax(logits: &[f32], p: &mut [f32]) {
    let largest = max(logits);
    p.iter_mut().zip(logits).for_each(|(p, logit)| *p = exp(logit - largest));
    let total = sum(p, |p| p);
    p.iter_mut().for_each(|p| *p /= total);
}

/// weights (tokens, slots) = p of the choices, divided by their sum in the order of the slots if
/// `normalize`.
fn weigh(
    logits: &[f32],
    choices: &[i32],
    weights: &mut [f32],
    [experts, per_token]: [usize; 2],
    normalize: bool,
) {
    vectorised(
        #[inline(always)]
        || {
            let mut p = [0.0; MOST_EXPERTS];
            let p = &mut p[..experts];
            let rows = logits.chunks_exact(experts).zip(choices.chunks_exact(per_token));
            for ((logits, choices), weights) in rows.zip(weights.chunks_exact_mut(per_token)) {
                softmax(logits, p);
                let of_choices = choices.iter().map(|expert| p[*expert as usize]);
                weights.iter_mut().zip(of_choices).for_each(|(weight, p)| *weight = p);
                if normalize {
                    let total = weights.iter().fold(0.0f32, |total, weight| total + weight);
                    weights.iter_mut().for_each(|weight| *weight /= total);
                }
            }
        },
    );
}

/// The choices of some rows, and the gradients of what follows from them.
#[derive(Clone, Copy)]
struct RouteGradients<'a> {
    choices: &'a [i32],
    d_weights: &'a [f32],
    per_token: usize,
    normalize: bool,
    /// Gradient of each expert's p, for every row that a document holds, and the targets of the rows.
    balance: Option<(&'a [f32], &'a [i32])>,
}

/// Replaces logits (tokens, experts) by their gradient.
///
/// f are the weights, D is the sum of f d_weights, and B is the sum of p balance. The gradient is
/// p (balance - B - D), or p (balance - B) if the weights are normalised. A chosen expert adds
/// f d_weights, or f (d_weights - D) if they are normalised.
fn differentiate(logits: &mut [f32], experts: usize, given: RouteGradients<'_>) {
    let RouteGradients { choices, d_weights, per_token, normalize, balance } = given;
    vectorised(
        #[inline(always)]
        || {
            let mut p = [0.0; MOST_EXPERTS];
            let p = &mut p[..experts];
            let pairs = choices.chunks_exact(per_token).zip(d_weights.chunks_exact(per_token));
            let rows = logits.chunks_exact_mut(experts).zip(pairs);
            for (row, (logits, (choices, d_weights))) in rows.enumerate() {
                let balance = balance.filter(|(_, targets)| targets[row] != PADDING);
                let balance = balance.map(|(of_experts, _)| of_experts);
                softmax(logits, p);
                let of_choices = choices.iter().map(|expert| p[*expert as usize]);
                let total = of_choices.fold(0.0f32, |total, p| total + p);
                let total = if normalize { total } else { 1.0 };
                let mut by_weights = 0.0f32;
                for (expert, d) in choices.iter().zip(d_weights) {
                    by_weights = (p[*expert as usize] / total).mul_add(*d, by_weights);
                }
                let by_balance = balance.map_or(0.0, |balance| dot(p, balance));
                let (of_all, of_chosen) = match normalize {
                    true => (by_balance, by_weights),
                    false => (by_balance + by_weights, 0.0),
                };
                let both = logits.iter_mut().zip(&*p);
                match balance {
                    Some(balance) => {
                        let terms = both.zip(balance);
                        terms.for_each(|((d, p), balance)| *d = p * (balance - of_all));
                    }
                    None => both.for_each(|(d, p)| *d = p * (0.0 - of_all)),
                }
                for (expert, d) in choices.iter().zip(d_weights) {
                    let expert = *expert as usize;
                    logits[expert] = (p[expert] / total).mul_add(d - of_chosen, logits[expert]);
                }
            }
        },
    );
}

/// shares (experts) += sums of p over the rows that a document holds, in order. One thread sums,
/// since a sum in fp64 by blocks of rows would need fp64 scratch.
fn add_shares(logits: &[f32], targets: &[i32], experts: usize, shares: &mut [f64]) {
    vectorised(
        #[inline(always)]
        || {
            let mut p = [0.0; MOST_EXPERTS];
            let p = &mut p[..experts];
            let rows = logits.chunks_exact(experts).zip(targets);
            for (logits, _) in rows.filter(|(_, target)| **target != PADDING) {
                softmax(logits, p);
                shares.iter_mut().zip(&*p).for_each(|(share, p)| *share += f64::from(*p));
            }
        },
    );
}
