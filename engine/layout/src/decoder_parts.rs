//! Parts and kinds of layers of the decoder that a config describes.

use config::layer_pattern::{DELTA, UNROTATED, WINDOWED};
use config::{
    Activations, Adapter, DeltaNetConfig, EXPERT_MATRICES, Family, KeptBlocks, ModelConfig,
    RopeConfig, decimal,
};
use device::{Dtype, Gate};
use half::{bf16, f16};
use std::sync::Arc;
use tensor_parallel::{
    ActivationTiers, AdapterShape, AdapterTargets, Architecture, Balance, DeltaShape, ExpertsShape,
    LayerKind, NormPlace, QkNorm, Rope, RopeScaling, SigmoidShape, TierCounts, TrainedParams,
};

/// Choice of the decoder's parts. `dtype`: storage type of its parameters.
pub fn architecture(m: &ModelConfig, dtype: Dtype) -> Architecture {
    let norm_epsilon = decimal(m.norm_eps);
    match m.family {
        Family::Gpt2 => return Architecture { norm_epsilon, ..Architecture::GPT2 },
        Family::Llama => {}
    }
    Architecture {
        rms_norm: true,
        norm_epsilon,
        norm_offset: f64::from(u8::from(m.norm_offset)),
        norm_place: match m.norm_place {
            config::NormPlace::Before => NormPlace::Before,
            config::NormPlace::Around => NormPlace::Around,
            config::NormPlace::After => NormPlace::After,
        },
        learned_positions: false,
        joined_qkv: false,
        qkv_bias: m.qkv_bias,
        proj_bias: m.proj_bias,
        qk_norm: match (m.qk_norm, m.qk_norm_width) {
            (false, _) => None,
            (true, false) => Some(QkNorm::Heads),
            (true, true) => Some(QkNorm::Width),
        },
        attention_sinks: m.attention_sinks,
        output_gate: m.output_gate,
        gate: Some(match m.gate {
            config::Gate::Silu => Gate::Silu,
            config::Gate::Gelu => Gate::Gelu,
            config::Gate::ClampedSilu { slope, limit } => Gate::ClampedSilu { slope, limit },
        }),
        attention_scale: m.attention_scale.map(decimal),
        score_cap: m.score_cap.map(decimal),
        logit_cap: m.logit_cap.map(decimal),
        embedding_scale: embedding_scale(m, dtype),
        residual_scale: decimal(m.residual_scale),
        logit_scale: decimal(m.logit_scale),
        tied: m.tied,
        scaled_residuals: false,
    }
}

/// Factor of the embedding's rows. The classes of Gemma round the square root of the hidden
/// channels to the type of the weights before they multiply.
fn embedding_scale(m: &ModelConfig, dtype: Dtype) -> f64 {
    let scale = m.embedding_scale;
    if scale != (m.hidden as f64).sqrt() as f32 {
        return decimal(scale);
    }
    f64::from(match dtype {
        Dtype::Bf16 => bf16::from_f32(scale).to_f32(),
        Dtype::F16 => f16::from_f32(scale).to_f32(),
        _ => scale,
    })
}

/// The kinds of a decoder's layers.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerKinds {
    /// The different kinds, in the order of their first layers.
    pub kinds: Vec<LayerKind>,
    /// For each layer, the index of its kind.
    pub layer_kinds: Vec<usize>,
}

/// The kinds of the layers of a model for samples of at most `seq_len` tokens, which decide the
/// factors of LongRoPE.
pub fn layer_kinds(m: &ModelConfig, seq_len: usize) -> LayerKinds {
    let rotary = m.family != Family::Gpt2;
    let rope = |of: &RopeConfig| rotary.then(|| rope(of, m.head_dim, seq_len));
    let (full, windowed) = (rope(&m.rope), rope(&m.window_rope));
    let kind = |letter| match letter {
        WINDOWED => LayerKind { window: m.window, rope: windowed.clone(), ..LayerKind::PLAIN },
        UNROTATED => LayerKind::PLAIN,
        DELTA => LayerKind { delta: true, ..LayerKind::PLAIN },
        _ => LayerKind { rope: full.clone(), ..LayerKind::PLAIN },
    };
    let mut kinds: Vec<LayerKind> = Vec::new();
    let index_of = |(layer, letter)| {
        let experts = m.experts.as_ref().is_some_and(|experts| experts.are_in(layer));
        let kind = LayerKind { experts, ..kind(letter) };
        let known = kinds.iter().position(|known| *known == kind);
        known.unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        })
    };
    let layer_kinds = m.layer_letters().enumerate().map(index_of).collect();
    LayerKinds { kinds, layer_kinds }
}

