//! Layer norm and RMSNorm. Statistics are f32, summed in an order that depends on the row's length
//! alone.

use super::math::{AHEAD, dot, read, sum, vectorised, write};
use super::{Memory, is_values, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Slice, Workers, norm_floats};
use crate::op::Op;
use crate::{Tensor, View, ViewMut};
use std::ops::Range;

/// Number of statistics per row and of parameter gradients. RMSNorm stores 1/root; layer norm
/// stores mean and 1/deviation.
const RMS: usize = 1;
const LAYER: usize = 2;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::LayerNorm { x, gain, bias, y, stats, epsilon } => {
            let terms = Terms { x, gain, bias: Some(bias), epsilon };
            forward::<LAYER>(m, workers, terms, y, stats)
        }
        Op::RmsNorm { x, gain, y, stats, epsilon } => {
            forward::<RMS>(m, workers, Terms { x, gain, bias: None, epsilon }, y, stats)
        }
        Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias } => {
            let inputs = Inputs::new(m, x, gain, stats, d_y)?;
            backward::<LAYER>(m, workers, inputs, d_x, add, [d_gain, d_bias])
        }
        Op::RmsNormBackward { x, gain, stats, d_y, d_x, add, d_gain } => {
            let inputs = Inputs::new(m, x, gain, stats, d_y)?;
            backward::<RMS>(m, workers, inputs, d_x, add, [d_gain])
        }
        _ => not_a_kernel(),
    }
}

