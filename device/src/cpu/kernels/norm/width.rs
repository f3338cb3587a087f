//! The norm of q and of k over the columns of all heads of all ranks. Each rank sums its columns,
//! and a collective between two ops sums over the ranks.

use super::super::math::{dot, read, sum, vectorised};
use super::super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Slice, Workers};
use crate::op::{Heads, Op, WidthNorm};
use crate::{BLOCK, Tensor, View, ViewMut};
use std::ops::Range;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::WidthNormSums { qkv, raw, heads, sums } => {
            let shape = Columns::new(qkv, heads);
            let (rows, work) = (qkv.shape().0, qkv.len());
            let (qkv, raw) = (values(m, qkv)?, values_mut(m, raw)?);
            let raw = Rows { view: raw, each: shape.normed };
            let sums = Slice { data: slice_mut::<f32>(m, sums)?, each: 2 };
            workers.split(rows, work, (raw, sums), &|rows, (mut raw, sums), _| {
                sum_squares(shape, rows, qkv, &mut raw.view, sums.data);
            });
        }
        Op::WidthNorm { qkv, raw, norm } => {
            let shape = Columns::new(qkv, norm.heads);
            let (rows, work) = (qkv.shape().0, qkv.len());
            let inputs = Inputs::new(m, raw, norm)?;
            let sums = slice::<f32>(m, norm.sums)?;
            let qkv = Rows { view: values_mut(m, qkv)?, each: shape.all };
            workers.split(rows, work, qkv, &|rows, mut qkv, _| {
                apply(shape, rows, inputs, sums, &mut qkv.view);
            });
        }
        Op::WidthNormBackwardSums { d_qkv, raw, norm, dots } => {
            let shape = Columns::new(d_qkv, norm.heads);
            let (rows, work) = (d_qkv.shape().0, d_qkv.len());
            let inputs = Inputs::new(m, raw, norm)?;
            let d_qkv = values(m, d_qkv)?;
            let dots = Slice { data: slice_mut::<f32>(m, dots)?, each: 2 };
            workers.split(rows, work, dots, &|rows, dots, _| {
                sum_dots(shape, rows, inputs, d_qkv, dots.data);
            });
        }
        Op::WidthNormBackward { d_qkv, raw, norm, dots, d_gain } => {
            let shape = Columns::new(d_qkv, norm.heads);
            let (rows, work) = (d_qkv.shape().0, d_qkv.len());
            let inputs = Inputs::new(m, raw, norm)?;
            let (sums, dots) = (slice::<f32>(m, norm.sums)?, slice::<f32>(m, dots)?);
            let d_qkv = Rows { view: values_mut(m, d_qkv)?, each: shape.all };
            let mut d_gain = values_mut(m, d_gain)?;
            let each = |rows: Range<usize>, mut d: Rows<'_>, gains: &mut [f32], _: &mut [f32]| {
                gains.fill(0.0);
                let pairs = Pairs { sums, dots };
                turn_back(shape, rows, inputs, pairs, &mut d.view, gains);
            };
            return workers.sum_rows(rows, shape.normed, work, d_qkv, &each, |gains| {
                d_gain.store(0, gains);
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// Columns of a row of qkv: those of q, then those of k, then others.
#[derive(Clone, Copy)]
struct Columns {
    /// Columns of q.
    of_q: usize,
    /// Columns of q and k.
    normed: usize,
    /// All columns.
    all: usize,
}

impl Columns {
    const fn new(qkv: Tensor, heads: Heads) -> Self {
        let all = qkv.shape().1;
        let dim = heads.dim(all);
        Self { of_q: heads.count * dim, normed: (heads.count + heads.kv_count) * dim, all }
    }

    /// The columns of q (0) and of k (1), in blocks.
    fn blocks(self, part: usize) -> impl Iterator<Item = Range<usize>> {
        let columns = if part == 0 { 0..self.of_q } else { self.of_q..self.normed };
        let end = columns.end;
        columns.step_by(BLOCK).map(move |first| first..(first + BLOCK).min(end))
    }
}

/// Inputs of the norm and of its gradient.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    /// q and k before the norm.
    raw: View<'a>,
    gain: View<'a>,
    widths: [f32; 2],
    epsilon: f32,
}

impl<'a> Inputs<'a> {
    fn new(m: &'a impl Memory, raw: Tensor, norm: WidthNorm) -> Result<Self, String> {
        let WidthNorm { gain, widths, epsilon, .. } = norm;
        Ok(Self { raw: values(m, raw)?, gain: values(m, gain)?, widths, epsilon })
    }

    /// 1 / sqrt(sum / width + epsilon) of a row of q (0) or k (1).
    #[inline(always)]
    fn inverse_root(&self, sum: f32, part: usize) -> f32 {
        1.0 / sum.mul_add(1.0 / self.widths[part], self.epsilon).sqrt()
    }
}

/// Copies q and k of `rows` to `raw`, and writes their sums of squares.
fn sum_squares(
    shape: Columns,
    rows: Range<usize>,
    qkv: View<'_>,
    raw: &mut ViewMut<'_>,
    sums: &mut [f32],
) {
    vectorised(
        #[inline(always)]
        || {
            let mut buffer = [0.0; BLOCK];
            for (at, sums) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let row = rows.start + at;
                for (part, total) in sums.iter_mut().enumerate() {
                    *total = 0.0;
                    for block in shape.blocks(part) {
                        let from = row * shape.all + block.start;
                        let x = read(&qkv, from, block.len(), &mut buffer);
                        *total += sum(x, |x| x * x);
                        raw.store(at * shape.normed + block.start, x);
                    }
                }
            }
        },
    );
}

