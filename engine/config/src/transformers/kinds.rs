//! Classes of models that onebox supports, and what it lacks for others.

use super::Refusal;
use super::classes::{ModelClass, WrapperClass};
use files::foreign_text::foreign;
use files::json::shown;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Keys of a `config.json`.
type Keys = BTreeMap<String, Value>;

/// Class of a supported model, and the class around it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) class: ModelClass,
    pub(super) wrapper: Option<WrapperClass>,
}

fn class_of(kind: &Value) -> Option<ModelClass> {
    ModelClass::ALL.into_iter().find(|class| kind == class.model_type())
}

/// Class of a model, if onebox supports it.
pub(super) fn built(keys: &Keys) -> Result<Kind, Refusal> {
    let decoders = ModelClass::ALL.map(ModelClass::model_type);
    let built = [&decoders[..], &WrapperClass::ALL.map(WrapperClass::model_type)].concat();
    let built = built.join(", ");
    let remedy = format!("use a model of {built}: see docs/models.md");
    let Some(kind) = keys.get("model_type") else {
        let why = format!("`model_type` is missing: {built} are built here");
        return Err(Refusal::because(why, super::MEND));
    };
    if let Some(class) = class_of(kind) {
        return Ok(Kind { class, wrapper: None });
    }
    let inner = match keys.get("text_config") {
        Some(Value::Object(text)) => Some(text),
        _ => None,
    };
    if let Some(wrapper) = WrapperClass::ALL.into_iter().find(|known| kind == known.model_type()) {
        return decoder_of(wrapper, inner, &remedy);
    }
    let lacks = kind.as_str().and_then(|kind| lacking(kind, keys, inner));
    let what = lacks.unwrap_or_else(|| format!("{built} are built here"));
    let inner = inner.and_then(|text| class_of(text.get("model_type")?));
    let remedy = match inner {
        Some(inner) => {
            let inner = inner.model_type();
            format!("save its text model, a {inner}, in a folder of its own, or {remedy}")
        }
        None => remedy,
    };
    Err(Refusal::because(format!("`model_type` is {}: {what}", shown(kind)), remedy))
}

/// Class of the decoder in a wrapper.
fn decoder_of(
    wrapper: WrapperClass,
    inner: Option<&Map<String, Value>>,
    remedy: &str,
) -> Result<Kind, Refusal> {
    let around = wrapper.model_type();
    let Some(inner) = inner else {
        let why = format!("`text_config` is missing: it describes the text model of a {around}");
        return Err(Refusal::because(why, super::MEND));
    };
    let decoders = wrapper.decoders();
    let kind = inner.get("model_type").filter(|kind| !kind.is_null());
    let class = match kind {
        None => decoders.first().copied(),
        Some(kind) => decoders.iter().copied().find(|class| kind == class.model_type()),
    };
    if let Some(class) = class {
        return Ok(Kind { class, wrapper: Some(wrapper) });
    }
    let keys: Keys = inner.clone().into_iter().collect();
    let shown = kind.map_or_else(String::new, shown);
    let lacks = kind.and_then(Value::as_str).and_then(|kind| lacking(kind, &keys, None));
    let what = lacks.unwrap_or_else(|| {
        let names: Vec<&str> = decoders.iter().map(|class| class.model_type()).collect();
        format!("a {around} here has a {}", names.join(" or a "))
    });
    Err(Refusal::because(format!("`model_type` in `text_config` is {shown}: {what}"), remedy))
}

/// A part of models that onebox lacks.
struct LackingPart {
    /// Description of the part.
    what: &'static str,
    /// Beginnings of the names of families with the part.
    families: &'static [&'static str],
    /// Parts of names of families with the part.
    in_name: &'static [&'static str],
    /// Keys of families with the part, if their values say that it is there.
    keys: &'static [&'static str],
}

