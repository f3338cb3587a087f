//! Gated delta net (arXiv 2412.06464), a linear attention with the heads split over the ranks: a
//! column-parallel projection, a causal convolution of its queries, keys and values, the gated delta
//! rule over this rank's heads, a norm of each head with a gate, a row-parallel projection back.
//!
//! Letters: K heads of queries and keys of d elements, and H heads of values of e elements, all of
//! this rank; n weights of a channel of the convolution; U = 2 K d + H e channels.

use crate::adapter::{self, AdaptedWeight, Adapter, Outputs};
use crate::branch::{Branch, Scratch};
use crate::delta_scratch::{DeltaOutputs, DeltaPass, DeltaScratch};
use crate::delta_shape::DeltaShape;
use crate::linear::{Linear, LinearGrads};
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split};
use crate::region::sum_over_ranks;
use crate::shape::DecoderShape;
use device::{
    Arena, DeltaHeads, Device, Dropout, Dtype, Epilogue, Lane::Compute, Op, Plan, Reduction, Tensor,
};
use std::ops::Range;

/// Parameters of a gated delta net, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaNet {
    qkv: Tensor,         // (U, C): rows of queries, keys and values
    output_gate: Tensor, // (H e, C)
    gates: Tensor,       // (2 H, C): rows of the step sizes, then of the decays
    convolution: Tensor, // (U, n)
    decay: Tensor,       // (H): logarithms of the rates of decay
    bias: Tensor,        // (H), added to the decays before their softplus
    gain: Tensor,        // (e), of the norm of all heads
    proj: Tensor,        // (C, H e)
    /// Of all projections of the input.
    input_adapter: Option<Adapter>,
    proj_adapter: Option<Adapter>,
}

/// Activations of the forward pass, for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaActivations {
    input: Tensor,         // (B T, U): queries, keys and values before the convolution
    output_gate: Tensor,   // (B T, H e)
    raw_gates: Tensor,     // (B T, 2 H)
    gates: Tensor,         // (B T, 2 H) F32
    states: Tensor,        // (B places, H d e) F32: states at the starts of chunks
    out: Tensor,           // (B T, H e): outputs of the rule
    outputs: DeltaOutputs, // may be those of all blocks
    recomputes: bool,      // whether `outputs` are those of all blocks
}

/// Settings of a gated delta net for one pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaContext {
    pub(crate) heads: DeltaHeads,
    /// (B T), the document start of every row, if samples hold several documents.
    pub(crate) starts: Option<Tensor>,
    /// Number that the norm adds to the mean square.
    pub(crate) epsilon: f32,
}

impl DeltaContext {
    pub(crate) fn of(shape: &DecoderShape, delta: &DeltaShape, starts: Option<Tensor>) -> Self {
        let heads = delta.heads(shape.tp_size, shape.seq_len);
        Self { heads, starts, epsilon: shape.architecture.norm_epsilon as f32 }
    }

    /// The same for samples of `tokens` tokens.
    pub(crate) const fn of_tokens(self, tokens: usize) -> Self {
        Self { heads: DeltaHeads { seq_len: tokens, ..self.heads }, ..self }
    }
}

impl DeltaActivations {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        delta: &DeltaShape,
        scratch: &Scratch,
    ) -> Self {
        let (at, tokens) = ((Arena::Device, "activations"), shape.tokens());
        let heads = delta.heads(shape.tp_size, shape.seq_len);
        let shared = scratch.delta().outputs;
        let mut one =
            |what: &str, dtype, size| plan.tensor(at, format!("{name}.delta_{what}"), dtype, size);
        let (inner, dtype) = (heads.values * heads.value_dim, shape.dtype);
        let places = shape.micro_batch * heads.places();
        Self {
            input: one("qkv", dtype, (tokens, heads.columns())),
            output_gate: one("output_gate", dtype, (tokens, inner)),
            raw_gates: one("raw_gates", dtype, (tokens, 2 * heads.values)),
            gates: one("gates", Dtype::F32, (tokens, 2 * heads.values)),
            states: one("states", Dtype::F32, (places, heads.state_len())),
            out: one("out", dtype, (tokens, inner)),
            outputs: shared.unwrap_or_else(|| {
                let mut one = |what: &str, width| one(what, dtype, (tokens, width));
                DeltaOutputs::plan(heads, &mut one)
            }),
            recomputes: shared.is_some(),
        }
    }

    /// The tensors that belong to the block alone.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        let Self { input, output_gate, raw_gates, gates, states, out, outputs, recomputes } = self;
        let mut all = vec![input, output_gate, raw_gates, gates, states, out];
        if !recomputes {
            all.extend([outputs.qkv, outputs.normed]);
        }
        all
    }

    /// Queries, keys and values of some rows before the convolution, and their gates.
    pub(crate) fn inputs(&self, rows: Range<usize>) -> [Tensor; 2] {
        [self.input, self.raw_gates].map(|of| of.rows(rows.clone()))
    }

    /// Outputs of the rule for some rows.
    pub(crate) fn out(&self, rows: Range<usize>) -> Tensor {
        self.out.rows(rows)
    }

    /// Number of tokens.
    pub(crate) const fn tokens(&self) -> usize {
        self.out.shape().0
    }

    /// The activations of the first `rows` rows. The states are whole.
    pub(crate) fn first(self, rows: usize) -> Self {
        let first = |t: Tensor| t.rows(0..rows);
        Self {
            input: first(self.input),
            output_gate: first(self.output_gate),
            raw_gates: first(self.raw_gates),
            gates: first(self.gates),
            out: first(self.out),
            outputs: self.outputs.rows(rows),
            ..self
        }
    }
}

