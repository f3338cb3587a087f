//! Mixture of experts on CUDA, emulated, against the cpu backend.

use crate::in_each_type;
use crate::rig::{Rig, VALUES, normal};
use device::{BalanceGradient, Dtype, ExpertWeights, GroupedForm, Op, PADDING, ScoreRule, Tensor};
use device::{SigmoidRule, expert_sort_scratch, random};

/// First row of each expert, for these numbers of rows.
pub(crate) fn offsets_of(rows: &[usize]) -> Vec<i32> {
    let mut offsets = vec![0];
    offsets.extend(rows.iter().scan(0, |sum, rows| {
        *sum += *rows as i32;
        Some(*sum)
    }));
    offsets
}

/// Tensors of grouped matmuls. Sums of products of their elements are exact in fp32, in any order.
#[derive(Clone, Copy)]
pub(crate) struct GroupedTensors {
    of_n: Tensor,
    of_k: Tensor,
    /// Matrices with a gap between two.
    apart: ExpertWeights,
    c_n: Tensor,
    c_k: Tensor,
    gradients: ExpertWeights,
    offsets: Tensor,
}

impl GroupedTensors {
    /// Tensors for experts with these numbers of `rows` and matrices of `shape`. `result`: type of the
    /// results.
    pub(crate) fn new(
        rig: &mut Rig,
        [dtype, result]: [Dtype; 2],
        rows: &[usize],
        shape: (usize, usize),
    ) -> Self {
        let ((n, k), count, all) = (shape, rows.len(), rows.iter().sum());
        let stride = n * k + 8;
        let apart = rig.put_noise(dtype, (1, (count - 1) * stride + n * k), 1);
        let of_n = rig.put_noise(dtype, (all, n), 2);
        let of_k = rig.put_noise(dtype, (all, k), 3);
        let gradients = rig.put_noise(result, (1, count * n * k), 4);
        Self {
            of_n,
            of_k,
            apart: ExpertWeights { all: apart, shape, count, stride },
            c_n: rig.out(result, (all, n)),
            c_k: rig.out(result, (all, k)),
            gradients: ExpertWeights { all: gradients, shape, count, stride: n * k },
            offsets: rig.put_ints(&offsets_of(rows)),
        }
    }

    /// Each of the three forms, and then the same form whose result is added to the old one.
    pub(crate) fn ops(self) -> [Op; 6] {
        let Self { of_n, of_k, apart: experts, c_n, c_k, gradients, offsets } = self;
        let of = |form, a, c, add| {
            let (b, c) = (None, Some(c));
            Op::GroupedGemm { form, a, b, c, experts, offsets, add }
        };
        let gradient = |add| {
            let (form, a, b, c) = (GroupedForm::WeightGradient, of_n, Some(of_k), None);
            Op::GroupedGemm { form, a, b, c, experts: gradients, offsets, add }
        };
        [
            of(GroupedForm::Forward, of_k, c_n, false),
            of(GroupedForm::Forward, of_k, c_n, true),
            of(GroupedForm::InputGradient, of_n, c_k, false),
            of(GroupedForm::InputGradient, of_n, c_k, true),
            gradient(false),
            gradient(true),
        ]
    }
}

/// Even, skewed and empty groups; groups of whole tiles, and of one row more or less.
const GROUPS: [&[usize]; 5] =
    [&[40, 40, 40], &[0, 260, 0, 1, 3], &[128, 127, 129, 64], &[0, 0, 1], &[65]];

#[track_caller]
fn check_grouped(sm: u32, types: [Dtype; 2], skew: usize, rows: &[usize], shape: (usize, usize)) {
    let mut rig = Rig::new(skew);
    rig.sm = sm;
    let tensors = GroupedTensors::new(&mut rig, types, rows, shape);
    let mut pair = rig.open();
    tensors.ops().iter().for_each(|op| pair.check_exact(op));
}

#[test]
fn grouped_matmuls_are_the_same_bits_on_every_gpu() {
    in_each_type(|dtype, skew| {
        // Rows of whole runs of 8, and of other lengths.
        for (rows, shape) in GROUPS.iter().flat_map(|g| [(*g, (136, 72)), (*g, (67, 37))]) {
            for sm in [70, 75, 80] {
                check_grouped(sm, [dtype; 2], skew, rows, shape);
            }
        }
    });
}

#[test]
fn grouped_matmuls_of_half_precision_have_results_in_fp32() {
    for (dtype, sm) in VALUES.iter().flat_map(|dtype| [(*dtype, 70), (*dtype, 90)]) {
        for result in [Dtype::F32, dtype] {
            check_grouped(sm, [dtype, result], 0, &[0, 131, 7], (40, 264));
        }
    }
}

