//! The gate of a shared expert: a linear with one row, whose sigmoid multiplies the shared expert's
//! output for each token (Qwen3-Next, Qwen3.5). A router by sigmoid has the same ops; here it
//! chooses among one expert: the expert's weight is the gate, and the tokens keep their order.
//!
//! The weight is replicated. It reads gathered tokens, so all ranks have the same gates. The gate
//! multiplies the input of the projection back, which is the same as its output, but narrower. Letter:
//! S is the inner width of the shared expert.

use crate::params::{ParamDeclarations, Split};
use crate::region::Region;
use crate::shape::{DecoderShape, ExpertsShape};
use device::{Arena, Device, Dtype, Epilogue, Event, Group, Lane::Compute, Lane::TpComm, Op, Plan};
use device::{Reduction, ScoreRule, SigmoidRule, Tensor, expert_sort_scratch};

/// Name of the gate's weight.
pub(crate) const SHARED_GATE: &str = "moe.shared.output_gate";

/// Declares the weight (1, C), if the shared expert has a gate. It must stand directly after the
/// router's: the elements that a rank does not count are then one run.
pub(crate) fn declare(params: &mut ParamDeclarations, shape: &DecoderShape, of: &ExpertsShape) {
    if of.shared_gate {
        let (name, size) = (format!("{SHARED_GATE}.weight"), (1, shape.hidden));
        params.add(&name, size, Split::Replicated, shape.weight_init());
    }
}

/// Activations of the gate, for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedGateActivations {
    logits: Tensor, // (B T, 1) F32; the backward pass replaces them by their gradient
    gates: Tensor,  // (B T, 1) F32
}

/// Transients of the gate; all layers share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedGateScratch {
    gated: Tensor,            // (B T, S/t): the activation times the gate
    d_gates: Tensor,          // (B T, 1) F32
    d_logits: Option<Tensor>, // (B T, 1), if the model's type is not F32
    correction: Tensor,       // (1, 1) F32: zero
    choices: Tensor,          // (B T, 1) I32: zeros, since there is one expert
    offsets: Tensor,          // (1, 2) I32: 0 and B T
    order: Tensor,            // (1, B T) I32: the numbers of the rows
    places: Tensor,           // (B T, 1) I32: the same
    sort: Tensor,             // (1, n) I32: histograms of the sort
}

/// The gate in a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedSharedGate {
    pub(crate) weight: Tensor, // (1, C)
    pub(crate) saved: SharedGateActivations,
    pub(crate) scratch: SharedGateScratch,
}

impl SharedGateActivations {
    pub(crate) fn plan(plan: &mut Plan, name: &str, shape: &DecoderShape) -> Self {
        let mut one = |what: &str| {
            let (at, name) = ((Arena::Device, "activations"), format!("{name}.moe.shared.{what}"));
            plan.tensor(at, name, Dtype::F32, (shape.tokens(), 1))
        };
        Self { logits: one("gate_logits"), gates: one("gates") }
    }

    pub(crate) const fn tensors(self) -> [Tensor; 2] {
        [self.logits, self.gates]
    }

    /// The activations of the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        Self { logits: self.logits.rows(0..rows), gates: self.gates.rows(0..rows) }
    }
}

impl SharedGateScratch {
    /// Plans the transients of the gate of an MLP with `own` inner channels on this rank.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, own: usize) -> Self {
        let tokens = shape.tokens();
        let mut one = |name: &str, dtype, size| {
            let name = format!("moe.shared.{name}");
            plan.tensor((Arena::Device, "transients"), name, dtype, size)
        };
        Self {
            gated: one("gated", shape.dtype, (tokens, own)),
            d_gates: one("d_gates", Dtype::F32, (tokens, 1)),
            d_logits: (shape.dtype != Dtype::F32)
                .then(|| one("d_gate_logits", shape.dtype, (tokens, 1))),
            correction: one("correction", Dtype::F32, (1, 1)),
            choices: one("choices", Dtype::I32, (tokens, 1)),
            offsets: one("offsets", Dtype::I32, (1, 2)),
            order: one("order", Dtype::I32, (1, tokens)),
            places: one("places", Dtype::I32, (tokens, 1)),
            sort: one("sort", Dtype::I32, (1, expert_sort_scratch(tokens, 1))),
        }
    }

    /// The transients for the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        let first = |t: Tensor| t.rows(0..rows);
        Self {
            gated: first(self.gated),
            d_gates: first(self.d_gates),
            d_logits: self.d_logits.map(first),
            choices: first(self.choices),
            order: self.order.slice(0..rows),
            places: first(self.places),
            sort: self.sort.slice(0..expert_sort_scratch(rows, 1)),
            ..self
        }
    }

    /// The only rule of scores by which a weight is one sigmoid.
    const fn scoring(self) -> ScoreRule {
        let (groups, kept_groups, normalize, scale) = (1, 1, false, 1.0);
        let correction = self.correction;
        ScoreRule::Sigmoid(SigmoidRule { correction, groups, kept_groups, normalize, scale })
    }
}

