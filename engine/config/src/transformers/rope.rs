//! Rotary positions of a `config.json`, in the forms of versions 4 and 5 of transformers.

use super::classes::ModelClass;
use super::keys::{FACTORS, Keys};
use super::{NO_ROPE, TOKENS};
use crate::{RopeConfig, RopeScaling, decimal};
use files::foreign_text::foreign;
use files::json::shown;
use serde_json::{Map, Value, json};

/// Facts of a model that decide its rotary positions.
#[derive(Clone, Copy)]
pub(super) struct RopeContext {
    pub(super) class: ModelClass,
    pub(super) head_dim: usize,
    /// Longest sample of the model, in tokens.
    pub(super) most: usize,
}

/// Rotary positions of layers with full attention and of windowed layers.
pub(super) struct Ropes {
    pub(super) full: RopeConfig,
    pub(super) windowed: RopeConfig,
}

/// Keys that stand outside of the object with the other keys.
#[derive(Clone)]
struct OuterKeys {
    /// Key of the object, for messages.
    name: String,
    theta: Option<Value>,
    /// Base if no key has one.
    usual_theta: f64,
    share: Option<Value>,
    original: Option<Value>,
    /// Whether the object is one of several, by kinds of layers.
    of_kind: bool,
}

/// Keys of scalings.
const SCALING: [&str; 12] = [
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
];

/// Reads both forms: `rope_parameters` of version 5, `rope_theta` and `rope_scaling` of version 4.
pub(super) fn ropes(keys: &mut Keys, context: RopeContext) -> Ropes {
    let theta = keys.get("rope_theta");
    let original = keys.get("original_max_position_embeddings");
    // The class of Phi-3 has a default, which counts before the object.
    let of_class = (context.class == ModelClass::Phi3).then(|| json!(4096));
    let (scaling, parameters) = (keys.get("rope_scaling"), keys.get("rope_parameters"));
    let mut outer = OuterKeys {
        name: "rope_scaling".into(),
        theta,
        usual_theta: match context.class {
            ModelClass::Gemma3 | ModelClass::Mixtral => 1e6,
            ModelClass::Olmo3 => 5e5,
            ModelClass::SmolLm3 => 2e6,
            ModelClass::GptOss => 1.5e5,
            _ => 1e4,
        },
        share: keys.get("partial_rotary_factor"),
        original: original.or(of_class),
        of_kind: false,
    };
    if matches!(context.class, ModelClass::Gemma3 | ModelClass::Olmo3) {
        return by_kind(keys, &outer, [scaling, parameters], context);
    }
    if let (Some(old), Some(new)) = (&scaling, &parameters)
        && SCALING.iter().any(|key| old.get(key) != new.get(key))
    {
        contradict(keys, old, new);
        return Ropes { full: NO_ROPE, windowed: NO_ROPE };
    }
    if parameters.is_some() {
        outer.name = "rope_parameters".into();
    }
    // These classes have a scaling without the key, too.
    let is_scaled = matches!(context.class, ModelClass::Ministral3 | ModelClass::GptOss);
    if is_scaled && parameters.is_none() && scaling.is_none() {
        keys.wrong.push("`rope_parameters` is missing".into());
        return Ropes { full: NO_ROPE, windowed: NO_ROPE };
    }
    let full = one(keys, parameters.or(scaling), &outer, context);
    Ropes { windowed: full.clone(), full }
}

fn contradict(keys: &mut Keys, old: &Value, new: &Value) {
    keys.wrong.push(format!(
        "`rope_scaling` is {}, and `rope_parameters` is {}: they contradict each other",
        shown(old),
        shown(new)
    ));
}

