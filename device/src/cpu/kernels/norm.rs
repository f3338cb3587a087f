//! Layer norm and RMSNorm. Statistics are f32, summed in an order that depends on the row's length
//! alone.

use super::math::{AHEAD, dot, factors, read, sum, vectorised, write};
use super::{Memory, is_values, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Slice, Workers, norm_floats};
use crate::op::Op;
use crate::{Tensor, View, ViewMut};
use std::ops::Range;

mod width;

/// Number of statistics per row and of parameter gradients. RMSNorm stores 1/root; layer norm
/// stores mean and 1/deviation.
const RMS: usize = 1;
const LAYER: usize = 2;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::LayerNorm { x, gain, bias, y, stats, epsilon } => {
            let terms = Terms { x, gain, offset: 0.0, bias: Some(bias), epsilon };
            forward::<LAYER>(m, workers, terms, y, stats)
        }
        Op::RmsNorm { x, gain, offset, y, stats, epsilon } => {
            forward::<RMS>(m, workers, Terms { x, gain, offset, bias: None, epsilon }, y, stats)
        }
        Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias } => {
            let inputs = Inputs::new(m, x, gain, stats, d_y)?;
            backward::<LAYER>(m, workers, inputs, d_x, add, [d_gain, d_bias])
        }
        Op::RmsNormBackward { x, gain, offset, stats, d_y, d_x, add, d_gain } => {
            let inputs = Inputs { offset, ..Inputs::new(m, x, gain, stats, d_y)? };
            backward::<RMS>(m, workers, inputs, d_x, add, [d_gain])
        }
        Op::WidthNormSums { .. }
        | Op::WidthNorm { .. }
        | Op::WidthNormBackwardSums { .. }
        | Op::WidthNormBackward { .. } => width::run(op, m, workers),
        _ => not_a_kernel(),
    }
}

/// Inputs of the forward pass: x (rows, cols), gain and bias (cols), and what is added to the gain.
#[derive(Clone, Copy)]
struct Terms {
    x: Tensor,
    gain: Tensor,
    offset: f32,
    bias: Option<Tensor>,
    epsilon: f32,
}

fn forward<const STATS: usize>(
    m: &impl Memory,
    workers: &Workers,
    terms: Terms,
    y: Tensor,
    stats: Tensor,
) -> Result<(), String> {
    let Terms { x, gain, offset, bias, epsilon } = terms;
    let (rows, cols) = x.shape();
    workers.need(norm_floats(cols))?;
    let (x, gain) = (values(m, x)?, values(m, gain)?);
    let bias = bias.map(|bias| values(m, bias)).transpose()?;
    let shared = Factors { gain, offset, bias, epsilon };
    let y = Rows { view: values_mut(m, y)?, each: cols };
    let stats = Slice { data: slice_mut::<f32>(m, stats)?, each: STATS };
    workers.split(rows, x.len(), (y, stats), &|rows, (mut y, stats), scratch| {
        let x = x.slice(rows.start * cols..rows.end * cols);
        let floats = &mut scratch.floats;
        forward_rows::<STATS>(x, shared, &mut y.view, stats.data, floats);
    });
    Ok(())
}

/// Computes `d_x` and the gradients of the parameters.
fn backward<const STATS: usize>(
    m: &impl Memory,
    workers: &Workers,
    inputs: Inputs<'_>,
    d_x: Tensor,
    add: bool,
    grads: [Tensor; STATS],
) -> Result<(), String> {
    let (cols, rows) = (inputs.cols, inputs.stats.len() / STATS);
    workers.need(norm_floats(cols))?;
    let d_x = Rows { view: values_mut(m, d_x)?, each: cols };
    grads.into_iter().try_for_each(is_values)?;
    let mut grads = grads.map(|grad| m.write(grad));
    let each_block =
        |rows: Range<usize>, mut d_x: Rows<'_>, sums: &mut [f32], floats: &mut [f32]| {
            let inputs = inputs.rows::<STATS>(rows.start, rows.end);
            backward_rows::<STATS>(inputs, &mut d_x.view, add, sums, floats);
        };
    workers.sum_rows(rows, STATS * cols, inputs.x.len(), d_x, &each_block, |sums| {
        let sums = sums.chunks_exact(cols.max(1));
        grads.iter_mut().zip(sums).for_each(|(grad, sums)| grad.store(0, sums));
    })
}

/// Four rows of scratch.
fn four(floats: &mut [f32], cols: usize) -> [&mut [f32]; 4] {
    let (a, rest) = floats.split_at_mut(cols);
    let (b, rest) = rest.split_at_mut(cols);
    let (c, rest) = rest.split_at_mut(cols);
    [a, b, c, &mut rest[..cols]]
}

/// Inputs that all rows of the forward pass share.
#[derive(Clone, Copy)]
struct Factors<'a> {
    gain: View<'a>,
    offset: f32,
    bias: Option<View<'a>>,
    epsilon: f32,
}

