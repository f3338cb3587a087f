//! Ops of the gated delta rule: gates, norm and convolution around it. `rule.rs` has the rule itself.
//! All of them compute in fp32.

use super::math::{exp, read, sigmoid, sum, vectorised, write};
use super::{Memory, is_values, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Slice, Workers, norm_floats};
use crate::op::Op;
use crate::{BLOCK, Tensor, View, ViewMut};
use std::ops::Range;

mod convolution;
mod rule;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Convolution { .. } | Op::ConvolutionBackward { .. } => {
            return convolution::run(op, m, workers);
        }
        Op::DeltaRule { .. } | Op::DeltaRuleBackward { .. } => return rule::run(op, m, workers),
        Op::DeltaGates { x, decay, bias, gates } => {
            let heads = decay.len();
            let of = Gates { x: values(m, x)?, decay: values(m, decay)?, bias: values(m, bias)? };
            let gates = Slice { data: slice_mut::<f32>(m, gates)?, each: 2 * heads };
            workers.split(x.shape().0, x.len(), gates, &|rows, gates, _| {
                of.forward(rows, heads, gates.data);
            });
        }
        Op::DeltaGatesBackward { x, decay, bias, d_gates, d_x, d_decay, d_bias } => {
            let (rows, heads) = (x.shape().0, decay.len());
            let of = Gates { x: values(m, x)?, decay: values(m, decay)?, bias: values(m, bias)? };
            let d_gates = slice::<f32>(m, d_gates)?;
            let (d_decay, d_bias) = (values_mut(m, d_decay)?, values_mut(m, d_bias)?);
            let d_x = Rows { view: values_mut(m, d_x)?, each: 2 * heads };
            let each = |rows: Range<usize>, mut d_x: Rows<'_>, sums: &mut [f32], _: &mut [f32]| {
                of.backward(rows, heads, d_gates, &mut d_x.view, sums);
            };
            return workers.sum_rows(rows, 2 * heads, x.len(), d_x, &each, |sums| {
                let [mut d_decay, mut d_bias] = [d_decay, d_bias];
                d_decay.store(0, &sums[..heads]);
                d_bias.store(0, &sums[heads..]);
            });
        }
        Op::GatedNorm { x, gate, gain, y, epsilon } => {
            let of = NormInputs::new(m, workers, [x, gate, gain], epsilon)?;
            let y = Rows { view: values_mut(m, y)?, each: of.cols };
            workers.split(x.shape().0, x.len(), y, &|rows, mut y, scratch| {
                of.forward(rows, &mut y.view, &mut scratch.floats);
            });
        }
        Op::GatedNormBackward { x, gate, gain, d_y, d_x, d_gate, d_gain, epsilon } => {
            let of = NormInputs::new(m, workers, [x, gate, gain], epsilon)?;
            is_values(d_gain)?;
            let (d_y, mut d_gain) = (values(m, d_y)?, m.write(d_gain));
            let [d_x, d_gate] = [values_mut(m, d_x)?, values_mut(m, d_gate)?]
                .map(|view| Rows { view, each: of.cols });
            let each = |rows: Range<usize>,
                        (mut d_x, mut d_gate): (Rows<'_>, Rows<'_>),
                        sums: &mut [f32],
                        floats: &mut [f32]| {
                of.backward(rows, d_y, [&mut d_x.view, &mut d_gate.view], sums, floats);
            };
            let (rows, work) = (x.shape().0, x.len());
            return workers.sum_rows(rows, of.gain.len(), work, (d_x, d_gate), &each, |sums| {
                d_gain.store(0, sums);
            });
        }
        Op::SigmoidGate { x, gate, y } => {
            let (x, gate) = (values(m, x)?, values(m, gate)?);
            let len = x.len();
            let y = Rows { view: values_mut(m, y)?, each: BLOCK };
            workers.split(len.div_ceil(BLOCK), len, y, &|blocks, mut y, _| {
                sigmoid_gate(x, gate, blocks.start * BLOCK, &mut y.view);
            });
        }
        Op::SigmoidGateBackward { x, gate, d, d_gate } => {
            let (x, gate) = (values(m, x)?, values(m, gate)?);
            let len = x.len();
            let [d, d_gate] =
                [values_mut(m, d)?, values_mut(m, d_gate)?].map(|view| Rows { view, each: BLOCK });
            workers.split(len.div_ceil(BLOCK), len, (d, d_gate), &|blocks, (mut d, mut to), _| {
                let first = blocks.start * BLOCK;
                sigmoid_gate_backward(x, gate, first, &mut d.view, &mut to.view);
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// silu(x) and its slope.
#[inline(always)]
const fn silu(x: f32) -> [f32; 2] {
    let s = sigmoid(x);
    [x * s, (x * (1.0 - s)).mul_add(s, s)]
}

/// ln(1 + e^x), also where 1 + e^x rounds to 1.
fn softplus(x: f32) -> f32 {
    let e = exp(-x.abs());
    let u = 1.0 + e;
    let small = if u == 1.0 { e } else { u.ln() * (e / (u - 1.0)) };
    if x > 0.0 { x + small } else { small }
}

/// Slices of the given lengths from the start of `floats`.
fn cut<const N: usize>(mut floats: &mut [f32], lengths: [usize; N]) -> [&mut [f32]; N] {
    lengths.map(|length| {
        let (first, rest) = std::mem::take(&mut floats).split_at_mut(length);
        floats = rest;
        first
    })
}

/// Inputs of the gates: x (rows, 2 H), decay (H) and bias (H).
#[derive(Clone, Copy)]
struct Gates<'a> {
    x: View<'a>,
    decay: View<'a>,
    bias: View<'a>,
}

impl Gates<'_> {
    fn forward(self, rows: Range<usize>, heads: usize, gates: &mut [f32]) {
        for (row, gates) in rows.zip(gates.chunks_exact_mut(2 * heads)) {
            let (betas, decays) = gates.split_at_mut(heads);
            for (head, (beta, g)) in betas.iter_mut().zip(decays).enumerate() {
                *beta = sigmoid(at(&self.x, row * 2 * heads + head));
                let x = at(&self.x, (row * 2 + 1) * heads + head) + at(&self.bias, head);
                *g = -exp(at(&self.decay, head)) * softplus(x);
            }
        }
    }

    /// Sums the gradients of `decay`, then those of `bias`.
    fn backward(
        self,
        rows: Range<usize>,
        heads: usize,
        d_gates: &[f32],
        d_x: &mut ViewMut<'_>,
        sums: &mut [f32],
    ) {
        sums.fill(0.0);
        let (d_decay, d_bias) = sums.split_at_mut(heads);
        for (place, row) in rows.enumerate() {
            for head in 0..heads {
                let (of_beta, of_g) = (row * 2 * heads + head, (row * 2 + 1) * heads + head);
                let beta = sigmoid(at(&self.x, of_beta));
                let x = at(&self.x, of_g) + at(&self.bias, head);
                let rate = -exp(at(&self.decay, head));
                let d_g = d_gates[of_g];
                let d = d_g * rate * sigmoid(x);
                d_x.store(place * 2 * heads + head, &[d_gates[of_beta] * beta * (1.0 - beta)]);
                d_x.store((place * 2 + 1) * heads + head, &[d]);
                d_decay[head] += d_g * (rate * softplus(x));
                d_bias[head] += d;
            }
        }
    }
}

/// One element.
fn at(view: &View<'_>, i: usize) -> f32 {
    let mut one = [0.0];
    view.load(i, &mut one);
    one[0]
}

/// Inputs of the gated norm: x and gate (rows, cols), gain (D).
#[derive(Clone, Copy)]
struct NormInputs<'a> {
    x: View<'a>,
    gate: View<'a>,
    gain: View<'a>,
    cols: usize,
    epsilon: f32,
}