/// Rotary positions of a class with an object for each kind of layers. Version 4 has a scaling for
/// layers with full attention alone.
fn by_kind(
    keys: &mut Keys,
    outer: &OuterKeys,
    [scaling, parameters]: [Option<Value>; 2],
    context: RopeContext,
) -> Ropes {
    const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
    let local = match context.class {
        ModelClass::Gemma3 => keys.get("rope_local_base_freq"),
        _ => None,
    };
    let none = Ropes { full: NO_ROPE, windowed: NO_ROPE };
    let mut kinds = match &parameters {
        None => Map::new(),
        Some(Value::Object(kinds)) => kinds.clone(),
        Some(other) => {
            keys.wrong.push(format!("`rope_parameters` is {}, not an object", shown(other)));
            return none;
        }
    };
    if let Some(key) = kinds.keys().find(|key| !KINDS.contains(&key.as_str())) {
        keys.wrong.push(format!(
            "`rope_parameters`: `{}` is no kind of layers: its class has an object for each of {}",
            foreign(key),
            KINDS.join(" and ")
        ));
        return none;
    }
    let [full, windowed] = KINDS.map(|kind| kinds.remove(kind).filter(|value| !value.is_null()));
    if let (Some(old), Some(new)) = (&scaling, &full)
        && SCALING.iter().any(|key| old.get(key) != new.get(key))
    {
        contradict(keys, old, new);
        return none;
    }
    // Version 5 has another base of windowed layers than version 4 here.
    if context.class == ModelClass::Olmo3
        && let Some(theta) = outer.theta.as_ref().filter(|theta| theta.as_f64() != Some(5e5))
        && windowed.as_ref().is_none_or(|windowed| windowed.get("rope_theta").is_none())
    {
        keys.wrong.push(format!(
            "`rope_theta` is {}, which versions 4 and 5 of transformers read differently: write it into `rope_parameters`, for each of {}",
            shown(theta),
            KINDS.join(" and ")
        ));
    }
    let of_kind = |kind: &str| OuterKeys {
        name: format!("rope_parameters.{kind}"),
        of_kind: true,
        ..outer.clone()
    };
    let windowed_theta = match context.class {
        ModelClass::Gemma3 => (local, 1e4),
        // Its base in the object counts, and may differ from that of the other kind.
        _ => match &windowed {
            Some(own) if own.get("rope_theta").is_some() => (None, outer.usual_theta),
            _ => (outer.theta.clone(), outer.usual_theta),
        },
    };
    let of_full = match &full {
        Some(_) => of_kind(KINDS[0]),
        None => OuterKeys { of_kind: true, ..outer.clone() },
    };
    let of_windowed =
        OuterKeys { theta: windowed_theta.0, usual_theta: windowed_theta.1, ..of_kind(KINDS[1]) };
    Ropes {
        full: one(keys, full.or(scaling), &of_full, context),
        windowed: one(keys, windowed, &of_windowed, context),
    }
}

/// Reads one object.
fn one(
    keys: &mut Keys,
    object: Option<Value>,
    outer: &OuterKeys,
    context: RopeContext,
) -> RopeConfig {
    let OuterKeys { name, theta, usual_theta, share, .. } = outer;
    let inner = match object.unwrap_or_else(|| json!({})) {
        Value::Object(inner) => inner.into_iter().collect(),
        other => {
            keys.wrong.push(format!("`{name}` is {}, not an object", shown(&other)));
            return NO_ROPE;
        }
    };
    let mut inner = Keys::of(inner);
    let theta = either(keys, &mut inner, "rope_theta", OuterValue { name, value: theta.as_ref() });
    let share = either(
        keys,
        &mut inner,
        "partial_rotary_factor",
        OuterValue { name, value: share.as_ref() },
    );
    let share = rotated_share(&mut inner, share, context.class);
    if context.class == ModelClass::Ministral3 {
        // The factor of queries is 1 up to `original_max_position_embeddings`, which bounds samples.
        inner.read_keys.push("max_position_embeddings");
        if inner.get("llama_4_scaling_beta").is_none() {
            inner.wrong.push("`llama_4_scaling_beta` is missing".into());
        }
        inner.number("llama_4_scaling_beta", 0.0, 0.0);
        inner.whole("original_max_position_embeddings", TOKENS);
    }
    if matches!(context.class, ModelClass::Qwen35 | ModelClass::Qwen35Moe) {
        // The three positions of a token of text are equal, so these keys change nothing.
        inner.read_keys.extend(["mrope_section", "mrope_interleaved"]);
    }
    let rope = RopeConfig { theta: 1.0, rotated_share: share, scaling: RopeScaling::None };
    let pairs = rope.rotated_elements(context.head_dim) / 2;
    let scaling = rope_scaling(&mut inner, outer, context, pairs);
    let known = |key: &String| inner.read_keys.contains(&key.as_str());
    let strange: Vec<String> = inner.found.keys().filter(|key| !known(key)).cloned().collect();
    inner.wrong.extend(
        strange.iter().map(|key| format!("`{}` is nothing that onebox computes", foreign(key))),
    );
    keys.wrong.extend(inner.wrong.iter().map(|wrong| format!("`{name}`: {wrong}")));
    let theta = theta.unwrap_or_else(|| json!(usual_theta));
    match theta.as_f64().filter(|theta| (1.0..=1e12).contains(theta)) {
        Some(theta) => RopeConfig { theta: theta as f32, scaling, ..rope },
        None => {
            let theta = shown(&theta);
            keys.wrong.push(format!("`rope_theta` is {theta}, not a number from 1 to 1e12"));
            NO_ROPE
        }
    }
}