/// y (rows, cols) from x (rows, cols), gain and, for layer norm, bias (cols); stats (rows, STATS).
fn forward_rows<const STATS: usize>(
    x: View<'_>,
    shared: Factors<'_>,
    y: &mut ViewMut<'_>,
    stats: &mut [f32],
    floats: &mut [f32],
) {
    let Factors { gain, offset, bias, epsilon } = shared;
    let cols = gain.len();
    vectorised(
        #[inline(always)]
        || {
            let [gains, biases, xs, ys] = four(floats, cols);
            let gain = factors(&gain, offset, gains);
            let bias = bias.as_ref().map_or(&[][..], |bias| read(bias, 0, cols, biases));
            let per_element = 1.0 / cols as f32;
            for (row, stats) in stats.as_chunks_mut::<STATS>().0.iter_mut().enumerate() {
                let later = row * cols + AHEAD..row * cols + AHEAD + cols;
                x.ask(later.clone());
                y.as_view().ask(later);
                let x = read(&x, row * cols, cols, xs);
                let (mean, scale) = if STATS == RMS {
                    (0.0, 1.0 / sum(x, |x| x * x).mul_add(per_element, epsilon).sqrt())
                } else {
                    let mean = sum(x, |x| x) * per_element;
                    let variance = sum(x, |x| (x - mean) * (x - mean)) * per_element;
                    (mean, 1.0 / (variance + epsilon).sqrt())
                };
                write(
                    y,
                    row * cols,
                    cols,
                    ys,
                    false,
                    #[inline(always)]
                    |y| {
                        let terms = y.iter_mut().zip(x).zip(gain);
                        if STATS == RMS {
                            terms.for_each(|((y, x), gain)| *y = x * scale * gain);
                        } else {
                            terms.zip(bias).for_each(|(((y, x), gain), bias)| {
                                *y = ((x - mean) * scale).mul_add(*gain, *bias);
                            });
                        }
                    },
                );
                stats[0] = mean;
                stats[STATS - 1] = scale;
            }
        },
    );
}

/// Inputs of the backward pass: x and d_y (rows, cols), gain (cols) and what is added to it, and
/// stats: (rows, 2), for RMSNorm (rows).
#[derive(Clone, Copy)]
struct Inputs<'a> {
    x: View<'a>,
    gain: View<'a>,
    offset: f32,
    stats: &'a [f32],
    d_y: View<'a>,
    cols: usize,
}

impl<'a> Inputs<'a> {
    fn new(
        m: &'a impl Memory,
        x: Tensor,
        gain: Tensor,
        stats: Tensor,
        d_y: Tensor,
    ) -> Result<Self, String> {
        Ok(Self {
            x: values(m, x)?,
            gain: values(m, gain)?,
            offset: 0.0,
            stats: slice(m, stats)?,
            d_y: values(m, d_y)?,
            cols: x.shape().1,
        })
    }

    fn rows<const STATS: usize>(self, start: usize, end: usize) -> Self {
        let range = start * self.cols..end * self.cols;
        let (x, d_y) = (self.x.slice(range.clone()), self.d_y.slice(range));
        Self { x, d_y, stats: &self.stats[STATS * start..STATS * end], ..self }
    }
}

/// d_x = (add ? d_x : 0) + (g - mean(g) - n mean(g n)) / deviation, where g = d_y (gain + offset)
/// and n is the normalised x; for RMSNorm without mean(g), and with the root instead of the
/// deviation. Also sums d_y n (d_gain) and, for layer norm, d_y (d_bias) over the rows in order.
fn backward_rows<const STATS: usize>(
    inputs: Inputs<'_>,
    d_x: &mut ViewMut<'_>,
    add: bool,
    sums: &mut [f32],
    floats: &mut [f32],
) {
    let Inputs { x, gain, offset, stats, d_y, cols } = inputs;
    vectorised(
        #[inline(always)]
        || {
            let [gains, normal, g, xs] = four(floats, cols);
            let gain = factors(&gain, offset, gains);
            sums.fill(0.0);
            let (d_gain, d_bias) = sums.split_at_mut(cols);
            let per_element = 1.0 / cols as f32;
            for (row, stats) in stats.as_chunks::<STATS>().0.iter().enumerate() {
                let (at, scale) = (row * cols, stats[STATS - 1]);
                let mean = if STATS == RMS { 0.0 } else { stats[0] };
                let later = at + AHEAD..at + AHEAD + cols;
                x.ask(later.clone());
                d_y.ask(later.clone());
                d_x.as_view().ask(later);
                let x = read(&x, at, cols, xs);
                normal.iter_mut().zip(x).for_each(|(n, x)| *n = (x - mean) * scale);
                let d_y = read(&d_y, at, cols, xs);
                let terms = g.iter_mut().zip(d_y).zip(gain).zip(&*normal).zip(&mut *d_gain);
                if STATS == RMS {
                    for ((((g, d), gain), n), d_gain) in terms {
                        *g = d * gain;
                        *d_gain = d.mul_add(*n, *d_gain);
                    }
                } else {
                    for (((((g, d), gain), n), d_gain), d_bias) in terms.zip(&mut *d_bias) {
                        *g = d * gain;
                        *d_gain = d.mul_add(*n, *d_gain);
                        *d_bias += d;
                    }
                }
                let mean_g = if STATS == RMS { 0.0 } else { sum(g, |g| g) * per_element };
                let mean_gn = dot(g, normal) * per_element;
                let terms = g.iter().zip(&*normal);
                let new = |(g, n): (&f32, &f32)| n.mul_add(-mean_gn, g - mean_g) * scale;
                write(
                    d_x,
                    at,
                    cols,
                    xs,
                    add,
                    #[inline(always)]
                    |d_x| {
                        let both = d_x.iter_mut().zip(terms);
                        if add {
                            both.for_each(|(d, t)| *d += new(t));
                        } else {
                            both.for_each(|(d, t)| *d = new(t));
                        }
                    },
                );
            }
        },
    );
}

#[cfg(test)]
mod tests;
