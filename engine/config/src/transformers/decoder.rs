//! Decoders with RMSNorm and a gated MLP: Llama and later classes.

use super::classes::ModelClass;
use super::experts::experts;
use super::keys::{Keys, Number, SCALES};
use super::layers::{LayerLetters, layer_letters};
use super::rope::{RopeContext, Ropes, ropes, unscaled_queries};
use super::{FolderModel, HEADS, HIDDEN, INNER, LAYERS, TOKENS, plain};
use crate::layer_pattern::DELTA;
use crate::layer_pattern::shortest;
use crate::{DeltaNetConfig, Family, Gate, ModelConfig, NormPlace};
use device::{MOST_TAPS, WIDEST_DELTA_KEY};
use files::foreign_text::foreign;
use files::json::shown;
use serde_json::{Value, json};

/// Keys that do not change what a model computes in training.
const HARMLESS: [&str; 27] = [
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "dtype",
    "finetuning_task",
    "hidden_dropout",
    "id2label",
    "label2id",
    "max_length",
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_return_dict",
    "vocab_file",
];

/// Defaults of a class that its published files leave out.
struct ClassDefaults {
    heads: Option<usize>,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab: Option<usize>,
    positions: Option<usize>,
    norm_eps: f64,
    tied: bool,
}

impl ClassDefaults {
    /// Source: transformers 5.24. Other classes have defaults, too, but no file leaves them out.
    fn of(class: ModelClass) -> Self {
        let others = Self {
            heads: None,
            kv_heads: None,
            head_dim: None,
            vocab: None,
            positions: None,
            norm_eps: 1e-6,
            tied: false,
        };
        let gemma =
            Self { heads: Some(8), kv_heads: Some(4), head_dim: Some(256), tied: true, ..others };
        match class {
            ModelClass::Gemma2 => Self { vocab: Some(256_000), positions: Some(8192), ..gemma },
            ModelClass::Gemma3 => Self { vocab: Some(262_208), positions: Some(131_072), ..gemma },
            ModelClass::Olmo2
            | ModelClass::Olmo3
            | ModelClass::Phi3
            | ModelClass::Ministral3
            | ModelClass::Mixtral
            | ModelClass::Olmoe
            | ModelClass::Glm4Moe
            | ModelClass::GptOss => Self { norm_eps: 1e-5, ..others },
            ModelClass::SmolLm3 => Self { tied: true, ..others },
            ModelClass::Qwen35 | ModelClass::Qwen35Moe | ModelClass::Qwen3Next => {
                Self { head_dim: Some(256), ..others }
            }
            ModelClass::Gpt2
            | ModelClass::Llama
            | ModelClass::Mistral
            | ModelClass::Qwen2
            | ModelClass::Qwen3
            | ModelClass::Granite
            | ModelClass::SeedOss
            | ModelClass::Qwen3Moe => others,
        }
    }
}

