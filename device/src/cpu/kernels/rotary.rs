//! Rotary positions by halves (arXiv 2104.09864; `rotate_half` of transformers) of the first
//! elements of each head, with the norm of each head of q and k if the model has this norm.
//! Arithmetic between load and store is f32.

use super::documents::Starts;
use super::math::{dot, factors, sum, vectorised};
use super::{Memory, not_a_kernel, slice, values, values_mut};
use crate::cpu::workers::{Rows, Workers, rotary_floats};
use crate::op::{HeadNorm, Heads, Op};
use crate::{Tensor, View, ViewMut};
use std::ops::Range;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Rotary { qkv, table, heads, starts, norm } => {
            let starts = Starts::new(m, starts, 0, heads.seq_len)?;
            let shape = RotaryShape::new(qkv, table, heads, starts);
            workers.need(rotary_floats(shape.dim))?;
            let work = qkv.len();
            let (table, qkv) = (slice::<f32>(m, table)?, values_mut(m, qkv)?);
            let qkv = Rows { view: qkv, each: shape.columns };
            let Some(HeadNorm { q_gain, k_gain, raw, epsilon, offset }) = norm else {
                workers.split(shape.rows, work, qkv, &|rows, mut qkv, scratch| {
                    rotate(shape, table, rows, &mut qkv.view, None, &mut scratch.floats);
                });
                return Ok(());
            };
            let gains = [values(m, q_gain)?, values(m, k_gain)?];
            let gains = Gains { gains, offset, epsilon };
            let raw = Rows { view: values_mut(m, raw)?, each: shape.rotated() };
            workers.split(shape.rows, work, (qkv, raw), &|rows, (mut qkv, mut raw), scratch| {
                let norm = Some((gains, &mut raw.view));
                rotate(shape, table, rows, &mut qkv.view, norm, &mut scratch.floats);
            });
        }
        Op::RotaryBackward { d_qkv, table, heads, starts, norm } => {
            let starts = Starts::new(m, starts, 0, heads.seq_len)?;
            let shape = RotaryShape::new(d_qkv, table, heads, starts);
            workers.need(rotary_floats(shape.dim))?;
            let work = d_qkv.len();
            let (table, d_qkv) = (slice::<f32>(m, table)?, values_mut(m, d_qkv)?);
            let d_qkv = Rows { view: d_qkv, each: shape.columns };
            let Some((HeadNorm { q_gain, k_gain, raw, epsilon, offset }, grads)) = norm else {
                workers.split(shape.rows, work, d_qkv, &|rows, mut d_qkv, scratch| {
                    turn_back(shape, table, rows, &mut d_qkv.view, None, &mut scratch.floats);
                });
                return Ok(());
            };
            let gains = [values(m, q_gain)?, values(m, k_gain)?];
            let inputs = Inputs { of: Gains { gains, offset, epsilon }, raw: values(m, raw)? };
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
    /// First elements of a head that turn (d).
    turned: usize,
}

impl<'a> RotaryShape<'a> {
    const fn new(qkv: Tensor, table: Tensor, heads: Heads, starts: Starts<'a>) -> Self {
        let (rows, columns) = qkv.shape();
        let (dim, turned) = (heads.dim(columns), heads.turned(table));
        Self { heads, starts, rows, columns, dim, turned }
    }

    /// Elements of a row that belong to q and k.
    const fn rotated(self) -> usize {
        (self.heads.count + self.heads.kv_count) * self.dim
    }

    /// Cosines and sines of row `row`, d/2 each.
    fn angles(self, table: &[f32], row: usize) -> (&[f32], &[f32]) {
        table[self.starts.position(row) * self.turned..][..self.turned].split_at(self.turned / 2)
    }

    /// Iterates over the heads of q (0) and k (1), with the index of their first element in a row.
    fn each_head(self) -> impl Iterator<Item = (usize, usize)> {
        let Heads { count, kv_count, .. } = self.heads;
        (0..count + kv_count).map(move |head| (usize::from(head >= count), head * self.dim))
    }
}

/// Gains of q and k (D each), what is added to them, and epsilon.
#[derive(Clone, Copy)]
struct Gains<'a> {
    gains: [View<'a>; 2],
    offset: f32,
    epsilon: f32,
}

