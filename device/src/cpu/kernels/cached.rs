//! Ops of the KV cache: one keeps keys and values, and one computes the attention of a new token. A
//! unit of attention is a head of queries.

use super::math::{Cap, dot, exp, max, read, vectorised};
use super::{Memory, not_a_kernel, number, values, values_mut};
use crate::cpu::workers::{Rows, Workers, attention_floats};
use crate::numerics::view::cast;
use crate::op::{Heads, Op, Scores};
use crate::{Tensor, View};
use std::ops::Range;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::CachedAttention { q, cache, out, heads, scores, sinks } => {
            attend(m, workers, [q, cache, out], heads, scores, sinks)
        }
        Op::LastColumns { x, y } => keep(m, workers, x, y),
        _ => not_a_kernel(),
    }
}

/// Copies the last columns of each row of x to y. A unit is a row.
fn keep(m: &impl Memory, workers: &Workers, x: Tensor, y: Tensor) -> Result<(), String> {
    let ((rows, of), (_, width)) = (x.shape(), y.shape());
    let x = values(m, x)?;
    let y = Rows { view: values_mut(m, y)?, each: width };
    workers.split(rows, rows * width, y, &|units, y, _| {
        let mut left = y.view;
        for row in units {
            let (mut to, rest) = left.split_at(width);
            cast(x.slice((row + 1) * of - width..(row + 1) * of), &mut to);
            left = rest;
        }
    });
    Ok(())
}

fn attend(
    m: &impl Memory,
    workers: &Workers,
    [q, cache, out]: [Tensor; 3],
    heads: Heads,
    scores: Scores,
    sinks: Option<Tensor>,
) -> Result<(), String> {
    let (positions, width) = cache.shape();
    let dim = q.len() / heads.count;
    workers.need(attention_floats(positions, dim))?;
    let Scores { scale, cap, .. } = scores;
    let cap = cap.map(|cap| Cap::new(cap, 1.0));
    let head = CacheShape { heads, dim, positions, width, scale, cap };
    let (q, cache) = (values(m, q)?, values(m, cache)?);
    let sinks = sinks.map(|sinks| values(m, sinks)).transpose()?;
    let out = Rows { view: values_mut(m, out)?, each: dim };
    workers.split(heads.count, positions * width, out, &|units, mut out, scratch| {
        for unit in units.clone() {
            let sink = sinks.map(|sinks| number(sinks, unit));
            let sums = head.attend(unit, q, cache, sink, &mut scratch.floats);
            out.view.store((unit - units.start) * dim, sums);
        }
    });
    Ok(())
}

#[derive(Clone, Copy)]
struct CacheShape {
    heads: Heads,
    /// Elements of a head (D).
    dim: usize,
    /// Rows of the cache.
    positions: usize,
    /// Elements of a row of the cache.
    width: usize,
    /// Factor of q k'.
    scale: f32,
    /// Cap of the scores.
    cap: Option<Cap>,
}

impl CacheShape {
    /// Index of the key (0) or the value (1) that head `unit` sees at a position.
    const fn at(self, position: usize, unit: usize, part: usize) -> usize {
        let head = part * self.heads.kv_count + unit / self.heads.group();
        position * self.width + head * self.dim
    }

