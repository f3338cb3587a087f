//! Tests with the `config.json` of each class: the keys of published files, with small sizes.

use super::*;

fn read(config: &Value) -> FolderModel {
    folder_model(config.to_string().as_bytes())
        .unwrap_or_else(|refusal| panic!("{config}: {refusal:?}"))
}

fn refused(config: &Value) -> String {
    let refusal = folder_model(config.to_string().as_bytes()).expect_err(&config.to_string());
    refusal.wrong.join("\n")
}

/// `base` with other keys.
fn with(base: &Value, more: Value) -> Value {
    let mut all = base.clone();
    let (Some(keys), Value::Object(more)) = (all.as_object_mut(), more) else { panic!("objects") };
    keys.extend(more);
    all
}

fn without(base: &Value, key: &str) -> Value {
    let mut all = base.clone();
    all.as_object_mut().unwrap().remove(key).unwrap_or_else(|| panic!("no {key}"));
    all
}

/// Sizes that files of most classes have.
fn sizes(kind: &str, class: &str) -> Value {
    json!({
        "model_type": kind, "architectures": [class], "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 32_768, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": true
    })
}

/// Keys of google/gemma-3-1b-it.
fn gemma3() -> Value {
    with(
        &without(&sizes("gemma3_text", "Gemma3ForCausalLM"), "max_position_embeddings"),
        json!({
            "attention_bias": false, "attention_dropout": 0.0, "attn_logit_softcapping": null,
            "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32_768,
            "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10_000,
            "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 3
        }),
    )
}

#[test]
fn gemma3_has_two_kinds_of_layers_with_their_positions() {
    let described = read(&gemma3());
    let m = &described.model;
    assert_eq!((described.class, described.wrapper), (ModelClass::Gemma3, None));
    assert_eq!((m.layer_pattern.as_str(), m.window), ("WWF", Some(512)));
    assert_eq!((m.rope.theta, m.window_rope.theta), (1e6, 1e4));
    assert_eq!((m.norm_place, m.gate), (NormPlace::Around, Gate::Gelu));
    assert!(m.norm_offset && m.tied && m.qk_norm && !m.qk_norm_width && !m.qkv_bias);
    assert_eq!((m.embedding_scale, m.attention_scale), (8.0, Some(0.0625)));
    assert_eq!((m.score_cap, m.logit_cap), (None, None));
    // The usual factor of a head of 16 elements is no key.
    assert_eq!(
        read(&with(&gemma3(), json!({ "query_pre_attn_scalar": 16 }))).model.attention_scale,
        None
    );
    assert_eq!(
        read(&with(&gemma3(), json!({ "final_logit_softcapping": 30.0 }))).model.logit_cap,
        Some(30.0)
    );
    // Version 5 has lists of kinds and an object of positions for each kind.
    let old = without(&without(&gemma3(), "rope_theta"), "rope_local_base_freq");
    let old = without(&without(&old, "rope_scaling"), "sliding_window_pattern");
    let kinds = ["sliding_attention", "sliding_attention", "full_attention"].repeat(2);
    let new = with(
        &old,
        json!({ "layer_types": kinds, "rope_parameters": {
            "full_attention": { "rope_type": "default", "rope_theta": 1_000_000.0 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 10_000.0 }
        } }),
    );
    assert_eq!(read(&new), described);
    // Linear scaling in a file of version 4 is for layers with full attention.
    let scaled =
        read(&with(&gemma3(), json!({ "rope_scaling": { "factor": 8.0, "rope_type": "linear" } })));
    assert_eq!(scaled.model.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(scaled.model.window_rope.scaling, RopeScaling::None);
    // A window that holds all positions stays, since the positions of its layers differ.
    let wide = read(&with(&gemma3(), json!({ "sliding_window": 32_768 })));
    assert_eq!((wide.model.layer_pattern.as_str(), wide.model.window), ("WWF", Some(32_768)));
    for (more, message) in [
        (json!({ "attn_logit_softcapping": 50.0 }), "its class caps no scores"),
        (json!({ "use_bidirectional_attention": true }), "tokens do not see later ones"),
        (json!({ "hidden_activation": "silu" }), "gates of a Gemma are GELU"),
        (
            json!({ "sliding_window": null }),
            "layers have sliding_attention, and `sliding_window` is not a number",
        ),
        (
            json!({ "layer_types": ["full_attention"] }),
            "with 1 layers, and `num_hidden_layers` is 6",
        ),
        (
            json!({ "layer_types": vec!["full_attention"; 6] }),
            "`sliding_window_pattern` gives other layers",
        ),
        (
            json!({ "layer_types": vec!["chunked_attention"; 6] }),
            "onebox has full_attention and sliding",
        ),
        (
            json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 } }),
            "is no kind of layers",
        ),
        (
            json!({ "rope_parameters": { "sliding_attention": { "rope_theta": 5.0 } } }),
            "`rope_theta` is 10000, and in `rope_parameters.sliding_attention` 5.0",
        ),
    ] {
        let why = refused(&with(&gemma3(), more.clone()));
        assert!(why.contains(message), "{more}: {why}");
    }
}