/// Names of queries, keys and values, which are one tensor in transformers.
const QKV: [&str; 3] = ["delta.q", "delta.k", "delta.v"];
/// Names of their convolutions, which are one tensor in transformers.
const CONVOLUTIONS: [&str; 3] = ["delta.conv_q", "delta.conv_k", "delta.conv_v"];
/// Names of the projections to step sizes and to decays.
const GATES: [&str; 2] = ["delta.b", "delta.a"];
const OUTPUT_GATE: &str = "delta.z";
const NORM: &str = "delta.norm";
const PROJ: &str = "delta.proj";
/// The weights with the input of the net, and the outputs to which their adapters add.
const ADAPTED: [AdaptedWeight; 6] = {
    let [q, k, v] = QKV;
    let [steps, decays] = GATES;
    [
        AdaptedWeight::alone(q),
        AdaptedWeight::alone(k).with_factor(q),
        AdaptedWeight::alone(v).with_factor(q),
        AdaptedWeight::alone(OUTPUT_GATE).with_output(1),
        AdaptedWeight::alone(steps).with_output(2),
        AdaptedWeight::alone(decays).with_output(2),
    ]
};

impl DeltaNet {
    /// Declares all parameters except the projection back. A rank's rows of queries, keys and
    /// values are adjacent, so that one matmul computes all three.
    pub(crate) fn declare_heads(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        delta: &DeltaShape,
    ) {
        let (c, heads, init) = (shape.hidden, delta.value_heads, shape.weight_init());
        let (keys, values) = (delta.keys_width(), delta.values_width());
        let widths = [keys, keys, values];
        let mut matrix = |name: &str, rows: usize, columns: usize| {
            params.add(&format!("{name}.weight"), (rows, columns), Split::Rows, init);
        };
        QKV.into_iter().zip(widths).for_each(|(name, rows)| matrix(name, rows, c));
        matrix(OUTPUT_GATE, values, c);
        GATES.into_iter().for_each(|name| matrix(name, heads, c));
        CONVOLUTIONS.into_iter().zip(widths).for_each(|(name, rows)| {
            matrix(name, rows, delta.taps);
        });
        let rates = Init::LogUniform { low: 0.01, high: 16.0 };
        params.add_vector("delta.a_log", heads, Split::Rows, rates);
        params.add_vector("delta.dt_bias", heads, Split::Rows, Init::Constant(1.0));
        let (name, elements) = (format!("{NORM}.weight"), delta.value_dim);
        params.add_vector(&name, elements, Split::Replicated, Init::Constant(1.0));
        let rows = [keys, keys, values, values, heads, heads];
        let weights = ADAPTED.into_iter().zip(rows);
        let weights: Vec<_> = weights.map(|(weight, rows)| (weight, rows, Split::Rows)).collect();
        adapter::declare(params, shape, &weights, c);
    }

    /// Declares the parameters of the projection back from the heads.
    pub(crate) fn declare_proj(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        delta: &DeltaShape,
    ) {
        let size @ (rows, columns) = (shape.hidden, delta.values_width());
        params.add(&format!("{PROJ}.weight"), size, Split::Columns, shape.residual_init());
        let proj = AdaptedWeight::alone(PROJ);
        adapter::declare(params, shape, &[(proj, rows, Split::Columns)], columns);
    }

