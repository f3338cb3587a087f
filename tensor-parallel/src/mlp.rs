//! The MLP: a column-parallel linear, GELU or a gate (SwiGLU, GEGLU), a row-parallel linear.

use crate::adapter::{self, AdaptedWeight, Adapter};
use crate::branch::{Branch, Scratch};
use crate::linear::{Fp8Linear, Linear, LinearGrads};
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split};
use crate::region::Region;
use crate::shape::DecoderShape;
use device::{Arena, Device, Dropout, Epilogue, Lane::Compute, Op, Plan, Tensor};

/// Activations of the forward pass, for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpActivations {
    pre: Tensor,            // (B T, F/t) before GELU; with a gate (B T, 2F/t): gate, then up
    pub(crate) act: Tensor, // (B T, F/t)
    fc: Option<Fp8Linear>,
    proj: Option<Fp8Linear>,
}

/// Parameters of the MLP, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mlp {
    fc_weight: Tensor,       // (F/t, C); with a gate (2F/t, C): gate, then up
    fc_bias: Option<Tensor>, // (F/t)
    proj_weight: Tensor,     // (C, F/t)
    pub(crate) proj_bias: Option<Tensor>, // (C), added after the sum over the ranks
    fc_adapter: Option<Adapter>,
    proj_adapter: Option<Adapter>,
}

/// Names of the linears: of an MLP without a gate, of one with a gate, and of both.
const FC: &str = "mlp.fc";
const GATE_UP: [&str; 2] = ["mlp.gate", "mlp.up"];
const PROJ: &str = "mlp.proj";

impl MlpActivations {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        scratch: &Scratch,
    ) -> Self {
        let (at, tokens) = ((Arena::Device, "activations"), shape.tokens());
        let [fc, proj] = ["fc", "mlp_proj"]
            .map(|linear| scratch.fp8.map(|fp8| fp8.linear(plan, &format!("{name}.{linear}"))));
        let mut own =
            |what, width| plan.tensor(at, format!("{name}.{what}"), shape.dtype, (tokens, width));
        let pre = if shape.architecture.gate.is_some() { "gate_up" } else { "pre_gelu" };
        let pre = own(pre, shape.inner_width());
        let act = match scratch.recomputed {
            Some(recomputed) => {
                recomputed.act.unwrap_or_else(|| unreachable!("an MLP has an activation"))
            }
            None => own(shape.activation(), shape.ffn_hidden / shape.tp_size),
        };
        Self { pre, act, fc, proj }
    }

    /// All tensors but the output of the activation.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        let maxima = [self.fc, self.proj].into_iter().flatten().flat_map(Fp8Linear::maxima);
        std::iter::once(self.pre).chain(maxima).collect()
    }

    /// The first `rows` rows of the activations.
    pub(crate) fn first(self, rows: usize) -> Self {
        Self { pre: self.pre.rows(0..rows), act: self.act.rows(0..rows), ..self }
    }
}

impl Mlp {
    /// Declares the parameters with the prefix `mlp.`. A rank's rows of gate and up are adjacent,
    /// so that one matmul computes both.
    pub(crate) fn declare(params: &mut ParamDeclarations, shape: &DecoderShape) {
        let (c, f, zero) = (shape.hidden, shape.ffn_hidden, Init::Constant(0.0));
        if shape.architecture.gate.is_some() {
            params.add("mlp.gate.weight", (f, c), Split::Rows, shape.weight_init());
            params.add("mlp.up.weight", (f, c), Split::Rows, shape.weight_init());
            params.add("mlp.proj.weight", (c, f), Split::Columns, shape.residual_init());
            let weights = GATE_UP.map(|name| (AdaptedWeight::alone(name), f, Split::Rows));
            adapter::declare(params, shape, &weights, c);
        } else {
            params.add("mlp.fc.weight", (f, c), Split::Rows, shape.weight_init());
            params.add_vector("mlp.fc.bias", f, Split::Rows, zero);
            params.add("mlp.proj.weight", (c, f), Split::Columns, shape.residual_init());
            params.add_vector("mlp.proj.bias", c, Split::Replicated, zero);
            adapter::declare(params, shape, &[(AdaptedWeight::alone(FC), f, Split::Rows)], c);
        }
        let proj = AdaptedWeight::alone(PROJ);
        adapter::declare(params, shape, &[(proj, c, Split::Columns)], f);
    }

