//! Keys of the network.

use super::declare::{choice, section};
use super::delta_net::DeltaNetConfig;
use super::experts::ExpertsConfig;
use super::layer_pattern::{FULL, WINDOWED, shortest};
use super::reading::{Interval, KeyDefault, Section};
use super::rope::{MOST_POSITIONS, RopeConfig, RopeDefaults};
use serde::Serialize;

section! {
    /// The network: a decoder.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ModelConfig, read(s, in_folder: impl FnOnce(&mut Section<'_, '_>, Option<&str>) -> Option<ModelConfig>) {
        /// Folder of a transformers model (docs/models.md lists the classes), its config.json, or
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
        /// tied embedding. `Llama` (also Mistral, Qwen2, Qwen3, Gemma, OLMo, Granite and others):
        /// RMSNorm, rotary positions, a gated MLP, shared heads of keys and values. Other keys of
        /// `model` choose its parts further.
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
        /// Experts in the place of the MLP (mixture of experts), for `model.family: Llama`: a router
        /// chooses some of them for each token, and no token is dropped. If all layers have experts,
        /// `model.ffn_hidden` is not used. None: each layer has one MLP.
        experts: Option<ExpertsConfig> = section_or_none(of.map(|m| m.experts.is_some()), |s| {
            ExpertsConfig::read(s, of.and_then(|m| m.experts.as_ref()))
        }), resume: Experiment;
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
        rope: RopeConfig = section(|s| {
            RopeConfig::read(s, &RopeDefaults::of_folder(of.map(|m| m.rope.clone())))
        });

        let within = of.map(|m| m.for_samples(seq_len));
        /// Kinds of the layers, for `model.family: Llama`: one letter for each layer, repeated over
        /// the layers. `F`: full attention. `W`: attention within `model.window`. `N`: full
        /// attention without rotary positions (SmolLM3). `D`: the gated delta net of
        /// `model.delta_net`, a linear attention (Qwen3.5). `"WWWWWF"`: each sixth layer sees all
        /// tokens (Gemma 3).
        layer_pattern: String = layer_pattern(
            layers, KeyDefault::Default("F".into()).unless(within.map(|m| m.layer_pattern))
        ), resume: Experiment;

        let windowed = layer_pattern.contains(WINDOWED);
        /// Size of the attention window in tokens, for the `W` layers of `model.layer_pattern`: a
        /// token sees itself and the tokens directly before it. A pattern with `W` needs this key.
        window: Option<usize> = uint_or_none(
            1..=MOST_POSITIONS,
            KeyDefault::Default(None).unless(of.map(|m| m.window.filter(|_| windowed)))
        ), resume: Experiment;
        /// Rotary positions of the `W` layers of `model.layer_pattern`, if they differ from
        /// `model.rope`.
        window_rope: RopeConfig = section(|s| {
            let defaults = match of.filter(|_| windowed) {
                Some(m) => RopeDefaults::of_folder(Some(m.window_rope.clone())),
                None => RopeDefaults::of_rope(rope.clone()),
            };
            RopeConfig::read(s, &defaults)
        });
        /// Sizes of the gated delta net, for the `D` layers of `model.layer_pattern`. A pattern with
        /// `D` needs this key. None: no layer has one.
        delta_net: Option<DeltaNetConfig> = section_or_none(of.map(|m| m.delta_net.is_some()), |s| {
            DeltaNetConfig::read(s, of.and_then(|m| m.delta_net.as_ref()))
        }), resume: Experiment;
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
        /// Whether the norm of `model.qk_norm` joins all heads of queries, and all heads of keys
        /// (OLMo 2 and 3), instead of one head.
        qk_norm_width: bool = flag(
            KeyDefault::Default(false).unless(of.map(|m| m.qk_norm_width))
        ), resume: Experiment;
        /// Whether each attention head has a learned score, a sink, that is in the sum of the softmax
        /// of each token and has no value (gpt-oss). Only with `model.family: Llama`.
        attention_sinks: bool = flag(
            KeyDefault::Default(false).unless(of.map(|m| m.attention_sinks))
        ), resume: Experiment;
        /// Whether attention's output is multiplied by the sigmoid of a gate, which is a further
        /// projection of its input (Qwen3.5). Only with `model.family: Llama`.
        output_gate: bool = flag(
            KeyDefault::Default(false).unless(of.map(|m| m.output_gate))
        ), resume: Experiment;
        /// Whether norms multiply by 1 + their gain, and gains start at 0 (Gemma). Only with
        /// `model.family: Llama`.
        norm_offset: bool = flag(
            KeyDefault::Default(false).unless(of.map(|m| m.norm_offset))
        ), resume: Experiment;
        /// Places of the norms of attention and of the MLP. `Before`: at the start of each.
        /// `Around`: at the start and at the end of each (Gemma 2 and 3). `After`: at the end of
        /// each (OLMo 2 and 3). A GPT-2 has `Before`.
        norm_place: NormPlace = choice(
            KeyDefault::Default(NormPlace::Before).unless(of.map(|m| m.norm_place))
        ), resume: Experiment;
        /// Activation of the MLP's gate, for `model.family: Llama`. `Silu`: SwiGLU. `Gelu`: GELU in
        /// its tanh form (Gemma). `ClampedSilu`: the gate g is at most `limit`, and the other factor u
        /// is from -`limit` to `limit`; the output is (u + 1) g sigmoid(`slope` g) (gpt-oss).
        gate: Gate = choice_with(
            KeyDefault::Default(Gate::Silu).unless(of.map(|m| m.gate)), of.map(|m| m.gate)
        ), resume: Experiment;
        /// Factor of the products of queries and keys. None: 1 / sqrt(`model.head_dim`). Only with
        /// `model.family: Llama`.
        attention_scale: Option<f32> = float_or_none(
            Interval::above(0.0, 1e6), KeyDefault::Default(None).unless(of.map(|m| m.attention_scale))
        ), resume: Experiment;
        /// Cap of attention scores: with the cap c, a score s becomes c tanh(s / c) (Gemma 2). None:
        /// no cap. Only with `model.family: Llama`.
        score_cap: Option<f32> = float_or_none(
            Interval::above(0.0, 1e6), KeyDefault::Default(None).unless(of.map(|m| m.score_cap))
        ), resume: Experiment;
        /// Cap of logits: with the cap c, a logit z becomes c tanh(z / c) (Gemma 2). None: no cap.
        /// Only with `model.family: Llama`.
        logit_cap: Option<f32> = float_or_none(
            Interval::above(0.0, 1e6), KeyDefault::Default(None).unless(of.map(|m| m.logit_cap))
        ), resume: Experiment;
        /// Factor of the rows of the embedding, but not of the output projection (Gemma, Granite).
        /// The square root of `model.hidden` is first rounded to the type of `precision`, as the
        /// classes of Gemma do. Only with `model.family: Llama`.
        embedding_scale: f32 = float(
            SCALE, KeyDefault::Default(1.0).unless(of.map(|m| m.embedding_scale))
        ), resume: Experiment;
        /// Factor of what attention and the MLP add to the residual stream (Granite). Only with
        /// `model.family: Llama`.
        residual_scale: f32 = float(
            SCALE, KeyDefault::Default(1.0).unless(of.map(|m| m.residual_scale))
        ), resume: Experiment;
        /// Factor of the logits, before `model.logit_cap` (Granite). Only with `model.family:
        /// Llama`.
        logit_scale: f32 = float(
            SCALE, KeyDefault::Default(1.0).unless(of.map(|m| m.logit_scale))
        ), resume: Experiment;
    }
}

