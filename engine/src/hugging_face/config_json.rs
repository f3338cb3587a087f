//! `config.json`: what of it must be so for the model to be the one that onebox computes.

use crate::config::ModelConfig;
use crate::train::build::decimal;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// An object in which no key stands twice.
#[derive(Debug)]
pub(super) struct Object<T>(pub(super) BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<T>, A::Error> {
        let mut found = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, T>()? {
            let shown = key.escape_debug().to_string();
            if found.insert(key, value).is_some() {
                return Err(A::Error::custom(format!("`{shown:.200}` stands there twice")));
            }
        }
        Ok(Object(found))
    }
}

/// For a model that onebox has trained.
pub(super) fn text(model: &ModelConfig) -> String {
    let dropout = f64::from(model.dropout);
    let inner = (model.ffn_hidden != 4 * model.hidden).then_some(model.ffn_hidden);
    let all = json!({
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": dropout,
        "bos_token_id": null,
        "dtype": "float32",
        "embd_pdrop": dropout,
        "eos_token_id": null,
        "initializer_range": f64::from(model.init_std),
        "layer_norm_epsilon": decimal(model.norm_eps),
        "model_type": "gpt2",
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": inner,
        "n_layer": model.layers,
        "n_positions": model.seq_len,
        "resid_pdrop": dropout,
        "scale_attn_by_inverse_layer_idx": false,
        "reorder_and_upcast_attn": false,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        "use_cache": true,
        "vocab_size": model.vocab,
    });
    format!("{all:#}\n")
}

/// What of a `config.json` is not the model of `model`, each with its key and the remedy, where there is one.
pub(super) fn mismatches(bytes: &[u8], model: &ModelConfig) -> Result<Vec<String>, String> {
    let Object(found) =
        serde_json::from_slice::<Object<Value>>(bytes).map_err(|e| e.to_string())?;
    // Of another kind of model no key says more.
    if let Some(kind) = found.get("model_type").filter(|kind| **kind != "gpt2") {
        return Ok(vec![format!(
            "only GPT-2 can be imported; its `model_type` is {}",
            shown(kind)
        )]);
    }
    let mut wrong = Vec::new();
    sizes(&found, model, &mut wrong);
    // Left out, each is what it must be.
    let fixed: [(&str, &[Value], &str); 8] = [
        (
            "activation_function",
            &[json!("gelu_new"), json!("gelu_pytorch_tanh")],
            "blocks here have the tanh form of GELU",
        ),
        ("tie_word_embeddings", &[json!(true)], "the output is the embedding here"),
        ("scale_attn_weights", &[json!(true)], "scores are divided by sqrt(head size) here"),
        ("scale_attn_by_inverse_layer_idx", &[json!(false)], "layers do not scale scores here"),
        ("reorder_and_upcast_attn", &[json!(false)], "it rounds otherwise"),
        ("add_cross_attention", &[json!(false)], "there is none here"),
        ("quantization_config", &[Value::Null], "weights must be numbers, not codes"),
        ("auto_map", &[Value::Null], "it is code of its own, which is not run"),
    ];
    for (key, allowed, why) in fixed {
        if let Some(value) = found.get(key).filter(|value| !allowed.contains(value)) {
            let expected: Vec<String> = allowed.iter().map(Value::to_string).collect();
            let value = shown(value);
            wrong.push(format!("`{key}` is {value}, not {}: {why}", expected.join(" or ")));
        }
    }
    if !found.contains_key("model_type") {
        wrong.push("`model_type` is missing: only \"gpt2\" can be imported".into());
    }
    Ok(wrong)
}

/// What a GPT-2 of transformers adds to variances where its config does not say so.
const EPSILON: f64 = 1e-5;

/// Numbers that the config must have too.
fn sizes(found: &BTreeMap<String, Value>, model: &ModelConfig, wrong: &mut Vec<String>) {
    let wanted = [
        ("n_layer", "model.layers", model.layers),
        ("n_embd", "model.hidden", model.hidden),
        ("n_head", "model.heads", model.heads),
        ("n_positions", "model.seq_len", model.seq_len),
        ("vocab_size", "model.vocab", model.vocab),
    ];
    for (key, ours, is) in wanted {
        match found.get(key) {
            None => wrong.push(format!("`{key}` is missing")),
            Some(value) => size((key, value), (ours, is), wrong),
        }
    }
    let inner = found.get("n_inner").filter(|value| !value.is_null());
    let four = found.get("n_embd").and_then(Value::as_u64).map(|c| json!(c.saturating_mul(4)));
    if let Some(value) = inner.or(four.as_ref()) {
        size(("n_inner", value), ("model.ffn_hidden", model.ffn_hidden), wrong);
    }
    let (epsilon, ours) = (found.get("layer_norm_epsilon"), decimal(model.norm_eps));
    match epsilon.map_or(Some(EPSILON), Value::as_f64) {
        Some(e) if (e - ours).abs() <= 1e-6 * ours => {}
        Some(e) => wrong.push(format!(
            "`layer_norm_epsilon` is {e:e}, and model.norm_eps is {ours:e}: --set model.norm_eps={e:e}"
        )),
        None => {
            let value = epsilon.map_or_else(String::new, shown);
            wrong.push(format!("`layer_norm_epsilon` is {value}, not a number"));
        }
    }
    if let Some(value) = found.get("n_ctx") {
        size(("n_ctx", value), ("model.seq_len", model.seq_len), wrong);
    }
}

