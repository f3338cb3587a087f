//! A transformer block: h = x + dropout(attention(norm(x))),  y = h + dropout(mlp(norm(h))). In
//! some models experts stand in the place of the MLP, or a gated delta net in the place of attention.
//!
//! Both branches have one form: norm, column-parallel linear, row-parallel linear, sum over the
//! ranks, bias + dropout + add. The blocks of models differ in the parts: layer norm or RMSNorm,
//! learned or rotary positions, GELU or a gate. In some models branches have a norm at their end,
//! too, or only there; see [`NormPlace`](crate::NormPlace).

use crate::activation_tiers::Tier;
use crate::attention::AttentionContext;
use crate::block_activations::{BlockActivations, BranchKind};
use crate::branch::{Branch, Scratch};
use crate::delta_net::DeltaContext;
use crate::experts::{AppliedExperts, Experts, RouterSlot};
use crate::kv_cache::Extension;
use crate::mixer::{Mixer, MixerContext};
use crate::mlp::Mlp;
use crate::mlp_layer::{AppliedMlpLayer, MlpLayer, MlpLayerActivations};
use crate::norm::{BranchInput, Norm, OutputActivations};
use crate::params::{FlatBuffer, ParamDeclarations, SegmentLayout};
use crate::region::{Region, sum_over_ranks};
use crate::shape::{DecoderShape, MicrobatchContext};
use device::{Device, Dropout, Event, Lane::Compute, Op, Reduction, Tensor};

/// Parameters of a block cut out of its flat segment, or gradients cut out of a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockParams {
    attention_norms: BranchNorms,
    attention: Mixer,
    mlp_norms: BranchNorms,
    mlp: MlpLayer,
}

/// Norms of a branch, or their gradients.
#[derive(Clone, Copy, Debug)]
struct BranchNorms {
    /// Before the branch's first linear.
    input: Option<Norm>,
    /// After the branch's sum over the ranks.
    output: Option<Norm>,
}

/// Names of the norms of attention, then of the MLP: at the branch's start and at its end.
const NORMS: [[&str; 2]; 2] = [["ln_1", "ln_1_post"], ["ln_2", "ln_2_post"]];

impl BranchNorms {
    fn declare(params: &mut ParamDeclarations, [input, output]: [&str; 2], shape: &DecoderShape) {
        if shape.architecture.norms_inputs() {
            Norm::declare(params, input, shape);
        }
        if shape.architecture.norms_outputs() {
            Norm::declare(params, output, shape);
        }
    }

    fn cut(flat: FlatBuffer<'_>, [input, output]: [&str; 2], shape: &DecoderShape) -> Self {
        let parts = &shape.architecture;
        Self {
            input: parts.norms_inputs().then(|| Norm::cut(flat, input, shape)),
            output: parts.norms_outputs().then(|| Norm::cut(flat, output, shape)),
        }
    }

    /// The gradients, with transients in the place of those of frozen norms.
    fn with_transients(self, scratch: &Scratch, shape: &DecoderShape) -> Self {
        let of = |norm: Option<Norm>| norm.map(|norm| norm.with_transients(scratch, shape));
        Self { input: of(self.input), output: of(self.output) }
    }
}

/// Dropout sites of a block.
const ATTENTION_WEIGHTS: u64 = 0;
const ATTENTION_OUTPUT: u64 = 1;
const MLP_OUTPUT: u64 = 2;
/// Dropout sites of the inputs of adapters: of each branch, the first of its linears and the projection back.
const ATTENTION_ADAPTERS: [u64; 2] = [3, 4];
const MLP_ADAPTERS: [u64; 2] = [5, 6];