/// Writes the normed q and k of `rows` to `qkv`.
fn apply(
    shape: Columns,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    sums: &[f32],
    qkv: &mut ViewMut<'_>,
) {
    vectorised(
        #[inline(always)]
        || {
            let [mut xs, mut gains, mut ys] = [[0.0; BLOCK]; 3];
            for (at, row) in rows.clone().enumerate() {
                for part in 0..2 {
                    let scale = inputs.inverse_root(sums[2 * row + part], part);
                    for block in shape.blocks(part) {
                        let (first, n) = (block.start, block.len());
                        let x = read(&inputs.raw, row * shape.normed + first, n, &mut xs);
                        let gain = read(&inputs.gain, first, n, &mut gains);
                        let terms = ys.iter_mut().zip(x).zip(gain);
                        terms.for_each(|((y, x), gain)| *y = x * scale * gain);
                        qkv.store(at * shape.all + first, &ys[..n]);
                    }
                }
            }
        },
    );
}

/// Writes the sums of d gain raw of `rows` to `dots`.
fn sum_dots(
    shape: Columns,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    d_qkv: View<'_>,
    dots: &mut [f32],
) {
    vectorised(
        #[inline(always)]
        || {
            let [mut xs, mut gains, mut ds] = [[0.0; BLOCK]; 3];
            for (at, dots) in dots.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let row = rows.start + at;
                for (part, total) in dots.iter_mut().enumerate() {
                    *total = 0.0;
                    for block in shape.blocks(part) {
                        let (first, n) = (block.start, block.len());
                        let x = read(&inputs.raw, row * shape.normed + first, n, &mut xs);
                        let gain = read(&inputs.gain, first, n, &mut gains);
                        d_qkv.load(row * shape.all + first, &mut ds[..n]);
                        ds[..n].iter_mut().zip(gain).for_each(|(d, gain)| *d *= gain);
                        *total += dot(&ds[..n], x);
                    }
                }
            }
        },
    );
}

/// Two numbers for each row, of q and of k: sums of squares, and sums of d gain raw.
#[derive(Clone, Copy)]
struct Pairs<'a> {
    sums: &'a [f32],
    dots: &'a [f32],
}