    /// The parameters in a pass that drops the inputs of adapters: that of the MLP, then that of the
    /// projection back.
    pub(crate) fn with_dropout(self, [input, proj]: [Dropout; 2]) -> Self {
        Self {
            fc_adapter: self.fc_adapter.map(|adapter| adapter.with_dropout(input)),
            proj_adapter: self.proj_adapter.map(|adapter| adapter.with_dropout(proj)),
            ..self
        }
    }

    pub(crate) fn cut(flat: FlatBuffer<'_>, shape: &DecoderShape, scratch: &Scratch) -> Self {
        let of = |weights: &[_]| Adapter::cut(flat, shape, weights, scratch.adapters);
        let proj_adapter = of(&[AdaptedWeight::alone(PROJ)]);
        let proj_weight = flat.get("mlp.proj", "weight");
        if shape.architecture.gate.is_some() {
            let fc_weight = flat.joined(&GATE_UP, "weight");
            return Self {
                fc_weight,
                fc_bias: None,
                proj_weight,
                proj_bias: None,
                fc_adapter: of(&GATE_UP.map(AdaptedWeight::alone)),
                proj_adapter,
            };
        }
        Self {
            fc_weight: flat.get("mlp.fc", "weight"),
            fc_bias: flat.get_trained("mlp.fc", "bias"),
            proj_weight,
            proj_bias: flat.get_trained("mlp.proj", "bias"),
            fc_adapter: of(&[AdaptedWeight::alone(FC)]),
            proj_adapter,
        }
    }

    /// Computes normed (B T, C) -> activations of this rank's columns, in `saved`.
    pub(crate) fn inner_forward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        normed: Tensor,
        saved: MlpActivations,
    ) {
        let MlpActivations { pre: x, act: y, .. } = saved;
        let (fc, gate) = (self.fc(saved), shape.architecture.gate);
        let epilogue = if gate.is_some() { Epilogue::None } else { Epilogue::Gelu { y } };
        fc.observe(dev, normed);
        fc.forward(dev, normed, x, epilogue, self.fc_bias);
        if let Some(gate) = gate {
            dev.submit(Compute, Op::SwiGlu { x, y, gate });
        }
        self.proj(saved).observe(dev, y);
    }

    const fn fc(&self, saved: MlpActivations) -> Linear {
        Linear { weight: self.fc_weight, adapter: self.fc_adapter, fp8: saved.fc }
    }

    const fn proj(&self, saved: MlpActivations) -> Linear {
        Linear { weight: self.proj_weight, adapter: self.proj_adapter, fp8: saved.proj }
    }

    /// Computes the row-parallel linear: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, saved: MlpActivations, partial: Tensor) {
        self.proj(saved).forward(dev, saved.act, partial, Epilogue::None, None);
    }

    /// Computes `branch.d_normed` (B T, C) from `branch.d_sum` (B T, C), the gradient of the summed
    /// output. The sum of `branch.d_normed` over the ranks runs during the weight gradients;
    /// Compute waits for it at the end.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        saved: MlpActivations,
        branch: Branch,
        grads: Self,
    ) {
        let d = branch.scratch.d_inner;
        let d = d.unwrap_or_else(|| unreachable!("an MLP has a transient for its gradient"));
        let d_sum = branch.d_sum;
        let (x, fc, proj) = (saved.pre, self.fc(saved), self.proj(saved));
        if branch.recomputes {
            let y = saved.act;
            let act = match shape.architecture.gate {
                Some(gate) => Op::SwiGlu { x, y, gate },
                None => Op::Gelu { x, y },
            };
            dev.submit(Compute, act);
        }
        let d_pre = if let Some(gate) = shape.architecture.gate {
            proj.input_gradient(dev, d_sum, d, Epilogue::None);
            dev.submit(Compute, Op::SwiGluBackward { x, d, gate });
            x
        } else {
            proj.input_gradient(dev, d_sum, d, Epilogue::GeluBackward { x });
            d
        };
        let d_bias = Region::with_weight(dev, grads.proj_bias);
        let (weight, adapter) = (grads.proj_weight, grads.proj_adapter);
        proj.weight_gradient(dev, d_sum, saved.act, LinearGrads { weight, bias: d_bias, adapter });
        fc.input_gradient(dev, d_pre, branch.d_normed, Epilogue::None);
        let summed = branch.region.start_sum(dev, branch.d_normed);
        dev.wait(Compute, branch.whole);
        let (weight, bias, adapter) = (grads.fc_weight, grads.fc_bias, grads.fc_adapter);
        fc.weight_gradient(dev, d_pre, branch.normed, LinearGrads { weight, bias, adapter });
        dev.wait(Compute, summed);
    }
}
