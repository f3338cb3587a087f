//! Shapes of the models of the rows.

/// Keys of the section `model` by the names of the rows, without `seq_len`.
const MODELS: &[(&str, &str)] = &[
    (
        "Qwen2.5-0.5B",
        "family: Llama, qkv_bias: true, tied: true, layers: 24, hidden: 896, heads: 14, kv_heads: 2, ffn_hidden: 4864, vocab: 151936",
    ),
    (
        "Qwen2.5-1.5B",
        "family: Llama, qkv_bias: true, tied: true, layers: 28, hidden: 1536, heads: 12, kv_heads: 2, ffn_hidden: 8960, vocab: 151936",
    ),
    (
        "Qwen2.5-3B",
        "family: Llama, qkv_bias: true, tied: true, layers: 36, hidden: 2048, heads: 16, kv_heads: 2, ffn_hidden: 11008, vocab: 151936",
    ),
    (
        "Qwen2.5-7B",
        "family: Llama, qkv_bias: true, layers: 28, hidden: 3584, heads: 28, kv_heads: 4, ffn_hidden: 18944, vocab: 152064",
    ),
    (
        "Qwen2.5-14B",
        "family: Llama, qkv_bias: true, layers: 48, hidden: 5120, heads: 40, kv_heads: 8, ffn_hidden: 13824, vocab: 152064",
    ),
    (
        "Qwen3-4B",
        "family: Llama, qk_norm: true, tied: true, layers: 36, hidden: 2560, heads: 32, kv_heads: 8, head_dim: 128, ffn_hidden: 9728, vocab: 151936",
    ),
    (
        "Qwen3-8B",
        "family: Llama, qk_norm: true, layers: 36, hidden: 4096, heads: 32, kv_heads: 8, ffn_hidden: 12288, vocab: 151936",
    ),
    (
        "Qwen3-14B",
        "family: Llama, qk_norm: true, layers: 40, hidden: 5120, heads: 40, kv_heads: 8, ffn_hidden: 17408, vocab: 151936",
    ),
    ("Llama-3-8B", LLAMA_3_8B),
    ("Llama-3.1-8B", LLAMA_3_8B),
    (
        "Llama-2-7B",
        "family: Llama, layers: 32, hidden: 4096, heads: 32, ffn_hidden: 11008, vocab: 32000",
    ),
    (
        "Llama-2-13B",
        "family: Llama, layers: 40, hidden: 5120, heads: 40, ffn_hidden: 13824, vocab: 32000",
    ),
    // Tables of llm-foundry's README. MPT has ALiBi instead of positions, and no biases.
    ("MPT-125m", "layers: 12, hidden: 768, heads: 12, vocab: 50368"),
    ("MPT-760m", "layers: 24, hidden: 1536, heads: 12, vocab: 50368"),
    ("MPT-1b", "layers: 24, hidden: 2048, heads: 16, vocab: 50368"),
    ("MPT-3b", "layers: 32, hidden: 2560, heads: 20, vocab: 50368"),
    ("MPT-7b", "layers: 32, hidden: 4096, heads: 32, vocab: 50368"),
    ("MPT-13b", "layers: 40, hidden: 5120, heads: 40, vocab: 50368"),
    ("MPT-30b", "layers: 48, hidden: 7168, heads: 56, vocab: 50368"),
    ("GPT-2 124M", "layers: 12, hidden: 768, heads: 12, vocab: 50304"),
    ("GPT 1.3B", "layers: 24, hidden: 2048, heads: 16, vocab: 50304"),
    ("GPT 10B", "layers: 50, hidden: 4096, heads: 32, vocab: 50304"),
];

const LLAMA_3_8B: &str = "family: Llama, layers: 32, hidden: 4096, heads: 32, kv_heads: 8, ffn_hidden: 14336, vocab: 128256";

/// Keys of the section `model` of the model `name`.
pub(crate) fn keys(name: &str) -> &'static str {
    let found = MODELS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no shape of {name}")).1
}
