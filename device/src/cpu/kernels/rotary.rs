//! Rotary positions by halves (arXiv 2104.09864; `rotate_half` of transformers), with the norm of
//! each head of q and k if the model has this norm. Arithmetic between load and store is f32.

use super::documents::Starts;
use super::math::{dot, read, sum, vectorised};
use super::{Memory, not_a_kernel, slice, values, values_mut};
use crate::cpu::workers::{Rows, Workers, rotary_floats};
use crate::op::{HeadNorm, Heads, Op};
use crate::{Tensor, View, ViewMut};
use std::ops::Range;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Rotary { qkv, table, heads, starts, norm } => {
            let shape = RotaryShape::new(qkv, heads, Starts::new(m, starts, 0, heads.seq_len)?);
            workers.need(rotary_floats(shape.dim))?;
            let work = qkv.len();
            let (table, qkv) = (slice::<f32>(m, table)?, values_mut(m, qkv)?);
            let qkv = Rows { view: qkv, each: shape.columns };
            let Some(HeadNorm { q_gain, k_gain, raw, epsilon }) = norm else {
                workers.split(shape.rows, work, qkv, &|rows, mut qkv, scratch| {
                    rotate(shape, table, rows, &mut qkv.view, None, &mut scratch.floats);
                });
                return Ok(());
            };
            let gains = [values(m, q_gain)?, values(m, k_gain)?];
            let raw = Rows { view: values_mut(m, raw)?, each: shape.rotated() };
            workers.split(shape.rows, work, (qkv, raw), &|rows, (mut qkv, mut raw), scratch| {
                let norm = Some((gains, &mut raw.view, epsilon));
                rotate(shape, table, rows, &mut qkv.view, norm, &mut scratch.floats);
            });
        }
        Op::RotaryBackward { d_qkv, table, heads, starts, norm } => {
            let shape = RotaryShape::new(d_qkv, heads, Starts::new(m, starts, 0, heads.seq_len)?);
            workers.need(rotary_floats(shape.dim))?;
            let work = d_qkv.len();
            let (table, d_qkv) = (slice::<f32>(m, table)?, values_mut(m, d_qkv)?);
            let d_qkv = Rows { view: d_qkv, each: shape.columns };
            let Some((HeadNorm { q_gain, k_gain, raw, epsilon }, grads)) = norm else {
                workers.split(shape.rows, work, d_qkv, &|rows, mut d_qkv, scratch| {
                    turn_back(shape, table, rows, &mut d_qkv.view, None, &mut scratch.floats);
                });
                return Ok(());
            };
            let inputs = Inputs {
                gains: [values(m, q_gain)?, values(m, k_gain)?],
                raw: values(m, raw)?,
                epsilon,
            };
            let mut d_gains = [values_mut(m, grads.q_gain)?, values_mut(m, grads.k_gain)?];
            let f = |rows: Range<usize>, mut d: Rows<'_>, sums: &mut [f32], floats: &mut [f32]| {
                sums.fill(0.0);
                let norm = Some(NormGradient { inputs, sums });
                turn_back(shape, table, rows, &mut d.view, norm, floats);
            };
            return workers.sum_rows(shape.rows, 2 * shape.dim, work, d_qkv, &f, |sums| {
                let (q, k) = sums.split_at(shape.dim);
                d_gains[0].store(0, q);
                d_gains[1].store(0, k);
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct RotaryShape<'a> {
    heads: Heads,
    starts: Starts<'a>,
    rows: usize,
    /// Elements of a row of qkv.
    columns: usize,
    /// Elements of a head (D).
    dim: usize,
}

impl<'a> RotaryShape<'a> {
    const fn new(qkv: Tensor, heads: Heads, starts: Starts<'a>) -> Self {
        let (rows, columns) = qkv.shape();
        Self { heads, starts, rows, columns, dim: heads.dim(columns) }
    }

    /// Elements of a row that belong to q and k.
    const fn rotated(self) -> usize {
        (self.heads.count + self.heads.kv_count) * self.dim
    }

    /// Cosines and sines of row `row`, D/2 each.
    fn angles(self, table: &[f32], row: usize) -> (&[f32], &[f32]) {
        table[self.starts.position(row) * self.dim..][..self.dim].split_at(self.dim / 2)
    }

    /// Iterates over the heads of q (0) and k (1), with the index of their first element in a row.
    fn each_head(self) -> impl Iterator<Item = (usize, usize)> {
        let Heads { count, kv_count, .. } = self.heads;
        (0..count + kv_count).map(move |head| (usize::from(head >= count), head * self.dim))
    }
}

/// Gains of q and k, storage for q and k before the norm, and epsilon.
type Norm<'a, 'b> = ([View<'a>; 2], &'a mut ViewMut<'b>, f32);

fn rotate(
    shape: RotaryShape<'_>,
    table: &[f32],
    rows: Range<usize>,
    qkv: &mut ViewMut<'_>,
    mut norm: Option<Norm<'_, '_>>,
    floats: &mut [f32],
) {
    let dim = shape.dim;
    vectorised(
        #[inline(always)]
        || {
            let (x, rest) = floats.split_at_mut(dim);
            let gains = &mut rest[..dim];
            for (at, row) in rows.clone().enumerate() {
                let angles = shape.angles(table, row);
                for (part, first) in shape.each_head() {
                    let from = at * shape.columns + first;
                    qkv.as_view().load(from, x);
                    if let Some((gain, raw, epsilon)) = &mut norm {
                        raw.store(at * shape.rotated() + first, x);
                        let scale = inverse_root(x, *epsilon);
                        let gain = read(&gain[part], 0, dim, gains);
                        x.iter_mut().zip(gain).for_each(|(x, gain)| *x *= scale * gain);
                    }
                    let (low, high) = x.split_at_mut(dim / 2);
                    let halves = low.iter_mut().zip(high);
                    for ((x, y), (cos, sin)) in halves.zip(angles.0.iter().zip(angles.1)) {
                        (*x, *y) = ((*x).mul_add(*cos, -*y * sin), (*y).mul_add(*cos, *x * sin));
                    }
                    qkv.store(from, x);
                }
            }
        },
    );
}

/// 1 / sqrt(mean(x^2) + epsilon)
#[inline(always)]
fn inverse_root(x: &[f32], epsilon: f32) -> f32 {
    1.0 / sum(x, |x| x * x).mul_add(1.0 / x.len() as f32, epsilon).sqrt()
}

/// Inputs of a norm's gradient: the gains of q and k, and q and k before the norm.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    gains: [View<'a>; 2],
    raw: View<'a>,
    epsilon: f32,
}

/// Inputs and sums of a norm's gradient over some rows.
struct NormGradient<'a> {
    inputs: Inputs<'a>,
    /// Sums for d_q_gain and d_k_gain, D elements each.
    sums: &'a mut [f32],
}

/// Rotates gradients back. Adds the gradients of the gains over these rows to `norm`.
fn turn_back(
    shape: RotaryShape<'_>,
    table: &[f32],
    rows: Range<usize>,
    d_qkv: &mut ViewMut<'_>,
    mut norm: Option<NormGradient<'_>>,
    floats: &mut [f32],
) {
    let dim = shape.dim;
    vectorised(
        #[inline(always)]
        || {
            let (d, rest) = floats.split_at_mut(dim);
            let (normal, rest) = rest.split_at_mut(dim);
            let gains = &mut rest[..dim];
            for (at, row) in rows.clone().enumerate() {
                let angles = shape.angles(table, row);
                for (part, first) in shape.each_head() {
                    let from = at * shape.columns + first;
                    d_qkv.as_view().load(from, d);
                    let (low, high) = d.split_at_mut(dim / 2);
                    let halves = low.iter_mut().zip(high);
                    for ((x, y), (cos, sin)) in halves.zip(angles.0.iter().zip(angles.1)) {
                        (*x, *y) = ((*x).mul_add(*cos, *y * sin), (*y).mul_add(*cos, -*x * sin));
                    }
                    if let Some(NormGradient { inputs, sums }) = &mut norm {
                        inputs.raw.load(row * shape.rotated() + first, normal);
                        let scale = inverse_root(normal, inputs.epsilon);
                        let gain = read(&inputs.gains[part], 0, dim, gains);
                        let sums = &mut sums[part * dim..][..dim];
                        let terms = d.iter_mut().zip(&mut *normal).zip(gain).zip(sums);
                        for (((d, n), gain), sum) in terms {
                            *n *= scale;
                            *sum = d.mul_add(*n, *sum);
                            *d *= gain;
                        }
                        let mean = dot(d, normal) / dim as f32;
                        let both = d.iter_mut().zip(&*normal);
                        both.for_each(|(d, n)| *d = n.mul_add(-mean, *d) * scale);
                    }
                    d_qkv.store(from, d);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, TYPES, assert_close, differences, inner, noise, starts};
    use super::*;
    use crate::Dtype;
    use crate::op::HeadNormGrads;

    const EPSILON: f64 = 1e-2;

    fn heads() -> Heads {
        Heads { count: 6, kv_count: 2, first: 0, total: 6, seq_len: 5 }
    }

    /// (T, D): cosines and sines of some angles.
    fn table(seq_len: usize, dim: usize) -> Vec<f64> {
        let angle = |t: usize, i: usize| t as f64 * 10f64.powf(-2.0 * i as f64 / dim as f64);
        let row = |t| {
            let angles: Vec<f64> = (0..dim / 2).map(|i| angle(t, i)).collect();
            angles.iter().map(|a| a.cos()).chain(angles.iter().map(|a| a.sin())).collect::<Vec<_>>()
        };
        (0..seq_len).flat_map(row).collect()
    }

    /// Documents of some rows of samples of 5.
    fn documents(rows: usize) -> Vec<i32> {
        starts(5, &[2, 3, 1, 1, 3].repeat(rows.div_ceil(5)))[..rows].to_vec()
    }

    /// The plain formula for `rows` rows of heads.
    fn rotary_f64(
        qkv: &[f64],
        rows: usize,
        dim: usize,
        packed: bool,
        gains: Option<[&[f64]; 2]>,
    ) -> Vec<f64> {
        let starts = if packed { documents(rows) } else { vec![0; rows] };
        let (heads, table) = (heads(), table(5, dim));
        let columns = qkv.len() / rows;
        let mut out = qkv.to_vec();
        for (row, head) in (0..rows).flat_map(|r| (0..8).map(move |h| (r, h))) {
            let at = row * columns + head * dim;
            let mut x = qkv[at..at + dim].to_vec();
            if let Some(gains) = gains {
                let gain = gains[usize::from(head >= heads.count)];
                let square = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
                let scale = 1.0 / (square + EPSILON).sqrt();
                x.iter_mut().zip(gain).for_each(|(x, gain)| *x *= scale * gain);
            }
            let angles = &table[(row % heads.seq_len - starts[row] as usize) * dim..][..dim];
            for i in 0..dim / 2 {
                let (a, b, cos, sin) = (x[i], x[i + dim / 2], angles[i], angles[i + dim / 2]);
                out[at + i] = a * cos - b * sin;
                out[at + i + dim / 2] = b * cos + a * sin;
            }
        }
        out
    }

    /// Rotated qkv, d_qkv rotated back, and the gradients of the gains.
    fn run_ops(
        threads: usize,
        dtype: Dtype,
        rows: usize,
        dim: usize,
        normed: bool,
        packed: bool,
    ) -> Vec<Vec<f64>> {
        let (mut rig, heads, n) = (Rig::new(threads), heads(), rows * 10 * dim);
        let table = rig.put(Dtype::F32, (heads.seq_len, dim), &table(heads.seq_len, dim));
        let qkv = rig.put(dtype, (rows, 10 * dim), &noise(1, n));
        let d_qkv = rig.put(dtype, (rows, 10 * dim), &noise(2, n));
        let mut gain = |seed| rig.put(dtype, (1, dim), &noise(seed, dim));
        let (q_gain, k_gain) = (gain(3), gain(4));
        let raw = rig.out(dtype, (rows, 8 * dim));
        let grads = HeadNormGrads {
            q_gain: rig.out(Dtype::F32, (1, dim)),
            k_gain: rig.out(Dtype::F32, (1, dim)),
        };
        let norm = HeadNorm { q_gain, k_gain, raw, epsilon: EPSILON as f32 };
        let starts = packed.then(|| rig.put_ints(&documents(rows)));
        rig.run(&Op::Rotary { qkv, table, heads, starts, norm: normed.then_some(norm) });
        let norm = normed.then_some((norm, grads));
        rig.run(&Op::RotaryBackward { d_qkv, table, heads, starts, norm });
        [qkv, d_qkv, grads.q_gain, grads.k_gain].map(|t| rig.get(t)).to_vec()
    }

    #[test]
    fn rotation_and_its_gradients_are_the_formula_in_every_type() {
        for (dtype, ulp) in TYPES {
            for (rows, dim, normed, packed) in [
                (5, 2, false, false),
                (10, 6, true, false),
                (15, 16, true, true),
                (5, 64, false, true),
            ] {
                let (x, d) = (noise(1, rows * 10 * dim), noise(2, rows * 10 * dim));
                let (q, k) = (noise(3, dim), noise(4, dim));
                let formula = |x: &[f64], q: &[f64], k: &[f64]| {
                    rotary_f64(x, rows, dim, packed, normed.then_some([q, k]))
                };
                let got = run_ops(1, dtype, rows, dim, normed, packed);
                assert_close(&got[0], &formula(&x, &q, &k), 3e-6, ulp);
                let want = differences(&x, |x| inner(&d, &formula(x, &q, &k)));
                // q and k are rounded before the norm.
                assert_close(&got[1], &want, 2e-5, 2.0 * ulp);
                if normed {
                    let want = differences(&q, |q| inner(&d, &formula(&x, q, &k)));
                    assert_close(&got[2], &want, 1e-4, 4.0 * ulp);
                    let want = differences(&k, |k| inner(&d, &formula(&x, &q, k)));
                    assert_close(&got[3], &want, 1e-4, 4.0 * ulp);
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        for normed in [false, true] {
            let run = |threads| run_ops(threads, Dtype::Bf16, 400, 16, normed, normed);
            assert_eq!(run(1), run(3));
        }
    }
}
