//! Classes of models that onebox supports, and descriptions of other classes.

use super::Refusal;
use files::json::shown;
use serde_json::Value;
use std::collections::BTreeMap;

/// Values of `model_type` that onebox supports.
const BUILT: [&str; 5] = ["gpt2", "llama", "mistral", "qwen2", "qwen3"];

/// Keys of a `config.json`.
type Keys = BTreeMap<String, Value>;

/// Class of a model, if onebox supports it.
pub(super) fn built(keys: &Keys) -> Result<&'static str, Refusal> {
    let built = BUILT.join(", ");
    let remedy = format!("use a model of {built}: see docs/models.md");
    let Some(kind) = keys.get("model_type") else {
        let why = format!("`model_type` is missing: {built} are built here");
        return Err(Refusal::because(why, super::MEND));
    };
    if let Some(known) = BUILT.into_iter().find(|known| kind == known) {
        return Ok(known);
    }
    let (what, inner) = kind.as_str().and_then(|kind| other(kind, keys)).unzip();
    let what = what.map_or_else(|| format!("{built} are built here"), str::to_owned);
    let remedy = match inner.flatten() {
        Some(inner) => {
            format!("save its text model, a {inner}, in a folder of its own, or {remedy}")
        }
        None => remedy,
    };
    Err(Refusal::because(format!("`model_type` is {}: {what}", shown(kind)), remedy))
}

/// Description of a model of the class `kind`, if its keys identify it, and the supported class
/// that it contains, if known.
fn other(kind: &str, keys: &Keys) -> Option<(&'static str, Option<&'static str>)> {
    let has = |names: &[&str]| names.iter().any(|name| keys.get(*name).is_some_and(counts));
    if let Some(Value::Object(text)) = keys.get("text_config") {
        let inner =
            BUILT.into_iter().find(|built| text.get("model_type").is_some_and(|t| t == built));
        return Some(("it reads more than text, and onebox trains models of text alone", inner));
    }
    let experts = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
    if kind.contains("moe") || ["mixtral", "dbrx"].contains(&kind) || has(&experts) {
        return Some(("it is a mixture of experts, and onebox has none", None));
    }
    if has(&["is_encoder_decoder"]) {
        return Some(("it has an encoder, and onebox has decoders alone", None));
    }
    let states =
        ["state_size", "ssm_cfg", "mamba_d_state", "linear_num_key_heads", "attention_hidden_size"];
    if kind.contains("mamba") || kind.contains("rwkv") || has(&states) {
        return Some((
            "it has layers with a state in the place of attention, and onebox has none",
            None,
        ));
    }
    let class = keys.get("architectures")?.get(0)?.as_str()?;
    let goes_on = ["ForCausalLM", "LMHeadModel", "Model"].iter().any(|end| class.ends_with(end));
    (!goes_on).then_some(("it is no model that goes on with a text", None))
}

/// Whether the value of a key means that the model has the part of this name.
fn counts(value: &Value) -> bool {
    match value {
        Value::Bool(is) => *is,
        Value::Number(n) => n.as_f64().is_some_and(|n| n > 1.0),
        Value::Null => false,
        _ => true,
    }
}
