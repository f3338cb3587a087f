//! Keys and values of the tokens that a model has read (the KV cache): generation computes each new token alone.

use crate::attention::{Attention, AttentionActivations, AttentionContext};
use crate::shape::DecoderShape;
use device::{Arena, Device, Dropout, Heads, Lane::Compute, Op, Plan, Tensor};
use std::ops::Range;

/// Keys and values of some samples, on one rank.
#[derive(Clone, Debug)]
pub struct KvCache {
    /// By layer, (S T, 2 K D): rows of a sample lie together, in each the keys of all heads and then the values.
    layers: Vec<Tensor>,
    /// S
    samples: usize,
    /// T: tokens that a sample may have.
    context: usize,
}

/// New tokens of a sample, which stand side by side in a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewTokens {
    /// The number of the sample in the cache.
    pub sample: usize,
    /// The position of the first new token, which is the number of tokens that the sample had.
    pub first: usize,
    /// Number of new tokens.
    pub count: usize,
}

impl KvCache {
    /// Plans room for the tokens of `samples` samples of the model's `seq_len`.
    pub fn plan(plan: &mut Plan, shape: &DecoderShape, samples: usize) -> Self {
        let (at, context) = ((Arena::Device, "keys and values"), shape.seq_len);
        let size = (samples * context, 2 * shape.kv_per_rank() * shape.head_dim);
        let mut layer = |l| plan.tensor(at, format!("block.{l}.cache"), shape.dtype, size);
        Self { layers: (0..shape.layers).map(&mut layer).collect(), samples, context }
    }

    /// Rows of a layer: positions of a sample.
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
    /// Cosines and sines, where positions are rotary.
    pub(crate) table: Option<Tensor>,
}

impl Attention {
    /// normed (rows, C) of new tokens -> attention over them and what `cache` holds, in `saved`; their keys and values are
    /// then in the cache, too.
    pub(crate) fn extend(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        layer: usize,
        normed: Tensor,
        saved: AttentionActivations,
        extension: Extension<'_>,
    ) {
        let Extension { cache, new, table } = extension;
        self.project(dev, normed, saved);
        for (new, rows) in rows(new) {
            let heads = Heads { seq_len: new.count, ..shape.heads_of(dev) };
            let saved = saved.of(rows, heads.count);
            let table = table.map(|table| table.rows(new.first..new.first + new.count));
            let pass = AttentionContext { heads, dropout: Dropout::NONE, table, starts: None };
            self.rotate(dev, shape, saved, pass);
            let kept = cache.rows(layer, new.sample, new.first..new.first + new.count);
            dev.submit(Compute, Op::LastColumns { x: saved.qkv, y: kept });
            if new.first == 0 {
                let AttentionActivations { qkv, out, lse, .. } = saved;
                let (starts, dropout) = (None, Dropout::NONE);
                dev.submit(Compute, Op::Attention { qkv, out, lse, heads, starts, dropout });
                continue;
            }
            for i in 0..new.count {
                let q = saved.qkv.rows(i..i + 1).slice(0..shape.heads_width());
                let cache = cache.rows(layer, new.sample, 0..new.first + i + 1);
                let out = saved.out.rows(i..i + 1);
                dev.submit(Compute, Op::CachedAttention { q, cache, out, heads });
            }
        }
    }
}