    /// The parameters in a pass that drops the inputs of adapters: that of the net, then that of the
    /// projection back.
    pub(crate) fn with_dropout(self, [input, proj]: [Dropout; 2]) -> Self {
        Self {
            input_adapter: self.input_adapter.map(|adapter| adapter.with_dropout(input)),
            proj_adapter: self.proj_adapter.map(|adapter| adapter.with_dropout(proj)),
            ..self
        }
    }

    pub(crate) fn cut(flat: FlatBuffer<'_>, shape: &DecoderShape, scratch: &Scratch) -> Self {
        let adapter = |weights: &[_]| Adapter::cut(flat, shape, weights, scratch.adapters);
        Self {
            input_adapter: adapter(&ADAPTED),
            proj_adapter: adapter(&[AdaptedWeight::alone(PROJ)]),
            qkv: flat.joined(&QKV, "weight"),
            output_gate: flat.get(OUTPUT_GATE, "weight"),
            gates: flat.joined(&GATES, "weight"),
            convolution: flat.joined(&CONVOLUTIONS, "weight"),
            decay: flat.get("delta", "a_log"),
            bias: flat.get("delta", "dt_bias"),
            gain: flat.get(NORM, "weight"),
            proj: flat.get(PROJ, "weight"),
        }
    }

    /// Sums the gradient of the norm's gain over the ranks, since each rank has the gradient of its
    /// own heads. With sequence parallelism the sum of all replicated gradients includes it.
    pub(crate) fn sum_gains(flat: FlatBuffer<'_>, dev: &Device, shape: &DecoderShape) {
        if let Some(gain) = flat.get_trained(NORM, "weight").filter(|_| !shape.sequence) {
            sum_over_ranks(dev, gain, Reduction::Sum);
        }
    }

    /// Computes normed (B T, C) -> the normed and gated outputs of this rank's heads, in `saved`.
    pub(crate) fn heads_forward(
        &self,
        dev: &Device,
        normed: Tensor,
        saved: DeltaActivations,
        pass: DeltaContext,
    ) {
        let DeltaActivations { input, raw_gates, gates, states, out, outputs, .. } = saved;
        self.project(dev, normed, saved);
        let pass_outputs = DeltaPass { qkv: outputs.qkv, gates, out, states };
        self.convolve(dev, input, outputs.qkv, pass);
        self.rule(dev, raw_gates, pass_outputs, None, pass);
        self.norm(dev, saved, pass.epsilon);
    }

    /// Computes the queries, keys and values of `results`, and gates before their functions -> outputs
    /// of the rule. `initial` has the states before the samples; without it they are 0.
    pub(crate) fn rule(
        &self,
        dev: &Device,
        raw_gates: Tensor,
        DeltaPass { qkv, gates, out, states }: DeltaPass,
        initial: Option<Tensor>,
        pass: DeltaContext,
    ) {
        let (DeltaContext { heads, starts, .. }, Self { decay, bias, .. }) = (pass, *self);
        dev.submit(Compute, Op::DeltaGates { x: raw_gates, decay, bias, gates });
        dev.submit(Compute, Op::DeltaRule { qkv, gates, out, states, initial, heads, starts });
    }

    /// Computes the projections of normed (rows, C).
    pub(crate) fn project(&self, dev: &Device, normed: Tensor, saved: DeltaActivations) {
        dev.submit(Compute, Op::product(normed, self.qkv.t(), saved.input));
        dev.submit(Compute, Op::product(normed, self.output_gate.t(), saved.output_gate));
        dev.submit(Compute, Op::product(normed, self.gates.t(), saved.raw_gates));
        if let Some(adapter) = self.input_adapter {
            let outputs = [saved.input, saved.output_gate, saved.raw_gates].map(Some);
            adapter.forward(dev, normed, outputs);
        }
    }

    const fn proj(&self) -> Linear {
        Linear { weight: self.proj, adapter: self.proj_adapter, fp8: None }
    }

    /// Computes queries, keys and values x (B T, U) -> y (B T, U) after the convolution.
    pub(crate) fn convolve(&self, dev: &Device, x: Tensor, y: Tensor, pass: DeltaContext) {
        let (seq_len, starts, weight) = (pass.heads.seq_len, pass.starts, self.convolution);
        dev.submit(Compute, Op::Convolution { x, weight, y, seq_len, starts });
    }

