//! Causal self-attention with the heads split over the ranks: a column-parallel projection to q, k
//! and v, rotary positions if the model has them, attention over this rank's heads, a row-parallel
//! projection back.

use crate::adapter::{self, AdaptedWeight, Adapter, Outputs};
use crate::attention_sinks::AttentionSinks;
use crate::branch::{Branch, Scratch};
use crate::linear::{Fp8Linear, Linear, LinearGrads};
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split};
use crate::region::{Region, sum_over_ranks};
use crate::shape::{DecoderShape, QkNorm};
use device::{
    Arena, Device, Dropout, Dtype, Epilogue, HeadNorm, HeadNormGrads, Heads, Lane::Compute,
};
use device::{Op, Plan, Reduction, Scores, Tensor, WidthNorm};
use std::ops::Range;

/// Activations of the forward pass, for the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionActivations {
    pub(crate) qkv: Tensor,        // (B T, (H + 2 K) D/t), rotated
    raw: Option<Tensor>,           // (B T, (H + K) D/t): q and k before their norm
    sums: Option<Tensor>, // (B T, 2) F32: sums of squares of q and k, if a norm joins all heads
    pub(crate) out: Tensor, // (B T, H D/t)
    gate: Option<GateActivations>, // of the output, if it has a gate
    pub(crate) lse: Tensor, // (B H/t T)
    input: Option<Fp8Linear>, // of the projection to q, k and v
    proj: Option<Fp8Linear>,
}

/// Activations of the gate of attention's output, (B T, H D/t) each.
#[derive(Clone, Copy, Debug)]
struct GateActivations {
    gate: Tensor,
    /// The output times the sigmoid of the gate. With selective recomputation all blocks share it, and
    /// the backward pass computes it again.
    gated: Tensor,
    /// Whether all blocks share `gated`.
    recomputes: bool,
}

/// Parameters of attention, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
    qkv_weight: Tensor,          // ((H + 2 K) D/t, C)
    qkv_bias: Option<Tensor>,    // ((H + 2 K) D/t)
    gate_weight: Option<Tensor>, // (H D/t, C), if the output has a gate
    gains: Option<Gains>,        // of the norm of q and k
    pub(crate) sinks: Option<AttentionSinks>,
    proj_weight: Tensor,                  // (C, H D/t)
    pub(crate) proj_bias: Option<Tensor>, // (C), added after the sum over the ranks
    /// Of q, k, v and the gate of the output.
    input_adapter: Option<Adapter>,
    proj_adapter: Option<Adapter>,
}

/// Gains of the norm of q and k, or their gradients.
#[derive(Clone, Copy, Debug)]
enum Gains {
    /// (D) each, of q's and of k's heads.
    Heads(HeadNormGrads),
    /// ((H + K) D/t): q's, then k's.
    Width(Tensor),
}

/// Settings of attention for one pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionContext {
    pub(crate) heads: Heads,
    pub(crate) dropout: Dropout,
    /// Cosines and sines, if the layer rotates queries and keys.
    pub(crate) table: Option<Tensor>,
    /// (B T), the document start of every row, if samples hold several documents.
    pub(crate) starts: Option<Tensor>,
    pub(crate) scores: Scores,
}

