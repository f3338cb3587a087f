//! Transients of experts.

use crate::expert_adapters::ExpertAdapterScratch;
use crate::shape::{DecoderShape, ExpertsShape};
use crate::shared_expert::SharedScratch;
use device::{Arena, Dtype, Plan, Tensor, expert_sort_scratch};

/// Transients of a layer's experts; all layers share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertsScratch {
    pub(crate) sorted: Tensor,           // (R, C): input of the experts
    pub(crate) d_act: Tensor,            // (R, I/t)
    pub(crate) d_weights: Tensor,        // (B T, k) F32
    pub(crate) d_logits: Option<Tensor>, // (B T, E), if the model's type is not F32
    pub(crate) sort: Tensor,             // (1, n) I32: histograms of the sort
    /// (R, I/t): the activation, if the backward pass computes it again.
    pub(crate) act: Option<Tensor>,
    /// Of the shared MLP, if layers with experts have one.
    pub(crate) shared: Option<SharedScratch>,
    /// Of the adapters of experts, if they have adapters.
    pub(crate) adapters: Option<ExpertAdapterScratch>,
}

impl ExpertsScratch {
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, experts: &ExpertsShape) -> Self {
        let (tokens, pairs) = (shape.tokens(), shape.pairs(experts));
        let inner = experts.ffn_hidden / shape.tp_size;
        let mut one = |name: &str, dtype, size| {
            plan.tensor((Arena::Device, "transients"), format!("moe.{name}"), dtype, size)
        };
        let histograms = (1, expert_sort_scratch(pairs, experts.count));
        Self {
            sorted: one("sorted", shape.dtype, (pairs, shape.hidden)),
            d_act: one("d_act", shape.dtype, (pairs, inner)),
            d_weights: one("d_weights", Dtype::F32, (tokens, experts.per_token)),
            d_logits: (shape.dtype != Dtype::F32)
                .then(|| one("d_logits", shape.dtype, (tokens, experts.count))),
            sort: one("sort", Dtype::I32, histograms),
            act: shape
                .recomputes_outputs()
                .then(|| one(shape.activation(), shape.dtype, (pairs, inner))),
            shared: experts
                .shared_hidden
                .map(|inner| SharedScratch::plan(plan, shape, experts, inner)),
            adapters: ExpertAdapterScratch::plan(plan, shape, experts),
        }
    }

    /// The transients for the first `rows` tokens, which have `pairs` experts.
    pub(crate) fn first(self, rows: usize, pairs: usize) -> Self {
        Self {
            sorted: self.sorted.rows(0..pairs),
            d_act: self.d_act.rows(0..pairs),
            d_weights: self.d_weights.rows(0..rows),
            d_logits: self.d_logits.map(|d_logits| d_logits.rows(0..rows)),
            sort: self.sort,
            act: self.act.map(|act| act.rows(0..pairs)),
            shared: self.shared.map(|shared| shared.first(rows)),
            adapters: self.adapters,
        }
    }
}
