//! Mixture of experts: a router chooses k of E gated MLPs for each token (arXiv 1701.06538). No
//! token is dropped, so a micro-batch always has R = B T k pairs of a token and an expert.
//!
//! Every rank holds a part of every expert, cut as the MLP is cut. The router is replicated and
//! works on the gathered tokens, so all ranks choose alike. Its choices are kept for the backward
//! pass: no recomputation routes again.

use crate::activation_checkpoints::slot_prefix;
use crate::branch::{Branch, Scratch};
use crate::expert_adapters::{self, ExpertAdapter};
use crate::expert_biases::ExpertBiases;
use crate::expert_loads::{ExpertLoads, LayerBalance, LayerLoads};
use crate::experts_scratch::ExpertsScratch;
use crate::experts_shape::EXPERTS;
use crate::params::{FlatBuffer, ParamDeclarations, Split};
use crate::router_correction::{self, CORRECTION, RouterCorrections};
use crate::shape::{DecoderShape, ExpertsShape, SigmoidShape};
use crate::shared_expert::{AppliedSharedExpert, SharedActivations, SharedExpert};
use crate::shared_gate::{self, SHARED_GATE};
use device::expert_sort_scratch;
use device::{Arena, BalanceGradient, Device, Dtype, Epilogue, Event, ExpertWeights, Gate, Group};
use device::{Lane::Compute, Lane::TpComm, Op, Plan, Reduction, ScoreRule, SigmoidRule, Tensor};

/// Parameters of a layer's experts, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    router: Tensor,         // (E, C)
    gate_up: ExpertWeights, // E times (2I/t, C): gate, then up
    proj: ExpertWeights,    // E times (C, I/t)
    /// One row: the replicated matrices of the router and of the shared expert's gate.
    pub(crate) replicated: Tensor,
    /// (1, E): numbers for the choice, if the router scores by sigmoid; or zeros in their place among
    /// the gradients.
    correction: Option<Tensor>,
    shared: Option<SharedExpert>,
    gate_up_adapter: Option<ExpertAdapter>,
    proj_adapter: Option<ExpertAdapter>,
    biases: Option<ExpertBiases>,
}

/// The choices of a layer's router for a micro-batch. They stay until the layer's backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routes {
    logits: Tensor,  // (B T, E) F32; the backward pass replaces them by their gradient
    weights: Tensor, // (B T, k) F32
    choices: Tensor, // (B T, k) I32
    offsets: Tensor, // (1, E + 1) I32: first row of each expert
    order: Tensor,   // (1, R) I32: pair of each row
    places: Tensor,  // (B T, k) I32: row of each pair
}

/// Activations of the experts, for the backward pass. Rows are sorted by expert.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertsActivations {
    pre: Tensor, // (R, 2I/t): gate, then up
    act: Tensor, // (R, I/t)
    y: Tensor,   // (R, C): this rank's part of the experts' outputs
    shared: Option<SharedActivations>,
}

/// The tensors of a layer's router that differ by slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterSlot {
    pub(crate) routes: Routes,
    pub(crate) loads: LayerLoads,
    /// (1, E) F32: the correction of the scores, the same in all slots.
    pub(crate) correction: Option<Tensor>,
}

impl RouterSlot {
    /// Plans the tensors of the router of layer `layer`, by slot. Empty if the layer has no experts.
    pub(crate) fn of_layer(
        plan: &mut Plan,
        shape: &DecoderShape,
        loads: Option<&ExpertLoads>,
        corrections: Option<RouterCorrections>,
        layer: usize,
    ) -> Vec<Self> {
        let (Some(experts), Some(loads)) = (shape.experts_of(layer), loads) else {
            return Vec::new();
        };
        let index = (0..layer).filter(|other| shape.kind(*other).experts).count();
        let of_slot = |slot: usize| {
            let name = format!("{}block.{layer}", slot_prefix(slot));
            let routes = Routes::plan(plan, &name, shape, &experts);
            let correction = corrections.map(|all| all.of_layer(index));
            Self { routes, loads: loads.of_layer(slot, index), correction }
        };
        (0..shape.checkpoint_slots).map(of_slot).collect()
    }
}