/// Layout of a block's parameters, which its parts declare in the order of the forward pass.
pub(crate) fn layout(shape: &DecoderShape, layer: usize, align: usize) -> SegmentLayout {
    let (name, prefix) = (format!("block.{layer}"), format!("h.{layer}."));
    let (experts, delta) = (shape.experts_of(layer), shape.delta_of(layer));
    SegmentLayout::new(name, prefix, shape.tp_size, &shape.trained, align, |params| {
        if let Some(experts) = &experts {
            Experts::declare(params, shape, experts);
        }
        BranchNorms::declare(params, NORMS[0], shape);
        Mixer::declare_heads(params, shape, delta);
        if let Some(experts) = &experts {
            Experts::declare_router(params, shape, experts);
        }
        Mixer::declare_proj(params, shape, delta);
        BranchNorms::declare(params, NORMS[1], shape);
        if experts.is_none() {
            Mlp::declare(params, shape);
        }
    })
}

impl BlockParams {
    /// Cuts a flat buffer with the layout of [`layout`].
    pub(crate) fn cut(
        flat: FlatBuffer<'_>,
        shape: &DecoderShape,
        layer: usize,
        scratch: &Scratch,
    ) -> Self {
        Self {
            attention_norms: BranchNorms::cut(flat, NORMS[0], shape),
            attention: Mixer::cut(flat, shape, shape.delta_of(layer), scratch),
            mlp_norms: BranchNorms::cut(flat, NORMS[1], shape),
            mlp: MlpLayer::cut(flat, shape, shape.experts_of(layer), scratch),
        }
    }

    /// The parameters in the pass of a micro-batch, which may drop the inputs of adapters.
    fn in_pass(self, shape: &DecoderShape, pass: &MicrobatchContext, layer: usize) -> Self {
        let of =
            |sites: [u64; 2]| sites.map(|site| pass.adapter_dropout(shape, layer as u64 + 1, site));
        Self {
            attention: self.attention.with_dropout(of(ATTENTION_ADAPTERS)),
            mlp: self.mlp.with_dropout(of(MLP_ADAPTERS)),
            ..self
        }
    }
}

/// Handles of one block.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) layer: usize,
    pub(crate) layout: SegmentLayout,
    pub(crate) params: BlockParams,
    /// Activations by slot of the micro-batch.
    pub(crate) saved: Vec<BlockActivations>,
    pub(crate) scratch: Scratch,
    /// By slot of a micro-batch, if the block has experts: the router's tensors.
    pub(crate) router: Vec<RouterSlot>,
    /// Cosines and sines, if the layer rotates queries and keys.
    pub(crate) table: Option<Tensor>,
}

/// The end of a branch, after its sum over the ranks: norm, bias, dropout and residual stream.
#[derive(Clone, Copy, Debug)]
struct BranchEnd {
    /// (rows, C): the residual stream, to which the branch is added.
    residual: Tensor,
    norm: Option<(Norm, OutputActivations)>,
    bias: Option<Tensor>,
    dropout: Dropout,
}

