//! Arithmetic of ops.

use super::Op;

impl Op {
    /// Floating-point operations of the dense work (a multiply-add counts 2); small ops count 0.
    pub fn flops(&self) -> f64 {
        match self {
            Self::Gemm { a, b, .. } | Self::ScaledGemm { a, b, .. } => {
                2.0 * a.len() as f64 * b.shape().1 as f64
            }
            Self::GroupedGemm { a, experts, .. } => {
                2.0 * a.shape().0 as f64 * experts.matrix_len() as f64
            }
            // The forward pass has two matmuls of the visible pairs, and the backward pass has five.
            Self::Attention { out, heads, scores, .. } => {
                2.0 * out.len() as f64 * scores.flops_per_element(heads.seq_len)
            }
            Self::AttentionBackward { out, heads, scores, .. } => {
                5.0 * out.len() as f64 * scores.flops_per_element(heads.seq_len)
            }
            Self::DeltaRule { qkv, heads, .. } => heads.flops(qkv.shape().0),
            // The forward pass again, and two products for each of its products.
            Self::DeltaRuleBackward { qkv, heads, .. } => 3.0 * heads.flops(qkv.shape().0),
            Self::Host { task, .. } => task.flops(),
            Self::Task { task } => task.flops(),
            _ => 0.0,
        }
    }
}
