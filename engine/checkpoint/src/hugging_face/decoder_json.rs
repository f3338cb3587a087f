//! Keys of a `config.json` for each class of decoders with RMSNorm.

#[cfg(test)]
mod tests;

use config::layer_pattern::{DELTA, UNROTATED, WINDOWED};
use config::transformers::{ModelClass, WINDOW};
use config::{Balance, ExpertsConfig, Gate, ModelConfig, RopeConfig, RopeScaling, ScoreRule};
use layout::build::decimal;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Classes for models without a folder, in the order in which they are tried.
pub(super) const CLASSES: [ModelClass; 20] = [
    ModelClass::Llama,
    ModelClass::Qwen2,
    ModelClass::Qwen3,
    // The same mathematics as a Llama's; in version 5 a Llama's heads always have size hidden / heads.
    ModelClass::Mistral,
    ModelClass::SeedOss,
    ModelClass::Gemma3,
    ModelClass::Gemma2,
    ModelClass::Olmo2,
    ModelClass::Olmo3,
    ModelClass::SmolLm3,
    ModelClass::Granite,
    ModelClass::Phi3,
    ModelClass::Qwen3Moe,
    ModelClass::Mixtral,
    ModelClass::Olmoe,
    ModelClass::Glm4Moe,
    ModelClass::GptOss,
    ModelClass::Qwen35,
    ModelClass::Qwen35Moe,
    ModelClass::Qwen3Next,
];

/// Whether a class takes the size of the model's heads.
pub(super) const fn takes_heads(class: ModelClass, m: &ModelConfig) -> bool {
    m.head_dim * m.heads == m.hidden
        || !matches!(class, ModelClass::Llama | ModelClass::Qwen2 | ModelClass::Olmoe)
}

/// Keys of the kinds of layers.
const LAYER_KEYS: [&str; 10] = [
    "full_attention_interval",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "sliding_window_size",
    "layer_types",
    "use_sliding_window",
    "max_window_layers",
    "no_rope_layers",
    "no_rope_layer_interval",
];

/// Keys of experts that a folder may write in several ways, or that onebox does not use.
const EXPERT_KEYS: [&str; 4] =
    ["clip_qkv", "decoder_sparse_step", "mlp_only_layers", "router_jitter_noise"];

/// Keys of rotary positions.
const ROPE_KEYS: [&str; 6] = [
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
];

/// The keys of a model of the class `class`. `came`: the keys of the folder that it came from, if
/// that has this class; its kinds of layers, positions and dropout are kept.
pub(super) fn decoder_keys(
    m: &ModelConfig,
    class: ModelClass,
    dtype: &str,
    came: Option<&BTreeMap<String, Value>>,
) -> Value {
    let mut all = json!({
        "architectures": [class.names()[0]],
        // onebox has no dropout of attention weights alone.
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "dtype": dtype,
        "eos_token_id": null,
        "head_dim": m.head_dim,
        "hidden_size": m.hidden,
        "initializer_range": decimal(m.init_std),
        "intermediate_size": m.ffn_hidden,
        "max_position_embeddings": m.seq_len,
        "model_type": class.model_type(),
        "num_attention_heads": m.heads,
        "num_hidden_layers": m.layers,
        "num_key_value_heads": m.kv_heads,
        "rms_norm_eps": decimal(m.norm_eps),
        "tie_word_embeddings": m.tied,
        "use_cache": true,
        "vocab_size": m.vocab,
    });
    part_keys(&mut all, m, class);
    expert_keys(&mut all, m, class, came);
    let is_old = matches!(
        class,
        ModelClass::Llama | ModelClass::Mistral | ModelClass::Qwen2 | ModelClass::Qwen3
    );
    if !is_old {
        // Tokens that these classes have by default may be outside of the vocabulary.
        all["pad_token_id"] = json!(null);
    }
    match came {
        Some(came) => {
            keep(&mut all, came, &LAYER_KEYS);
            if class == ModelClass::Mistral && !came.contains_key("sliding_window") {
                all["sliding_window"] = json!(WINDOW);
            }
            keep(&mut all, came, &["max_position_embeddings", "residual_dropout"]);
            if matches!(class, ModelClass::Granite | ModelClass::SeedOss) {
                keep(&mut all, came, &["attention_dropout"]);
            }
        }
        None => layer_keys(&mut all, m, class),
    }
    match came.filter(|_| !is_old) {
        Some(came) => keep(&mut all, came, &ROPE_KEYS),
        None => rope_keys(&mut all, m, class),
    }
    all
}

/// Copies the `keys` that the original file has.
fn keep(all: &mut Value, came: &BTreeMap<String, Value>, keys: &[&str]) {
    for key in keys {
        if let Some(value) = came.get(*key) {
            all[*key] = value.clone();
        }
    }
}

