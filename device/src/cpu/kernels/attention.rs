//! Causal attention, one (sample, head) at a time in blocks of [`LANES`] queries: two matmuls with
//! a softmax between them. A block reads only the keys from the first that its first query sees to
//! the block's end. Scores are stored as (keys, queries): each query has one lane of the
//! vectors, so one instruction processes a whole block. Only the operands q' and d_out' of matmuls
//! are transposed. The backward pass processes the heads of queries that share keys and values one
//! after another, and sums their gradients.

use super::documents::Starts;
use super::math::{Cap, Mask, dot, exp, read, vectorised};
use super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::gemm::{self, Gemm, Matrix, MatrixMut};
use crate::cpu::workers::{QUERY_ROWS as LANES, Scratch, Workers, attention_floats};
use crate::op::{Dropout, Heads, Op, Scores};
use crate::{BLOCK, Tensor, View, ViewMut};
use std::sync::{Mutex, PoisonError};

mod sinks;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Attention { qkv, out, lse, heads, starts, dropout, scores } => {
            let starts = Starts::new(m, starts, 0, heads.seq_len)?;
            let shape = AttentionShape::new(out, heads, starts, dropout, scores)?;
            workers.need(attention_floats(heads.seq_len, shape.head_dim))?;
            let qkv = values(m, qkv)?;
            let results = Mutex::new((values_mut(m, out)?, slice_mut::<f32>(m, lse)?));
            workers.split(shape.units, shape.work, (), &|units, (), scratch| {
                for unit in units {
                    forward(Head { shape, unit, qkv }, scratch, &results);
                }
            });
        }
        Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores } => {
            let starts = Starts::new(m, starts, 0, heads.seq_len)?;
            let shape = AttentionShape::new(out, heads, starts, dropout, scores)?;
            workers.need(attention_floats(heads.seq_len, shape.head_dim))?;
            let qkv = values(m, qkv)?;
            let groups = shape.units / heads.group();
            let saved = BackwardInputs {
                out: values(m, out)?,
                lse: slice(m, lse)?,
                d_out: values(m, d_out)?,
            };
            let results = Mutex::new(values_mut(m, d_qkv)?);
            workers.split(groups, shape.work, (), &|groups, (), scratch| {
                for group in groups {
                    let first = Head { shape, unit: group * heads.group(), qkv };
                    backward(first, saved, scratch, &results);
                }
            });
        }
        Op::AttentionSinks { .. } | Op::AttentionSinksBackward { .. } => {
            return sinks::run(op, m, workers);
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct AttentionShape<'a> {
    heads: Heads,
    starts: Starts<'a>,
    head_dim: usize,
    /// Factor of q k'.
    scale: f32,
    cap: Option<Cap>,
    /// Number of keys that a query sees; the whole sample at most.
    window: usize,
    mask: Option<Mask>,
    first_sample: u64,
    /// Number of pairs of sample and head.
    units: usize,
    /// Number of scores, which decides whether other threads are woken.
    work: usize,
}

impl<'a> AttentionShape<'a> {
    fn new(
        out: Tensor,
        heads: Heads,
        starts: Starts<'a>,
        dropout: Dropout,
        scores: Scores,
    ) -> Result<Self, String> {
        let Scores { scale, cap, window } = scores;
        let (rows, width) = out.shape();
        if heads.count == 0 || heads.kv_count == 0 || heads.seq_len == 0 {
            return Err("no heads, or samples without tokens".into());
        }
        let head_dim = width / heads.count;
        Ok(Self {
            heads,
            starts,
            head_dim,
            scale,
            cap: cap.map(|cap| Cap::new(cap, scale)),
            window: window.unwrap_or(heads.seq_len),
            mask: Mask::new(dropout),
            first_sample: dropout.first_row / heads.seq_len as u64,
            units: rows / heads.seq_len * heads.count,
            work: rows * heads.count * heads.seq_len,
        })
    }

