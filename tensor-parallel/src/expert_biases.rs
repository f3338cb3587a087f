//! Biases of experts and of their router. Letters: E experts, I inner width, t ranks.

use crate::experts_shape::EXPERTS;
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split};
use crate::shape::{DecoderShape, ExpertsShape};
use device::{Device, Lane::Compute, Op, Tensor};

/// Biases of a layer's experts, or their gradients, which may be frozen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertBiases {
    pub(crate) router: Tensor,  // (1, E)
    pub(crate) gate_up: Tensor, // (E, 2I/t): gate, then up
    pub(crate) proj: Tensor,    // (E, C), added on the first rank, before the sum over the ranks
}

/// Name of the router's bias.
const ROUTER: &str = "moe.router.bias";
/// End of the names of the biases of the projections back.
const PROJ: &str = "proj.bias";

impl ExpertBiases {
    /// Declares the biases, if the experts have some. A rank's biases of an expert's gate and up are
    /// adjacent, as their matrices are.
    pub(crate) fn declare(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        experts: &ExpertsShape,
    ) {
        if !experts.biases {
            return;
        }
        let zero = Init::Constant(0.0);
        for expert in 0..experts.count {
            for part in ["gate", "up"] {
                let name = format!("{EXPERTS}{expert}.{part}.bias");
                params.add_vector(&name, experts.ffn_hidden, Split::Rows, zero);
            }
        }
        for expert in 0..experts.count {
            let name = format!("{EXPERTS}{expert}.{PROJ}");
            params.add_vector(&name, shape.hidden, Split::Replicated, zero);
        }
        params.add_vector(ROUTER, experts.count, Split::Replicated, shape.weight_init());
    }

    pub(crate) fn cut(
        flat: FlatBuffer<'_>,
        shape: &DecoderShape,
        experts: &ExpertsShape,
    ) -> Option<Self> {
        let rows = |parts: &[&str], columns| {
            let run = flat.run_of_experts(parts);
            if run.is_empty() { run } else { run.reshape(experts.count, columns) }
        };
        experts.biases.then(|| Self {
            router: flat.whole(ROUTER),
            gate_up: rows(&["gate.bias", "up.bias"], 2 * experts.ffn_hidden / shape.tp_size),
            proj: rows(&[PROJ], shape.hidden),
        })
    }

    /// Adds the biases of gates and ups to `pre` (R, 2I/t).
    pub(crate) fn add_to_inner(self, dev: &Device, pre: Tensor, offsets: Tensor) {
        dev.submit(Compute, Op::AddExpertBiases { x: pre, biases: self.gate_up, offsets });
    }

    /// Adds the biases of the projections to `y` (R, C), this rank's part of the outputs, on the
    /// first rank alone.
    pub(crate) fn add_to_output(self, dev: &Device, y: Tensor, offsets: Tensor) {
        if dev.rank().tp == 0 {
            dev.submit(Compute, Op::AddExpertBiases { x: y, biases: self.proj, offsets });
        }
    }

    /// Computes the gradient of the biases of gates and ups, unless it is frozen.
    pub(crate) fn inner_gradient(self, dev: &Device, d_y: Tensor, offsets: Tensor) {
        let d_biases = self.gate_up;
        if !d_biases.is_empty() {
            dev.submit(Compute, Op::ExpertBiasesBackward { d_y, offsets, d_biases });
        }
    }

    /// Computes the gradient of the biases of the projections, unless it is frozen, from the rows
    /// `d_y` (R, C), which all ranks have. `is_summed`: whether the ranks' gradients are summed, so
    /// that only the first rank may have one.
    pub(crate) fn output_gradient(
        self,
        dev: &Device,
        d_y: Tensor,
        offsets: Tensor,
        is_summed: bool,
    ) {
        let d_biases = self.proj;
        if d_biases.is_empty() {
            return;
        }
        if is_summed && dev.rank().tp > 0 {
            dev.submit(Compute, Op::Zero { x: d_biases });
        } else {
            dev.submit(Compute, Op::ExpertBiasesBackward { d_y, offsets, d_biases });
        }
    }

    /// Computes the gradient of the router's bias, unless it is frozen.
    pub(crate) fn router_gradient(self, dev: &Device, d_logits: Tensor) {
        if !self.router.is_empty() {
            dev.submit(Compute, Op::ColumnSum { x: d_logits, y: self.router });
        }
    }
}
