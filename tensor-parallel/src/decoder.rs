//! The whole model: handles of every parameter and activation, and one call per part and direction.
//!
//! Segments: 0 is the embedding, 1..=L are the blocks, L + 1 is the final norm, L + 2 is the output
//! projection if it is not the token table. The caller runs them in order, with its own work in
//! between; see the engine's step.

use crate::activation_checkpoints::{ActivationCheckpoints, slot_prefix};
use crate::block::{self, Block, BlockParams};
use crate::block_activations::{BlockActivations, SharedActivations};
use crate::branch::Scratch;
use crate::embedding::{self, Embedding, OutputGradient};
use crate::expert_loads::ExpertLoads;
use crate::experts::RouterSlot;
use crate::host_activations::{ActivationCopies, HostActivations};
use crate::kv_cache::{Extension, KvCache, NewTokens};
use crate::loss::{Head, HeadInputs, LossTensors};
use crate::norm::{AppliedNorm, Norm, NormActivations};
use crate::params::SegmentLayout;
use crate::rotary::RotaryTables;
use crate::router_correction::RouterCorrections;
use crate::shape::{BatchTensors, DecoderShape, MicrobatchContext, Ring};
use device::{Arena, Device, Error, Event, Lane::Compute, Op, Plan, Tensor};
use std::ops::Range;

/// Handles of the model: the same on every rank.
#[derive(Clone, Debug)]
pub struct Decoder {
    shape: DecoderShape,
    segments: Vec<SegmentLayout>,
    params: Vec<Tensor>,
    /// For each segment that is not resident, the number of the buffer that it shares with others.
    param_buffers: Vec<Option<usize>>,
    embedding: Embedding,
    blocks: Vec<Block>,
    final_norm: Norm,
    final_saved: NormActivations,
    /// (V/t, C): the output projection.
    table: Tensor,
    head: Head,
    rotary: RotaryTables,
    /// Corrections of the scores of routers, if they have some.
    corrections: Option<RouterCorrections>,
    scratch: Scratch,
    /// Counts of the tokens of each expert, if the model has experts.
    loads: Option<ExpertLoads>,
    x: Vec<ActivationCheckpoints>, // by slot, (rows, C): input of block l; x[L] the final norm's
    d_x: Vec<Tensor>,              // by slot of one backward group, (rows, C): the running gradient
    /// Activations of blocks on the host: of the attention branch, of the MLP branch.
    on_host: [HostActivations; 2],
}

/// The purpose of a segment of the parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SegmentRole {
    /// The token table and learned positions. A tied token table is the output projection too.
    Embedding,
    /// A block, counted from 0.
    Block(usize),
    /// The norm before the output projection.
    FinalNorm,
    /// The output projection, if it is not the token table.
    Head,
}

/// Gradients that the backward pass of the loss writes, or starts: flat buckets of their segments.
#[derive(Clone, Copy, Debug)]
pub struct HeadBuckets {
    /// The bucket of [`SegmentRole::FinalNorm`].
    pub final_norm: Tensor,
    /// The bucket of [`Decoder::head`].
    pub head: Tensor,
}

/// Name of the final norm in its parameters' names.
const FINAL_NORM: &str = "ln_f";
/// Name of the output projection, if it is not the token table.
const HEAD: &str = "head";

/// Layouts of all segments in the order of the forward pass and of their numbers; flat lengths are
/// multiples of `align`.
pub(crate) fn layouts(shape: &DecoderShape, align: usize) -> Vec<SegmentLayout> {
    let (t, trained) = (shape.tp_size, &shape.trained);
    let mut all = vec![embedding::layout(shape, align)];
    all.extend((0..shape.layers).map(|layer| block::layout(shape, layer, align)));
    all.push(SegmentLayout::new("final_norm".into(), String::new(), t, trained, align, |params| {
        Norm::declare(params, FINAL_NORM, shape);
    }));
    if !shape.architecture.tied {
        all.push(SegmentLayout::new("head".into(), String::new(), t, trained, align, |params| {
            let (size, init) = ((shape.vocab, shape.hidden), shape.weight_init());
            params.add_padded(HEAD, size, shape.vocab_per_rank(), init);
        }));
    }
    all
}

