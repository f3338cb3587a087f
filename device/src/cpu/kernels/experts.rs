//! Mixture of experts: pairs of a token and a slot sorted by expert, and rows that follow them.

use super::math::{dot, read, vectorised, write};
use super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Slice, Workers};
use crate::numerics::view::copy;
use crate::op::Op;
use crate::{BLOCK, Tensor, View, ViewMut};
use std::ops::Range;

mod biases;
mod products;
mod route;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Route { .. }
        | Op::RouteBackward { .. }
        | Op::ExpertLoad { .. }
        | Op::BalanceLoss { .. } => return route::run(op, m, workers),
        Op::GroupedGemm { .. } => return products::run(op, m, workers),
        Op::AddExpertBiases { .. } | Op::ExpertBiasesBackward { .. } => {
            return biases::run(op, m, workers);
        }
        // One thread passes over the pairs, so that it needs no histogram of each block.
        Op::SortByExpert { choices, offsets, order, places, .. } => {
            let choices = indices(m, choices, offsets.len().saturating_sub(1))?;
            let (order, places) = (slice_mut::<i32>(m, order)?, slice_mut::<i32>(m, places)?);
            sort(choices, slice_mut(m, offsets)?, order, places);
        }
        Op::GatherRows { x, order, y } => {
            let ((tokens, cols), rows) = (x.shape(), y.shape().0);
            let per_token = rows / tokens.max(1);
            let (order, x) = (indices(m, order, rows)?, values(m, x)?);
            let (work, y) = (y.len(), Rows { view: values_mut(m, y)?, each: cols });
            workers.split(rows, work, y, &|rows, y, _| {
                let mut rest = y.view;
                for pair in &order[rows] {
                    let (mut row, others) = rest.split_at(cols);
                    let from = *pair as usize / per_token * cols;
                    copy(x.slice(from..from + cols), &mut row);
                    rest = others;
                }
            });
        }
        Op::CombineExperts { y, places, weights, out } => {
            let ((tokens, per_token), (rows, cols)) = (places.shape(), y.shape());
            let places = indices(m, places, rows)?;
            let weights = weights.map(|weights| slice::<f32>(m, weights)).transpose()?;
            let (work, y) = (y.len(), values(m, y)?);
            let out = Rows { view: values_mut(m, out)?, each: cols };
            workers.split(tokens, work, out, &|tokens, mut out, _| {
                let pairs = tokens.start * per_token..tokens.end * per_token;
                let weights = weights.map(|weights| &weights[pairs.clone()]);
                let slots = SlotRows { places: &places[pairs], weights, per_token, cols };
                combine(y, slots, &mut out.view);
            });
        }
        Op::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights } => {
            let ((tokens, per_token), (rows, cols)) = (places.shape(), y.shape());
            let places = indices(m, places, rows)?;
            let (work, weights) = (y.len(), slice::<f32>(m, weights)?);
            let (in_place, d_out, target) = (y == d_y, values(m, d_out)?, values_mut(m, d_y)?);
            let y = if in_place { target.as_view() } else { values(m, y)? };
            let d_weights = Slice { data: slice_mut::<f32>(m, d_weights)?, each: per_token };
            workers.split(tokens, work, d_weights, &|tokens, d_weights, _| {
                let places = &places[tokens.start * per_token..tokens.end * per_token];
                let d_out = d_out.slice(tokens.start * cols..tokens.end * cols);
                let slots = SlotRows { places, weights: None, per_token, cols };
                products_of_rows(d_out, y, slots, d_weights.data);
            });
            let slots = SlotRows { places, weights: Some(weights), per_token, cols };
            let d_y = Rows { view: target, each: cols };
            workers.split(rows, work, d_y, &|rows, mut d_y, _| {
                spread(d_out, slots, rows, &mut d_y.view);
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// The elements of `t`, which are indices below `end`. Other numbers are an error.
fn indices(m: &impl Memory, t: Tensor, end: usize) -> Result<&[i32], String> {
    let all = slice::<i32>(m, t)?;
    let is_index = |i: &&i32| usize::try_from(**i).is_ok_and(|i| i < end);
    match all.iter().find(|i| !is_index(i)) {
        Some(other) => Err(format!("{other} is no index below {end}")),
        None => Ok(all),
    }
}

/// First row of each expert, and then the number of rows.
#[derive(Clone, Copy)]
struct ExpertOffsets<'a>(&'a [i32]);

impl<'a> ExpertOffsets<'a> {
    /// The offsets, or an error if they do not divide `rows` rows.
    fn new(offsets: &'a [i32], rows: usize) -> Result<Self, String> {
        let ends = offsets.last().and_then(|last| usize::try_from(*last).ok());
        if offsets.first() == Some(&0) && ends == Some(rows) && offsets.is_sorted() {
            Ok(Self(offsets))
        } else {
            Err(format!("`offsets` do not divide {rows} rows between experts"))
        }
    }

    /// Number of experts.
    const fn count(self) -> usize {
        self.0.len() - 1
    }

    /// The expert of a row: the last one whose first row is not behind it. Experts without rows begin
    /// where the next expert begins.
    fn of_row(self, row: usize) -> usize {
        self.0.partition_point(|first| *first as usize <= row) - 1
    }

    /// The rows of an expert.
    fn rows(self, expert: usize) -> Range<usize> {
        self.0[expert] as usize..self.0[expert + 1] as usize
    }
}

/// Sorts pairs by their expert. `offsets`, `order` and `places`: see [`Op::SortByExpert`].
fn sort(choices: &[i32], offsets: &mut [i32], order: &mut [i32], places: &mut [i32]) {
    offsets.fill(0);
    for expert in choices {
        offsets[*expert as usize + 1] += 1;
    }
    for expert in 1..offsets.len() {
        offsets[expert] += offsets[expert - 1];
    }
    // The first row of an expert counts up to the first row of the next expert.
    for (pair, (expert, place)) in choices.iter().zip(places).enumerate() {
        let next = &mut offsets[*expert as usize];
        (*place, order[*next as usize]) = (*next, pair as i32);
        *next += 1;
    }
    offsets.copy_within(..offsets.len() - 1, 1);
    offsets[0] = 0;
}

/// The rows of the slots of some tokens.
#[derive(Clone, Copy)]
struct SlotRows<'a> {
    /// Row of each pair.
    places: &'a [i32],
    /// Factor of each pair. `None`: 1.
    weights: Option<&'a [f32]>,
    /// Slots of a token.
    per_token: usize,
    /// Elements of a row.
    cols: usize,
}

/// out (tokens, cols) = sums over the slots, in order, of weights times rows of y.
fn combine(y: View<'_>, slots: SlotRows<'_>, out: &mut ViewMut<'_>) {
    let SlotRows { places, weights, per_token, cols } = slots;
    vectorised(
        #[inline(always)]
        || {
            let (mut buffer, mut sums) = ([0.0; BLOCK], [0.0f32; BLOCK]);
            for (token, places) in places.chunks_exact(per_token).enumerate() {
                for col in (0..cols).step_by(BLOCK) {
                    let n = BLOCK.min(cols - col);
                    let sums = &mut sums[..n];
                    sums.fill(0.0);
                    for (slot, place) in places.iter().enumerate() {
                        let y = read(&y, *place as usize * cols + col, n, &mut buffer);
                        let terms = sums.iter_mut().zip(y);
                        match weights {
                            Some(weights) => {
                                let weight = weights[token * per_token + slot];
                                terms.for_each(|(sum, y)| *sum = weight.mul_add(*y, *sum));
                            }
                            None => terms.for_each(|(sum, y)| *sum += y),
                        }
                    }
                    out.store(token * cols + col, sums);
                }
            }
        },
    );
}

/// products (tokens, slots) = sums over the columns of d_out of the token times y of the slot. Their
/// order depends on the number of columns alone.
fn products_of_rows(d_out: View<'_>, y: View<'_>, slots: SlotRows<'_>, products: &mut [f32]) {
    let SlotRows { places, per_token, cols, .. } = slots;
    vectorised(
        #[inline(always)]
        || {
            let (mut d_buffer, mut y_buffer) = ([0.0; BLOCK], [0.0; BLOCK]);
            for (pair, (place, product)) in places.iter().zip(&mut *products).enumerate() {
                let (of_token, of_place) = (pair / per_token * cols, *place as usize * cols);
                *product = 0.0;
                for col in (0..cols).step_by(BLOCK) {
                    let n = BLOCK.min(cols - col);
                    let d = read(&d_out, of_token + col, n, &mut d_buffer);
                    *product += dot(d, read(&y, of_place + col, n, &mut y_buffer));
                }
            }
        },
    );
}

/// d_y, the rows `rows` of all: each is d_out of the token of its pair times the weight of the pair.
fn spread(d_out: View<'_>, slots: SlotRows<'_>, rows: Range<usize>, d_y: &mut ViewMut<'_>) {
    let SlotRows { places, weights, per_token, cols } = slots;
    vectorised(
        #[inline(always)]
        || {
            let (mut buffer, mut products) = ([0.0; BLOCK], [0.0; BLOCK]);
            for (pair, place) in places.iter().enumerate() {
                // The pairs of a run of rows may be of any tokens.
                let row = (*place as usize).checked_sub(rows.start);
                let Some(row) = row.filter(|row| *row < rows.len()) else { continue };
                let weight = weights.map_or(1.0, |weights| weights[pair]);
                for col in (0..cols).step_by(BLOCK) {
                    let n = BLOCK.min(cols - col);
                    let d = read(&d_out, pair / per_token * cols + col, n, &mut buffer);
                    write(
                        d_y,
                        row * cols + col,
                        n,
                        &mut products,
                        false,
                        #[inline(always)]
                        |d_y| d_y.iter_mut().zip(d).for_each(|(d_y, d)| *d_y = weight * d),
                    );
                }
            }
        },
    );
}

#[cfg(test)]
mod tests;
