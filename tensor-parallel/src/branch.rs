//! Buffers that the two branches of a block share.

use crate::adapter::AdapterScratch;
use crate::delta_scratch::DeltaScratch;
use crate::experts_scratch::ExpertsScratch;
use crate::linear::Fp8Operands;
use crate::region::Region;
use crate::shape::{DecoderShape, QkNorm};
use crate::trained_params::TrainedParams;
use device::{Arena, Dtype, Event, Plan, Tensor};

/// Transients of one block at a time; all blocks share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    /// (B T, C): partial sums of a row-parallel linear, then of the input gradient of a
    /// column-parallel linear.
    pub(crate) partial: Tensor,
    /// (B T, C): gradient of a branch's sum, if it is not the running gradient itself.
    pub(crate) d_branch: Option<Tensor>,
    /// (rows, C): normed sum of a branch, then its gradient, if branches have a norm at their end.
    normed_sum: Option<Tensor>,
    /// (B T, 2) F32: sums over the heads of q and of k in the backward pass of their norm, if the
    /// norm joins all heads.
    pub(crate) qk_dots: Option<Tensor>,
    pub(crate) d_attention: Tensor,     // (B T, H D/t)
    pub(crate) d_qkv: Tensor,           // (B T, (H + 2 K) D/t)
    pub(crate) d_gate: Option<Tensor>,  // (B T, H D/t), if attention's output has a gate
    pub(crate) d_inner: Option<Tensor>, // (B T, F/t), if a block has one MLP
    /// (K, n): gradients of all ranks' key and value weights, biases and gains, if ranks share key
    /// and value heads. n = D (2 C + 2), and D more if each element of a key has a gain.
    pub(crate) d_shared: Option<Tensor>,
    /// Outputs that each block recomputes; all blocks share them.
    pub(crate) recomputed: Option<RecomputedOutputs>,
    /// Gradients of frozen norms and of other small parameters, which nothing reads, if the model has
    /// frozen parameters.
    unread: Option<Tensor>,
    /// Transients of adapters, if the model has adapters.
    pub(crate) adapters: Option<AdapterScratch>,
    /// Operands of fp8 matmuls.
    pub(crate) fp8: Option<Fp8Operands>,
    /// Transients of experts, if a block has experts.
    experts: Option<ExpertsScratch>,
    /// Transients of gated delta nets, if a block has one.
    delta: Option<DeltaScratch>,
}

/// Outputs that the backward pass recomputes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecomputedOutputs {
    /// (B T, C): output of every norm.
    pub(crate) normed: Tensor,
    /// (B T, F/t): output of the MLP's activation, if a block has one MLP.
    pub(crate) act: Option<Tensor>,
    /// (B T, H D/t): attention's output times its gate, if it has one.
    pub(crate) gated: Option<Tensor>,
}

/// Gradients of one branch in the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Branch {
    pub(crate) region: Region,
    /// (B T, C): normed input, complete on every rank after the event `whole`.
    pub(crate) normed: Tensor,
    pub(crate) whole: Event,
    /// (B T, C): gradient of the summed output, complete on every rank.
    pub(crate) d_sum: Tensor,
    /// (B T, C): gradient of the normed input; this rank's rows are complete at the branch's end.
    pub(crate) d_normed: Tensor,
    /// Whether the branch computes the output of its activation again.
    pub(crate) recomputes: bool,
    pub(crate) scratch: Scratch,
}

impl Scratch {
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape) -> Self {
        let (tokens, c, fp8) = (shape.tokens(), shape.hidden, Fp8Operands::plan(plan, shape));
        let adapters = AdapterScratch::plan(plan, shape);
        let mut transient = |name: &str, dtype, cols| {
            plan.tensor((Arena::Device, "transients"), name, dtype, (tokens, cols))
        };
        let parts = &shape.architecture;
        let changes = parts.norms_outputs() || parts.residual_scale != 1.0;
        let copies = shape.dropout > 0.0 || shape.sequence || changes;
        let (inner, dense) = (shape.ffn_hidden / shape.tp_size, shape.has_dense_layer());
        Self {
            fp8,
            adapters,
            partial: transient("partial", shape.partial_dtype, c),
            d_branch: copies.then(|| transient("d_branch", shape.dtype, c)),
            d_attention: transient("d_attention", shape.dtype, shape.heads_width()),
            d_qkv: transient("d_qkv", shape.dtype, shape.qkv_width()),
            d_gate: parts
                .output_gate
                .then(|| transient("d_attention_gate", shape.dtype, shape.heads_width())),
            d_inner: dense.then(|| transient("d_inner", shape.dtype, inner)),
            recomputed: shape.recomputes_outputs().then(|| RecomputedOutputs {
                normed: transient("normed", shape.dtype, c),
                act: dense.then(|| transient(shape.activation(), shape.dtype, inner)),
                gated: parts
                    .output_gate
                    .then(|| transient("gated_attention", shape.dtype, shape.heads_width())),
            }),
            d_shared: (shape.kv_replicas() > 1).then(|| {
                let gains = usize::from(parts.qk_norm == Some(QkNorm::Width));
                let size = (shape.kv_heads, shape.head_dim * (2 * (c + 1) + gains));
                plan.tensor((Arena::Device, "transients"), "d_shared", shape.dtype, size)
            }),
            normed_sum: parts.norms_outputs().then(|| {
                let size = (shape.rows(), c);
                plan.tensor((Arena::Device, "transients"), "normed_sum", shape.dtype, size)
            }),
            unread: (shape.trained != TrainedParams::All).then(|| {
                let size = (1, shape.longest_unread());
                plan.tensor((Arena::Device, "transients"), "frozen_norms", shape.dtype, size)
            }),
            qk_dots: (parts.qk_norm == Some(QkNorm::Width)).then(|| {
                plan.tensor((Arena::Device, "transients"), "qk_dots", Dtype::F32, (tokens, 2))
            }),
            experts: shape.experts.map(|experts| ExpertsScratch::plan(plan, shape, &experts)),
            delta: shape.delta.map(|delta| DeltaScratch::plan(plan, shape, &delta)),
        }
    }

    /// The gradient `d` of a small parameter with `elements` elements, such as a norm's vector, or a
    /// transient in its place if it is frozen. `number`: 0 or 1, since a norm may have two vectors.
    pub(crate) fn gradient(&self, d: Tensor, elements: usize, number: usize) -> Tensor {
        if !d.is_empty() {
            return d;
        }
        let unread = self.unread;
        let unread = unread.unwrap_or_else(|| unreachable!("a trained vector has a gradient"));
        unread.slice(number * elements..(number + 1) * elements)
    }

    /// Transients of experts.
    pub(crate) fn experts(&self) -> ExpertsScratch {
        self.experts.unwrap_or_else(|| unreachable!("a block with experts has transients for them"))
    }

    /// Transients of gated delta nets.
    pub(crate) fn delta(&self) -> DeltaScratch {
        let delta = self.delta;
        delta.unwrap_or_else(|| unreachable!("a block with a delta net has transients for it"))
    }

    /// (rows, C): transient for the normed sum of a branch, or for its gradient.
    pub(crate) fn branch_output(&self, rows: usize) -> Tensor {
        let whole = self.normed_sum;
        let whole = whole.unwrap_or_else(|| unreachable!("a norm at a branch's end has a result"));
        whole.rows(0..rows)
    }
}
