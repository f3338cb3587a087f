//! How a router scores the experts.

use super::check::one_of;
use crate::{Dtype, Tensor};

/// How a router's logits z (E) of a token become the choice and the weights of its k experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ScoreRule {
    /// p = softmax(z) are the weights. p grows with z, so z decides.
    Softmax {
        /// Whether the k weights are divided by their sum.
        normalize: bool,
    },
    /// s = sigmoid(z) are the weights, before a factor.
    Sigmoid(SigmoidRule),
}

/// Choice and weights from s = sigmoid(z) (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SigmoidRule {
    /// (E) F32: numbers that are added to s for the choice alone. They have no gradient.
    pub correction: Tensor,
    /// Number of groups of equally many neighbouring experts. The score of a group is the sum of its
    /// two largest corrected s.
    pub groups: usize,
    /// Number of groups with the largest scores, whose experts alone can be chosen.
    pub kept_groups: usize,
    /// Whether the k weights are divided by their sum plus 1e-20.
    pub normalize: bool,
    /// Factor of the weights.
    pub scale: f32,
}

/// Largest number of experts of a token.
pub const MOST_CHOICES: usize = 32;

/// Number that is added to the sum by which [`SigmoidRule`] divides, as in transformers.
pub(crate) const LEAST_SUM: f32 = 1e-20;

impl ScoreRule {
    /// Checks the choice of `per_token` of `experts` experts.
    pub(super) fn check(&self, per_token: usize, experts: usize) -> Result<(), String> {
        let Self::Sigmoid(SigmoidRule { correction, groups, kept_groups, .. }) = *self else {
            return Ok(());
        };
        one_of(correction, Dtype::F32, experts)?;
        if groups == 1 && kept_groups == 1 {
            return Ok(());
        }
        let size = experts / groups.max(1);
        let is_allowed = (1..=MOST_CHOICES).contains(&groups)
            && (1..=groups).contains(&kept_groups)
            && experts.is_multiple_of(groups)
            && size >= 2;
        if is_allowed && kept_groups * size >= per_token {
            return Ok(());
        }
        Err(format!(
            "{kept_groups} of {groups} groups of {experts} experts for {per_token} choices"
        ))
    }
}
