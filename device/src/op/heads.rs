//! Shapes of attention, and the norm of its heads.

use crate::Tensor;

/// Shape of an attention op. A row of `qkv` (B T, (H + 2 K) D) has H heads of q, then K heads of k
/// and K heads of v. Each run of H / K heads of queries shares a head of keys and values
/// (grouped-query attention, arXiv 2305.13245).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heads {
    /// H: number of this rank's heads of queries.
    pub count: usize,
    /// K: number of this rank's heads of keys and values. It divides `count`.
    pub kv_count: usize,
    /// Global number of this rank's first head.
    pub first: usize,
    /// Number of heads of queries of all ranks.
    pub total: usize,
    /// T: tokens per sample.
    pub seq_len: usize,
}

impl Heads {
    /// D: number of elements of a head, from the number of columns of `qkv`.
    pub const fn dim(&self, columns: usize) -> usize {
        columns / (self.count + 2 * self.kv_count)
    }

    /// Number of heads of queries that share a head of keys and values.
    pub const fn group(&self) -> usize {
        self.count / self.kv_count
    }
}

/// The norm of each head of q and k before the rotation (Qwen3): x / sqrt(mean(x^2) + `epsilon`)
/// gain.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HeadNorm {
    /// Gain of q (D).
    pub q_gain: Tensor,
    /// Gain of k (D).
    pub k_gain: Tensor,
    /// q and k before the norm (B T, (H + K) D).
    pub raw: Tensor,
    /// Constant that is added to the mean square.
    pub epsilon: f32,
}

/// Gradients of the gains of a [`HeadNorm`], (D) each, summed over this rank's heads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HeadNormGrads {
    /// Gradient of q's gain.
    pub q_gain: Tensor,
    /// Gradient of k's gain.
    pub k_gain: Tensor,
}