/// Number of a segment.
const fn number(shape: &DecoderShape, role: SegmentRole) -> usize {
    match role {
        SegmentRole::Embedding => 0,
        SegmentRole::Block(layer) => 1 + layer,
        SegmentRole::FinalNorm => 1 + shape.layers,
        SegmentRole::Head => 2 + shape.layers,
    }
}

/// For each segment, the number of the device buffer that it shares with other segments, if it is
/// not resident. A tied embedding is resident: the end of a forward pass and the start of the next
/// forward pass both read it.
fn param_buffers(shape: &DecoderShape) -> Vec<Option<usize>> {
    let Ring { buffers: slots, .. } = shape.ring;
    let streamed = |layer: &usize| !shape.ring.is_resident(*layer, shape.layers);
    let table = (slots > 0 && !shape.architecture.tied).then_some(slots);
    let mut all = vec![table];
    all.resize(1 + shape.layers, None);
    for (turn, layer) in (0..shape.layers).filter(streamed).enumerate() {
        all[number(shape, SegmentRole::Block(layer))] = Some(turn % slots);
    }
    all.push(None);
    if !shape.architecture.tied {
        all.push(table);
    }
    all
}

/// Plans the parameters: a tensor for each resident segment, and one for each shared buffer.
fn plan_params(
    plan: &mut Plan,
    shape: &DecoderShape,
    segments: &[SegmentLayout],
    slots: &[Option<usize>],
) -> Vec<Tensor> {
    let mut flat = |name: &str, len| {
        plan.tensor((Arena::Device, "parameters"), format!("{name}.params"), shape.dtype, (1, len))
    };
    let mut rings: Vec<Option<Tensor>> = vec![None; shape.ring.buffers + 1];
    let longest = |slot: usize| {
        let users = segments.iter().zip(slots).filter(|(_, of)| **of == Some(slot));
        users.map(|(s, _)| s.whole).max().unwrap_or(0)
    };
    let one = |(s, slot): (&SegmentLayout, &Option<usize>)| match *slot {
        None => flat(&s.name, s.whole),
        Some(slot) => {
            let ring = rings[slot].get_or_insert_with(|| {
                let of_blocks = slot < shape.ring.buffers;
                let name = if of_blocks { format!("ring.{slot}") } else { "tables".to_owned() };
                flat(&name, longest(slot))
            });
            ring.slice(0..s.whole)
        }
    };
    segments.iter().zip(slots).map(one).collect()
}

impl DecoderShape {
    /// The segment that holds the output projection.
    const fn head(&self) -> SegmentRole {
        if self.architecture.tied { SegmentRole::Embedding } else { SegmentRole::Head }
    }
}

impl Decoder {
    /// Trained elements of the longest segment of a rank, without padding.
    pub fn longest_segment(shape: &DecoderShape) -> usize {
        let few = DecoderShape { layers: 0, ..shape.clone() };
        let others = layouts(&few, 1).into_iter().map(|s| s.len);
        let blocks = shape.block_forms().map(|form| block::layout(shape, form.layer, 1).len);
        others.chain(blocks).max().unwrap_or_else(|| unreachable!("a decoder has an embedding"))
    }