/// The experts of a layer in a pass, with their activations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedExperts {
    pub(crate) experts: Experts,
    pub(crate) shape: ExpertsShape,
    pub(crate) gate: Gate,
    pub(crate) routes: Routes,
    pub(crate) loads: LayerLoads,
    /// (1, E) F32: the correction of the scores, if the router scores by sigmoid.
    pub(crate) correction: Option<Tensor>,
    pub(crate) saved: ExpertsActivations,
    pub(crate) scratch: ExpertsScratch,
}

/// Name of the router's weight.
const ROUTER: &str = "moe.router";

impl Experts {
    /// Declares the experts' matrices with the prefix `moe.experts.`. A rank's rows of an expert's
    /// gate and up are adjacent, so that one matmul computes both.
    pub(crate) fn declare(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        experts: &ExpertsShape,
    ) {
        let (c, i) = (shape.hidden, experts.ffn_hidden);
        for expert in 0..experts.count {
            for part in ["gate", "up"] {
                let name = format!("{EXPERTS}{expert}.{part}.weight");
                params.add(&name, (i, c), Split::Rows, shape.weight_init());
            }
        }
        for expert in 0..experts.count {
            let name = format!("{EXPERTS}{expert}.proj.weight");
            params.add(&name, (c, i), Split::Columns, shape.residual_init());
        }
        expert_adapters::declare(params, shape, experts);
        SharedExpert::declare(params, shape, experts);
        router_correction::declare(params, experts);
        ExpertBiases::declare(params, shape, experts);
    }

    /// Declares the router's weight (E, C), and that of the gate of the shared expert. They must stand
    /// directly after the weights of keys and values: the elements that a rank does not count are then
    /// one run.
    pub(crate) fn declare_router(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        experts: &ExpertsShape,
    ) {
        let size = (experts.count, shape.hidden);
        params.add(&format!("{ROUTER}.weight"), size, Split::Replicated, shape.weight_init());
        shared_gate::declare(params, shape, experts);
    }

    pub(crate) fn cut(
        flat: FlatBuffer<'_>,
        shape: &DecoderShape,
        experts: &ExpertsShape,
        scratch: &Scratch,
    ) -> Self {
        let of_adapters = scratch.experts().adapters;
        let [gate_up_adapter, proj_adapter] = ExpertAdapter::cut(flat, shape, experts, of_adapters);
        let (c, inner) = (shape.hidden, experts.ffn_hidden / shape.tp_size);
        let router = flat.get(ROUTER, "weight");
        let replicated = match experts.shared_gate {
            true => flat.joined(&[ROUTER, SHARED_GATE], "weight"),
            false => router,
        };
        Self {
            router,
            replicated: replicated.reshape(1, replicated.len()),
            gate_up: flat.of_experts(&["gate.weight", "up.weight"], (2 * inner, c), experts.count),
            proj: flat.of_experts(&["proj.weight"], (c, inner), experts.count),
            correction: experts.sigmoid.map(|_| flat.whole(CORRECTION)),
            shared: SharedExpert::cut(flat, experts),
            gate_up_adapter,
            proj_adapter,
            biases: ExpertBiases::cut(flat, shape, experts),
        }
    }
}

impl Routes {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        experts: &ExpertsShape,
    ) -> Self {
        let (tokens, k) = (shape.tokens(), experts.per_token);
        let mut one = |what: &str, dtype, size| {
            plan.tensor((Arena::Device, "routes"), format!("{name}.moe.{what}"), dtype, size)
        };
        Self {
            logits: one("logits", Dtype::F32, (tokens, experts.count)),
            weights: one("weights", Dtype::F32, (tokens, k)),
            choices: one("choices", Dtype::I32, (tokens, k)),
            offsets: one("offsets", Dtype::I32, (1, experts.count + 1)),
            order: one("order", Dtype::I32, (1, tokens * k)),
            places: one("places", Dtype::I32, (tokens, k)),
        }
    }

    /// The choices for the first `rows` tokens.
    fn first(self, rows: usize) -> Self {
        let (_, k) = self.choices.shape();
        Self {
            logits: self.logits.rows(0..rows),
            weights: self.weights.rows(0..rows),
            choices: self.choices.rows(0..rows),
            offsets: self.offsets,
            order: self.order.slice(0..rows * k),
            places: self.places.rows(0..rows),
        }
    }
}

