//! What a folder of transformers holds: a file, an index, a config.
#![no_main]

use config::{Family, Gate, ModelConfig, NormPlace, RopeConfig, RopeScaling, Weights};
use files::foreign_text::is_line;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    assert!(checkpoint::parsers::foreign_header(bytes).unwrap_or_else(|why| is_line(&why)));
    assert!(checkpoint::parsers::index(bytes).map_or_else(|why| is_line(&why), |()| true));
    let rope = RopeConfig { theta: 1e4, rotated_share: 1.0, scaling: RopeScaling::None };
    let model = ModelConfig {
        layers: 2,
        hidden: 32,
        heads: 4,
        seq_len: 16,
        vocab: 61,
        ffn_hidden: 96,
        experts: None,
        dropout: 0.0,
        init_std: 0.02,
        from: None,
        weights: Weights::Pretrained,
        family: Family::Gpt2,
        kv_heads: 4,
        head_dim: 8,
        norm_eps: 1e-5,
        rope: rope.clone(),
        layer_pattern: "F".into(),
        window: None,
        window_rope: rope,
        tied: true,
        qkv_bias: true,
        proj_bias: true,
        qk_norm: false,
        qk_norm_width: false,
        attention_sinks: false,
        norm_offset: false,
        norm_place: NormPlace::Before,
        gate: Gate::Silu,
        attention_scale: None,
        score_cap: None,
        logit_cap: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
    };
    let _ = checkpoint::parsers::config_json(bytes, &model);
});
