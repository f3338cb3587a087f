//! Keys of the network.

use super::declare::{choice, section};
use super::reading::{Interval, KeyDefault, Section};
use serde::Serialize;

section! {
    /// The network: a pre-norm decoder.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ModelConfig, read(s, in_folder: impl FnOnce(&mut Section<'_, '_>, Option<&str>) -> Option<ModelConfig>) {
        /// Folder of a transformers model (Llama, Mistral, Qwen2, Qwen3, GPT-2), its config.json, or
        /// the name of a model in the Hugging Face cache, such as `Qwen/Qwen3-8B`, or with a branch,
        /// tag or commit `Qwen/Qwen3-8B@main`. onebox downloads nothing. The folder decides the keys of `model` except `model.dropout` and
        /// `model.init_std`, and training starts from its weights unless `model.weights` is
        /// `Random`. Other keys of `model` must not contradict the folder, but `model.seq_len` may
        /// be smaller. None: there is no folder.
        from: Option<String> = model_path(KeyDefault::Default(None)), resume: Harmless;
        /// Initial weights of a run with `model.from`. `Pretrained`: the folder's weights.
        /// `Random`: random weights in the folder's shape.
        weights: Weights = choice(KeyDefault::Default(Weights::Pretrained)), resume: Harmless;

        let folder = in_folder(s, from.as_deref());
        let of = folder.as_ref();
        /// Parts of the network. `Gpt2`: layer norm, learned positions, GELU (tanh form), biases, a
        /// tied embedding. `Llama` (also Mistral, Qwen2, Qwen3): RMSNorm, rotary positions, SwiGLU,
        /// shared heads of keys and values.
        family: Family = choice(KeyDefault::Default(Family::Gpt2).unless(of.map(|m| m.family))), resume: Experiment;

        let gpt2 = family == Family::Gpt2;
        /// Number of blocks. With `model.from` the folder gives this number.
        layers: usize = uint(1..=10_000, KeyDefault::Required("layers: 12").unless(of.map(|m| m.layers))), resume: Experiment;
        /// Width of the residual stream. With `model.from` the folder gives this number.
        hidden: usize = uint(1..=1_000_000, KeyDefault::Required("hidden: 768").unless(of.map(|m| m.hidden))), resume: Experiment;
        /// Number of attention heads; a multiple of `parallel.tensor`. With `model.from` the folder
        /// gives this number.
        heads: usize = uint(1..=65_536, KeyDefault::Required("heads: 12").unless(of.map(|m| m.heads))), resume: Experiment;

        let one_each = KeyDefault::Derived(heads, "heads", &["model.heads"]);
        /// Number of heads of keys and values, each shared by heads / kv_heads heads of queries
        /// (grouped-query attention). It is a multiple of `parallel.tensor`, or divides it; then
        /// ranks share heads. A number other than `model.heads` needs `model.family: Llama`.
        kv_heads: usize = uint(1..=65_536, one_each.unless(of.map(|m| m.kv_heads))), resume: Experiment;

        let quotient = KeyDefault::Derived(hidden / heads.max(1), "hidden / heads", &["model.hidden", "model.heads"]);
        /// Number of elements of a head: an even number for `model.family: Llama`, and at most 256
        /// on GPUs. A number other than hidden / heads needs `model.family: Llama`.
        head_dim: usize = uint(1..=65_536, quotient.unless(of.map(|m| m.head_dim))), resume: Experiment;
        /// Number of tokens of a sample. With `model.from` the default is the longest sample of the
        /// model.
        seq_len: usize = uint(
            1..=MOST_POSITIONS, KeyDefault::Required("seq_len: 1024").unless(of.map(|m| m.seq_len))
        ), resume: Experiment;
        /// Number of tokens of the vocabulary, without padding. 256 is one token for each byte.
        vocab: usize = uint(2..=16_777_216, KeyDefault::Default(256).unless(of.map(|m| m.vocab))), resume: Experiment;
        /// Inner width of the MLP; a multiple of `parallel.tensor`. The default of `Llama` is 8/3 x
        /// hidden, rounded up to a multiple of 64.
        ffn_hidden: usize = uint(
            1..=4_000_000, inner_width(family, hidden).unless(of.map(|m| m.ffn_hidden))
        ), resume: Experiment;
        /// Probability of dropout at the embedding, the attention weights and both residual
        /// branches.
        dropout: f32 = float(Interval::below(0.0, 1.0), KeyDefault::Default(0.0)), resume: Experiment;
        /// Standard deviation of the initial weights. A GPT-2 divides it by sqrt(2 layers) for the
        /// residual projections.
        init_std: f32 = float(
            Interval::closed(0.0, 10.0), KeyDefault::Default(0.02).unless(of.map(|m| m.init_std))
        ), resume: Experiment;
        /// Number that norms add to the variance or to the mean square.
        norm_eps: f32 = float(
            Interval::closed(0.0, 1.0), KeyDefault::Default(1e-5).unless(of.map(|m| m.norm_eps))
        ), resume: Experiment;
        /// Rotary positions, for `model.family: Llama`.
        rope: RopeConfig = section(|s| RopeConfig::read(s, of.map(|m| m.rope)));
        /// Whether the output projection is the token table. Always `true` for a GPT-2, and by
        /// default `false` for `Llama`.
        tied: bool = flag(KeyDefault::Default(gpt2).unless(of.map(|m| m.tied))), resume: Experiment;
        /// Whether the projections to queries, keys and values have biases (Qwen2). Always `true`
        /// for a GPT-2, and by default `false` for `Llama`.
        qkv_bias: bool = flag(KeyDefault::Default(gpt2).unless(of.map(|m| m.qkv_bias))), resume: Experiment;
        /// Whether the projection of the attention's output has a bias. Always `true` for a GPT-2,
        /// and by default `false` for `Llama`.
        proj_bias: bool = flag(KeyDefault::Default(gpt2).unless(of.map(|m| m.proj_bias))), resume: Experiment;
        /// Whether each head of queries and keys passes an RMSNorm before the rotation (Qwen3).
        /// Only with `model.family: Llama`.
        qk_norm: bool = flag(KeyDefault::Default(false).unless(of.map(|m| m.qk_norm))), resume: Experiment;
    }
}

