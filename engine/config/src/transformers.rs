//! Reads the `config.json` of a folder of transformers: the model, or every key with a meaning that
//! onebox does not compute. Versions 4 and 5 of transformers write positions differently; both are
//! read.

mod classes;
mod decoder;
mod experts;
mod instead;
mod keys;
mod kinds;
mod layers;
mod rope;
#[cfg(test)]
mod tests;

pub use self::classes::{ModelClass, WrapperClass};
pub use self::instead::{
    FolderContent, MERGE, POINTER, adapter, next_to, other_form, pointer, python,
};
pub use self::keys::SPECIAL;
use self::keys::{Keys, Number};
pub use self::layers::WINDOW;
use super::{
    Balance, ExpertsConfig, Family, Gate, ModelConfig, NormPlace, RopeConfig, RopeScaling, Weights,
    in_line,
};
use files::foreign_text::reason;
use files::json::{Object, shown};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Model that a folder describes.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderModel {
    /// Config of the model; `seq_len` is the longest sample that the model supports.
    pub model: ModelConfig,
    /// Key of the `config.json` that decides `seq_len`.
    pub(crate) positions: &'static str,
    /// Class of the decoder.
    pub class: ModelClass,
    /// Class around the decoder, if the folder has other parts, too.
    pub wrapper: Option<WrapperClass>,
}

impl FolderModel {
    /// Number of the decoder's layers, if the folder may have further layers after them.
    pub fn layers_before_others(&self) -> Option<usize> {
        self.class.may_predict_more().then_some(self.model.layers)
    }
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
pub const COMPARED: [ComparedKey; 32] = {
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
        row(["model_type", "layer_types"], "model.layer_pattern", |m| m.layer_pattern.clone()),
        row(["model_type", "sliding_window"], "model.window", |m| {
            m.window.map_or_else(|| "None".into(), |window| window.to_string())
        }),
        row(["model_type", "rope_parameters"], "model.window_rope", |m| in_line(&m.window_rope)),
        row(["model_type", "linear_num_key_heads"], "model.delta_net", |m| in_line(&m.delta_net)),
        row(["model_type"; 2], "model.output_gate", |m| m.output_gate.to_string()),
        row(["model_type"; 2], "model.qk_norm_width", |m| m.qk_norm_width.to_string()),
        row(["model_type"; 2], "model.attention_sinks", |m| m.attention_sinks.to_string()),
        row(["model_type"; 2], "model.norm_offset", |m| m.norm_offset.to_string()),
        row(["model_type"; 2], "model.norm_place", |m| in_line(&m.norm_place)),
        row(["model_type"; 2], "model.gate", |m| in_line(&m.gate)),
        row(["model_type"; 2], "model.attention_scale", |m| optional(m.attention_scale)),
        row(["model_type"; 2], "model.score_cap", |m| optional(m.score_cap)),
        row(["model_type"; 2], "model.logit_cap", |m| optional(m.logit_cap)),
        row(["model_type"; 2], "model.embedding_scale", |m| m.embedding_scale.to_string()),
        row(["model_type"; 2], "model.residual_scale", |m| m.residual_scale.to_string()),
        row(["model_type"; 2], "model.logit_scale", |m| m.logit_scale.to_string()),
        row(["model_type", "num_experts"], "model.experts", experts_of),
    ]
};

fn optional(number: Option<f32>) -> String {
    number.map_or_else(|| "None".into(), |number| number.to_string())
}

/// Experts of a model, as a config writes them. The balance loss is a matter of the training: it may
/// differ from the folder's.
fn experts_of(model: &ModelConfig) -> String {
    let off = |experts: &ExpertsConfig| ExpertsConfig { balance: Balance::Off, ..experts.clone() };
    in_line(&model.experts.as_ref().map(off))
}

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
    let kinds::Kind { class, wrapper } = kinds::built(&found)?;
    let Some(wrapper) = wrapper else {
        refuse_codes(&found, class)?;
        let mut keys = Keys::of(found);
        let described = text_model(&mut keys, class);
        return unless_wrong(described, keys.wrong);
    };
    wrapped(found, class, wrapper)
}

fn unless_wrong(described: FolderModel, wrong: Vec<String>) -> Result<FolderModel, Refusal> {
    match wrong {
        wrong if wrong.is_empty() => Ok(described),
        wrong => Err(Refusal { wrong, remedy: MEND.into() }),
    }
}

/// Refuses quantized weights, but for the form in which the class is published.
fn refuse_codes(found: &BTreeMap<String, Value>, class: ModelClass) -> Result<(), Refusal> {
    let Some(codes) = found.get("quantization_config").filter(|codes| !codes.is_null()) else {
        return Ok(());
    };
    if class == ModelClass::GptOss && codes.get("quant_method") == Some(&json!("mxfp4")) {
        return Ok(());
    }
    let codes = shown(codes);
    let why = format!("`quantization_config` is {codes}: weights must be numbers, not codes");
    Err(Refusal::because(why, "use the model as it was before it was quantized"))
}