impl AttentionActivations {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        scratch: &Scratch,
    ) -> Self {
        let fp8 = scratch.fp8;
        let (at, tokens, dtype) = ((Arena::Device, "activations"), shape.tokens(), shape.dtype);
        let rotated = shape.heads_width() + shape.kv_per_rank() * shape.head_dim;
        let [input, proj] = ["qkv", "attention_proj"]
            .map(|linear| fp8.map(|fp8| fp8.linear(plan, &format!("{name}.{linear}"))));
        let mut one =
            |what: &str, width| plan.tensor(at, format!("{name}.{what}"), dtype, (tokens, width));
        let (qkv, out) = (one("qkv", shape.qkv_width()), one("attention", shape.heads_width()));
        let shared = scratch.recomputed.and_then(|outputs| outputs.gated);
        let gate = shape.architecture.output_gate.then(|| GateActivations {
            gate: one("attention_gate", shape.heads_width()),
            gated: shared.unwrap_or_else(|| one("gated_attention", shape.heads_width())),
            recomputes: shared.is_some(),
        });
        let norm = shape.architecture.qk_norm;
        let raw = norm.map(|_| one("raw_qk", rotated));
        let lse = (1, tokens * shape.heads / shape.tp_size);
        let lse = plan.tensor(at, format!("{name}.lse"), Dtype::F32, lse);
        let sums = norm.filter(|norm| *norm == QkNorm::Width);
        let sums =
            sums.map(|_| plan.tensor(at, format!("{name}.qk_squares"), Dtype::F32, (tokens, 2)));
        Self { qkv, raw, sums, out, gate, lse, input, proj }
    }

    /// The tensors that belong to the block alone.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        let Self { qkv, raw, sums, out, gate, lse, input, proj } = self;
        let maxima = [input, proj].into_iter().flatten().flat_map(Fp8Linear::maxima);
        let own = [Some(qkv), raw, sums, Some(out), Some(lse)];
        let gates = gate.map(|of| [Some(of.gate), (!of.recomputes).then_some(of.gated)]);
        own.into_iter().chain(gates.into_iter().flatten()).flatten().chain(maxima).collect()
    }

    /// The input of the projection back.
    fn output(&self) -> Tensor {
        self.gate.map_or(self.out, |of| of.gated)
    }

    /// The activations of `rows`, which belong to one sample, with this rank's `heads` heads.
    pub(crate) fn of(self, rows: Range<usize>, heads: usize) -> Self {
        let Self { qkv, raw, sums, out, gate, lse, .. } = self;
        Self {
            qkv: qkv.rows(rows.clone()),
            raw: raw.map(|raw| raw.rows(rows.clone())),
            sums: sums.map(|sums| sums.rows(rows.clone())),
            out: out.rows(rows.clone()),
            gate: gate.map(|of| GateActivations {
                gate: of.gate.rows(rows.clone()),
                gated: of.gated.rows(rows.clone()),
                ..of
            }),
            lse: lse.slice(rows.start * heads..rows.end * heads),
            ..self
        }
    }
}

/// Name of q, k and v as one tensor.
const JOINED_QKV: &str = "attn.qkv";
/// Name of the projection to the gate of the output.
const OUTPUT_GATE: &str = "attn.gate";
/// Name of the projection back from the heads.
const PROJ: &str = "attn.proj";
/// Names of q, k and v, if they are separate tensors.
const SEPARATE_QKV: [&str; 3] = ["attn.q", "attn.k", "attn.v"];
/// Names of the gains of the norm of q and k.
pub(crate) const GAINS: [&str; 2] = ["attn.q_norm", "attn.k_norm"];

/// The weights with the input of attention. Queries and the gate of the output are one tensor in
/// transformers.
const ADAPTED: [AdaptedWeight; 4] = {
    let [q, k, v] = SEPARATE_QKV;
    let gate = AdaptedWeight::alone(OUTPUT_GATE).with_factor(q).with_output(1);
    [AdaptedWeight::alone(q), AdaptedWeight::alone(k), AdaptedWeight::alone(v), gate]
};

/// The weights with the input of attention, with or without a gate of the output.
fn adapted(output_gate: bool) -> &'static [AdaptedWeight] {
    if output_gate { &ADAPTED } else { &ADAPTED[..SEPARATE_QKV.len()] }
}

impl Attention {
    /// Declares the parameters of the heads with the prefix `attn.`. A rank's rows of q, k and v
    /// are adjacent, so that one matmul computes all three.
    pub(crate) fn declare_heads(params: &mut ParamDeclarations, shape: &DecoderShape) {
        let (c, d, zero) = (shape.hidden, shape.head_dim, Init::Constant(0.0));
        let (q, kv, architecture) = (shape.heads * d, shape.kv_heads * d, &shape.architecture);
        let kv_split = match shape.kv_replicas() {
            1 => Split::Rows,
            ranks => Split::SharedRows { ranks },
        };
        AttentionSinks::declare(params, shape);
        // The matrices of a router follow directly after those of keys and values.
        if architecture.output_gate {
            let name = format!("{OUTPUT_GATE}.weight");
            params.add(&name, (q, c), Split::Rows, shape.weight_init());
        }
        if architecture.joined_qkv {
            params.add("attn.qkv.weight", (3 * q, c), Split::ThreeRows, shape.weight_init());
            if architecture.qkv_bias {
                params.add_vector("attn.qkv.bias", 3 * q, Split::ThreeRows, zero);
            }
            let joined = AdaptedWeight::alone(JOINED_QKV);
            adapter::declare(params, shape, &[(joined, 3 * q, Split::ThreeRows)], c);
        } else {
            let separate =
                || SEPARATE_QKV.into_iter().zip([(q, Split::Rows), (kv, kv_split), (kv, kv_split)]);
            for (name, (rows, split)) in separate() {
                params.add(&format!("{name}.weight"), (rows, c), split, shape.weight_init());
            }
            for (name, (rows, split)) in separate().filter(|_| architecture.qkv_bias) {
                params.add_vector(&format!("{name}.bias"), rows, split, zero);
            }
            let sizes = [(q, Split::Rows), (kv, kv_split), (kv, kv_split), (q, Split::Rows)];
            let weights = ADAPTED.into_iter().zip(sizes);
            let weights = weights.map(|(weight, (rows, split))| (weight, rows, split));
            let weights: Vec<_> = weights.take(adapted(architecture.output_gate).len()).collect();
            adapter::declare(params, shape, &weights, c);
        }
        let one = Init::Constant(1.0 - architecture.norm_offset);
        let gains = match architecture.qk_norm {
            None => None,
            Some(QkNorm::Heads) => Some([(d, Split::Replicated); 2]),
            Some(QkNorm::Width) => Some([(q, Split::Rows), (kv, kv_split)]),
        };
        for (name, (elements, split)) in GAINS.into_iter().zip(gains.into_iter().flatten()) {
            params.add_vector(&format!("{name}.weight"), elements, split, one);
        }
    }

