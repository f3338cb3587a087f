mod biases;
mod loads;
mod sigmoid;

use super::super::testing::{Rig, TYPES, assert_close, differences, inner, noise};
use crate::op::{
    BalanceGradient, ExpertWeights, GroupedForm, MOST_EXPERTS, Op, PADDING, ScoreRule,
    expert_sort_scratch,
};
use crate::{Dtype, Tensor};

/// Choices of 2 of 4 experts by 4 tokens. No token chooses expert 2.
const CHOICES: [i32; 8] = [3, 0, 0, 1, 3, 1, 0, 3];
/// The same pairs, sorted by expert.
const OFFSETS: [i32; 5] = [0, 3, 5, 5, 8];
const ORDER: [i32; 8] = [1, 2, 6, 3, 5, 0, 4, 7];
const PLACES: [i32; 8] = [5, 0, 1, 3, 6, 4, 2, 7];

fn ints(rig: &mut Rig, shape: (usize, usize), values: &[i32]) -> Tensor {
    let values: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
    rig.put(Dtype::I32, shape, &values)
}

fn wide(values: &[i32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

/// Softmax of a row in f64.
fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = logits.iter().map(|z| (z - largest).exp()).collect();
    let total: f64 = exps.iter().sum();
    exps.into_iter().map(|e| e / total).collect()
}

/// Weights of given choices in f64.
fn weights_of(logits: &[f64], experts: usize, choices: &[f64], normalize: bool) -> Vec<f64> {
    let per_token = choices.len() * experts / logits.len();
    let rows = logits.chunks(experts).zip(choices.chunks(per_token));
    let weights = rows.flat_map(|(logits, choices)| {
        let p = softmax(logits);
        let chosen: Vec<f64> = choices.iter().map(|e| p[*e as usize]).collect();
        let total: f64 = if normalize { chosen.iter().sum() } else { 1.0 };
        chosen.into_iter().map(move |p| p / total).collect::<Vec<f64>>()
    });
    weights.collect()
}

/// Choices and weights of `logits` (tokens, experts).
fn route(
    threads: usize,
    logits: &[f64],
    experts: usize,
    per_token: usize,
    normalize: bool,
) -> [Vec<f64>; 2] {
    let (mut rig, tokens) = (Rig::new(threads), logits.len() / experts);
    let logits = rig.put(Dtype::F32, (tokens, experts), logits);
    let weights = rig.out(Dtype::F32, (tokens, per_token));
    let choices = rig.out(Dtype::I32, (tokens, per_token));
    rig.run(&Op::Route { logits, weights, choices, scoring: ScoreRule::Softmax { normalize } });
    [rig.get(choices), rig.get(weights)]
}

#[test]
fn equal_logits_are_chosen_by_the_lower_index() {
    let (nan, low) = (f64::NAN, f64::NEG_INFINITY);
    let rows = [
        ([1.0, 3.0, 2.0, 3.0, 0.0], [1.0, 3.0, 2.0]),
        ([7.0, 7.0, 7.0, 7.0, 7.0], [0.0, 1.0, 2.0]),
        ([0.0, 1.0, 5.0, 1.0, 1.0], [2.0, 1.0, 3.0]),
        ([-0.0, 0.0, -0.0, 0.0, -1.0], [0.0, 1.0, 2.0]),
        // The exponentials of all but the first are 0.
        ([200.0, 1.0, 2.0, 4.0, 3.0], [0.0, 3.0, 4.0]),
        ([low, low, 3.0, low, low], [2.0, 0.0, 1.0]),
        ([nan, 1.0, nan, 2.0, 0.0], [3.0, 1.0, 4.0]),
        ([nan; 5], [0.0, 1.0, 2.0]),
    ];
    for (logits, want) in rows {
        assert_eq!(route(1, &logits, 5, 3, true)[0], want, "{logits:?}");
    }
    let [_, weights] = route(1, &rows[6].0, 5, 3, true);
    assert!(weights.iter().all(|weight| weight.is_nan()), "{weights:?}");
}

#[test]
fn weights_are_the_softmax_of_any_number_of_choices() {
    for (experts, per_token) in [(1, 1), (4, 1), (4, 4), (8, 3), (128, 8), (MOST_EXPERTS, 32)] {
        let logits: Vec<f64> = noise(1, 6 * experts).iter().map(|z| 4.0 * z).collect();
        for normalize in [false, true] {
            let [choices, weights] = route(1, &logits, experts, per_token, normalize);
            for (row, chosen) in logits.chunks(experts).zip(choices.chunks(per_token)) {
                let mut sorted: Vec<usize> = (0..experts).collect();
                sorted.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
                let want: Vec<f64> = sorted[..per_token].iter().map(|e| *e as f64).collect();
                assert_eq!(chosen, want);
            }
            let want = weights_of(&logits, experts, &choices, normalize);
            assert_close(&weights, &want, 0.0, 2e-6);
        }
    }
}

#[test]
fn the_gradient_of_a_route_is_that_of_its_weights_and_of_the_balance() {
    for (experts, per_token) in [(5, 1), (5, 2), (5, 5), (40, 6)] {
        let tokens = 7;
        let z: Vec<f64> = noise(2, tokens * experts).iter().map(|z| 2.0 * z).collect();
        let d = noise(3, tokens * per_token);
        let b = noise(4, experts);
        // No document holds the last two tokens: the balance of the experts does not see them.
        let held = tokens - 2;
        let targets: Vec<i32> =
            (0..tokens).map(|t| if t < held { t as i32 - 1 } else { PADDING }).collect();
        for (normalize, balanced) in [(false, false), (false, true), (true, false), (true, true)] {
            let [choices, _] = route(1, &z, experts, per_token, normalize);
            let mut rig = Rig::new(1);
            let logits = rig.put(Dtype::F32, (tokens, experts), &z);
            let chosen = rig.put(Dtype::I32, (tokens, per_token), &choices);
            let d_weights = rig.put(Dtype::F32, (tokens, per_token), &d);
            let balance = balanced.then(|| {
                let of_experts = rig.put(Dtype::F32, (1, experts), &b);
                BalanceGradient { of_experts, targets: rig.put_ints(&targets) }
            });
            let scoring = ScoreRule::Softmax { normalize };
            rig.run(&Op::RouteBackward { logits, choices: chosen, d_weights, scoring, balance });
            let want = differences(&z, |z| {
                let p: Vec<f64> = z.chunks(experts).flat_map(softmax).collect();
                let rows = p.chunks(experts).take(held);
                let by_balance: f64 = rows.map(|p| inner(p, &b)).sum();
                let weights = weights_of(z, experts, &choices, normalize);
                inner(&weights, &d) + if balanced { by_balance } else { 0.0 }
            });
            assert_close(&rig.get(logits), &want, 3e-6, 1e-5);
            if normalize && !balanced {
                let got = rig.get(logits);
                for (row, chosen) in got.chunks(experts).zip(choices.chunks(per_token)) {
                    let others = (0..experts).filter(|e| !chosen.contains(&(*e as f64)));
                    others.for_each(|e| assert_eq!(row[e], 0.0));
                }
            }
        }
    }
}

#[test]
fn pairs_are_sorted_by_expert_in_their_order() {
    let sorted = |choices: &[i32], per_token: usize, experts: usize| {
        let (mut rig, pairs) = (Rig::new(1), choices.len());
        let shape = (pairs / per_token, per_token);
        let choices = ints(&mut rig, shape, choices);
        let offsets = rig.out(Dtype::I32, (1, experts + 1));
        let (order, places) = (rig.out(Dtype::I32, (1, pairs)), rig.out(Dtype::I32, shape));
        let scratch = rig.out(Dtype::I32, (1, expert_sort_scratch(pairs, experts)));
        let op = Op::SortByExpert { choices, offsets, order, places, scratch };
        rig.try_run(&op).map(|()| [offsets, order, places].map(|t| rig.get(t)))
    };
    let want = [&OFFSETS[..], &ORDER, &PLACES].map(wide);
    assert_eq!(sorted(&CHOICES, 2, 4), Ok(want));
    // One expert for each token, and each expert for each token.
    let want = [&[0, 2, 2, 3][..], &[0, 2, 1], &[0, 2, 1]].map(wide);
    assert_eq!(sorted(&[0, 2, 0], 1, 3), Ok(want));
    let want = [&[0, 2, 4][..], &[1, 2, 0, 3], &[2, 0, 1, 3]].map(wide);
    assert_eq!(sorted(&[1, 0, 0, 1], 2, 2), Ok(want));
    for wrong in [4, -1] {
        let error = sorted(&[0, wrong, 1, 2], 2, 4).expect_err("no expert");
        assert!(error.contains("no index below 4"), "{error}");
    }
}

#[test]
fn rows_of_tokens_are_gathered_and_slots_are_summed_in_order() {
    for (dtype, _) in TYPES {
        let (mut rig, cols) = (Rig::new(1), 300);
        let x = noise(1, 4 * cols);
        let order = rig.put_ints(&ORDER);
        let (t, y) = (rig.put(dtype, (4, cols), &x), rig.out(dtype, (8, cols)));
        rig.run(&Op::GatherRows { x: t, order, y });
        let rows = ORDER.iter().flat_map(|pair| &x[*pair as usize / 2 * cols..][..cols]);
        assert_eq!(rig.get(y), rows.copied().collect::<Vec<f64>>());
        // Without weights each token has its row twice.
        let (places, out) = (ints(&mut rig, (4, 2), &PLACES), rig.out(Dtype::F32, (4, cols)));
        rig.run(&Op::CombineExperts { y, places, weights: None, out });
        assert_eq!(rig.get(out), x.iter().map(|x| 2.0 * x).collect::<Vec<f64>>());
    }
    // (1e8 - 1e8) + 1 is 1. In the order of rows, or from the last slot, fp32 loses the 1.
    let mut rig = Rig::new(1);
    let y = rig.put(Dtype::F32, (3, 1), &[1.0, 1e8, -1e8]);
    let places = ints(&mut rig, (1, 3), &[1, 2, 0]);
    let weights = rig.put(Dtype::F32, (1, 3), &[1.0, 1.0, 1.0]);
    for weights in [None, Some(weights)] {
        let out = rig.out(Dtype::F32, (1, 1));
        rig.run(&Op::CombineExperts { y, places, weights, out });
        assert_eq!(rig.get(out), [1.0]);
    }
}

#[test]
fn a_combination_and_its_gradients_are_the_formula_in_every_type() {
    let (tokens, per_token, cols) = (4, 2, 291);
    let (y, w) = (noise(1, 8 * cols), noise(2, 8));
    let d = noise(3, tokens * cols);
    let row = |y: &[f64], pair: usize| y[PLACES[pair] as usize * cols..][..cols].to_vec();
    let combined = |y: &[f64], w: &[f64]| -> Vec<f64> {
        let of = |i: usize| {
            let pairs = i / cols * per_token..(i / cols + 1) * per_token;
            pairs.map(|pair| w[pair] * row(y, pair)[i % cols]).sum::<f64>()
        };
        (0..tokens * cols).map(of).collect()
    };
    let d_token = |pair: usize| &d[pair / per_token * cols..][..cols];
    let mut want_y = vec![0.0; 8 * cols];
    for pair in 0..8 {
        let to = &mut want_y[PLACES[pair] as usize * cols..][..cols];
        to.iter_mut().zip(d_token(pair)).for_each(|(to, d)| *to = w[pair] * d);
    }
    // The formula agrees with differences of its forward pass.
    let by_y = differences(&y[..3], |few| {
        let y: Vec<f64> = few.iter().chain(&y[3..]).copied().collect();
        inner(&combined(&y, &w), &d)
    });
    assert_close(&want_y[..3], &by_y, 1e-6, 1e-6);
    let want_w = differences(&w, |w| inner(&combined(&y, w), &d));
    for ((dtype, ulp), in_place) in TYPES.iter().flat_map(|t| [(*t, false), (*t, true)]) {
        let mut rig = Rig::new(1);
        let (t_y, d_out) = (rig.put(dtype, (8, cols), &y), rig.put(dtype, (tokens, cols), &d));
        let places = ints(&mut rig, (tokens, per_token), &PLACES);
        let weights = rig.put(Dtype::F32, (tokens, per_token), &w);
        for out in [rig.out(dtype, (tokens, cols)), rig.out(Dtype::F32, (tokens, cols))] {
            rig.run(&Op::CombineExperts { y: t_y, places, weights: Some(weights), out });
            assert_close(&rig.get(out), &combined(&y, &w), 1e-6, ulp);
        }
        let d_y = if in_place { t_y } else { rig.out(dtype, (8, cols)) };
        let d_weights = rig.out(Dtype::F32, (tokens, per_token));
        rig.run(&Op::CombineExpertsBackward { d_out, y: t_y, places, weights, d_y, d_weights });
        assert_close(&rig.get(d_y), &want_y, 1e-7, ulp);
        assert_close(&rig.get(d_weights), &want_w, 1e-4, 1e-5);
    }
}

/// Operands of a grouped matmul in f64: rows (rows, n) and (rows, k), and matrices.
struct Operands {
    offsets: Vec<i32>,
    shape: (usize, usize),
    of_n: Vec<f64>,
    of_k: Vec<f64>,
    matrices: Vec<f64>,
}

impl Operands {
    fn new(offsets: &[i32], n: usize, k: usize) -> Self {
        let (rows, count) = (offsets[offsets.len() - 1] as usize, offsets.len() - 1);
        Self {
            offsets: offsets.to_vec(),
            shape: (n, k),
            of_n: noise(1, rows * n),
            of_k: noise(2, rows * k),
            matrices: noise(3, count * n * k),
        }
    }

    fn count(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The results of the three forms, then the same added to old results.
    fn results(&self) -> [Vec<f64>; 6] {
        let (n, k) = self.shape;
        let rows = self.of_n.len() / n;
        let expert = |row: usize| self.offsets.iter().rposition(|at| *at as usize <= row);
        let (mut forward, mut input) = (vec![0.0; rows * n], vec![0.0; rows * k]);
        let mut gradient = vec![0.0; self.matrices.len()];
        for row in 0..rows {
            let at = expert(row).expect("offsets begin with 0") * n * k;
            for (i, j) in (0..n).flat_map(|i| (0..k).map(move |j| (i, j))) {
                let weight = self.matrices[at + i * k + j];
                forward[row * n + i] += weight * self.of_k[row * k + j];
                input[row * k + j] += weight * self.of_n[row * n + i];
                gradient[at + i * k + j] += self.of_n[row * n + i] * self.of_k[row * k + j];
            }
        }
        let sum = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x + y).collect();
        let old = [&forward, &input].map(|new| noise(4, new.len()));
        let added = [sum(&forward, &old[0]), sum(&input, &old[1]), sum(&gradient, &self.matrices)];
        let [of_n, of_k, of_matrices] = added;
        [forward, input, gradient, of_n, of_k, of_matrices]
    }

    /// The same results by the op, with `gap` elements between matrices where the form allows it.
    fn computed(&self, dtype: Dtype, threads: usize, gap: usize) -> [Vec<f64>; 6] {
        let ((n, k), count, mut rig) = (self.shape, self.count(), Rig::new(threads));
        let rows = self.of_n.len() / n;
        let offsets = rig.put_ints(&self.offsets);
        let of_n = rig.put(dtype, (rows, n), &self.of_n);
        let of_k = rig.put(dtype, (rows, k), &self.of_k);
        let (c_n, c_k) = (rig.out(dtype, (rows, n)), rig.out(dtype, (rows, k)));
        let [old_n, old_k] = [n, k].map(|of| rig.put(dtype, (rows, of), &noise(4, rows * of)));
        let mut apart: Vec<f64> = Vec::new();
        for matrix in self.matrices.chunks(n * k) {
            // Numbers that belong to no matrix.
            let before = if apart.is_empty() { 0 } else { gap };
            apart.extend(vec![9.0; before]);
            apart.extend(matrix);
        }
        let all = rig.put(dtype, (1, apart.len()), &apart);
        let experts = ExpertWeights { all, shape: (n, k), count, stride: n * k + gap };
        let of = |form, a, c, add| {
            let (b, c) = (None, Some(c));
            Op::GroupedGemm { form, a, b, c, experts, offsets, add }
        };
        for (c_n, c_k, add) in [(c_n, c_k, false), (old_n, old_k, true)] {
            rig.run(&of(GroupedForm::Forward, of_k, c_n, add));
            rig.run(&of(GroupedForm::InputGradient, of_n, c_k, add));
        }
        let mut gradient = |add: bool| {
            // Stale elements that no sum may keep, or old matrices to which sums are added.
            let old = if add { self.matrices.clone() } else { vec![77.0; count * n * k] };
            let all = rig.put(dtype, (1, count * n * k), &old);
            let experts = ExpertWeights { all, stride: n * k, ..experts };
            let (form, a, b, c) = (GroupedForm::WeightGradient, of_n, Some(of_k), None);
            rig.run(&Op::GroupedGemm { form, a, b, c, experts, offsets, add });
            rig.get(all)
        };
        let (gradient, added) = (gradient(false), gradient(true));
        let [c_n, c_k, old_n, old_k] = [c_n, c_k, old_n, old_k].map(|c| rig.get(c));
        [c_n, c_k, gradient, old_n, old_k, added]
    }
}

/// First rows of 1 to 5 experts: even, empty at each place, one row, one expert with all rows, none.
const GROUPS: [&[i32]; 7] = [
    &[0, 9],
    &[0, 5, 10, 15],
    &[0, 0, 7, 7, 20, 20],
    &[0, 1, 1, 2],
    &[0, 0, 23, 23],
    &[0, 0, 0],
    &[0, 3, 60, 61, 64],
];

#[test]
fn grouped_matmuls_are_the_formula_for_every_form_and_type() {
    for (offsets, (n, k)) in GROUPS.iter().flat_map(|g| [(*g, (9, 14)), (*g, (33, 5))]) {
        let operands = Operands::new(offsets, n, k);
        let want = operands.results();
        for ((dtype, ulp), gap) in TYPES.iter().flat_map(|t| [(*t, 0), (*t, 3)]) {
            let got = operands.computed(dtype, 1, gap);
            for (got, want) in got.iter().zip(&want) {
                assert_close(got, want, 1e-5, ulp);
            }
        }
    }
}

#[test]
fn an_expert_without_rows_has_no_gradient() {
    let operands = Operands::new(&[0, 0, 4, 4], 6, 8);
    let [_, _, gradient, _, _, added] = operands.computed(Dtype::F32, 1, 0);
    for expert in [0, 2] {
        let of = expert * 48..(expert + 1) * 48;
        assert_eq!(gradient[of.clone()], [0.0; 48]);
        assert_eq!(added[of.clone()], operands.matrices[of]);
    }
}

#[test]
fn a_grouped_matmul_has_the_bits_of_a_matmul_of_each_expert() {
    let (offsets, n, k) = ([0, 130, 131, 131, 600], 70, 410);
    let operands = Operands::new(&offsets, n, k);
    let got = operands.computed(Dtype::Bf16, 1, 0);
    for expert in 0..operands.count() {
        let mut rig = Rig::new(1);
        let rows = offsets[expert] as usize..offsets[expert + 1] as usize;
        let len = rows.len();
        let mut put = |all: &[f64], cols: usize| {
            rig.put(Dtype::Bf16, (len, cols), &all[rows.start * cols..rows.end * cols])
        };
        let (of_n, of_k) = (put(&operands.of_n, n), put(&operands.of_k, k));
        let at = expert * n * k..(expert + 1) * n * k;
        let matrix = rig.put(Dtype::Bf16, (n, k), &operands.matrices[at.clone()]);
        let c_n = rig.out(Dtype::Bf16, (len, n));
        let c_k = rig.out(Dtype::Bf16, (len, k));
        let gradient = rig.out(Dtype::Bf16, (n, k));
        rig.run(&Op::product(of_k, matrix.t(), c_n));
        rig.run(&Op::product(of_n, matrix, c_k));
        rig.run(&Op::product(of_n.t(), of_k, gradient));
        assert_eq!(got[0][rows.start * n..rows.end * n], rig.get(c_n));
        assert_eq!(got[1][rows.start * k..rows.end * k], rig.get(c_k));
        assert_eq!(got[2][at], rig.get(gradient));
    }
}

#[test]
fn threads_change_no_bit() {
    // Even experts belong to a thread each, and all threads share a large expert.
    for offsets in [&[0, 80, 160, 240, 320, 400, 480, 560, 640][..], &[0, 3, 3, 600, 640]] {
        let operands = Operands::new(offsets, 120, 200);
        let want = operands.computed(Dtype::Bf16, 1, 0);
        for threads in [2, 3] {
            assert_eq!(operands.computed(Dtype::Bf16, threads, 0), want);
        }
    }
    let (tokens, experts, per_token, cols) = (900, 60, 4, 130);
    let logits = noise(1, tokens * experts);
    let run = |threads| {
        let [choices, weights] = route(threads, &logits, experts, per_token, true);
        let (mut rig, pairs) = (Rig::new(threads), tokens * per_token);
        let shape = (tokens, per_token);
        let chosen = rig.put(Dtype::I32, shape, &choices);
        let offsets = rig.out(Dtype::I32, (1, experts + 1));
        let (order, places) = (rig.out(Dtype::I32, (1, pairs)), rig.out(Dtype::I32, shape));
        let scratch = rig.out(Dtype::I32, (1, expert_sort_scratch(pairs, experts)));
        rig.run(&Op::SortByExpert { choices: chosen, offsets, order, places, scratch });
        let x = rig.put(Dtype::Bf16, (tokens, cols), &noise(2, tokens * cols));
        let (y, out) = (rig.out(Dtype::Bf16, (pairs, cols)), rig.out(Dtype::F32, (tokens, cols)));
        let t_weights = rig.put(Dtype::F32, shape, &weights);
        let d_weights = rig.out(Dtype::F32, shape);
        rig.run(&Op::GatherRows { x, order, y });
        rig.run(&Op::CombineExperts { y, places, weights: Some(t_weights), out });
        let (weights, d_y) = (t_weights, y);
        rig.run(&Op::CombineExpertsBackward { d_out: x, y, places, weights, d_y, d_weights });
        let t_logits = rig.put(Dtype::F32, (tokens, experts), &logits);
        let of_experts = rig.put(Dtype::F32, (1, experts), &noise(3, experts));
        let targets = rig.out(Dtype::I32, (1, tokens));
        let balance = Some(BalanceGradient { of_experts, targets });
        let (scoring, logits) = (ScoreRule::Softmax { normalize: false }, t_logits);
        rig.run(&Op::RouteBackward { logits, choices: chosen, d_weights, scoring, balance });
        [choices, rig.get(weights), rig.get(out), rig.get(y), rig.get(d_weights), rig.get(logits)]
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn indices_and_offsets_that_do_not_fit_are_errors() {
    let says = |rig: &mut Rig, op: &Op, part: &str| {
        let error = rig.try_run(op).expect_err("data that do not fit");
        assert!(error.contains(part), "{error}");
    };
    let mut rig = Rig::new(1);
    let (x, y) = (rig.out(Dtype::F32, (2, 3)), rig.out(Dtype::F32, (4, 3)));
    let order = rig.put_ints(&[0, 1, 4, 2]);
    says(&mut rig, &Op::GatherRows { x, order, y }, "4 is no index below 4");
    let (places, out) = (ints(&mut rig, (2, 2), &[0, 1, 2, -3]), rig.out(Dtype::F32, (2, 3)));
    says(&mut rig, &Op::CombineExperts { y, places, weights: None, out }, "-3 is no index");
    let (logits, load) = (rig.out(Dtype::F32, (2, 2)), rig.out(Dtype::F64, (1, 2)));
    let (offsets, four) = (rig.put_ints(&[0, 5, 4]), rig.put_ints(&[0, 1, 2, 3]));
    let (targets, shares) = (rig.put_ints(&[0, 1]), None);
    let op = Op::ExpertLoad { offsets, order: four, targets, logits, load, shares };
    says(&mut rig, &op, "do not divide 4 rows");
    let all = rig.out(Dtype::F32, (1, 2 * 15));
    let experts = ExpertWeights { all, shape: (5, 3), count: 2, stride: 15 };
    let c = Some(rig.out(Dtype::F32, (4, 5)));
    for wrong in [[0, 2, 3], [1, 2, 4], [0, 5, 4]] {
        let offsets = rig.put_ints(&wrong);
        let (form, a, b, add) = (GroupedForm::Forward, y, None, false);
        let op = Op::GroupedGemm { form, a, b, c, experts, offsets, add };
        says(&mut rig, &op, "do not divide 4 rows");
    }
}
