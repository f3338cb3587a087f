//! The network, as a config describes it.

use super::declare::{choice, section};
use super::reading::{Interval, KeyDefault, Section};
use serde::Serialize;

section! {
    /// The network: a pre-norm decoder.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ModelConfig, read(s, in_folder: impl FnOnce(&mut Section<'_, '_>, Option<&str>) -> Option<ModelConfig>) {
        /// Folder of a model of transformers (Llama, Mistral, Qwen2, Qwen3, GPT-2), or its config.json. It decides the
        /// keys of `model`, and its weights are where training starts. Keys that are given beside it must not
        /// contradict it; `seq_len` may be smaller.
        from: Option<String> = path(KeyDefault::Default(None)), resume: Harmless;
        /// What training with `from` starts from: the folder's weights, or random ones in its shape.
        weights: Weights = choice(KeyDefault::Default(Weights::Pretrained)), resume: Harmless;

        let folder = in_folder(s, from.as_deref());
        let of = folder.as_ref();
        /// Its parts. `Gpt2`: layer norm, learned positions, GELU (tanh form), biases, a tied embedding. `Llama` (also
        /// Mistral, Qwen2, Qwen3): RMSNorm, rotary positions, SwiGLU, shared heads of keys and values.
        family: Family = choice(KeyDefault::Default(Family::Gpt2).unless(of.map(|m| m.family))), resume: Experiment;

        let gpt2 = family == Family::Gpt2;
        /// Blocks.
        layers: usize = uint(1..=10_000, KeyDefault::Required("layers: 12").unless(of.map(|m| m.layers))), resume: Experiment;
        /// Width of the residual stream.
        hidden: usize = uint(1..=1_000_000, KeyDefault::Required("hidden: 768").unless(of.map(|m| m.hidden))), resume: Experiment;
        /// Attention heads; a multiple of `parallel.tensor`.
        heads: usize = uint(1..=65_536, KeyDefault::Required("heads: 12").unless(of.map(|m| m.heads))), resume: Experiment;

        let one_each = KeyDefault::Derived(heads, "heads", &["model.heads"]);
        /// Heads of keys and values, each shared by heads / kv_heads heads of queries (grouped-query attention). A
        /// multiple of `parallel.tensor`, or a divisor of it: then ranks share heads. With `family: Llama`.
        kv_heads: usize = uint(1..=65_536, one_each.unless(of.map(|m| m.kv_heads))), resume: Experiment;

        let quotient = KeyDefault::Derived(hidden / heads.max(1), "hidden / heads", &["model.hidden", "model.heads"]);
        /// Elements of a head; even with rotary positions. Other than hidden / heads with `family: Llama`.
        head_dim: usize = uint(1..=65_536, quotient.unless(of.map(|m| m.head_dim))), resume: Experiment;
        /// Tokens of a sample.
        seq_len: usize = uint(
            1..=MOST_POSITIONS, KeyDefault::Required("seq_len: 1024").unless(of.map(|m| m.seq_len))
        ), resume: Experiment;
        /// Tokens of the vocabulary, without padding. 256 is one for each byte.
        vocab: usize = uint(2..=16_777_216, KeyDefault::Default(256).unless(of.map(|m| m.vocab))), resume: Experiment;
        /// Inner width of the feed-forward part; a multiple of `parallel.tensor`. Of `Llama` 8/3 x hidden, up to a
        /// multiple of 64, where it is left out.
        ffn_hidden: usize = uint(
            1..=4_000_000, inner_width(family, hidden).unless(of.map(|m| m.ffn_hidden))
        ), resume: Experiment;
        /// Probability of dropping, at the embedding, the attention weights and both residual branches.
        dropout: f32 = float(Interval::below(0.0, 1.0), KeyDefault::Default(0.0)), resume: Experiment;
        /// Standard deviation of the initial weights. Residual projections of a GPT-2 divide it by sqrt(2 layers).
        init_std: f32 = float(
            Interval::closed(0.0, 10.0), KeyDefault::Default(0.02).unless(of.map(|m| m.init_std))
        ), resume: Experiment;
        /// Added to the variance, or to the mean square, by norms.
        norm_eps: f32 = float(
            Interval::closed(0.0, 1.0), KeyDefault::Default(1e-5).unless(of.map(|m| m.norm_eps))
        ), resume: Experiment;
        /// Rotary positions. With `family: Llama`.
        rope: RopeConfig = section(|s| RopeConfig::read(s, of.map(|m| m.rope)));
        /// The output projection is the token table. A GPT-2's always is; of `Llama` false where it is left out.
        tied: bool = flag(KeyDefault::Default(gpt2).unless(of.map(|m| m.tied))), resume: Experiment;
        /// The projections to queries, keys and values have biases (Qwen2). A GPT-2's always have.
        qkv_bias: bool = flag(KeyDefault::Default(gpt2).unless(of.map(|m| m.qkv_bias))), resume: Experiment;
        /// The projection back from the heads has a bias. A GPT-2's always has.
        proj_bias: bool = flag(KeyDefault::Default(gpt2).unless(of.map(|m| m.proj_bias))), resume: Experiment;
        /// Each head of queries and keys passes an RMSNorm before it is rotated (Qwen3). With `family: Llama`.
        qk_norm: bool = flag(KeyDefault::Default(false).unless(of.map(|m| m.qk_norm))), resume: Experiment;
    }
}