impl<'a> NormInputs<'a> {
    fn new(
        m: &'a impl Memory,
        workers: &Workers,
        [x, gate, gain]: [Tensor; 3],
        epsilon: f32,
    ) -> Result<Self, String> {
        workers.need(norm_floats(gain.len()))?;
        let cols = x.shape().1;
        Ok(Self { x: values(m, x)?, gate: values(m, gate)?, gain: values(m, gain)?, cols, epsilon })
    }

    /// Places of the heads of `rows`: in x, and in the rows from `rows.start` on.
    fn heads(self, rows: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        let first = rows.start * self.cols;
        let all = first..rows.end * self.cols;
        all.step_by(self.gain.len()).map(move |at| (at, at - first))
    }

    fn forward(self, rows: Range<usize>, y: &mut ViewMut<'_>, floats: &mut [f32]) {
        let dim = self.gain.len();
        vectorised(
            #[inline(always)]
            || {
                let [gains, xs, zs, ys] = cut(floats, [dim; 4]);
                let gain = read(&self.gain, 0, dim, gains);
                for (from, to) in self.heads(rows.clone()) {
                    let x = read(&self.x, from, dim, xs);
                    let z = read(&self.gate, from, dim, zs);
                    let scale = scale_of(x, self.epsilon);
                    write(
                        y,
                        to,
                        dim,
                        ys,
                        false,
                        #[inline(always)]
                        |y| {
                            for (((y, x), z), gain) in y.iter_mut().zip(x).zip(z).zip(gain) {
                                *y = x * scale * gain * silu(*z)[0];
                            }
                        },
                    );
                }
            },
        );
    }