/// Sizes of the attention of a model.
struct HeadSizes {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

pub(super) fn decoder(keys: &mut Keys, class: ModelClass) -> FolderModel {
    let usual = ClassDefaults::of(class);
    let HeadSizes { hidden, heads, kv_heads, head_dim } = head_sizes(keys, class, &usual);
    fixed_parts(keys, class);
    let (qkv_bias, proj_bias) = biases(keys, class);
    let most = keys.whole_or("max_position_embeddings", TOKENS, usual.positions);
    let layers = keys.whole("num_hidden_layers", LAYERS);
    let LayerLetters { letters, window } = layer_letters(keys, class, layers);
    let Ropes { full, windowed } = ropes(keys, RopeContext { class, head_dim, most });
    let unscaled = unscaled_queries(keys).filter(|_| class == ModelClass::Ministral3);
    let scales = scales(keys, class, hidden, head_dim);
    let ffn_hidden = match class {
        // All its layers have experts, and its class does not read the other key.
        ModelClass::Qwen35Moe => {
            keys.read_keys.push("intermediate_size");
            keys.whole("moe_intermediate_size", INNER)
        }
        _ => keys.whole("intermediate_size", INNER),
    };
    let experts = experts(keys, class, layers, ffn_hidden);
    let qk_norm = norms_queries(keys, class);
    let delta_net = delta_net(keys, class).filter(|_| letters.contains(&DELTA));
    let model = ModelConfig {
        family: Family::Llama,
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        seq_len: most.min(unscaled.unwrap_or(most)),
        vocab: keys.vocab(usual.vocab),
        ffn_hidden,
        experts,
        init_std: keys.number("initializer_range", 0.0, 0.02),
        norm_eps: keys.number("rms_norm_eps", 0.0, usual.norm_eps),
        rope: full,
        layer_pattern: shortest(&letters),
        window,
        window_rope: windowed,
        delta_net,
        tied: keys.flag("tie_word_embeddings", usual.tied),
        qkv_bias,
        proj_bias,
        qk_norm,
        qk_norm_width: matches!(class, ModelClass::Olmo2 | ModelClass::Olmo3 | ModelClass::Olmoe),
        attention_sinks: class == ModelClass::GptOss,
        output_gate: class.has_delta_nets(),
        norm_offset: class.offsets_gains(),
        norm_place: match class {
            ModelClass::Gemma2 | ModelClass::Gemma3 => NormPlace::Around,
            ModelClass::Olmo2 | ModelClass::Olmo3 => NormPlace::After,
            _ => NormPlace::Before,
        },
        gate: gate(keys, class),
        attention_scale: scales.attention,
        score_cap: scales.score_cap,
        logit_cap: scales.logit_cap,
        embedding_scale: scales.embedding,
        residual_scale: scales.residual,
        logit_scale: scales.logits,
        ..plain()
    };
    refuse_unknown(keys);
    let positions = match unscaled {
        Some(unscaled) if unscaled < most => "original_max_position_embeddings",
        _ => "max_position_embeddings",
    };
    FolderModel { model, positions, class, wrapper: None }
}

fn head_sizes(keys: &mut Keys, class: ModelClass, usual: &ClassDefaults) -> HeadSizes {
    let heads = keys.whole_or("num_attention_heads", HEADS, usual.heads);
    let hidden = keys.whole("hidden_size", HIDDEN);
    let head_dim = match class {
        // The classes have other defaults than the quotient, but no file leaves out the key.
        ModelClass::Qwen3 | ModelClass::Ministral3 | ModelClass::SeedOss | ModelClass::GptOss => {
            keys.whole("head_dim", HEADS)
        }
        _ => keys.whole_or("head_dim", HEADS, usual.head_dim.or(Some(hidden / heads))),
    };
    let kv_heads = match class {
        ModelClass::Llama
        | ModelClass::Olmo2
        | ModelClass::Olmo3
        | ModelClass::Phi3
        | ModelClass::Granite
        | ModelClass::Olmoe => keys.whole_or("num_key_value_heads", HEADS, Some(heads)),
        _ => keys.whole_or("num_key_value_heads", HEADS, usual.kv_heads),
    };
    if class == ModelClass::Olmoe && head_dim * heads != hidden && keys.wrong.is_empty() {
        keys.wrong.push(format!(
            "`head_dim` is {head_dim}, and its class has norms over `hidden_size` elements, which is {hidden}, not over {heads} heads of {head_dim}"
        ));
    }
    let of_queries = Number { key: "num_attention_heads", value: heads };
    if !keys.found.contains_key("head_dim") && usual.head_dim.is_none() {
        let why = "name `head_dim`, or mend one of them";
        keys.divides(of_queries, Number { key: "hidden_size", value: hidden }, why);
    }
    let why = "as many heads of queries share each head of keys and values";
    keys.divides(Number { key: "num_key_value_heads", value: kv_heads }, of_queries, why);
    if head_dim % 2 > 0 && keys.wrong.is_empty() {
        keys.wrong.push(format!(
            "`head_dim` is {head_dim}, an odd number: one half of a head is rotated against the other"
        ));
    }
    HeadSizes { hidden, heads, kv_heads, head_dim }
}

/// Requires the parts that no key of a config changes.
fn fixed_parts(keys: &mut Keys, class: ModelClass) {
    let dropouts: &[&'static str] = match class {
        ModelClass::Phi3 => &["attention_dropout", "resid_pdrop", "embd_pdrop"],
        // Their files have the dropout of the first training; `model.dropout` decides here.
        ModelClass::Granite | ModelClass::SeedOss => {
            keys.read_keys.extend(["attention_dropout", "residual_dropout"]);
            &[]
        }
        _ => &["attention_dropout"],
    };
    for key in dropouts.iter().copied() {
        keys.fixed(
            key,
            &[json!(0.0), json!(0)],
            "onebox has no dropout of attention weights alone; write 0.0, and `model.dropout` in the config drops there and elsewhere",
        );
    }
    if class.is_gemma() {
        let gelu = &[json!("gelu_pytorch_tanh")];
        keys.fixed("hidden_activation", gelu, "gates of a Gemma are GELU in its tanh form");
        keys.fixed("hidden_act", gelu, "gates of a Gemma are GELU in its tanh form");
        let why = "tokens do not see later ones here";
        keys.fixed("use_bidirectional_attention", &[json!(false)], why);
    } else {
        keys.fixed("hidden_act", &[json!("silu"), json!("swish")], "gates here are SiLU");
    }
    if class == ModelClass::Gemma3 {
        keys.fixed("attn_logit_softcapping", &[Value::Null], "its class caps no scores");
    }
    if class == ModelClass::Phi3 {
        let why = "onebox does not know what else it means";
        keys.fixed("full_attn_mod", &[json!(1)], why);
        keys.fixed("interpolate_factor", &[json!(1)], why);
        keys.fixed("lm_head_bias", &[json!(false)], "the output has no bias here");
    }
    if class.has_delta_nets() {
        let gated = "attention of its class has a gate of its output";
        keys.fixed("attn_output_gate", &[json!(true)], gated);
        let why = "onebox keeps the states of gated delta nets in fp32";
        keys.fixed("mamba_ssm_dtype", &[json!("float32")], why);
        // Layers that predict several tokens are kept as they are.
        keys.read_keys.extend(["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"]);
    }
    if matches!(class, ModelClass::Qwen35 | ModelClass::Qwen35Moe) {
        // Files have this key, which their classes do not read.
        let why = "all layers of its class are alike";
        keys.fixed("mlp_only_layers", &[json!([])], why);
    }
    keys.fixed("mlp_bias", &[json!(false)], "gated MLPs have no biases here");
    keys.fixed("is_decoder", &[json!(false), json!(true)], "it says whether a model is a decoder");
    keys.fixed("add_cross_attention", &[json!(false)], "there is none here");
    keys.fixed("is_encoder_decoder", &[json!(false)], "there is no encoder here");
    keys.fixed("cross_attention_hidden_size", &[Value::Null], "there is none here");
    keys.fixed("pruned_heads", &[Value::Null, json!({})], "all heads are there");
    keys.fixed("tie_encoder_decoder", &[json!(false)], "there is no encoder here");
}

/// Whether the projections to q, k and v have biases, and whether the output projection of
/// attention has one.
fn biases(keys: &mut Keys, class: ModelClass) -> (bool, bool) {
    match class {
        ModelClass::SeedOss => {
            (keys.flag("attention_bias", true), keys.flag("attention_out_bias", false))
        }
        ModelClass::Qwen2
        | ModelClass::Mistral
        | ModelClass::Ministral3
        | ModelClass::Mixtral
        | ModelClass::Phi3
        | ModelClass::Gpt2 => {
            let biased = class == ModelClass::Qwen2;
            keys.fixed("attention_bias", &[json!(biased)], "its class does not have it so");
            (biased, false)
        }
        // A bias of the projection back would come before the norm at its end.
        ModelClass::Gemma2 | ModelClass::Gemma3 | ModelClass::Olmo2 | ModelClass::Olmo3 => {
            let why = "onebox adds no bias before the norm at the end of attention";
            keys.fixed("attention_bias", &[json!(false)], why);
            (false, false)
        }
        ModelClass::Llama
        | ModelClass::Qwen3
        | ModelClass::SmolLm3
        | ModelClass::Granite
        | ModelClass::Qwen3Moe
        | ModelClass::Olmoe => {
            let biased = keys.flag("attention_bias", false);
            (biased, biased)
        }
        ModelClass::Glm4Moe => (keys.flag("attention_bias", false), false),
        ModelClass::GptOss => {
            let biased = keys.flag("attention_bias", true);
            (biased, biased)
        }
        ModelClass::Qwen35 | ModelClass::Qwen35Moe | ModelClass::Qwen3Next => {
            let why = "onebox has no biases beside a gate of attention's output";
            keys.fixed("attention_bias", &[json!(false)], why);
            (false, false)
        }
    }
}

/// Activation of the gates of MLPs and experts.
fn gate(keys: &mut Keys, class: ModelClass) -> Gate {
    match class {
        ModelClass::GptOss => {
            // Its class does not read the second name of the length that YaRN extends.
            keys.read_keys.push("initial_context_length");
            let slope = keys.number_within("swiglu_alpha", SCALES, 1.702) as f32;
            Gate::ClampedSilu {
                slope,
                limit: keys.number_within("swiglu_limit", SCALES, 7.0) as f32,
            }
        }
        class if class.is_gemma() => Gate::Gelu,
        _ => Gate::Silu,
    }
}

/// Whether queries and keys have a norm.
fn norms_queries(keys: &mut Keys, class: ModelClass) -> bool {
    match class {
        ModelClass::Glm4Moe => keys.flag("use_qk_norm", false),
        _ => matches!(
            class,
            ModelClass::Qwen3
                | ModelClass::Gemma3
                | ModelClass::Olmo2
                | ModelClass::Olmo3
                | ModelClass::Qwen3Moe
                | ModelClass::Olmoe
                | ModelClass::Qwen35
                | ModelClass::Qwen35Moe
                | ModelClass::Qwen3Next
        ),
    }
}

/// Sizes of the gated delta nets of a class that has some.
fn delta_net(keys: &mut Keys, class: ModelClass) -> Option<DeltaNetConfig> {
    if !class.has_delta_nets() {
        return None;
    }
    let mut size = |key, most, usual| keys.whole_or(key, 1..=most, Some(usual));
    Some(DeltaNetConfig {
        key_heads: size("linear_num_key_heads", 65_536, 16),
        value_heads: size("linear_num_value_heads", 65_536, 32),
        key_dim: size("linear_key_head_dim", WIDEST_DELTA_KEY as u64, 128),
        value_dim: size("linear_value_head_dim", 1024, 128),
        taps: size("linear_conv_kernel_dim", MOST_TAPS as u64, 4),
    })
}

/// Factors and caps of a model.
struct Scales {
    attention: Option<f32>,
    score_cap: Option<f32>,
    logit_cap: Option<f32>,
    embedding: f32,
    residual: f32,
    logits: f32,
}

fn scales(keys: &mut Keys, class: ModelClass, hidden: usize, head_dim: usize) -> Scales {
    let none = Scales {
        attention: None,
        score_cap: None,
        logit_cap: None,
        embedding: 1.0,
        residual: 1.0,
        logits: 1.0,
    };
    // The usual factor of attention is no key.
    let usual = (head_dim as f64).sqrt().recip() as f32;
    let unless_usual = |scale: f64| Some(scale as f32).filter(|scale| *scale != usual);
    match class {
        ModelClass::Gemma2 | ModelClass::Gemma3 => {
            let is_2 = class == ModelClass::Gemma2;
            let of_queries = keys.whole_or("query_pre_attn_scalar", 1..=1_000_000, Some(256));
            Scales {
                attention: unless_usual((of_queries as f64).sqrt().recip()),
                score_cap: match is_2 {
                    true => keys.cap("attn_logit_softcapping", Some(50.0)),
                    false => None,
                },
                logit_cap: keys.cap("final_logit_softcapping", is_2.then_some(30.0)),
                embedding: (hidden as f64).sqrt() as f32,
                ..none
            }
        }
        ModelClass::Granite => {
            let [attention, embedding, residual, logits] = [
                "attention_multiplier",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
            ]
            .map(|key| keys.number_within(key, SCALES, 1.0));
            Scales {
                attention: unless_usual(attention),
                embedding: embedding as f32,
                residual: residual as f32,
                // The class divides by its number.
                logits: logits.recip() as f32,
                ..none
            }
        }
        _ => none,
    }
}

/// Refuses keys that onebox does not know, if they may change what is computed.
fn refuse_unknown(keys: &mut Keys) {
    let known = |key: &&String| {
        key.starts_with('_')
            || keys.read_keys.contains(&key.as_str())
            || HARMLESS.contains(&key.as_str())
    };
    let strange: Vec<String> = keys
        .found
        .iter()
        .filter(|(key, value)| !known(key) && !value.is_null() && **value != json!(false))
        .map(|(key, value)| {
            format!(
                "`{}` is {}, and onebox does not know what it changes: if nothing, take it out",
                foreign(key),
                shown(value)
            )
        })
        .collect();
    keys.wrong.extend(strange);
}

#[cfg(test)]
mod tests {
    use crate::transformers::{WrapperClass, folder_model};
    use crate::{DeltaNetConfig, ModelConfig};
    use serde_json::{Value, json};