#[test]
fn grouped_matmuls_of_many_experts_find_the_rows_of_each() {
    for count in [33, 70, 1000] {
        let rows = (0..count as u64).map(|e| random::below(1, e, 9).saturating_sub(5) as usize);
        let mut rows: Vec<usize> = rows.collect();
        rows[count / 3] = 150;
        for sm in [75, 80] {
            check_grouped(sm, [Dtype::Bf16; 2], 0, &rows, (8, 8));
        }
    }
}

/// Logits of many sizes, and with many equal ones; the last rows have numbers that are not finite.
fn logits_of(seed: u64, tokens: usize, experts: usize) -> [Vec<f64>; 2] {
    let n = tokens * experts;
    let spread = normal(seed, n).iter().map(|z| 3.0 * z).collect();
    let mut equal: Vec<f64> = (0..n as u64).map(|i| random::below(seed, i, 3) as f64).collect();
    let last = n - experts;
    equal[last] = f64::NAN;
    equal[n - 1] = f64::NEG_INFINITY;
    if tokens > 1 {
        equal[last - 1] = f64::INFINITY;
    }
    [spread, equal]
}

/// Shapes of routes: tokens, experts, experts of a token. With one expert its weight is the gate of a
/// shared expert.
pub(crate) const ROUTES: [[usize; 3]; 7] =
    [[1, 1, 1], [70, 1, 1], [5, 8, 2], [9, 40, 8], [6, 128, 8], [3, 1024, 32], [7, 32, 32]];

#[test]
fn routes_choose_the_same_experts_and_ties_go_to_the_lower_index() {
    for ([tokens, experts, per_token], skew) in ROUTES.iter().flat_map(|r| [(*r, 0), (*r, 1)]) {
        for z in logits_of(1, tokens, experts) {
            for normalize in [false, true] {
                let mut rig = Rig::new(skew);
                let logits = rig.put(Dtype::F32, (tokens, experts), &z);
                let weights = rig.out(Dtype::F32, (tokens, per_token));
                let choices = rig.out(Dtype::I32, (tokens, per_token));
                // A difference of choices is 1 or more.
                let scoring = ScoreRule::Softmax { normalize };
                rig.open().check(&Op::Route { logits, weights, choices, scoring }, 1e-6, 4.0);
            }
        }
    }
}

/// Scores by sigmoid of `experts` experts, in as many groups as they divide into, up to 32.
pub(crate) fn sigmoid_of(rig: &mut Rig, [experts, per_token]: [usize; 2]) -> ScoreRule {
    let size = (2..=experts).find(|size| experts.is_multiple_of(*size) && experts / size <= 32);
    let (groups, kept_groups) = match size {
        Some(size) => (experts / size, per_token.div_ceil(size).max(experts / size / 2)),
        None => (1, 1),
    };
    let correction = rig.put_noise(Dtype::F32, (1, experts), 5);
    let scale = 1.5;
    ScoreRule::Sigmoid(SigmoidRule { correction, groups, kept_groups, normalize: true, scale })
}

#[test]
fn routes_by_sigmoid_choose_the_same_experts_of_the_same_groups() {
    for ([tokens, experts, per_token], skew) in ROUTES.iter().flat_map(|r| [(*r, 0), (*r, 1)]) {
        let zeros = vec![0.0; experts];
        for (z, equal) in logits_of(1, tokens, experts).into_iter().zip([false, true]) {
            for normalize in [false, true] {
                let mut rig = Rig::new(skew);
                let logits = rig.put(Dtype::F32, (tokens, experts), &z);
                let weights = rig.out(Dtype::F32, (tokens, per_token));
                let choices = rig.out(Dtype::I32, (tokens, per_token));
                let d_weights = rig.put_noise(Dtype::F32, (tokens, per_token), 3);
                let ScoreRule::Sigmoid(of) = sigmoid_of(&mut rig, [experts, per_token]) else {
                    unreachable!("scores by sigmoid");
                };
                // Without a correction equal logits are ties, also between groups.
                let none = rig.put(Dtype::F32, (1, experts), &zeros);
                let correction = if equal { none } else { of.correction };
                let scoring = ScoreRule::Sigmoid(SigmoidRule { correction, normalize, ..of });
                let mut pair = rig.open();
                pair.check(&Op::Route { logits, weights, choices, scoring }, 1e-6, 4.0);
                if equal {
                    continue;
                }
                let balance = None;
                let op = Op::RouteBackward { logits, choices, d_weights, scoring, balance };
                pair.check(&op, 2e-6, 4.0);
            }
        }
    }
}