fn size((key, value): (&str, &Value), (ours, is): (&str, usize), wrong: &mut Vec<String>) {
    match value.as_u64() {
        Some(n) if n == is as u64 => {}
        Some(n) => wrong.push(format!("`{key}` is {n}, and {ours} is {is}: --set {ours}={n}")),
        None => wrong.push(format!("`{key}` is {}, not a whole number", shown(value))),
    }
}

/// A value, as far as a line shows it.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Family, RopeConfig, RopeScaling};

    fn model() -> ModelConfig {
        ModelConfig {
            layers: 2,
            hidden: 32,
            heads: 4,
            seq_len: 16,
            vocab: 61,
            ffn_hidden: 128,
            dropout: 0.0,
            init_std: 0.02,
            family: Family::Gpt2,
            kv_heads: 4,
            head_dim: 8,
            norm_eps: 1e-5,
            rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
            tied: true,
            qkv_bias: true,
            proj_bias: true,
            qk_norm: false,
        }
    }

    #[test]
    fn what_is_exported_is_imported() {
        let wide = ModelConfig { ffn_hidden: 96, ..model() };
        for model in [model(), wide] {
            assert!(mismatches(text(&model).as_bytes(), &model).unwrap().is_empty());
        }
    }

    #[test]
    fn every_key_that_differs_is_named() {
        let good: Value = serde_json::from_str(&text(&model())).unwrap();
        for (key, value, said) in [
            ("n_layer", json!(3), "--set model.layers=3"),
            ("n_embd", json!(48), "--set model.hidden=48"),
            ("n_head", json!(8), "--set model.heads=8"),
            ("n_positions", json!(32), "--set model.seq_len=32"),
            ("n_ctx", json!(32), "--set model.seq_len=32"),
            ("vocab_size", json!(64), "--set model.vocab=64"),
            ("n_inner", json!(64), "--set model.ffn_hidden=64"),
            ("n_layer", json!(-2), "not a whole number"),
            ("n_layer", json!("2"), "not a whole number"),
            ("n_layer", json!(1e300), "not a whole number"),
            ("vocab_size", json!(u64::MAX), "model.vocab is 61"),
            ("activation_function", json!("relu"), "not \"gelu_new\""),
            ("activation_function", json!("gelu"), "tanh form"),
            ("layer_norm_epsilon", json!(1e-6), "--set model.norm_eps=1e-6"),
            ("layer_norm_epsilon", json!("1e-5"), "not a number"),
            ("model_type", json!("llama"), "only GPT-2"),
            ("tie_word_embeddings", json!(false), "the output is the embedding"),
            ("scale_attn_weights", json!(false), "sqrt"),
            ("scale_attn_by_inverse_layer_idx", json!(true), "layers"),
            ("reorder_and_upcast_attn", json!(true), "rounds"),
            ("add_cross_attention", json!(true), "none here"),
            ("quantization_config", json!({ "bits": "4".repeat(500) }), "codes"),
            ("auto_map", json!({ "AutoModel": "x.py" }), "not run"),
        ] {
            let mut bad = good.clone();
            bad[key] = value;
            let wrong = mismatches(bad.to_string().as_bytes(), &model()).unwrap();
            let one = wrong.iter().find(|w| w.contains(&format!("`{key}`"))).unwrap();
            assert!(one.contains(said) && one.len() < 200, "{one}");
        }
        for key in ["n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "model_type"] {
            let mut bad = good.clone();
            bad.as_object_mut().unwrap().remove(key);
            let wrong = mismatches(bad.to_string().as_bytes(), &model()).unwrap();
            assert!(wrong.iter().any(|w| w.contains(&format!("`{key}` is missing"))), "{wrong:?}");
        }
        let twice = text(&model()).replacen('{', "{\"n_layer\": 9,", 1);
        assert!(mismatches(twice.as_bytes(), &model()).unwrap_err().contains("twice"));
        for bad in ["", "[]", "{", "null", "{\"n_layer\": 1e999}", &"[".repeat(100_000)] {
            assert!(mismatches(bad.as_bytes(), &model()).is_err(), "{bad:.20}");
        }
    }
}
