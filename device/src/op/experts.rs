//! Mixture of experts: the weights of experts, and checks of the ops that route rows to experts.
//!
//! Of N tokens, each chooses k of E experts. The R = N k pairs of a token and a slot have numbers
//! token k + slot. Sorted by expert, they are the rows of the grouped matmuls: R is known to the
//! plan, and only the first row of each expert is data.

use super::check::{all_of, one_of, same};
use super::scoring::{MOST_CHOICES, ScoreRule};
use crate::{Dtype, Op, Tensor};

/// Largest number of experts.
pub const MOST_EXPERTS: usize = 1024;

/// Target of a row that no document holds: padding behind the documents of a sample. A target of
/// another negative number does not count in the loss, and its row belongs to a document.
pub const PADDING: i32 = -2;

/// Number of pairs in a block of a sort by expert.
const SORT_BLOCK: usize = 1024;

/// Least number of I32 elements of the scratch of [`Op::SortByExpert`]: a histogram over `experts`
/// for each 1024 of the `pairs`.
pub const fn expert_sort_scratch(pairs: usize, experts: usize) -> usize {
    pairs.div_ceil(SORT_BLOCK) * experts
}

/// Weight matrices of E experts at equal distances in one flat buffer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpertWeights {
    /// One row: all elements from the first matrix's first element to the last matrix's last element.
    pub all: Tensor,
    /// (rows, columns) of one matrix.
    pub shape: (usize, usize),
    /// E, number of matrices.
    pub count: usize,
    /// Elements from the start of one matrix to the start of the next.
    pub stride: usize,
}

/// A kind of [`Op::GroupedGemm`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GroupedForm {
    /// c = a W', the forward pass.
    Forward,
    /// c = a W, the gradient with respect to the input.
    InputGradient,
    /// W = a' b, the gradient with respect to the weights.
    WeightGradient,
}

/// Gradient of a balance loss with respect to the probabilities of a router.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BalanceGradient {
    /// (E) F32: of the probability of each expert, the same for all tokens of documents.
    pub of_experts: Tensor,
    /// (N) I32: the targets of the tokens. Those with [`PADDING`] have no gradient.
    pub targets: Tensor,
}

impl ExpertWeights {
    /// Elements of one matrix.
    pub(crate) const fn matrix_len(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    fn check(&self, offsets: Tensor) -> Result<(), String> {
        let Self { all, shape, count, stride } = *self;
        check_count(count)?;
        if stride < self.matrix_len() {
            return Err(format!("matrices {shape:?} of experts overlap at a distance of {stride}"));
        }
        all_of(&[
            value(all),
            same(all.shape().0, 1),
            same(all.len(), (count - 1) * stride + self.matrix_len()),
            one_of(offsets, Dtype::I32, count + 1),
        ])
    }
}

impl Op {
    /// y = x W' for the rows of each expert.
    pub const fn grouped_forward(
        weights: ExpertWeights,
        offsets: Tensor,
        x: Tensor,
        y: Tensor,
    ) -> Self {
        let (form, b, c) = (GroupedForm::Forward, None, Some(y));
        Self::GroupedGemm { form, a: x, b, c, experts: weights, offsets, add: false }
    }

    /// c = c + a W' (`Forward`) or c + a W (`InputGradient`) for the rows of each expert.
    pub const fn grouped_addition(
        form: GroupedForm,
        weights: ExpertWeights,
        offsets: Tensor,
        a: Tensor,
        c: Tensor,
    ) -> Self {
        Self::GroupedGemm { form, a, b: None, c: Some(c), experts: weights, offsets, add: true }
    }

    /// d_x = d_y W for the rows of each expert.
    pub const fn grouped_input_gradient(
        weights: ExpertWeights,
        offsets: Tensor,
        d_y: Tensor,
        d_x: Tensor,
    ) -> Self {
        let (form, b, c) = (GroupedForm::InputGradient, None, Some(d_x));
        Self::GroupedGemm { form, a: d_y, b, c, experts: weights, offsets, add: false }
    }