    /// Declares the parameters of the projection back from the heads.
    pub(crate) fn declare_proj(params: &mut ParamDeclarations, shape: &DecoderShape) {
        let (c, q) = (shape.hidden, shape.heads * shape.head_dim);
        params.add("attn.proj.weight", (c, q), Split::Columns, shape.residual_init());
        if shape.architecture.proj_bias {
            params.add_vector("attn.proj.bias", c, Split::Replicated, Init::Constant(0.0));
        }
        let proj = AdaptedWeight::alone(PROJ);
        adapter::declare(params, shape, &[(proj, c, Split::Columns)], q);
    }

    /// The parameters in a pass that drops the inputs of adapters: that of attention, then that of the
    /// projection back.
    pub(crate) fn with_dropout(self, [input, proj]: [Dropout; 2]) -> Self {
        Self {
            input_adapter: self.input_adapter.map(|adapter| adapter.with_dropout(input)),
            proj_adapter: self.proj_adapter.map(|adapter| adapter.with_dropout(proj)),
            ..self
        }
    }

    pub(crate) fn cut(flat: FlatBuffer<'_>, shape: &DecoderShape, scratch: &Scratch) -> Self {
        let architecture = &shape.architecture;
        let of = |weights: &[_]| Adapter::cut(flat, shape, weights, scratch.adapters);
        let qkv = |own| match architecture.joined_qkv {
            true => flat.get(JOINED_QKV, own),
            false => flat.joined(&SEPARATE_QKV, own),
        };
        let gain = |name| flat.get(name, "weight");
        Self {
            input_adapter: match architecture.joined_qkv {
                true => of(&[AdaptedWeight::alone(JOINED_QKV)]),
                false => of(adapted(architecture.output_gate)),
            },
            proj_adapter: of(&[AdaptedWeight::alone(PROJ)]),
            qkv_weight: qkv("weight"),
            qkv_bias: architecture.qkv_bias.then(|| qkv("bias")).filter(|bias| !bias.is_empty()),
            gate_weight: architecture.output_gate.then(|| flat.get(OUTPUT_GATE, "weight")),
            gains: architecture.qk_norm.map(|norm| match norm {
                QkNorm::Heads => {
                    Gains::Heads(HeadNormGrads { q_gain: gain(GAINS[0]), k_gain: gain(GAINS[1]) })
                }
                QkNorm::Width => Gains::Width(flat.joined(&GAINS, "weight")),
            }),
            sinks: AttentionSinks::cut(flat, shape),
            proj_weight: flat.get("attn.proj", "weight"),
            proj_bias: architecture
                .proj_bias
                .then(|| flat.get_trained("attn.proj", "bias"))
                .flatten(),
        }
    }

    /// The norm of each head, if the model has one.
    fn head_norm(&self, shape: &DecoderShape, saved: AttentionActivations) -> Option<HeadNorm> {
        let (Gains::Heads(HeadNormGrads { q_gain, k_gain }), raw) = self.gains.zip(saved.raw)?
        else {
            return None;
        };
        let parts = &shape.architecture;
        let (epsilon, offset) = (parts.norm_epsilon as f32, parts.norm_offset as f32);
        Some(HeadNorm { q_gain, k_gain, raw, epsilon, offset })
    }