/// Value of a key that may stand in the object `outer.name`, outside of it, or in both with the same
/// number.
fn either(
    keys: &mut Keys,
    inner: &mut Keys,
    key: &'static str,
    outer: OuterValue<'_>,
) -> Option<Value> {
    let own = inner.get(key);
    if let (Some(own), Some(outside)) = (&own, outer.value)
        && own.as_f64() != outside.as_f64()
    {
        let (own, outside, name) = (shown(own), shown(outside), outer.name);
        keys.wrong.push(format!("`{key}` is {outside}, and in `{name}` {own}"));
    }
    own.or_else(|| outer.value.cloned())
}

/// Value of a key outside of an object.
#[derive(Clone, Copy)]
struct OuterValue<'a> {
    /// Name of the object.
    name: &'a str,
    value: Option<&'a Value>,
}

/// Share of a head's elements that are rotated.
fn rotated_share(inner: &mut Keys, share: Option<Value>, class: ModelClass) -> f32 {
    let Some(value) = share else { return usual_share(class) };
    let number = value.as_f64().unwrap_or(f64::NAN);
    let is_partial = matches!(class, ModelClass::Phi3 | ModelClass::Glm4Moe);
    if !is_partial && !class.has_delta_nets() {
        if number != 1.0 {
            let value = shown(&value);
            inner.wrong.push(format!(
                "`partial_rotary_factor` is {value}, not 1.0: whole heads are rotated in its class"
            ));
        }
        return 1.0;
    }
    if number > 0.0 && number <= 1.0 {
        return number as f32;
    }
    let value = shown(&value);
    inner.wrong.push(format!("`partial_rotary_factor` is {value}, not a number above 0, up to 1"));
    1.0
}

/// Share of a head's elements that are rotated, if no key gives it.
const fn usual_share(class: ModelClass) -> f32 {
    match class {
        ModelClass::Glm4Moe => 0.5,
        class if class.has_delta_nets() => 0.25,
        _ => 1.0,
    }
}

/// Number of tokens of a sample in the first part of pretraining, before contexts became longer.
fn original(inner: &mut Keys, outer: &OuterKeys, context: RopeContext) -> usize {
    let key = "original_max_position_embeddings";
    let or = match &outer.original {
        Some(outer) => {
            let own = inner.found.get(key).filter(|own| !own.is_null() && *own != outer);
            if let Some(own) = own {
                let (own, outer) = (shown(own), shown(outer));
                inner.wrong.push(format!("`{key}` is {own}, and outside of it {outer}"));
            }
            let number = outer.as_u64().filter(|number| TOKENS.contains(number));
            if number.is_none() {
                inner.wrong.push(format!("`{key}` is {}, not a number of tokens", shown(outer)));
            }
            number.map_or(1, |number| number as usize)
        }
        None => context.most,
    };
    inner.whole_or(key, TOKENS, Some(or))
}

/// The factor of a scaling. If the key is null, it is the longest sample divided by `original`.
fn ratio(inner: &mut Keys, context: RopeContext, original: usize) -> f32 {
    if inner.is_null("factor") {
        inner.read_keys.push("factor");
        return context.most as f32 / original as f32;
    }
    factor(inner, "factor")
}

fn factor(inner: &mut Keys, key: &'static str) -> f32 {
    if !inner.found.contains_key(key) {
        inner.wrong.push(format!("`{key}` is missing"));
    }
    inner.number_within(key, FACTORS, 1.0) as f32
}

/// The factor `given`; `None` if it equals `usual`, which onebox uses without a factor.
fn attention_factor(given: Option<f32>, usual: f64) -> Option<f32> {
    given.filter(|given| *given != usual as f32)
}

