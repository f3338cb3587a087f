//! Bounds on the difference between the results of an op on two devices that have the same inputs.
//!
//! Both devices compute in fp32 and round once to the type of the result. Three effects remain:
//!
//! - **Rounding.** Two nearly equal fp32 numbers may be rounded to neighbours, one spacing apart:
//!   2^-23 of the number in F32, 2^-10 in F16, 2^-7 in Bf16, 2^-3 in E4m3, 2^-2 in E5m2. An
//!   intermediate result in a storage type adds its spacing, relative to the largest result.
//! - **Order of sums.** The rounding errors of a sum of n products in fp32 are random, so they grow
//!   with the square root of n: 8 sqrt(n) 2^-24 of a typical sum. Tensor cores cut off instead of
//!   rounding, and these errors have one sign: n 2^-24. For fp8 they keep about 13 bits of the
//!   largest of 32 products, and lose half a unit of them: n/32 2^-14.
//! - **Functions.** Exponentials, roots and logarithms differ by a few units: 2^-20.
//!
//! A wrong tile, a forgotten term or TF32 in place of fp32 changes results by more.

use super::{Family, GroupedForm, Op, Product, Reduction};
use crate::{Dtype, Epilogue, Tensor};

/// Relative error of functions and of short sums in fp32.
const FUNCTIONS: f64 = 1.0 / 1_048_576.0;

/// A bound on the difference of an element: `of_each` times its magnitude, plus `of_largest` times
/// the largest magnitude in its tensor, plus `floor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tolerance {
    of_each: f64,
    of_largest: f64,
    floor: f64,
}

impl Tolerance {
    /// Only equal elements.
    const EXACT: Self = Self { of_each: 0.0, of_largest: 0.0, floor: 0.0 };

    /// Any elements, for scratch: no op reads its contents.
    const ANY: Self = Self { of_each: 0.0, of_largest: 0.0, floor: f64::INFINITY };

    /// Results of functions of single elements.
    fn elementwise(dtype: Dtype) -> Self {
        Self { of_each: 2.0 * spacing(dtype), of_largest: FUNCTIONS, floor: smallest(dtype) }
    }

    /// Results with an error of `sums` in fp32, and with `stored` intermediate results in the
    /// storage type.
    fn sum(dtype: Dtype, sums: f64, stored: f64) -> Self {
        let spacing = spacing(dtype);
        Self {
            of_each: spacing,
            of_largest: FUNCTIONS + sums + stored * spacing,
            floor: smallest(dtype),
        }
    }

    /// The largest difference from an element `expected` of a tensor with the magnitude `largest`.
    pub(crate) fn limit(self, expected: f64, largest: f64) -> f64 {
        self.of_each * expected.abs() + self.of_largest * largest + self.floor
    }
}

/// Distance of neighbouring numbers of a type, relative to a number.
const fn spacing(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 1.0 / 1024.0,
        Dtype::Bf16 => 1.0 / 128.0,
        Dtype::F32 => 1.0 / 8_388_608.0,
        // Such sums are of fp32 numbers.
        Dtype::F64 => FUNCTIONS,
        Dtype::I32 | Dtype::U16 => 0.0,
        Dtype::E4m3 => 1.0 / 8.0,
        Dtype::E5m2 => 1.0 / 4.0,
    }
}

/// Distance of the smallest numbers of a type.
const fn smallest(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 1.0 / 16_777_216.0,
        Dtype::E4m3 => 1.0 / 512.0,
        Dtype::E5m2 => 1.0 / 65_536.0,
        // A device may replace smaller numbers by 0.
        Dtype::Bf16 | Dtype::F32 => 1.175_494_350_822_287_5e-38,
        Dtype::F64 | Dtype::I32 | Dtype::U16 => 0.0,
    }
}

/// Error of a sum of `terms` fp32 numbers in any order, relative to a typical sum.
fn fp32_sum(terms: usize) -> f64 {
    8.0 * (terms as f64).sqrt() / 16_777_216.0
}

/// Error of a sum of `terms` products of `operand`s.
fn sum_of_products(operand: Dtype, terms: usize) -> f64 {
    match operand {
        Dtype::E4m3 | Dtype::E5m2 => terms as f64 / 524_288.0,
        Dtype::F16 | Dtype::Bf16 => fp32_sum(terms).max(terms as f64 / 16_777_216.0),
        Dtype::F32 | Dtype::F64 | Dtype::I32 | Dtype::U16 => fp32_sum(terms),
    }
}