/// Gradients of the parameters in a [`BranchEnd`].
#[derive(Clone, Copy, Debug)]
struct EndGradients {
    norm: Option<Norm>,
    bias: Option<Tensor>,
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
        let (s, dropout) = (self.saved(pass), self.row_dropout(dev, shape, pass, MLP_OUTPUT));
        let mlp = self.mlp(self.in_pass(shape, pass), shape, s, pass.slot);
        self.forward_to_h(dev, shape, pass, x);
        self.forward_to_mlp(dev, shape, s, mlp, true);
        if pass.training {
            mlp.count(dev, pass.targets);
        }
        let summed = self.mlp_sum(dev, shape, mlp);
        self.leave_branch(dev, shape, summed, self.mlp_end(s, dropout), y);
    }

    /// Computes the projection back from the heads, summed over the ranks: (rows, C).
    fn attention_sum(
        &self,
        attention: &Mixer,
        dev: &Device,
        shape: &DecoderShape,
        s: &BlockActivations,
    ) -> Tensor {
        let partial = self.scratch.partial.rows(0..s.attention.heads.tokens());
        attention.proj_forward(dev, s.attention.heads, partial);
        shape.region().sum(dev, partial)
    }

    /// Computes the MLP's last linear, summed over the ranks: (rows, C).
    fn mlp_sum(&self, dev: &Device, shape: &DecoderShape, mlp: AppliedMlpLayer) -> Tensor {
        let partial = self.scratch.partial.rows(0..mlp.tokens());
        mlp.proj_forward(dev, partial);
        shape.region().sum(dev, partial)
    }

    /// The parameters in the pass of a micro-batch.
    fn in_pass(&self, shape: &DecoderShape, pass: &MicrobatchContext) -> BlockParams {
        self.params.in_pass(shape, pass, self.layer)
    }

    /// The MLP or the experts of `params` in the pass of a micro-batch in slot `slot`.
    fn mlp(
        &self,
        params: BlockParams,
        shape: &DecoderShape,
        s: &BlockActivations,
        slot: usize,
    ) -> AppliedMlpLayer {
        match (params.mlp, s.mlp.inner, shape.experts, shape.architecture.gate) {
            (MlpLayer::Dense(mlp), MlpLayerActivations::Dense(saved), ..) => {
                AppliedMlpLayer::Dense(mlp, saved)
            }
            (
                MlpLayer::Sparse(experts),
                MlpLayerActivations::Sparse(saved),
                Some(shape),
                Some(gate),
            ) => {
                let (RouterSlot { routes, loads, correction }, scratch) =
                    (self.router[slot], self.scratch.experts());
                let applied = AppliedExperts {
                    experts,
                    shape,
                    gate,
                    routes,
                    loads,
                    correction,
                    saved,
                    scratch,
                };
                AppliedMlpLayer::Sparse(applied)
            }
            other => unreachable!("a block has what its kind says: {other:?}"),
        }
    }

    fn attention_end(&self, x: Tensor, s: &BlockActivations, dropout: Dropout) -> BranchEnd {
        let (norm, bias) = (self.params.attention_norms.output, self.params.attention.proj_bias());
        BranchEnd { residual: x, norm: norm.zip(s.attention.output), bias, dropout }
    }

    fn mlp_end(&self, s: &BlockActivations, dropout: Dropout) -> BranchEnd {
        let (norm, bias) = (self.params.mlp_norms.output, self.params.mlp.proj_bias());
        BranchEnd { residual: s.attention.h, norm: norm.zip(s.mlp.output), bias, dropout }
    }

    /// Computes y (rows, C) = the residual stream + the end of a branch with the sum `summed`.
    fn leave_branch(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        summed: Tensor,
        end: BranchEnd,
        y: Tensor,
    ) {
        let BranchEnd { residual, norm, bias, dropout } = end;
        let x = norm.map_or(summed, |(norm, saved)| {
            assert!(bias.is_none(), "no model adds a bias before the norm at a branch's end");
            saved.forward(dev, norm, summed, &self.scratch)
        });
        let scale = shape.architecture.residual_scale as f32;
        dev.submit(Compute, Op::BiasDropoutAdd { x, bias, residual, y, dropout, scale });
    }

    /// The activations of a micro-batch.
    fn saved(&self, pass: &MicrobatchContext) -> &BlockActivations {
        &self.saved[pass.slot]
    }

    /// Computes the attention branch, up to the residual stream h after it.
    fn forward_to_h(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
        x: Tensor,
    ) {
        let (p, s) = (self.in_pass(shape, pass), self.saved(pass));
        let context = self.context(dev, shape, pass);
        let input = self.attention_input(x, s).forward(dev, shape.region());
        p.attention.heads_forward(dev, shape, input, s.attention.heads, context);
        let dropout = self.row_dropout(dev, shape, pass, ATTENTION_OUTPUT);
        let summed = self.attention_sum(&p.attention, dev, shape, s);
        self.leave_branch(dev, shape, summed, self.attention_end(x, s, dropout), s.attention.h);
    }

    /// Computes the MLP branch from h, up to its last linear. `routes`: whether a router chooses
    /// the experts; otherwise its choices are kept from an earlier call.
    fn forward_to_mlp(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        s: &BlockActivations,
        mlp: AppliedMlpLayer,
        routes: bool,
    ) {
        let input = self.mlp_input(s).forward(dev, shape.region());
        if routes {
            mlp.route(dev, input);
        }
        mlp.inner_forward(dev, shape, input);
    }

    /// The input of attention, from the block's input x (rows, C).
    const fn attention_input(&self, x: Tensor, s: &BlockActivations) -> BranchInput {
        let (norm, saved) = (self.params.attention_norms.input, s.attention.input);
        BranchInput { norm, x, saved, recomputes: false }
    }

    /// The input of the MLP.
    const fn mlp_input(&self, s: &BlockActivations) -> BranchInput {
        let (norm, saved) = (self.params.mlp_norms.input, s.mlp.input);
        BranchInput { norm, x: s.attention.h, saved, recomputes: false }
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
        let (p, region) = (&self.params, shape.region());
        let rows = x.shape().0;
        let s = self.saved[0].first(rows, shape);
        let mlp = self.mlp(*p, shape, &s, 0).first(rows);
        let input = self.attention_input(x, &s).forward(dev, region);
        p.attention.extend(dev, shape, input, s.attention.heads, extension);
        let summed = self.attention_sum(&p.attention, dev, shape, &s);
        let end = self.attention_end(x, &s, Dropout::NONE);
        self.leave_branch(dev, shape, summed, end, s.attention.h);
        self.forward_to_mlp(dev, shape, &s, mlp, true);
        let summed = self.mlp_sum(dev, shape, mlp);
        self.leave_branch(dev, shape, summed, self.mlp_end(&s, Dropout::NONE), y);
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
        let (p, s, region) = (self.in_pass(shape, pass), self.saved(pass), shape.region());
        let of_bucket = self.layout.of_gradients(bucket);
        let grads = BlockParams::cut(of_bucket, shape, self.layer, &self.scratch);
        let norms_of = |norms: BranchNorms| norms.with_transients(&self.scratch, shape);
        let mlp = self.mlp(p, shape, s, pass.slot);
        let is_recomputed = |branch| shape.tier(branch, self.layer) == Tier::Recomputed;
        if is_recomputed(BranchKind::Attention) {
            self.forward_to_h(dev, shape, pass, x);
        }
        if is_recomputed(BranchKind::Mlp) {
            self.forward_to_mlp(dev, shape, s, mlp, false);
            // The backward pass of a norm at the MLP's end needs the MLP's sum.
            if let (Some(norm), Some(saved)) = (p.mlp_norms.output, s.mlp.output) {
                let summed = self.mlp_sum(dev, shape, mlp);
                saved.forward(dev, norm, summed, &self.scratch);
            }
        }
        // The outputs of an MLP branch that was just computed again are still in the transients.
        let recomputes = shape.recomputes_outputs() && !is_recomputed(BranchKind::Mlp);
        let (input, norms) =
            (BranchInput { recomputes, ..self.mlp_input(s) }, norms_of(grads.mlp_norms));
        let end = self.mlp_end(s, self.row_dropout(dev, shape, pass, MLP_OUTPUT));
        let end_grads = EndGradients { norm: norms.output, bias: grads.mlp.proj_bias() };
        let branch = self.enter_branch(dev, shape, input, end, d, end_grads);
        mlp.backward(dev, shape, branch, pass.targets, grads.mlp);
        let d_input = region.rows(dev, branch.d_normed);
        input.backward(dev, d_input, d, norms.input);

        let recomputes = shape.recomputes_outputs();
        let input = BranchInput { recomputes, ..self.attention_input(x, s) };
        let norms = norms_of(grads.attention_norms);
        let end = self.attention_end(x, s, self.row_dropout(dev, shape, pass, ATTENTION_OUTPUT));
        let end_grads = EndGradients { norm: norms.output, bias: grads.attention.proj_bias() };
        let branch = self.enter_branch(dev, shape, input, end, d, end_grads);
        let context = self.context(dev, shape, pass);
        p.attention.backward(dev, shape, s.attention.heads, context, branch, grads.attention);
        let shared = p.attention.start_sum_of_shared(of_bucket, dev, shape, &self.scratch);
        let d_input = region.rows(dev, branch.d_normed);
        input.backward(dev, d_input, d, norms.input);
        dev.wait(Compute, shared);
        p.attention.sum_gains(of_bucket, dev, shape);
        let replicated = self.layout.replicated(bucket);
        // These matrices are in the replicated tail if all sharded parameters after them are frozen.
        if let Some(of_experts) = grads.mlp.replicated()
            && of_experts.range().start < replicated.range().start
        {
            region.sum_replicated_grads(dev, of_experts);
        }
        match shape.adapters() {
            // Each rank has a part of the gradient of a replicated factor.
            Some(_) if !replicated.is_empty() => {
                sum_over_ranks(dev, replicated, Reduction::Sum);
            }
            _ => region.sum_replicated_grads(dev, replicated),
        }
    }

    /// Backward through the end and the sum of a branch. The gradient of the sum is `d` (rows, C)
    /// itself if nothing changes it, else a gathered copy. If the branch's input is not kept, it is
    /// computed again; its gather runs during matmuls that do not need it.
    fn enter_branch(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        input: BranchInput,
        end: BranchEnd,
        d: Tensor,
        grads: EndGradients,
    ) -> Branch {
        let (region, d_normed) = (shape.region(), self.scratch.partial);
        let (dropout, scale) = (end.dropout, shape.architecture.residual_scale as f32);
        let own = self.scratch.d_branch.map(|full| (full, region.rows(dev, full)));
        match (own, end.norm.zip(grads.norm)) {
            (Some((_, rows)), Some(((norm, saved), d_norm))) => {
                let d_y = if dropout.p > 0.0 || scale != 1.0 {
                    let y = self.scratch.branch_output(d.shape().0);
                    dev.submit(Compute, Op::Dropout { x: d, y, dropout, scale });
                    y
                } else {
                    d
                };
                saved.backward(dev, norm, d_y, rows, d_norm);
            }
            (Some((_, y)), None) => {
                dev.submit(Compute, Op::Dropout { x: d, y, dropout, scale });
            }
            (None, None) => {}
            (None, Some(_)) => unreachable!("a norm at a branch's end changes the gradient"),
        }
        let (d_sum, x) = own.unwrap_or((d, d));
        if let Some(y) = Region::separate_bias(dev, grads.bias) {
            dev.submit(Compute, Op::ColumnSum { x, y });
        }
        region.gather(dev, d_sum);
        let recomputes = input.recomputes;
        let whole = if recomputes { input.start_forward(dev, region) } else { Event::default() };
        let normed = input.output();
        Branch { region, normed, whole, d_sum, d_normed, recomputes, scratch: self.scratch }
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

    /// Settings of the first branch, which always sees all tokens of its samples.
    fn context(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
    ) -> MixerContext {
        if let Some(delta) = shape.delta_of(self.layer) {
            return MixerContext::Delta(DeltaContext::of(shape, &delta, pass.starts));
        }
        let (layer, first) = (self.layer as u64 + 1, pass.first_token);
        let dropout = pass.dropout(shape, layer, ATTENTION_WEIGHTS, first);
        MixerContext::Attention(AttentionContext {
            heads: shape.heads_of(dev),
            dropout,
            table: self.table,
            starts: pass.starts,
            scores: shape.scores(self.layer),
        })
    }
}
