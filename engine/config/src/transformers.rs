//! Reads the `config.json` of a folder of transformers: the model, or every key with a meaning that
//! onebox does not compute. Versions 4 and 5 of transformers write positions differently; both are
//! read.

mod instead;
mod keys;
mod kinds;

pub use self::instead::{
    FolderContent, MERGE, POINTER, adapter, next_to, other_form, pointer, python,
};
pub use self::keys::SPECIAL;
use self::keys::{Keys, Number};
use super::{Family, ModelConfig, RopeConfig, RopeScaling, Weights, in_line};
use files::foreign_text::{foreign, reason};
use files::json::{Object, shown};
use serde_json::{Value, json};
use std::ops::RangeInclusive;

/// Model that a folder describes.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderModel {
    /// Config of the model; `seq_len` is the longest sample that the model supports.
    pub model: ModelConfig,
    /// Key of the `config.json` that decides `seq_len`.
    pub(crate) positions: &'static str,
}

/// A key of `model` that a `config.json` decides.
#[derive(Clone, Copy, Debug)]
pub struct ComparedKey {
    /// Names of the key in the `config.json` of a GPT-2 and of a Llama.
    pub names: [&'static str; 2],
    /// Dotted key of the config, such as `model.layers`.
    pub key: &'static str,
    /// Value of the key, as a config writes it.
    pub value: fn(&ModelConfig) -> String,
}

/// All keys that a `config.json` decides.
pub const COMPARED: [ComparedKey; 15] = {
    const fn row(
        names: [&'static str; 2],
        key: &'static str,
        value: fn(&ModelConfig) -> String,
    ) -> ComparedKey {
        ComparedKey { names, key, value }
    }
    [
        row(["model_type"; 2], "model.family", |m| in_line(&m.family)),
        row(["n_layer", "num_hidden_layers"], "model.layers", |m| m.layers.to_string()),
        row(["n_embd", "hidden_size"], "model.hidden", |m| m.hidden.to_string()),
        row(["n_head", "num_attention_heads"], "model.heads", |m| m.heads.to_string()),
        row(["n_head", "num_key_value_heads"], "model.kv_heads", |m| m.kv_heads.to_string()),
        row(["n_embd", "head_dim"], "model.head_dim", |m| m.head_dim.to_string()),
        row(["n_positions", "max_position_embeddings"], "model.seq_len", |m| m.seq_len.to_string()),
        row(["vocab_size"; 2], "model.vocab", |m| m.vocab.to_string()),
        row(["n_inner", "intermediate_size"], "model.ffn_hidden", |m| m.ffn_hidden.to_string()),
        row(["layer_norm_epsilon", "rms_norm_eps"], "model.norm_eps", |m| m.norm_eps.to_string()),
        row(["model_type", "rope_parameters"], "model.rope", |m| in_line(&m.rope)),
        row(["model_type", "tie_word_embeddings"], "model.tied", |m| m.tied.to_string()),
        row(["model_type", "attention_bias"], "model.qkv_bias", |m| m.qkv_bias.to_string()),
        row(["model_type", "attention_bias"], "model.proj_bias", |m| m.proj_bias.to_string()),
        row(["model_type"; 2], "model.qk_norm", |m| m.qk_norm.to_string()),
    ]
};

/// Reasons why onebox cannot use a `config.json`.
#[derive(Debug)]
pub struct Refusal {
    /// One line for each key that is missing, impossible, or that onebox does not compute.
    pub wrong: Vec<String>,
    pub(crate) remedy: String,
}

impl Refusal {
    /// Refusal for a single reason; other reasons would only be its consequences.
    fn because(wrong: String, remedy: impl Into<String>) -> Self {
        Self { wrong: vec![wrong], remedy: remedy.into() }
    }
}

/// Remedy for a wrong key.
const MEND: &str = "mend the file, or use another model";

/// Reads the model from the bytes of a `config.json`.
///
/// # Errors
/// [`Refusal`].
pub fn folder_model(bytes: &[u8]) -> Result<FolderModel, Refusal> {
    if let Some(FolderContent { what, remedy }) = pointer(bytes) {
        return Err(Refusal::because(what, remedy));
    }
    let found = match serde_json::from_slice::<Object<Value>>(bytes) {
        Ok(Object(found)) => found,
        Err(e) => return Err(Refusal::because(reason(e).to_string(), MEND)),
    };
    let kind = kinds::built(&found)?;
    if let Some(codes) = found.get("quantization_config").filter(|codes| !codes.is_null()) {
        let codes = shown(codes);
        let why = format!("`quantization_config` is {codes}: weights must be numbers, not codes");
        return Err(Refusal::because(why, "use the model as it was before it was quantized"));
    }
    let mut keys = Keys { found, wrong: Vec::new(), read_keys: vec!["quantization_config"] };
    keys.fixed("auto_map", &[Value::Null], "it is code of its own, which is not run");
    let class = match kind {
        "gpt2" => "GPT2LMHeadModel",
        "llama" => "LlamaForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        _ => "Qwen3ForCausalLM",
    };
    let base = class.replace("LMHeadModel", "Model").replace("ForCausalLM", "Model");
    keys.fixed(
        "architectures",
        &[Value::Null, json!([class]), json!([base])],
        "only language models are built here",
    );
    let described = if kind == "gpt2" { gpt2(&mut keys) } else { llama(&mut keys, kind) };
    match keys.wrong {
        wrong if wrong.is_empty() => Ok(described),
        wrong => Err(Refusal { wrong, remedy: MEND.into() }),
    }
}

/// Stand-in for a model that cannot be read; no caller receives it.
pub(crate) const fn none() -> FolderModel {
    let model = ModelConfig {
        from: None,
        weights: Weights::Pretrained,
        family: Family::Llama,
        layers: 1,
        hidden: 2,
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        seq_len: 1,
        vocab: 2,
        ffn_hidden: 1,
        dropout: 0.0,
        init_std: 0.0,
        norm_eps: 0.0,
        rope: NO_ROPE,
        tied: false,
        qkv_bias: false,
        proj_bias: false,
        qk_norm: false,
    };
    FolderModel { model, positions: "" }
}

const LAYERS: RangeInclusive<u64> = 1..=10_000;
const HIDDEN: RangeInclusive<u64> = 1..=1_000_000;
const HEADS: RangeInclusive<u64> = 1..=65_536;
const TOKENS: RangeInclusive<u64> = 1..=16_777_216;
const VOCAB: RangeInclusive<u64> = 2..=16_777_216;
const INNER: RangeInclusive<u64> = 1..=4_000_000;

/// Rotary positions in the config of a model without them.
const NO_ROPE: RopeConfig = RopeConfig { theta: 10_000.0, scaling: RopeScaling::None };

fn gpt2(keys: &mut Keys) -> FolderModel {
    keys.fixed(
        "activation_function",
        &[json!("gelu_new"), json!("gelu_pytorch_tanh")],
        "blocks here have the tanh form of GELU",
    );
    let one = &[json!(true)];
    keys.fixed("tie_word_embeddings", one, "the output of a GPT-2 is the embedding here");
    keys.fixed("scale_attn_weights", one, "scores are divided by sqrt(head size) here");
    let none = &[json!(false)];
    keys.fixed("scale_attn_by_inverse_layer_idx", none, "layers do not scale scores here");
    keys.fixed("reorder_and_upcast_attn", none, "it rounds otherwise");
    keys.fixed("add_cross_attention", none, "there is none here");
    let layers = keys.whole("n_layer", LAYERS);
    let (hidden, heads) = (keys.whole("n_embd", HIDDEN), keys.whole("n_head", HEADS));
    keys.divides(
        Number { key: "n_head", value: heads },
        Number { key: "n_embd", value: hidden },
        "heads are equally large",
    );
    let seq_len = keys.whole("n_positions", TOKENS);
    if let Some(context) = keys.get("n_ctx").filter(|context| *context != json!(seq_len)) {
        let context = shown(&context);
        keys.wrong.push(format!("`n_ctx` is {context}, and `n_positions` is {seq_len}"));
    }
    let model = ModelConfig {
        from: None,
        weights: Weights::Pretrained,
        family: Family::Gpt2,
        layers,
        hidden,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        seq_len,
        vocab: keys.vocab(),
        ffn_hidden: keys.whole_or("n_inner", INNER, Some(hidden.saturating_mul(4))),
        dropout: 0.0,
        init_std: keys.number("initializer_range", 0.0, 0.02),
        norm_eps: keys.number("layer_norm_epsilon", 0.0, 1e-5),
        rope: NO_ROPE,
        tied: true,
        qkv_bias: true,
        proj_bias: true,
        qk_norm: false,
    };
    FolderModel { model, positions: "n_positions" }
}

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

fn llama(keys: &mut Keys, kind: &str) -> FolderModel {
    let heads = keys.whole("num_attention_heads", HEADS);
    let hidden = keys.whole("hidden_size", HIDDEN);
    // The Qwen3 class has another default than this quotient, but no Qwen3 leaves out the key.
    let head_dim = match kind {
        "qwen3" => keys.whole("head_dim", HEADS),
        _ => keys.whole_or("head_dim", HEADS, Some(hidden / heads)),
    };
    let kv_heads = match kind {
        "llama" => keys.whole_or("num_key_value_heads", HEADS, Some(heads)),
        _ => keys.whole("num_key_value_heads", HEADS),
    };
    let of_queries = Number { key: "num_attention_heads", value: heads };
    if !keys.found.contains_key("head_dim") {
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
    keys.fixed(
        "attention_dropout",
        &[json!(0.0), json!(0)],
        "onebox has no dropout of attention weights alone; write 0.0, and `model.dropout` in the config drops there and elsewhere",
    );
    keys.fixed("hidden_act", &[json!("silu"), json!("swish")], "gates here are SiLU");
    keys.fixed("mlp_bias", &[json!(false)], "gated MLPs have no biases here");
    keys.fixed("is_decoder", &[json!(false), json!(true)], "it says whether a model is a decoder");
    keys.fixed("add_cross_attention", &[json!(false)], "there is none here");
    keys.fixed("is_encoder_decoder", &[json!(false)], "there is no encoder here");
    keys.fixed("cross_attention_hidden_size", &[Value::Null], "there is none here");
    keys.fixed("pruned_heads", &[Value::Null, json!({})], "all heads are there");
    keys.fixed("tie_encoder_decoder", &[json!(false)], "there is no encoder here");
    let biases = match kind {
        "llama" | "qwen3" => keys.flag("attention_bias", false),
        _ => {
            keys.fixed(
                "attention_bias",
                &[json!(kind == "qwen2")],
                "its class does not have it so",
            );
            false
        }
    };
    let most = keys.whole("max_position_embeddings", TOKENS);
    let window = window(keys, kind);
    let model = ModelConfig {
        from: None,
        weights: Weights::Pretrained,
        family: Family::Llama,
        layers: keys.whole("num_hidden_layers", LAYERS),
        hidden,
        heads,
        kv_heads,
        head_dim,
        seq_len: most.min(window.unwrap_or(most)),
        vocab: keys.vocab(),
        ffn_hidden: keys.whole("intermediate_size", INNER),
        dropout: 0.0,
        init_std: keys.number("initializer_range", 0.0, 0.02),
        norm_eps: keys.number("rms_norm_eps", 0.0, 1e-6),
        rope: rope(keys),
        tied: keys.flag("tie_word_embeddings", false),
        qkv_bias: biases || kind == "qwen2",
        proj_bias: biases,
        qk_norm: kind == "qwen3",
    };
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
    let positions = match window {
        Some(window) if window < most => "sliding_window",
        _ => "max_position_embeddings",
    };
    FolderModel { model, positions }
}

/// Default attention window in tokens, if a class has a window and its `config.json` gives no
/// number.
pub const WINDOW: usize = 4096;

/// Attention window in tokens; `None` if attention reads all tokens of a sample.
fn window(keys: &mut Keys, kind: &str) -> Option<usize> {
    let qwen = kind.starts_with("qwen");
    let used = !qwen || keys.flag("use_sliding_window", false);
    if let Some(types) = keys.get("layer_types") {
        let full = |kind: &Value| kind == "full_attention" || (used && kind == "sliding_attention");
        if !types.as_array().is_some_and(|all| all.iter().all(full)) {
            let types = shown(&types);
            keys.wrong
                .push(format!("`layer_types` is {types}: all layers look at all tokens here"));
        }
    }
    keys.read_keys.extend(["max_window_layers", "sliding_window"]);
    // Without the key its class has a window; null means no window.
    let none = keys.found.get("sliding_window").is_some_and(Value::is_null);
    let windowed = used && !none && (kind == "mistral" || qwen);
    windowed.then(|| keys.whole_or("sliding_window", TOKENS, Some(WINDOW)))
}

/// Reads both forms: `rope_parameters` of version 5, `rope_theta` and `rope_scaling` of version 4.
fn rope(keys: &mut Keys) -> RopeConfig {
    keys.fixed("partial_rotary_factor", &[json!(1.0), json!(1)], "whole heads are rotated here");
    let theta = keys.get("rope_theta");
    let (scaling, parameters) = (keys.get("rope_scaling"), keys.get("rope_parameters"));
    if let (Some(old), Some(new)) = (&scaling, &parameters)
        && ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
            .iter()
            .any(|key| old.get(key) != new.get(key))
    {
        keys.wrong.push(format!(
            "`rope_scaling` is {}, and `rope_parameters` is {}: they contradict each other",
            shown(old),
            shown(new)
        ));
        return NO_ROPE;
    }
    let name = if parameters.is_some() { "rope_parameters" } else { "rope_scaling" };
    let inner = match parameters.or(scaling).unwrap_or_else(|| json!({})) {
        Value::Object(inner) => inner.into_iter().collect(),
        other => {
            keys.wrong.push(format!("`{name}` is {}, not an object", shown(&other)));
            return NO_ROPE;
        }
    };
    let mut inner = Keys { found: inner, wrong: Vec::new(), read_keys: Vec::new() };
    let own = inner.get("rope_theta");
    if let (Some(own), Some(theta)) = (&own, &theta)
        && own.as_f64() != theta.as_f64()
    {
        let (own, theta) = (shown(own), shown(theta));
        keys.wrong.push(format!("`rope_theta` is {theta}, and in `{name}` {own}"));
    }
    let theta = own.or(theta).unwrap_or_else(|| json!(10_000.0));
    let scaling = rope_scaling(&mut inner);
    inner.fixed("partial_rotary_factor", &[json!(1.0), json!(1)], "whole heads are rotated here");
    let strange: Vec<String> = inner
        .found
        .keys()
        .filter(|key| !inner.read_keys.contains(&key.as_str()))
        .cloned()
        .collect();
    inner.wrong.extend(
        strange.iter().map(|key| format!("`{}` is nothing that onebox computes", foreign(key))),
    );
    keys.wrong.extend(inner.wrong.iter().map(|wrong| format!("`{name}`: {wrong}")));
    match theta.as_f64().filter(|theta| (1.0..=1e12).contains(theta)) {
        Some(theta) => RopeConfig { theta: theta as f32, scaling },
        None => {
            let theta = shown(&theta);
            keys.wrong.push(format!("`rope_theta` is {theta}, not a number from 1 to 1e12"));
            NO_ROPE
        }
    }
}

fn rope_scaling(inner: &mut Keys) -> RopeScaling {
    let (old, new) = (inner.get("type"), inner.get("rope_type"));
    if let (Some(old), Some(new)) = (&old, &new)
        && old != new
    {
        let (old, new) = (shown(old), shown(new));
        inner.wrong.push(format!("`type` is {old}, and `rope_type` is {new}"));
    }
    match new.or(old).unwrap_or_else(|| json!("default")).as_str() {
        Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor(inner, "factor") },
        Some("llama3") => {
            let original_seq_len = inner.whole("original_max_position_embeddings", TOKENS);
            let [factor, low_freq_factor, high_freq_factor] =
                ["factor", "low_freq_factor", "high_freq_factor"].map(|key| factor(inner, key));
            if low_freq_factor >= high_freq_factor && inner.wrong.is_empty() {
                inner.wrong.push(format!(
                    "`low_freq_factor` is {low_freq_factor}, and `high_freq_factor` is \
                     {high_freq_factor}: the first must be smaller"
                ));
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_seq_len }
        }
        other => {
            let other =
                other.map_or_else(|| "no name".to_owned(), |name| format!("\"{}\"", foreign(name)));
            let why = "default, linear and llama3 are built here";
            inner.wrong.push(format!("`rope_type` is {other}: {why}"));
            // Errors about further keys of an unknown type would be noise.
            inner.found.clear();
            RopeScaling::None
        }
    }
}

fn factor(inner: &mut Keys, key: &'static str) -> f32 {
    if !inner.found.contains_key(key) {
        inner.wrong.push(format!("`{key}` is missing"));
    }
    inner.number(key, 0.01, 1.0)
}