/// Keys of google/gemma-3-4b-it, whose `text_config` leaves out what its class has by default.
#[test]
fn a_wrapped_gemma3_has_the_defaults_of_its_class() {
    let wrapped = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
        "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024
        },
        "vision_config": { "hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27 }
    });
    let described = read(&wrapped);
    let m = &described.model;
    assert_eq!(described.wrapper, Some(WrapperClass::Gemma3));
    assert_eq!((m.heads, m.kv_heads, m.head_dim, m.vocab), (8, 4, 256, 262_208));
    assert_eq!((m.layer_pattern.as_str(), m.window, m.seq_len), ("WWWWWF", Some(1024), 131_072));
    assert_eq!((m.rope.theta, m.window_rope.theta, m.tied), (1e6, 1e4, true));
    assert_eq!(m.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    // The tied output of a wrapper counts outside of `text_config`.
    assert!(!read(&with(&wrapped, json!({ "tie_word_embeddings": false }))).model.tied);
    let inner = |more: Value| {
        let text = with(&wrapped["text_config"], more);
        with(&wrapped, json!({ "text_config": text }))
    };
    for (config, message) in [
        (inner(json!({ "final_logit_softcapping": 30.0 })), "caps no logits"),
        (inner(json!({ "hidden_size": "x" })), "`text_config`: `hidden_size` is \"x\""),
        (inner(json!({ "quantization_config": { "bits": 4 } })), "weights must be numbers"),
        (
            with(&wrapped, json!({ "quantization_config": { "bits": 4 } })),
            "weights must be numbers",
        ),
        (
            with(&wrapped, json!({ "architectures": ["Gemma3ForSequenceClassification"] })),
            "`architectures`",
        ),
    ] {
        let why = refused(&config);
        assert!(why.contains(message), "{message}: {why}");
    }
}

/// Keys of google/gemma-2-9b.
#[test]
fn gemma2_caps_scores_and_logits() {
    let gemma2 = with(
        &sizes("gemma2", "Gemma2ForCausalLM"),
        json!({
            "attention_bias": false, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0,
            "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "sliding_window": 4096,
            "sliding_window_size": 4096
        }),
    );
    let m = read(&gemma2).model;
    assert_eq!((m.layer_pattern.as_str(), m.window), ("WF", Some(4096)));
    assert_eq!((m.score_cap, m.logit_cap, m.attention_scale), (Some(50.0), Some(30.0), None));
    assert!(!m.qk_norm && m.norm_offset && m.tied);
    assert_eq!(m.rope, m.window_rope);
    // Its class has caps, which null switches off.
    let bare = without(&without(&gemma2, "attn_logit_softcapping"), "final_logit_softcapping");
    assert_eq!(
        (read(&bare).model.score_cap, read(&bare).model.logit_cap),
        (Some(50.0), Some(30.0))
    );
    let off = json!({ "attn_logit_softcapping": null, "final_logit_softcapping": null });
    let off = read(&with(&gemma2, off)).model;
    assert_eq!((off.score_cap, off.logit_cap), (None, None));
    // A window that holds all positions is none.
    let short = read(&with(&gemma2, json!({ "max_position_embeddings": 4096 }))).model;
    assert_eq!((short.layer_pattern.as_str(), short.window), ("F", None));
    let why = refused(&with(&gemma2, json!({ "sliding_window_size": 2048 })));
    assert!(why.contains("`sliding_window_size` is 2048, and `sliding_window` is 4096"), "{why}");
}

/// Keys of mistralai/Mistral-7B-v0.1.
#[test]
fn every_layer_of_a_mistral_has_the_window() {
    let mistral = with(
        &sizes("mistral", "MistralForCausalLM"),
        json!({
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "sliding_window": 4096,
            "tie_word_embeddings": false
        }),
    );
    let described = read(&mistral);
    let m = &described.model;
    assert_eq!((m.layer_pattern.as_str(), m.window, m.seq_len), ("W", Some(4096), 32_768));
    assert_eq!(described.positions, "max_position_embeddings");
    assert_eq!(read(&without(&mistral, "sliding_window")), described);
    let none = read(&with(&mistral, json!({ "sliding_window": null }))).model;
    assert_eq!((none.layer_pattern.as_str(), none.window), ("F", None));
    // Its class does not read the kinds of layers.
    let kinds = json!({ "layer_types": vec!["full_attention"; 6] });
    assert!(refused(&with(&mistral, kinds)).contains("its class gives its layers other kinds"));
    read(&with(&mistral, json!({ "layer_types": vec!["sliding_attention"; 6] })));
}