/// Allowed factors of activations.
const SCALE: Interval = Interval::above(0.0, 1e6);

impl ModelConfig {
    /// The folder with the weights from which training starts; `None` if they are random.
    pub fn pretrained(&self) -> Option<&str> {
        self.from.as_deref().filter(|_| self.weights == Weights::Pretrained)
    }

    /// Letters of the layers, one for each layer.
    pub fn layer_letters(&self) -> impl Iterator<Item = char> {
        self.layer_pattern.chars().cycle().take(self.layers)
    }

    /// The same model for samples of `seq_len` tokens. A window that holds a whole sample becomes
    /// full attention.
    #[must_use]
    pub fn for_samples(&self, seq_len: usize) -> Self {
        let mut model = Self { seq_len, ..self.clone() };
        let holds_sample = model.window.is_some_and(|window| window >= seq_len);
        if holds_sample && model.window_rope == model.rope {
            let full = |letter| if letter == WINDOWED { FULL } else { letter };
            model.layer_pattern = shortest(&model.layer_letters().map(full).collect::<Vec<_>>());
        }
        if !model.layer_pattern.contains(WINDOWED) {
            model.window = None;
            model.window_rope = model.rope.clone();
        }
        model
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
        /// RMSNorm, rotary positions, a gated MLP, shared heads of keys and values: Llama and
        /// later families.
        Llama,
    }
}

choice! {
    /// Places of the norms of attention and of the MLP.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum NormPlace {
        /// At the start of each.
        Before,
        /// At the start and at the end of each.
        Around,
        /// At the end of each.
        After,
    }
}

choice! {
    /// Activations of the MLP's gate.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub enum Gate, read(of: Option<Gate>) {
        /// SiLU, which makes the MLP a SwiGLU.
        Silu,
        /// GELU in its tanh form.
        Gelu,
        /// SiLU with a slope and with limits.
        ClampedSilu["(slope: 1.702, limit: 7.0)"] {
            /// Factor of the gate in the sigmoid.
            slope: f32 = float(SCALE, KeyDefault::Default(1.702).unless(match of {
                Some(Gate::ClampedSilu { slope, .. }) => Some(slope),
                _ => None,
            }));
            /// Largest gate, and largest magnitude of the other factor.
            limit: f32 = float(SCALE, KeyDefault::Default(7.0).unless(match of {
                Some(Gate::ClampedSilu { limit, .. }) => Some(limit),
                _ => None,
            }));
        },
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
