//! The whole model: handles of every parameter and activation, and one call per part and direction.
//!
//! Segments: 0 the embedding, 1..=L the blocks, L + 1 the final norm. The caller walks them and decides what
//! happens between; see the engine's step.

use crate::block::{self, Block, BlockParams, BlockSaved, Scratch};
use crate::checkpoints::{Checkpoints, Keep};
use crate::embedding::{self, Embedding};
use crate::loss::Head;
use crate::norm::{Norm, NormSaved};
use crate::params::{Init, SegmentLayout, Split};
use crate::region::Region;
use device::{Arena, Device, Dropout, Dtype, Heads, Plan, Tensor, VocabShard, random};

/// Everything that decides shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct GptShape {
    /// L
    pub layers: usize,
    /// C
    pub hidden: usize,
    /// H, of all ranks; a multiple of `tp_size`.
    pub heads: usize,
    /// T
    pub seq_len: usize,
    /// Tokens, without padding.
    pub vocab: usize,
    /// F
    pub ffn_hidden: usize,
    /// B
    pub micro_batch: usize,
    /// t
    pub tp_size: usize,
    /// Tokens outside the linears are split over the ranks.
    pub sequence: bool,
    /// Blocks keep only their input.
    pub recompute: bool,
    /// Of that input each rank keeps its share. With recomputation and without `sequence`, which splits it too.
    pub partition_checkpoints: bool,
    /// Where it is kept; on the host each rank keeps its share anyway. With recomputation.
    pub keep: Keep,
    /// Micro-batches whose inputs of the blocks are kept at once; more than one with recomputation only.
    pub checkpoint_sets: usize,
    /// Of parameters, activations and gradients.
    pub dtype: Dtype,
    /// Of sums over the ranks.
    pub partial_dtype: Dtype,
    /// Probability of dropping.
    pub dropout: f32,
    /// Of the initial weights.
    pub init_std: f64,
}

impl GptShape {
    /// B T
    pub const fn tokens(&self) -> usize {
        self.micro_batch * self.seq_len
    }

    /// Tokens of one rank outside the linears.
    pub const fn rows(&self) -> usize {
        if self.sequence { self.tokens() / self.tp_size } else { self.tokens() }
    }

    /// V/t: a multiple of 8, so that matrix units run full.
    pub const fn vocab_per_rank(&self) -> usize {
        self.vocab.div_ceil(8 * self.tp_size) * 8
    }

    /// Parameters, without padding.
    pub const fn parameters(&self) -> u64 {
        let (c, f, l) = (self.hidden as u64, self.ffn_hidden as u64, self.layers as u64);
        let block = 4 * c * c + 2 * c * f + 9 * c + f;
        (self.vocab as u64 + self.seq_len as u64) * c + l * block + 2 * c
    }

    /// Operations of one token, forward and backward, without recomputation: 6 per parameter of the linears,
    /// plus attention's causal products.
    pub const fn model_flops_per_token(&self) -> f64 {
        let (c, f, l) = (self.hidden as f64, self.ffn_hidden as f64, self.layers as f64);
        let linears = l * (4.0 * c * c + 2.0 * c * f) + self.vocab as f64 * c;
        6.0 * linears + 6.0 * l * self.seq_len as f64 * c
    }

    pub(crate) const fn region(&self) -> Region {
        Region { sequence: self.sequence }
    }

    pub(crate) fn heads_of(&self, dev: &Device) -> Heads {
        let count = self.heads / self.tp_size;
        let (first, total) = (dev.rank().tp * count, self.heads);
        Heads { count, first, total, seq_len: self.seq_len }
    }

    pub(crate) fn vocab_shard(&self, dev: &Device) -> VocabShard {
        let columns = self.vocab_per_rank();
        let first = dev.rank().tp * columns;
        VocabShard { first, valid: self.vocab.saturating_sub(first).min(columns) }
    }
}

/// What changes from one micro-batch to the next.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Of this step's dropout; unused when `training` is false.
    pub dropout_key: u64,
    /// (sample of the step) times T, of the micro-batch's first sample.
    pub first_token: u64,
    /// Dropout works.
    pub training: bool,
    /// Where the inputs of its blocks are kept, below [`GptShape::checkpoint_sets`].
    pub set: usize,
}