/// Keys of mistralai/Ministral-3-8B-Base-2512, whose text model is in a wrapper.
#[test]
fn ministral3_is_read_up_to_the_positions_without_another_scale() {
    let text = with(
        &without(&sizes("ministral3", "x"), "architectures"),
        json!({
            "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262_144, "sliding_window": null, "tie_word_embeddings": false,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384, "rope_theta": 1_000_000.0,
                "rope_type": "yarn", "type": "yarn"
            }
        }),
    );
    let wrapped = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": false, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "text_config": text, "tie_word_embeddings": false,
        "transformers_version": "5.0.0.dev0", "vision_config": { "model_type": "pixtral" },
        "vision_feature_layer": -1
    });
    let described = read(&wrapped);
    assert_eq!(
        (described.class, described.wrapper),
        (ModelClass::Ministral3, Some(WrapperClass::Mistral3))
    );
    assert_eq!(described.positions, "original_max_position_embeddings");
    let m = &described.model;
    assert_eq!((m.seq_len, m.window, m.rope.theta), (16_384, None, 1e6));
    let yarn = RopeScaling::Yarn {
        factor: 16.0,
        original_seq_len: 16_384,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        // Both scales are 1, so their quotient is 1.
        attention_factor: Some(1.0),
    };
    assert_eq!(m.rope.scaling, yarn);
    let alone = with(&text, json!({ "architectures": ["Ministral3ForCausalLM"] }));
    assert_eq!(read(&alone).model, described.model);
    let rope = |more: Value| {
        with(&alone, json!({ "rope_parameters": with(&alone["rope_parameters"], more) }))
    };
    // Without the factor of queries all positions are computed.
    assert_eq!(read(&rope(json!({ "llama_4_scaling_beta": 0.0 }))).model.seq_len, 262_144);
    let mut bare = alone["rope_parameters"].clone();
    bare.as_object_mut().unwrap().remove("llama_4_scaling_beta");
    let why = refused(&with(&alone, json!({ "rope_parameters": bare })));
    assert!(why.contains("`llama_4_scaling_beta` is missing"), "{why}");
    let why = refused(&without(&alone, "rope_parameters"));
    assert!(why.contains("`rope_parameters` is missing"), "{why}");
    // A text model of version 4 in the wrapper of Mistral Small 3.1 is untied.
    let small =
        with(&wrapped, json!({ "text_config": without(&sizes("mistral", "x"), "architectures") }));
    let described = read(&without(&small, "tie_word_embeddings"));
    assert_eq!((described.class, described.model.tied), (ModelClass::Mistral, false));
}

/// Keys of allenai/OLMo-2-1124-7B and allenai/Olmo-3-1025-7B.
#[test]
fn olmo_has_norms_after_its_branches() {
    let olmo = |kind: &str, class: &str| {
        with(
            &sizes(kind, class),
            json!({
                "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
                "pad_token_id": 3, "rope_scaling": null, "rope_theta": 500_000, "tie_word_embeddings": false
            }),
        )
    };
    let m = read(&olmo("olmo2", "Olmo2ForCausalLM")).model;
    assert!(m.qk_norm && m.qk_norm_width && !m.norm_offset && !m.tied);
    assert_eq!((m.norm_place, m.gate), (NormPlace::After, Gate::Silu));
    assert_eq!((m.layer_pattern.as_str(), m.rope.theta, m.head_dim), ("F", 5e5, 8));
    let olmo3 = with(
        &olmo("olmo3", "Olmo3ForCausalLM"),
        json!({
            "sliding_window": 4096, "rope_scaling": {
                "attention_factor": 1.207_944_154_167_983_6, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn"
            }
        }),
    );
    let m = read(&olmo3).model;
    assert_eq!((m.layer_pattern.as_str(), m.window), ("WWWF", Some(4096)));
    let RopeScaling::Yarn { factor, attention_factor, .. } = m.rope.scaling else { panic!() };
    // The number is what onebox computes from the factor.
    assert_eq!((factor, attention_factor), (8.0, None));
    assert_eq!((&m.window_rope.scaling, m.window_rope.theta), (&RopeScaling::None, 5e5));
    let why = refused(&with(&olmo3, json!({ "rope_theta": 10_000 })));
    assert!(why.contains("versions 4 and 5 of transformers read differently"), "{why}");
    // Version 5.
    let both = json!({ "rope_parameters": {
        "full_attention": with(&olmo3["rope_scaling"], json!({ "rope_theta": 7.0 })),
        "sliding_attention": { "rope_type": "default", "rope_theta": 9.0 }
    } });
    let new = with(&without(&without(&olmo3, "rope_theta"), "rope_scaling"), both);
    let new = read(&new).model;
    assert_eq!((new.rope.theta, new.window_rope.theta), (7.0, 9.0));
    assert!(matches!(new.rope.scaling, RopeScaling::Yarn { .. }));
}