impl ExpertsActivations {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        experts: &ExpertsShape,
        scratch: &Scratch,
    ) -> Self {
        let (pairs, inner) = (shape.pairs(experts), experts.ffn_hidden / shape.tp_size);
        let mut own = |what: &str, width| {
            let name = format!("{name}.moe.{what}");
            plan.tensor((Arena::Device, "activations"), name, shape.dtype, (pairs, width))
        };
        Self {
            pre: own("gate_up", 2 * inner),
            act: match scratch.experts().act {
                Some(recomputed) => recomputed,
                None => own(shape.activation(), inner),
            },
            y: own("outputs", shape.hidden),
            shared: experts
                .shared_hidden
                .zip(scratch.experts().shared)
                .map(|(inner, scratch)| SharedActivations::plan(plan, name, shape, inner, scratch)),
        }
    }

    /// All tensors but the output of the activation.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        let of_shared = self.shared.into_iter().flat_map(SharedActivations::tensors);
        [self.pre, self.y].into_iter().chain(of_shared).collect()
    }

    /// The rows of the first `rows` tokens, which have `pairs` experts.
    fn first(self, rows: usize, pairs: usize) -> Self {
        let first = |t: Tensor| t.rows(0..pairs);
        let shared = self.shared.map(|shared| shared.first(rows));
        Self { pre: first(self.pre), act: first(self.act), y: first(self.y), shared }
    }
}

impl AppliedExperts {
    /// Number of tokens.
    pub(crate) const fn tokens(&self) -> usize {
        self.routes.choices.shape().0
    }