    /// d_x = (g - n mean(g n)) / root with g = d_y gain silu(z) and n = x / root; d_z = d_y gain n
    /// silu'(z). Sums d_y n silu(z), the gradient of the gain, over the heads of the rows in order.
    fn backward(
        self,
        rows: Range<usize>,
        d_y: View<'_>,
        [d_x, d_gate]: [&mut ViewMut<'_>; 2],
        sums: &mut [f32],
        floats: &mut [f32],
    ) {
        let dim = self.gain.len();
        let per_element = 1.0 / dim as f32;
        sums.fill(0.0);
        vectorised(
            #[inline(always)]
            || {
                let [normal, ds, zs, gains] = cut(floats, [dim; 4]);
                let gain = read(&self.gain, 0, dim, gains);
                for (from, to) in self.heads(rows.clone()) {
                    self.x.load(from, normal);
                    d_y.load(from, ds);
                    self.gate.load(from, zs);
                    let scale = scale_of(normal, self.epsilon);
                    let terms = normal.iter_mut().zip(&mut *ds).zip(&mut *zs);
                    for (((n, d), z), (gain, sum)) in terms.zip(gain.iter().zip(&mut *sums)) {
                        let [value, slope] = silu(*z);
                        *n *= scale;
                        *z = *d * gain * *n * slope;
                        *sum = (*d * *n).mul_add(value, *sum);
                        *d = *d * gain * value;
                    }
                    d_gate.store(to, zs);
                    let mean = super::math::dot(ds, normal) * per_element;
                    for (d, n) in ds.iter_mut().zip(&*normal) {
                        *d = n.mul_add(-mean, *d) * scale;
                    }
                    d_x.store(to, ds);
                }
            },
        );
    }
}

/// 1 / sqrt(mean(x^2) + epsilon)
#[inline(always)]
fn scale_of(x: &[f32], epsilon: f32) -> f32 {
    1.0 / sum(x, |x| x * x).mul_add(1.0 / x.len() as f32, epsilon).sqrt()
}

/// y = x sigmoid(gate), from element `first` of x on.
fn sigmoid_gate(x: View<'_>, gate: View<'_>, first: usize, y: &mut ViewMut<'_>) {
    vectorised(
        #[inline(always)]
        || {
            let [mut xs, mut zs, mut ys] = [[0.0; BLOCK]; 3];
            for at in (0..y.len()).step_by(BLOCK) {
                let n = BLOCK.min(y.len() - at);
                let x = read(&x, first + at, n, &mut xs);
                let z = read(&gate, first + at, n, &mut zs);
                write(
                    y,
                    at,
                    n,
                    &mut ys,
                    false,
                    #[inline(always)]
                    |y| y.iter_mut().zip(x).zip(z).for_each(|((y, x), z)| *y = x * sigmoid(*z)),
                );
            }
        },
    );
}

/// Replaces d by d sigmoid(gate), from element `first` of x on; d_gate = d x sigmoid'(gate).
fn sigmoid_gate_backward(
    x: View<'_>,
    gate: View<'_>,
    first: usize,
    d: &mut ViewMut<'_>,
    d_gate: &mut ViewMut<'_>,
) {
    vectorised(
        #[inline(always)]
        || {
            let [mut xs, mut zs, mut ds] = [[0.0; BLOCK]; 3];
            for at in (0..d.len()).step_by(BLOCK) {
                let n = BLOCK.min(d.len() - at);
                let x = read(&x, first + at, n, &mut xs);
                gate.load(first + at, &mut zs[..n]);
                d.as_view().load(at, &mut ds[..n]);
                for ((d, z), x) in ds[..n].iter_mut().zip(&mut zs).zip(x) {
                    let s = sigmoid(*z);
                    (*d, *z) = (*d * s, *d * x * (s * (1.0 - s)));
                }
                d.store(at, &ds[..n]);
                d_gate.store(at, &zs[..n]);
            }
        },
    );
}

#[cfg(test)]
mod tests;