/// Keys of HuggingFaceTB/SmolLM3-3B.
#[test]
fn some_layers_of_a_smollm3_have_no_positions() {
    let smollm3 = with(
        &sizes("smollm3", "SmolLM3ForCausalLM"),
        json!({
            "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "layer_types": vec!["full_attention"; 6], "max_window_layers": 28, "mlp_bias": false,
            "no_rope_layer_interval": 3, "no_rope_layers": [1, 1, 0, 1, 1, 0], "pad_token_id": 4, "pretraining_tp": 2,
            "rope_scaling": null, "rope_theta": 5_000_000.0, "sliding_window": null, "use_sliding_window": false
        }),
    );
    let m = read(&smollm3).model;
    assert_eq!((m.layer_pattern.as_str(), m.window, m.tied), ("FFN", None, true));
    assert_eq!(m.rope.theta, 5e6);
    assert_eq!(read(&without(&smollm3, "no_rope_layers")).model, m);
    let why = refused(&with(&smollm3, json!({ "no_rope_layers": [1, 2] })));
    assert!(why.contains("`no_rope_layers` is [1,2], not 0 or 1 for each of 6 layers"), "{why}");
    let why = refused(&with(&smollm3, json!({ "use_sliding_window": true })));
    assert!(why.contains("no rotary positions"), "{why}");
}

/// Keys of microsoft/phi-4 and microsoft/Phi-4-mini-instruct.
#[test]
fn phi4_mini_turns_a_part_of_each_head() {
    let phi4 = with(
        &sizes("phi3", "Phi3ForCausalLM"),
        json!({
            "attention_bias": false, "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "silu",
            "original_max_position_embeddings": 16_384, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5,
            "rope_scaling": null, "rope_theta": 250_000, "sliding_window": null, "tie_word_embeddings": false
        }),
    );
    let m = read(&phi4).model;
    assert_eq!((m.rope.theta, m.rope.rotated_share), (250_000.0, 1.0));
    assert_eq!((m.rope.scaling, m.layer_pattern.as_str()), (RopeScaling::None, "F"));
    let factors = |first: f64| (0..3).map(|i| json!(first + f64::from(i))).collect::<Vec<_>>();
    let mini = with(
        &phi4,
        json!({
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o",
                "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
            },
            "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false, "mlp_bias": false,
            "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
            "rope_scaling": { "long_factor": factors(2.0), "short_factor": factors(1.0), "type": "longrope" },
            "sliding_window": 262_144, "tie_word_embeddings": true
        }),
    );
    let m = read(&mini).model;
    assert_eq!((m.layer_pattern.as_str(), m.window, m.tied), ("F", None, true));
    assert_eq!((m.rope.rotated_share, m.rope.rotated_elements(m.head_dim)), (0.75, 6));
    let long = RopeScaling::LongRope {
        factor: 32.0,
        original_seq_len: 4096,
        short_factors: vec![1.0, 2.0, 3.0],
        long_factors: vec![2.0, 3.0, 4.0],
        attention_factor: None,
    };
    assert_eq!(m.rope.scaling, long);
    // Older names of the same scaling, and the form of version 5.
    let scaling = with(&mini["rope_scaling"], json!({ "type": "su" }));
    assert_eq!(read(&with(&mini, json!({ "rope_scaling": scaling }))).model, m);
    let mut new = mini["rope_scaling"].clone();
    new.as_object_mut().unwrap().remove("type");
    let more = json!({
        "rope_type": "longrope", "rope_theta": 250_000, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096
    });
    let new = with(&without(&mini, "rope_scaling"), json!({ "rope_parameters": with(&new, more) }));
    assert_eq!(read(&new).model, m);
    for (more, message) in [
        (
            json!({ "partial_rotary_factor": 1.0 }),
            "`short_factor` has 3 numbers, and a head has 4 pairs",
        ),
        (json!({ "partial_rotary_factor": 1.5 }), "not a number above 0, up to 1"),
        (
            json!({ "rope_scaling": { "type": "longrope", "short_factor": [1, 1, 1] } }),
            "`long_factor` is missing",
        ),
        (json!({ "resid_pdrop": 0.1 }), "`resid_pdrop` is 0.1"),
        (json!({ "auto_map": { "AutoModelForCausalLM": "other.Model" } }), "code of its own"),
        (json!({ "full_attn_mod": 2 }), "`full_attn_mod` is 2"),
    ] {
        let why = refused(&with(&mini, more.clone()));
        assert!(why.contains(message), "{more}: {why}");
    }
}

