//! The MLP: a column-parallel linear, GELU, a row-parallel linear.

use crate::branch::{Branch, Scratch};
use crate::params::{Declared, Flat, Init, Split};
use crate::shape::GptShape;
use device::{Arena, Device, Dtype, Lane::Compute, Op, Plan, Tensor};

/// What the forward pass leaves for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpSaved {
    pre: Tensor, // (B T, F/t) before GELU
    act: Tensor, // (B T, F/t)
}

/// Parameters, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mlp {
    fc_weight: Tensor,            // (F/t, C)
    fc_bias: Tensor,              // (F/t)
    proj_weight: Tensor,          // (C, F/t)
    pub(crate) proj_bias: Tensor, // (C), added after the sum over the ranks
}

impl MlpSaved {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        dtype: Dtype,
        (tokens, width): (usize, usize),
    ) -> Self {
        let at = (Arena::Device, "activations");
        Self {
            pre: plan.tensor(at, format!("{name}.pre_gelu"), dtype, (tokens, width)),
            act: plan.tensor(at, format!("{name}.gelu"), dtype, (tokens, width)),
        }
    }
}

impl Mlp {
    /// Declares its parameters behind `mlp.`.
    pub(crate) fn declare(params: &mut Declared, shape: &GptShape) {
        let (c, f, zero) = (shape.hidden, shape.ffn_hidden, Init::Constant(0.0));
        params.add("mlp.fc.weight", (f, c), Split::Rows, shape.weight_init());
        params.add("mlp.fc.bias", (f, 1), Split::Rows, zero);
        params.add("mlp.proj.weight", (c, f), Split::Columns, shape.residual_init());
        params.add("mlp.proj.bias", (c, 1), Split::Replicated, zero);
    }

    pub(crate) fn cut(flat: Flat<'_>) -> Self {
        Self {
            fc_weight: flat.get("mlp.fc", "weight"),
            fc_bias: flat.get("mlp.fc", "bias"),
            proj_weight: flat.get("mlp.proj", "weight"),
            proj_bias: flat.get("mlp.proj", "bias"),
        }
    }

    /// normed (B T, C) -> GELU of this rank's columns, in `saved`.
    pub(crate) fn inner_forward(&self, dev: &Device, normed: Tensor, saved: MlpSaved) {
        let (weight, bias) = (self.fc_weight.t(), Some(self.fc_bias));
        dev.submit(Compute, Op::Gemm { a: normed, b: weight, c: saved.pre, bias, add: false });
        dev.submit(Compute, Op::Gelu { x: saved.pre, y: saved.act });
    }

    /// The row-parallel linear: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, saved: MlpSaved, partial: Tensor) {
        let (a, b) = (saved.act, self.proj_weight.t());
        dev.submit(Compute, Op::Gemm { a, b, c: partial, bias: None, add: false });
    }

    /// From `branch.d_sum` (B T, C), the gradient of the summed output, to `branch.d_normed` (B T, C), whose
    /// sum over the ranks runs beside the weight gradients and is over when Compute goes on.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        (normed, saved): (Tensor, MlpSaved),
        branch: Branch,
        (grads, scratch): (Self, &Scratch),
    ) {
        let (d_sum, d_inner) = (branch.d_sum, scratch.d_inner);
        dev.submit(
            Compute,
            Op::Gemm { a: d_sum, b: self.proj_weight, c: d_inner, bias: None, add: false },
        );
        let (a, c) = (d_sum.t(), grads.proj_weight);
        dev.submit(Compute, Op::Gemm { a, b: saved.act, c, bias: None, add: false });
        dev.submit(Compute, Op::GeluBackward { x: saved.pre, d: d_inner });
        let c = branch.d_normed;
        dev.submit(Compute, Op::Gemm { a: d_inner, b: self.fc_weight, c, bias: None, add: false });
        let summed = branch.region.start_sum(dev, branch.d_normed);
        let (a, c) = (d_inner.t(), grads.fc_weight);
        dev.submit(Compute, Op::Gemm { a, b: normed, c, bias: None, add: false });
        dev.submit(Compute, Op::ColumnSum { x: d_inner, y: grads.fc_bias });
        dev.wait(Compute, summed);
    }
}
