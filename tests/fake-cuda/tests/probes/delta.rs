//! The gated delta rule of a layer of Qwen3.5-9B and the ops around it: 4096 tokens of one sample.

use crate::ops::{Case, OpSets, Values};
use crate::rates::tensor;
use crate::small;
use device::{DeltaHeads, Dtype, Op, Plan, Tensor};

const VALUE: Dtype = Dtype::Bf16;
/// Weights of a channel of the convolution.
const TAPS: usize = 4;

/// Tokens, and the heads of the layer.
fn sizes() -> DeltaHeads {
    if small() {
        DeltaHeads { keys: 1, values: 2, key_dim: 16, value_dim: 16, seq_len: 70 }
    } else {
        DeltaHeads { keys: 16, values: 32, key_dim: 128, value_dim: 128, seq_len: 4096 }
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let case = |name, kind, make| Case { name, kind, make };
    let (many, sums) = ("element-wise", "reduction");
    vec![
        case("delta_rule", "recurrence", |plan| rule(plan, false)),
        case("delta_rule_backward", "recurrence", |plan| rule(plan, true)),
        case("convolution", many, |plan| convolution(plan, false)),
        case("convolution_backward", sums, |plan| convolution(plan, true)),
        case("gated_norm", many, |plan| gated_norm(plan, false)),
        case("gated_norm_backward", sums, |plan| gated_norm(plan, true)),
        case("sigmoid_gate", many, |plan| sigmoid_gate(plan, false)),
        case("sigmoid_gate_backward", many, |plan| sigmoid_gate(plan, true)),
    ]
}

/// A set of one op that reads `fill`.
fn set(op: Op, fill: Vec<Tensor>) -> OpSets {
    OpSets { ops: vec![op], fill, ..OpSets::default() }
}

fn rule(plan: &mut Plan, backward: bool) -> OpSets {
    let heads = sizes();
    let (rows, width) = (heads.seq_len, heads.values * heads.value_dim);
    let [qkv, d_qkv] = [(); 2].map(|()| tensor(plan, VALUE, (rows, heads.columns())));
    let [out, d_out] = [(); 2].map(|()| tensor(plan, VALUE, (rows, width)));
    let [gates, d_gates] = [(); 2].map(|()| tensor(plan, Dtype::F32, (rows, 2 * heads.values)));
    let states = tensor(plan, Dtype::F32, (heads.places(), heads.state_len()));
    let starts = None;
    let op = if backward {
        Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts }
    } else {
        Op::DeltaRule { qkv, gates, out, states, initial: None, heads, starts }
    };
    let values = heads.values;
    let gate = move |i: usize| if i % (2 * values) < values { 0.5 } else { -0.1 };
    let write: Vec<(Tensor, Values)> = vec![(gates, Box::new(gate))];
    OpSets { write, zero: vec![states], ..set(op, vec![qkv, d_out]) }
}

fn convolution(plan: &mut Plan, backward: bool) -> OpSets {
    let heads = sizes();
    let (seq_len, shape) = (heads.seq_len, (heads.seq_len, heads.columns()));
    let [x, y, d_x] = [(); 3].map(|()| tensor(plan, VALUE, shape));
    let [weight, d_weight] = [(); 2].map(|()| tensor(plan, VALUE, (heads.columns(), TAPS)));
    let (d_y, starts) = (y, None);
    let op = if backward {
        Op::ConvolutionBackward { x, weight, d_y, d_x, d_weight, seq_len, starts }
    } else {
        Op::Convolution { x, weight, y, seq_len, starts }
    };
    set(op, vec![x, weight, y])
}

fn gated_norm(plan: &mut Plan, backward: bool) -> OpSets {
    let heads = sizes();
    let shape = (heads.seq_len, heads.values * heads.value_dim);
    let [x, gate, y, d_x, d_gate] = [(); 5].map(|()| tensor(plan, VALUE, shape));
    let [gain, d_gain] = [(); 2].map(|()| tensor(plan, VALUE, (1, heads.value_dim)));
    let (d_y, epsilon) = (y, 1e-6);
    let op = if backward {
        Op::GatedNormBackward { x, gate, gain, d_y, d_x, d_gate, d_gain, epsilon }
    } else {
        Op::GatedNorm { x, gate, gain, y, epsilon }
    };
    set(op, vec![x, gate, gain, y])
}

fn sigmoid_gate(plan: &mut Plan, backward: bool) -> OpSets {
    let heads = sizes();
    let shape = (heads.seq_len, heads.values * heads.value_dim);
    let [x, gate, y, d_gate] = [(); 4].map(|()| tensor(plan, VALUE, shape));
    let op = if backward {
        Op::SigmoidGateBackward { x, gate, d: y, d_gate }
    } else {
        Op::SigmoidGate { x, gate, y }
    };
    set(op, vec![x, gate, y])
}