    #[test]
    fn a_bias_before_the_norm_at_the_end_of_attention_is_refused() {
        for (kind, class) in [
            ("gemma2", "Gemma2ForCausalLM"),
            ("gemma3_text", "Gemma3ForCausalLM"),
            ("olmo2", "Olmo2ForCausalLM"),
            ("olmo3", "Olmo3ForCausalLM"),
        ] {
            let config = json!({
                "model_type": kind, "architectures": [class], "hidden_size": 64, "intermediate_size": 160,
                "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
                "max_position_embeddings": 512, "attention_bias": true
            });
            let refusal = folder_model(config.to_string().as_bytes()).expect_err(kind);
            let why = "`attention_bias` is true, not false: onebox adds no bias before the norm";
            let found = refusal.wrong.iter().any(|wrong| wrong.contains(why));
            assert!(found, "{kind}: {refusal:?}");
        }
    }

    /// Source: the defaults of `Qwen3_5TextConfig` in transformers 5.24, and the keys of the files of
    /// Qwen3.5, with small sizes.
    #[test]
    fn a_qwen_has_gated_delta_nets_in_three_layers_of_four() {
        let text = json!({
            "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512,
            "attn_output_gate": true, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
            "linear_num_key_heads": 4, "linear_num_value_heads": 8,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": true
            }
        });
        let read = |config: &Value| folder_model(config.to_string().as_bytes());
        let m = read(&text).unwrap().model;
        assert_eq!(m.layer_pattern, "DDDF");
        let (key_heads, value_heads, key_dim, value_dim, taps) = (4, 8, 128, 128, 4);
        let delta = DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, taps };
        assert_eq!(m.delta_net, Some(delta));
        assert_eq!((m.head_dim, m.rope.rotated_share, m.rope.theta), (256, 0.25, 1e7));
        assert!(m.output_gate && m.qk_norm && m.norm_offset && !m.qkv_bias && !m.tied);
        let wrapper = json!({
            "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text,
            "vision_config": { "model_type": "qwen3_5" }, "tie_word_embeddings": true
        });
        let described = read(&wrapper).unwrap();
        assert_eq!(described.wrapper, Some(WrapperClass::Qwen35));
        assert_eq!(described.model, ModelConfig { tied: true, ..m.clone() });
        let with = |key: &str, value: Value| {
            let mut text = text.clone();
            text[key] = value;
            read(&text)
        };
        let listed: Vec<&str> =
            (0..8).map(|l| if l == 0 { "full_attention" } else { "linear_attention" }).collect();
        assert_eq!(with("layer_types", json!(listed)).unwrap().model.layer_pattern, "FDDDDDDD");
        assert_eq!(with("full_attention_interval", json!(2)).unwrap().model.layer_pattern, "DF");
        let full = with("full_attention_interval", json!(1)).unwrap().model;
        assert_eq!((full.layer_pattern.as_str(), full.delta_net), ("F", None));
        for (key, value, message) in [
            ("attn_output_gate", json!(false), "a gate of its output"),
            ("attention_bias", json!(true), "no biases beside a gate"),
            ("mamba_ssm_dtype", json!("bfloat16"), "keeps the states of gated delta nets in fp32"),
            ("linear_key_head_dim", json!(256), "`linear_key_head_dim` is 256"),
            (
                "layer_types",
                json!(vec!["sliding_attention"; 8]),
                "full_attention and linear_attention",
            ),
            ("hidden_act", json!("gelu"), "gates here are SiLU"),
        ] {
            let refusal = with(key, value).expect_err(key);
            let found = refusal.wrong.iter().any(|wrong| wrong.contains(message));
            assert!(found, "{key}: {refusal:?}");
        }
    }
}