impl Op {
    /// The bound for `t`, which the op writes. `ranks`: number of ranks of a collective's group.
    pub(crate) fn tolerance(&self, t: Tensor, ranks: usize) -> Tolerance {
        let dtype = t.dtype();
        match self.family() {
            Family::Product => match Product::of(self) {
                Some(product) => product.tolerance(dtype),
                None => Tolerance::EXACT,
            },
            Family::Transfer => match self {
                Self::AllReduce { reduce: Reduction::Sum, .. } | Self::ReduceScatter { .. } => {
                    // A library may round at each rank.
                    Tolerance::sum(dtype, fp32_sum(ranks), ranks as f64)
                }
                _ => Tolerance::EXACT,
            },
            Family::Norm | Family::Squares => Tolerance::sum(dtype, fp32_sum(self.terms()), 1.0),
            Family::Rotary => Tolerance::sum(dtype, fp32_sum(self.terms()), 2.0),
            Family::Attention | Family::Cache => self.tolerance_of_attention(dtype),
            Family::Embedding => match self {
                Self::Embedding { scale, .. } if *scale == 1.0 => Tolerance::EXACT,
                Self::Embedding { .. } => Tolerance::elementwise(dtype),
                Self::AddPositions { .. } => Tolerance::elementwise(dtype),
                _ => Tolerance::sum(dtype, fp32_sum(self.terms()), 1.0),
            },
            Family::Loss => match self {
                Self::RowMax { .. } => Tolerance::EXACT,
                Self::CrossEntropyBackward { .. } => Tolerance::elementwise(dtype),
                _ => Tolerance::sum(dtype, fp32_sum(self.terms()), 1.0),
            },
            Family::Experts => self.tolerance_of_experts(t),
            Family::Delta => self.tolerance_of_delta(dtype),
            Family::Elementwise => match self {
                Self::Zero { .. } => Tolerance::EXACT,
                Self::ColumnSum { .. } => Tolerance::sum(dtype, fp32_sum(self.terms()), 1.0),
                _ => Tolerance::elementwise(dtype),
            },
            Family::Fp8 => match self {
                Self::Maxima { .. } => Tolerance::EXACT,
                _ => Tolerance::elementwise(dtype),
            },
            Family::Task => Tolerance::EXACT,
        }
    }

    /// Weights of 16 bits are rounded before they are multiplied, and so are their gradients.
    fn tolerance_of_attention(&self, dtype: Dtype) -> Tolerance {
        let (operand, terms, stored) = match self {
            Self::Attention { qkv, heads, .. } => {
                (qkv.dtype(), heads.seq_len + heads.dim(qkv.shape().1), 2.0)
            }
            Self::AttentionBackward { qkv, heads, .. } => {
                // Heads of queries that share a head of keys add their gradients.
                let terms = heads.group() * heads.seq_len + heads.dim(qkv.shape().1);
                (qkv.dtype(), terms, 4.0)
            }
            Self::AttentionSinks { .. } => return Tolerance::elementwise(dtype),
            Self::AttentionSinksBackward { out, .. } => (Dtype::F32, out.len(), 0.0),
            _ => return Tolerance::EXACT,
        };
        Tolerance::sum(dtype, sum_of_products(operand, terms), stored)
    }

