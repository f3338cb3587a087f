//! Causal attention, one (sample, head) at a time in blocks of [`LANES`] queries: two products with
//! a softmax between them. A block touches only the keys up to its end. Scores are stored as (keys,
//! queries): each query has its lane of the vectors, so one instruction serves a whole block, and
//! among the operands of products only q' and d_out' are transposed. The backward pass takes the
//! heads of queries that share keys and values in turn, and adds up their gradients.

use super::dense::{src, tail};
use super::math::{Mask, dot, exp, read, vectorised};
use super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::gemm::{self, Dst, Gemm, Matrix, MatrixMut, Src};
use crate::cpu::workers::{QUERY_ROWS as LANES, Scratch, Workers, attention_floats};
use crate::op::{Dropout, Heads, Op};
use crate::view::BLOCK;
use crate::{Tensor, View, ViewMut};
use std::sync::{Mutex, PoisonError};

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Attention { qkv, out, lse, heads, dropout } => {
            let shape = Shape::new(out, heads, dropout)?;
            workers.need(attention_floats(heads.seq_len, shape.head_dim))?;
            let qkv = src(values(m, qkv)?)?;
            let results = Mutex::new((values_mut(m, out)?, slice_mut::<f32>(m, lse)?));
            workers.split(shape.units, shape.work, (), &|units, (), scratch| {
                for unit in units {
                    forward(Head { shape, unit, qkv }, scratch, &results);
                }
            });
        }
        Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, dropout } => {
            let shape = Shape::new(out, heads, dropout)?;
            workers.need(attention_floats(heads.seq_len, shape.head_dim))?;
            let qkv = src(values(m, qkv)?)?;
            let groups = shape.units / heads.group();
            let saved =
                Saved { out: values(m, out)?, lse: slice(m, lse)?, d_out: values(m, d_out)? };
            let operand = src(saved.d_out)?;
            let results = Mutex::new(values_mut(m, d_qkv)?);
            workers.split(groups, shape.work, (), &|groups, (), scratch| {
                for group in groups {
                    let first = Head { shape, unit: group * heads.group(), qkv };
                    backward(first, (saved, operand), scratch, &results);
                }
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Shape {
    heads: Heads,
    head_dim: usize,
    /// 1 / sqrt(D)
    scale: f32,
    mask: Option<Mask>,
    first_sample: u64,
    /// Pairs of sample and head.
    units: usize,
    /// Number of scores, for the decision to wake other threads.
    work: usize,
}

impl Shape {
    fn new(out: Tensor, heads: Heads, dropout: Dropout) -> Result<Self, String> {
        let (rows, width) = out.shape();
        if heads.count == 0 || heads.kv_count == 0 || heads.seq_len == 0 {
            return Err("no heads, or samples without tokens".into());
        }
        let head_dim = width / heads.count;
        Ok(Self {
            heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            mask: Mask::new(dropout),
            first_sample: dropout.first_row / heads.seq_len as u64,
            units: rows / heads.seq_len * heads.count,
            work: rows * heads.count * heads.seq_len,
        })
    }

    /// H D, the elements of a row of `out`.
    const fn width(&self) -> usize {
        self.heads.count * self.head_dim
    }

    /// (H + 2 K) D, the elements of a row of `qkv`.
    const fn qkv_width(&self) -> usize {
        (self.heads.count + 2 * self.heads.kv_count) * self.head_dim
    }
}

/// One head of one sample.
#[derive(Clone, Copy)]
struct Head<'a> {
    shape: Shape,
    unit: usize,
    qkv: Src<'a>,
}

impl<'a> Head<'a> {
    /// Index of element (token, 0) of the head in `out`.
    const fn at(&self, token: usize) -> usize {
        let Shape { heads, head_dim, .. } = self.shape;
        let (sample, head) = (self.unit / heads.count, self.unit % heads.count);
        (sample * heads.seq_len + token) * self.shape.width() + head * head_dim
    }

    /// Index of element (token, 0) of q (0), k (1) or v (2) in `qkv`.
    const fn at_qkv(&self, token: usize, part: usize) -> usize {
        let heads = self.shape.heads;
        let (sample, head) = (self.unit / heads.count, self.unit % heads.count);
        let first = match part {
            0 => head,
            _ => heads.count + (part - 1) * heads.kv_count + head / heads.group(),
        };
        let row = (sample * heads.seq_len + token) * self.shape.qkv_width();
        row + first * self.shape.head_dim
    }

    /// q, k or v (T, D) from `token` on.
    fn rows(&self, token: usize, part: usize) -> Matrix<'a> {
        Matrix::by_rows(tail(self.qkv, self.at_qkv(token, part)), self.shape.qkv_width())
    }

    /// The transpose of a block's q.
    fn columns(&self, token: usize) -> Matrix<'a> {
        Matrix::transposed(tail(self.qkv, self.at_qkv(token, 0)), self.shape.qkv_width())
    }

    /// Index in the dropout mask of a query's weight for key 0.
    const fn mask_index(&self, query: usize) -> u64 {
        let heads = self.shape.heads;
        let sample = self.shape.first_sample + (self.unit / heads.count) as u64;
        let head = (heads.first + self.unit % heads.count) as u64;
        let t = heads.seq_len as u64;
        ((sample * heads.total as u64 + head) * t + query as u64) * t
    }

    fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        let t = self.shape.heads.seq_len;
        (0..t).step_by(LANES).map(move |first| {
            let rows = LANES.min(t - first);
            Block { first, rows, keys: first + rows }
        })
    }
}