/// Keys of ibm-granite/granite-3.1-8b-base and ByteDance-Seed/Seed-OSS-36B-Base.
#[test]
fn granite_has_four_factors_and_seed_oss_biases() {
    let granite = with(
        &sizes("granite", "GraniteForCausalLM"),
        json!({
            "attention_bias": false, "attention_dropout": 0.1, "attention_multiplier": 0.125, "embedding_multiplier": 12.0,
            "hidden_act": "silu", "logits_scaling": 16.0, "mlp_bias": false, "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 10_000_000.0, "tie_word_embeddings": true
        }),
    );
    let m = read(&granite).model;
    assert_eq!((m.embedding_scale, m.residual_scale, m.logit_scale), (12.0, 0.22, 0.0625));
    assert_eq!(m.attention_scale, Some(0.125));
    let why = refused(&with(&granite, json!({ "logits_scaling": 0.0 })));
    assert!(
        why.contains("`logits_scaling` is 0.0, not a number from 0.000001 to 1000000"),
        "{why}"
    );
    let seed = with(
        &sizes("seed_oss", "SeedOssForCausalLM"),
        json!({
            "attention_bias": true, "attention_dropout": 0.1, "attention_out_bias": false, "head_dim": 16,
            "hidden_act": "silu", "mlp_bias": false, "pad_token_id": 3, "residual_dropout": 0.1, "rms_norm_eps": 1e-6,
            "rope_scaling": { "rope_type": "default" }, "rope_theta": 10_000_000.0, "tie_word_embeddings": false
        }),
    );
    let m = read(&seed).model;
    assert_eq!((m.qkv_bias, m.proj_bias, m.head_dim, m.dropout), (true, false, 16, 0.0));
    assert!(read(&with(&seed, json!({ "attention_out_bias": true }))).model.proj_bias);
}

/// Keys of Qwen/Qwen2.5-7B and Qwen/Qwen3-8B.
#[test]
fn upper_layers_of_a_qwen_have_windows_if_it_uses_them() {
    let qwen = |kind: &str, class: &str| {
        let base = with(
            &sizes(kind, class),
            json!({
                "attention_dropout": 0.0, "hidden_act": "silu", "max_window_layers": 4, "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0, "sliding_window": 4096, "tie_word_embeddings": false,
                "use_sliding_window": false
            }),
        );
        if kind == "qwen3" {
            with(&base, json!({ "head_dim": 16, "attention_bias": false }))
        } else {
            base
        }
    };
    for (kind, class) in [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")] {
        let base = qwen(kind, class);
        let m = read(&base).model;
        assert_eq!((m.layer_pattern.as_str(), m.window), ("F", None), "{kind}");
        assert_eq!((m.qkv_bias, m.qk_norm), (kind == "qwen2", kind == "qwen3"));
        let windowed = with(&base, json!({ "use_sliding_window": true }));
        let m = read(&windowed).model;
        assert_eq!((m.layer_pattern.as_str(), m.window), ("FFFFWW", Some(4096)), "{kind}");
        let kinds = ["full_attention", "sliding_attention"].repeat(3);
        let listed = with(&windowed, json!({ "layer_types": kinds }));
        assert_eq!(read(&listed).model.layer_pattern, "FW", "{kind}");
        let off = refused(&with(&listed, json!({ "use_sliding_window": false })));
        assert!(
            off.contains("layers have sliding_attention, and `use_sliding_window` is not true"),
            "{off}"
        );
        // YaRN, as the pages of both models describe it.
        let yarn = json!({ "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768
        } });
        let scaling = read(&with(&base, yarn)).model.rope.scaling;
        let RopeScaling::Yarn { beta_fast, beta_slow, truncate, attention_factor, .. } = scaling
        else {
            panic!()
        };
        assert_eq!((beta_fast, beta_slow, truncate, attention_factor), (32.0, 1.0, true, None));
    }
}