impl Gains<'_> {
    /// Factors of the elements of a head of q (0) or k (1).
    #[inline(always)]
    fn factors<'b>(&'b self, part: usize, buffer: &'b mut [f32]) -> &'b [f32] {
        factors(&self.gains[part], self.offset, buffer)
    }

    /// 1 / sqrt(mean(x^2) + epsilon)
    #[inline(always)]
    fn inverse_root(&self, x: &[f32]) -> f32 {
        1.0 / sum(x, |x| x * x).mul_add(1.0 / x.len() as f32, self.epsilon).sqrt()
    }
}

/// Gains of q and k, and storage for q and k before the norm.
type Norm<'a, 'b> = (Gains<'a>, &'a mut ViewMut<'b>);

fn rotate(
    shape: RotaryShape<'_>,
    table: &[f32],
    rows: Range<usize>,
    qkv: &mut ViewMut<'_>,
    mut norm: Option<Norm<'_, '_>>,
    floats: &mut [f32],
) {
    let (dim, turned) = (shape.dim, shape.turned);
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
                    if let Some((of, raw)) = &mut norm {
                        raw.store(at * shape.rotated() + first, x);
                        let scale = of.inverse_root(x);
                        let gain = of.factors(part, gains);
                        x.iter_mut().zip(gain).for_each(|(x, gain)| *x *= scale * gain);
                    }
                    let (low, high) = x[..turned].split_at_mut(turned / 2);
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

/// Inputs of a norm's gradient: the gains of q and k, and q and k before the norm.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    of: Gains<'a>,
    raw: View<'a>,
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
    let (dim, turned) = (shape.dim, shape.turned);
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
                    let (low, high) = d[..turned].split_at_mut(turned / 2);
                    let halves = low.iter_mut().zip(high);
                    for ((x, y), (cos, sin)) in halves.zip(angles.0.iter().zip(angles.1)) {
                        (*x, *y) = ((*x).mul_add(*cos, *y * sin), (*y).mul_add(*cos, -*x * sin));
                    }
                    if let Some(NormGradient { inputs, sums }) = &mut norm {
                        inputs.raw.load(row * shape.rotated() + first, normal);
                        let scale = inputs.of.inverse_root(normal);
                        let gain = inputs.of.factors(part, gains);
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

    /// (T, d): cosines and sines of some angles.
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

    /// Sizes and options of a test.
    #[derive(Clone, Copy)]
    struct RotaryCase {
        rows: usize,
        dim: usize,
        /// Elements of a head that turn.
        turned: usize,
        /// Offset of the gains, if heads are normed.
        offset: Option<f32>,
        packed: bool,
    }

    /// The plain formula.
    fn rotary_f64(qkv: &[f64], case: RotaryCase, gains: [&[f64]; 2]) -> Vec<f64> {
        let RotaryCase { rows, dim, turned, offset, packed } = case;
        let starts = if packed { documents(rows) } else { vec![0; rows] };
        let (heads, table) = (heads(), table(5, turned));
        let columns = qkv.len() / rows;
        let mut out = qkv.to_vec();
        for (row, head) in (0..rows).flat_map(|r| (0..8).map(move |h| (r, h))) {
            let at = row * columns + head * dim;
            let mut x = qkv[at..at + dim].to_vec();
            if let Some(offset) = offset {
                let gain = gains[usize::from(head >= heads.count)];
                let square = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
                let scale = 1.0 / (square + EPSILON).sqrt();
                let factor = |gain: &f64| scale * (gain + f64::from(offset));
                x.iter_mut().zip(gain).for_each(|(x, gain)| *x *= factor(gain));
            }
            let position = row % heads.seq_len - starts[row] as usize;
            let (angles, half) = (&table[position * turned..][..turned], turned / 2);
            out[at..at + dim].copy_from_slice(&x);
            for i in 0..half {
                let (a, b, cos, sin) = (x[i], x[i + half], angles[i], angles[i + half]);
                out[at + i] = a * cos - b * sin;
                out[at + i + half] = b * cos + a * sin;
            }
        }
        out
    }

    /// Rotated qkv, d_qkv rotated back, and the gradients of the gains.
    fn run_ops(threads: usize, dtype: Dtype, case: RotaryCase) -> Vec<Vec<f64>> {
        let RotaryCase { rows, dim, turned, offset, packed } = case;
        let (mut rig, heads, n) = (Rig::new(threads), heads(), rows * 10 * dim);
        let table = rig.put(Dtype::F32, (heads.seq_len, turned), &table(heads.seq_len, turned));
        let qkv = rig.put(dtype, (rows, 10 * dim), &noise(1, n));
        let d_qkv = rig.put(dtype, (rows, 10 * dim), &noise(2, n));
        let mut gain = |seed| rig.put(dtype, (1, dim), &noise(seed, dim));
        let (q_gain, k_gain) = (gain(3), gain(4));
        let raw = rig.out(dtype, (rows, 8 * dim));
        let grads = HeadNormGrads {
            q_gain: rig.out(Dtype::F32, (1, dim)),
            k_gain: rig.out(Dtype::F32, (1, dim)),
        };
        let epsilon = EPSILON as f32;
        let norm = offset.map(|offset| HeadNorm { q_gain, k_gain, raw, epsilon, offset });
        let starts = packed.then(|| rig.put_ints(&documents(rows)));
        rig.run(&Op::Rotary { qkv, table, heads, starts, norm });
        let norm = norm.map(|norm| (norm, grads));
        rig.run(&Op::RotaryBackward { d_qkv, table, heads, starts, norm });
        [qkv, d_qkv, grads.q_gain, grads.k_gain].map(|t| rig.get(t)).to_vec()
    }

    #[test]
    fn rotation_and_its_gradients_are_the_formula_in_every_type() {
        let case =
            |rows, (dim, turned), offset, packed| RotaryCase { rows, dim, turned, offset, packed };
        for (dtype, ulp) in TYPES {
            for case in [
                case(5, (2, 2), None, false),
                case(10, (6, 6), Some(0.0), false),
                case(15, (16, 16), Some(0.0), true),
                case(5, (64, 64), None, true),
                // Offsets of gains, and heads of which the first elements turn alone.
                case(10, (16, 16), Some(1.0), false),
                case(10, (16, 4), None, false),
                case(5, (10, 6), Some(1.0), true),
            ] {
                let RotaryCase { rows, dim, .. } = case;
                let (x, d) = (noise(1, rows * 10 * dim), noise(2, rows * 10 * dim));
                let (q, k) = (noise(3, dim), noise(4, dim));
                let formula = |x: &[f64], q: &[f64], k: &[f64]| rotary_f64(x, case, [q, k]);
                let got = run_ops(1, dtype, case);
                assert_close(&got[0], &formula(&x, &q, &k), 3e-6, ulp);
                let want = differences(&x, |x| inner(&d, &formula(x, &q, &k)));
                // q and k are rounded before the norm.
                assert_close(&got[1], &want, 2e-5, 2.0 * ulp);
                if case.offset.is_some() {
                    let want = differences(&q, |q| inner(&d, &formula(&x, q, &k)));
                    assert_close(&got[2], &want, 1e-4, 4.0 * ulp);
                    let want = differences(&k, |k| inner(&d, &formula(&x, &q, k)));
                    assert_close(&got[3], &want, 1e-4, 4.0 * ulp);
                }
            }
        }
    }

    #[test]
    fn elements_that_do_not_turn_keep_their_bits() {
        let case = RotaryCase { rows: 10, dim: 16, turned: 6, offset: None, packed: false };
        let got = run_ops(1, Dtype::F32, case);
        for (got, seed) in got.iter().zip([1, 2]) {
            let before = noise(seed, got.len());
            // The last two of the ten heads are values.
            for (i, (got, before)) in got.iter().zip(&before).enumerate() {
                if i % 16 >= 6 || i / 16 % 10 >= 8 {
                    assert_eq!(got, before, "element {i}");
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        for offset in [None, Some(1.0)] {
            let (packed, turned) = (offset.is_some(), if offset.is_some() { 6 } else { 16 });
            let case = RotaryCase { rows: 400, dim: 16, turned, offset, packed };
            let run = |threads| run_ops(threads, Dtype::Bf16, case);
            assert_eq!(run(1), run(3));
        }
    }
}