/// A run of queries, and the keys that at least one of them sees.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    /// Number of queries. Later lanes hold arbitrary values.
    rows: usize,
    keys: usize,
}

impl Block {
    /// Values of `of` for its queries.
    fn lanes<T: Copy + Default>(&self, of: impl Fn(usize) -> T) -> [T; LANES] {
        let mut lanes = [T::default(); LANES];
        let queries = lanes.iter_mut().zip(self.first..self.first + self.rows);
        queries.for_each(|(lane, query)| *lane = of(query));
        lanes
    }
}

/// c (m, n) = a (m, k) b (k, n) + beta c, on this thread. Only c's `row_stride` may leave gaps
/// between its rows.
fn product(
    (m, n, k): (usize, usize, usize),
    (a, b): (Matrix<'_>, Matrix<'_>),
    (c, row_stride): (&mut [f32], usize),
    beta: f32,
    scratch: &mut gemm::Scratch,
) {
    let c = MatrixMut { data: Dst::F32(c), row_stride };
    Gemm { m, n, k, a, b, c, beta, bias: None }.serial(scratch);
}

type Results<'a, T> = Mutex<(ViewMut<'a>, T)>;

fn forward(head: Head<'_>, scratch: &mut Scratch, results: &Results<'_, &mut [f32]>) {
    let Shape { heads: Heads { seq_len, .. }, head_dim, .. } = head.shape;
    let Scratch { gemm, floats } = scratch;
    let (lse, floats) = floats.split_at_mut(seq_len);
    let (out, scores) = floats.split_at_mut(seq_len * head_dim);
    for block in head.blocks() {
        let Block { first, rows, keys } = block;
        let kq = (head.rows(0, 1), head.columns(first));
        product((keys, rows, head_dim), kq, (scores, LANES), 0.0, gemm);
        let inverses = softmax(head, block, scores, &mut lse[first..first + rows]);
        let out = &mut out[first * head_dim..][..rows * head_dim];
        let weights = Matrix::transposed(Src::F32(scores), LANES);
        let values = (weights, head.rows(0, 2));
        product((rows, head_dim, keys), values, (out, head_dim), 0.0, gemm);
        for (row, inverse) in out.chunks_exact_mut(head_dim.max(1)).zip(inverses) {
            row.iter_mut().for_each(|x| *x *= inverse);
        }
    }
    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
    for (token, row) in out.chunks_exact(head_dim.max(1)).enumerate() {
        results.0.store(head.at(token), row);
    }
    results.1[head.unit * seq_len..][..seq_len].copy_from_slice(lse);
}