choice! {
    /// Where parameters of a model of transformers start.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Weights {
        /// As its folder has them.
        Pretrained,
        /// At random, in its shape.
        Random,
    }
}

choice! {
    /// Families of decoders.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Family {
        /// Layer norm, learned positions, GELU (tanh form), biases, a tied embedding.
        Gpt2,
        /// RMSNorm, rotary positions, SwiGLU, heads of keys and values that are shared: Llama, Mistral, Qwen2, Qwen3.
        Llama,
    }
}

section! {
    /// Rotary positions.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub struct RopeConfig, read(s, folder: Option<RopeConfig>) {
        /// Base of the frequencies.
        theta: f32 = float(
            Interval::closed(1.0, 1e12), KeyDefault::Default(10_000.0).unless(folder.map(|r| r.theta))
        ), resume: Experiment;
        /// How frequencies are lowered for contexts longer than those of the first training.
        scaling: RopeScaling = choice_with(
            KeyDefault::Default(RopeScaling::None).unless(folder.map(|r| r.scaling)), folder.map(|r| Factors::of(r.scaling))
        ), resume: Experiment;
    }
}

choice! {
    /// How frequencies of rotary positions are lowered.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub enum RopeScaling, read(folder: Option<Factors>) {
        /// They are not.
        None,
        /// All by one factor.
        Linear["(factor: 4.0)"] {
            /// Divides every frequency.
            factor: f32 = float(FACTOR, KeyDefault::Required("factor: 4.0").unless(folder.map(|f| f.factor)));
        },
        /// As Llama 3.1 does.
        Llama3["(factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_seq_len: 8192)"] {
            /// Divides low frequencies.
            factor: f32 = float(FACTOR, KeyDefault::Required("factor: 8.0").unless(folder.map(|f| f.factor)));
            /// Frequencies of fewer turns than this in `original_seq_len` tokens are low.
            low_freq_factor: f32 = float(FACTOR, KeyDefault::Default(1.0).unless(folder.map(|f| f.low)));
            /// Frequencies of more turns than this are high, and stay.
            high_freq_factor: f32 = float(FACTOR, KeyDefault::Default(4.0).unless(folder.map(|f| f.high)));
            /// Tokens of the contexts of the first training.
            original_seq_len: usize = uint(1..=MOST_POSITIONS, KeyDefault::Default(8192).unless(folder.map(|f| f.seq_len)));
        },
    }
}

/// Most tokens of a sample.
const MOST_POSITIONS: u64 = 16_777_216;

/// What may divide a frequency.
const FACTOR: Interval = Interval::closed(0.01, 1e6);

/// Defaults of the keys of any scaling beside a folder.
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

/// The default of `model.ffn_hidden`.
fn inner_width(family: Family, hidden: usize) -> KeyDefault<usize> {
    let (width, how) = match family {
        Family::Gpt2 => (4 * hidden, "4 x hidden"),
        Family::Llama => {
            (usize::next_multiple_of(8 * hidden / 3, 64), "8/3 x hidden, up to a multiple of 64")
        }
    };
    KeyDefault::Derived(width, how, &["model.hidden"])
}
