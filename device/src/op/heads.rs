//! Heads of attention: their shape, their norms, and how scores weigh keys.

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

    /// d: number of elements of a head that turn, from a table (T, d) of cosines and sines.
    pub(crate) const fn turned(&self, table: Tensor) -> usize {
        table.len() / self.seq_len
    }

    /// Number of heads of queries that share a head of keys and values.
    pub const fn group(&self) -> usize {
        self.count / self.kv_count
    }
}

/// The norm of each head of q and k before the rotation (Qwen3): x / sqrt(mean(x^2) + `epsilon`)
/// (gain + `offset`).
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
    /// Constant that is added to the gains: 0, or 1 if they are stored as differences from 1.
    pub offset: f32,
}

/// Gradients of the gains of a [`HeadNorm`], (D) each, summed over this rank's heads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HeadNormGrads {
    /// Gradient of q's gain.
    pub q_gain: Tensor,
    /// Gradient of k's gain.
    pub k_gain: Tensor,
}

/// How attention weighs the keys that a query sees.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scores {
    /// Factor of q k', greater than 0; usually 1 / sqrt(D).
    pub scale: f32,
    /// c, greater than 0: a score s becomes c tanh(s / c) before the softmax. `None`: no cap.
    pub cap: Option<f32>,
    /// W, at least 1: number of keys that a query sees, its own key among them. Query i sees the keys
    /// i - W + 1 to i of its document. `None`: all keys of its document up to its own.
    pub window: Option<usize>,
}

impl Scores {
    /// Scores of heads with `dim` elements: scale 1 / sqrt(dim), no cap, no window.
    pub fn of(dim: usize) -> Self {
        Self { scale: 1.0 / (dim as f32).sqrt(), cap: None, window: None }
    }

    /// The window, if it is shorter than a sample of `seq_len` tokens.
    pub fn window_in(&self, seq_len: usize) -> Option<usize> {
        self.window.filter(|window| *window < seq_len)
    }

    /// Number of pairs of a query and a key that it sees, in a sample of `seq_len` tokens of one
    /// document. Without a window in the sample it is half of the square.
    pub fn pairs(&self, seq_len: usize) -> f64 {
        let tokens = seq_len as f64;
        match self.window_in(seq_len).map(|window| window as f64) {
            Some(window) => window * (window + 1.0) / 2.0 + (tokens - window) * window,
            None => tokens * tokens / 2.0,
        }
    }

    /// FLOPs of a matmul of scores for each element of q, in a sample of `seq_len` tokens: 2 for each
    /// key that a query sees on average.
    pub(crate) fn flops_per_element(&self, seq_len: usize) -> f64 {
        match self.window_in(seq_len) {
            Some(_) => 2.0 * self.pairs(seq_len) / seq_len as f64,
            None => seq_len as f64,
        }
    }
}

/// The norm of q and of k over the columns of all heads (OLMo 2): x / sqrt(sums / widths + epsilon)
/// gain.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WidthNorm {
    /// This rank's heads.
    pub heads: Heads,
    /// Gains (1, (H + K) D) of q's columns, then of k's.
    pub gain: Tensor,
    /// Sums of squares (B T, 2) F32 of q's and of k's columns of all ranks.
    pub sums: Tensor,
    /// Number of q's and of k's columns of all ranks; columns that several ranks hold count on each.
    pub widths: [f32; 2],
    /// Constant that is added to the mean square.
    pub epsilon: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_key_by_key_in_a_window_and_as_half_of_the_square_without() {
        let count = |window: usize| (0..300).map(|query| window.min(query + 1)).sum::<usize>();
        for window in [1, 2, 77, 299] {
            let scores = Scores { window: Some(window), ..Scores::of(64) };
            assert_eq!(scores.pairs(300), count(window) as f64);
            assert_eq!(scores.flops_per_element(300), 2.0 * count(window) as f64 / 300.0);
        }
        for window in [None, Some(300), Some(1000)] {
            let scores = Scores { window, ..Scores::of(64) };
            assert_eq!((scores.window_in(300), scores.pairs(300)), (None, 45_000.0));
            assert_eq!(scores.flops_per_element(300), 300.0);
        }
    }
}