/// Targets of tokens of which no document holds every third one.
fn targets_of(rig: &mut Rig, tokens: usize) -> Tensor {
    let target = |token: usize| if token % 3 == 2 { PADDING } else { token as i32 - 1 };
    rig.put_ints(&(0..tokens).map(target).collect::<Vec<_>>())
}

/// The gradient of a balance loss.
pub(crate) fn balance_of(rig: &mut Rig, tokens: usize, experts: usize) -> BalanceGradient {
    let of_experts = rig.put_noise(Dtype::F32, (1, experts), 4);
    BalanceGradient { of_experts, targets: targets_of(rig, tokens) }
}

#[test]
fn gradients_of_routes_agree() {
    for ([tokens, experts, per_token], skew) in ROUTES.iter().flat_map(|r| [(*r, 0), (*r, 1)]) {
        for (normalize, balanced) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut rig = Rig::new(skew);
            let [z, _] = logits_of(2, tokens, experts);
            let logits = rig.put(Dtype::F32, (tokens, experts), &z);
            let weights = rig.out(Dtype::F32, (tokens, per_token));
            let choices = rig.out(Dtype::I32, (tokens, per_token));
            let d_weights = rig.put_noise(Dtype::F32, (tokens, per_token), 3);
            let balance = balance_of(&mut rig, tokens, experts);
            let balance = balanced.then_some(balance);
            let mut pair = rig.open();
            let scoring = ScoreRule::Softmax { normalize };
            pair.check(&Op::Route { logits, weights, choices, scoring }, 1e-6, 4.0);
            let op = Op::RouteBackward { logits, choices, d_weights, scoring, balance };
            pair.check(&op, 2e-6, 4.0);
        }
    }
}

/// Tensors of a sort by expert: choices, offsets, order, places and scratch.
pub(crate) fn sort_of(rig: &mut Rig, shape: (usize, usize), experts: usize) -> Op {
    let pairs = shape.0 * shape.1;
    // Low numbers are frequent, and the first expert gets nothing if there are several.
    let choice = |i: u64| {
        let [x, y] = [5, 6].map(|seed| random::below(seed, i, experts as u64));
        x.min(y).max(u64::from(experts > 1)) as f64
    };
    let choices: Vec<f64> = (0..pairs as u64).map(choice).collect();
    Op::SortByExpert {
        choices: rig.put(Dtype::I32, shape, &choices),
        offsets: rig.out(Dtype::I32, (1, experts + 1)),
        order: rig.out(Dtype::I32, (1, pairs)),
        places: rig.out(Dtype::I32, shape),
        scratch: rig.out(Dtype::I32, (1, expert_sort_scratch(pairs, experts))),
    }
}

#[test]
fn pairs_are_sorted_by_expert_in_their_order() {
    // The last one has more pairs than blocks have in one part.
    for (shape, experts) in [
        ((1, 1), 1),
        ((5, 2), 8),
        ((700, 3), 40),
        ((1025, 1), 3),
        ((1025, 1), 1),
        ((9, 8), 1024),
        ((70_000, 2), 3),
    ] {
        for skew in [0, 1] {
            let mut rig = Rig::new(skew);
            let op = sort_of(&mut rig, shape, experts);
            rig.open().check_exact(&op);
        }
    }
}

/// Checks that rows are gathered and combined, and their gradients. Products of rows are exact in any
/// order.
#[track_caller]
pub(crate) fn check_rows(mut rig: Rig, dtype: Dtype, [tokens, per_token, cols]: [usize; 3]) {
    let rows = tokens * per_token;
    let shape = (tokens, per_token);
    // A permutation of the rows.
    let places: Vec<i32> = (0..rows).map(|pair| (pair * 7 + 3) as i32 % rows as i32).collect();
    assert!(!rows.is_multiple_of(7), "{rows} rows");
    let mut order = vec![0; rows];
    for (pair, place) in places.iter().enumerate() {
        order[*place as usize] = pair as i32;
    }
    let places: Vec<f64> = places.iter().map(|place| f64::from(*place)).collect();
    let (order, places) = (rig.put_ints(&order), rig.put(Dtype::I32, shape, &places));
    let x = rig.put_noise(dtype, (tokens, cols), 1);
    let d_out = rig.put_noise(dtype, (tokens, cols), 2);
    // Their sums are the same bits only in the order of the slots.
    let weights = rig.put(Dtype::F32, shape, &normal(3, rows));
    let (y, d_y) = (rig.out(dtype, (rows, cols)), rig.out(dtype, (rows, cols)));
    let outs = [dtype, Dtype::F32].map(|dtype| rig.out(dtype, (tokens, cols)));
    let d_weights = rig.out(Dtype::F32, shape);
    let mut pair = rig.open();
    pair.check_exact(&Op::GatherRows { x, order, y });
    for (out, weights) in outs.iter().flat_map(|out| [(*out, None), (*out, Some(weights))]) {
        pair.check_exact(&Op::CombineExperts { y, places, weights, out });
    }
    // At last in place.
    for d_y in [d_y, y] {
        let op = Op::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights };
        pair.check_exact(&op);
    }
}