/// Keys of activations, biases and factors.
fn part_keys(all: &mut Value, m: &ModelConfig, class: ModelClass) {
    match class.is_gemma() {
        true => all["hidden_activation"] = json!("gelu_pytorch_tanh"),
        false => all["hidden_act"] = json!("silu"),
    }
    match class {
        ModelClass::Gpt2
        | ModelClass::Mistral
        | ModelClass::Ministral3
        | ModelClass::Qwen2
        | ModelClass::Phi3
        | ModelClass::Mixtral => {}
        ModelClass::SeedOss => {
            all["attention_bias"] = json!(m.qkv_bias);
            all["attention_out_bias"] = json!(m.proj_bias);
            all["residual_dropout"] = json!(0.0);
            all["mlp_bias"] = json!(false);
        }
        ModelClass::Llama
        | ModelClass::Qwen3
        | ModelClass::Gemma2
        | ModelClass::Gemma3
        | ModelClass::Olmo2
        | ModelClass::Olmo3
        | ModelClass::SmolLm3
        | ModelClass::Granite
        | ModelClass::Qwen3Moe
        | ModelClass::Olmoe
        | ModelClass::GptOss => all["attention_bias"] = json!(m.proj_bias),
        ModelClass::Glm4Moe => {
            all["attention_bias"] = json!(m.qkv_bias);
            all["use_qk_norm"] = json!(m.qk_norm);
        }
        ModelClass::Qwen35 | ModelClass::Qwen35Moe | ModelClass::Qwen3Next => {
            all["attention_bias"] = json!(false);
        }
    }
    if let Some(delta) = m.delta_net.as_ref().filter(|_| class.has_delta_nets()) {
        all["linear_num_key_heads"] = json!(delta.key_heads);
        all["linear_num_value_heads"] = json!(delta.value_heads);
        all["linear_key_head_dim"] = json!(delta.key_dim);
        all["linear_value_head_dim"] = json!(delta.value_dim);
        all["linear_conv_kernel_dim"] = json!(delta.taps);
    }
    let usual_heads = m.head_dim * m.heads == m.hidden;
    match class {
        ModelClass::Gemma2 | ModelClass::Gemma3 => {
            // A whole number in these classes.
            let scale = m.attention_scale.map_or(m.head_dim as f64, |scale| {
                (f64::from(scale) * f64::from(scale)).recip().round()
            });
            all["query_pre_attn_scalar"] = json!(scale as u64);
            all["attn_logit_softcapping"] = json!(m.score_cap.map(decimal));
            all["final_logit_softcapping"] = json!(m.logit_cap.map(decimal));
        }
        ModelClass::Granite => {
            let usual = (m.head_dim as f64).sqrt().recip();
            all["attention_multiplier"] = json!(m.attention_scale.map_or(usual, decimal));
            all["embedding_multiplier"] = json!(decimal(m.embedding_scale));
            all["residual_multiplier"] = json!(decimal(m.residual_scale));
            all["logits_scaling"] = json!(reciprocal(m.logit_scale));
            all["mlp_bias"] = json!(false);
        }
        ModelClass::Phi3 => {
            all["embd_pdrop"] = json!(0.0);
            all["resid_pdrop"] = json!(0.0);
        }
        ModelClass::SmolLm3 => all["mlp_bias"] = json!(false),
        ModelClass::GptOss => {
            if let Gate::ClampedSilu { slope, limit } = m.gate {
                all["swiglu_alpha"] = json!(decimal(slope));
                all["swiglu_limit"] = json!(decimal(limit));
            }
        }
        _ => {}
    }
    let without_key = matches!(
        class,
        ModelClass::Olmo2
            | ModelClass::Olmo3
            | ModelClass::SmolLm3
            | ModelClass::Granite
            | ModelClass::Phi3
            | ModelClass::Olmoe
    );
    if without_key
        && usual_heads
        && let Some(all) = all.as_object_mut()
    {
        all.remove("head_dim");
    }
}

