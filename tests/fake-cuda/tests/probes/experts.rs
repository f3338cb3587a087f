//! The ops of the experts of a layer of Qwen3-30B-A3B: 8192 tokens, and as many rows for each expert.

use crate::ops::{Case, OpSets, Values};
use crate::rates::tensor;
use crate::small;
use device::{Dtype, ExpertWeights, GroupedForm, Op, Plan, Tensor};

const VALUE: Dtype = Dtype::Bf16;

/// Sizes of the experts of a layer.
struct ExpertSizes {
    tokens: usize,
    hidden: usize,
    /// Inner size of an expert.
    ffn: usize,
    count: usize,
    per_token: usize,
}

fn sizes() -> ExpertSizes {
    if small() {
        ExpertSizes { tokens: 16, hidden: 16, ffn: 8, count: 4, per_token: 2 }
    } else {
        ExpertSizes { tokens: 8192, hidden: 2048, ffn: 768, count: 128, per_token: 8 }
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let case = |name, kind, make| Case { name, kind, make };
    let many = "element-wise";
    vec![
        case("grouped_gemm", "grouped", |plan| grouped(plan, GroupedForm::Forward)),
        case("grouped_gemm-input", "grouped", |plan| grouped(plan, GroupedForm::InputGradient)),
        case("grouped_gemm-weight", "grouped", |plan| grouped(plan, GroupedForm::WeightGradient)),
        case("gather_rows", many, gather),
        case("combine_experts", many, |plan| combine(plan, false)),
        case("combine_experts_backward", many, |plan| combine(plan, true)),
    ]
}

/// Matmuls of the gates and the values of all experts.
fn grouped(plan: &mut Plan, form: GroupedForm) -> OpSets {
    let ExpertSizes { tokens, hidden, ffn, count, per_token } = sizes();
    let (rows, n, k) = (tokens * per_token, 2 * ffn, hidden);
    let all = tensor(plan, VALUE, (1, count * n * k));
    let [of_n, of_k] = [n, k].map(|cols| tensor(plan, VALUE, (rows, cols)));
    let offsets = tensor(plan, Dtype::I32, (1, count + 1));
    let (a, b, c) = match form {
        GroupedForm::Forward => (of_k, None, Some(of_n)),
        GroupedForm::InputGradient => (of_n, None, Some(of_k)),
        GroupedForm::WeightGradient => (of_n, Some(of_k), None),
    };
    let experts = ExpertWeights { all, shape: (n, k), count, stride: n * k };
    let op = Op::GroupedGemm { form, a, b, c, experts, offsets, add: false };
    let each = rows / count;
    let write: Vec<(Tensor, Values)> = vec![(offsets, Box::new(move |i| (i * each) as f64))];
    OpSets { ops: vec![op], fill: vec![all, of_n, of_k], write, zero: Vec::new() }
}

fn gather(plan: &mut Plan) -> OpSets {
    let ExpertSizes { tokens, hidden, per_token, .. } = sizes();
    let rows = tokens * per_token;
    let (x, y) = (tensor(plan, VALUE, (tokens, hidden)), tensor(plan, VALUE, (rows, hidden)));
    let order = tensor(plan, Dtype::I32, (1, rows));
    let write: Vec<(Tensor, Values)> = vec![(order, Box::new(move |i| permuted(i, rows)))];
    let ops = vec![Op::GatherRows { x, order, y }];
    OpSets { ops, fill: vec![x], write, zero: Vec::new() }
}

fn combine(plan: &mut Plan, backward: bool) -> OpSets {
    let ExpertSizes { tokens, hidden, per_token, .. } = sizes();
    let (rows, shape) = (tokens * per_token, (tokens, per_token));
    let [y, d_y] = [(); 2].map(|()| tensor(plan, VALUE, (rows, hidden)));
    let out = tensor(plan, VALUE, (tokens, hidden));
    let places = tensor(plan, Dtype::I32, shape);
    let [weights, d_weights] = [(); 2].map(|()| tensor(plan, Dtype::F32, shape));
    let op = if backward {
        Op::CombineExpertsBackward { d_out: out, y, places, weights, d_y, d_weights }
    } else {
        Op::CombineExperts { y, places, weights: Some(weights), out }
    };
    let write: Vec<(Tensor, Values)> = vec![
        (places, Box::new(move |i| permuted(i, rows))),
        (weights, Box::new(move |_| 1.0 / per_token as f64)),
    ];
    OpSets { ops: vec![op], fill: vec![y, out], write, zero: Vec::new() }
}

/// Number `i` of a permutation of the numbers below `n`, a power of two. Neighbours are far apart.
fn permuted(i: usize, n: usize) -> f64 {
    (i * ((n / 3) | 1) % n) as f64
}