/// The gated delta net of the layers that have one.
pub(crate) fn delta_net(m: &ModelConfig) -> Option<DeltaShape> {
    let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, taps } =
        *m.delta_net.as_ref()?;
    Some(DeltaShape { key_heads, value_heads, key_dim, value_dim, taps })
}

/// The experts of the layers that have some.
pub(crate) fn experts(m: &ModelConfig) -> Option<ExpertsShape> {
    let experts = m.experts.as_ref()?;
    Some(ExpertsShape {
        count: experts.count,
        per_token: experts.per_token,
        ffn_hidden: experts.ffn_hidden,
        normalize: experts.normalize,
        sigmoid: match experts.scoring {
            config::ScoreRule::Softmax => None,
            config::ScoreRule::Sigmoid { groups, kept_groups, scale } => {
                Some(SigmoidShape { groups, kept_groups, scale: decimal(scale) })
            }
        },
        shared_hidden: Some(experts.shared_hidden).filter(|hidden| *hidden > 0),
        shared_gate: experts.shared_gate,
        biases: experts.biases,
        balance: match experts.balance {
            config::Balance::Off => None,
            config::Balance::HuggingFace { factor } => Some(Balance::HuggingFace(decimal(factor))),
            config::Balance::Megatron { factor } => Some(Balance::Megatron(decimal(factor))),
        },
    })
}

/// Numbers of blocks in each tier of activations.
pub(crate) fn tiers(activations: Activations) -> ActivationTiers {
    let counts = |kept: KeptBlocks| TierCounts { device: kept.gpu, host: kept.host };
    ActivationTiers { attention: counts(activations.attention()), mlp: counts(activations.mlp()) }
}

/// The parameters of `model` that a run with `adapter` trains.
pub(crate) fn trained(adapter: &Adapter, model: &ModelConfig) -> TrainedParams {
    let Adapter::Lora { rank, alpha, rank_stabilized, ref targets, dropout, .. } = *adapter else {
        return TrainedParams::All;
    };
    let divisor = if rank_stabilized { (rank as f64).sqrt() } else { rank as f64 };
    let names = targets.names(model);
    let has = |any: [&str; 2]| any.iter().any(|name| names.contains(name));
    // The second name is that of GPT-2, which has no gate.
    let targets = AdapterTargets {
        query: has(["q_proj", "c_attn"]),
        key: names.contains(&"k_proj"),
        value: names.contains(&"v_proj"),
        output: has(["o_proj", "c_proj"]),
        gate: names.contains(&"gate_proj"),
        up: has(["up_proj", "c_fc"]),
        down: has(["down_proj", "c_proj"]),
        experts_gate_up: names.contains(&EXPERT_MATRICES[0]),
        experts_down: names.contains(&EXPERT_MATRICES[1]),
        delta_qkv: names.contains(&"in_proj_qkv"),
        delta_gate: names.contains(&"in_proj_z"),
        delta_steps: names.contains(&"in_proj_b"),
        delta_decays: names.contains(&"in_proj_a"),
        delta_output: names.contains(&"out_proj"),
    };
    let scale = decimal(alpha) / divisor;
    TrainedParams::Adapters(AdapterShape { rank, scale, targets, dropout })
}

