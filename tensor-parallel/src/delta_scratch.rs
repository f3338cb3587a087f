//! Transients of gated delta nets, and what they compute of all tokens of a sample. The letters are
//! those of `delta_net`.

use crate::delta_shape::DeltaShape;
use crate::shape::DecoderShape;
use device::{Arena, DELTA_CHUNK, DeltaHeads, Dtype, Plan, Tensor};

/// Outputs that are large and cheap. With selective recomputation all blocks share them, and the
/// backward pass computes them again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaOutputs {
    pub(crate) qkv: Tensor, // (B T, U): queries, keys and values after the convolution
    pub(crate) normed: Tensor, // (B T, H e): the normed outputs of the rule times their gate
}

/// Transients of gated delta nets; all blocks share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaScratch {
    pub(crate) d_normed: Tensor,      // (B T, H e)
    pub(crate) d_out: Tensor,         // (B T, H e)
    pub(crate) d_output_gate: Tensor, // (B T, H e)
    pub(crate) d_qkv: Tensor,         // (B T, U)
    pub(crate) d_input: Tensor,       // (B T, U)
    pub(crate) d_gates: Tensor,       // (B T, 2 H) F32
    pub(crate) d_raw_gates: Tensor,   // (B T, 2 H)
    pub(crate) outputs: Option<DeltaOutputs>,
}

/// Results of a gated delta net for all tokens of a sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaPass {
    pub(crate) qkv: Tensor,    // (T, U)
    pub(crate) gates: Tensor,  // (T, 2 H) F32
    pub(crate) out: Tensor,    // (T, H e)
    pub(crate) states: Tensor, // (places, H d e) F32
}

impl DeltaOutputs {
    /// Plans the outputs; `one` plans a tensor of a name and a width.
    pub(crate) fn plan(heads: DeltaHeads, one: &mut dyn FnMut(&str, usize) -> Tensor) -> Self {
        let [qkv, normed] = [heads.columns(), heads.values * heads.value_dim];
        Self { qkv: one("convolution", qkv), normed: one("gated_norm", normed) }
    }

    pub(crate) fn rows(self, rows: usize) -> Self {
        Self { qkv: self.qkv.rows(0..rows), normed: self.normed.rows(0..rows) }
    }
}

impl DeltaScratch {
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, delta: &DeltaShape) -> Self {
        let (at, tokens) = ((Arena::Device, "transients"), shape.tokens());
        let heads = delta.heads(shape.tp_size, shape.seq_len);
        let mut one = |name: &str, dtype, width| {
            plan.tensor(at, format!("delta.{name}"), dtype, (tokens, width))
        };
        let (inner, dtype) = (heads.values * heads.value_dim, shape.dtype);
        Self {
            d_normed: one("d_gated_norm", dtype, inner),
            d_out: one("d_out", dtype, inner),
            d_output_gate: one("d_output_gate", dtype, inner),
            d_qkv: one("d_convolution", dtype, heads.columns()),
            d_input: one("d_qkv", dtype, heads.columns()),
            d_gates: one("d_gates", Dtype::F32, 2 * heads.values),
            d_raw_gates: one("d_raw_gates", dtype, 2 * heads.values),
            outputs: shape
                .recomputes_outputs()
                .then(|| DeltaOutputs::plan(heads, &mut |name, width| one(name, dtype, width))),
        }
    }
}

impl DeltaPass {
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, delta: &DeltaShape) -> Self {
        let heads = delta.heads(shape.tp_size, shape.seq_len);
        let mut one = |name: &str, dtype, size| {
            plan.tensor((Arena::Device, "keys and values"), format!("delta.{name}"), dtype, size)
        };
        let (tokens, values) = (shape.seq_len, heads.values * heads.value_dim);
        Self {
            qkv: one("all_qkv", shape.dtype, (tokens, heads.columns())),
            gates: one("all_gates", Dtype::F32, (tokens, 2 * heads.values)),
            out: one("all_out", shape.dtype, (tokens, values)),
            states: one("all_states", Dtype::F32, (heads.places(), heads.state_len())),
        }
    }

    /// Results for `tokens` tokens; `qkv` has `seen` more before them.
    pub(crate) fn of(self, seen: usize, tokens: usize) -> Self {
        let Self { qkv, gates, out, states } = self;
        let [gates, out] = [gates, out].map(|of| of.rows(0..tokens));
        Self {
            qkv: qkv.rows(seen..seen + tokens),
            gates,
            out,
            states: states.rows(0..tokens.div_ceil(DELTA_CHUNK)),
        }
    }
}
