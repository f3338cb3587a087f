//! Tests with models of each class, and with the keys of published files.

use super::super::config_json::description;
use super::*;
use config::load_str;
use config::transformers::folder_model;
use std::path::Path;

fn model(keys: &str) -> ModelConfig {
    let ron = format!(
        "(model: (family: Llama, layers: 6, hidden: 64, heads: 8, kv_heads: 4, seq_len: 128, vocab: 61, {keys}),
          data: (train: \"x\", format: U16), train: (steps: 1))"
    );
    load_str(&ron, "a.ron", Path::new("/"), &[])
        .unwrap_or_else(|e| panic!("{keys}: {e}"))
        .config
        .model
}

/// The class of an export without a folder, and the model that its text describes.
fn exported(m: &ModelConfig) -> Result<(ModelClass, ModelConfig), String> {
    let described = description(m, "float32", None, false)?;
    let read = folder_model(described.text.as_bytes()).map_err(|e| e.wrong.join(", "))?;
    assert_eq!(read.class, described.class);
    Ok((described.class, read.model))
}

const GEMMA3: &str = "head_dim: 16, norm_offset: true, norm_place: Around, gate: Gelu, qk_norm: true, tied: true, \
    embedding_scale: 8.0, attention_scale: 0.0625, layer_pattern: \"WWF\", window: 32, \
    rope: (theta: 1e6, scaling: Linear(factor: 8.0)), window_rope: (theta: 1e4, scaling: None)";
const GEMMA2: &str = "head_dim: 16, norm_offset: true, norm_place: Around, gate: Gelu, tied: true, \
    embedding_scale: 8.0, score_cap: 50.0, logit_cap: 30.0, layer_pattern: \"WF\", window: 32";
const OLMO3: &str = "norm_place: After, qk_norm: true, qk_norm_width: true, layer_pattern: \"WWWF\", window: 32, \
    rope: (theta: 5e5, scaling: Yarn(factor: 8.0, original_seq_len: 16)), window_rope: (scaling: None)";
const PHI4_MINI: &str = "tied: true, rope: (rotated_share: 0.75, scaling: LongRope(factor: 4.0, original_seq_len: 32, \
    short_factors: [1, 1.5, 2], long_factors: [1, 3, 5]))";

const QWEN3_MOE: &str = "qk_norm: true, head_dim: 16, experts: Some((count: 8, per_token: 2, ffn_hidden: 24, \
    normalize: false, dense_layers: [0, 4], balance: HuggingFace(factor: 0.01)))";

#[test]
fn parts_decide_the_class_which_describes_them_all() {
    for (class, keys) in [
        (ModelClass::Llama, ""),
        (ModelClass::Llama, "qkv_bias: true, proj_bias: true"),
        (
            ModelClass::Llama,
            "rope: (scaling: Yarn(factor: 4.0, original_seq_len: 32, attention_factor: 1.0))",
        ),
        (ModelClass::Qwen2, "qkv_bias: true"),
        (ModelClass::Qwen2, "qkv_bias: true, layer_pattern: \"FFW\", window: 8"),
        (ModelClass::Qwen3, "qk_norm: true, head_dim: 16, layer_pattern: \"FW\", window: 8"),
        (ModelClass::Mistral, "head_dim: 16"),
        (ModelClass::Mistral, "layer_pattern: \"W\", window: 8"),
        (ModelClass::SeedOss, "qkv_bias: true, head_dim: 16"),
        (ModelClass::Gemma3, GEMMA3),
        (ModelClass::Gemma2, GEMMA2),
        (ModelClass::Olmo2, "norm_place: After, qk_norm: true, qk_norm_width: true"),
        (ModelClass::Olmo3, OLMO3),
        (ModelClass::SmolLm3, "layer_pattern: \"FFFN\""),
        (
            ModelClass::Granite,
            "embedding_scale: 12.0, residual_scale: 0.22, logit_scale: 0.0625, attention_scale: 0.015625",
        ),
        (ModelClass::Phi3, "rope: (rotated_share: 0.5)"),
        (ModelClass::Phi3, PHI4_MINI),
        (ModelClass::Qwen3Moe, QWEN3_MOE),
        (
            ModelClass::Mixtral,
            "ffn_hidden: 96, layer_pattern: \"W\", window: 8, experts: Some((count: 8, per_token: 2, ffn_hidden: 96, normalize: true))",
        ),
        (
            ModelClass::Olmoe,
            "ffn_hidden: 96, qk_norm: true, qk_norm_width: true, \
             experts: Some((count: 8, per_token: 3, ffn_hidden: 96, normalize: false))",
        ),
    ] {
        let m = model(keys);
        let (found, read) = exported(&m).unwrap_or_else(|why| panic!("{keys}: {why}"));
        assert_eq!(found, class, "{keys}");
        // The file has no key of a config of onebox.
        let expected = ModelConfig { dropout: 0.0, ..m };
        assert_eq!(read, expected, "{keys}");
    }
}

#[test]
fn parts_that_no_class_has_are_refused_with_their_keys() {
    for (keys, part) in [
        ("norm_offset: true", "model.norm_offset true"),
        ("layer_pattern: \"WF\", window: 8", "model.layer_pattern WF"),
        ("gate: Gelu", "model.gate Gelu"),
        ("score_cap: 20.0", "model.score_cap 20"),
        ("norm_place: After", "model.norm_place After"),
        ("norm_place: After, qk_norm: true", "model.qk_norm_width false"),
        ("qk_norm: true, qk_norm_width: true", "model.qk_norm_width true"),
    ] {
        let why = exported(&model(keys)).unwrap_err();
        assert!(why.contains("transformers has no class with these parts"), "{why}");
        assert!(why.contains(part), "{keys}: {why}");
    }
    // Only a Qwen3 with experts has layers without, and only an OLMoE norms over all heads.
    let why = exported(&model(&QWEN3_MOE.replace("qk_norm: true, ", ""))).unwrap_err();
    assert!(why.contains("model.experts Some((count: 8"), "{why}");
    let why = exported(&model(&format!("qk_norm_width: true, {QWEN3_MOE}"))).unwrap_err();
    assert!(why.contains("model.qk_norm_width true"), "{why}");
    // A number that is no whole number in the class.
    let other = GEMMA3.replace("attention_scale: 0.0625", "attention_scale: 0.06");
    assert!(exported(&model(&other)).is_err());
    let other = GEMMA3.replace("embedding_scale: 8.0", "embedding_scale: 4.0");
    assert!(exported(&model(&other)).is_err());
}

/// Source: files of transformers 4 and 5 of these classes.
#[test]
fn a_folder_keeps_its_kinds_of_layers_and_positions() {
    let came = json!({
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 61,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 4096,
        "max_position_embeddings": 8192, "rope_theta": 10_000.0, "eos_token_id": 1, "torch_dtype": "bfloat16"
    });
    // For samples of 128 tokens the window is none.
    let m = folder_model(came.to_string().as_bytes()).unwrap().model.for_samples(128);
    assert_eq!((m.layer_pattern.as_str(), m.window), ("F", None));
    let bytes = came.to_string();
    let text = description(&m, "float32", Some(bytes.as_bytes()), false).unwrap().text;
    let again = folder_model(text.as_bytes()).unwrap();
    assert_eq!(again.model.seq_len, 8192);
    assert_eq!((again.model.layer_pattern.as_str(), again.model.window), ("WF", Some(4096)));
    let all: Value = serde_json::from_str(&text).unwrap();
    assert_eq!([&all["eos_token_id"], &all["rope_theta"]], [&json!(1), &json!(10_000.0)]);
    assert_eq!(all.get("layer_types"), None);
    // Its class scales queries beyond the positions that onebox computes, by a number of the folder.
    let rope = json!({
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384, "rope_theta": 1e6, "rope_type": "yarn"
    });
    let came = json!({
        "model_type": "ministral3", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 61,
        "max_position_embeddings": 262_144, "rope_parameters": rope
    });
    let m = folder_model(came.to_string().as_bytes()).unwrap().model.for_samples(128);
    let bytes = came.to_string();
    let described = description(&m, "float32", Some(bytes.as_bytes()), false).unwrap();
    assert_eq!(described.class, ModelClass::Ministral3);
    let all: Value = serde_json::from_str(&described.text).unwrap();
    assert_eq!(
        (&all["rope_parameters"], &all["max_position_embeddings"]),
        (&rope, &json!(262_144))
    );
}

/// Source: files of Qwen3-30B-A3B, with small sizes. The balance loss is that of the run.
#[test]
fn a_folder_keeps_how_it_names_its_layers_with_experts() {
    let came = json!({
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 61,
        "max_position_embeddings": 512, "num_local_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 48, "norm_topk_prob": true, "decoder_sparse_step": 2, "mlp_only_layers": [3],
        "router_aux_loss_coef": 0.02, "output_router_logits": true, "rope_theta": 1e6, "use_sliding_window": false
    });
    let m = folder_model(came.to_string().as_bytes()).unwrap().model;
    let experts = m.experts.clone().unwrap();
    assert_eq!(experts.dense_layers, [0, 2, 3, 4]);
    assert_eq!(experts.balance, Balance::HuggingFace { factor: 0.02 });
    let write = |balance: Balance| -> Value {
        let experts = ExpertsConfig { balance, ..experts.clone() };
        let m = ModelConfig { experts: Some(experts), ..m.clone() };
        let bytes = came.to_string();
        let described = description(&m, "float32", Some(bytes.as_bytes()), false).unwrap();
        assert_eq!(described.class, ModelClass::Qwen3Moe);
        serde_json::from_str(&described.text).unwrap()
    };
    let all = write(Balance::HuggingFace { factor: 0.02 });
    for (key, value) in [
        ("num_local_experts", json!(16)),
        ("decoder_sparse_step", json!(2)),
        ("mlp_only_layers", json!([3])),
        ("router_aux_loss_coef", json!(0.02)),
        ("output_router_logits", json!(true)),
    ] {
        assert_eq!(all[key], value, "{key}");
    }
    for balance in [Balance::Off, Balance::Megatron { factor: 0.5 }] {
        let all = write(balance);
        assert_eq!(
            [&all["output_router_logits"], &all["router_aux_loss_coef"]],
            [&json!(false), &json!(0.02)]
        );
    }
}

/// Source: the file of zai-org/GLM-4.5, with small sizes. A run without a folder writes the same class.
#[test]
fn a_glm_is_described_with_its_groups_and_shared_experts() {
    let came = json!({
        "model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 61,
        "max_position_embeddings": 512, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2,
        "moe_intermediate_size": 48, "norm_topk_prob": true, "first_k_dense_replace": 3, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "use_qk_norm": true,
        "attention_bias": true, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_scaling": null
    });
    let m = folder_model(came.to_string().as_bytes()).unwrap().model;
    for bytes in [None, Some(came.to_string())] {
        let from = bytes.as_ref().map(String::as_bytes);
        let described = description(&m, "float32", from, false).unwrap();
        assert_eq!(described.class, ModelClass::Glm4Moe);
        let all: Value = serde_json::from_str(&described.text).unwrap();
        for key in [
            "n_routed_experts",
            "n_shared_experts",
            "moe_intermediate_size",
            "intermediate_size",
            "first_k_dense_replace",
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "use_qk_norm",
            "attention_bias",
            "partial_rotary_factor",
        ] {
            assert_eq!(all[key], came[key], "{key}");
        }
        // The layers behind the decoder are not in the export.
        assert_eq!(all["num_nextn_predict_layers"], 0);
        assert_eq!(all["output_router_logits"], false);
        assert_eq!(folder_model(described.text.as_bytes()).unwrap().model, m);
    }
    // Of each other form transformers has no class.
    let experts = m.experts.clone().unwrap();
    for other in [
        ExpertsConfig { shared_hidden: 50, ..experts.clone() },
        ExpertsConfig { dense_layers: vec![0, 4], ..experts.clone() },
        ExpertsConfig { scoring: ScoreRule::Softmax, ..experts },
    ] {
        let m = ModelConfig { experts: Some(other), ..m.clone() };
        let why = description(&m, "float32", None, false).map(|of| of.text).unwrap_err();
        assert!(why.contains("transformers has no class with these parts"), "{why}");
    }
}

/// Source: the keys of Qwen3_5TextConfig in transformers 5.24. A run without a folder writes the same class.
#[test]
fn a_qwen_is_described_with_its_gated_delta_nets() {
    let came = json!({
        "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 61,
        "max_position_embeddings": 512, "full_attention_interval": 3, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]
        }
    });
    let m = folder_model(came.to_string().as_bytes()).unwrap().model;
    for bytes in [None, Some(came.to_string())] {
        let from = bytes.as_ref().map(String::as_bytes);
        let described = description(&m, "float32", from, false).unwrap();
        assert_eq!(described.class, ModelClass::Qwen35);
        let all: Value = serde_json::from_str(&described.text).unwrap();
        for key in [
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        ] {
            assert_eq!(all[key], came[key], "{key}");
        }
        let share = &all["rope_parameters"]["partial_rotary_factor"];
        assert_eq!(*share, json!(0.5));
        if bytes.is_some() {
            assert_eq!(all["rope_parameters"], came["rope_parameters"]);
            assert_eq!(all["full_attention_interval"], 3);
        }
        assert_eq!(folder_model(described.text.as_bytes()).unwrap().model, m);
    }
    // Attention without the gate is no Qwen3.5.
    let m = ModelConfig { output_gate: false, ..m };
    let why = description(&m, "float32", None, false).map(|of| of.text).unwrap_err();
    assert!(why.contains("transformers has no class with these parts"), "{why}");
}

