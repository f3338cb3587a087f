//! Every key of the network. A folder of transformers decides those that are left out, and none may contradict it.

use super::reading::report::Problem;
use super::reading::section::{Or, Section};
use super::reading::value::Interval;
use super::told;
use super::transformers::{self, COMPARED, Compared, Described};
use super::{Family, ModelConfig, Origin, RopeConfig, RopeScaling, Weights};

/// Reads the section `model`.
pub(super) fn model(s: &mut Section<'_, '_>) -> ModelConfig {
    let from = s.path_or_none("from", "Folder of a model of transformers (Llama, Mistral, Qwen2, Qwen3, GPT-2), or its config.json. It decides the keys of `model`, and its weights are where training starts. Keys that are given beside it must not contradict it; `seq_len` may be smaller.");
    let weights = s.named(
        "weights",
        Weights::Pretrained,
        "What training with `from` starts from: the folder's weights, or random ones in its shape.",
    );
    // What cannot be read is told; nothing more is asked for then.
    let told = match from.as_ref() {
        _ if !s.reader.ok(&["model.from"]) => Some(transformers::none()),
        Some(path) => told::described(s.reader, "model.from", path),
        None => None,
    };
    let of = told.as_ref().map(|told| &told.model);
    let or = Or::Default(Family::Gpt2).told(of.map(|m| m.family));
    let family = s.named_or("family", or, "Its parts. `Gpt2`: layer norm, learned positions, GELU (tanh form), biases, a tied embedding. `Llama` (also Mistral, Qwen2, Qwen3): RMSNorm, rotary positions, SwiGLU, shared heads of keys and values.");
    let gpt2 = family == Family::Gpt2;
    let or = Or::Required("layers: 12").told(of.map(|m| m.layers));
    let layers = s.uint("layers", 1..=10_000, or, "Blocks.");
    let or = Or::Required("hidden: 768").told(of.map(|m| m.hidden));
    let hidden = s.uint("hidden", 1..=1_000_000, or, "Width of the residual stream.");
    let or = Or::Required("heads: 12").told(of.map(|m| m.heads));
    let heads =
        s.uint("heads", 1..=65_536, or, "Attention heads; a multiple of `parallel.tensor`.");
    let inner = match family {
        Family::Gpt2 => Or::Derived(4 * hidden, "4 x hidden", &["model.hidden"]),
        Family::Llama => Or::Derived(
            usize::next_multiple_of(8 * hidden / 3, 64),
            "8/3 x hidden, up to a multiple of 64",
            &["model.hidden"],
        ),
    };
    let one_each = Or::Derived(heads, "heads", &["model.heads"]);
    let quotient =
        Or::Derived(hidden / heads.max(1), "hidden / heads", &["model.hidden", "model.heads"]);
    let model = ModelConfig {
        family,
        layers,
        hidden,
        heads,
        kv_heads: s.uint(
            "kv_heads",
            1..=65_536,
            one_each.told(of.map(|m| m.kv_heads)),
            "Heads of keys and values, each shared by heads / kv_heads heads of queries (grouped-query attention). A multiple of `parallel.tensor`, or a divisor of it: then ranks share heads. With `family: Llama`.",
        ),
        head_dim: s.uint(
            "head_dim",
            1..=65_536,
            quotient.told(of.map(|m| m.head_dim)),
            "Elements of a head; even with rotary positions. Other than hidden / heads with `family: Llama`.",
        ),
        seq_len: s.uint("seq_len", 1..=16_777_216, Or::Required("seq_len: 1024").told(of.map(|m| m.seq_len)), "Tokens of a sample."),
        vocab: s.uint("vocab", 2..=16_777_216, Or::Default(256).told(of.map(|m| m.vocab)), "Tokens of the vocabulary, without padding. 256 is one for each byte."),
        ffn_hidden: s.uint(
            "ffn_hidden",
            1..=4_000_000,
            inner.told(of.map(|m| m.ffn_hidden)),
            "Inner width of the feed-forward part; a multiple of `parallel.tensor`. Of `Llama` 8/3 x hidden, up to a multiple of 64, where it is left out.",
        ),
        dropout: s.float("dropout", Interval::below(0.0, 1.0), Or::Default(0.0), "Probability of dropping, at the embedding, the attention weights and both residual branches."),
        init_std: s.float("init_std", Interval::closed(0.0, 10.0), Or::Default(0.02).told(of.map(|m| m.init_std)), "Standard deviation of the initial weights. Residual projections of a GPT-2 divide it by sqrt(2 layers)."),
        norm_eps: s.float("norm_eps", Interval::closed(0.0, 1.0), Or::Default(1e-5).told(of.map(|m| m.norm_eps)), "Added to the variance, or to the mean square, by norms."),
        rope: s.section("rope", "Rotary positions. With `family: Llama`.", |s| rope(s, of)),
        tied: s.flag_or("tied", Or::Default(gpt2).told(of.map(|m| m.tied)), "The output projection is the token table. A GPT-2's always is; of `Llama` false where it is left out."),
        qkv_bias: s.flag_or("qkv_bias", Or::Default(gpt2).told(of.map(|m| m.qkv_bias)), "The projections to queries, keys and values have biases (Qwen2). A GPT-2's always have."),
        proj_bias: s.flag_or("proj_bias", Or::Default(gpt2).told(of.map(|m| m.proj_bias)), "The projection back from the heads has a bias. A GPT-2's always has."),
        qk_norm: s.flag_or("qk_norm", Or::Default(false).told(of.map(|m| m.qk_norm)), "Each head of queries and keys passes an RMSNorm before it is rotated (Qwen3). With `family: Llama`."),
        from,
        weights,
    };
    if let (Some(told), Some(from)) = (&told, &model.from) {
        contradictions(s, (&model, from), told);
    }
    model
}

