//! Tests with the keys of files of each class.

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
        // Keys of Qwen/Qwen3.5-35B-A3B and of Qwen/Qwen3-Next-80B-A3B-Instruct.
        "qwen3_5_moe_text" | "qwen3_next" => {
            let mut all = json!({
                "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96,
                "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
                "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 16,
                "mlp_only_layers": [], "head_dim": 16, "attention_bias": false, "rms_norm_eps": 1e-6,
                "router_aux_loss_coef": 0.001, "tie_word_embeddings": false, "num_hidden_layers": 6
            });
            let own = match kind {
                "qwen3_next" => json!({
                    "decoder_sparse_step": 1, "norm_topk_prob": true, "partial_rotary_factor": 0.25,
                    "rope_scaling": null, "rope_theta": 10_000_000, "output_router_logits": false
                }),
                _ => json!({
                    "attn_output_gate": true, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
                    "mtp_use_dedicated_embeddings": false, "intermediate_size": null, "rope_parameters": {
                        "mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10_000_000, "rope_type": "default"
                    }
                }),
            };
            all.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            all
        }
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
        shared_gate: false,
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
        shared_gate: false,
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
    assert_eq!((experts.scoring, experts.shared_hidden, experts.normalize), (scoring, 96, false));
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
        shared_gate: false,
        biases: true,
        dense_layers: Vec::new(),
        balance: Balance::Off,
    };
    assert_eq!(m.experts.as_ref(), Some(&experts));
    assert_eq!(m.gate, Gate::ClampedSilu { slope: 1.702, limit: 7.0 });
    assert_eq!([m.attention_sinks, m.qkv_bias, m.proj_bias, m.qk_norm], [true, true, true, false]);
    assert_eq!((m.layer_pattern.as_str(), m.window), ("WF", Some(128)));
    let RopeScaling::Yarn { truncate, factor, .. } = m.rope.scaling else { panic!("{:?}", m.rope) };
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

/// Source: the defaults of Qwen3_5MoeTextConfig and Qwen3NextConfig in transformers 5.24, and the keys
/// of the files of Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B, with small sizes.
#[test]
fn a_qwen_has_a_gated_shared_expert_beside_its_experts() {
    let of = |shared_hidden, dense_layers| ExpertsConfig {
        count: 8,
        per_token: 2,
        ffn_hidden: 48,
        normalize: true,
        scoring: ScoreRule::Softmax,
        shared_hidden,
        shared_gate: true,
        biases: false,
        dense_layers,
        balance: Balance::Off,
    };
    let moe = read("qwen3_5_moe_text", &json!({}));
    assert_eq!(moe.experts, Some(of(96, vec![])));
    let next = read("qwen3_next", &json!({}));
    assert_eq!(next.experts, Some(of(96, vec![])));
    for m in [&moe, &next] {
        assert_eq!((m.layer_pattern.as_str(), m.head_dim), ("DDDF", 16));
        assert!(m.delta_net.is_some() && m.output_gate && m.qk_norm && m.norm_offset);
        assert_eq!((m.rope.rotated_share, m.rope.theta), (0.25, 1e7));
    }
    assert_eq!((moe.ffn_hidden, next.ffn_hidden), (48, 160));
    let none = json!({ "shared_expert_intermediate_size": null, "norm_topk_prob": null });
    for kind in ["qwen3_5_moe_text", "qwen3_next"] {
        assert_eq!(read(kind, &none).experts, Some(of(512, vec![])), "{kind}");
        let balanced = json!({ "output_router_logits": true });
        let balance = read(kind, &balanced).experts.unwrap().balance;
        assert_eq!(balance, Balance::HuggingFace { factor: 0.001 }, "{kind}");
    }
    let dense =
        json!({ "mlp_only_layers": [3], "decoder_sparse_step": 2, "norm_topk_prob": false });
    let dense = read("qwen3_next", &dense).experts.unwrap();
    assert_eq!((dense.dense_layers, dense.normalize), (vec![0, 2, 3, 4], false));
    for (kind, more, message) in [
        ("qwen3_5_moe_text", json!({ "mlp_only_layers": [1] }), "all layers of its class"),
        ("qwen3_5_moe_text", json!({ "norm_topk_prob": false }), "its class always divides"),
        ("qwen3_5_moe_text", json!({ "decoder_sparse_step": 2 }), "does not know"),
        ("qwen3_next", json!({ "decoder_sparse_step": 7 }), "no such model of its class"),
        ("qwen3_next", json!({ "attn_output_gate": false }), "a gate of its output"),
        ("qwen3_next", json!({ "intermediate_size": null }), "`intermediate_size` is missing"),
        ("qwen3_next", json!({ "n_shared_experts": 1 }), "does not know what it changes"),
    ] {
        let refusal = folder_model(&file(kind, &more)).expect_err(&format!("{kind} {more}"));
        let found = refusal.wrong.iter().any(|wrong| wrong.contains(message));
        assert!(found, "{kind} {more}: {refusal:?}");
    }
    for kind in ["qwen3_5_moe_text", "qwen3_next"] {
        let none = json!({ "shared_expert_intermediate_size": 0 });
        let refusal = folder_model(&file(kind, &none)).expect_err(kind);
        let key = "`shared_expert_intermediate_size` is 0";
        assert!(refusal.wrong.iter().any(|wrong| wrong.contains(key)), "{refusal:?}");
    }
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
        (&each, json!({ "num_experts": null, "num_local_experts": null }), "experts` is missing"),
        (&each, json!({ "num_experts": 0, "num_local_experts": 0 }), "is 0, not from 1 to 1024"),
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
        (&each[..1], json!({ "decoder_sparse_step": 7 }), "leave none of 6 layers with experts"),
        (&each[..1], json!({ "decoder_sparse_step": 0 }), "`decoder_sparse_step` is 0"),
        (&each[1..2], json!({ "router_jitter_noise": 0.1 }), "`router_jitter_noise` is 0.1"),
        (&each[1..2], json!({ "norm_topk_prob": true }), "onebox does not know what it changes"),
        (&each[2..], json!({ "clip_qkv": 8.0 }), "`clip_qkv` is 8.0"),
        (&each[2..], json!({ "head_dim": 16 }), "its class has norms over `hidden_size` elements"),
        (
            &each[1..],
            json!({ "shared_expert_intermediate_size": 8 }),
            "does not know what it changes",
        ),
    ] {
        for kind in kinds {
            let refusal = folder_model(&file(kind, &more)).expect_err(&format!("{kind} {more}"));
            let found = refusal.wrong.iter().any(|wrong| wrong.contains(message));
            assert!(found, "{kind} {more}: {refusal:?}");
        }
    }
}