/// Keys of experts. A model without experts gets none, and is no model of a class with experts.
fn expert_keys(
    all: &mut Value,
    m: &ModelConfig,
    class: ModelClass,
    came: Option<&BTreeMap<String, Value>>,
) {
    let Some(experts) = m.experts.as_ref().filter(|_| class.has_experts()) else { return };
    // Either name may stand in a file of version 5.
    let first = if class == ModelClass::Glm4Moe { "n_routed_experts" } else { "num_experts" };
    let names = [first, "num_local_experts"];
    let is_local = matches!(class, ModelClass::Mixtral | ModelClass::GptOss);
    let of_class = names[usize::from(is_local)];
    let kept = came.and_then(|came| names.into_iter().find(|name| came.contains_key(*name)));
    let count = kept.unwrap_or(of_class);
    all[count] = json!(experts.count);
    all["num_experts_per_tok"] = json!(experts.per_token);
    match class {
        ModelClass::Qwen3Moe | ModelClass::Qwen3Next => {
            all["moe_intermediate_size"] = json!(experts.ffn_hidden);
            all["decoder_sparse_step"] = json!(1);
            all["mlp_only_layers"] = json!(experts.dense_layers);
        }
        ModelClass::Qwen35Moe => {
            all["moe_intermediate_size"] = json!(experts.ffn_hidden);
            if let Some(all) = all.as_object_mut() {
                // All its layers have experts.
                all.remove("intermediate_size");
            }
        }
        ModelClass::Glm4Moe => glm_keys(all, experts),
        _ => all["intermediate_size"] = json!(experts.ffn_hidden),
    }
    if class.gates_shared_expert() {
        all["shared_expert_intermediate_size"] = json!(experts.shared_hidden);
    }
    // A Qwen3.5 always divides the weights of a token by their sum.
    if !is_local && class != ModelClass::Qwen35Moe {
        all["norm_topk_prob"] = json!(experts.normalize);
    }
    if let Some(came) = came {
        keep(all, came, &EXPERT_KEYS);
        keep(all, came, &["router_aux_loss_coef"]);
    }
    if class == ModelClass::Glm4Moe {
        // Its class has no balance loss.
        all["output_router_logits"] = json!(false);
        return;
    }
    let balance = match experts.balance {
        Balance::HuggingFace { factor } => Some(factor),
        // Neither is a loss of transformers.
        Balance::Off | Balance::Megatron { .. } => None,
    };
    all["output_router_logits"] = json!(balance.is_some());
    if let Some(factor) = balance {
        all["router_aux_loss_coef"] = json!(decimal(factor));
    }
}

/// Keys of the experts of a GLM-4.5. A model with other experts reads back otherwise.
fn glm_keys(all: &mut Value, experts: &ExpertsConfig) {
    all["moe_intermediate_size"] = json!(experts.ffn_hidden);
    all["n_shared_experts"] = json!(experts.shared_hidden / experts.ffn_hidden.max(1));
    // Dense layers come first in its class.
    all["first_k_dense_replace"] = json!(experts.dense_layers.len());
    // Tensors of predictions of several tokens come with the file of their folder.
    all["num_nextn_predict_layers"] = json!(0);
    if let ScoreRule::Sigmoid { groups, kept_groups, scale } = experts.scoring {
        all["n_group"] = json!(groups);
        all["topk_group"] = json!(kept_groups);
        all["routed_scaling_factor"] = json!(decimal(scale));
    }
}

/// The number that the class of Granite divides by; a short one if it gives the same factor.
fn reciprocal(scale: f32) -> f64 {
    let exact = decimal(scale).recip();
    let short = decimal(exact as f32);
    if short.recip() as f32 == scale { short } else { exact }
}

/// Keys of the kinds of layers of a model without a folder.
fn layer_keys(all: &mut Value, m: &ModelConfig, class: ModelClass) {
    let types = || {
        let kind = |letter| match letter {
            WINDOWED => "sliding_attention",
            DELTA => "linear_attention",
            _ => "full_attention",
        };
        json!(m.layer_letters().map(kind).collect::<Vec<_>>())
    };
    match class {
        // The default window of the class may be shorter than a sample.
        ModelClass::Mistral | ModelClass::Ministral3 | ModelClass::Phi3 | ModelClass::Mixtral => {
            all["sliding_window"] = json!(m.window);
        }
        ModelClass::Qwen2 | ModelClass::Qwen3 => {
            if let Some(window) = m.window {
                let full = m.layer_letters().take_while(|letter| *letter != WINDOWED).count();
                all["use_sliding_window"] = json!(true);
                all["sliding_window"] = json!(window);
                all["max_window_layers"] = json!(full);
                all["layer_types"] = types();
            }
        }
        // All its layers have the window; a model with another pattern reads back otherwise.
        ModelClass::Qwen3Moe => {
            all["use_sliding_window"] = json!(m.window.is_some());
            all["sliding_window"] = json!(m.window);
        }
        ModelClass::Gemma2 | ModelClass::Gemma3 | ModelClass::Olmo3 | ModelClass::GptOss => {
            all["sliding_window"] = json!(m.window.unwrap_or(WINDOW));
            all["layer_types"] = types();
        }
        ModelClass::SmolLm3 => {
            let rotates: Vec<u8> =
                m.layer_letters().map(|letter| u8::from(letter != UNROTATED)).collect();
            all["no_rope_layers"] = json!(rotates);
            all["layer_types"] = types();
            all["use_sliding_window"] = json!(false);
            all["sliding_window"] = json!(null);
        }
        ModelClass::Qwen35 | ModelClass::Qwen35Moe | ModelClass::Qwen3Next => {
            all["layer_types"] = types();
        }
        ModelClass::Gpt2
        | ModelClass::Llama
        | ModelClass::Olmo2
        | ModelClass::Granite
        | ModelClass::SeedOss
        | ModelClass::Olmoe
        | ModelClass::Glm4Moe => {}
    }
}

