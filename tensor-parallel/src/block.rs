//! A pre-norm transformer block:
//! h = x + dropout(attention(norm(x))),  y = h + dropout(mlp(norm(h))).
//!
//! Both branches have one form: norm, column-parallel linear, row-parallel linear, sum over the
//! ranks, bias + dropout + add. GPT-2's and Llama's blocks differ in the parts: layer norm or
//! RMSNorm, learned or rotary positions, GELU or a gate.

use crate::attention::{Attention, AttentionActivations, AttentionContext};
use crate::branch::{Branch, Scratch};
use crate::kv_cache::Extension;
use crate::mlp::{Mlp, MlpActivations};
use crate::norm::{AppliedNorm, Norm, NormActivations};
use crate::params::{FlatBuffer, SegmentLayout};
use crate::region::Region;
use crate::shape::{DecoderShape, MicrobatchContext, Recompute};
use device::{Arena, Device, Dropout, Event, Lane::Compute, Op, Plan, Tensor};

/// Parameters of a block cut out of its flat segment, or gradients cut out of a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockParams {
    norm_1: Norm,
    attention: Attention,
    norm_2: Norm,
    mlp: Mlp,
}

/// Activations of a block, for its backward pass. All blocks share one set with
/// [`Recompute::Block`], and a part of the set with [`Recompute::Selective`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockActivations {
    norm_1: NormActivations,
    attention: AttentionActivations,
    h: Tensor, // (rows, C)
    norm_2: NormActivations,
    mlp: MlpActivations,
}

/// Dropout sites of a block.
const ATTENTION_WEIGHTS: u64 = 0;
const ATTENTION_OUTPUT: u64 = 1;
const MLP_OUTPUT: u64 = 2;

/// Layout of a block's parameters, which its parts declare in the order of the forward pass.
pub(crate) fn layout(shape: &DecoderShape, layer: usize, align: usize) -> SegmentLayout {
    let (name, prefix) = (format!("block.{layer}"), format!("h.{layer}."));
    SegmentLayout::new(name, prefix, shape.tp_size, align, |params| {
        Norm::declare(params, "ln_1", shape);
        Attention::declare(params, shape);
        Norm::declare(params, "ln_2", shape);
        Mlp::declare(params, shape);
    })
}

impl BlockParams {
    /// Cuts a flat buffer with the layout of [`layout`].
    pub(crate) fn cut(flat: FlatBuffer<'_>, shape: &DecoderShape) -> Self {
        Self {
            norm_1: Norm::cut(flat, "ln_1", shape),
            attention: Attention::cut(flat, shape),
            norm_2: Norm::cut(flat, "ln_2", shape),
            mlp: Mlp::cut(flat, shape),
        }
    }
}

impl BlockActivations {
    pub(crate) fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        name: &str,
        scratch: &Scratch,
    ) -> Self {
        let (at, size) = ((Arena::Device, "activations"), (shape.rows(), shape.hidden));
        Self {
            norm_1: NormActivations::plan(
                plan,
                &format!("{name}.norm_1"),
                shape,
                scratch.recomputed,
            ),
            attention: AttentionActivations::plan(plan, name, shape, scratch.fp8),
            h: plan.tensor(at, format!("{name}.h"), shape.dtype, size),
            norm_2: NormActivations::plan(
                plan,
                &format!("{name}.norm_2"),
                shape,
                scratch.recomputed,
            ),
            mlp: MlpActivations::plan(plan, name, shape, scratch),
        }
    }

    /// The first `rows` rows of every activation.
    fn first(self, rows: usize, shape: &DecoderShape) -> Self {
        Self {
            norm_1: self.norm_1.first(rows),
            attention: self.attention.of(0..rows, shape.heads / shape.tp_size),
            h: self.h.rows(0..rows),
            norm_2: self.norm_2.first(rows),
            mlp: self.mlp.first(rows),
        }
    }
}

/// Handles of one block.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) layer: usize,
    pub(crate) layout: SegmentLayout,
    pub(crate) params: BlockParams,
    pub(crate) saved: BlockActivations,
    pub(crate) scratch: Scratch,
    /// Cosines and sines, if positions are rotary.
    pub(crate) table: Option<Tensor>,
}