    /// W = d_y' x of the rows of each expert; `grads` replaces its contents.
    pub const fn grouped_weight_gradient(
        grads: ExpertWeights,
        offsets: Tensor,
        d_y: Tensor,
        x: Tensor,
    ) -> Self {
        let (form, b, c) = (GroupedForm::WeightGradient, Some(x), None);
        Self::GroupedGemm { form, a: d_y, b, c, experts: grads, offsets, add: false }
    }

    /// Checks an op of a mixture of experts.
    pub(super) fn check_experts(&self) -> Result<(), String> {
        match *self {
            Self::Route { logits, weights, choices, scoring } => all_of(&[
                check_choices(choices, logits.shape().1),
                scoring.check(choices.shape().1, logits.shape().1),
                shaped(logits, Dtype::F32, (choices.shape().0, logits.shape().1)),
                shaped(weights, Dtype::F32, choices.shape()),
            ]),
            Self::RouteBackward { scoring: ScoreRule::Sigmoid(_), balance: Some(_), .. } => {
                Err("a balance loss of scores by sigmoid".into())
            }
            Self::RouteBackward { logits, choices, d_weights, scoring, balance } => all_of(&[
                check_choices(choices, logits.shape().1),
                scoring.check(choices.shape().1, logits.shape().1),
                shaped(logits, Dtype::F32, (choices.shape().0, logits.shape().1)),
                shaped(d_weights, Dtype::F32, choices.shape()),
                balance.map_or(Ok(()), |BalanceGradient { of_experts, targets }| {
                    one_of(of_experts, Dtype::F32, logits.shape().1)
                        .and_then(|()| one_of(targets, Dtype::I32, logits.shape().0))
                }),
            ]),
            Self::SortByExpert { choices, offsets, order, places, scratch } => {
                let (pairs, experts) = (choices.len(), offsets.len().saturating_sub(1));
                let (least, has) = (expert_sort_scratch(pairs, experts), scratch.len());
                if has < least {
                    return Err(format!("scratch of {has} elements, and a sort needs {least}"));
                }
                all_of(&[
                    check_choices(choices, experts),
                    one_of(offsets, Dtype::I32, experts + 1),
                    one_of(order, Dtype::I32, pairs),
                    shaped(places, Dtype::I32, choices.shape()),
                    one_of(scratch, Dtype::I32, has),
                ])
            }
            Self::GatherRows { x, y, .. } if x.dtype() != y.dtype() => {
                Err(format!("rows of {:?} are gathered as {:?}", x.dtype(), y.dtype()))
            }
            Self::GatherRows { x, order, y } => {
                let (tokens, rows) = (x.shape().0, y.shape().0);
                if !rows.is_multiple_of(tokens) {
                    return Err(format!("{rows} rows of {tokens} tokens"));
                }
                all_of(&[value(x), same(x.shape().1, y.shape().1), one_of(order, Dtype::I32, rows)])
            }
            Self::GroupedGemm { .. } => self.check_grouped(),
            Self::AddExpertBiases { x: rows, biases, offsets }
            | Self::ExpertBiasesBackward { d_y: rows, offsets, d_biases: biases } => all_of(&[
                check_count(biases.shape().0),
                value(rows),
                value(biases),
                same(rows.shape().1, biases.shape().1),
                one_of(offsets, Dtype::I32, biases.shape().0 + 1),
            ]),
            Self::CombineExperts { y, places, weights, out } => all_of(&[
                check_places(places, y),
                weights.map_or(Ok(()), |t| shaped(t, Dtype::F32, places.shape())),
                value(y),
                value(out),
                same(out.shape().0, places.shape().0),
                same(out.shape().1, y.shape().1),
            ]),
            Self::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights } => {
                all_of(&[
                    check_places(places, y),
                    shaped(weights, Dtype::F32, places.shape()),
                    shaped(d_weights, Dtype::F32, places.shape()),
                    value(y),
                    value(d_out),
                    same(d_out.shape().0, places.shape().0),
                    same(d_out.shape().1, y.shape().1),
                    value(d_y),
                    same(d_y.shape().0, y.shape().0),
                    same(d_y.shape().1, y.shape().1),
                ])
            }
            Self::ExpertLoad { offsets, order, targets, logits, load, shares } => {
                let (tokens, experts) = logits.shape();
                let (most, rows) = (experts.min(MOST_CHOICES), order.len());
                if !rows.is_multiple_of(tokens) || rows / tokens.max(1) > most {
                    return Err(format!("{rows} rows of {tokens} tokens with {most} each at most"));
                }
                all_of(&[
                    check_count(experts),
                    shaped(logits, Dtype::F32, logits.shape()),
                    one_of(offsets, Dtype::I32, experts + 1),
                    one_of(order, Dtype::I32, rows),
                    one_of(targets, Dtype::I32, tokens),
                    one_of(load, Dtype::F64, experts),
                    shares.map_or(Ok(()), |t| one_of(t, Dtype::F64, experts)),
                ])
            }
            Self::BalanceLoss { counts, shares, value, grads, per_token, .. } => all_of(&[
                check_per_token(per_token, MOST_CHOICES),
                check_count(counts.shape().1),
                shaped(counts, Dtype::F64, counts.shape()),
                shaped(shares, Dtype::F64, counts.shape()),
                shaped(grads, Dtype::F32, counts.shape()),
                one_of(value, Dtype::F64, 1),
            ]),
            _ => Err(format!("{} is no op of experts", self.name())),
        }
    }