/// Replaces d of `rows` by (d gain - n mean) / root, where n = raw / root and mean = the mean of
/// d gain n over all ranks. Adds d n to `d_gain`.
fn turn_back(
    shape: Columns,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    pairs: Pairs<'_>,
    d_qkv: &mut ViewMut<'_>,
    d_gain: &mut [f32],
) {
    vectorised(
        #[inline(always)]
        || {
            let [mut xs, mut gains, mut ds] = [[0.0; BLOCK]; 3];
            for (at, row) in rows.clone().enumerate() {
                for part in 0..2 {
                    let scale = inputs.inverse_root(pairs.sums[2 * row + part], part);
                    let mean = pairs.dots[2 * row + part] * scale / inputs.widths[part];
                    for block in shape.blocks(part) {
                        let (first, n) = (block.start, block.len());
                        let x = read(&inputs.raw, row * shape.normed + first, n, &mut xs);
                        let gain = read(&inputs.gain, first, n, &mut gains);
                        let to = at * shape.all + first;
                        d_qkv.as_view().load(to, &mut ds[..n]);
                        let terms = ds[..n].iter_mut().zip(x).zip(gain).zip(&mut d_gain[block]);
                        for (((d, x), gain), sum) in terms {
                            let normal = x * scale;
                            *sum = d.mul_add(normal, *sum);
                            *d = normal.mul_add(-mean, *d * gain) * scale;
                        }
                        d_qkv.store(to, &ds[..n]);
                    }
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Rig, TYPES, assert_close, differences, inner, noise};
    use super::*;
    use crate::Dtype;

    const EPSILON: f64 = 1e-2;
    const ROWS: usize = 7;

    /// The heads of one of `ranks` ranks: 4 of q, 2 of k and 2 of v in all.
    const fn heads(ranks: usize) -> Heads {
        Heads { count: 4 / ranks, kv_count: 2 / ranks, first: 0, total: 4, seq_len: ROWS }
    }

    /// The columns of rank `rank` of rows of all heads.
    fn part(x: &[f64], dim: usize, rank: usize, ranks: usize) -> Vec<f64> {
        let row = |row: &[f64]| {
            let of = |first: usize, count: usize| {
                let own = count / ranks;
                row[(first + rank * own) * dim..][..own * dim].to_vec()
            };
            [of(0, 4), of(4, 2), of(6, 2)].concat()
        };
        x.chunks(8 * dim).flat_map(row).collect()
    }

    /// Normed q and k, and v as it is.
    fn norm_f64(qkv: &[f64], dim: usize, gain: &[f64]) -> Vec<f64> {
        let row = |x: &[f64]| {
            let mut y = x.to_vec();
            for columns in [0..4 * dim, 4 * dim..6 * dim] {
                let square = x[columns.clone()].iter().map(|x| x * x).sum::<f64>();
                let scale = 1.0 / (square / columns.len() as f64 + EPSILON).sqrt();
                columns.for_each(|i| y[i] = x[i] * scale * gain[i]);
            }
            y
        };
        qkv.chunks(8 * dim).flat_map(row).collect()
    }

    /// The tensors of a rank, on its own device.
    struct RankCase {
        rig: Rig,
        qkv: Tensor,
        raw: Tensor,
        norm: WidthNorm,
        d_qkv: Tensor,
        dots: Tensor,
        d_gain: Tensor,
    }

    impl RankCase {
        fn new(threads: usize, dtype: Dtype, dim: usize, rank: usize, ranks: usize) -> Self {
            let mut rig = Rig::new(threads);
            let heads = heads(ranks);
            let (width, normed) = (8 * dim / ranks, 6 * dim / ranks);
            let of = |seed| part(&noise(seed, ROWS * 8 * dim), dim, rank, ranks);
            let gains = part(&noise(3, 8 * dim), dim, rank, ranks);
            let qkv = rig.put(dtype, (ROWS, width), &of(1));
            let d_qkv = rig.put(dtype, (ROWS, width), &of(2));
            let gain = rig.put(dtype, (1, normed), &gains[..normed]);
            let raw = rig.out(dtype, (ROWS, normed));
            let sums = rig.out(Dtype::F32, (ROWS, 2));
            let dots = rig.out(Dtype::F32, (ROWS, 2));
            let d_gain = rig.out(Dtype::F32, (1, normed));
            let widths = [4 * dim, 2 * dim].map(|n| n as f32);
            let norm = WidthNorm { heads, gain, sums, widths, epsilon: EPSILON as f32 };
            rig.run(&Op::WidthNormSums { qkv, raw, heads, sums });
            Self { rig, qkv, raw, norm, d_qkv, dots, d_gain }
        }
    }

    /// Replaces a tensor of each rank by the sum over the ranks.
    fn sum_over_ranks(all: &mut [RankCase], of: fn(&RankCase) -> Tensor) {
        let mut sum = vec![0.0; 2 * ROWS];
        for rank in &*all {
            sum.iter_mut().zip(rank.rig.get(of(rank))).for_each(|(sum, x)| *sum += x);
        }
        for rank in all {
            let (x, y) = (rank.rig.put(Dtype::F32, (ROWS, 2), &sum), of(rank));
            rank.rig.run(&Op::Cast { x, y });
        }
    }

    /// All ranks after the norm and its gradients. The ranks sum between the ops.
    fn ranks(threads: usize, dtype: Dtype, dim: usize, ranks: usize) -> Vec<RankCase> {
        let case = |rank| RankCase::new(threads, dtype, dim, rank, ranks);
        let mut all: Vec<RankCase> = (0..ranks).map(case).collect();
        sum_over_ranks(&mut all, |of| of.norm.sums);
        for of in &mut all {
            let RankCase { qkv, raw, norm, d_qkv, dots, .. } = *of;
            of.rig.run(&Op::WidthNorm { qkv, raw, norm });
            of.rig.run(&Op::WidthNormBackwardSums { d_qkv, raw, norm, dots });
        }
        sum_over_ranks(&mut all, |of| of.dots);
        for of in &mut all {
            let RankCase { raw, norm, d_qkv, dots, d_gain, .. } = *of;
            of.rig.run(&Op::WidthNormBackward { d_qkv, raw, norm, dots, d_gain });
        }
        all
    }

    /// The gradient of `qkv` by central differences, row by row.
    fn gradient(qkv: &[f64], dim: usize, gain: &[f64], d: &[f64]) -> Vec<f64> {
        let rows = qkv.chunks(8 * dim).zip(d.chunks(8 * dim));
        rows.flat_map(|(x, d)| differences(x, |x| inner(d, &norm_f64(x, dim, gain)))).collect()
    }

    #[test]
    fn the_norm_and_its_gradients_are_the_formula_over_any_number_of_ranks() {
        for (dtype, ulp) in TYPES {
            for (dim, count) in [(1, 1), (5, 1), (5, 2), (70, 2)] {
                let n = ROWS * 8 * dim;
                let (x, d, gain) = (noise(1, n), noise(2, n), noise(3, 8 * dim));
                let y = norm_f64(&x, dim, &gain);
                let d_x = gradient(&x, dim, &gain, &d);
                let mut d_gain =
                    differences(&gain[..6 * dim], |gain| inner(&d, &norm_f64(&x, dim, gain)));
                d_gain.resize(8 * dim, 0.0);
                for (rank, case) in ranks(1, dtype, dim, count).into_iter().enumerate() {
                    let own = |x: &[f64]| part(x, dim, rank, count);
                    assert_close(&case.rig.get(case.qkv), &own(&y), 3e-6, ulp);
                    assert_close(&case.rig.get(case.d_qkv), &own(&d_x), 2e-5, ulp);
                    let (got, want) = (case.rig.get(case.d_gain), own(&d_gain));
                    assert_close(&got, &want[..got.len()], 2e-5, 0.0);
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let run = |threads| {
            let case = ranks(threads, Dtype::Bf16, 700, 1).remove(0);
            [case.qkv, case.d_qkv, case.dots, case.d_gain].map(|t| case.rig.get(t))
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn q_and_k_are_kept_as_they_are_and_values_are_left_alone() {
        let mut rig = Rig::new(1);
        let (x, heads) = (noise(1, ROWS * 24), heads(1));
        let qkv = rig.put(Dtype::Bf16, (ROWS, 24), &x);
        let raw = rig.out(Dtype::Bf16, (ROWS, 18));
        let sums = rig.out(Dtype::F32, (ROWS, 2));
        rig.run(&Op::WidthNormSums { qkv, raw, heads, sums });
        let want: Vec<f64> = x.chunks(24).flat_map(|row| row[..18].to_vec()).collect();
        assert_eq!(rig.get(raw), want);
        assert_eq!(rig.get(qkv), x);
        let gain = rig.put(Dtype::Bf16, (1, 18), &noise(3, 18));
        let norm = WidthNorm { heads, gain, sums, widths: [12.0, 6.0], epsilon: 1e-2 };
        rig.run(&Op::WidthNorm { qkv, raw, norm });
        for (got, before) in rig.get(qkv).chunks(24).zip(x.chunks(24)) {
            assert_eq!(got[18..], before[18..]);
            assert_ne!(got[..18], before[..18]);
        }
    }
}