    /// Lays out parameters and activations; flat segments are multiples of `align` elements.
    pub fn plan(plan: &mut Plan, shape: &DecoderShape, align: usize) -> Self {
        let (rows, c, dtype) = (shape.rows(), shape.hidden, shape.dtype);
        let segments = layouts(shape, align);
        let slots = param_buffers(shape);
        let params = plan_params(plan, shape, &segments, &slots);
        let scratch = Scratch::plan(plan, shape);
        let x = (0..shape.checkpoint_slots)
            .map(|slot| ActivationCheckpoints::plan(plan, shape, slot))
            .collect();
        let d_x = (0..shape.backward_slots()).map(|slot| {
            let name = format!("{}d_x", slot_prefix(slot));
            plan.tensor((Arena::Device, "transients"), name, dtype, (rows, c))
        });
        let d_x = d_x.collect();
        let shared = SharedActivations::plan(plan, shape, &scratch);
        let loads = ExpertLoads::plan(plan, shape);
        let ropes = shape.kinds.iter().filter_map(|kind| kind.rope.as_ref());
        let rotary = RotaryTables::plan(plan, ropes, shape.seq_len, shape.head_dim);
        let corrections = RouterCorrections::plan(plan, shape);
        let mut block = |layer: usize| {
            let at = number(shape, SegmentRole::Block(layer));
            let (layout, flat) = (segments[at].clone(), params[at]);
            let saved = shared.of_block(plan, shape, layer, &scratch);
            let router = RouterSlot::of_layer(plan, shape, loads.as_ref(), corrections, layer);
            let params = BlockParams::cut(layout.of(flat), shape, layer, &scratch);
            let table = shape.kind(layer).rope.as_ref().map(|rope| rotary.of(rope));
            Block { layer, params, layout, saved, scratch, router, table }
        };
        let blocks: Vec<Block> = (0..shape.layers).map(&mut block).collect();
        let saved: Vec<&[BlockActivations]> = blocks.iter().map(|of| &of.saved[..]).collect();
        let on_host = HostActivations::plan(plan, shape, &saved);
        let flat = |role| {
            let at = number(shape, role);
            segments[at].of(params[at])
        };
        let embedding = Embedding::cut(flat(SegmentRole::Embedding), shape);
        let own_table = || flat(SegmentRole::Head).whole(HEAD);
        Self {
            table: if shape.architecture.tied { embedding.tokens } else { own_table() },
            embedding,
            final_norm: Norm::cut(flat(SegmentRole::FinalNorm), FINAL_NORM, shape),
            final_saved: NormActivations::plan(plan, "final_norm", shape, scratch.recomputed),
            head: Head::plan(plan, shape),
            rotary,
            corrections,
            shape: shape.clone(),
            segments,
            params,
            param_buffers: slots,
            blocks,
            scratch,
            loads,
            x,
            d_x,
            on_host,
        }
    }

    /// The shape of the planned model.
    pub const fn shape(&self) -> &DecoderShape {
        &self.shape
    }

    /// Number of a segment, which is its position in the forward pass.
    pub const fn segment(&self, role: SegmentRole) -> usize {
        number(&self.shape, role)
    }

    /// Purposes of the segments, in the order of their numbers.
    pub fn segment_roles(&self) -> impl Iterator<Item = SegmentRole> {
        let blocks = (0..self.shape.layers).map(SegmentRole::Block);
        let own_head = (!self.shape.architecture.tied).then_some(SegmentRole::Head);
        std::iter::once(SegmentRole::Embedding)
            .chain(blocks)
            .chain([SegmentRole::FinalNorm])
            .chain(own_head)
    }

    /// The segment that holds the output projection: the embedding, or a segment of its own.
    pub const fn head(&self) -> SegmentRole {
        self.shape.head()
    }

    /// Number of parameter segments.
    pub const fn num_segments(&self) -> usize {
        self.segments.len()
    }

    /// Writes constant tensors to the device, once, before the first pass. The corrections of routers
    /// are 0 until [`write_router_corrections`](Self::write_router_corrections).
    ///
    /// # Errors
    /// As [`Device::write`].
    pub fn write_constants(&self, dev: &Device) -> Result<(), Error> {
        self.rotary.write(dev)?;
        self.corrections.map_or(Ok(()), |corrections| corrections.clear(dev))
    }

    pub(crate) const fn router_corrections(&self) -> Option<RouterCorrections> {
        self.corrections
    }

    /// Layouts of the segments, in the order of their numbers.
    pub fn segments(&self) -> &[SegmentLayout] {
        &self.segments
    }

    /// Number of the buffer that a segment shares with others, if it is not resident.
    pub fn param_buffer(&self, segment: usize) -> Option<usize> {
        self.param_buffers[segment]
    }

    /// Flat parameters of a segment, while they are on the device.
    pub fn params(&self, segment: usize) -> Tensor {
        self.params[segment]
    }

    /// (1, layers with experts x E + 1) F64 on the device, if the model has experts. Numbers of tokens
    /// that chose each expert of each layer since [`reset_expert_loads`](Self::reset_expert_loads), in
    /// passes of training, and at last the sum of the balance losses of these passes. Tokens of
    /// padding do not count.
    pub fn expert_loads(&self) -> Option<Tensor> {
        self.loads.as_ref().map(|loads| loads.step)
    }