fn rope(s: &mut Section<'_, '_>, of: Option<&ModelConfig>) -> RopeConfig {
    let examples = [
        "None",
        "Linear(factor: 4.0)",
        "Llama3(factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_seq_len: 8192)",
    ];
    let told = of.map(|m| m.rope);
    let number = told.map(|rope| match rope.scaling {
        RopeScaling::None => 0,
        RopeScaling::Linear { .. } => 1,
        RopeScaling::Llama3 { .. } => 2,
    });
    let factors = told.map(|rope| match rope.scaling {
        RopeScaling::None => (1.0, 1.0, 4.0, 8192),
        RopeScaling::Linear { factor } => (factor, 1.0, 4.0, 8192),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_seq_len } => {
            (factor, low_freq_factor, high_freq_factor, original_seq_len)
        }
    });
    let factor =
        |s: &mut Section<'_, '_>, key, or, doc| s.float(key, Interval::closed(0.01, 1e6), or, doc);
    let [by, low, high] = [factors.map(|f| f.0), factors.map(|f| f.1), factors.map(|f| f.2)];
    RopeConfig {
        theta: s.float("theta", Interval::closed(1.0, 1e12), Or::Default(10_000.0).told(told.map(|r| r.theta)), "Base of the frequencies."),
        scaling: s.choice("scaling", &examples, Or::Default(0).told(number), "How frequencies are lowered for contexts longer than those of the first training.", |index, s| match index {
            0 => RopeScaling::None,
            1 => RopeScaling::Linear { factor: factor(s, "factor", Or::Required("factor: 4.0").told(by), "Divides every frequency.") },
            _ => RopeScaling::Llama3 {
                factor: factor(s, "factor", Or::Required("factor: 8.0").told(by), "Divides low frequencies."),
                low_freq_factor: factor(s, "low_freq_factor", Or::Default(1.0).told(low), "Frequencies of fewer turns than this in `original_seq_len` tokens are low."),
                high_freq_factor: factor(s, "high_freq_factor", Or::Default(4.0).told(high), "Frequencies of more turns than this are high, and stay."),
                original_seq_len: s.uint("original_seq_len", 1..=16_777_216, Or::Default(8192).told(factors.map(|f| f.3)), "Tokens of the contexts of the first training."),
            },
        }),
    }
}

/// Reports keys that are given beside a folder and say otherwise than it.
fn contradictions(s: &mut Section<'_, '_>, (model, from): (&ModelConfig, &str), told: &Described) {
    let their = &told.model;
    let differing = COMPARED.into_iter().filter_map(|Compared { key, value, .. }| {
        let (ours, theirs) = (value(model), value(their));
        // Shorter samples are those of the same model.
        if key == "model.seq_len" {
            let most = format!("at most {theirs} ({})", told.positions);
            return (model.seq_len > their.seq_len).then_some((key, ours, most));
        }
        (ours != theirs).then_some((key, ours, theirs))
    });
    for (key, ours, theirs) in differing {
        // What is bad by itself is told already.
        let given = s.reader.origins.iter().any(|(name, _, origin)| {
            name.starts_with(key) && !matches!(origin, Origin::Default | Origin::Derived(_))
        });
        if !given || !s.reader.ok(&[key, "model.from"]) {
            continue;
        }
        let spots = vec![
            s.reader.spot(key, format!("{ours} here")),
            s.reader.spot("model.from", format!("{theirs} there")),
        ];
        s.reader.problems.push(Problem {
            key: key.into(),
            message: format!("{ours}, but the model of {from} has {theirs}"),
            help: format!("leave `{key}` out, or name another folder"),
            spots,
        });
    }
}
