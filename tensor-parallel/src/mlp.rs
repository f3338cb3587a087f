//! The MLP: a column-parallel linear, GELU or a gate (SwiGLU), a row-parallel linear.

use crate::branch::{Branch, Scratch};
use crate::params::{Declared, Flat, Init, Split};
use crate::shape::GptShape;
use device::{Arena, Device, Epilogue, Lane::Compute, Op, Plan, Tensor};

/// Activations of the forward pass, for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpSaved {
    pre: Tensor, // (B T, F/t) before GELU; with a gate (B T, 2F/t): gate, then up
    act: Tensor, // (B T, F/t)
}

/// Parameters, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mlp {
    fc_weight: Tensor,       // (F/t, C); with a gate (2F/t, C): gate, then up
    fc_bias: Option<Tensor>, // (F/t)
    proj_weight: Tensor,     // (C, F/t)
    pub(crate) proj_bias: Option<Tensor>, // (C), added after the sum over the ranks
}

impl MlpSaved {
    pub(crate) fn plan(plan: &mut Plan, name: &str, shape: &GptShape) -> Self {
        let (at, tokens) = ((Arena::Device, "activations"), shape.tokens());
        let [pre, act] =
            if shape.parts.swiglu { ["gate_up", "swiglu"] } else { ["pre_gelu", "gelu"] };
        let (pre, act) = (format!("{name}.{pre}"), format!("{name}.{act}"));
        let width = shape.ffn_hidden / shape.tp_size;
        Self {
            pre: plan.tensor(at, pre, shape.dtype, (tokens, shape.inner_width())),
            act: plan.tensor(at, act, shape.dtype, (tokens, width)),
        }
    }
}

impl MlpSaved {
    /// The first `rows` rows.
    pub(crate) fn first(self, rows: usize) -> Self {
        Self { pre: self.pre.rows(0..rows), act: self.act.rows(0..rows) }
    }
}

impl Mlp {
    /// Declares its parameters behind `mlp.`. A rank's runs of gate and up stand together, so that one product has both.
    pub(crate) fn declare(params: &mut Declared, shape: &GptShape) {
        let (c, f, zero) = (shape.hidden, shape.ffn_hidden, Init::Constant(0.0));
        if shape.parts.swiglu {
            params.add("mlp.gate.weight", (f, c), Split::Rows, shape.weight_init());
            params.add("mlp.up.weight", (f, c), Split::Rows, shape.weight_init());
            params.add("mlp.proj.weight", (c, f), Split::Columns, shape.residual_init());
        } else {
            params.add("mlp.fc.weight", (f, c), Split::Rows, shape.weight_init());
            params.add("mlp.fc.bias", (f, 1), Split::Rows, zero);
            params.add("mlp.proj.weight", (c, f), Split::Columns, shape.residual_init());
            params.add("mlp.proj.bias", (c, 1), Split::Replicated, zero);
        }
    }

    pub(crate) fn cut(flat: Flat<'_>, shape: &GptShape) -> Self {
        let proj_weight = flat.get("mlp.proj", "weight");
        if shape.parts.swiglu {
            let fc_weight = flat.joined(&["mlp.gate", "mlp.up"], "weight");
            return Self { fc_weight, fc_bias: None, proj_weight, proj_bias: None };
        }
        Self {
            fc_weight: flat.get("mlp.fc", "weight"),
            fc_bias: Some(flat.get("mlp.fc", "bias")),
            proj_weight,
            proj_bias: Some(flat.get("mlp.proj", "bias")),
        }
    }

    /// normed (B T, C) -> activations of this rank's columns, in `saved`.
    pub(crate) fn inner_forward(
        &self,
        dev: &Device,
        shape: &GptShape,
        normed: Tensor,
        saved: MlpSaved,
    ) {
        let (weight, bias) = (self.fc_weight.t(), self.fc_bias);
        let MlpSaved { pre: x, act: y } = saved;
        let (swiglu, add) = (shape.parts.swiglu, false);
        let epilogue = if swiglu { Epilogue::None } else { Epilogue::Gelu { y } };
        dev.submit(Compute, Op::Gemm { a: normed, b: weight, c: x, bias, add, epilogue });
        if swiglu {
            dev.submit(Compute, Op::SwiGlu { x, y });
        }
    }

    /// The row-parallel linear: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, saved: MlpSaved, partial: Tensor) {
        dev.submit(Compute, Op::product(saved.act, self.proj_weight.t(), partial));
    }

    /// From `branch.d_sum` (B T, C), the gradient of the summed output, to `branch.d_normed` (B T, C), whose
    /// sum over the ranks runs beside the weight gradients and is over when Compute goes on.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &GptShape,
        (normed, saved): (Tensor, MlpSaved),
        branch: Branch,
        (grads, scratch): (Self, &Scratch),
    ) {
        let (d_sum, d) = (branch.d_sum, scratch.d_inner);
        let (x, weight) = (saved.pre, self.proj_weight);
        let d_pre = if shape.parts.swiglu {
            dev.submit(Compute, Op::product(d_sum, weight, d));
            dev.submit(Compute, Op::SwiGluBackward { x, d });
            x
        } else {
            dev.submit(Compute, Op::product_with(d_sum, weight, d, Epilogue::GeluBackward { x }));
            d
        };
        dev.submit(Compute, Op::product(d_sum.t(), saved.act, grads.proj_weight));
        dev.submit(Compute, Op::product(d_pre, self.fc_weight, branch.d_normed));
        let summed = branch.region.start_sum(dev, branch.d_normed);
        let d_bias = Epilogue::row_sums(grads.fc_bias);
        dev.submit(Compute, Op::product_with(d_pre.t(), normed, grads.fc_weight, d_bias));
        dev.wait(Compute, summed);
    }
}