    /// The bound for `t`, which an op of a mixture of experts writes. Rows of an expert are data, so a
    /// weight's gradient may be a sum of all rows.
    fn tolerance_of_experts(&self, t: Tensor) -> Tolerance {
        let dtype = t.dtype();
        match *self {
            Self::SortByExpert { scratch, .. } if scratch == t => Tolerance::ANY,
            Self::Route { weights, .. } if weights == t => {
                Tolerance::sum(dtype, fp32_sum(self.terms()), 0.0)
            }
            Self::RouteBackward { .. } => Tolerance::sum(dtype, fp32_sum(self.terms()), 0.0),
            Self::GroupedGemm { form, a, experts, add, .. } => {
                let terms = match form {
                    GroupedForm::Forward => experts.shape.1,
                    GroupedForm::InputGradient => experts.shape.0,
                    GroupedForm::WeightGradient => a.shape().0,
                };
                let stored = f64::from(u8::from(add));
                Tolerance::sum(dtype, sum_of_products(a.dtype(), terms), stored)
            }
            Self::AddExpertBiases { .. } => Tolerance::elementwise(dtype),
            Self::ExpertBiasesBackward { d_y, .. } => {
                Tolerance::sum(dtype, fp32_sum(d_y.shape().0), 0.0)
            }
            Self::CombineExperts { places, .. } => {
                Tolerance::sum(dtype, fp32_sum(places.shape().1), 0.0)
            }
            Self::CombineExpertsBackward { d_out, d_weights, .. } if d_weights == t => {
                Tolerance::sum(dtype, fp32_sum(d_out.shape().1), 0.0)
            }
            Self::CombineExpertsBackward { .. } => Tolerance::elementwise(dtype),
            Self::ExpertLoad { shares: Some(shares), .. } if shares == t => {
                Tolerance::sum(dtype, fp32_sum(self.terms()), 0.0)
            }
            Self::BalanceLoss { grads, .. } if grads == t => Tolerance::elementwise(dtype),
            Self::BalanceLoss { .. } => Tolerance::sum(dtype, fp32_sum(self.terms()), 0.0),
            // Choices, rows, copies and counts.
            _ => Tolerance::EXACT,
        }
    }

    /// In the gated delta rule each row adds to sums of the rows before, in all chunks of a document.
    fn tolerance_of_delta(&self, dtype: Dtype) -> Tolerance {
        match self {
            Self::DeltaRule { qkv, heads, .. } | Self::DeltaRuleBackward { qkv, heads, .. } => {
                let terms = heads.seq_len + heads.key_dim.max(heads.value_dim);
                // On tensor cores a factor is the sum of two bf16 numbers, 16 binary digits.
                let factors = if qkv.dtype() == Dtype::Bf16 { 2f64.powi(-14) } else { 0.0 };
                Tolerance::sum(dtype, 4.0 * fp32_sum(terms) + factors, 0.0)
            }
            Self::SigmoidGate { .. } | Self::SigmoidGateBackward { .. } => {
                Tolerance::elementwise(dtype)
            }
            _ => Tolerance::sum(dtype, fp32_sum(self.terms()), 0.0),
        }
    }

    /// Number of terms of the longest sum: rows or columns of the largest operand.
    fn terms(&self) -> usize {
        let mut most = 1;
        self.accesses(&mut |_, t| {
            let (rows, columns) = t.shape();
            // A flat tensor has no rows to sum.
            most = most.max(if rows > 1 { rows.max(columns) } else { 1 });
        });
        most
    }
}

