//! The KV cache: keys and values of earlier tokens, so that generation computes only new tokens. Of
//! gated delta nets it has the inputs of all tokens, and the states before the last chunk.

use crate::attention::{Attention, AttentionActivations, AttentionContext};
use crate::delta_net::{DeltaActivations, DeltaContext, DeltaNet};
use crate::delta_scratch::DeltaPass;
use crate::shape::DecoderShape;
use device::{
    Arena, DELTA_CHUNK, Device, Dropout, Dtype, Heads, Lane::Compute, Op, Plan, Scores, Tensor,
};
use std::ops::Range;

/// Keys and values of some samples, on one rank.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    /// Outputs of a gated delta net for one sample, if a layer has one; all layers share them.
    outputs: Option<DeltaPass>,
    /// For each sample, the number of tokens of which the cache has the states. [`DELTA_CHUNK`] divides
    /// it, so that a pass has the chunks of the whole text; at 0 the states are 0.
    states_at: Vec<usize>,
    /// S: number of samples.
    samples: usize,
    /// T: maximum number of tokens of a sample.
    context: usize,
}

/// The cache of one layer. Rows of a sample are contiguous.
#[derive(Clone, Copy, Debug)]
enum LayerCache {
    /// (S T, 2 K D): a row has the keys of all heads, then the values.
    Attention(Tensor),
    /// The inputs of a gated delta net, and its states.
    Delta {
        /// (S T, U): queries, keys and values before the convolution.
        input: Tensor,
        /// (S T, 2 H): step sizes and decays before their functions.
        raw_gates: Tensor,
        /// (S, H d e) F32: the states of each sample before the last chunk.
        states: Tensor,
    },
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
        let rows = samples * context;
        let layer = |layer: usize| {
            let mut one = |what: &str, width| {
                plan.tensor(at, format!("block.{layer}.{what}"), shape.dtype, (rows, width))
            };
            match shape.delta_of(layer) {
                None => {
                    LayerCache::Attention(one("cache", 2 * shape.kv_per_rank() * shape.head_dim))
                }
                Some(delta) => {
                    let heads = delta.heads(shape.tp_size, context);
                    let input = one("delta_cache", heads.columns());
                    let raw_gates = one("gates_cache", 2 * heads.values);
                    let (name, size) =
                        (format!("block.{layer}.states_cache"), (samples, heads.state_len()));
                    let states = plan.tensor(at, name, Dtype::F32, size);
                    LayerCache::Delta { input, raw_gates, states }
                }
            }
        };
        let layers = (0..shape.layers).map(layer).collect();
        let outputs = shape.delta.map(|delta| DeltaPass::plan(plan, shape, &delta));
        Self { layers, outputs, states_at: vec![0; samples], samples, context }
    }

    /// Number of tokens whose states a pass starts from; at 0 the states are 0.
    fn base_of(&self, NewTokens { sample, first, .. }: NewTokens) -> usize {
        Some(self.states_at[sample]).filter(|at| *at <= first).unwrap_or(0)
    }

    /// Notes the states that the passes over new tokens left in all layers.
    pub(crate) fn advance(&mut self, new: &[NewTokens]) {
        for of in new {
            self.states_at[of.sample] = last_chunk(self.base_of(*of), of.first + of.count);
        }
    }

    /// Rows of the cache for some positions of a sample.
    fn range(&self, sample: usize, positions: Range<usize>) -> Range<usize> {
        assert!(sample < self.samples && positions.end <= self.context, "the cache holds them");
        let at = sample * self.context;
        at + positions.start..at + positions.end
    }

    /// Keys and values of a layer with attention for some positions of a sample.
    fn rows(&self, layer: usize, sample: usize, positions: Range<usize>) -> Tensor {
        let LayerCache::Attention(cache) = self.layers[layer] else {
            unreachable!("layer {layer} has attention");
        };
        cache.rows(self.range(sample, positions))
    }

    /// Inputs of a layer with a gated delta net for some positions of a sample: queries, keys and
    /// values, then the gates.
    fn inputs(&self, layer: usize, sample: usize, positions: Range<usize>) -> [Tensor; 2] {
        let LayerCache::Delta { input, raw_gates, .. } = self.layers[layer] else {
            unreachable!("layer {layer} has a gated delta net");
        };
        let rows = self.range(sample, positions);
        [input, raw_gates].map(|cache| cache.rows(rows.clone()))
    }

    /// States (1, H d e) of a sample before the last chunk, in a layer with a gated delta net.
    fn states(&self, layer: usize, sample: usize) -> Tensor {
        let LayerCache::Delta { states, .. } = self.layers[layer] else {
            unreachable!("layer {layer} has a gated delta net");
        };
        states.rows(sample..sample + 1)
    }
}