const LACKING: [LackingPart; 7] = [
    LackingPart {
        what: "a sparse indexer of keys and values",
        families: &["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "qwen4_exp", "mistral_large4"],
        in_name: &[],
        keys: &["index_topk", "index_n_heads"],
    },
    LackingPart {
        what: "multi-head latent attention (MLA)",
        families: &[
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "mistral4",
            "kimi_k",
            "kimi_linear",
        ],
        in_name: &[],
        keys: &["kv_lora_rank"],
    },
    LackingPart {
        what: "gated delta nets (linear attention) of another class than qwen3_5, qwen3_5_moe and qwen3_next",
        families: &["olmo_hybrid", "kimi_linear"],
        in_name: &[],
        keys: &["linear_num_key_heads", "linear_conv_kernel_dim"],
    },
    LackingPart {
        what: "layers with a state in the place of attention",
        families: &[],
        in_name: &["mamba", "rwkv"],
        keys: &["state_size", "ssm_cfg", "mamba_d_state", "attention_hidden_size"],
    },
    LackingPart {
        what: "attention sinks",
        families: &["deepseek_v4", "mimo_v2_flash", "granitemoe_swa", "hy_v4"],
        in_name: &[],
        keys: &[],
    },
    LackingPart {
        what: "shared experts with a gate of another class than qwen3_5_moe and qwen3_next",
        families: &["qwen2_moe", "qwen4_exp"],
        in_name: &[],
        keys: &["shared_expert_intermediate_size"],
    },
    LackingPart { what: "an encoder", families: &[], in_name: &[], keys: &["is_encoder_decoder"] },
];

/// Signs of a mixture of experts. onebox has some of their classes.
const EXPERTS: LackingPart = LackingPart {
    what: "a mixture of experts",
    families: &["dbrx", "dots1", "hy_v3", "llama4", "minimax_m2", "solar_open"],
    in_name: &["moe"],
    keys: &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"],
};

/// Families whose parts no key of [`LACKING`] shows.
const FAMILIES: [(&str, &str); 3] = [
    (
        "gemma4",
        "a Gemma 4 has norms of values, layers with heads of other sizes, keys that are values, and factors of layers, which onebox lacks",
    ),
    ("gemma3n", "a Gemma 3n has embeddings for each layer and AltUp, which onebox lacks"),
    (
        "gemma",
        "a Gemma 1 is not built here: onebox has Gemma 2 (gemma2) and Gemma 3 (gemma3_text, gemma3)",
    ),
];

/// Sentence about what onebox lacks for a model of the class `kind`; `None` if its keys do not show
/// it. `inner` are the keys of its text model.
fn lacking(kind: &str, keys: &Keys, inner: Option<&Map<String, Value>>) -> Option<String> {
    let inner_kind = inner.and_then(|text| text.get("model_type")?.as_str()).unwrap_or_default();
    let kinds = [kind, inner_kind];
    for (family, sentence) in FAMILIES {
        let goes_on = |kind: &str| {
            // Gemma 1 has no number behind its name.
            let rest = kind.strip_prefix(family)?;
            (family != "gemma" || rest.is_empty()).then_some(())
        };
        if kinds.iter().any(|kind| goes_on(kind).is_some()) {
            return Some(sentence.to_owned());
        }
    }
    let value = |key: &str| keys.get(key).or_else(|| inner?.get(key));
    let has = |part: &&LackingPart| {
        let begins = |kind: &&str| part.families.iter().any(|family| kind.starts_with(family));
        let contains = |kind: &&str| part.in_name.iter().any(|name| kind.contains(name));
        kinds.iter().any(|kind| begins(kind) || contains(kind))
            || part.keys.iter().any(|key| value(key).is_some_and(counts))
    };
    let parts: Vec<&str> = LACKING.iter().filter(has).map(|part| part.what).collect();
    let linear = value("layer_types")
        .and_then(Value::as_array)
        .is_some_and(|types| types.iter().any(|kind| kind == "linear_attention"));
    match parts[..] {
        [] if linear => {
            return Some("it has layers of linear attention, which onebox lacks".into());
        }
        [] if has(&&EXPERTS) => {
            let known = ModelClass::ALL.into_iter().filter(|class| class.has_experts());
            let known: Vec<&str> = known.map(ModelClass::model_type).collect();
            let (what, known) = (EXPERTS.what, known.join(", "));
            return Some(format!("it has {what} of another class: onebox has those of {known}"));
        }
        [] => {}
        [one] => return Some(format!("it has {one}, which onebox lacks")),
        [ref first @ .., last] => {
            return Some(format!("it has {} and {last}, which onebox lacks", first.join(", ")));
        }
    }
    if inner.is_some() {
        let known = WrapperClass::ALL.map(WrapperClass::model_type).join(", ");
        return Some(format!("it reads more than text, and of such models onebox has {known}"));
    }
    let class = keys.get("architectures")?.get(0)?.as_str()?;
    let goes_on = ["ForCausalLM", "LMHeadModel", "Model"].iter().any(|end| class.ends_with(end));
    (!goes_on).then(|| format!("a {} is no model that goes on with a text", foreign(class)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(config: Value) -> String {
        let Value::Object(keys) = config else { panic!("an object") };
        let refusal = built(&keys.into_iter().collect()).expect_err("it should be refused");
        assert_eq!(refusal.wrong.len(), 1, "{refusal:?}");
        format!("{} ({})", refusal.wrong[0], refusal.remedy)
    }

    /// Source: the classes of transformers 5.24.
    #[test]
    fn a_family_is_refused_for_the_parts_that_onebox_lacks() {
        let experts = "it has a mixture of experts of another class: onebox has those of qwen3_moe, mixtral, olmoe, glm4_moe, gpt_oss, qwen3_5_moe_text, qwen3_next";
        for (config, message) in [
            (json!({ "model_type": "granitemoe", "num_local_experts": 32 }), experts),
            (json!({ "model_type": "new", "num_experts": 60 }), experts),
            (json!({ "model_type": "dbrx" }), experts),
            (
                json!({ "model_type": "qwen2_moe", "num_experts": 60 }),
                "it has shared experts with a gate of another class than qwen3_5_moe and qwen3_next, which onebox lacks",
            ),
            (json!({ "model_type": "new", "num_experts": 60, "n_shared_experts": 2 }), experts),
            (json!({ "model_type": "dots1", "n_routed_experts": 128 }), experts),
            (
                json!({ "model_type": "mimo_v2_flash", "num_local_experts": 32 }),
                "it has attention sinks, which onebox lacks",
            ),
            (
                json!({ "model_type": "glm4_moe_lite", "n_routed_experts": 64 }),
                "it has multi-head latent attention (MLA), which onebox lacks",
            ),
            (
                json!({ "model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": 256 }),
                "it has multi-head latent attention (MLA), which onebox lacks",
            ),
            (
                json!({ "model_type": "deepseek_v32", "kv_lora_rank": 512, "n_routed_experts": 256 }),
                "a sparse indexer of keys and values and multi-head latent attention (MLA), which",
            ),
            (json!({ "model_type": "glm_moe_dsa" }), "it has a sparse indexer"),
            (json!({ "model_type": "qwen4_exp" }), "it has a sparse indexer"),
            (json!({ "model_type": "mistral_large4" }), "it has a sparse indexer"),
            (
                json!({ "model_type": "olmo_hybrid", "linear_num_key_heads": 16 }),
                "it has gated delta nets (linear attention) of another class than qwen3_5, qwen3_5_moe and qwen3_next, which",
            ),
            (
                json!({ "model_type": "qwen3_5_moe", "text_config": { "model_type": "qwen3_5_text" } }),
                "a qwen3_5_moe here has a qwen3_5_moe_text",
            ),
            (
                json!({ "model_type": "minimax", "layer_types": ["linear_attention"] }),
                "it has layers of linear attention, which onebox lacks",
            ),
            (
                json!({ "model_type": "gemma4", "text_config": { "model_type": "gemma4_text" } }),
                "a Gemma 4 has norms of values, layers with heads of other sizes",
            ),
            (json!({ "model_type": "gemma4_text" }), "which onebox lacks"),
            (json!({ "model_type": "gemma3n" }), "embeddings for each layer"),
            (json!({ "model_type": "gemma" }), "a Gemma 1 is not built here"),
            (json!({ "model_type": "mamba2", "state_size": 128 }), "a state in the place"),
            (json!({ "model_type": "t5", "is_encoder_decoder": true }), "it has an encoder"),
            (
                json!({ "model_type": "llava", "text_config": { "model_type": "llama" } }),
                "it reads more than text, and of such models onebox has gemma3, mistral3, qwen3_5, qwen3_5_moe",
            ),
            (
                json!({ "model_type": "llava", "text_config": { "model_type": "llama" } }),
                "save its text model, a llama, in a folder of its own",
            ),
            (
                json!({ "model_type": "mistral3", "text_config": { "model_type": "mistral4", "kv_lora_rank": 256 } }),
                "`model_type` in `text_config` is \"mistral4\": it has multi-head latent attention",
            ),
            (
                json!({ "model_type": "gemma3", "text_config": { "model_type": "llama" } }),
                "a gemma3 here has a gemma3_text",
            ),
            (json!({ "model_type": "gemma3" }), "`text_config` is missing"),
            (
                json!({ "model_type": "bert", "architectures": ["BertForMaskedLM"] }),
                "no model that goes on with a text",
            ),
            (json!({ "model_type": "new" }), "gpt2, llama, mistral, ministral3, qwen2"),
            (json!({}), "`model_type` is missing"),
        ] {
            let why = refused(config.clone());
            assert!(why.contains(message), "{config}: {why}");
        }
    }
}
