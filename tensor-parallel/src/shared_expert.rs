//! An MLP with a gate that all tokens pass, in addition to their experts (arXiv 2401.06066, section 3.2). Its
//! output is added to theirs before the sum over the ranks. In some models each token has a factor of
//! this output: see [`shared_gate`](crate::shared_gate). Letter: S is its inner width.

use crate::params::{FlatBuffer, ParamDeclarations, Split};
use crate::region::Region;
use crate::shape::{DecoderShape, ExpertsShape};
use crate::shared_gate::{
    AppliedSharedGate, SHARED_GATE, SharedGateActivations, SharedGateScratch,
};
use device::{Arena, Device, Gate, Lane::Compute, Op, Plan, Tensor};

/// Parameters of the MLP, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedExpert {
    gate_up: Tensor,             // (2S/t, C): gate, then up
    proj: Tensor,                // (C, S/t)
    output_gate: Option<Tensor>, // (1, C): of the gate of the output, if it has one
}

/// Activations of the MLP, for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedActivations {
    pre: Tensor, // (B T, 2S/t): gate, then up
    act: Tensor, // (B T, S/t)
    output_gate: Option<SharedGateActivations>,
}

/// Transients of the MLP; all layers share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedScratch {
    d_act: Tensor, // (B T, S/t)
    /// (B T, S/t): the activation, if the backward pass computes it again.
    act: Option<Tensor>,
    output_gate: Option<SharedGateScratch>,
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
            output_gate: experts.shared_gate.then(|| flat.get(SHARED_GATE, "weight")),
        })
    }
}

impl SharedScratch {
    /// Plans the transients of an MLP of `inner` channels on all ranks.
    pub(crate) fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        experts: &ExpertsShape,
        inner: usize,
    ) -> Self {
        let (at, own) = ((Arena::Device, "transients"), inner / shape.tp_size);
        let size = (shape.tokens(), own);
        let mut one = |name: &str| plan.tensor(at, format!("moe.shared.{name}"), shape.dtype, size);
        let d_act = one("d_act");
        let act = shape.recomputes_outputs().then(|| one(shape.activation()));
        let gate = || SharedGateScratch::plan(plan, shape, own);
        Self { d_act, act, output_gate: experts.shared_gate.then(gate) }
    }

    /// The transients for the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        let first = |t: Tensor| t.rows(0..rows);
        let output_gate = self.output_gate.map(|gate| gate.first(rows));
        Self { d_act: first(self.d_act), act: self.act.map(first), output_gate }
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
        let act = scratch.act.unwrap_or_else(|| one(shape.activation(), own));
        let gate = |_| SharedGateActivations::plan(plan, name, shape);
        Self { pre, act, output_gate: scratch.output_gate.map(gate) }
    }

    /// All tensors but the output of the activation.
    pub(crate) fn tensors(self) -> impl Iterator<Item = Tensor> {
        let of_gate = self.output_gate.into_iter().flat_map(SharedGateActivations::tensors);
        std::iter::once(self.pre).chain(of_gate)
    }

    /// The activations of the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        let output_gate = self.output_gate.map(|gate| gate.first(rows));
        Self { pre: self.pre.rows(0..rows), act: self.act.rows(0..rows), output_gate }
    }
}

impl AppliedSharedExpert {
    /// The gate of the output, if it has one.
    fn output_gate(&self) -> Option<AppliedSharedGate> {
        let parts = self.params.output_gate.zip(self.saved.output_gate);
        let parts = parts.zip(self.scratch.output_gate);
        parts.map(|((weight, saved), scratch)| AppliedSharedGate { weight, saved, scratch })
    }

    /// Computes normed (B T, C) -> activations of this rank's columns.
    pub(crate) fn inner_forward(&self, dev: &Device, normed: Tensor) {
        dev.submit(Compute, Op::product(normed, self.params.gate_up.t(), self.saved.pre));
        self.activate(dev);
        if let Some(gate) = self.output_gate() {
            gate.forward(dev, normed);
        }
    }

    /// Computes the output of the activation.
    pub(crate) fn activate(&self, dev: &Device) {
        let (SharedActivations { pre: x, act: y, .. }, gate) = (self.saved, self.gate);
        dev.submit(Compute, Op::SwiGlu { x, y, gate });
    }

    /// Adds this rank's part of the output to `partial` (B T, C).
    pub(crate) fn add_output(&self, dev: &Device, partial: Tensor) {
        let (act, gate) = (self.saved.act, self.output_gate());
        if let Some(gate) = gate {
            gate.apply(dev, act);
        }
        let input = gate.map_or(act, AppliedSharedGate::applied);
        dev.submit(Compute, Op::add_product(input, self.params.proj.t(), partial));
    }

    /// Adds this rank's part of the gradient of the input to `d_normed` (B T, C), from the gradient
    /// `d_sum` (B T, C) of the output. The activations before the gate become their gradients.
    pub(crate) fn add_input_gradient(&self, dev: &Device, d_sum: Tensor, d_normed: Tensor) {
        let (SharedActivations { pre: x, act, .. }, d) = (self.saved, self.scratch.d_act);
        dev.submit(Compute, Op::product(d_sum, self.params.proj, d));
        let swiglu_backward = |d| {
            dev.submit(Compute, Op::SwiGluBackward { x, d, gate: self.gate });
            dev.submit(Compute, Op::add_product(x, self.params.gate_up, d_normed));
        };
        let Some(gate) = self.output_gate() else { return swiglu_backward(d) };
        gate.apply(dev, act);
        let summed = gate.backward(dev, act, d);
        swiglu_backward(act);
        dev.wait(Compute, summed);
        gate.add_input_gradient(dev, d_normed);
    }

    /// Computes the gradients of the parameters, unless they are frozen, after
    /// [`add_input_gradient`](Self::add_input_gradient), from the gradient of the output and the complete
    /// input, (B T, C) each.
    pub(crate) fn weight_gradients(
        &self,
        dev: &Device,
        region: Region,
        [d_sum, normed]: [Tensor; 2],
        grads: SharedExpert,
    ) {
        let (d_pre, gate) = (self.saved.pre, self.output_gate());
        let input = gate.map_or(self.saved.act, AppliedSharedGate::applied);
        for (d, x, d_weight) in [(d_sum, input, grads.proj), (d_pre, normed, grads.gate_up)] {
            if !d_weight.is_empty() {
                dev.submit(Compute, Op::product(d.t(), x, d_weight));
            }
        }
        if let Some((gate, d_weight)) = gate.zip(grads.output_gate)
            && !d_weight.is_empty()
        {
            gate.weight_gradient(dev, region, normed, d_weight);
        }
    }
}
