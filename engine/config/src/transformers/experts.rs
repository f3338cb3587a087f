//! Keys of experts in a `config.json`.

use super::INNER;
use super::classes::ModelClass;
use super::keys::Keys;
use crate::{Balance, ExpertsConfig, ScoreRule};
use files::json::shown;
use serde_json::{Value, json};
use std::ops::RangeInclusive;

/// Allowed numbers of experts of a layer.
const COUNT: RangeInclusive<u64> = 1..=1024;
/// Allowed numbers of experts of a token.
const PER_TOKEN: RangeInclusive<u64> = 1..=32;
/// Names of the number of experts of a layer.
#[derive(Clone, Copy)]
struct CountNames {
    /// The name of a class, which messages use.
    usual: &'static str,
    /// Both names in files: the name of the first versions of a class, and the name of other classes,
    /// which version 5 may write.
    both: [&'static str; 2],
}

impl CountNames {
    const fn of(class: ModelClass) -> Self {
        const LOCAL: &str = "num_local_experts";
        match class {
            ModelClass::Glm4Moe => {
                Self { usual: "n_routed_experts", both: ["n_routed_experts", LOCAL] }
            }
            ModelClass::Mixtral | ModelClass::GptOss => {
                Self { usual: LOCAL, both: ["num_experts", LOCAL] }
            }
            _ => Self { usual: "num_experts", both: ["num_experts", LOCAL] },
        }
    }
}

/// Reads the experts of a model with `layers` layers; `None` if its class has none.
pub(super) fn experts(
    keys: &mut Keys,
    class: ModelClass,
    layers: usize,
    ffn_hidden: usize,
) -> Option<ExpertsConfig> {
    if !class.has_experts() {
        return None;
    }
    let count = count(keys, class);
    let per_token = keys.whole("num_experts_per_tok", PER_TOKEN);
    let is_known = keys.found.get("num_experts_per_tok").is_some_and(|n| *n == json!(per_token));
    if per_token > count && is_known && keys.wrong.is_empty() {
        let name = count_name(keys, class);
        keys.wrong.push(format!(
            "`num_experts_per_tok` is {per_token}, and `{name}` is {count}: a token has each expert once at most"
        ));
    }
    let normalize = match class {
        // Its class always divides the weights of a token by their sum.
        ModelClass::Mixtral | ModelClass::GptOss => true,
        ModelClass::Glm4Moe => keys.flag("norm_topk_prob", true),
        _ => keys.flag("norm_topk_prob", false),
    };
    let ffn_hidden = match class {
        ModelClass::Qwen3Moe | ModelClass::Glm4Moe => keys.whole("moe_intermediate_size", INNER),
        _ => ffn_hidden,
    };
    match class {
        ModelClass::Mixtral => {
            let why = "onebox adds no noise to what a router reads; write 0.0";
            keys.fixed("router_jitter_noise", &[json!(0.0), json!(0)], why);
        }
        ModelClass::Olmoe => {
            let why =
                "onebox limits no queries, keys and values; it needs a model without this key";
            keys.fixed("clip_qkv", &[Value::Null], why);
        }
        ModelClass::GptOss => {
            let why = "it is another name of `num_experts_per_tok`";
            keys.fixed("experts_per_token", &[json!(per_token)], why);
        }
        _ => {}
    }
    let dense_layers = dense_layers(keys, class, layers);
    let (scoring, shared_hidden) = match class {
        ModelClass::Glm4Moe => {
            let shared = keys.whole_or("n_shared_experts", 1..=64, Some(1));
            (sigmoid(keys, count, per_token), shared * ffn_hidden)
        }
        _ => (ScoreRule::Softmax, 0),
    };
    Some(ExpertsConfig {
        count,
        per_token,
        ffn_hidden,
        normalize,
        scoring,
        shared_hidden,
        biases: class == ModelClass::GptOss,
        dense_layers,
        balance: balance(keys, class),
    })
}

/// Reads the scores by sigmoid of `count` experts, of which a token has `per_token`.
fn sigmoid(keys: &mut Keys, count: usize, per_token: usize) -> ScoreRule {
    let [groups, kept_groups] =
        ["n_group", "topk_group"].map(|key| keys.whole_or(key, 1..=32, Some(1)));
    let size = count / groups;
    let fits =
        groups == 1 || count.is_multiple_of(groups) && size >= 2 && kept_groups * size >= per_token;
    if !(fits && kept_groups <= groups) && keys.wrong.is_empty() {
        keys.wrong.push(format!(
            "`n_group` is {groups}, and `topk_group` is {kept_groups}: {count} experts have no such groups with {per_token} experts of a token"
        ));
    }
    let scale = keys.number_within("routed_scaling_factor", 1e-6..=1e3, 1.0) as f32;
    // Predictions of several tokens have layers of their own, which are not trained.
    keys.read_keys.extend(["num_nextn_predict_layers", "num_mtp_layers"]);
    ScoreRule::Sigmoid { groups, kept_groups, scale }
}

/// Name of the number of experts that messages use.
fn count_name(keys: &Keys, class: ModelClass) -> &'static str {
    let CountNames { usual, both } = CountNames::of(class);
    both.into_iter().find(|name| keys.found.contains_key(*name)).unwrap_or(usual)
}