impl Pass {
    pub(crate) fn dropout(
        &self,
        shape: &GptShape,
        layer: u64,
        site: u64,
        first_row: u64,
    ) -> Dropout {
        let key = random::key(random::key(self.dropout_key, layer), site);
        Dropout { p: if self.training { shape.dropout } else { 0.0 }, key, first_row }
    }

    pub(crate) fn first_row(&self, dev: &Device, shape: &GptShape) -> u64 {
        shape.region().first_row(dev, self.first_token, shape.rows())
    }
}

/// A micro-batch on the device, (B T) I32 each.
#[derive(Clone, Copy, Debug)]
pub struct BatchTensors {
    /// Inputs.
    pub tokens: Tensor,
    /// The next token, or negative: not counted.
    pub targets: Tensor,
    /// Positions in `tokens`, sorted by token (stable).
    pub order: Tensor,
}

/// Handles of the model: the same on every rank.
#[derive(Clone, Debug)]
pub struct Gpt {
    shape: GptShape,
    segments: Vec<SegmentLayout>,
    params: Vec<Tensor>,
    embedding: Embedding,
    blocks: Vec<Block>,
    final_norm: Norm,
    final_saved: NormSaved,
    head: Head,
    scratch: Scratch,
    x: Vec<Checkpoints>, // by set, (rows, C): input of block l; x[L] the final norm's
    d_x: Tensor,         // (rows, C): the running gradient
}

/// Layouts of all segments; flat lengths are multiples of `align`.
fn layouts(shape: &GptShape, align: usize) -> Vec<SegmentLayout> {
    let (c, t) = (shape.hidden, shape.tp_size);
    let final_norm = SegmentLayout::new("final_norm".into(), align)
        .add("ln_f.weight", (c, 1), (Split::Replicated, t), Init::Constant(1.0))
        .add("ln_f.bias", (c, 1), (Split::Replicated, t), Init::Constant(0.0))
        .close(align);
    let blocks = (0..shape.layers).map(|layer| block::layout(shape, layer, align));
    std::iter::once(embedding::layout(shape, align)).chain(blocks).chain([final_norm]).collect()
}

impl Gpt {
    /// Elements of the longest segment of a rank, without padding.
    pub fn longest_segment(shape: &GptShape) -> usize {
        // All blocks are alike.
        let one = GptShape { layers: shape.layers.min(1), ..shape.clone() };
        layouts(&one, 1).iter().map(|s| s.len).max().unwrap_or(0)
    }

    /// Lays out parameters and activations; flat segments are multiples of `align` elements.
    pub fn plan(plan: &mut Plan, shape: &GptShape, align: usize) -> Self {
        let (rows, c, dtype) = (shape.rows(), shape.hidden, shape.dtype);
        let segments = layouts(shape, align);
        let flat = |plan: &mut Plan, s: &SegmentLayout| {
            plan.tensor(
                (Arena::Device, "parameters"),
                format!("{}.params", s.name),
                dtype,
                (1, s.padded),
            )
        };
        let params: Vec<Tensor> = segments.iter().map(|s| flat(plan, s)).collect();
        let scratch = Scratch::plan(plan, shape);
        let x = (0..shape.checkpoint_sets).map(|set| Checkpoints::plan(plan, shape, set)).collect();
        let d_x = plan.tensor((Arena::Device, "transients"), "d_x", dtype, (rows, c));
        let shared = shape.recompute.then(|| BlockSaved::plan(plan, shape, "block"));
        let mut block = |layer: usize| {
            let (layout, flat) = (segments[layer + 1].clone(), params[layer + 1]);
            let own = || BlockSaved::plan(plan, shape, &format!("block.{layer}"));
            let saved = shared.unwrap_or_else(own);
            Block { layer, params: BlockParams::cut(&layout, flat), layout, saved, scratch }
        };
        let blocks = (0..shape.layers).map(&mut block).collect();
        let last = &segments[shape.layers + 1];
        let final_flat = params[shape.layers + 1];
        Self {
            embedding: Embedding::cut(&segments[0], params[0]),
            final_norm: Norm { gain: last.cut(final_flat, 0), bias: last.cut(final_flat, 1) },
            final_saved: NormSaved::plan(plan, "final_norm", dtype, (rows, shape.tokens(), c)),
            head: Head::plan(plan, shape),
            shape: shape.clone(),
            segments,
            params,
            blocks,
            scratch,
            x,
            d_x,
        }
    }