    /// The norm over all heads, if the model has one, and q and k before it.
    fn width_norm(
        &self,
        shape: &DecoderShape,
        saved: AttentionActivations,
        heads: Heads,
    ) -> Option<(WidthNorm, Tensor)> {
        let (Gains::Width(gain), raw) = self.gains.zip(saved.raw)? else { return None };
        let parts = &shape.architecture;
        assert!(parts.norm_offset == 0.0, "no model adds a number to these gains");
        // The sums of the ranks count each copy of a shared head.
        let heads_of_keys = shape.kv_heads * shape.kv_replicas();
        let widths = [shape.heads, heads_of_keys].map(|n| (n * shape.head_dim) as f32);
        let (sums, epsilon) = (saved.sums?, parts.norm_epsilon as f32);
        Some((WidthNorm { heads, gain, sums, widths, epsilon }, raw))
    }

    /// Computes normed (B T, C) -> attention over this rank's heads, in `saved`.
    pub(crate) fn heads_forward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        normed: Tensor,
        saved: AttentionActivations,
        pass: AttentionContext,
    ) {
        let AttentionActivations { qkv, out, lse, .. } = saved;
        let AttentionContext { heads, dropout, starts, scores, .. } = pass;
        self.project(dev, normed, saved);
        self.rotate(dev, shape, saved, pass);
        dev.submit(Compute, Op::Attention { qkv, out, lse, heads, starts, dropout, scores });
        if let Some(sinks) = self.sinks {
            sinks.forward(dev, out, lse, heads);
        }
        Self::multiply_gate(dev, saved);
    }

    /// Multiplies the output by its gate, if it has one.
    pub(crate) fn multiply_gate(dev: &Device, saved: AttentionActivations) {
        if let Some(GateActivations { gate, gated: y, .. }) = saved.gate {
            dev.submit(Compute, Op::SigmoidGate { x: saved.out, gate, y });
        }
    }

    /// Computes normed (rows, C) -> q, k, v and the gate of the output, in `saved`.
    #[track_caller]
    pub(crate) fn project(&self, dev: &Device, normed: Tensor, saved: AttentionActivations) {
        let linear = self.input(saved);
        linear.observe(dev, normed);
        linear.forward(dev, normed, saved.qkv, Epilogue::None, self.qkv_bias);
        if let Some((weight, of)) = self.gate_weight.zip(saved.gate) {
            dev.submit(Compute, Op::product(normed, weight.t(), of.gate));
        }
        if let Some(adapter) = self.input_adapter {
            let outputs = Self::outputs(saved.qkv, saved.gate.map(|of| of.gate));
            adapter.forward(dev, normed, outputs);
        }
    }

    /// The projection to q, k and v, without its adapter, which it shares with the gate.
    const fn input(&self, saved: AttentionActivations) -> Linear {
        Linear { weight: self.qkv_weight, adapter: None, fp8: saved.input }
    }

    /// The outputs of the projections of the input, or their gradients.
    const fn outputs(qkv: Tensor, gate: Option<Tensor>) -> Outputs {
        [Some(qkv), gate, None]
    }

    const fn proj(&self, saved: AttentionActivations) -> Linear {
        Linear { weight: self.proj_weight, adapter: self.proj_adapter, fp8: saved.proj }
    }

    /// Applies the norm of q and k, if the model has one, and rotates them by their positions, if the
    /// layer does.
    #[track_caller]
    pub(crate) fn rotate(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        saved: AttentionActivations,
        AttentionContext { heads, table, starts, .. }: AttentionContext,
    ) {
        let qkv = saved.qkv;
        if let Some((norm, raw)) = self.width_norm(shape, saved, heads) {
            let sums = norm.sums;
            dev.submit(Compute, Op::WidthNormSums { qkv, raw, heads, sums });
            sum_over_ranks(dev, sums.reshape(1, sums.len()), Reduction::Sum);
            dev.submit(Compute, Op::WidthNorm { qkv, raw, norm });
        }
        let norm = self.head_norm(shape, saved);
        if let Some(table) = table {
            dev.submit(Compute, Op::Rotary { qkv, table, heads, starts, norm });
        } else {
            assert!(norm.is_none(), "a model that norms each head rotates it, too");
        }
    }

    /// Computes the row-parallel projection: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, saved: AttentionActivations, partial: Tensor) {
        let (linear, out) = (self.proj(saved), saved.output());
        linear.observe(dev, out);
        linear.forward(dev, out, partial, Epilogue::None, None);
    }

    /// Computes `branch.d_normed` (B T, C) from `branch.d_sum` (B T, C), the gradient of the summed
    /// projection. The sum of `branch.d_normed` over the ranks runs during the weight gradients;
    /// Compute waits for it at the end.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        saved: AttentionActivations,
        pass: AttentionContext,
        branch: Branch,
        grads: Self,
    ) {
        let (AttentionActivations { qkv, out, lse, .. }, d_sum) = (saved, branch.d_sum);
        let (d_out, d_qkv) = (branch.scratch.d_attention, branch.scratch.d_qkv);
        let AttentionContext { heads, dropout, table, starts, scores } = pass;
        let (input, proj) = (self.input(saved), self.proj(saved));
        proj.input_gradient(dev, d_sum, d_out, Epilogue::None);
        let d_bias = Region::with_weight(dev, grads.proj_bias);
        let (weight, adapter) = (grads.proj_weight, grads.proj_adapter);
        if saved.gate.is_some_and(|of| of.recomputes) {
            Self::multiply_gate(dev, saved);
        }
        let of_proj = LinearGrads { weight, bias: d_bias, adapter };
        proj.weight_gradient(dev, d_sum, saved.output(), of_proj);
        let gate = saved.gate.zip(branch.scratch.d_gate);
        if let Some((GateActivations { gate, .. }, d_gate)) = gate {
            dev.submit(Compute, Op::SigmoidGateBackward { x: out, gate, d: d_out, d_gate });
        }
        dev.submit(
            Compute,
            Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores },
        );
        if let Some((sinks, d_sinks)) = self.sinks.zip(grads.sinks) {
            sinks.backward(dev, [out, lse, d_out], heads, d_sinks);
        }
        if let Some(table) = table {
            let of_heads = match grads.gains {
                Some(Gains::Heads(HeadNormGrads { q_gain, k_gain })) => {
                    let of = |d, number| branch.scratch.gradient(d, shape.head_dim, number);
                    Some(HeadNormGrads { q_gain: of(q_gain, 0), k_gain: of(k_gain, 1) })
                }
                Some(Gains::Width(_)) | None => None,
            };
            let norm = self.head_norm(shape, saved).zip(of_heads);
            dev.submit(Compute, Op::RotaryBackward { d_qkv, table, heads, starts, norm });
        }
        if let (Some((norm, raw)), Some(Gains::Width(d_gain)), Some(dots)) =
            (self.width_norm(shape, saved, heads), grads.gains, branch.scratch.qk_dots)
        {
            dev.submit(Compute, Op::WidthNormBackwardSums { d_qkv, norm, raw, dots });
            sum_over_ranks(dev, dots.reshape(1, dots.len()), Reduction::Sum);
            let d_gain = branch.scratch.gradient(d_gain, norm.gain.len(), 0);
            dev.submit(Compute, Op::WidthNormBackward { d_qkv, raw, norm, dots, d_gain });
        }
        input.input_gradient(dev, d_qkv, branch.d_normed, Epilogue::None);
        let of_gate = self.gate_weight.zip(grads.gate_weight).zip(branch.scratch.d_gate);
        if let Some(((weight, _), d_gate)) = of_gate {
            dev.submit(Compute, Op::add_product(d_gate, weight, branch.d_normed));
        }
        let d_outputs = Self::outputs(d_qkv, branch.scratch.d_gate);
        if let Some(adapter) = self.input_adapter {
            adapter.input_gradient(dev, d_outputs, branch.d_normed);
        }
        let summed = branch.region.start_sum(dev, branch.d_normed);
        dev.wait(Compute, branch.whole);
        if let Some((adapter, grads)) = self.input_adapter.zip(grads.input_adapter) {
            adapter.weight_gradient(dev, d_outputs, branch.normed, grads);
        }
        let of_qkv = LinearGrads { weight: grads.qkv_weight, bias: grads.qkv_bias, adapter: None };
        input.weight_gradient(dev, d_qkv, branch.normed, of_qkv);
        if let Some(((_, d_weight), d_gate)) = of_gate.filter(|((_, d), _)| !d.is_empty()) {
            dev.submit(Compute, Op::product(d_gate.t(), branch.normed, d_weight));
        }
        dev.wait(Compute, summed);
    }
}