/// Reads the number of experts of a layer under either name.
fn count(keys: &mut Keys, class: ModelClass) -> usize {
    let (name, CountNames { both, .. }) = (count_name(keys, class), CountNames::of(class));
    let [one, other] = both.map(|name| keys.get(name));
    if let (Some(one), Some(other)) = (&one, &other)
        && one != other
    {
        let [one, other] = [one, other].map(shown);
        let [name, other_name] = both;
        keys.wrong.push(format!(
            "`{name}` is {one}, and `{other_name}` is {other}: both are the number of experts of a layer"
        ));
        return 1;
    }
    // The first name may be null.
    let name = match one {
        None if other.is_some() => both[1],
        _ => name,
    };
    keys.whole(name, COUNT)
}

/// Numbers of the layers with one MLP in the place of experts, ascending.
fn dense_layers(keys: &mut Keys, class: ModelClass, layers: usize) -> Vec<usize> {
    match class {
        ModelClass::Qwen3Moe => {}
        ModelClass::Glm4Moe => {
            let first = keys.whole_or("first_k_dense_replace", 0..=10_000, Some(1));
            if first >= layers && keys.wrong.is_empty() {
                keys.wrong.push(format!(
                    "`first_k_dense_replace` is {first}: none of {layers} layers has experts"
                ));
            }
            return (0..first.min(layers)).collect();
        }
        _ => return Vec::new(),
    }
    let step = keys.whole_or("decoder_sparse_step", 1..=10_000, Some(1));
    let listed = keys.get("mlp_only_layers");
    let number = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let found = match &listed {
        None => Some(Vec::new()),
        Some(listed) => {
            listed.as_array().and_then(|all| all.iter().map(number).collect::<Option<Vec<usize>>>())
        }
    };
    let Some(found) = found else {
        let listed = listed.as_ref().map_or_else(String::new, shown);
        keys.wrong.push(format!("`mlp_only_layers` is {listed}, not a list of numbers of layers"));
        return Vec::new();
    };
    let is_dense = |layer: &usize| found.contains(layer) || !(layer + 1).is_multiple_of(step);
    let dense: Vec<usize> = (0..layers).filter(is_dense).collect();
    if dense.len() == layers && keys.wrong.is_empty() {
        keys.wrong.push(format!(
            "`mlp_only_layers` and `decoder_sparse_step` leave none of {layers} layers with experts: such a model is a qwen3"
        ));
    }
    dense
}