    /// Factor of the numbers that [`apply_cap`] leaves.
    const fn factor_of_capped(&self) -> f32 {
        if self.cap.is_some() { 1.0 } else { self.scale }
    }

    /// Elements of a row of `out`: H D.
    const fn width(&self) -> usize {
        self.heads.count * self.head_dim
    }

    /// Elements of a row of `qkv`: (H + 2 K) D.
    const fn qkv_width(&self) -> usize {
        (self.heads.count + 2 * self.heads.kv_count) * self.head_dim
    }
}

/// One head of one sample.
#[derive(Clone, Copy)]
struct Head<'a> {
    shape: AttentionShape<'a>,
    unit: usize,
    qkv: View<'a>,
}

impl<'a> Head<'a> {
    /// Index of element (token, 0) of the head in `out`.
    const fn at(&self, token: usize) -> usize {
        let AttentionShape { heads, head_dim, .. } = self.shape;
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

    /// Index of a query's weight for key 0 in the dropout mask.
    const fn mask_index(&self, query: usize) -> u64 {
        let heads = self.shape.heads;
        let sample = self.shape.first_sample + (self.unit / heads.count) as u64;
        let head = (heads.first + self.unit % heads.count) as u64;
        let t = heads.seq_len as u64;
        ((sample * heads.total as u64 + head) * t + query as u64) * t
    }

    fn blocks(self) -> impl Iterator<Item = Block> + use<'a> {
        let t = self.shape.heads.seq_len;
        (0..t).step_by(LANES).map(move |first| {
            let rows = LANES.min(t - first);
            let from = self.start(first);
            Block { first, rows, from, keys: first + rows - from }
        })
    }

    /// The first key that a token sees: the start of its document or, if this is later, of its
    /// window.
    fn start(self, token: usize) -> usize {
        let AttentionShape { heads, starts, window, .. } = self.shape;
        let document = starts.of(self.unit / heads.count * heads.seq_len + token);
        document.max((token + 1).saturating_sub(window))
    }
}

/// A run of queries, and the keys that at least one of them sees.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    /// Number of queries. Later lanes hold arbitrary values.
    rows: usize,
    /// The first key.
    from: usize,
    keys: usize,
}

impl Block {
    /// Values of `of` for the block's queries.
    fn lanes<T: Copy + Default>(&self, of: impl Fn(usize) -> T) -> [T; LANES] {
        let mut lanes = [T::default(); LANES];
        let queries = lanes.iter_mut().zip(self.first..self.first + self.rows);
        queries.for_each(|(lane, query)| *lane = of(query));
        lanes
    }
}

fn tail(view: View<'_>, at: usize) -> View<'_> {
    view.slice(at..view.len())
}

/// c (m, n) = a (m, k) b (k, n) + beta c, on this thread.
struct Product<'a> {
    m: usize,
    n: usize,
    k: usize,
    a: Matrix<'a>,
    b: Matrix<'a>,
    beta: f32,
}

impl Product<'_> {
    /// Writes the matmul to c. The rows of c are `row_stride` elements apart.
    fn write(self, c: &mut [f32], row_stride: usize, scratch: &mut gemm::Scratch) {
        let Self { m, n, k, a, b, beta } = self;
        let c = MatrixMut { data: ViewMut::F32(c), row_stride };
        Gemm { m, n, k, a, b, c, scale: 1.0, beta, bias: None }.serial(scratch);
    }
}

type Results<'a, T> = Mutex<(ViewMut<'a>, T)>;