    /// Computes the norm of the rule's outputs, times their gate.
    pub(crate) fn norm(&self, dev: &Device, saved: DeltaActivations, epsilon: f32) {
        let (x, gate, y, gain) = (saved.out, saved.output_gate, saved.outputs.normed, self.gain);
        dev.submit(Compute, Op::GatedNorm { x, gate, gain, y, epsilon });
    }

    /// Computes the row-parallel projection: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, saved: DeltaActivations, partial: Tensor) {
        self.proj().forward(dev, saved.outputs.normed, partial, Epilogue::None, None);
    }

    /// Computes `branch.d_normed` (B T, C) from `branch.d_sum` (B T, C), the gradient of the summed
    /// projection. The sum of `branch.d_normed` over the ranks runs during the weight gradients;
    /// Compute waits for it at the end.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        saved: DeltaActivations,
        pass: DeltaContext,
        branch: Branch,
        grads: Self,
    ) {
        let (scratch, d_sum, d_normed) = (branch.scratch.delta(), branch.d_sum, branch.d_normed);
        let DeltaActivations { input, output_gate, raw_gates, gates, states, out, .. } = saved;
        let DeltaContext { heads, starts, epsilon } = pass;
        let DeltaScratch { d_out, d_output_gate, d_qkv, d_input, d_gates, d_raw_gates, .. } =
            scratch;
        if saved.recomputes {
            self.convolve(dev, input, saved.outputs.qkv, pass);
            self.norm(dev, saved, epsilon);
        }
        let DeltaOutputs { qkv, normed } = saved.outputs;
        let weight_gradient = |d: Tensor, x: Tensor, d_weight: Tensor| {
            if !d_weight.is_empty() {
                dev.submit(Compute, Op::product(d.t(), x, d_weight));
            }
        };
        // Nobody reads the gradients of frozen parameters, which other gradients come with.
        let gradient = |d: Tensor, of: Tensor, number| {
            let (rows, columns) = of.shape();
            branch.scratch.gradient(d, of.len(), number).reshape(rows, columns)
        };
        let proj = self.proj();
        proj.input_gradient(dev, d_sum, scratch.d_normed, Epilogue::None);
        let (weight, adapter) = (grads.proj, grads.proj_adapter);
        proj.weight_gradient(dev, d_sum, normed, LinearGrads { weight, bias: None, adapter });
        dev.submit(
            Compute,
            Op::GatedNormBackward {
                x: out,
                gate: output_gate,
                gain: self.gain,
                d_y: scratch.d_normed,
                d_x: d_out,
                d_gate: d_output_gate,
                d_gain: gradient(grads.gain, self.gain, 0),
                epsilon,
            },
        );
        dev.submit(
            Compute,
            Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts },
        );
        dev.submit(
            Compute,
            Op::DeltaGatesBackward {
                x: raw_gates,
                decay: self.decay,
                bias: self.bias,
                d_gates,
                d_x: d_raw_gates,
                d_decay: gradient(grads.decay, self.decay, 0),
                d_bias: gradient(grads.bias, self.bias, 1),
            },
        );
        dev.submit(
            Compute,
            Op::ConvolutionBackward {
                x: input,
                weight: self.convolution,
                d_y: d_qkv,
                d_x: d_input,
                d_weight: gradient(grads.convolution, self.convolution, 0),
                seq_len: heads.seq_len,
                starts,
            },
        );
        dev.submit(Compute, Op::product(d_input, self.qkv, d_normed));
        dev.submit(Compute, Op::add_product(d_output_gate, self.output_gate, d_normed));
        dev.submit(Compute, Op::add_product(d_raw_gates, self.gates, d_normed));
        let d_outputs: Outputs = [d_input, d_output_gate, d_raw_gates].map(Some);
        if let Some(adapter) = self.input_adapter {
            adapter.input_gradient(dev, d_outputs, d_normed);
        }
        let summed = branch.region.start_sum(dev, d_normed);
        dev.wait(Compute, branch.whole);
        if let Some((adapter, grads)) = self.input_adapter.zip(grads.input_adapter) {
            adapter.weight_gradient(dev, d_outputs, branch.normed, grads);
        }
        weight_gradient(d_input, branch.normed, grads.qkv);
        weight_gradient(d_output_gate, branch.normed, grads.output_gate);
        weight_gradient(d_raw_gates, branch.normed, grads.gates);
        dev.wait(Compute, summed);
    }
}