/// The balance loss of the class, which counts only if the model returns the logits of its routers.
fn balance(keys: &mut Keys, class: ModelClass) -> Balance {
    if class == ModelClass::Glm4Moe {
        keys.fixed("output_router_logits", &[json!(false)], "its class has no balance loss");
        return Balance::Off;
    }
    let usual = if class == ModelClass::Olmoe { 0.01 } else { 0.001 };
    let counts = keys.flag("output_router_logits", false);
    let factor = keys.number_within("router_aux_loss_coef", 0.0..=1e3, usual) as f32;
    if counts && factor > 0.0 { Balance::HuggingFace { factor } } else { Balance::Off }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transformers::folder_model;
    use crate::{Gate, ModelConfig, RopeScaling};

    /// A file of `kind` with these keys besides the sizes; a null takes a key out.
    fn file(kind: &str, more: &Value) -> Vec<u8> {
        let class = ModelClass::ALL.into_iter().find(|class| class.model_type() == kind).unwrap();
        let mut all = json!({
            "model_type": kind, "architectures": [class.names()[0]], "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
            "max_position_embeddings": 512, "num_experts_per_tok": 2, "attention_dropout": 0.0, "hidden_act": "silu"
        });
        let own = match kind {
            // Keys of Qwen/Qwen3-30B-A3B.
            "qwen3_moe" => json!({
                "num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": true, "decoder_sparse_step": 1,
                "mlp_only_layers": [], "head_dim": 16, "max_window_layers": 6, "sliding_window": null,
                "use_sliding_window": false, "output_router_logits": false, "router_aux_loss_coef": 0.001,
                "attention_bias": false, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": false
            }),
            // Keys of mistralai/Mixtral-8x7B-v0.1.
            "mixtral" => json!({
                "num_local_experts": 8, "sliding_window": null, "output_router_logits": false,
                "router_aux_loss_coef": 0.02, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": false
            }),
            // Keys of zai-org/GLM-4.5-Air.
            "glm4_moe" => json!({
                "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 48, "norm_topk_prob": true,
                "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                "num_nextn_predict_layers": 1, "head_dim": 16, "attention_bias": true, "use_qk_norm": false,
                "partial_rotary_factor": 0.5, "rope_scaling": null, "rope_theta": 1_000_000, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": false
            }),
            // Keys of openai/gpt-oss-20b.
            "gpt_oss" => json!({
                "num_local_experts": 8, "experts_per_token": 2, "head_dim": 16, "attention_bias": true,
                "initial_context_length": 128, "sliding_window": 128, "swiglu_limit": 7.0, "output_router_logits": false,
                "router_aux_loss_coef": 0.9, "rms_norm_eps": 1e-5, "rope_theta": 150_000, "tie_word_embeddings": false,
                "rope_scaling": {
                    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 128,
                    "rope_type": "yarn", "truncate": false
                },
                "layer_types": [
                    "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
                    "full_attention"
                ],
                "quantization_config": { "quant_method": "mxfp4" }
            }),
            // Keys of allenai/OLMoE-1B-7B-0924.
            _ => json!({
                "num_experts": 8, "norm_topk_prob": false, "clip_qkv": null, "attention_bias": false,
                "output_router_logits": false, "router_aux_loss_coef": 0.01, "rms_norm_eps": 1e-5,
                "rope_scaling": null, "rope_theta": 10_000.0, "tie_word_embeddings": false
            }),
        };
        let keys = all.as_object_mut().unwrap();
        for more in [&own, more] {
            keys.extend(more.as_object().unwrap().clone());
        }
        keys.retain(|_, value| !value.is_null());
        all.to_string().into_bytes()
    }

    fn read(kind: &str, more: &Value) -> ModelConfig {
        folder_model(&file(kind, more)).unwrap_or_else(|e| panic!("{kind} {more}: {e:?}")).model
    }

    #[test]
    fn each_class_has_its_experts() {
        let of = |ffn_hidden, normalize| ExpertsConfig {
            count: 8,
            per_token: 2,
            ffn_hidden,
            normalize,
            scoring: ScoreRule::Softmax,
            shared_hidden: 0,
            biases: false,
            dense_layers: Vec::new(),
            balance: Balance::Off,
        };
        for (kind, experts, [qk_norm, width]) in [
            ("qwen3_moe", of(48, true), [true, false]),
            ("mixtral", of(160, true), [false, false]),
            ("olmoe", of(160, false), [true, true]),
        ] {
            let m = read(kind, &json!({}));
            assert_eq!(m.experts.as_ref(), Some(&experts), "{kind}");
            assert_eq!([m.qk_norm, m.qk_norm_width], [qk_norm, width], "{kind}");
            assert_eq!((m.norm_place, m.ffn_hidden), (crate::NormPlace::Before, 160), "{kind}");
            // The other name of the number of experts, and both.
            for more in [
                json!({ "num_experts": null, "num_local_experts": 8 }),
                json!({ "num_experts": 8, "num_local_experts": null }),
                json!({ "num_experts": 8, "num_local_experts": 8 }),
            ] {
                assert_eq!(read(kind, &more), m, "{kind}");
            }
            // The balance loss counts if the model returns the logits of its routers.
            let balanced = json!({ "output_router_logits": true, "router_aux_loss_coef": 0.5 });
            let balance = read(kind, &balanced).experts.unwrap().balance;
            assert_eq!(balance, Balance::HuggingFace { factor: 0.5 }, "{kind}");
            let none = json!({ "output_router_logits": true, "router_aux_loss_coef": 0.0 });
            assert_eq!(read(kind, &none).experts.unwrap().balance, Balance::Off, "{kind}");
        }
        // Defaults of the classes.
        let none = json!({ "norm_topk_prob": null, "router_aux_loss_coef": null, "output_router_logits": true });
        for (kind, normalize, factor) in
            [("qwen3_moe", false, 0.001), ("mixtral", true, 0.001), ("olmoe", false, 0.01)]
        {
            let experts = read(kind, &none).experts.unwrap();
            assert_eq!(experts.normalize, normalize, "{kind}");
            assert_eq!(experts.balance, Balance::HuggingFace { factor }, "{kind}");
        }
        assert_eq!(read("mixtral", &json!({ "rope_theta": null })).rope.theta, 1e6);
        let window = read("mixtral", &json!({ "sliding_window": 64 }));
        assert_eq!((window.layer_pattern.as_str(), window.window), ("W", Some(64)));
        let window = json!({ "sliding_window": 64, "use_sliding_window": true });
        let window = read("qwen3_moe", &window);
        assert_eq!((window.layer_pattern.as_str(), window.window), ("W", Some(64)));
    }

    #[test]
    fn a_glm_scores_by_sigmoid_and_has_shared_experts() {
        let m = read("glm4_moe", &json!({}));
        let air = ExpertsConfig {
            count: 8,
            per_token: 2,
            ffn_hidden: 48,
            normalize: true,
            scoring: ScoreRule::Sigmoid { groups: 1, kept_groups: 1, scale: 1.0 },
            shared_hidden: 48,
            biases: false,
            dense_layers: vec![0],
            balance: Balance::Off,
        };
        assert_eq!(m.experts.as_ref(), Some(&air));
        assert_eq!((m.qkv_bias, m.proj_bias, m.qk_norm), (true, false, false));
        assert_eq!((m.rope.rotated_share, m.rope.theta, m.ffn_hidden), (0.5, 1e6, 160));
        // Version 5 writes the share into an object, under other names of counts.
        let new = json!({
            "partial_rotary_factor": null, "rope_theta": null, "rope_scaling": null,
            "rope_parameters": { "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5 },
            "n_routed_experts": null, "num_local_experts": 8, "num_nextn_predict_layers": null, "num_mtp_layers": 1
        });
        assert_eq!(read("glm4_moe", &new), m);
        // Defaults of the class.
        let none = json!({
            "partial_rotary_factor": null, "norm_topk_prob": null, "first_k_dense_replace": null, "n_group": null,
            "topk_group": null, "n_shared_experts": null, "routed_scaling_factor": null, "rms_norm_eps": null,
            "use_qk_norm": null
        });
        assert_eq!(read("glm4_moe", &none), m);
        let large = json!({
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2,
            "first_k_dense_replace": 3, "norm_topk_prob": false, "use_qk_norm": true
        });
        let m = read("glm4_moe", &large);
        let experts = m.experts.unwrap();
        let scoring = ScoreRule::Sigmoid { groups: 4, kept_groups: 2, scale: 2.5 };
        assert_eq!(
            (experts.scoring, experts.shared_hidden, experts.normalize),
            (scoring, 96, false)
        );
        assert_eq!((experts.dense_layers, m.qk_norm), (vec![0, 1, 2], true));
        for (more, message) in [
            (json!({ "n_group": 3 }), "`n_group` is 3, and `topk_group` is 1: 8 experts have no"),
            (json!({ "n_group": 8, "topk_group": 2 }), "8 experts have no such groups"),
            (json!({ "n_group": 4, "topk_group": 5 }), "8 experts have no such groups"),
            (json!({ "n_group": 4, "num_experts_per_tok": 3 }), "with 3 experts of a token"),
            (json!({ "topk_group": 2 }), "`topk_group` is 2: 8 experts have no such groups"),
            (json!({ "first_k_dense_replace": 6 }), "none of 6 layers has experts"),
            (json!({ "n_shared_experts": 0 }), "`n_shared_experts` is 0, not from 1 to 64"),
            (json!({ "routed_scaling_factor": 0.0 }), "`routed_scaling_factor` is 0.0"),
            (json!({ "output_router_logits": true }), "its class has no balance loss"),
            (
                json!({ "num_local_experts": 16 }),
                "`n_routed_experts` is 8, and `num_local_experts` is 16",
            ),
            (json!({ "partial_rotary_factor": 1.5 }), "not a number above 0, up to 1"),
        ] {
            let refusal = folder_model(&file("glm4_moe", &more)).expect_err(&format!("{more}"));
            let found = refusal.wrong.iter().any(|wrong| wrong.contains(message));
            assert!(found, "{more}: {refusal:?}");
        }
    }

    #[test]
    fn a_gpt_oss_has_sinks_biases_and_gates_with_limits() {
        let m = read("gpt_oss", &json!({}));
        let experts = ExpertsConfig {
            count: 8,
            per_token: 2,
            ffn_hidden: 160,
            normalize: true,
            scoring: ScoreRule::Softmax,
            shared_hidden: 0,
            biases: true,
            dense_layers: Vec::new(),
            balance: Balance::Off,
        };
        assert_eq!(m.experts.as_ref(), Some(&experts));
        assert_eq!(m.gate, Gate::ClampedSilu { slope: 1.702, limit: 7.0 });
        assert_eq!(
            [m.attention_sinks, m.qkv_bias, m.proj_bias, m.qk_norm],
            [true, true, true, false]
        );
        assert_eq!((m.layer_pattern.as_str(), m.window), ("WF", Some(128)));
        let RopeScaling::Yarn { truncate, factor, .. } = m.rope.scaling else {
            panic!("{:?}", m.rope)
        };
        assert_eq!((truncate, factor, m.rope.theta), (false, 32.0, 1.5e5));
        // Version 5 writes one object, and the number of experts under either name.
        let new = json!({
            "rope_theta": null, "rope_scaling": null, "experts_per_token": null, "initial_context_length": null,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 128,
                "rope_type": "yarn", "rope_theta": 150_000.0, "truncate": false
            },
            "num_local_experts": null, "num_experts": 8, "swiglu_alpha": 1.702, "quantization_config": null
        });
        assert_eq!(read("gpt_oss", &new), m);
        // Defaults of the class.
        let none = json!({
            "layer_types": null, "sliding_window": null, "attention_bias": null, "swiglu_limit": null,
            "rms_norm_eps": null, "rope_theta": null, "router_aux_loss_coef": null
        });
        assert_eq!(read("gpt_oss", &none), m);
        for (more, message) in [
            (json!({ "experts_per_token": 4 }), "`experts_per_token` is 4"),
            (json!({ "swiglu_limit": -7.0 }), "`swiglu_limit` is -7.0"),
            (json!({ "rope_scaling": null }), "`rope_parameters` is missing"),
            (json!({ "head_dim": null }), "`head_dim` is missing"),
            (json!({ "mlp_bias": true }), "`mlp_bias` is true"),
        ] {
            let refusal = folder_model(&file("gpt_oss", &more)).expect_err(&format!("{more}"));
            let found = refusal.wrong.iter().any(|wrong| wrong.contains(message));
            assert!(found, "{more}: {refusal:?}");
        }
        let codes = json!({ "quantization_config": { "quant_method": "gptq" } });
        let refusal = folder_model(&file("gpt_oss", &codes)).expect_err("other codes");
        assert!(refusal.wrong[0].contains("weights must be numbers"), "{refusal:?}");
        let codes = json!({ "quantization_config": { "quant_method": "mxfp4" } });
        let refusal = folder_model(&file("mixtral", &codes)).expect_err("codes of another class");
        assert!(refusal.wrong[0].contains("weights must be numbers"), "{refusal:?}");
    }

    #[test]
    fn layers_without_experts_are_those_of_the_list_and_of_the_step() {
        for (listed, step, dense) in [
            (json!([]), 1, &[][..]),
            (json!([0, 5]), 1, &[0, 5]),
            (json!([]), 2, &[0, 2, 4]),
            (json!([1]), 3, &[0, 1, 3, 4]),
            // Numbers beyond the layers name none.
            (json!([7]), 1, &[]),
        ] {
            let more = json!({ "mlp_only_layers": listed, "decoder_sparse_step": step });
            let m = read("qwen3_moe", &more);
            assert_eq!(m.experts.unwrap().dense_layers, dense, "{listed} {step}");
        }
    }

    #[test]
    fn experts_that_contradict_each_other_are_refused_with_their_keys() {
        let each = ["qwen3_moe", "mixtral", "olmoe"];
        for (kinds, more, message) in [
            (
                &each[..],
                json!({ "num_experts": 8, "num_local_experts": 16 }),
                "`num_experts` is 8, and `num_local_experts` is 16: both are the number of experts",
            ),
            (
                &each,
                json!({ "num_experts": null, "num_local_experts": null }),
                "experts` is missing",
            ),
            (
                &each,
                json!({ "num_experts": 0, "num_local_experts": 0 }),
                "is 0, not from 1 to 1024",
            ),
            (&each, json!({ "num_experts_per_tok": 9 }), "`num_experts_per_tok` is 9, and `num_"),
            (&each, json!({ "num_experts_per_tok": 33 }), "is 33, not from 1 to 32"),
            (&each, json!({ "router_aux_loss_coef": -1.0 }), "`router_aux_loss_coef` is -1.0"),
            (
                &each[..1],
                json!({ "moe_intermediate_size": null }),
                "`moe_intermediate_size` is missing",
            ),
            (
                &each[..1],
                json!({ "mlp_only_layers": [-1] }),
                "is [-1], not a list of numbers of layers",
            ),
            (
                &each[..1],
                json!({ "mlp_only_layers": [0, 1, 2, 3, 4, 5] }),
                "leave none of 6 layers with experts",
            ),
            (
                &each[..1],
                json!({ "decoder_sparse_step": 7 }),
                "leave none of 6 layers with experts",
            ),
            (&each[..1], json!({ "decoder_sparse_step": 0 }), "`decoder_sparse_step` is 0"),
            (&each[1..2], json!({ "router_jitter_noise": 0.1 }), "`router_jitter_noise` is 0.1"),
            (
                &each[1..2],
                json!({ "norm_topk_prob": true }),
                "onebox does not know what it changes",
            ),
            (&each[2..], json!({ "clip_qkv": 8.0 }), "`clip_qkv` is 8.0"),
            (
                &each[2..],
                json!({ "head_dim": 16 }),
                "its class has norms over `hidden_size` elements",
            ),
            (
                &each[1..],
                json!({ "shared_expert_intermediate_size": 8 }),
                "does not know what it changes",
            ),
        ] {
            for kind in kinds {
                let refusal =
                    folder_model(&file(kind, &more)).expect_err(&format!("{kind} {more}"));
                let found = refusal.wrong.iter().any(|wrong| wrong.contains(message));
                assert!(found, "{kind} {more}: {refusal:?}");
            }
        }
    }
}