    /// The same for the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        let pairs = rows * self.shape.per_token;
        Self {
            routes: self.routes.first(rows),
            saved: self.saved.first(rows, pairs),
            scratch: self.scratch.first(rows, pairs),
            ..self
        }
    }

    /// Chooses the experts of the tokens normed (B T, C), and sorts the pairs by expert.
    pub(crate) fn route(&self, dev: &Device, normed: Tensor) {
        let Routes { logits, weights, choices, offsets, order, places } = self.routes;
        let (count, scoring) = (self.shape.count, self.scoring());
        let scratch = self.scratch.sort.slice(0..expert_sort_scratch(order.len(), count));
        let (a, b, bias) = (normed, self.experts.router.t(), self.experts.biases);
        let (c, bias, epilogue) = (logits, bias.map(|biases| biases.router), Epilogue::None);
        dev.submit(Compute, Op::Gemm { a, b, c, bias, add: false, epilogue });
        dev.submit(Compute, Op::Route { logits, weights, choices, scoring });
        dev.submit(Compute, Op::SortByExpert { choices, offsets, order, places, scratch });
    }

    /// How the router scores the experts.
    fn scoring(&self) -> ScoreRule {
        let normalize = self.shape.normalize;
        match (self.shape.sigmoid, self.correction) {
            (None, _) => ScoreRule::Softmax { normalize },
            (Some(SigmoidShape { groups, kept_groups, scale }), Some(correction)) => {
                let scale = scale as f32;
                ScoreRule::Sigmoid(SigmoidRule {
                    correction,
                    groups,
                    kept_groups,
                    normalize,
                    scale,
                })
            }
            (Some(_), None) => unreachable!("a router by sigmoid has a correction"),
        }
    }

    /// The shared MLP, if the layer has one.
    fn shared(&self) -> Option<AppliedSharedExpert> {
        let parts = self.experts.shared.zip(self.saved.shared).zip(self.scratch.shared);
        parts.map(|((params, saved), scratch)| AppliedSharedExpert {
            params,
            gate: self.gate,
            saved,
            scratch,
        })
    }

    /// Adds the numbers of tokens of each expert to the counts. `targets` are the
    /// targets of [`MicrobatchContext`](crate::MicrobatchContext).
    pub(crate) fn count(&self, dev: &Device, targets: Tensor) {
        let (Routes { logits, offsets, order, .. }, loads) = (self.routes, self.loads);
        let count = |load, shares| {
            let op = Op::ExpertLoad { offsets, order, targets, logits, load, shares };
            dev.submit(Compute, op);
        };
        count(loads.step, None);
        if let Some(LayerBalance { counts, shares, .. }) = loads.balance {
            count(counts, Some(shares));
        }
    }

    /// Computes this rank's part of the outputs of the chosen experts from normed (B T, C).
    pub(crate) fn inner_forward(&self, dev: &Device, normed: Tensor) {
        let (offsets, sorted) = (self.routes.offsets, self.scratch.sorted);
        let ExpertsActivations { pre, act, y, .. } = self.saved;
        let forward = |x, y, weights| {
            dev.submit(Compute, Op::grouped_forward(weights, offsets, x, y));
        };
        self.gather_rows(dev, normed);
        forward(sorted, pre, self.experts.gate_up);
        if let Some(adapter) = self.experts.gate_up_adapter {
            adapter.forward(dev, offsets, sorted, pre);
        }
        if let Some(biases) = self.experts.biases {
            biases.add_to_inner(dev, pre, offsets);
        }
        dev.submit(Compute, Op::SwiGlu { x: pre, y: act, gate: self.gate });
        forward(act, y, self.experts.proj);
        if let Some(adapter) = self.experts.proj_adapter {
            adapter.forward(dev, offsets, act, y);
        }
        if let Some(biases) = self.experts.biases {
            biases.add_to_output(dev, y, offsets);
        }
        if let Some(shared) = self.shared() {
            shared.inner_forward(dev, normed);
        }
    }

    /// Copies normed (B T, C) to the rows of the experts.
    fn gather_rows(&self, dev: &Device, normed: Tensor) {
        let (order, y) = (self.routes.order, self.scratch.sorted);
        dev.submit(Compute, Op::GatherRows { x: normed, order, y });
    }

    /// Computes `partial` (B T, C), the weighted sums of the outputs of each token's experts and the
    /// output of the shared MLP, to be summed over the ranks.
    pub(crate) fn combine(&self, dev: &Device, partial: Tensor) {
        let Routes { places, weights, .. } = self.routes;
        let (y, weights) = (self.saved.y, Some(weights));
        dev.submit(Compute, Op::CombineExperts { y, places, weights, out: partial });
        if let Some(shared) = self.shared() {
            shared.add_output(dev, partial);
        }
    }

    /// Computes `branch.d_normed` (B T, C) from `branch.d_sum` (B T, C), the gradient of the summed
    /// output. The sum of `branch.d_normed` over the ranks runs during weight gradients; Compute
    /// waits for it at the end. With sequence parallelism `grads.router` is the part of this rank's
    /// tokens. `targets` are the targets of [`MicrobatchContext`](crate::MicrobatchContext).
    pub(crate) fn backward(&self, dev: &Device, branch: Branch, targets: Tensor, grads: Experts) {
        let (Routes { weights, offsets, places, .. }, gate) = (self.routes, self.gate);
        let ExpertsActivations { pre, act, y, .. } = self.saved;
        let ExpertsScratch { sorted, d_act, d_weights, .. } = self.scratch;
        let input_gradient = |d_y, d_x, weights| {
            dev.submit(Compute, Op::grouped_input_gradient(weights, offsets, d_y, d_x));
        };
        let weight_gradient = |d_y, x, grads: ExpertWeights| {
            if grads.all.is_empty() {
                return; // they are frozen
            }
            dev.submit(Compute, Op::grouped_weight_gradient(grads, offsets, d_y, x));
        };
        if branch.recomputes {
            dev.submit(Compute, Op::SwiGlu { x: pre, y: act, gate });
        }
        let (d_out, d_y) = (branch.d_sum, y);
        dev.submit(
            Compute,
            Op::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights },
        );
        let summed_weights = self.start_sum_of_weights(dev);
        input_gradient(d_y, d_act, self.experts.proj);
        weight_gradient(d_y, act, grads.proj);
        if let Some((adapter, grads)) = self.experts.proj_adapter.zip(grads.proj_adapter) {
            adapter.input_gradient(dev, offsets, d_y, d_act);
            adapter.weight_gradient(dev, offsets, d_y, act, grads);
        }
        if let Some(biases) = grads.biases {
            biases.output_gradient(dev, d_y, offsets, branch.region.sequence);
        }
        dev.submit(Compute, Op::SwiGluBackward { x: pre, d: d_act, gate });
        // The outputs are no longer needed: their buffer takes the gradients of the inputs.
        let (d_pre, d_sorted) = (pre, y);
        if let Some(biases) = grads.biases {
            biases.inner_gradient(dev, d_pre, offsets);
        }
        input_gradient(d_pre, d_sorted, self.experts.gate_up);
        if let Some(adapter) = self.experts.gate_up_adapter {
            adapter.input_gradient(dev, offsets, d_pre, d_sorted);
        }
        let (y, weights, out) = (d_sorted, None, branch.d_normed);
        dev.submit(Compute, Op::CombineExperts { y, places, weights, out });
        dev.wait(Compute, summed_weights);
        let d_logits = self.route_backward(dev, targets);
        // The ranks' gradients of the input are summed, and all ranks have the same router.
        if dev.rank().tp == 0 {
            let (b, c, epilogue) = (self.experts.router, out, Epilogue::None);
            dev.submit(Compute, Op::Gemm { a: d_logits, b, c, bias: None, add: true, epilogue });
        }
        if let Some(shared) = self.shared() {
            if branch.recomputes {
                shared.activate(dev);
            }
            shared.add_input_gradient(dev, branch.d_sum, branch.d_normed);
        }
        let summed = branch.region.start_sum(dev, branch.d_normed);
        dev.wait(Compute, branch.whole);
        let [own_d_logits, own_normed] =
            [d_logits, branch.normed].map(|t| branch.region.rows(dev, t));
        if !grads.router.is_empty() {
            dev.submit(Compute, Op::product(own_d_logits.t(), own_normed, grads.router));
        }
        if let Some(biases) = grads.biases {
            biases.router_gradient(dev, own_d_logits);
        }
        let adapters = self.experts.gate_up_adapter.zip(grads.gate_up_adapter);
        if !grads.gate_up.all.is_empty() || adapters.is_some() {
            self.gather_rows(dev, branch.normed);
        }
        weight_gradient(d_pre, sorted, grads.gate_up);
        if let Some((adapter, grads)) = adapters {
            adapter.weight_gradient(dev, offsets, d_pre, sorted, grads);
        }
        if let Some((shared, grads)) = self.shared().zip(grads.shared) {
            let ends = [branch.d_sum, branch.normed];
            shared.weight_gradients(dev, branch.region, ends, grads);
        }
        if let Some(x) = grads.correction.filter(|x| !x.is_empty()) {
            dev.submit(Compute, Op::Zero { x });
        }
        dev.wait(Compute, summed);
    }

    /// Starts the sum of the gradients of the weights over the ranks, which hold parts of the
    /// experts' outputs. Compute must wait for the returned event.
    #[track_caller]
    fn start_sum_of_weights(&self, dev: &Device) -> Event {
        if dev.rank().tp_size == 1 {
            return Event::default();
        }
        let x = self.scratch.d_weights;
        let x = x.reshape(1, x.len());
        dev.follow(TpComm, Compute);
        dev.submit(TpComm, Op::AllReduce { x, group: Group::Tp, reduce: Reduction::Sum });
        dev.record(TpComm)
    }

    /// Replaces the logits by their gradient. Returns it in the type of the model: (B T, E).
    fn route_backward(&self, dev: &Device, targets: Tensor) -> Tensor {
        let (Routes { logits, choices, .. }, scoring) = (self.routes, self.scoring());
        let (d_weights, balance) = (self.scratch.d_weights, self.loads.balance);
        let balance = balance.map(|balance| BalanceGradient { of_experts: balance.grads, targets });
        dev.submit(Compute, Op::RouteBackward { logits, choices, d_weights, scoring, balance });
        let Some(d_logits) = self.scratch.d_logits else { return logits };
        dev.submit(Compute, Op::Cast { x: logits, y: d_logits });
        d_logits
    }
}
