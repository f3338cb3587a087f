//! The network, as a config describes it.

use serde::Serialize;

/// The network: a pre-norm decoder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Folder of transformers, or its `config.json`: the shape, and where training starts.
    pub from: Option<String>,
    /// What training with `from` starts from.
    pub weights: Weights,
    /// Which parts.
    pub family: Family,
    /// L. 1..=10,000
    pub layers: usize,
    /// C. 1..=1,000,000
    pub hidden: usize,
    /// H; a multiple of tensor. 1..=65,536
    pub heads: usize,
    /// K: heads of keys and values; divides H, a multiple of tensor. 1..=65,536
    pub kv_heads: usize,
    /// D: elements of a head. 1..=65,536
    pub head_dim: usize,
    /// T. 1..=16,777,216
    pub seq_len: usize,
    /// V, unpadded. 2..=16,777,216, default 256 (bytes).
    pub vocab: usize,
    /// F; a multiple of tensor. 1..=4,000,000, default 4 C.
    pub ffn_hidden: usize,
    /// Probability of dropping, at the embedding, attention weights and both residual branches.
    /// [0, 1), default 0.
    pub dropout: f32,
    /// Standard deviation of the initial weights; residual projections divide by
    /// sqrt(2 L). [0, 10], default 0.02.
    pub init_std: f32,
    /// Added to the variance, or to the mean square, by norms. [0, 1]
    pub norm_eps: f32,
    /// Rotary positions; unused by a GPT-2.
    pub rope: RopeConfig,
    /// The output projection is the token table.
    pub tied: bool,
    /// The projections to q, k and v have biases.
    pub qkv_bias: bool,
    /// The projection back from the heads has a bias.
    pub proj_bias: bool,
    /// Each head of q and k is normed before it is rotated.
    pub qk_norm: bool,
}

/// Where parameters of a model of transformers start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Weights {
    /// As its folder has them.
    Pretrained,
    /// At random, in its shape.
    Random,
}

/// Families of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Family {
    /// Layer norm, learned positions, GELU (tanh form), biases, a tied embedding.
    Gpt2,
    /// RMSNorm, rotary positions, SwiGLU, heads of keys and values that are shared: Llama, Mistral, Qwen2, Qwen3.
    Llama,
}

/// Rotary positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f32,
    /// How frequencies are lowered for long contexts.
    pub scaling: RopeScaling,
}

/// How frequencies of rotary positions are lowered.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum RopeScaling {
    /// They are not.
    None,
    /// All by one factor.
    Linear {
        /// Divides every frequency.
        factor: f32,
    },
    /// As Llama 3.1 does.
    Llama3 {
        /// Divides low frequencies.
        factor: f32,
        /// Frequencies of fewer turns in `original_seq_len` tokens are low.
        low_freq_factor: f32,
        /// Frequencies of more turns are high, and stay.
        high_freq_factor: f32,
        /// Tokens of the contexts of the first training.
        original_seq_len: usize,
    },
}
