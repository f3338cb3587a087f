//! Sizes of gated delta nets, a linear attention with a state for each head (arXiv 2412.06464).

use device::DeltaHeads;

/// Sizes of the gated delta net of a layer, of all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeltaShape {
    /// Number of heads of queries and keys; a multiple of the tensor-parallel ranks.
    pub key_heads: usize,
    /// Number of heads of values; a multiple of `key_heads`. Consecutive ones share a head of keys.
    pub value_heads: usize,
    /// Elements of a query and of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Weights of each channel of the convolution.
    pub taps: usize,
}

impl DeltaShape {
    /// Elements of all heads of queries, and of all heads of keys.
    pub const fn keys_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of all heads of values.
    pub const fn values_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// The heads of one of `ranks` ranks, in samples of `seq_len` tokens.
    pub const fn heads(&self, ranks: usize, seq_len: usize) -> DeltaHeads {
        DeltaHeads {
            keys: self.key_heads / ranks,
            values: self.value_heads / ranks,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            seq_len,
        }
    }

    /// Parameters of the linears of a layer with `hidden` channels.
    pub(crate) const fn linears(&self, hidden: usize) -> usize {
        hidden * (2 * self.keys_width() + 3 * self.values_width() + 2 * self.value_heads)
    }
}
