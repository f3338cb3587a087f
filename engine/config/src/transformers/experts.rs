//! Keys of experts in a `config.json`.

#[cfg(test)]
mod tests;

use super::INNER;
use super::classes::ModelClass;
use super::keys::Keys;
use crate::{Balance, ExpertsConfig, ScoreRule};
use files::json::shown;
use serde_json::{Value, json};
use std::ops::RangeInclusive;

/// Allowed numbers of experts of a layer.
const COUNT: RangeInclusive<u64> = 1..=1024;
/// Allowed numbers of experts of a token.
const PER_TOKEN: RangeInclusive<u64> = 1..=32;
/// Names of the number of experts of a layer.
#[derive(Clone, Copy)]
struct CountNames {
    /// The name of a class, which messages use.
    usual: &'static str,
    /// Both names in files: the name of the first versions of a class, and the name of other classes,
    /// which version 5 may write.
    both: [&'static str; 2],
}

impl CountNames {
    const fn of(class: ModelClass) -> Self {
        const LOCAL: &str = "num_local_experts";
        match class {
            ModelClass::Glm4Moe => {
                Self { usual: "n_routed_experts", both: ["n_routed_experts", LOCAL] }
            }
            ModelClass::Mixtral | ModelClass::GptOss => {
                Self { usual: LOCAL, both: ["num_experts", LOCAL] }
            }
            _ => Self { usual: "num_experts", both: ["num_experts", LOCAL] },
        }
    }
}

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
        ModelClass::Mixtral | ModelClass::GptOss => true,
        ModelClass::Qwen35Moe => {
            let why = "its class always divides the weights of a token by their sum";
            keys.fixed("norm_topk_prob", &[json!(true)], why);
            true
        }
        ModelClass::Glm4Moe | ModelClass::Qwen3Next => keys.flag("norm_topk_prob", true),
        _ => keys.flag("norm_topk_prob", false),
    };
    let ffn_hidden = match class {
        ModelClass::Qwen3Moe | ModelClass::Glm4Moe | ModelClass::Qwen3Next => {
            keys.whole("moe_intermediate_size", INNER)
        }
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
        ModelClass::GptOss => {
            let why = "it is another name of `num_experts_per_tok`";
            keys.fixed("experts_per_token", &[json!(per_token)], why);
        }
        _ => {}
    }
    let dense_layers = dense_layers(keys, class, layers);
    let (scoring, shared_hidden) = match class {
        ModelClass::Glm4Moe => {
            let shared = keys.whole_or("n_shared_experts", 1..=64, Some(1));
            (sigmoid(keys, count, per_token), shared * ffn_hidden)
        }
        class if class.gates_shared_expert() => {
            (ScoreRule::Softmax, keys.whole_or("shared_expert_intermediate_size", INNER, Some(512)))
        }
        _ => (ScoreRule::Softmax, 0),
    };
    Some(ExpertsConfig {
        count,
        per_token,
        ffn_hidden,
        normalize,
        scoring,
        shared_hidden,
        shared_gate: class.gates_shared_expert(),
        biases: class == ModelClass::GptOss,
        dense_layers,
        balance: balance(keys, class),
    })
}

/// Reads the scores by sigmoid of `count` experts, of which a token has `per_token`.
fn sigmoid(keys: &mut Keys, count: usize, per_token: usize) -> ScoreRule {
    let [groups, kept_groups] =
        ["n_group", "topk_group"].map(|key| keys.whole_or(key, 1..=32, Some(1)));
    let size = count / groups;
    let fits =
        groups == 1 || count.is_multiple_of(groups) && size >= 2 && kept_groups * size >= per_token;
    if !(fits && kept_groups <= groups) && keys.wrong.is_empty() {
        keys.wrong.push(format!(
            "`n_group` is {groups}, and `topk_group` is {kept_groups}: {count} experts have no such groups with {per_token} experts of a token"
        ));
    }
    let scale = keys.number_within("routed_scaling_factor", 1e-6..=1e3, 1.0) as f32;
    // Predictions of several tokens have layers of their own, which are not trained.
    keys.read_keys.extend(["num_nextn_predict_layers", "num_mtp_layers"]);
    ScoreRule::Sigmoid { groups, kept_groups, scale }
}

/// Name of the number of experts that messages use.
fn count_name(keys: &Keys, class: ModelClass) -> &'static str {
    let CountNames { usual, both } = CountNames::of(class);
    both.into_iter().find(|name| keys.found.contains_key(*name)).unwrap_or(usual)
}

/// Reads the number of experts of a layer under either name.
fn count(keys: &mut Keys, class: ModelClass) -> usize {
    let (name, CountNames { both, .. }) = (count_name(keys, class), CountNames::of(class));
    let [one, other] = both.map(|name| keys.get(name));
    if let (Some(one), Some(other)) = (&one, &other)
        && one != other
    {
        let [one, other] = [one, other].map(shown);
        let [name, other_name] = both;
        keys.wrong.push(format!(
            "`{name}` is {one}, and `{other_name}` is {other}: both are the number of experts of a layer"
        ));
        return 1;
    }
    // The first name may be null.
    let name = match one {
        None if other.is_some() => both[1],
        _ => name,
    };
    keys.whole(name, COUNT)
}

/// Numbers of the layers with one MLP in the place of experts, ascending.
fn dense_layers(keys: &mut Keys, class: ModelClass, layers: usize) -> Vec<usize> {
    match class {
        ModelClass::Qwen3Moe | ModelClass::Qwen3Next => {}
        ModelClass::Glm4Moe => {
            let first = keys.whole_or("first_k_dense_replace", 0..=10_000, Some(1));
            if first >= layers && keys.wrong.is_empty() {
                keys.wrong.push(format!(
                    "`first_k_dense_replace` is {first}: none of {layers} layers has experts"
                ));
            }
            return (0..first.min(layers)).collect();
        }
        _ => return Vec::new(),
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
        let instead = match class {
            ModelClass::Qwen3Moe => "such a model is a qwen3",
            _ => "onebox has no such model of its class",
        };
        keys.wrong.push(format!(
            "`mlp_only_layers` and `decoder_sparse_step` leave none of {layers} layers with experts: {instead}"
        ));
    }
    dense
}

/// The balance loss of the class, which counts only if the model returns the logits of its routers.
fn balance(keys: &mut Keys, class: ModelClass) -> Balance {
    if class == ModelClass::Glm4Moe {
        keys.fixed("output_router_logits", &[json!(false)], "its class has no balance loss");
        return Balance::Off;
    }
    let usual = if class == ModelClass::Olmoe { 0.01 } else { 0.001 };
    let counts = keys.flag("output_router_logits", false);
    let factor = keys.number_within("router_aux_loss_coef", 0.0..=1e3, usual) as f32;
    if counts && factor > 0.0 { Balance::HuggingFace { factor } } else { Balance::Off }
}