/// Keys of rotary positions. Version 4 of transformers reads `rope_theta` and `rope_scaling`, version
/// 5 `rope_parameters`.
fn rope_keys(all: &mut Value, m: &ModelConfig, class: ModelClass) {
    let theta = json!(decimal(m.rope.theta));
    let mut scaling = scaling_keys(&m.rope);
    let old = match m.rope.scaling {
        RopeScaling::None => json!(null),
        _ => Value::Object(scaling.clone()),
    };
    if matches!(class, ModelClass::Gemma3 | ModelClass::Olmo3) {
        scaling.insert("rope_theta".into(), theta.clone());
        let local = json!(decimal(m.window_rope.theta));
        let mut windowed = scaling_keys(&m.window_rope);
        windowed.insert("rope_theta".into(), local.clone());
        all["rope_parameters"] =
            json!({ "full_attention": scaling, "sliding_attention": windowed });
        // Version 4 has another base of windowed layers for Gemma 3 alone.
        let is_gemma = class == ModelClass::Gemma3;
        if m.window_rope.scaling == RopeScaling::None && (is_gemma || local == theta) {
            all["rope_theta"] = theta;
            all["rope_scaling"] = old;
            if is_gemma {
                all["rope_local_base_freq"] = local;
            }
        }
        return;
    }
    let names_share = class == ModelClass::Glm4Moe || class.has_delta_nets();
    if m.rope.rotated_share < 1.0 || names_share {
        let share = json!(decimal(m.rope.rotated_share));
        all["partial_rotary_factor"] = share.clone();
        scaling.insert("partial_rotary_factor".into(), share);
    }
    if class == ModelClass::Phi3 {
        // The key counts before the object, and has a default in the class.
        let original = match m.rope.scaling {
            RopeScaling::LongRope { original_seq_len, .. } => original_seq_len,
            _ => m.seq_len,
        };
        all["original_max_position_embeddings"] = json!(original);
    }
    scaling.insert("rope_theta".into(), theta.clone());
    all["rope_parameters"] = Value::Object(scaling);
    all["rope_scaling"] = old;
    all["rope_theta"] = theta;
}

/// Keys of a scaling.
fn scaling_keys(rope: &RopeConfig) -> Map<String, Value> {
    let (value, attention_factor) = match &rope.scaling {
        RopeScaling::None => (json!({ "rope_type": "default" }), None),
        RopeScaling::Linear { factor } => {
            (json!({ "rope_type": "linear", "factor": decimal(*factor) }), None)
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_seq_len } => {
            let keys = json!({
                "rope_type": "llama3",
                "factor": decimal(*factor),
                "low_freq_factor": decimal(*low_freq_factor),
                "high_freq_factor": decimal(*high_freq_factor),
                "original_max_position_embeddings": original_seq_len,
            });
            (keys, None)
        }
        RopeScaling::Yarn {
            factor,
            original_seq_len,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        } => {
            let mut keys = json!({
                "rope_type": "yarn",
                "factor": decimal(*factor),
                "beta_fast": decimal(*beta_fast),
                "beta_slow": decimal(*beta_slow),
                "original_max_position_embeddings": original_seq_len,
            });
            if !truncate {
                keys["truncate"] = json!(false);
            }
            (keys, *attention_factor)
        }
        RopeScaling::LongRope {
            factor,
            original_seq_len,
            short_factors,
            long_factors,
            attention_factor,
        } => {
            let list = |factors: &[f32]| factors.iter().copied().map(decimal).collect::<Vec<_>>();
            let keys = json!({
                "rope_type": "longrope",
                "factor": decimal(*factor),
                "short_factor": list(short_factors),
                "long_factor": list(long_factors),
                "original_max_position_embeddings": original_seq_len,
            });
            (keys, *attention_factor)
        }
    };
    let Value::Object(mut keys) = value else { unreachable!("every scaling is an object") };
    if let Some(factor) = attention_factor {
        keys.insert("attention_factor".into(), json!(decimal(factor)));
    }
    keys
}
