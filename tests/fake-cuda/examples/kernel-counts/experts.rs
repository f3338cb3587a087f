//! The ops of a mixture of experts at the shapes of models, with the same number of rows for each expert.

use crate::{Case, OpMaker, Tensors};
use device::{Dtype, ExpertWeights, GroupedForm, Op, ScoreRule, expert_sort_scratch};

/// Sizes of the experts of a layer.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct ExpertSizes {
    pub(crate) hidden: usize,
    /// Inner size of an expert.
    pub(crate) ffn: usize,
    pub(crate) count: usize,
    pub(crate) per_token: usize,
}

/// A permutation of the first `n` numbers, in which neighbours are far apart. `n`: a power of two.
fn permuted(n: usize) -> Vec<i32> {
    assert!(n.is_power_of_two(), "an odd step visits all of a power of two, not of {n}");
    (0..n).map(|i| (i * ((n / 3) | 1) % n) as i32).collect()
}

impl ExpertSizes {
    /// Cases of a micro-batch of `tokens` tokens.
    pub(crate) fn cases(self, value: Dtype, tokens: usize) -> Vec<Case> {
        let Self { hidden, ffn, count, per_token } = self;
        let (gate_up, down) = ((2 * ffn, hidden), (hidden, ffn));
        let forward = GroupedForm::Forward;
        let mut cases = vec![
            self.grouped("grouped gate and up", forward, value, tokens, gate_up),
            self.grouped("grouped down", forward, value, tokens, down),
            self.grouped("grouped input", GroupedForm::InputGradient, value, tokens, gate_up),
            self.grouped("grouped weight", GroupedForm::WeightGradient, value, tokens, gate_up),
        ];
        let mut rows = |name, part, make: OpMaker| {
            cases.push(Case { name, make, whole: tokens, part, times: 1.0 });
        };
        let route = move |t: &mut Tensors, tokens| {
            let logits = t.make(Dtype::F32, (tokens, count));
            let weights = t.make(Dtype::F32, (tokens, per_token));
            let choices = t.make(Dtype::I32, (tokens, per_token));
            Op::Route { logits, weights, choices, scoring: ScoreRule::Softmax { normalize: true } }
        };
        rows("route", 32, Box::new(route));
        let sort = move |t: &mut Tensors, tokens| {
            let (shape, pairs) = ((tokens, per_token), tokens * per_token);
            let choices = (0..pairs).map(|pair| (pair * 7 % count) as i32).collect();
            Op::SortByExpert {
                choices: t.integers(shape, choices),
                offsets: t.make(Dtype::I32, (1, count + 1)),
                order: t.make(Dtype::I32, (1, pairs)),
                places: t.make(Dtype::I32, shape),
                scratch: t.make(Dtype::I32, (1, expert_sort_scratch(pairs, count))),
            }
        };
        rows("sort_by_expert", tokens, Box::new(sort));
        let gather = move |t: &mut Tensors, tokens| {
            let rows = tokens * per_token;
            let (x, y) = (t.make(value, (tokens, hidden)), t.make(value, (rows, hidden)));
            Op::GatherRows { x, order: t.integers((1, rows), permuted(rows)), y }
        };
        rows("gather_rows", 16, Box::new(gather));
        for backward in [false, true] {
            let make = move |t: &mut Tensors, tokens| {
                let (shape, rows) = ((tokens, per_token), tokens * per_token);
                let y = t.make(value, (rows, hidden));
                let places = t.integers(shape, permuted(rows));
                let weights = t.make(Dtype::F32, shape);
                let out = t.make(value, (tokens, hidden));
                if !backward {
                    return Op::CombineExperts { y, places, weights: Some(weights), out };
                }
                let (d_y, d_weights) = (t.make(value, (rows, hidden)), t.make(Dtype::F32, shape));
                let d_out = out;
                Op::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights }
            };
            let name = if backward { "combine_experts_backward" } else { "combine_experts" };
            rows(name, 16, Box::new(make));
        }
        cases
    }

    /// A grouped matmul with matrices of `shape`. The part that runs is one expert.
    fn grouped(
        self,
        name: &'static str,
        form: GroupedForm,
        value: Dtype,
        tokens: usize,
        shape: (usize, usize),
    ) -> Case {
        let (n, k) = shape;
        let each = tokens * self.per_token / self.count;
        let make = move |t: &mut Tensors, count: usize| {
            let rows = each * count;
            let offsets = (0..=count).map(|expert| (each * expert) as i32).collect();
            let offsets = t.integers((1, count + 1), offsets);
            let all = t.make(value, (1, count * n * k));
            let [of_n, of_k] = [n, k].map(|cols| t.make(value, (rows, cols)));
            let (a, b, c) = match form {
                GroupedForm::Forward => (of_k, None, Some(of_n)),
                GroupedForm::InputGradient => (of_n, None, Some(of_k)),
                GroupedForm::WeightGradient => (of_n, Some(of_k), None),
            };
            let experts = ExpertWeights { all, shape: (n, k), count, stride: n * k };
            Op::GroupedGemm { form, a, b, c, experts, offsets, add: false }
        };
        Case { name, make: Box::new(make), whole: self.count, part: 1, times: 1.0 }
    }
}