    /// The shapes that it was planned with.
    pub const fn shape(&self) -> &GptShape {
        &self.shape
    }

    /// Layouts by segment.
    pub fn segments(&self) -> &[SegmentLayout] {
        &self.segments
    }

    /// The flat parameters of a segment.
    pub fn params(&self, segment: usize) -> Tensor {
        self.params[segment]
    }

    /// Tokens to the first block's input. Reads segment 0.
    pub fn embed(&self, dev: &Device, pass: &Pass, batch: &BatchTensors) {
        let (x, partial) = (self.x[pass.set].input(0), self.scratch.partial);
        self.embedding.forward(dev, &self.shape, (pass, batch), x, partial);
    }

    /// Block `layer`: x[layer] to x[layer + 1]. Reads segment `layer + 1`.
    pub fn block_forward(&self, dev: &Device, pass: &Pass, layer: usize) {
        if pass.training {
            self.x[pass.set].keep(dev, layer);
        }
        let (x, y) = (self.x[pass.set].input(layer), self.x[pass.set].input(layer + 1));
        self.blocks[layer].forward(dev, &self.shape, pass, x, y);
    }

    /// Final norm and logits. Reads segments L + 1 and 0.
    pub fn project(&self, dev: &Device, pass: &Pass) {
        let x = self.x[pass.set].input(self.shape.layers);
        self.final_norm.forward(dev, self.shape.region(), x, self.final_saved);
        self.head.project(dev, self.final_saved.normed, self.embedding.tokens);
    }

    /// (B T, V/t): this rank's columns, until [`loss_backward`](Self::loss_backward) overwrites them.
    pub const fn logits(&self) -> Tensor {
        self.head.logits
    }

    /// loss (1) F64: the sum over the micro-batch's tokens.
    pub fn loss(&self, dev: &Device, batch: &BatchTensors, loss: Tensor) {
        self.head.forward(dev, &self.shape, batch, loss);
    }

    /// From the loss to the last block's output. `grads` are the buckets of segments L + 1 and 0; of the
    /// latter the token table's part is written, and completed by [`embed_backward`](Self::embed_backward).
    pub fn loss_backward(
        &self,
        dev: &Device,
        (pass, batch): (&Pass, &BatchTensors),
        scale: Tensor,
        (final_bucket, embedding_bucket): (Tensor, Tensor),
    ) {
        let (shape, region) = (&self.shape, self.shape.region());
        self.head.backward(dev, shape, batch, scale);
        let d_normed = self.scratch.partial;
        let d_table = self.segments[0].cut(embedding_bucket, 0);
        let forward = (self.final_saved.normed, self.embedding.tokens);
        self.head.project_backward(dev, shape, forward, (d_normed, d_table));
        let layout = &self.segments[shape.layers + 1];
        let (gain, bias) = (layout.cut(final_bucket, 0), layout.cut(final_bucket, 1));
        let saved = (self.x[pass.set].input(shape.layers), self.final_saved);
        let d_normed = region.rows(dev, d_normed);
        self.final_norm.backward(dev, saved, d_normed, (self.d_x, false), Norm { gain, bias });
        region.sum_replicated_grads(dev, layout.replicated(final_bucket));
    }

    /// Block `layer` backward; `bucket` is that of segment `layer + 1`, whole at `record(Compute)`.
    pub fn block_backward(&self, dev: &Device, pass: &Pass, layer: usize, bucket: Tensor) {
        self.x[pass.set].restore(dev, layer);
        let x = self.x[pass.set].input(layer);
        self.blocks[layer].backward(dev, &self.shape, pass, (x, self.d_x), bucket);
    }

    /// The embedding backward; `bucket` is that of segment 0, whole at `record(Compute)`.
    pub fn embed_backward(&self, dev: &Device, pass: &Pass, batch: &BatchTensors, bucket: Tensor) {
        let grads = Embedding::cut(&self.segments[0], bucket);
        let d = (self.d_x, self.scratch.d_branch);
        self.embedding.backward(dev, &self.shape, (pass, batch), d, grads);
        self.shape.region().sum_replicated_grads(dev, self.segments[0].replicated(bucket));
    }
}