fn forward(head: Head<'_>, scratch: &mut Scratch, results: &Results<'_, &mut [f32]>) {
    let AttentionShape { heads: Heads { seq_len, .. }, head_dim, .. } = head.shape;
    let Scratch { gemm, floats } = scratch;
    let (lse, floats) = floats.split_at_mut(seq_len);
    let (out, scores) = floats.split_at_mut(seq_len * head_dim);
    for block in head.blocks() {
        let Block { first, rows, from, keys } = block;
        let (a, b) = (head.rows(from, 1), head.columns(first));
        Product { m: keys, n: rows, k: head_dim, a, b, beta: 0.0 }.write(scores, LANES, gemm);
        let inverses = softmax(head, block, scores, &mut lse[first..first + rows]);
        let out = &mut out[first * head_dim..][..rows * head_dim];
        let (a, b) = (Matrix::transposed(View::F32(scores), LANES), head.rows(from, 2));
        Product { m: rows, n: head_dim, k: keys, a, b, beta: 0.0 }.write(out, head_dim, gemm);
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

/// Turns products q k' into capped scores; without a cap they are left as they are.
#[inline(always)]
fn apply_cap(scores: &mut [[f32; LANES]], cap: Option<Cap>) {
    let Some(cap) = cap else { return };
    for row in scores {
        row.iter_mut().for_each(|x| *x = cap.of(*x));
    }
}

/// Sets the scores of unseen keys to `x`: keys after the query, keys before its document and keys
/// before its window.
#[inline(always)]
fn mask_unseen(scores: &mut [[f32; LANES]], head: Head<'_>, block: Block, x: f32) {
    let Block { first, rows, from, .. } = block;
    for (i, row) in scores[first - from..].iter_mut().enumerate() {
        row.iter_mut().take(i).for_each(|score| *score = x);
    }
    // If the last query sees the first key, so do all queries of the block. Lanes after the last
    // query have no query, and their values do not matter.
    if head.start(first + rows - 1) == from {
        return;
    }
    for lane in 0..rows {
        let start = head.start(first + lane);
        scores[..start - from].iter_mut().for_each(|row| row[lane] = x);
    }
}

/// Turns scores (keys, queries) into weights times their query's sum, with dropout, and writes the
/// logarithms of the sums of e^score to `lse`. Returns 1 / the sums.
fn softmax(head: Head<'_>, block: Block, scores: &mut [f32], lse: &mut [f32]) -> [f32; LANES] {
    let AttentionShape { cap, mask, .. } = head.shape;
    let scale = head.shape.factor_of_capped();
    let scores = &mut scores.as_chunks_mut::<LANES>().0[..block.keys];
    let (mut top, mut total) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
    vectorised(
        #[inline(always)]
        || {
            apply_cap(scores, cap);
            mask_unseen(scores, head, block, f32::NEG_INFINITY);
            for row in &*scores {
                for (top, x) in top.iter_mut().zip(row) {
                    *top = if *x > *top { *x } else { *top };
                }
            }
            // Partial sums reduce the successive roundings from one per key to about 32 + keys /
            // 32.
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
                let factors = mask.across(&indices, (block.from + key) as u32);
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
struct BackwardInputs<'a> {
    out: View<'a>,
    lse: &'a [f32],
    d_out: View<'a>,
}

/// With weights P and their mask M: d_v = (P M)' d_out, d_scores = P (M (d_out v') - delta) times
/// the slope of the cap, d_q = scale d_scores k, d_k = scale d_scores' q. Computes the heads that
/// share the keys and values of `first`, starting with `first`.
fn backward(
    first: Head<'_>,
    saved: BackwardInputs<'_>,
    scratch: &mut Scratch,
    results: &Mutex<ViewMut<'_>>,
) {
    let AttentionShape { heads: Heads { seq_len, .. }, head_dim, .. } = first.shape;
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
            let Block { first, rows, from, keys } = block;
            let (at, width) = (head.at(first), head.shape.width());
            let (a, b) = (head.rows(from, 1), head.columns(first));
            Product { m: keys, n: rows, k: head_dim, a, b, beta: 0.0 }.write(weights, LANES, gemm);
            let (a, b) = (head.rows(from, 2), Matrix::transposed(tail(saved.d_out, at), width));
            Product { m: keys, n: rows, k: head_dim, a, b, beta: 0.0 }.write(d_scores, LANES, gemm);
            scores_backward(head, block, lse, delta, weights, d_scores);
            let (weights, d_scores) = (View::F32(weights), View::F32(d_scores));
            let (a, b) = (Matrix::transposed(d_scores, LANES), head.rows(from, 1));
            let d_q = &mut d_q[first * head_dim..];
            Product { m: rows, n: head_dim, k: keys, a, b, beta: 0.0 }.write(d_q, head_dim, gemm);
            let (a, b) = (Matrix::by_rows(d_scores, LANES), head.rows(first, 0));
            let d_k = &mut d_k[from * head_dim..];
            Product { m: keys, n: head_dim, k: rows, a, b, beta: 1.0 }.write(d_k, head_dim, gemm);
            let (a, b) =
                (Matrix::by_rows(weights, LANES), Matrix::by_rows(tail(saved.d_out, at), width));
            let d_v = &mut d_v[from * head_dim..];
            Product { m: keys, n: head_dim, k: rows, a, b, beta: 1.0 }.write(d_v, head_dim, gemm);
        }
        store(head, 0, d_q);
    }
    store(first, 1, d_k);
    store(first, 2, d_v);
}

/// delta (T) = sums over the head's columns of d_out out.
fn row_dots(head: Head<'_>, saved: BackwardInputs<'_>, delta: &mut [f32]) {
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
    lse: &[f32],
    delta: &[f32],
    weights: &mut [f32],
    d_scores: &mut [f32],
) {
    let AttentionShape { scale, cap, mask, .. } = head.shape;
    let weights = &mut weights.as_chunks_mut::<LANES>().0[..block.keys];
    let d_scores = &mut d_scores.as_chunks_mut::<LANES>().0[..block.keys];
    let (lse, delta) = (block.lanes(|query| lse[query]), block.lanes(|query| delta[query]));
    let indices = block.lanes(|query| head.mask_index(query));
    let queries = Queries { lse, delta, indices, mask, first_key: block.from };
    let factors = [head.shape.factor_of_capped(), scale];
    vectorised(
        #[inline(always)]
        || {
            apply_cap(weights, cap);
            mask_unseen(weights, head, block, f32::NEG_INFINITY);
            mask_unseen(d_scores, head, block, 0.0);
            match cap {
                None => queries.weigh(
                    weights,
                    d_scores,
                    factors,
                    #[inline(always)]
                    |_| 1.0,
                ),
                Some(cap) => queries.weigh(
                    weights,
                    d_scores,
                    factors,
                    #[inline(always)]
                    |capped| cap.slope(capped),
                ),
            }
        },
    );
}

/// Numbers for the gradients of a block's scores, by query.
struct Queries {
    lse: [f32; LANES],
    delta: [f32; LANES],
    /// Indices of the weights for key 0 in the dropout mask.
    indices: [u64; LANES],
    mask: Option<Mask>,
    /// The first key of the block.
    first_key: usize,
}

impl Queries {
    /// Turns scores, which are still to be multiplied by `factor`, into masked weights, and
    /// gradients of masked weights into gradients of q k'. `slope` is that of the cap at a score.
    #[inline(always)]
    fn weigh(
        &self,
        weights: &mut [[f32; LANES]],
        d_scores: &mut [[f32; LANES]],
        [factor, scale]: [f32; 2],
        slope: impl Fn(f32) -> f32,
    ) {
        for (key, (weights, d_scores)) in weights.iter_mut().zip(d_scores).enumerate() {
            let by = (self.first_key + key) as u32;
            let factors = self.mask.map_or([1.0; LANES], |mask| mask.across(&self.indices, by));
            let lanes = weights.iter_mut().zip(d_scores).zip(factors);
            for (((w, d), f), (lse, delta)) in lanes.zip(self.lse.iter().zip(&self.delta)) {
                let weight = exp(w.mul_add(factor, -lse));
                *d = weight * d.mul_add(f, -delta) * scale * slope(*w);
                *w = weight * f;
            }
        }
    }
}

#[cfg(test)]
mod tests;
