//! The KV cache: keys and values of earlier tokens, so that generation computes only new tokens.

use crate::attention::{Attention, AttentionActivations, AttentionContext};
use crate::shape::DecoderShape;
use device::{Arena, Device, Dropout, Heads, Lane::Compute, Op, Plan, Scores, Tensor};
use std::ops::Range;

/// Keys and values of some samples, on one rank.
#[derive(Clone, Debug)]
pub struct KvCache {
    /// For each layer, (S T, 2 K D): rows of a sample are contiguous; a row has the keys of all
    /// heads, then the values.
    layers: Vec<Tensor>,
    /// S: number of samples.
    samples: usize,
    /// T: maximum number of tokens of a sample.
    context: usize,
}

/// New tokens of a sample, adjacent in a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewTokens {
    /// Number of the sample in the cache.
    pub sample: usize,
    /// Position of the first new token: the number of tokens that the sample already had.
    pub first: usize,
    /// Number of new tokens.
    pub count: usize,
}

impl KvCache {
    /// Plans a cache for `samples` samples of `seq_len` tokens.
    pub fn plan(plan: &mut Plan, shape: &DecoderShape, samples: usize) -> Self {
        let (at, context) = ((Arena::Device, "keys and values"), shape.seq_len);
        let size = (samples * context, 2 * shape.kv_per_rank() * shape.head_dim);
        let mut layer = |l| plan.tensor(at, format!("block.{l}.cache"), shape.dtype, size);
        Self { layers: (0..shape.layers).map(&mut layer).collect(), samples, context }
    }

    /// Rows of a layer for some positions of a sample.
    fn rows(&self, layer: usize, sample: usize, positions: Range<usize>) -> Tensor {
        assert!(sample < self.samples && positions.end <= self.context, "the cache holds them");
        let at = sample * self.context;
        self.layers[layer].rows(at + positions.start..at + positions.end)
    }
}

/// Runs of new tokens with their rows in the batch.
pub(crate) fn rows(new: &[NewTokens]) -> impl Iterator<Item = (NewTokens, Range<usize>)> {
    let mut at = 0;
    new.iter().map(move |new| {
        let start = at;
        at += new.count;
        (*new, start..at)
    })
}

/// Inputs of attention to a cache, besides its parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extension<'a> {
    pub(crate) cache: &'a KvCache,
    pub(crate) new: &'a [NewTokens],
    /// Number of the layer.
    pub(crate) layer: usize,
    /// Cosines and sines, if the layer rotates queries and keys.
    pub(crate) table: Option<Tensor>,
}

impl Attention {
    /// Computes normed (rows, C) of new tokens -> attention over them and the cached tokens, in
    /// `saved`. Adds the new keys and values to the cache.
    pub(crate) fn extend(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        normed: Tensor,
        saved: AttentionActivations,
        extension: Extension<'_>,
    ) {
        let Extension { cache, new, layer, table } = extension;
        let scores = shape.scores(layer);
        self.project(dev, normed, saved);
        for (new, rows) in rows(new) {
            let heads = Heads { seq_len: new.count, ..shape.heads_of(dev) };
            let saved = saved.of(rows, heads.count);
            let table = table.map(|table| table.rows(new.first..new.first + new.count));
            let (starts, dropout) = (None, Dropout::NONE);
            let pass = AttentionContext { heads, dropout, table, starts, scores };
            self.rotate(dev, shape, saved, pass);
            let cache_rows = cache.rows(layer, new.sample, new.first..new.first + new.count);
            dev.submit(Compute, Op::LastColumns { x: saved.qkv, y: cache_rows });
            if new.first == 0 {
                let AttentionActivations { qkv, out, lse, .. } = saved;
                let op = Op::Attention { qkv, out, lse, heads, starts, dropout, scores };
                dev.submit(Compute, op);
                if let Some(sinks) = self.sinks {
                    sinks.forward(dev, out, lse, heads);
                }
                continue;
            }
            for i in 0..new.count {
                let q = saved.qkv.rows(i..i + 1).slice(0..shape.heads_width());
                let end = new.first + i + 1;
                let first = scores.window.map_or(0, |window| end.saturating_sub(window));
                let cache = cache.rows(layer, new.sample, first..end);
                let (out, scores) = (saved.out.rows(i..i + 1), Scores { window: None, ..scores });
                let sinks = self.sinks.map(|sinks| sinks.0);
                dev.submit(Compute, Op::CachedAttention { q, cache, out, heads, scores, sinks });
            }
        }
    }
}
