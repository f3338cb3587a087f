//! What a folder of transformers holds: a file, an index, a config.
#![no_main]

use config::{Family, ModelConfig, RopeConfig, RopeScaling, Weights};
use files::foreign_text::is_line;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    assert!(checkpoint::parsers::foreign_header(bytes).unwrap_or_else(|why| is_line(&why)));
    assert!(checkpoint::parsers::index(bytes).map_or_else(|why| is_line(&why), |()| true));
    let model = ModelConfig {
        layers: 2,
        hidden: 32,
        heads: 4,
        seq_len: 16,
        vocab: 61,
        ffn_hidden: 96,
        dropout: 0.0,
        init_std: 0.02,
        from: None,
        weights: Weights::Pretrained,
        family: Family::Gpt2,
        kv_heads: 4,
        head_dim: 8,
        norm_eps: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
        tied: true,
        qkv_bias: true,
        proj_bias: true,
        qk_norm: false,
    };
    let _ = checkpoint::parsers::config_json(bytes, &model);
});