/// Source: the keys of Qwen3_5MoeTextConfig and Qwen3NextConfig in transformers 5.24. A run without a
/// folder writes the same class.
#[test]
fn a_qwen_is_described_with_its_experts() {
    let sizes = json!({
        "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
        "vocab_size": 61, "max_position_embeddings": 512, "full_attention_interval": 3, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5
        }
    });
    for (class, more) in [
        (ModelClass::Qwen35Moe, json!({})),
        (
            ModelClass::Qwen3Next,
            json!({ "intermediate_size": 160, "norm_topk_prob": false, "mlp_only_layers": [1] }),
        ),
    ] {
        let mut came = sizes.clone();
        came["model_type"] = json!(class.model_type());
        for (key, value) in more.as_object().unwrap() {
            came[key] = value.clone();
        }
        let m = folder_model(came.to_string().as_bytes()).unwrap().model;
        for bytes in [None, Some(came.to_string())] {
            let from = bytes.as_ref().map(String::as_bytes);
            let described = description(&m, "float32", from, false).unwrap();
            assert_eq!(described.class, class);
            let all: Value = serde_json::from_str(&described.text).unwrap();
            let keys = ["num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"];
            for key in keys.into_iter().chain(more.as_object().unwrap().keys().map(String::as_str))
            {
                assert_eq!(all[key], came[key], "{key}");
            }
            let of_dense = all.get("intermediate_size").is_some();
            assert_eq!(of_dense, class == ModelClass::Qwen3Next, "{class:?}");
            assert_eq!(folder_model(described.text.as_bytes()).unwrap().model, m);
        }
        // A shared expert without a gate is of no class with gated delta nets.
        let experts = ExpertsConfig { shared_gate: false, ..m.experts.clone().unwrap() };
        let m = ModelConfig { experts: Some(experts), ..m };
        let why = description(&m, "float32", None, false).map(|of| of.text).unwrap_err();
        assert!(why.contains("transformers has no class with these parts"), "{why}");
    }
}