    /// Output of a head (D): the weighted mean of the values.
    fn attend<'a>(
        self,
        unit: usize,
        q: View<'_>,
        cache: View<'_>,
        sink: Option<f32>,
        floats: &'a mut [f32],
    ) -> &'a [f32] {
        let (query, floats) = floats.split_at_mut(self.dim);
        let (row, floats) = floats.split_at_mut(self.dim);
        let (sums, floats) = floats.split_at_mut(self.dim);
        let weights = &mut floats[..self.positions];
        q.load(unit * self.dim, query);
        query.iter_mut().for_each(|x| *x *= self.scale);
        let each = |position, part| -> Range<usize> {
            let at = self.at(position, unit, part);
            at..at + self.dim
        };
        vectorised(
            #[inline(always)]
            || {
                for (position, score) in weights.iter_mut().enumerate() {
                    *score = dot(query, read(&cache, each(position, 0).start, self.dim, row));
                }
                if let Some(cap) = self.cap {
                    weights.iter_mut().for_each(|score| *score = cap.of(*score));
                }
                let top = max(weights);
                let mut total = 0.0;
                for weight in weights.iter_mut() {
                    *weight = exp(*weight - top);
                    total += *weight;
                }
                if let Some(sink) = sink {
                    total += exp(sink - top);
                }
                sums.fill(0.0);
                for (position, weight) in weights.iter().enumerate() {
                    let value = read(&cache, each(position, 1).start, self.dim, row);
                    sums.iter_mut().zip(value).for_each(|(sum, x)| *sum = weight.mul_add(*x, *sum));
                }
                sums.iter_mut().for_each(|sum| *sum /= total);
            },
        );
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, TYPES, assert_close, noise};
    use super::*;
    use crate::Dtype;

    #[test]
    fn the_last_columns_are_kept_as_they_are() {
        for ((dtype, _), threads) in TYPES.iter().flat_map(|t| [(*t, 1), (*t, 3)]) {
            for (n, of, width) in [(1, 9, 4), (77, 48, 16), (5, 8, 8), (300, 300, 270)] {
                let mut rig = Rig::new(threads);
                let x = rig.put(dtype, (n, of), &noise(1, n * of));
                let y = rig.out(dtype, (n, width));
                rig.run(&Op::LastColumns { x, y });
                let (x, y) = (rig.get(x), rig.get(y));
                let want = x.chunks(of).flat_map(|row| &row[of - width..]);
                assert!(y.iter().eq(want), "{dtype:?} {n} x {of}, {width}");
            }
        }
    }

    #[test]
    fn one_query_attends_to_all_that_is_kept() {
        for ((dtype, ulp), threads) in TYPES.iter().flat_map(|t| [(*t, 1), (*t, 3)]) {
            for (n, count, kv_count, dim) in [(1, 2, 2, 4), (77, 6, 2, 10), (300, 4, 1, 80)] {
                for scores in [
                    Scores::of(dim),
                    Scores { scale: 0.75, ..Scores::of(dim) },
                    Scores { scale: 0.75, cap: Some(1.5), window: None },
                ] {
                    let heads = Heads { count, kv_count, first: 0, total: count, seq_len: 1 };
                    check(Rig::new(threads), dtype, ulp, n, dim, heads, scores);
                }
            }
        }
    }

    /// Compares with the formula, for `n` rows of the cache and heads of `dim` elements.
    fn check(
        mut rig: Rig,
        dtype: Dtype,
        ulp: f64,
        n: usize,
        dim: usize,
        heads: Heads,
        scores: Scores,
    ) {
        let Heads { count, kv_count, .. } = heads;
        let width = 2 * kv_count * dim;
        let q = rig.put(dtype, (1, count * dim), &noise(1, count * dim));
        let cache = rig.put(dtype, (n, width), &noise(2, n * width));
        let out = rig.out(dtype, (1, count * dim));
        rig.run(&Op::CachedAttention { q, cache, out, heads, scores, sinks: None });
        let (q, cache) = (rig.get(q), rig.get(cache));
        let mut want = Vec::new();
        for head in 0..count {
            let of = |part: usize, p: usize, d: usize| {
                let head = part * kv_count + head * kv_count / count;
                cache[p * width + head * dim + d]
            };
            let score = |p: usize| -> f64 {
                let x: f64 = (0..dim).map(|d| q[head * dim + d] * of(0, p, d)).sum();
                let s = x * f64::from(scores.scale);
                let cap = scores.cap.map(f64::from);
                cap.map_or(s, |cap| cap * (s / cap).tanh()).exp()
            };
            let total: f64 = (0..n).map(score).sum();
            want.extend(
                (0..dim).map(|d| (0..n).map(|p| score(p) * of(1, p, d)).sum::<f64>() / total),
            );
        }
        assert_close(&rig.get(out), &want, 2e-6, ulp);
    }
}
