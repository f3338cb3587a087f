//! Causal self-attention with the heads split over the ranks: a column-parallel projection to q, k and v,
//! attention over this rank's heads, a row-parallel projection back.

use crate::branch::{Branch, Scratch};
use crate::params::{Declared, Flat, Init, Split};
use crate::shape::GptShape;
use device::{Arena, Device, Dropout, Dtype, Heads, Lane::Compute, Op, Plan, Tensor};

/// What the forward pass leaves for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionSaved {
    qkv: Tensor, // (B T, 3C/t)
    out: Tensor, // (B T, C/t)
    lse: Tensor, // (B H/t T)
}

/// Parameters, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
    qkv_weight: Tensor,           // (3C/t, C)
    qkv_bias: Tensor,             // (3C/t)
    proj_weight: Tensor,          // (C, C/t)
    pub(crate) proj_bias: Tensor, // (C), added after the sum over the ranks
}

impl AttentionSaved {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        dtype: Dtype,
        (tokens, width, heads): (usize, usize, usize),
    ) -> Self {
        let at = (Arena::Device, "activations");
        Self {
            qkv: plan.tensor(at, format!("{name}.qkv"), dtype, (tokens, 3 * width)),
            out: plan.tensor(at, format!("{name}.attention"), dtype, (tokens, width)),
            lse: plan.tensor(at, format!("{name}.lse"), Dtype::F32, (1, tokens * heads)),
        }
    }
}

impl Attention {
    /// Declares its parameters behind `attn.`.
    pub(crate) fn declare(params: &mut Declared, shape: &GptShape) {
        let (c, zero) = (shape.hidden, Init::Constant(0.0));
        params.add("attn.qkv.weight", (3 * c, c), Split::ThreeRows, shape.weight_init());
        params.add("attn.qkv.bias", (3 * c, 1), Split::ThreeRows, zero);
        params.add("attn.proj.weight", (c, c), Split::Columns, shape.residual_init());
        params.add("attn.proj.bias", (c, 1), Split::Replicated, zero);
    }

    pub(crate) fn cut(flat: Flat<'_>) -> Self {
        Self {
            qkv_weight: flat.get("attn.qkv", "weight"),
            qkv_bias: flat.get("attn.qkv", "bias"),
            proj_weight: flat.get("attn.proj", "weight"),
            proj_bias: flat.get("attn.proj", "bias"),
        }
    }

    /// normed (B T, C) -> attention over this rank's heads, in `saved`.
    pub(crate) fn heads_forward(
        &self,
        dev: &Device,
        normed: Tensor,
        saved: AttentionSaved,
        (heads, dropout): (Heads, Dropout),
    ) {
        let AttentionSaved { qkv, out, lse } = saved;
        let (weight, bias) = (self.qkv_weight.t(), Some(self.qkv_bias));
        dev.submit(Compute, Op::Gemm { a: normed, b: weight, c: qkv, bias, add: false });
        dev.submit(Compute, Op::Attention { qkv, out, lse, heads, dropout });
    }

    /// The row-parallel projection: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, saved: AttentionSaved, partial: Tensor) {
        let (a, b) = (saved.out, self.proj_weight.t());
        dev.submit(Compute, Op::Gemm { a, b, c: partial, bias: None, add: false });
    }

    /// From `branch.d_sum` (B T, C), the gradient of the summed projection, to `branch.d_normed` (B T, C),
    /// whose sum over the ranks runs beside the weight gradients and is over when Compute goes on.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        (normed, saved): (Tensor, AttentionSaved),
        (heads, dropout): (Heads, Dropout),
        branch: Branch,
        (grads, scratch): (Self, &Scratch),
    ) {
        let (AttentionSaved { qkv, out, lse }, d_sum) = (saved, branch.d_sum);
        let (d_out, d_qkv) = (scratch.d_attention, scratch.d_qkv);
        dev.submit(
            Compute,
            Op::Gemm { a: d_sum, b: self.proj_weight, c: d_out, bias: None, add: false },
        );
        let (a, c) = (d_sum.t(), grads.proj_weight);
        dev.submit(Compute, Op::Gemm { a, b: out, c, bias: None, add: false });
        dev.submit(Compute, Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, dropout });
        let c = branch.d_normed;
        dev.submit(Compute, Op::Gemm { a: d_qkv, b: self.qkv_weight, c, bias: None, add: false });
        let summed = branch.region.start_sum(dev, branch.d_normed);
        let (a, c) = (d_qkv.t(), grads.qkv_weight);
        dev.submit(Compute, Op::Gemm { a, b: normed, c, bias: None, add: false });
        dev.submit(Compute, Op::ColumnSum { x: d_qkv, y: grads.qkv_bias });
        dev.wait(Compute, summed);
    }
}