impl AppliedSharedGate {
    /// Computes the gates of normed (B T, C).
    pub(crate) fn forward(self, dev: &Device, normed: Tensor) {
        let (SharedGateActivations { logits, gates: weights }, scratch) =
            (self.saved, self.scratch);
        let SharedGateScratch { correction, choices, offsets, order, places, .. } = scratch;
        let (a, b, c, epilogue) = (normed, self.weight.t(), logits, Epilogue::None);
        dev.submit(Compute, Op::Gemm { a, b, c, bias: None, add: false, epilogue });
        dev.submit(Compute, Op::Zero { x: correction });
        dev.submit(Compute, Op::Route { logits, weights, choices, scoring: scratch.scoring() });
        let scratch = scratch.sort;
        dev.submit(Compute, Op::SortByExpert { choices, offsets, order, places, scratch });
    }

    /// Computes [`applied`](Self::applied): the rows of `act` (B T, S/t) times their gates.
    pub(crate) fn apply(self, dev: &Device, act: Tensor) {
        let (places, weights, out) = (self.scratch.places, Some(self.saved.gates), self.applied());
        dev.submit(Compute, Op::CombineExperts { y: act, places, weights, out });
    }

    /// (B T, S/t): the gated activation, a transient.
    pub(crate) const fn applied(self) -> Tensor {
        self.scratch.gated
    }

    /// Replaces `act` (B T, S/t) by its gradient, from the gradient `d` (B T, S/t) of the result of
    /// [`apply`](Self::apply). Starts the sum of the gradients of the gates over the ranks, which hold
    /// parts of the channels. Compute must wait for the returned event.
    #[track_caller]
    pub(crate) fn backward(self, dev: &Device, act: Tensor, d: Tensor) -> Event {
        let SharedGateScratch { places, d_gates: d_weights, .. } = self.scratch;
        let (weights, d_out, y, d_y) = (self.saved.gates, d, act, act);
        dev.submit(
            Compute,
            Op::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights },
        );
        if dev.rank().tp_size == 1 {
            return Event::default();
        }
        let (x, reduce) = (d_weights.reshape(1, d_weights.len()), Reduction::Sum);
        dev.follow(TpComm, Compute);
        dev.submit(TpComm, Op::AllReduce { x, group: Group::Tp, reduce });
        dev.record(TpComm)
    }

    /// Replaces the logits by their gradient, after the sum of [`backward`](Self::backward), and adds
    /// their part of the gradient of the input to `d_normed` (B T, C) on the first rank, since the
    /// ranks' gradients are summed.
    pub(crate) fn add_input_gradient(self, dev: &Device, d_normed: Tensor) {
        let (SharedGateActivations { logits, .. }, scratch) = (self.saved, self.scratch);
        let SharedGateScratch { choices, d_gates: d_weights, .. } = scratch;
        let (scoring, balance) = (scratch.scoring(), None);
        dev.submit(Compute, Op::RouteBackward { logits, choices, d_weights, scoring, balance });
        if let Some(y) = scratch.d_logits {
            dev.submit(Compute, Op::Cast { x: logits, y });
        }
        if dev.rank().tp == 0 {
            let (a, b, c, epilogue) = (self.d_logits(), self.weight, d_normed, Epilogue::None);
            dev.submit(Compute, Op::Gemm { a, b, c, bias: None, add: true, epilogue });
        }
    }

    /// (B T, 1): the gradient of the logits in the type of the model.
    fn d_logits(self) -> Tensor {
        self.scratch.d_logits.unwrap_or(self.saved.logits)
    }

    /// Computes the gradient `d_weight` (1, C) from the complete input `normed` (B T, C). With sequence
    /// parallelism it is the part of this rank's tokens.
    pub(crate) fn weight_gradient(
        self,
        dev: &Device,
        region: Region,
        normed: Tensor,
        d_weight: Tensor,
    ) {
        let [d_logits, normed] = [self.d_logits(), normed].map(|t| region.rows(dev, t));
        dev.submit(Compute, Op::product(d_logits.t(), normed, d_weight));
    }
}