    /// Sets [`expert_loads`](Self::expert_loads) to zero.
    pub fn reset_expert_loads(&self, dev: &Device) {
        if let Some(x) = self.expert_loads() {
            dev.submit(Compute, Op::Zero { x });
        }
    }

    /// Computes the first block's input from tokens. Reads the embedding.
    pub fn embed(&self, dev: &Device, pass: &MicrobatchContext, batch: &BatchTensors) {
        if let Some(loads) = self.loads.as_ref().filter(|_| pass.training) {
            loads.begin(dev, pass.slot);
        }
        let (x, partial) = (self.x[pass.slot].input(0), self.scratch.partial);
        self.embedding.forward(dev, &self.shape, pass, batch, x, partial);
    }

    /// State of the copies of activations, before the first pass on a device.
    pub fn activation_copies(&self) -> ActivationCopies {
        ActivationCopies::new(&self.on_host)
    }

    /// Computes block `layer`, from its input to the next block's input. Reads the block's segment.
    /// Starts the copy of the block's activations to the host, if they are kept there.
    pub fn block_forward(
        &self,
        dev: &Device,
        pass: &MicrobatchContext,
        layer: usize,
        copies: &mut ActivationCopies,
    ) {
        if pass.training {
            self.x[pass.slot].save(dev, layer);
        }
        copies.begin_forward(dev, &self.on_host, pass, layer);
        let (x, y) = (self.x[pass.slot].input(layer), self.x[pass.slot].input(layer + 1));
        self.blocks[layer].forward(dev, &self.shape, pass, x, y);
        copies.end_forward(dev, &self.on_host, pass, layer);
    }

    /// Begins the backward pass of the micro-batches in `slots`, which run through each block
    /// together: starts the first copies of activations from the host. The blocks follow from last
    /// to first, each with all slots in order.
    pub fn begin_backward(
        &self,
        dev: &Device,
        slots: &Range<usize>,
        copies: &mut ActivationCopies,
    ) {
        copies.begin_backward(dev, &self.on_host, slots);
    }

    /// Computes the final norm, and the logits of `rows` in [`logits`](Self::logits). Reads the
    /// final norm and the [`head`](Self::head).
    pub fn project(&self, dev: &Device, pass: &MicrobatchContext, rows: Range<usize>) {
        self.normalize(dev, pass);
        self.head.project(dev, &self.shape, self.head_inputs().of(rows));
    }

    /// Runs new tokens of some samples; `cache` has the earlier tokens. `tokens` (1, rows) has the
    /// tokens of each sample side by side, in the order of `new`. Needs `tp_size` 1.
    /// [`project_new`](Self::project_new) then computes logits.
    pub fn extend(&self, dev: &Device, cache: &mut KvCache, new: &[NewTokens], tokens: Tensor) {
        let (shape, rows) = (&self.shape, tokens.len());
        assert!(shape.tp_size == 1 && rows == new.iter().map(|new| new.count).sum::<usize>());
        let x = |layer| self.x[0].input(layer).rows(0..rows);
        self.embedding.extend(dev, shape, tokens, x(0), new);
        for (layer, block) in self.blocks.iter().enumerate() {
            let extension = Extension { cache, new, layer, table: block.table };
            block.extend(dev, shape, x(layer), x(layer + 1), extension);
        }
        cache.advance(new);
        let saved = self.final_saved.first(rows);
        self.final_norm.forward(dev, shape.region(), x(shape.layers), saved);
    }

    /// Computes in [`logits`](Self::logits) the next-token logits of `rows` of the last
    /// [`extend`](Self::extend).
    pub fn project_new(&self, dev: &Device, rows: Range<usize>) {
        self.head.project(dev, &self.shape, self.head_inputs().of(rows));
    }

    /// Inputs of the output layer for all tokens.
    const fn head_inputs(&self) -> HeadInputs {
        HeadInputs { normed: self.final_saved.normed, table: self.table }
    }