impl Product {
    /// The bound for a result of `dtype`. A library may round the product before it adds a bias or
    /// the old result, and before it computes the epilogue.
    fn tolerance(&self, dtype: Dtype) -> Tolerance {
        let terms = self.a.shape().1;
        let more = [self.add, self.bias.is_some(), self.epilogue != Epilogue::None];
        let stored = more.into_iter().filter(|has| *has).count();
        Tolerance::sum(dtype, sum_of_products(self.a.dtype(), terms), stored as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Heads, Plan, ScoreRule};

    fn tensors<const N: usize>(dtype: Dtype, shapes: [(usize, usize); N]) -> [Tensor; N] {
        let mut plan = Plan::default();
        shapes.map(|shape| plan.tensor((Arena::Device, "test"), "t", dtype, shape))
    }

    /// Relative to a typical result: the largest of many results is about five times as large.
    fn limit_of_product(dtype: Dtype, terms: usize) -> f64 {
        let [a, b, c] = tensors(dtype, [(8, terms), (terms, 8), (8, 8)]);
        Op::product(a, b, c).tolerance(c, 1).limit(1.0, 5.0)
    }

    #[test]
    fn a_product_in_fp32_is_no_product_in_tf32() {
        // TF32 rounds each factor to 11 bits: 2^-12 / sqrt(3) each, at random.
        let of_tf32 = (2.0f64 / 3.0).sqrt() / 4096.0;
        for terms in [32, 1024, 14_336] {
            let limit = limit_of_product(Dtype::F32, terms);
            assert!(limit > 1e-6 && limit < 3.0 * of_tf32, "{terms}: {limit:e}");
        }
    }

    #[test]
    fn a_product_that_forgets_a_slab_is_beyond_the_bound() {
        for (dtype, slab) in [(Dtype::Bf16, 8), (Dtype::F16, 8), (Dtype::E4m3, 32)] {
            for terms in [64usize, 4096, 14_336] {
                let forgotten = (slab as f64 / terms as f64).sqrt();
                let [a, b] = tensors(dtype, [(16, terms), (terms, 16)]);
                let [c, scale] = tensors(Dtype::Bf16, [(16, 16), (1, 1)]);
                let op = match dtype {
                    Dtype::E4m3 => Op::ScaledGemm { a, b, c, bias: None, scales: [scale, scale] },
                    _ => Op::product(a, b, c),
                };
                // An element near 0 has no rounding of its own. The largest of many errors is about
                // five times as large as a typical one.
                let limit = op.tolerance(c, 1).limit(0.0, 5.0);
                assert!(limit < 5.0 * forgotten, "{dtype:?} {terms}: {limit:e} {forgotten:e}");
            }
        }
    }

    #[test]
    fn a_rounded_result_may_be_its_neighbour() {
        for (dtype, spacing) in [(Dtype::Bf16, 2.0f64.powi(-7)), (Dtype::F16, 2.0f64.powi(-10))] {
            let limit = limit_of_product(dtype, 4096);
            assert!(limit >= spacing && limit < 2.5 * spacing, "{dtype:?}: {limit:e}");
        }
    }

    #[test]
    fn copies_and_maxima_have_the_same_bits_and_weights_of_attention_are_rounded() {
        let [x, y, d_out, d_qkv] = tensors(Dtype::Bf16, [(64, 96), (64, 32), (64, 32), (64, 96)]);
        let [lse] = tensors(Dtype::F32, [(2, 64)]);
        let heads = Heads { count: 2, kv_count: 2, first: 0, total: 2, seq_len: 64 };
        assert_eq!(Op::Copy { src: x, dst: d_qkv }.tolerance(d_qkv, 1), Tolerance::EXACT);
        assert_eq!(Op::Maxima { x, maxima: lse }.tolerance(lse, 1), Tolerance::EXACT);
        let dropout = crate::Dropout::NONE;
        let scores = crate::Scores::of(16);
        let forward = Op::Attention { qkv: x, out: y, lse, heads, starts: None, dropout, scores };
        let (qkv, out, starts) = (x, y, None);
        let backward =
            Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores };
        let (spacing, large) = (2.0f64.powi(-7), 1.0);
        let limits = [forward.tolerance(y, 1), backward.tolerance(d_qkv, 1)];
        let [forward_limit, backward_limit] = limits.map(|limit| limit.limit(0.0, large));
        assert!(forward_limit > 2.0 * spacing && forward_limit < 2.1 * spacing, "{forward_limit}");
        assert!(backward_limit > 4.0 * spacing && backward_limit < 4.1 * spacing);
        // Logarithms of sums stay in fp32.
        assert!(forward.tolerance(lse, 1).limit(0.0, large) < 1e-4);
    }

    #[test]
    fn choices_and_rows_of_experts_have_the_same_bits_and_their_scratch_has_any() {
        let [choices, places] = tensors(Dtype::I32, [(4, 2), (4, 2)]);
        let [offsets, order, scratch] = tensors(Dtype::I32, [(1, 6), (1, 8), (1, 5)]);
        let [logits, weights] = tensors(Dtype::F32, [(4, 5), (4, 2)]);
        let sort = Op::SortByExpert { choices, offsets, order, places, scratch };
        for t in [offsets, order] {
            assert_eq!(sort.tolerance(t, 1), Tolerance::EXACT);
        }
        assert_eq!(sort.tolerance(scratch, 1).limit(0.0, 1.0), f64::INFINITY);
        let scoring = ScoreRule::Softmax { normalize: true };
        let route = Op::Route { logits, weights, choices, scoring };
        assert_eq!(route.tolerance(choices, 1), Tolerance::EXACT);
        let limit = route.tolerance(weights, 1).limit(1.0, 1.0);
        assert!(limit > 1e-7 && limit < 1e-5, "{limit:e}");
    }
}
