//! Low-rank adapters of the matrices of experts, as PEFT has them: expert e has y = x w_e' +
//! s (x a_e') b_e'. Gate and up of an expert have one factor a, and each has its own rows of b.
//!
//! Every rank has the rows of all tokens and a part of every expert, so the factor on the cut side
//! is cut: b of gate and up, a of the projection back. The other factors are replicated, and each
//! rank computes a part of their gradients, as for [`Adapter`](crate::adapter::Adapter).

use crate::adapter::{initial_factor, scaled};
use crate::adapter_shape::AdapterShape;
use crate::experts_shape::EXPERTS;
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split};
use crate::shape::{DecoderShape, ExpertsShape};
use device::{Arena, Device, Lane::Compute, Op, Plan, Tensor};
use device::{ExpertWeights, GroupedForm};

/// Transients of the adapters of a layer's experts; all layers share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertAdapterScratch {
    hidden: Tensor,   // (R, r): s x a'
    d_hidden: Tensor, // (R, r): its gradient, times s
}

/// The adapters of one matrix of all experts, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertAdapter {
    a: ExpertWeights, // E times (r, k)
    b: ExpertWeights, // E times (n, r)
    scale: f32,
    scratch: ExpertAdapterScratch,
}

/// A matrix of each expert that may have an adapter: its name, and the ends of its factors' names.
#[derive(Clone, Copy, Debug)]
struct AdaptedMatrix {
    name: &'static str,
    a: &'static str,
    b: &'static [&'static str],
}

/// Gate and up, which one matmul computes.
const GATE_UP: AdaptedMatrix = AdaptedMatrix {
    name: "moe.experts.gate_up",
    a: "gate_up.lora_a",
    b: &["gate.lora_b", "up.lora_b"],
};
/// The projection back.
const PROJ: AdaptedMatrix =
    AdaptedMatrix { name: "moe.experts.proj", a: "proj.lora_a", b: &["proj.lora_b"] };

/// Declares the adapters of a layer's experts, if the model has them.
pub(crate) fn declare(
    params: &mut ParamDeclarations,
    shape: &DecoderShape,
    experts: &ExpertsShape,
) {
    let Some(AdapterShape { rank, targets, .. }) = shape.adapters() else { return };
    let (c, i) = (shape.hidden, experts.ffn_hidden);
    let adapted = |matrix: AdaptedMatrix| targets.has(matrix.name).then_some(matrix);
    let mut all = |part: &str, size, split, init| {
        for expert in 0..experts.count {
            params.add(&format!("{EXPERTS}{expert}.{part}"), size, split, init);
        }
    };
    if let Some(AdaptedMatrix { a, .. }) = adapted(GATE_UP) {
        all(a, (rank, c), Split::Replicated, initial_factor(c));
    }
    if let Some(AdaptedMatrix { a, b, .. }) = adapted(PROJ) {
        all(a, (rank, i), Split::Columns, initial_factor(i));
        all(b[0], (c, rank), Split::Replicated, Init::Constant(0.0));
    }
    if let Some(AdaptedMatrix { b, .. }) = adapted(GATE_UP) {
        for expert in 0..experts.count {
            for part in b {
                let name = format!("{EXPERTS}{expert}.{part}");
                params.add(&name, (i, rank), Split::Rows, Init::Constant(0.0));
            }
        }
    }
}

impl ExpertAdapterScratch {
    /// Plans the transients, if experts have adapters.
    pub(crate) fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        experts: &ExpertsShape,
    ) -> Option<Self> {
        let AdapterShape { rank, targets, .. } = shape.adapters()?;
        if ![GATE_UP, PROJ].iter().any(|matrix| targets.has(matrix.name)) {
            return None;
        }
        let mut one = |name: &str| {
            let size = (shape.pairs(experts), rank);
            plan.tensor((Arena::Device, "transients"), name, shape.dtype, size)
        };
        Some(Self { hidden: one("moe.adapter"), d_hidden: one("moe.d_adapter") })
    }
}

impl ExpertAdapter {
    /// Cuts the adapters of gate and up out of a flat buffer, then those of the projection back.
    /// `None` if the matrix has no adapter.
    pub(crate) fn cut(
        flat: FlatBuffer<'_>,
        shape: &DecoderShape,
        experts: &ExpertsShape,
        scratch: Option<ExpertAdapterScratch>,
    ) -> [Option<Self>; 2] {
        let Some((AdapterShape { rank, scale, targets, .. }, scratch)) =
            shape.adapters().zip(scratch)
        else {
            return [None, None];
        };
        let (c, inner) = (shape.hidden, experts.ffn_hidden / shape.tp_size);
        let sizes = [(GATE_UP, (2 * inner, c)), (PROJ, (c, inner))];
        sizes.map(|(matrix, (n, k))| {
            targets.has(matrix.name).then(|| Self {
                a: flat.of_experts(&[matrix.a], (rank, k), experts.count),
                b: flat.of_experts(matrix.b, (n, rank), experts.count),
                scale: scale as f32,
                scratch,
            })
        })
    }

    /// Computes s x a' (R, r) in a transient from x (R, k).
    fn hidden(&self, dev: &Device, offsets: Tensor, x: Tensor) -> Tensor {
        let hidden = self.scratch.hidden.rows(0..x.shape().0);
        dev.submit(Compute, Op::grouped_forward(self.a, offsets, x, hidden));
        scaled(dev, hidden, self.scale)
    }

    /// Computes y (R, n) += s (x a') b' from x (R, k).
    pub(crate) fn forward(&self, dev: &Device, offsets: Tensor, x: Tensor, y: Tensor) {
        let hidden = self.hidden(dev, offsets, x);
        let form = GroupedForm::Forward;
        dev.submit(Compute, Op::grouped_addition(form, self.b, offsets, hidden, y));
    }

    /// Computes d_x (R, k) += s (d b) a from the gradient d (R, n) of y. Keeps s d b for
    /// [`weight_gradient`](Self::weight_gradient).
    pub(crate) fn input_gradient(&self, dev: &Device, offsets: Tensor, d: Tensor, d_x: Tensor) {
        let d_hidden = self.scratch.d_hidden;
        dev.submit(Compute, Op::grouped_input_gradient(self.b, offsets, d, d_hidden));
        let (form, d_hidden) = (GroupedForm::InputGradient, scaled(dev, d_hidden, self.scale));
        dev.submit(Compute, Op::grouped_addition(form, self.a, offsets, d_hidden, d_x));
    }

    /// Computes the gradients of a and b from d (R, n) and x (R, k). Computes x a' again, since that
    /// is cheaper than its memory. Call it after [`input_gradient`](Self::input_gradient) of the same
    /// d, before that of another d.
    pub(crate) fn weight_gradient(
        &self,
        dev: &Device,
        offsets: Tensor,
        d: Tensor,
        x: Tensor,
        grads: Self,
    ) {
        let hidden = self.hidden(dev, offsets, x);
        dev.submit(Compute, Op::grouped_weight_gradient(grads.b, offsets, d, hidden));
        let d_hidden = self.scratch.d_hidden;
        dev.submit(Compute, Op::grouped_weight_gradient(grads.a, offsets, d_hidden, x));
    }
}
