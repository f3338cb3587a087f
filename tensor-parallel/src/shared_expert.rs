//! An MLP with a gate that all tokens pass beside their experts (arXiv 2401.06066, section 3.2). Its
//! output is added to theirs before the sum over the ranks. Letter: S is its inner width.

use crate::params::{FlatBuffer, ParamDeclarations, Split};
use crate::shape::{DecoderShape, ExpertsShape};
use device::{Arena, Device, Gate, Lane::Compute, Op, Plan, Tensor};

/// Parameters of the MLP, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedExpert {
    gate_up: Tensor, // (2S/t, C): gate, then up
    proj: Tensor,    // (C, S/t)
}

/// Activations of the MLP, for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedActivations {
    pub(crate) pre: Tensor, // (B T, 2S/t): gate, then up
    act: Tensor,            // (B T, S/t)
}

/// Transients of the MLP; all layers share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedScratch {
    d_act: Tensor, // (B T, S/t)
    /// (B T, S/t): the activation, if the backward pass computes it again.
    act: Option<Tensor>,
}

/// The MLP in a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedSharedExpert {
    pub(crate) params: SharedExpert,
    pub(crate) gate: Gate,
    pub(crate) saved: SharedActivations,
    pub(crate) scratch: SharedScratch,
}

/// Names of the linears.
const GATE: &str = "moe.shared.gate";
const UP: &str = "moe.shared.up";
const PROJ: &str = "moe.shared.proj";

impl SharedExpert {
    /// Declares the parameters, if the layer has the MLP. A rank's rows of gate and up are adjacent,
    /// so that one matmul computes both.
    pub(crate) fn declare(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        experts: &ExpertsShape,
    ) {
        let Some(inner) = experts.shared_hidden else { return };
        let c = shape.hidden;
        for name in [GATE, UP] {
            params.add(&format!("{name}.weight"), (inner, c), Split::Rows, shape.weight_init());
        }
        let (name, size) = (format!("{PROJ}.weight"), (c, inner));
        params.add(&name, size, Split::Columns, shape.residual_init());
    }

    pub(crate) fn cut(flat: FlatBuffer<'_>, experts: &ExpertsShape) -> Option<Self> {
        experts.shared_hidden.map(|_| Self {
            gate_up: flat.joined(&[GATE, UP], "weight"),
            proj: flat.get(PROJ, "weight"),
        })
    }
}

impl SharedScratch {
    /// Plans the transients of an MLP of `inner` channels on all ranks.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, inner: usize) -> Self {
        let (at, size) = ((Arena::Device, "transients"), (shape.tokens(), inner / shape.tp_size));
        let mut one = |name: &str| plan.tensor(at, format!("moe.shared.{name}"), shape.dtype, size);
        let d_act = one("d_act");
        Self { d_act, act: shape.recomputes_outputs().then(|| one(shape.activation())) }
    }

    /// The transients for the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        let first = |t: Tensor| t.rows(0..rows);
        Self { d_act: first(self.d_act), act: self.act.map(first) }
    }
}

impl SharedActivations {
    /// Plans the activations of an MLP of `inner` channels on all ranks.
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        inner: usize,
        scratch: SharedScratch,
    ) -> Self {
        let (at, own) = ((Arena::Device, "activations"), inner / shape.tp_size);
        let mut one = |what: &str, width| {
            let name = format!("{name}.moe.shared.{what}");
            plan.tensor(at, name, shape.dtype, (shape.tokens(), width))
        };
        let pre = one("gate_up", 2 * own);
        Self { pre, act: scratch.act.unwrap_or_else(|| one(shape.activation(), own)) }
    }

    /// The activations of the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        Self { pre: self.pre.rows(0..rows), act: self.act.rows(0..rows) }
    }
}

impl AppliedSharedExpert {
    /// Computes normed (B T, C) -> activations of this rank's columns.
    pub(crate) fn inner_forward(&self, dev: &Device, normed: Tensor) {
        dev.submit(Compute, Op::product(normed, self.params.gate_up.t(), self.saved.pre));
        self.activate(dev);
    }

    /// Computes the output of the activation.
    pub(crate) fn activate(&self, dev: &Device) {
        let (SharedActivations { pre: x, act: y }, gate) = (self.saved, self.gate);
        dev.submit(Compute, Op::SwiGlu { x, y, gate });
    }

    /// Adds this rank's part of the output to `partial` (B T, C).
    pub(crate) fn add_output(&self, dev: &Device, partial: Tensor) {
        dev.submit(Compute, Op::add_product(self.saved.act, self.params.proj.t(), partial));
    }

    /// Adds this rank's part of the gradient of the input to `d_normed` (B T, C), from the gradient
    /// `d_sum` (B T, C) of the output. The activations before the gate become their gradients.
    pub(crate) fn add_input_gradient(&self, dev: &Device, d_sum: Tensor, d_normed: Tensor) {
        let (x, d) = (self.saved.pre, self.scratch.d_act);
        dev.submit(Compute, Op::product(d_sum, self.params.proj, d));
        dev.submit(Compute, Op::SwiGluBackward { x, d, gate: self.gate });
        dev.submit(Compute, Op::add_product(x, self.params.gate_up, d_normed));
    }

    /// Computes the gradients of the parameters, after
    /// [`add_input_gradient`](Self::add_input_gradient), from the complete input `normed` (B T, C).
    pub(crate) fn weight_gradients(
        &self,
        dev: &Device,
        d_sum: Tensor,
        normed: Tensor,
        grads: SharedExpert,
    ) {
        let (d_pre, act) = (self.saved.pre, self.saved.act);
        for (d, x, d_weight) in [(d_sum, act, grads.proj), (d_pre, normed, grads.gate_up)] {
            if !d_weight.is_empty() {
                dev.submit(Compute, Op::product(d.t(), x, d_weight));
            }
        }
    }
}