/// Reads the decoder in a wrapper. Other parts of the wrapper are not read.
fn wrapped(
    found: BTreeMap<String, Value>,
    class: ModelClass,
    wrapper: WrapperClass,
) -> Result<FolderModel, Refusal> {
    let inner: BTreeMap<String, Value> = match found.get("text_config") {
        Some(Value::Object(inner)) => inner.clone().into_iter().collect(),
        other => unreachable!("`kinds` asks for an object: {other:?}"),
    };
    refuse_codes(&found, class)?;
    refuse_codes(&inner, class)?;
    let (mut outer, mut keys) = (Keys::of(found), Keys::of(inner));
    outer.fixed("auto_map", &[Value::Null], "it is code of its own, which is not run");
    let [whole, base] = wrapper.names();
    let allowed = [Value::Null, json!([whole]), json!([base])];
    outer.fixed("architectures", &allowed, "the class around a language model decides its parts");
    let mut described = text_model(&mut keys, class);
    described.wrapper = Some(wrapper);
    // The key counts outside of `text_config`; files of version 4 have it inside only.
    let tied = described.model.tied;
    described.model.tied = outer.flag("tie_word_embeddings", tied);
    if let Some(cap) = described.model.logit_cap {
        let name = wrapper.names()[0];
        keys.wrong.push(format!(
            "`final_logit_softcapping` is {cap}, and a {name} caps no logits: write null"
        ));
    }
    let inside = keys.wrong.into_iter().map(|wrong| format!("`text_config`: {wrong}"));
    let wrong = outer.wrong.into_iter().chain(inside).collect();
    unless_wrong(described, wrong)
}

/// Reads a decoder.
fn text_model(keys: &mut Keys, class: ModelClass) -> FolderModel {
    keys.read_keys.push("quantization_config");
    match keys.get("auto_map") {
        // Files of Phi-4-mini name copies of the class that transformers has itself.
        Some(map) if class == ModelClass::Phi3 && is_of_phi3(&map) => {}
        _ => keys.fixed("auto_map", &[Value::Null], "it is code of its own, which is not run"),
    }
    let [whole, base] = class.names();
    let allowed = [Value::Null, json!([whole]), json!([base])];
    keys.fixed("architectures", &allowed, "only language models are built here");
    let described = match class {
        ModelClass::Gpt2 => gpt2(keys),
        class => decoder::decoder(keys, class),
    };
    // Windows that hold a whole sample of the model are none.
    let model = described.model.for_samples(described.model.seq_len);
    FolderModel { model, ..described }
}

/// Whether `map`, the `auto_map` of a folder with its own code, names nothing but Phi-3's classes.
fn is_of_phi3(map: &Value) -> bool {
    map.as_object().is_some_and(|map| {
        map.iter().all(|(key, value)| match key.as_str() {
            "AutoConfig" => value == "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM" => value == "modeling_phi3.Phi3ForCausalLM",
            // onebox reads the files of a tokenizer itself.
            key => key == "AutoTokenizer",
        })
    })
}

/// Stand-in for a model that cannot be read; no caller receives it.
pub(crate) fn none() -> FolderModel {
    FolderModel { model: plain(), positions: "", class: ModelClass::Llama, wrapper: None }
}

/// Smallest model, with parts of a Llama.
fn plain() -> ModelConfig {
    ModelConfig {
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
        experts: None,
        dropout: 0.0,
        init_std: 0.0,
        norm_eps: 0.0,
        rope: NO_ROPE,
        layer_pattern: "F".into(),
        window: None,
        window_rope: NO_ROPE,
        delta_net: None,
        tied: false,
        qkv_bias: false,
        proj_bias: false,
        qk_norm: false,
        qk_norm_width: false,
        attention_sinks: false,
        output_gate: false,
        norm_offset: false,
        norm_place: NormPlace::Before,
        gate: Gate::Silu,
        attention_scale: None,
        score_cap: None,
        logit_cap: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
    }
}

const LAYERS: RangeInclusive<u64> = 1..=10_000;
const HIDDEN: RangeInclusive<u64> = 1..=1_000_000;
const HEADS: RangeInclusive<u64> = 1..=65_536;
const TOKENS: RangeInclusive<u64> = 1..=16_777_216;
const VOCAB: RangeInclusive<u64> = 2..=16_777_216;
const INNER: RangeInclusive<u64> = 1..=4_000_000;

/// Rotary positions in the config of a model without them.
const NO_ROPE: RopeConfig =
    RopeConfig { theta: 10_000.0, rotated_share: 1.0, scaling: RopeScaling::None };

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
        family: Family::Gpt2,
        layers,
        hidden,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        seq_len,
        vocab: keys.vocab(None),
        ffn_hidden: keys.whole_or("n_inner", INNER, Some(hidden.saturating_mul(4))),
        init_std: keys.number("initializer_range", 0.0, 0.02),
        norm_eps: keys.number("layer_norm_epsilon", 0.0, 1e-5),
        tied: true,
        qkv_bias: true,
        proj_bias: true,
        ..plain()
    };
    FolderModel { model, positions: "n_positions", class: ModelClass::Gpt2, wrapper: None }
}