    fn check_grouped(&self) -> Result<(), String> {
        let Self::GroupedGemm { form, a, b, c, experts, offsets, add } = *self else {
            return Err(format!("{} is no grouped matmul", self.name()));
        };
        let (rows, (n, k)) = (a.shape().0, experts.shape);
        let mut operands = [Some(a), b, c].into_iter().flatten();
        let fits = experts.check(offsets).and_then(|()| operands.try_for_each(value));
        let sized = |t: Tensor, shape| shaped(t, t.dtype(), shape);
        match (form, b, c) {
            (GroupedForm::Forward, None, Some(c)) => {
                all_of(&[fits, sized(a, (rows, k)), sized(c, (rows, n))])
            }
            (GroupedForm::InputGradient, None, Some(c)) => {
                all_of(&[fits, sized(a, (rows, n)), sized(c, (rows, k))])
            }
            // The op writes the whole range, and has nothing to write between two matrices.
            (GroupedForm::WeightGradient, Some(_), None) if experts.stride != n * k => {
                Err(format!("gradients of {n} x {k} elements at a distance of {}", experts.stride))
            }
            (GroupedForm::WeightGradient, Some(b), None) => {
                all_of(&[fits, sized(a, (rows, n)), sized(b, (rows, k))])
            }
            _ => Err(format!("{form:?} with b: {b:?}, c: {c:?}, add: {add}")),
        }
    }
}

fn check_count(experts: usize) -> Result<(), String> {
    if experts == 0 || experts > MOST_EXPERTS {
        return Err(format!("{experts} experts, not 1 to {MOST_EXPERTS}"));
    }
    Ok(())
}

/// Checks k, the number of experts of a token.
fn check_per_token(per_token: usize, most: usize) -> Result<(), String> {
    if per_token == 0 || per_token > most {
        return Err(format!("{per_token} experts of a token, not 1 to {most}"));
    }
    Ok(())
}

/// Checks choices (N, k) I32 of `experts` experts.
fn check_choices(choices: Tensor, experts: usize) -> Result<(), String> {
    if i32::try_from(choices.len()).is_err() {
        return Err(format!("{} pairs of a token and an expert, beyond I32", choices.len()));
    }
    all_of(&[
        check_per_token(choices.shape().1, experts.min(MOST_CHOICES)),
        check_count(experts),
        shaped(choices, Dtype::I32, choices.shape()),
    ])
}