    /// Logits (run, V/t) of this rank's columns.
    pub const fn logits(&self) -> Tensor {
        self.head.logits
    }

    /// Running gradient of a pass. Slots that run backward one after the other share one buffer.
    fn d_x(&self, pass: &MicrobatchContext) -> Tensor {
        self.d_x[pass.slot % self.d_x.len()]
    }

    fn normalize(&self, dev: &Device, pass: &MicrobatchContext) {
        let x = self.x[pass.slot].input(self.shape.layers);
        self.final_norm.forward(dev, self.shape.region(), x, self.final_saved);
    }

    /// Computes loss (1) F64: the sum over the micro-batch's tokens. Reads the final norm and the
    /// [`head`](Self::head).
    pub fn loss(&self, dev: &Device, pass: &MicrobatchContext, batch: &BatchTensors, loss: Tensor) {
        self.normalize(dev, pass);
        self.head.loss(dev, &self.shape, self.head_inputs(), batch, loss);
    }

    /// Computes the [`loss`](Self::loss), and its gradient back to the last block's output. In the
    /// bucket of a tied embedding it writes the token table's part, which
    /// [`embed_backward`](Self::embed_backward) completes.
    pub fn loss_backward(
        &self,
        dev: &Device,
        pass: &MicrobatchContext,
        batch: &BatchTensors,
        loss: LossTensors,
        buckets: HeadBuckets,
    ) {
        let (shape, region) = (&self.shape, self.shape.region());
        if let Some(loads) = &self.loads {
            loads.finish(dev, shape, pass);
        }
        self.normalize(dev, pass);
        let inputs = self.head_inputs();
        let head = self.segments[self.segment(self.head())].of_gradients(buckets.head);
        let d_table = if shape.architecture.tied {
            Embedding::cut(head, shape).tokens
        } else {
            head.whole(HEAD)
        };
        let grads = HeadInputs { normed: self.scratch.partial, table: d_table };
        self.head.loss_and_gradients(dev, shape, inputs, batch, loss, grads);
        let d_normed = region.sum(dev, grads.normed);
        let layout = &self.segments[self.segment(SegmentRole::FinalNorm)];
        let grads = Norm::cut(layout.of_gradients(buckets.final_norm), FINAL_NORM, shape);
        let grads = grads.with_transients(&self.scratch, shape);
        let x = self.x[pass.slot].input(shape.layers);
        let norm = AppliedNorm { norm: self.final_norm, x, stats: self.final_saved.stats };
        norm.backward(dev, d_normed, self.d_x(pass), false, grads);
        region.sum_replicated_grads(dev, layout.replicated(buckets.final_norm));
    }

    /// Runs block `layer` backward. Writes the block's `bucket`, complete at `record(Compute)`.
    /// Reads the block's segment. `input` is the event after which the block's input is complete.
    /// On return it is the event of the block below, whose input is restored in the meantime.
    /// Follows [`begin_backward`](Self::begin_backward).
    pub fn block_backward(
        &self,
        dev: &Device,
        pass: &MicrobatchContext,
        layer: usize,
        bucket: Tensor,
        input: &mut Event,
        copies: &mut ActivationCopies,
    ) {
        *input = self.x[pass.slot].restore(dev, layer, *input);
        copies.await_backward(dev, &self.on_host, pass, layer);
        let x = self.x[pass.slot].input(layer);
        self.blocks[layer].backward(dev, &self.shape, pass, x, self.d_x(pass), bucket);
        copies.end_backward(dev, &self.on_host, pass, layer);
    }

    /// Runs the embedding backward. Writes the embedding's `bucket`, complete at `record(Compute)`.
    pub fn embed_backward(
        &self,
        dev: &Device,
        pass: &MicrobatchContext,
        batch: &BatchTensors,
        bucket: Tensor,
    ) {
        let layout = &self.segments[self.segment(SegmentRole::Embedding)];
        let grads = Embedding::cut(layout.of_gradients(bucket), &self.shape);
        let d = OutputGradient { rows: self.d_x(pass), whole: self.scratch.d_branch };
        self.embedding.backward(dev, &self.shape, pass, batch, d, grads);
        self.shape.region().sum_replicated_grads(dev, layout.replicated(bucket));
    }
}