/// Start of the last chunk of a pass over the tokens `first..end`.
fn last_chunk(first: usize, end: usize) -> usize {
    first + (end - first - 1) / DELTA_CHUNK * DELTA_CHUNK
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

impl DeltaNet {
    /// Computes normed (rows, C) of new tokens -> the normed and gated outputs of the heads, in
    /// `saved`. Adds the new tokens to the cache. The rule starts from the states of the cache, over at
    /// most a chunk of earlier tokens; if the text was cut before them, it starts at the first token.
    pub(crate) fn extend(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        normed: Tensor,
        saved: DeltaActivations,
        Extension { cache, new, layer, .. }: Extension<'_>,
    ) {
        let (Some(all), Some(delta)) = (cache.outputs, shape.delta_of(layer)) else {
            unreachable!("layer {layer} has a gated delta net");
        };
        self.project(dev, normed, saved);
        for (new @ NewTokens { sample, first, count }, rows) in rows(new) {
            let (tokens, own) = (first + count, saved.inputs(rows.clone()));
            let cached = cache.inputs(layer, sample, first..tokens);
            for (src, dst) in own.into_iter().zip(cached) {
                dev.submit(Compute, Op::Copy { src, dst });
            }
            let (base, states) = (cache.base_of(new), cache.states(layer, sample));
            let pass = DeltaContext::of(shape, &delta, None);
            // The convolution also sees the tokens before the chunk.
            let seen = base.min(delta.taps - 1);
            let [input, _] = cache.inputs(layer, sample, base - seen..tokens);
            let qkv = all.qkv.rows(0..input.shape().0);
            self.convolve(dev, input, qkv, pass.of_tokens(input.shape().0));
            let [_, raw_gates] = cache.inputs(layer, sample, base..tokens);
            let outputs = all.of(seen, tokens - base);
            let initial = (base > 0).then_some(states);
            self.rule(dev, raw_gates, outputs, initial, pass.of_tokens(tokens - base));
            let (src, dst) = (all.out.rows(first - base..tokens - base), saved.out(rows));
            dev.submit(Compute, Op::Copy { src, dst });
            let chunks = (last_chunk(base, tokens) - base) / DELTA_CHUNK;
            if chunks > 0 {
                let src = all.states.rows(chunks..chunks + 1);
                dev.submit(Compute, Op::Copy { src, dst: states });
            }
        }
        self.norm(dev, saved, shape.architecture.norm_epsilon as f32);
    }
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
                Self::multiply_gate(dev, saved);
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
            Self::multiply_gate(dev, saved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_more_costs_at_most_a_chunk() {
        let (layers, states_at) = (Vec::new(), vec![0; 2]);
        let mut cache = KvCache { layers, outputs: None, states_at, samples: 2, context: 300 };
        let of = |first, count| NewTokens { sample: 1, first, count };
        // Tokens before a pass and new ones; the first token over which the rule runs.
        for (first, count, base) in [
            (0, 130, 0),
            (130, 1, 128),
            (131, 61, 128),
            (192, 1, 128),
            (193, 1, 192),
            // The text was cut.
            (192, 2, 192),
            (191, 1, 0),
            (192, 1, 128),
        ] {
            assert_eq!(cache.base_of(of(first, count)), base, "{count} behind {first}");
            cache.advance(&[of(first, count)]);
        }
        assert_eq!(cache.states_at, [0, 192]);
    }
}