/// Checks the places (N, k) I32 of the rows of `y` (N k, C).
fn check_places(places: Tensor, y: Tensor) -> Result<(), String> {
    all_of(&[
        check_per_token(places.shape().1, MOST_CHOICES),
        one_of(places, Dtype::I32, y.shape().0),
    ])
}

fn shaped(t: Tensor, dtype: Dtype, shape: (usize, usize)) -> Result<(), String> {
    if (t.dtype(), t.shape()) == (dtype, shape) {
        Ok(())
    } else {
        Err(format!("{:?} {:?} where {dtype:?} {shape:?} belongs", t.dtype(), t.shape()))
    }
}

fn value(t: Tensor) -> Result<(), String> {
    if t.dtype().is_value() {
        Ok(())
    } else {
        Err(format!("{:?} where F16, Bf16 or F32 belongs", t.dtype()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Lane, Mode, Plan, SigmoidRule};

    fn tensor(dtype: Dtype, shape: (usize, usize)) -> Tensor {
        Plan::default().tensor((Arena::Device, "test"), "t", dtype, shape)
    }

    fn ints(shape: (usize, usize)) -> Tensor {
        tensor(Dtype::I32, shape)
    }

    fn floats(shape: (usize, usize)) -> Tensor {
        tensor(Dtype::F32, shape)
    }

    const SOFTMAX: ScoreRule = ScoreRule::Softmax { normalize: true };

    #[track_caller]
    fn says(op: &Op, part: &str) {
        let error = op.check(Lane::Compute).expect_err("the op does not fit");
        assert!(error.contains(part), "{error}");
    }

    #[track_caller]
    fn fits(op: &Op) {
        assert_eq!(op.check(Lane::Compute), Ok(()));
    }

    #[test]
    fn experts_and_choices_have_limits() {
        let of = |experts, per_token| Op::Route {
            logits: floats((3, experts)),
            weights: floats((3, per_token)),
            choices: ints((3, per_token)),
            scoring: SOFTMAX,
        };
        for (experts, per_token) in [(1, 1), (8, 8), (MOST_EXPERTS, MOST_CHOICES)] {
            fits(&of(experts, per_token));
        }
        says(&of(MOST_EXPERTS + 1, 2), "experts, not 1 to 1024");
        says(&of(64, MOST_CHOICES + 1), "not 1 to 32");
        says(&of(4, 5), "not 1 to 4");
        says(&of(4, 0), "not 1 to 4");
        let (logits, choices) = (floats((3, 8)), ints((3, 2)));
        let of = |d_weights, balance| Op::RouteBackward {
            logits,
            choices,
            d_weights,
            scoring: SOFTMAX,
            balance,
        };
        let balance = |experts, tokens| {
            let (of_experts, targets) = (floats((1, experts)), ints((1, tokens)));
            Some(BalanceGradient { of_experts, targets })
        };
        fits(&of(floats((3, 2)), balance(8, 3)));
        says(&of(floats((3, 3)), None), "(3, 2) belongs");
        says(&of(tensor(Dtype::Bf16, (3, 2)), None), "F32");
        says(&of(floats((3, 2)), balance(7, 3)), "sizes differ");
        says(&of(floats((3, 2)), balance(8, 4)), "sizes differ");
    }

    #[test]
    fn a_sort_has_a_row_for_each_pair_and_scratch_for_each_block() {
        let of = |order, places, scratch| Op::SortByExpert {
            choices: ints((700, 3)),
            offsets: ints((1, 9)),
            order: ints((1, order)),
            places: ints(places),
            scratch: ints((1, scratch)),
        };
        assert_eq!(expert_sort_scratch(2100, 8), 3 * 8);
        fits(&of(2100, (700, 3), 24));
        fits(&of(2100, (700, 3), 25));
        says(&of(2100, (700, 3), 23), "a sort needs 24");
        says(&of(2099, (700, 3), 24), "sizes differ");
        says(&of(2100, (3, 700), 24), "(700, 3) belongs");
        let gather = |rows, dtype| Op::GatherRows {
            x: tensor(dtype, (4, 6)),
            order: ints((1, rows)),
            y: floats((rows, 6)),
        };
        fits(&gather(12, Dtype::F32));
        says(&gather(11, Dtype::F32), "11 rows of 4 tokens");
        says(&gather(12, Dtype::Bf16), "gathered as F32");
    }

    #[test]
    fn groups_divide_the_experts_and_hold_the_choices() {
        let of = |[experts, per_token, groups, kept_groups]: [usize; 4], numbers| Op::Route {
            logits: floats((3, experts)),
            weights: floats((3, per_token)),
            choices: ints((3, per_token)),
            scoring: ScoreRule::Sigmoid(SigmoidRule {
                correction: floats((1, numbers)),
                groups,
                kept_groups,
                normalize: true,
                scale: 2.5,
            }),
        };
        for sizes in [[1, 1, 1, 1], [8, 2, 4, 1], [8, 8, 4, 4], [256, 8, 8, 4], [64, 2, 32, 1]] {
            fits(&of(sizes, sizes[0]));
        }
        for sizes in [
            [8, 2, 3, 1], // groups of different sizes
            [8, 2, 8, 2], // a group of one expert has no two scores
            [8, 3, 4, 1],
            [8, 2, 4, 0],
            [8, 2, 4, 5],
            [128, 2, 64, 4],
            [8, 2, 0, 0],
        ] {
            says(&of(sizes, sizes[0]), "groups of");
        }
        says(&of([8, 2, 1, 1], 7), "sizes differ");
        let mut op = of([8, 2, 1, 1], 8);
        if let Op::Route { logits, choices, scoring, .. } = op {
            let balance =
                Some(BalanceGradient { of_experts: floats((1, 8)), targets: ints((1, 3)) });
            let d_weights = floats((3, 2));
            op = Op::RouteBackward { logits, choices, d_weights, scoring, balance };
        }
        says(&op, "a balance loss of scores by sigmoid");
    }

    #[test]
    fn a_grouped_matmul_has_the_operands_of_its_form() {
        let (rows, n, k, count) = (10, 4, 6, 3);
        let weights = |stride: usize| ExpertWeights {
            all: floats((1, (count - 1) * stride + n * k)),
            shape: (n, k),
            count,
            stride,
        };
        let (wide, narrow) = (floats((rows, k)), floats((rows, n)));
        let of = |form, a, b, c, stride, add| Op::GroupedGemm {
            form,
            a,
            b,
            c,
            experts: weights(stride),
            offsets: ints((1, count + 1)),
            add,
        };
        let (forward, input) = (GroupedForm::Forward, GroupedForm::InputGradient);
        let weight = GroupedForm::WeightGradient;
        for stride in [n * k, n * k + 5] {
            for add in [false, true] {
                fits(&of(forward, wide, None, Some(narrow), stride, add));
                fits(&of(input, narrow, None, Some(wide), stride, add));
            }
        }
        fits(&of(weight, narrow, Some(wide), None, n * k, true));
        says(&of(weight, narrow, Some(wide), None, n * k + 5, false), "at a distance of 29");
        says(&of(forward, wide, None, Some(narrow), n * k - 1, false), "overlap");
        says(&of(forward, narrow, None, Some(narrow), n * k, false), "(10, 6) belongs");
        says(&of(input, narrow, None, Some(narrow), n * k, false), "(10, 6) belongs");
        says(&of(weight, narrow, Some(narrow), None, n * k, false), "(10, 6) belongs");
        says(&of(forward, wide, Some(wide), Some(narrow), n * k, false), "Forward with b");
        says(&of(input, narrow, Some(wide), Some(wide), n * k, true), "add: true");
        says(&of(weight, narrow, None, Some(wide), n * k, true), "WeightGradient with b");
        let mut none = of(forward, wide, None, Some(narrow), n * k, false);
        if let Op::GroupedGemm { experts, .. } = &mut none {
            experts.count = 0;
        }
        says(&none, "0 experts, not 1 to");
    }

    #[test]
    fn combinations_and_loads_have_a_number_for_each_pair_or_expert() {
        let (y, places) = (floats((12, 5)), ints((4, 3)));
        let of = |weights, out| Op::CombineExperts { y, places, weights, out };
        fits(&of(None, tensor(Dtype::Bf16, (4, 5))));
        fits(&of(Some(floats((4, 3))), floats((4, 5))));
        says(&of(Some(floats((4, 2))), floats((4, 5))), "(4, 3) belongs");
        says(&of(None, floats((3, 5))), "sizes differ");
        let of = |d_y, d_weights| Op::CombineExpertsBackward {
            d_out: floats((4, 5)),
            y,
            places,
            weights: floats((4, 3)),
            d_y,
            d_weights,
        };
        fits(&of(y, floats((4, 3))));
        says(&of(floats((12, 4)), floats((4, 3))), "sizes differ");
        says(&of(y, floats((1, 12))), "(4, 3) belongs");
        let of = |rows, tokens, load| Op::ExpertLoad {
            offsets: ints((1, 9)),
            order: ints((1, rows)),
            targets: ints((1, tokens)),
            logits: floats((4, 8)),
            load,
            shares: None,
        };
        let load = tensor(Dtype::F64, (1, 8));
        fits(&of(12, 4, load));
        says(&of(12, 4, floats((1, 8))), "F64");
        says(&of(13, 4, load), "13 rows of 4 tokens");
        says(&of(36, 4, load), "36 rows of 4 tokens");
        says(&of(12, 3, load), "sizes differ");
        let sums = |rows| tensor(Dtype::F64, (rows, 8));
        let of = |shares, grads, per_token| Op::BalanceLoss {
            counts: sums(3),
            shares,
            value: tensor(Dtype::F64, (1, 1)),
            grads,
            per_token,
            scale: 8.0,
            factor: 0.5,
        };
        fits(&of(sums(3), floats((3, 8)), 2));
        says(&of(sums(2), floats((3, 8)), 2), "(3, 8) belongs");
        says(&of(sums(3), sums(3), 2), "F32");
        says(&of(sums(3), floats((3, 8)), 0), "not 1 to 32");
    }

    #[test]
    fn a_grouped_matmul_counts_its_rows_and_replaces_or_updates_its_result() {
        let experts = ExpertWeights { all: floats((1, 48)), shape: (4, 6), count: 2, stride: 24 };
        let (a, b, c) = (floats((10, 4)), Some(floats((10, 6))), None);
        let (form, offsets) = (GroupedForm::WeightGradient, ints((1, 3)));
        for (add, mode) in [(false, Mode::Write), (true, Mode::Update)] {
            let op = Op::GroupedGemm { form, a, b, c, experts, offsets, add };
            assert_eq!(op.flops(), 2.0 * 10.0 * 24.0);
            let mut written = Vec::new();
            op.accesses(&mut |mode, t| {
                written.extend((mode != Mode::Read).then_some((mode, t.len())));
            });
            assert_eq!(written, [(mode, 48)]);
            let (form, a, c) = (GroupedForm::Forward, floats((10, 6)), Some(floats((10, 4))));
            let op = Op::GroupedGemm { form, a, b: None, c, experts, offsets, add };
            let mut modes = Vec::new();
            op.accesses(&mut |mode, t| modes.extend((Some(t) == c).then_some(mode)));
            assert_eq!(modes, [mode]);
        }
    }
}