/// Rotary positions of heads of `head_dim` elements.
fn rope(of: &RopeConfig, head_dim: usize, seq_len: usize) -> Rope {
    let scaling = match &of.scaling {
        config::RopeScaling::None => RopeScaling::None,
        config::RopeScaling::Linear { factor } => RopeScaling::Linear { factor: decimal(*factor) },
        config::RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_seq_len,
        } => RopeScaling::Llama3 {
            factor: decimal(*factor),
            low_freq_factor: decimal(*low_freq_factor),
            high_freq_factor: decimal(*high_freq_factor),
            original_seq_len: *original_seq_len,
        },
        config::RopeScaling::Yarn {
            factor,
            original_seq_len,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        } => RopeScaling::Yarn {
            factor: decimal(*factor),
            beta_fast: decimal(*beta_fast),
            beta_slow: decimal(*beta_slow),
            original_seq_len: *original_seq_len,
            truncate: *truncate,
            attention_factor: match attention_factor {
                Some(given) => decimal(*given),
                None if *factor <= 1.0 => 1.0,
                None => 0.1 * decimal(*factor).ln() + 1.0,
            },
        },
        config::RopeScaling::LongRope {
            factor,
            original_seq_len,
            short_factors,
            long_factors,
            attention_factor,
        } => {
            let is_long = seq_len > *original_seq_len;
            let factors = if is_long { long_factors } else { short_factors };
            RopeScaling::Listed {
                factors: factors.iter().map(|factor| decimal(*factor)).collect::<Arc<[f64]>>(),
                attention_factor: match attention_factor {
                    Some(given) => decimal(*given),
                    None if *factor <= 1.0 => 1.0,
                    None => {
                        let original = *original_seq_len as f64;
                        (1.0 + decimal(*factor).ln() / original.ln()).sqrt()
                    }
                },
            }
        }
    };
    Rope { theta: decimal(of.theta), dims: of.rotated_elements(head_dim), scaling }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;
    use std::path::Path;

    fn model(keys: &str) -> ModelConfig {
        let ron = format!(
            "(model: (family: Llama, layers: 6, hidden: 3840, heads: 16, head_dim: 256, seq_len: 64, {keys}), train: (steps: 1))"
        );
        load_str(&ron, "a.ron", Path::new("/"), &[]).unwrap_or_else(|e| panic!("{e}")).config.model
    }

    #[test]
    fn parts_of_a_config_are_those_of_the_decoder() {
        let of = |keys: &str| architecture(&model(keys), Dtype::F32);
        let gemma = of(
            "norm_offset: true, norm_place: Around, gate: Gelu, qk_norm: true, attention_scale: 0.5, \
            score_cap: 50.0, logit_cap: 30.0, residual_scale: 0.22, logit_scale: 0.0625, tied: true",
        );
        assert_eq!((gemma.norm_offset, gemma.norm_place), (1.0, NormPlace::Around));
        assert_eq!((gemma.gate, gemma.qk_norm), (Some(Gate::Gelu), Some(QkNorm::Heads)));
        let scales = (gemma.attention_scale, gemma.score_cap, gemma.logit_cap);
        assert_eq!(scales, (Some(0.5), Some(50.0), Some(30.0)));
        assert_eq!((gemma.residual_scale, gemma.logit_scale, gemma.tied), (0.22, 0.0625, true));
        let olmo = of("norm_place: After, qk_norm: true, qk_norm_width: true");
        assert_eq!((olmo.norm_place, olmo.qk_norm), (NormPlace::After, Some(QkNorm::Width)));
        let llama = of("");
        let expected = Architecture {
            rms_norm: true,
            learned_positions: false,
            joined_qkv: false,
            qkv_bias: false,
            proj_bias: false,
            gate: Some(Gate::Silu),
            tied: false,
            scaled_residuals: false,
            ..Architecture::GPT2
        };
        assert_eq!(llama, expected);
    }

    #[test]
    fn a_kind_is_made_once_for_its_layers() {
        let m = model("layer_pattern: \"WWF\", window: 8, window_rope: (theta: 7.0)");
        let LayerKinds { kinds, layer_kinds } = layer_kinds(&m, 64);
        assert_eq!(layer_kinds, [0, 0, 1, 0, 0, 1]);
        assert_eq!(kinds.iter().map(|kind| kind.window).collect::<Vec<_>>(), [Some(8), None]);
        let thetas = kinds.iter().map(|kind| kind.rope.as_ref().map(|rope| rope.theta));
        assert_eq!(thetas.collect::<Vec<_>>(), [Some(7.0), Some(1e4)]);
        let m = model("layer_pattern: \"FFN\"");
        let LayerKinds { kinds, layer_kinds } = super::layer_kinds(&m, 64);
        assert_eq!(layer_kinds, [0, 0, 1, 0, 0, 1]);
        assert!(kinds[0].rope.is_some() && kinds[1].rope.is_none());
        assert_eq!(super::layer_kinds(&model(""), 64).kinds.len(), 1);
    }

    #[test]
    fn layers_with_a_gated_delta_net_do_not_rotate() {
        let m = model(
            "layer_pattern: \"DDDF\", delta_net: (key_heads: 4, value_heads: 8, value_dim: 64), output_gate: true",
        );
        let LayerKinds { kinds, layer_kinds } = layer_kinds(&m, 64);
        assert_eq!(layer_kinds, [0, 0, 0, 1, 0, 0]);
        let of = kinds.iter().map(|kind| (kind.delta, kind.rope.is_some()));
        assert_eq!(of.collect::<Vec<_>>(), [(true, false), (false, true)]);
        let (key_heads, value_heads, key_dim, value_dim, taps) = (4, 8, 128, 64, 4);
        let expected = DeltaShape { key_heads, value_heads, key_dim, value_dim, taps };
        assert_eq!(delta_net(&m), Some(expected));
        assert!(architecture(&m, Dtype::F32).output_gate);
        assert_eq!(delta_net(&model("")), None);
    }

    #[test]
    fn layers_with_experts_are_a_kind_of_their_own() {
        let m = model(
            "layer_pattern: \"WF\", window: 8, \
            experts: (count: 8, per_token: 2, ffn_hidden: 64, dense_layers: [0, 3], balance: Megatron(factor: 0.01))",
        );
        let LayerKinds { kinds, layer_kinds } = layer_kinds(&m, 64);
        assert_eq!(layer_kinds, [0, 1, 2, 3, 2, 1]);
        let of = kinds.iter().map(|kind| (kind.window, kind.experts));
        let expected = [(Some(8), false), (None, true), (Some(8), true), (None, false)];
        assert_eq!(of.collect::<Vec<_>>(), expected);
        let shape = experts(&m);
        let balance = Some(Balance::Megatron(0.01));
        let (count, per_token, ffn_hidden, normalize) = (8, 2, 64, true);
        let expected = ExpertsShape {
            count,
            per_token,
            ffn_hidden,
            normalize,
            sigmoid: None,
            shared_hidden: None,
            shared_gate: false,
            biases: false,
            balance,
        };
        assert_eq!(shape, Some(expected));
        assert_eq!(experts(&model("")), None);
        let m = model(
            "experts: (count: 8, per_token: 2, ffn_hidden: 64, shared_hidden: 32, shared_gate: true, \
            scoring: Sigmoid(groups: 4, kept_groups: 2, scale: 2.5))",
        );
        let shape = experts(&m).unwrap();
        let sigmoid = SigmoidShape { groups: 4, kept_groups: 2, scale: 2.5 };
        assert_eq!((shape.sigmoid, shape.shared_hidden), (Some(sigmoid), Some(32)));
        assert!(shape.shared_gate);
    }

    /// Source: the sizes of Gemma 3 12B, 27B and 4B, rounded by PyTorch.
    #[test]
    fn the_root_of_the_hidden_channels_is_rounded_as_gemma_rounds_it() {
        let with =
            |hidden: usize, scale: f32| ModelConfig { hidden, embedding_scale: scale, ..model("") };
        for (hidden, rounded) in [(3840, 62.0), (5376, 73.5), (2560, 50.5)] {
            let root = (hidden as f64).sqrt() as f32;
            let m = with(hidden, root);
            assert_eq!(embedding_scale(&m, Dtype::Bf16), rounded);
            assert_eq!(embedding_scale(&m, Dtype::F32), f64::from(root));
        }
        // Other factors are numbers of fp32 in their classes.
        assert_eq!(embedding_scale(&with(3840, 12.1), Dtype::Bf16), 12.1);
    }

    /// Source: section 3.4 of the paper of YaRN, and the table of Phi-4-mini.
    #[test]
    fn factors_of_cosines_follow_from_the_scaling() {
        let factor_of = |keys: &str, seq_len: usize| {
            let m = model(keys);
            match &rope(&m.rope, m.head_dim, seq_len).scaling {
                RopeScaling::Yarn { attention_factor, .. } => (*attention_factor, 0.0),
                RopeScaling::Listed { attention_factor, factors } => {
                    (*attention_factor, factors[0])
                }
                other => panic!("{other:?}"),
            }
        };
        let yarn = "rope: (scaling: Yarn(factor: 8.0, original_seq_len: 32))";
        assert!((factor_of(yarn, 64).0 - 1.207_944_154_167_983_6).abs() < 1e-15);
        let given =
            "rope: (scaling: Yarn(factor: 8.0, original_seq_len: 32, attention_factor: 1.0))";
        assert_eq!(factor_of(given, 64).0, 1.0);
        let list = |factor: f64| format!("{:?}", [factor; 96]);
        let long = format!(
            "rope: (rotated_share: 0.75, scaling: LongRope(factor: 32.0, original_seq_len: 4096, short_factors: {}, long_factors: {}))",
            list(1.0),
            list(2.0)
        );
        // sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5 / 12).
        let (factor, short) = factor_of(&long, 4096);
        assert!((factor - (17.0f64 / 12.0).sqrt()).abs() < 1e-15, "{factor}");
        assert_eq!((short, factor_of(&long, 4097).1), (1.0, 2.0));
    }

    /// Counted by hand for Qwen3.5 9B: in each four layers one has attention and three a gated delta net.
    #[test]
    fn a_model_with_gated_delta_nets_has_the_flops_counted_by_hand() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = folder.join("../../configs/qwen3.5-9b-one-gpu.ron");
        let of = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            crate::build::shape(
                &config::load(&path, &sets).unwrap_or_else(|e| panic!("{e}")).config,
            )
        };
        let whole = of(&["model.seq_len=4096"]);
        // Rows of q, of the gate of the output, of k, of v; and the projection back.
        let attention = 4096 * (4096 + 4096 + 1024 + 1024) + 4096 * 4096;
        // Rows of q, k, v, of the output's gate, of step sizes and decays; and the projection back.
        let delta = 4096 * (2048 + 2048 + 4096 + 4096 + 32 + 32) + 4096 * 4096;
        let linears = 8.0 * f64::from(attention)
            + 24.0 * f64::from(delta)
            + 32.0 * 3.0 * 4096.0 * 12288.0
            + 248_320.0 * 4096.0;
        // Scores, and weights times values, each with half of 4096 keys, forward and twice backward.
        let keys = 8.0 * 3.0 * 2.0 * 2.0 * (4096.0 / 2.0) * (16.0 * 256.0);
        // By row and head of values: three products with a state of 128 x 128; and inside a chunk of 64
        // rows half of q k', k k', and two products with values.
        let rule = 3.0 * 128.0 * 128.0 + 64.0 / 2.0 * (128.0 + 128.0 + 128.0 + 128.0);
        let rule = 24.0 * 3.0 * 2.0 * 32.0 * rule;
        let expected = 6.0 * linears + keys + rule;
        let flops = whole.model_flops_per_token();
        assert!((flops / expected - 1.0).abs() < 1e-3, "{flops:e} {expected:e}");
        // Without the gradients of frozen weights.
        let adapters = of(&["model.seq_len=4096", "adapter=Lora(rank: 16)"]);
        let expected = 4.0 * linears + keys + rule;
        let flops = adapters.model_flops_per_token();
        assert!((flops / expected - 1.0).abs() < 1e-3, "{flops:e} {expected:e}");
    }
}