/// Checks biases of experts with these numbers of rows, and their gradient.
pub(crate) fn check_biases(mut rig: Rig, dtype: Dtype, rows: &[usize], cols: usize) {
    let (experts, all) = (rows.len(), rows.iter().sum());
    let x = rig.put_noise(dtype, (all, cols), 1);
    let biases = rig.put_noise(dtype, (experts, cols), 2);
    let d_biases = rig.out(dtype, (experts, cols));
    let offsets = rig.put_ints(&offsets_of(rows));
    let mut pair = rig.open();
    pair.check_exact(&Op::AddExpertBiases { x, biases, offsets });
    pair.check(&Op::ExpertBiasesBackward { d_y: x, offsets, d_biases }, 1e-5, 1.0);
}

#[test]
fn biases_of_experts_and_their_gradient_agree() {
    in_each_type(|dtype, skew| {
        for (rows, cols) in [(&[3][..], 5), (&[0, 70, 0, 0, 1], 37), (&[9, 0, 33, 2], 264)] {
            check_biases(Rig::new(skew), dtype, rows, cols);
        }
    });
}

#[test]
fn rows_of_experts_are_gathered_and_combined_with_the_same_bits() {
    in_each_type(|dtype, skew| {
        for sizes in [[1, 1, 1], [9, 1, 37], [5, 2, 37], [3, 8, 64], [4, 3, 2056]] {
            check_rows(Rig::new(skew), dtype, sizes);
        }
    });
}

/// Checks the load of experts, the sums of their shares, and a balance loss of them.
#[track_caller]
pub(crate) fn check_load(mut rig: Rig, tokens: usize, experts: usize) {
    let per_token = experts.min(3);
    let pairs = tokens * per_token;
    // Few experts have many rows, and some have none.
    let mut rows = vec![0; experts];
    (0..pairs).for_each(|pair| rows[pair * pair % experts] += 1);
    let order: Vec<i32> = (0..pairs as i32).rev().collect();
    let [z, _] = logits_of(1, tokens, experts);
    let logits = rig.put(Dtype::F32, (tokens, experts), &z);
    let (offsets, order) = (rig.put_ints(&offsets_of(&rows)), rig.put_ints(&order));
    let targets = targets_of(&mut rig, tokens);
    let [load, shares] = [2, 3].map(|seed| rig.put_noise(Dtype::F64, (1, experts), seed));
    // A row without tokens, and more rows than the kernel has threads.
    let counts = (0..300 * experts).map(|i| if i < experts { 0.0 } else { (i % 7) as f64 });
    let counts = rig.put(Dtype::F64, (300, experts), &counts.collect::<Vec<_>>());
    let of_rows = rig.put_noise(Dtype::F64, (300, experts), 4);
    let (value, grads) = (rig.put(Dtype::F64, (1, 1), &[0.5]), rig.out(Dtype::F32, (300, experts)));
    let mut pair = rig.open();
    let of = |shares| Op::ExpertLoad { offsets, order, targets, logits, load, shares };
    pair.check_exact(&of(None));
    // The load is a whole number more.
    pair.check(&of(Some(shares)), 1e-6 * (tokens as f64).sqrt(), 0.0);
    let (shares, scale, factor) = (of_rows, experts as f64, 0.25);
    let op = Op::BalanceLoss { counts, shares, value, grads, per_token, scale, factor };
    pair.check_exact(&op);
}

#[test]
fn loads_of_experts_and_their_shares_agree() {
    for (tokens, experts) in [(1, 1), (7, 8), (1500, 5), (40, 128), (9, 1024)] {
        for skew in [0, 1] {
            check_load(Rig::new(skew), tokens, experts);
        }
    }
}