/// Source: the file of google/gemma-3-4b-it.
#[test]
fn a_wrapper_with_its_parts_keeps_its_file_but_for_the_type_of_numbers() {
    let came = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 64, "intermediate_size": 160, "model_type": "gemma3_text", "num_hidden_layers": 6,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 32, "vocab_size": 512
        },
        "torch_dtype": "bfloat16", "vision_config": { "model_type": "siglip_vision_model", "torch_dtype": "bfloat16" }
    });
    let (bytes, described) = (came.to_string(), folder_model(came.to_string().as_bytes()).unwrap());
    let m = described.model.for_samples(64);
    let whole = description(&m, "float32", Some(bytes.as_bytes()), true).unwrap();
    assert_eq!(whole.class, ModelClass::Gemma3);
    let mut expected = came.clone();
    expected.as_object_mut().unwrap().remove("torch_dtype");
    expected["dtype"] = json!("float32");
    expected["vision_config"]["torch_dtype"] = json!("float32");
    assert_eq!(serde_json::from_str::<Value>(&whole.text).unwrap(), expected);
    // The decoder alone has the class of text models, and the special tokens of the wrapper.
    let alone = description(&m, "float32", Some(bytes.as_bytes()), false).unwrap().text;
    let alone: Value = serde_json::from_str(&alone).unwrap();
    assert_eq!(alone["architectures"], json!(["Gemma3ForCausalLM"]));
    assert_eq!(alone["eos_token_id"], json!([1, 106]));
    // Without its file there is no wrapper.
    let why = description(&m, "float32", None, true).map(|described| described.text).unwrap_err();
    assert!(why.contains("whose other parts the run keeps"), "{why}");
}
