//! The whole model: handles of every parameter and activation, and one call per part and direction.
//!
//! Segments: 0 the embedding, 1..=L the blocks, L + 1 the final norm. The caller walks them and decides what
//! happens between; see the engine's step.

use crate::block::{self, Block, BlockParams, BlockSaved};
use crate::branch::Scratch;
use crate::checkpoints::Checkpoints;
use crate::embedding::{self, Embedding};
use crate::loss::Head;
use crate::norm::{Norm, NormSaved};
use crate::params::{Init, SegmentLayout, Split};
use crate::shape::{BatchTensors, GptShape, Pass};
use device::{Arena, Device, Plan, Tensor};

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