/// YaRN's factor on cosines and sines, if no key gives it.
fn yarn_factor(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

fn rope_scaling(
    inner: &mut Keys,
    outer: &OuterKeys,
    context: RopeContext,
    pairs: usize,
) -> RopeScaling {
    let (old, new) = (inner.get("type"), inner.get("rope_type"));
    if let (Some(old), Some(new)) = (&old, &new)
        && old != new
    {
        let (old, new) = (shown(old), shown(new));
        inner.wrong.push(format!("`type` is {old}, and `rope_type` is {new}"));
    }
    let kind = new.or(old).unwrap_or_else(|| json!("default"));
    let kind = match kind.as_str() {
        // Older files of its class have these names.
        Some("su" | "yarn") if context.class == ModelClass::Phi3 => Some("longrope"),
        kind => kind,
    };
    match kind {
        Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor(inner, "factor") },
        Some("llama3") => {
            let original_seq_len = match &outer.original {
                Some(_) => original(inner, outer, context),
                None => inner.whole("original_max_position_embeddings", TOKENS),
            };
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
        Some("yarn") => yarn(inner, outer, context),
        Some("longrope") => long_rope(inner, outer, context, pairs),
        other => {
            let other =
                other.map_or_else(|| "no name".to_owned(), |name| format!("\"{}\"", foreign(name)));
            let why = "default, linear, llama3, yarn and longrope are built here";
            inner.wrong.push(format!("`rope_type` is {other}: {why}"));
            // Errors about further keys of an unknown type would be noise.
            inner.found.clear();
            RopeScaling::None
        }
    }
}

fn yarn(inner: &mut Keys, outer: &OuterKeys, context: RopeContext) -> RopeScaling {
    let original_seq_len = original(inner, outer, context);
    let factor = ratio(inner, context, original_seq_len);
    let beta_fast = inner.number_within("beta_fast", FACTORS, 32.0) as f32;
    let beta_slow = inner.number_within("beta_slow", FACTORS, 1.0) as f32;
    if beta_slow >= beta_fast && inner.wrong.is_empty() {
        inner.wrong.push(format!(
            "`beta_slow` is {beta_slow}, and `beta_fast` is {beta_fast}: the first must be smaller"
        ));
    }
    let truncate = inner.flag("truncate", true);
    if outer.of_kind && !truncate {
        inner.wrong.push("`truncate` is false, which its class does not read here".into());
    }
    let scales = ["mscale", "mscale_all_dim"].map(|key| inner.number_within(key, 0.0..=1e6, 0.0));
    let given = inner.cap("attention_factor", None);
    let (wide, exact) = (f64::from(factor), decimal(factor));
    let of_scales = || {
        let [scale, of_all] = scales.map(|scale| yarn_factor(wide, scale));
        (scales[0] != 0.0 && scales[1] != 0.0).then_some((scale / of_all) as f32)
    };
    RopeScaling::Yarn {
        factor,
        original_seq_len,
        beta_fast,
        beta_slow,
        truncate,
        attention_factor: attention_factor(given.or_else(of_scales), yarn_factor(exact, 1.0)),
    }
}

fn long_rope(
    inner: &mut Keys,
    outer: &OuterKeys,
    context: RopeContext,
    pairs: usize,
) -> RopeScaling {
    let original_seq_len = original(inner, outer, context);
    if original_seq_len < 2 && inner.wrong.is_empty() {
        // The factor of cosines has its logarithm as a divisor.
        inner.wrong.push("`original_max_position_embeddings` is 1, not at least 2".into());
    }
    let factor = match inner.found.contains_key("factor") {
        true => ratio(inner, context, original_seq_len),
        false => context.most as f32 / original_seq_len as f32,
    };
    let [short_factors, long_factors] = ["short_factor", "long_factor"].map(|key| {
        let factors = inner.factors(key);
        if !factors.is_empty() && factors.len() != pairs {
            inner.wrong.push(format!(
                "`{key}` has {} numbers, and a head has {pairs} pairs of rotated elements",
                factors.len()
            ));
        }
        factors
    });
    let given = inner.cap("attention_factor", None);
    let usual = long_rope_factor(decimal(factor), original_seq_len);
    RopeScaling::LongRope {
        factor,
        original_seq_len,
        short_factors,
        long_factors,
        attention_factor: attention_factor(given, usual),
    }
}

/// LongRoPE's factor on cosines and sines, if no key gives it.
fn long_rope_factor(factor: f64, original: usize) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() }
}

/// Length of the samples in tokens up to which a Ministral 3 does not scale its queries; `None` if
/// it never does.
pub(super) fn unscaled_queries(keys: &Keys) -> Option<usize> {
    let object = ["rope_parameters", "rope_scaling"]
        .into_iter()
        .find_map(|key| keys.found.get(key).filter(|value| value.is_object()))?;
    let scales = object.get("llama_4_scaling_beta")?.as_f64()? != 0.0;
    let original = object.get("original_max_position_embeddings")?.as_u64()?;
    scales.then(|| usize::try_from(original).ok()).flatten()
}