impl Block {
    /// Computes x (rows, C) -> y (rows, C). y is complete at `record(Compute)`.
    pub(crate) fn forward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
        x: Tensor,
        y: Tensor,
    ) {
        let (p, s, partial) = (&self.params, &self.saved, self.scratch.partial);
        self.forward_to_mlp(dev, shape, pass, x);
        p.mlp.proj_forward(dev, s.mlp, partial);
        let summed = shape.region().sum(dev, partial);
        let dropout = self.row_dropout(dev, shape, pass, MLP_OUTPUT);
        let (bias, residual) = (p.mlp.proj_bias, s.h);
        dev.submit(Compute, Op::BiasDropoutAdd { x: summed, bias, residual, y, dropout });
    }

    /// Computes everything that the backward pass needs: all but the MLP's last linear.
    fn forward_to_mlp(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
        x: Tensor,
    ) {
        let (p, s, region, partial) =
            (&self.params, &self.saved, shape.region(), self.scratch.partial);
        p.norm_1.forward(dev, region, x, s.norm_1);
        let heads = self.heads(dev, shape, pass);
        p.attention.heads_forward(dev, shape, s.norm_1.normed, s.attention, heads);
        p.attention.proj_forward(dev, s.attention, partial);
        let summed = region.sum(dev, partial);
        let dropout = self.row_dropout(dev, shape, pass, ATTENTION_OUTPUT);
        let bias = p.attention.proj_bias;
        dev.submit(Compute, Op::BiasDropoutAdd { x: summed, bias, residual: x, y: s.h, dropout });
        p.norm_2.forward(dev, region, s.h, s.norm_2);
        p.mlp.inner_forward(dev, shape, s.norm_2.normed, s.mlp);
    }

    /// Computes x (rows, C) of new tokens -> y (rows, C), without dropout. Needs `tp_size` 1.
    pub(crate) fn extend(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        x: Tensor,
        y: Tensor,
        extension: Extension<'_>,
    ) {
        let (p, region, rows) = (&self.params, shape.region(), x.shape().0);
        let BlockActivations { norm_1, attention, h, norm_2, mlp } = self.saved.first(rows, shape);
        let (partial, dropout) = (self.scratch.partial.rows(0..rows), Dropout::NONE);
        p.norm_1.forward(dev, region, x, norm_1);
        p.attention.extend(dev, shape, self.layer, norm_1.normed, attention, extension);
        p.attention.proj_forward(dev, attention, partial);
        let bias = p.attention.proj_bias;
        dev.submit(Compute, Op::BiasDropoutAdd { x: partial, bias, residual: x, y: h, dropout });
        p.norm_2.forward(dev, region, h, norm_2);
        p.mlp.inner_forward(dev, shape, norm_2.normed, mlp);
        p.mlp.proj_forward(dev, mlp, partial);
        let bias = p.mlp.proj_bias;
        dev.submit(Compute, Op::BiasDropoutAdd { x: partial, bias, residual: h, y, dropout });
    }

    /// Computes the gradient of x from the gradient of y, in place in `d` (rows, C). Writes the
    /// block's flat `bucket`. Both are complete at `record(Compute)`.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
        x: Tensor,
        d: Tensor,
        bucket: Tensor,
    ) {
        let (p, s, region) = (&self.params, &self.saved, shape.region());
        let grads = BlockParams::cut(self.layout.of(bucket), shape);
        if shape.recompute == Recompute::Block {
            self.forward_to_mlp(dev, shape, pass, x);
        }
        let dropout = self.row_dropout(dev, shape, pass, MLP_OUTPUT);
        let norm = AppliedNorm { norm: p.norm_2, x: s.h, saved: s.norm_2 };
        let branch = self.enter_branch(dev, shape, norm, d, dropout, grads.mlp.proj_bias);
        p.mlp.backward(dev, shape, s.mlp, branch, grads.mlp);
        let d_normed = region.rows(dev, branch.d_normed);
        norm.backward(dev, d_normed, d, true, grads.norm_2);

        let dropout = self.row_dropout(dev, shape, pass, ATTENTION_OUTPUT);
        let norm = AppliedNorm { norm: p.norm_1, x, saved: s.norm_1 };
        let branch = self.enter_branch(dev, shape, norm, d, dropout, grads.attention.proj_bias);
        let heads = self.heads(dev, shape, pass);
        p.attention.backward(dev, shape, s.attention, heads, branch, grads.attention);
        let shared =
            Attention::start_sum_of_shared(self.layout.of(bucket), dev, shape, &self.scratch);
        let d_normed = region.rows(dev, branch.d_normed);
        norm.backward(dev, d_normed, d, true, grads.norm_1);
        dev.wait(Compute, shared);
        Attention::sum_gains(self.layout.of(bucket), dev, shape);
        region.sum_replicated_grads(dev, self.layout.replicated(bucket));
    }

    /// Backward through dropout, bias and sum of a branch. The gradient of the sum is `d` (rows, C)
    /// itself if nothing changes it, else a gathered copy. If the norm's output is not kept, the
    /// norm runs again; its gather runs during matmuls that do not need it.
    fn enter_branch(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        norm: AppliedNorm,
        d: Tensor,
        dropout: Dropout,
        d_bias: Option<Tensor>,
    ) -> Branch {
        let (region, d_normed) = (shape.region(), self.scratch.partial);
        let own = self.scratch.d_branch.map(|full| (full, region.rows(dev, full)));
        if let Some((_, rows)) = own {
            dev.submit(Compute, Op::Dropout { x: d, y: rows, dropout });
        }
        let (d_sum, x) = own.unwrap_or((d, d));
        if let Some(y) = Region::separate_bias(dev, d_bias) {
            dev.submit(Compute, Op::ColumnSum { x, y });
        }
        region.gather(dev, d_sum);
        let whole = match shape.recompute {
            Recompute::Selective => norm.start_forward(dev, region),
            Recompute::None | Recompute::Block => Event::default(),
        };
        Branch { region, normed: norm.saved.normed, whole, d_sum, d_normed, scratch: self.scratch }
    }

    fn row_dropout(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
        site: u64,
    ) -> Dropout {
        pass.dropout(shape, self.layer as u64 + 1, site, pass.first_row(dev, shape))
    }

    /// Settings of attention, which always sees all tokens of its samples.
    fn heads(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
    ) -> AttentionContext {
        let (layer, first) = (self.layer as u64 + 1, pass.first_token);
        let dropout = pass.dropout(shape, layer, ATTENTION_WEIGHTS, first);
        AttentionContext {
            heads: shape.heads_of(dev),
            dropout,
            table: self.table,
            starts: pass.starts,
        }
    }
}