/// Sets the scores of keys behind a query's own position to `x`.
#[inline(always)]
fn mask_future(scores: &mut [[f32; LANES]], block: Block, x: f32) {
    for (i, row) in scores[block.first..].iter_mut().enumerate() {
        row.iter_mut().take(i).for_each(|score| *score = x);
    }
}

/// Turns scores (keys, queries) into weights times their query's sum, with dropout, and writes the
/// logarithms of the sums of e^score to `lse`. Returns 1 / the sums.
fn softmax(head: Head<'_>, block: Block, scores: &mut [f32], lse: &mut [f32]) -> [f32; LANES] {
    let Shape { scale, mask, .. } = head.shape;
    let scores = &mut scores.as_chunks_mut::<LANES>().0[..block.keys];
    let (mut top, mut total) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
    vectorised(
        #[inline(always)]
        || {
            mask_future(scores, block, f32::NEG_INFINITY);
            for row in &*scores {
                for (top, x) in top.iter_mut().zip(row) {
                    *top = if *x > *top { *x } else { *top };
                }
            }
            // Partial sums are summed: some 32 + keys / 32 roundings in a row instead of one per
            // key.
            for rows in scores.chunks_mut(LANES) {
                let mut sum = [0.0; LANES];
                for row in rows {
                    for ((x, top), sum) in row.iter_mut().zip(&top).zip(&mut sum) {
                        *x = exp((*x - top) * scale);
                        *sum += *x;
                    }
                }
                total.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
            }
            let Some(mask) = mask else { return };
            let indices = block.lanes(|query| head.mask_index(query));
            for (key, row) in scores.iter_mut().enumerate() {
                let factors = mask.across(&indices, key as u32);
                row.iter_mut().zip(factors).for_each(|(w, f)| *w *= f);
            }
        },
    );
    for ((lse, top), total) in lse.iter_mut().zip(top).zip(total) {
        *lse = top.mul_add(scale, total.ln());
    }
    total.map(|total| 1.0 / total)
}

/// Results of the forward pass, and the incoming gradient.
#[derive(Clone, Copy)]
struct Saved<'a> {
    out: View<'a>,
    lse: &'a [f32],
    d_out: View<'a>,
}

/// With weights P and their mask M: d_v = (P M)' d_out, d_scores = P (M (d_out v') - delta), d_q =
/// d_scores k / sqrt(D), d_k = d_scores' q / sqrt(D). Computes the heads that share the keys and
/// values of `first`, starting with `first`.
fn backward(
    first: Head<'_>,
    (saved, d_out): (Saved<'_>, Src<'_>),
    scratch: &mut Scratch,
    results: &Mutex<ViewMut<'_>>,
) {
    let Shape { heads: Heads { seq_len, .. }, head_dim, .. } = first.shape;
    let Scratch { gemm, floats } = scratch;
    let (delta, floats) = floats.split_at_mut(seq_len);
    let (d_q, floats) = floats.split_at_mut(seq_len * head_dim);
    let (d_k, floats) = floats.split_at_mut(seq_len * head_dim);
    let (d_v, floats) = floats.split_at_mut(seq_len * head_dim);
    let (weights, d_scores) = floats.split_at_mut(floats.len() / 2);
    d_k.fill(0.0);
    d_v.fill(0.0);
    let store = |head: Head<'_>, part, gradient: &[f32]| {
        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
        for (token, row) in gradient.chunks_exact(head_dim.max(1)).enumerate() {
            results.store(head.at_qkv(token, part), row);
        }
    };
    for unit in first.unit..first.unit + first.shape.heads.group() {
        let head = Head { unit, ..first };
        row_dots(head, saved, delta);
        let lse = &saved.lse[unit * seq_len..][..seq_len];
        for block in head.blocks() {
            let Block { first, rows, keys } = block;
            let (at, width) = (head.at(first), head.shape.width());
            let kq = (head.rows(0, 1), head.columns(first));
            product((keys, rows, head_dim), kq, (weights, LANES), 0.0, gemm);
            let d_weights = (head.rows(0, 2), Matrix::transposed(tail(d_out, at), width));
            product((keys, rows, head_dim), d_weights, (d_scores, LANES), 0.0, gemm);
            scores_backward(head, block, (lse, delta), weights, d_scores);
            let (weights, d_scores) = (Src::F32(weights), Src::F32(d_scores));
            let to_q = (Matrix::transposed(d_scores, LANES), head.rows(0, 1));
            let d_q = &mut d_q[first * head_dim..];
            product((rows, head_dim, keys), to_q, (d_q, head_dim), 0.0, gemm);
            let to_k = (Matrix::by_rows(d_scores, LANES), head.rows(first, 0));
            product((keys, head_dim, rows), to_k, (d_k, head_dim), 1.0, gemm);
            let to_v = (Matrix::by_rows(weights, LANES), Matrix::by_rows(tail(d_out, at), width));
            product((keys, head_dim, rows), to_v, (d_v, head_dim), 1.0, gemm);
        }
        store(head, 0, d_q);
    }
    store(first, 1, d_k);
    store(first, 2, d_v);
}

