//! Keys of experts in a `config.json`.

use super::INNER;
use super::classes::ModelClass;
use super::keys::Keys;
use crate::{Balance, ExpertsConfig};
use files::json::shown;
use serde_json::{Value, json};
use std::ops::RangeInclusive;

/// Allowed numbers of experts of a layer.
const COUNT: RangeInclusive<u64> = 1..=1024;
/// Allowed numbers of experts of a token.
const PER_TOKEN: RangeInclusive<u64> = 1..=32;
/// Both names of the number of experts: that of the first versions of a class, and that of other
/// classes, which version 5 may write.
const COUNTS: [&str; 2] = ["num_experts", "num_local_experts"];

/// Reads the experts of a model with `layers` layers; `None` if its class has none.
pub(super) fn experts(
    keys: &mut Keys,
    class: ModelClass,
    layers: usize,
    ffn_hidden: usize,
) -> Option<ExpertsConfig> {
    if !class.has_experts() {
        return None;
    }
    let count = count(keys, class);
    let per_token = keys.whole("num_experts_per_tok", PER_TOKEN);
    let is_known = keys.found.get("num_experts_per_tok").is_some_and(|n| *n == json!(per_token));
    if per_token > count && is_known && keys.wrong.is_empty() {
        let name = count_name(keys, class);
        keys.wrong.push(format!(
            "`num_experts_per_tok` is {per_token}, and `{name}` is {count}: a token has each expert once at most"
        ));
    }
    let normalize = match class {
        // Its class always divides the weights of a token by their sum.
        ModelClass::Mixtral => true,
        _ => keys.flag("norm_topk_prob", false),
    };
    let ffn_hidden = match class {
        ModelClass::Qwen3Moe => keys.whole("moe_intermediate_size", INNER),
        _ => ffn_hidden,
    };
    match class {
        ModelClass::Mixtral => {
            let why = "onebox adds no noise to what a router reads; write 0.0";
            keys.fixed("router_jitter_noise", &[json!(0.0), json!(0)], why);
        }
        ModelClass::Olmoe => {
            let why =
                "onebox limits no queries, keys and values; it needs a model without this key";
            keys.fixed("clip_qkv", &[Value::Null], why);
        }
        _ => {}
    }
    let dense_layers = dense_layers(keys, class, layers);
    Some(ExpertsConfig {
        count,
        per_token,
        ffn_hidden,
        normalize,
        dense_layers,
        balance: balance(keys, class),
    })
}

/// Name of the number of experts that messages use.
fn count_name(keys: &Keys, class: ModelClass) -> &'static str {
    let usual = if class == ModelClass::Mixtral { COUNTS[1] } else { COUNTS[0] };
    COUNTS.into_iter().find(|name| keys.found.contains_key(*name)).unwrap_or(usual)
}

/// Reads the number of experts of a layer under either name.
fn count(keys: &mut Keys, class: ModelClass) -> usize {
    let name = count_name(keys, class);
    let [one, other] = COUNTS.map(|name| keys.get(name));
    if let (Some(one), Some(other)) = (&one, &other)
        && one != other
    {
        let [one, other] = [one, other].map(shown);
        let [name, other_name] = COUNTS;
        keys.wrong.push(format!(
            "`{name}` is {one}, and `{other_name}` is {other}: both are the number of experts of a layer"
        ));
        return 1;
    }
    // The first name may be null.
    let name = match one {
        None if other.is_some() => COUNTS[1],
        _ => name,
    };
    keys.whole(name, COUNT)
}

/// Numbers of the layers with one MLP in the place of experts, ascending.
fn dense_layers(keys: &mut Keys, class: ModelClass, layers: usize) -> Vec<usize> {
    if class != ModelClass::Qwen3Moe {
        return Vec::new();
    }
    let step = keys.whole_or("decoder_sparse_step", 1..=10_000, Some(1));
    let listed = keys.get("mlp_only_layers");
    let number = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let found = match &listed {
        None => Some(Vec::new()),
        Some(listed) => {
            listed.as_array().and_then(|all| all.iter().map(number).collect::<Option<Vec<usize>>>())
        }
    };
    let Some(found) = found else {
        let listed = listed.as_ref().map_or_else(String::new, shown);
        keys.wrong.push(format!("`mlp_only_layers` is {listed}, not a list of numbers of layers"));
        return Vec::new();
    };
    let is_dense = |layer: &usize| found.contains(layer) || !(layer + 1).is_multiple_of(step);
    let dense: Vec<usize> = (0..layers).filter(is_dense).collect();
    if dense.len() == layers && keys.wrong.is_empty() {
        keys.wrong.push(format!(
            "`mlp_only_layers` and `decoder_sparse_step` leave none of {layers} layers with experts: such a model is a qwen3"
        ));
    }
    dense
}

/// The balance loss of the class, which counts only if the model returns the logits of its routers.
fn balance(keys: &mut Keys, class: ModelClass) -> Balance {
    let usual = if class == ModelClass::Olmoe { 0.01 } else { 0.001 };
    let counts = keys.flag("output_router_logits", false);
    let factor = keys.number("router_aux_loss_coef", 0.0, usual);
    if counts && factor > 0.0 { Balance::HuggingFace { factor } } else { Balance::Off }
}
