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
use crate::params::SegmentLayout;
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

/// A segment of the parameters by what it is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The token table, which is the output projection too, and the positions.
    Embedding,
    /// A block, from 0.
    Block(usize),
    /// The norm before the output projection.
    FinalNorm,
}

/// Gradients that the loss's backward pass writes, or begins: flat buckets of their segments.
#[derive(Clone, Copy, Debug)]
pub struct HeadBuckets {
    /// Of [`Part::FinalNorm`].
    pub final_norm: Tensor,
    /// Of [`Part::Embedding`].
    pub embedding: Tensor,
}

/// The final norm in the names of its parameters.
const FINAL_NORM: &str = "ln_f";

/// Layouts of all segments in the order of the forward pass, which is that of their numbers; flat lengths are multiples of `align`.
fn layouts(shape: &GptShape, align: usize) -> Vec<SegmentLayout> {
    let final_norm =
        SegmentLayout::new("final_norm".into(), String::new(), (shape.tp_size, align), |params| {
            Norm::declare(params, FINAL_NORM, shape.hidden);
        });
    let blocks = (0..shape.layers).map(|layer| block::layout(shape, layer, align));
    std::iter::once(embedding::layout(shape, align)).chain(blocks).chain([final_norm]).collect()
}

/// The number of a segment.
const fn number(shape: &GptShape, part: Part) -> usize {
    match part {
        Part::Embedding => 0,
        Part::Block(layer) => 1 + layer,
        Part::FinalNorm => 1 + shape.layers,
    }
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
            let at = number(shape, Part::Block(layer));
            let (layout, flat) = (segments[at].clone(), params[at]);
            let own = || BlockSaved::plan(plan, shape, &format!("block.{layer}"));
            let saved = shared.unwrap_or_else(own);
            Block { layer, params: BlockParams::cut(layout.of(flat)), layout, saved, scratch }
        };
        let blocks = (0..shape.layers).map(&mut block).collect();
        let flat = |part| {
            let at = number(shape, part);
            segments[at].of(params[at])
        };
        Self {
            embedding: Embedding::cut(flat(Part::Embedding)),
            final_norm: Norm::cut(flat(Part::FinalNorm), FINAL_NORM),
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

    /// The number of a segment, which is its place in the forward pass.
    pub const fn segment(&self, part: Part) -> usize {
        number(&self.shape, part)
    }

    /// What the segments are for, in the order of their numbers.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let blocks = (0..self.shape.layers).map(Part::Block);
        std::iter::once(Part::Embedding).chain(blocks).chain([Part::FinalNorm])
    }

    /// Segments of the parameters.
    pub const fn num_segments(&self) -> usize {
        self.segment(Part::FinalNorm) + 1
    }

    /// Layouts by segment.
    pub fn segments(&self) -> &[SegmentLayout] {
        &self.segments
    }

    /// The flat parameters of a segment.
    pub fn params(&self, segment: usize) -> Tensor {
        self.params[segment]
    }

    /// Tokens to the first block's input. Reads the embedding.
    pub fn embed(&self, dev: &Device, pass: &Pass, batch: &BatchTensors) {
        let (x, partial) = (self.x[pass.set].input(0), self.scratch.partial);
        self.embedding.forward(dev, &self.shape, (pass, batch), x, partial);
    }

    /// Block `layer`: its input to that of the next. Reads the block's segment.
    pub fn block_forward(&self, dev: &Device, pass: &Pass, layer: usize) {
        if pass.training {
            self.x[pass.set].keep(dev, layer);
        }
        let (x, y) = (self.x[pass.set].input(layer), self.x[pass.set].input(layer + 1));
        self.blocks[layer].forward(dev, &self.shape, pass, x, y);
    }

    /// Final norm and logits. Reads the final norm and the embedding.
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

    /// From the loss to the last block's output. Of the embedding's bucket the token table's part is written, and completed by
    /// [`embed_backward`](Self::embed_backward).
    pub fn loss_backward(
        &self,
        dev: &Device,
        (pass, batch): (&Pass, &BatchTensors),
        scale: Tensor,
        buckets: HeadBuckets,
    ) {
        let (shape, region) = (&self.shape, self.shape.region());
        self.head.backward(dev, shape, batch, scale);
        let d_normed = self.scratch.partial;
        let embedding = &self.segments[self.segment(Part::Embedding)];
        let d_table = Embedding::cut(embedding.of(buckets.embedding)).tokens;
        let forward = (self.final_saved.normed, self.embedding.tokens);
        self.head.project_backward(dev, shape, forward, (d_normed, d_table));
        let layout = &self.segments[self.segment(Part::FinalNorm)];
        let grads = Norm::cut(layout.of(buckets.final_norm), FINAL_NORM);
        let saved = (self.x[pass.set].input(shape.layers), self.final_saved);
        let d_normed = region.rows(dev, d_normed);
        self.final_norm.backward(dev, saved, d_normed, (self.d_x, false), grads);
        region.sum_replicated_grads(dev, layout.replicated(buckets.final_norm));
    }

    /// Block `layer` backward; `bucket` is that of its segment, whole at `record(Compute)`.
    pub fn block_backward(&self, dev: &Device, pass: &Pass, layer: usize, bucket: Tensor) {
        self.x[pass.set].restore(dev, layer);
        let x = self.x[pass.set].input(layer);
        self.blocks[layer].backward(dev, &self.shape, pass, (x, self.d_x), bucket);
    }

    /// The embedding backward; `bucket` is that of its segment, whole at `record(Compute)`.
    pub fn embed_backward(&self, dev: &Device, pass: &Pass, batch: &BatchTensors, bucket: Tensor) {
        let layout = &self.segments[self.segment(Part::Embedding)];
        let grads = Embedding::cut(layout.of(bucket));
        let d = (self.d_x, self.scratch.d_branch);
        self.embedding.backward(dev, &self.shape, (pass, batch), d, grads);
        self.shape.region().sum_replicated_grads(dev, layout.replicated(bucket));
    }
}