choice! {
    /// Initial parameters of a run with `model.from`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Weights {
        /// The weights in the folder that `model.from` names.
        Pretrained,
        /// Random weights in the folder's shape.
        Random,
    }
}

choice! {
    /// Families of decoders.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Family {
        /// Layer norm, learned positions, GELU (tanh form), biases, a tied embedding.
        Gpt2,
        /// RMSNorm, rotary positions, SwiGLU, shared heads of keys and values: Llama, Mistral,
        /// Qwen2, Qwen3.
        Llama,
    }
}

section! {
    /// Rotary positions.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub struct RopeConfig, read(s, folder: Option<RopeConfig>) {
        /// Base of the frequencies of rotary positions.
        theta: f32 = float(
            Interval::closed(1.0, 1e12), KeyDefault::Default(10_000.0).unless(folder.map(|r| r.theta))
        ), resume: Experiment;
        /// How the frequencies of rotary positions are lowered, for contexts longer than in the
        /// model's first training. `None`: not at all. `Linear`: all by one factor. `Llama3`: as
        /// Llama 3.1 does.
        scaling: RopeScaling = choice_with(
            KeyDefault::Default(RopeScaling::None).unless(folder.map(|r| r.scaling)), folder.map(|r| Factors::of(r.scaling))
        ), resume: Experiment;
    }
}

choice! {
    /// How the frequencies of rotary positions are lowered.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub enum RopeScaling, read(folder: Option<Factors>) {
        /// The frequencies stay unchanged.
        None,
        /// One factor divides all frequencies.
        Linear["(factor: 4.0)"] {
            /// Factor that divides every frequency of rotary positions.
            factor: f32 = float(FACTOR, KeyDefault::Required("factor: 4.0").unless(folder.map(|f| f.factor)));
        },
        /// The scaling of Llama 3.1.
        Llama3["(factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_seq_len: 8192)"] {
            /// Factor that divides the low frequencies of rotary positions.
            factor: f32 = float(FACTOR, KeyDefault::Required("factor: 8.0").unless(folder.map(|f| f.factor)));
            /// Number of turns in `original_seq_len` tokens below which a frequency of rotary
            /// positions is low.
            low_freq_factor: f32 = float(FACTOR, KeyDefault::Default(1.0).unless(folder.map(|f| f.low)));
            /// Number of turns in `original_seq_len` tokens above which a frequency of rotary
            /// positions stays unchanged.
            high_freq_factor: f32 = float(FACTOR, KeyDefault::Default(4.0).unless(folder.map(|f| f.high)));
            /// Number of tokens of the contexts in the model's first training.
            original_seq_len: usize = uint(1..=MOST_POSITIONS, KeyDefault::Default(8192).unless(folder.map(|f| f.seq_len)));
        },
    }
}

/// Largest number of tokens of a sample.
const MOST_POSITIONS: u64 = 16_777_216;

/// Allowed factors of a frequency.
const FACTOR: Interval = Interval::closed(0.01, 1e6);

/// Defaults for the keys of each scaling, from the folder of `model.from`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    factor: f32,
    low: f32,
    high: f32,
    seq_len: usize,
}

impl Factors {
    const fn of(scaling: RopeScaling) -> Self {
        let others = Self { factor: 1.0, low: 1.0, high: 4.0, seq_len: 8192 };
        match scaling {
            RopeScaling::None => others,
            RopeScaling::Linear { factor } => Self { factor, ..others },
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_seq_len } => {
                Self {
                    factor,
                    low: low_freq_factor,
                    high: high_freq_factor,
                    seq_len: original_seq_len,
                }
            }
        }
    }
}

/// Default of `model.ffn_hidden`.
fn inner_width(family: Family, hidden: usize) -> KeyDefault<usize> {
    let (width, how) = match family {
        Family::Gpt2 => (4 * hidden, "4 x hidden"),
        Family::Llama => {
            (usize::next_multiple_of(8 * hidden / 3, 64), "8/3 x hidden, up to a multiple of 64")
        }
    };
    KeyDefault::Derived(width, how, &["model.hidden"])
}