/// Inputs of the forward pass: x (rows, cols), gain and bias (cols).
#[derive(Clone, Copy)]
struct Terms {
    x: Tensor,
    gain: Tensor,
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
    let Terms { x, gain, bias, epsilon } = terms;
    let (rows, cols) = x.shape();
    workers.need(norm_floats(cols))?;
    let (x, gain) = (values(m, x)?, values(m, gain)?);
    let bias = bias.map(|bias| values(m, bias)).transpose()?;
    let y = Rows { view: values_mut(m, y)?, each: cols };
    let stats = Slice { data: slice_mut::<f32>(m, stats)?, each: STATS };
    workers.split(rows, x.len(), (y, stats), &|rows, (mut y, stats), scratch| {
        let x = x.slice(rows.start * cols..rows.end * cols);
        let floats = &mut scratch.floats;
        forward_rows::<STATS>(x, gain, bias, epsilon, &mut y.view, stats.data, floats);
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

/// y (rows, cols) from x (rows, cols), gain and, for layer norm, bias (cols); stats (rows, STATS).
fn forward_rows<const STATS: usize>(
    x: View<'_>,
    gain: View<'_>,
    bias: Option<View<'_>>,
    epsilon: f32,
    y: &mut ViewMut<'_>,
    stats: &mut [f32],
    floats: &mut [f32],
) {
    let cols = gain.len();
    vectorised(
        #[inline(always)]
        || {
            let [gains, biases, xs, ys] = four(floats, cols);
            let gain = read(&gain, 0, cols, gains);
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

/// Inputs of the backward pass: x and d_y (rows, cols), gain (cols), and stats: (rows, 2), for
/// RMSNorm (rows).
#[derive(Clone, Copy)]
struct Inputs<'a> {
    x: View<'a>,
    gain: View<'a>,
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

/// d_x = (add ? d_x : 0) + (g - mean(g) - n mean(g n)) / deviation, where g = d_y gain and n is the
/// normalised x; for RMSNorm without mean(g), and with the root instead of the deviation. Also sums
/// d_y n (d_gain) and, for layer norm, d_y (d_bias) over the rows in order.
fn backward_rows<const STATS: usize>(
    inputs: Inputs<'_>,
    d_x: &mut ViewMut<'_>,
    add: bool,
    sums: &mut [f32],
    floats: &mut [f32],
) {
    let Inputs { x, gain, stats, d_y, cols } = inputs;
    vectorised(
        #[inline(always)]
        || {
            let [gains, normal, g, xs] = four(floats, cols);
            let gain = read(&gain, 0, cols, gains);
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
mod tests {
    use super::super::testing::{Rig, TYPES, assert_close, differences, inner, noise};
    use crate::op::Op;
    use crate::{Dtype, Tensor};

    fn norm_f64(x: &[f64], gain: &[f64], bias: &[f64]) -> Vec<f64> {
        let cols = gain.len();
        let row = |x: &[f64]| {
            let mean = x.iter().sum::<f64>() / cols as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
            let scale = 1.0 / (variance + 1e-5).sqrt();
            (0..cols).map(|i| (x[i] - mean) * scale * gain[i] + bias[i]).collect::<Vec<_>>()
        };
        x.chunks(cols).flat_map(row).collect()
    }

    struct Case {
        rig: Rig,
        y: Tensor,
        stats: Tensor,
        d_x: Tensor,
        d_gain: Tensor,
        d_bias: Tensor,
    }

    /// Forward and backward pass on the rows `rows` of an input.
    fn case(
        threads: usize,
        dtype: Dtype,
        rows: std::ops::Range<usize>,
        cols: usize,
        add: bool,
    ) -> Case {
        let mut rig = Rig::new(threads);
        let shape = (rows.len(), cols);
        let part = |seed| noise(seed, rows.end * cols)[rows.start * cols..].to_vec();
        let (x, d_y) = (rig.put(dtype, shape, &part(1)), rig.put(dtype, shape, &part(2)));
        let (gain, bias) = (
            rig.put(dtype, (1, cols), &noise(3, cols)),
            rig.put(dtype, (1, cols), &noise(4, cols)),
        );
        let (y, stats) = (rig.out(dtype, shape), rig.out(Dtype::F32, (rows.len(), 2)));
        let d_x = rig.put(dtype, shape, &part(5));
        let (d_gain, d_bias) = (rig.out(dtype, (1, cols)), rig.out(Dtype::F32, (1, cols)));
        rig.run(&Op::LayerNorm { x, gain, bias, y, stats, epsilon: 1e-5 });
        rig.run(&Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias });
        Case { rig, y, stats, d_x, d_gain, d_bias }
    }

    #[test]
    fn forward_and_gradients_are_the_formula_in_every_type() {
        for (dtype, ulp) in TYPES {
            for (rows, cols, add) in [(3, 2, false), (5, 37, true), (2, 128, false), (1, 300, true)]
            {
                let (x, d_y) = (noise(1, rows * cols), noise(2, rows * cols));
                let (gain, bias, old) = (noise(3, cols), noise(4, cols), noise(5, rows * cols));
                let c = case(1, dtype, 0..rows, cols, add);
                assert_close(&c.rig.get(c.y), &norm_f64(&x, &gain, &bias), 3e-6, ulp);
                let mut d_x = differences(&x, |x| inner(&d_y, &norm_f64(x, &gain, &bias)));
                if add {
                    d_x.iter_mut().zip(old).for_each(|(d, old)| *d += old);
                }
                // With two columns, variances can be near 0, and gradients are differences of large
                // numbers.
                let absolute = if cols == 2 { 1e-4 } else { 2e-5 };
                assert_close(&c.rig.get(c.d_x), &d_x, absolute, ulp);
                let d_gain = differences(&gain, |gain| inner(&d_y, &norm_f64(&x, gain, &bias)));
                assert_close(&c.rig.get(c.d_gain), &d_gain, 1e-5, ulp);
                let d_bias = differences(&bias, |bias| inner(&d_y, &norm_f64(&x, &gain, bias)));
                assert_close(&c.rig.get(c.d_bias), &d_bias, 1e-5, 0.0);
            }
        }
    }

    fn rms_norm_f64(x: &[f64], gain: &[f64]) -> Vec<f64> {
        let row = |x: &[f64]| {
            let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (square + 1e-2).sqrt();
            x.iter().zip(gain).map(|(x, gain)| x * scale * gain).collect::<Vec<_>>()
        };
        x.chunks(gain.len()).flat_map(row).collect()
    }

    /// y, stats, d_x and d_gain of RMSNorm on some rows of an input.
    fn rms_case(
        threads: usize,
        dtype: Dtype,
        rows: std::ops::Range<usize>,
        cols: usize,
        add: bool,
    ) -> [Vec<f64>; 4] {
        let mut rig = Rig::new(threads);
        let shape = (rows.len(), cols);
        let part = |seed| noise(seed, rows.end * cols)[rows.start * cols..].to_vec();
        let (x, d_y) = (rig.put(dtype, shape, &part(1)), rig.put(dtype, shape, &part(2)));
        let gain = rig.put(dtype, (1, cols), &noise(3, cols));
        let (y, stats) = (rig.out(dtype, shape), rig.out(Dtype::F32, (rows.len(), 1)));
        let (d_x, d_gain) = (rig.put(dtype, shape, &part(5)), rig.out(Dtype::F32, (1, cols)));
        rig.run(&Op::RmsNorm { x, gain, y, stats, epsilon: 1e-2 });
        rig.run(&Op::RmsNormBackward { x, gain, stats, d_y, d_x, add, d_gain });
        [y, stats, d_x, d_gain].map(|t| rig.get(t))
    }

    #[test]
    fn rms_norm_and_its_gradients_are_the_formula_in_every_type() {
        for (dtype, ulp) in TYPES {
            for (rows, cols, add) in [(3, 2, false), (5, 37, true), (2, 128, false), (1, 300, true)]
            {
                let (x, d_y) = (noise(1, rows * cols), noise(2, rows * cols));
                let (gain, old) = (noise(3, cols), noise(5, rows * cols));
                let [y, _, got_x, got_gain] = rms_case(1, dtype, 0..rows, cols, add);
                assert_close(&y, &rms_norm_f64(&x, &gain), 3e-6, ulp);
                let mut d_x = differences(&x, |x| inner(&d_y, &rms_norm_f64(x, &gain)));
                if add {
                    d_x.iter_mut().zip(old).for_each(|(d, old)| *d += old);
                }
                assert_close(&got_x, &d_x, 2e-5, ulp);
                let d_gain = differences(&gain, |gain| inner(&d_y, &rms_norm_f64(&x, gain)));
                assert_close(&got_gain, &d_gain, 1e-5, 2.0 * ulp);
            }
        }
    }

    #[test]
    fn rows_and_threads_of_rms_norm_change_no_bit() {
        let (all, part) =
            (rms_case(1, Dtype::Bf16, 0..9, 333, true), rms_case(1, Dtype::Bf16, 4..7, 333, true));
        for (of, each) in [(0, 333), (1, 1), (2, 333)] {
            assert_eq!(all[of][4 * each..7 * each], part[of]);
        }
        let run = |threads| rms_case(threads, Dtype::Bf16, 0..101, 777, true);
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn a_row_does_not_depend_on_the_others() {
        for (dtype, _) in TYPES {
            let (cols, n) = (333, 9);
            let (all, part) =
                (case(1, dtype, 0..n, cols, false), case(1, dtype, 4..7, cols, false));
            let same = |a: Tensor, b: Tensor, each: usize| {
                assert_eq!(all.rig.get(a)[4 * each..7 * each], part.rig.get(b));
            };
            same(all.y, part.y, cols);
            same(all.d_x, part.d_x, cols);
            same(all.stats, part.stats, 2);
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let run = |threads| {
            let c = case(threads, Dtype::Bf16, 0..101, 777, true);
            [c.y, c.stats, c.d_x, c.d_gain, c.d_bias].map(|t| c.rig.get(t))
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn too_little_scratch_is_an_error() {
        let mut rig = Rig::new(1);
        let cols = 1 << 20;
        let [x, gain, bias, y] = [(); 4].map(|()| rig.out(Dtype::F16, (1, cols)));
        let stats = rig.out(Dtype::F32, (1, 2));
        let error = rig.try_run(&Op::LayerNorm { x, gain, bias, y, stats, epsilon: 1e-5 });
        assert!(error.expect_err("scratch").contains("scratch"));
    }
}