/// delta (T) = sums over the head's columns of d_out out.
fn row_dots(head: Head<'_>, saved: Saved<'_>, delta: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let (mut outs, mut d_outs) = ([0.0; BLOCK], [0.0; BLOCK]);
            for (token, delta) in delta.iter_mut().enumerate() {
                *delta = 0.0;
                for col in (0..head.shape.head_dim).step_by(BLOCK) {
                    let (at, n) = (head.at(token) + col, BLOCK.min(head.shape.head_dim - col));
                    let out = read(&saved.out, at, n, &mut outs);
                    *delta += dot(out, read(&saved.d_out, at, n, &mut d_outs));
                }
            }
        },
    );
}

/// Turns scores into masked weights, and gradients of masked weights into gradients of q k'.
fn scores_backward(
    head: Head<'_>,
    block: Block,
    (lse, delta): (&[f32], &[f32]),
    weights: &mut [f32],
    d_scores: &mut [f32],
) {
    let Shape { scale, mask, .. } = head.shape;
    let weights = &mut weights.as_chunks_mut::<LANES>().0[..block.keys];
    let d_scores = &mut d_scores.as_chunks_mut::<LANES>().0[..block.keys];
    let (lse, delta) = (block.lanes(|query| lse[query]), block.lanes(|query| delta[query]));
    let indices = block.lanes(|query| head.mask_index(query));
    vectorised(
        #[inline(always)]
        || {
            mask_future(weights, block, f32::NEG_INFINITY);
            mask_future(d_scores, block, 0.0);
            for (key, (weights, d_scores)) in weights.iter_mut().zip(&mut *d_scores).enumerate() {
                let factors = mask.map_or([1.0; LANES], |mask| mask.across(&indices, key as u32));
                let lanes = weights.iter_mut().zip(d_scores).zip(factors);
                for (((w, d), f), (lse, delta)) in lanes.zip(lse.iter().zip(&delta)) {
                    let weight = exp(w.mul_add(scale, -lse));
                    *d = weight * d.mul_add(f, -delta) * scale;
                    *w = weight * f;
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        NO_DROPOUT, Rig, TYPES, assert_close, differences, inner, kept, noise,
    };
    use super::*;
    use crate::Dtype;

    const DROPOUT: Dropout = Dropout { p: 0.3, key: 17, first_row: 0 };

    /// Samples, head dimension, and the heads.
    type Size = (usize, usize, Heads);

    fn size(samples: usize, seq_len: usize, count: usize, head_dim: usize) -> Size {
        grouped(samples, seq_len, (count, count), head_dim)
    }

    /// `count` heads of queries share `kv_count` heads of keys and values.
    fn grouped(
        samples: usize,
        seq_len: usize,
        (count, kv_count): (usize, usize),
        head_dim: usize,
    ) -> Size {
        (samples, head_dim, Heads { count, kv_count, first: 1, total: count + 2, seq_len })
    }

    /// out and lse by the plain formula.
    fn attention_f64(
        qkv: &[f64],
        (samples, d, heads): Size,
        dropout: Dropout,
    ) -> (Vec<f64>, Vec<f64>) {
        let Heads { count, kv_count, first, total, seq_len: t } = heads;
        let width = count * d;
        let (mut out, mut lse) = (vec![0.0; samples * t * width], vec![0.0; samples * count * t]);
        let at = |b: usize, token: usize, part: usize, h: usize| {
            let (all, shared) = (count + 2 * kv_count, h * kv_count / count);
            let head = [h, count + shared, count + kv_count + shared][part];
            &qkv[((b * t + token) * all + head) * d..][..d]
        };
        for (b, h, q) in (0..samples * count * t).map(|i| (i / t / count, i / t % count, i % t)) {
            let score = |k| inner(at(b, q, 0, h), at(b, k, 1, h)) / (d as f64).sqrt();
            let sum: f64 = (0..=q).map(|k| f64::exp(score(k))).sum();
            lse[(b * count + h) * t + q] = sum.ln();
            let sample = dropout.first_row as usize / t + b;
            for k in 0..=q {
                let index = ((sample * total + first + h) * t + q) * t + k;
                let weight = score(k).exp() / sum * kept(dropout, index);
                let row = &mut out[(b * t + q) * width + h * d..][..d];
                row.iter_mut().zip(at(b, k, 2, h)).for_each(|(o, v)| *o += weight * v);
            }
        }
        (out, lse)
    }

    fn inputs((samples, d, heads): Size) -> (Vec<f64>, Vec<f64>) {
        let n = samples * heads.seq_len * d;
        let all = heads.count + 2 * heads.kv_count;
        (noise(1, all * n).iter().map(|x| 2.0 * x).collect(), noise(2, heads.count * n))
    }

    /// out, lse and d_qkv by the ops.
    fn run_ops(
        threads: usize,
        dtype: Dtype,
        size: Size,
        dropout: Dropout,
        qkv: &[f64],
        d_out: &[f64],
    ) -> [Vec<f64>; 3] {
        let (samples, d, heads) = size;
        let (rows, width) = (samples * heads.seq_len, heads.count * d);
        let mut rig = Rig::new(threads);
        let qkv_width = (heads.count + 2 * heads.kv_count) * d;
        let (qkv, d_out) =
            (rig.put(dtype, (rows, qkv_width), qkv), rig.put(dtype, (rows, width), d_out));
        let (out, d_qkv) = (rig.out(dtype, (rows, width)), rig.out(dtype, (rows, qkv_width)));
        let lse = rig.out(Dtype::F32, (samples * heads.count, heads.seq_len));
        rig.run(&Op::Attention { qkv, out, lse, heads, dropout });
        rig.run(&Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, dropout });
        [out, lse, d_qkv].map(|t| rig.get(t))
    }

    #[test]
    fn forward_is_the_formula_in_every_type_and_shape() {
        for (dtype, ulp) in TYPES {
            for dropout in [NO_DROPOUT, DROPOUT] {
                for size in [
                    size(1, 2, 1, 2),
                    size(2, 65, 2, 3),
                    size(1, 130, 3, 16),
                    size(2, 31, 1, 80),
                    size(1, 300, 1, 7),
                    grouped(2, 65, (6, 2), 4),
                    grouped(1, 40, (3, 1), 6),
                ] {
                    let dropout = Dropout { first_row: 3 * size.2.seq_len as u64, ..dropout };
                    let (qkv, d_out) = inputs(size);
                    let [out, lse, _] = run_ops(1, dtype, size, dropout, &qkv, &d_out);
                    let (want, want_lse) = attention_f64(&qkv, size, dropout);
                    assert_close(&out, &want, 4e-6, ulp);
                    assert_close(&lse, &want_lse, 2e-6, 1e-6);
                }
            }
        }
    }

    #[test]
    fn gradients_are_central_differences_of_the_formula() {
        for (dtype, ulp) in TYPES {
            for dropout in [NO_DROPOUT, DROPOUT] {
                for size in [
                    size(2, 2, 1, 2),
                    size(2, 7, 2, 5),
                    size(1, 67, 1, 3),
                    grouped(2, 5, (6, 2), 2),
                    grouped(1, 35, (3, 1), 2),
                ] {
                    let dropout = Dropout { first_row: size.2.seq_len as u64, ..dropout };
                    let (qkv, d_out) = inputs(size);
                    let [_, _, got] = run_ops(1, dtype, size, dropout, &qkv, &d_out);
                    let loss = |qkv: &[f64]| inner(&attention_f64(qkv, size, dropout).0, &d_out);
                    // delta comes from the stored output, whose rounding enters d_q and d_k.
                    assert_close(&got, &differences(&qkv, loss), 1e-5 + 3.0 * ulp, 2.0 * ulp);
                }
            }
        }
    }

    #[test]
    fn gradients_over_several_blocks_of_queries_are_right() {
        let size = size(1, 200, 1, 4);
        let (qkv, d_out) = inputs(size);
        let [_, _, got] = run_ops(1, Dtype::F32, size, DROPOUT, &qkv, &d_out);
        let loss = |qkv: &[f64]| inner(&attention_f64(qkv, size, DROPOUT).0, &d_out);
        for i in (0..qkv.len()).step_by(97) {
            let mut near = qkv.clone();
            near[i] += 1e-5;
            let above = loss(&near);
            near[i] -= 2e-5;
            assert_close(&[got[i]], &[(above - loss(&near)) / 2e-5], 1e-5, 1e-5);
        }
    }

    #[test]
    fn a_sample_does_not_depend_on_the_others_nor_on_threads() {
        for dropout in [NO_DROPOUT, DROPOUT] {
            let (all, one) = (size(3, 70, 2, 10), size(1, 70, 2, 10));
            let (qkv, d_out) = inputs(all);
            let whole = run_ops(1, Dtype::Bf16, all, dropout, &qkv, &d_out);
            assert_eq!(whole, run_ops(3, Dtype::Bf16, all, dropout, &qkv, &d_out));
            let dropout = Dropout { first_row: 70, ..dropout };
            let (qkv, d_out) = (&qkv[70 * 60..140 * 60], &d_out[70 * 20..140 * 20]);
            let part = run_ops(1, Dtype::Bf16, one, dropout, qkv, d_out);
            assert_eq!(part[0], whole[0][70 * 20..140 * 20]);
            assert_eq!(part[1], whole[1][140..280]);
            assert_eq!(part[2], whole[2][70 * 60..140 * 60]);
        }
    }

    #[test]
    fn heads_on_other_ranks_drop_what_they_would_drop_on_one() {
        let (both, d) = (size(2, 33, 2, 4), 4);
        let (qkv, d_out) = inputs(both);
        let whole = run_ops(1, Dtype::F32, both, DROPOUT, &qkv, &d_out)[0].clone();
        for head in 0..2 {
            let of_head = |x: &Vec<f64>| -> Vec<f64> {
                x.chunks(2 * d).flat_map(|row| row[head * d..][..d].to_vec()).collect()
            };
            let one = (2, d, Heads { count: 1, kv_count: 1, first: 1 + head, ..both.2 });
            let [out, ..] = run_ops(1, Dtype::F32, one, DROPOUT, &of_head(&qkv), &of_head(&d_out));
            assert_eq!(out, of_head(&whole));
        }
    }
}
