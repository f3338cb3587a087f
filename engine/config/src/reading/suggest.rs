//! Suggests the key or name that a mistyped word was meant to be.

use super::join;
use super::other_tools::{GivenValue, answer};
use super::words::ticked;

/// Key that every config has.
const OF_A_CONFIG: &str = "train.steps";

/// Names of values in other trainers, in lower case, and the values of onebox that they may mean.
const VALUE_ALIASES: [(&str, &[&str]); 20] = [
    ("adam", &["AdamW"]),
    ("adamw_hf", &["AdamW"]),
    ("adamw_torch", &["AdamW"]),
    ("adamw_torch_fused", &["AdamW"]),
    ("bfloat16", &["Bf16"]),
    ("constant_with_warmup", &["Constant"]),
    ("cosine_with_min_lr", &["Cosine"]),
    ("cpu", &["Host"]),
    ("fixed", &["Constant"]),
    ("float16", &["Fp16"]),
    ("float32", &["Fp32"]),
    ("full", &["Block"]),
    ("gpu", &["Cuda", "Device"]),
    ("gpus", &["Cuda", "Device"]),
    ("half", &["Fp16"]),
    ("inverse_sqrt", &["InverseSqrt"]),
    ("nvidia", &["Cuda"]),
    ("single", &["Fp32"]),
    ("trapezoid", &["Wsd"]),
    ("warmup_stable_decay", &["Wsd"]),
];

/// Names among `names` that the value `typed` may mean: the same name in other case, names for an
/// alias, or else the nearest names.
pub(crate) fn meant<'a>(
    typed: &str,
    names: impl IntoIterator<Item = &'a str> + Clone,
) -> Vec<&'a str> {
    let lower = typed.to_lowercase();
    let called = VALUE_ALIASES.iter().find(|(alias, _)| *alias == lower);
    let called = called.map_or(&[][..], |(_, called)| *called);
    let same = |name: &&str| name.to_lowercase() == lower;
    let found: Vec<&str> = match names.clone().into_iter().find(same) {
        Some(name) => vec![name],
        None => names.clone().into_iter().filter(|name| called.contains(name)).collect(),
    };
    if found.is_empty() { nearest(typed, names) } else { found }
}

/// Names nearest to `typed`: all names at the smallest distance, if it is small enough. Otherwise
/// names that begin with `typed`.
pub(crate) fn nearest<'a>(
    typed: &str,
    names: impl IntoIterator<Item = &'a str> + Clone,
) -> Vec<&'a str> {
    if typed.len() > 64 {
        return Vec::new();
    }
    let lower = typed.to_lowercase();
    let length = lower.chars().count();
    let allowed = 1.max(length / 3);
    let distance = |name: &str| match name.to_lowercase() {
        name if name == lower => 0,
        // The distance is at least the difference in length, and need not be computed.
        name if name.chars().count().abs_diff(length) > allowed => usize::MAX,
        name => strsim::damerau_levenshtein(&lower, &name),
    };
    let best = names.clone().into_iter().map(distance).min().unwrap_or(usize::MAX);
    if best <= allowed {
        return names.into_iter().filter(|name| distance(name) == best).collect();
    }
    let shortened = |name: &&str| lower.len() >= 3 && name.to_lowercase().starts_with(&lower);
    names.into_iter().filter(shortened).collect()
}

/// Help for the unknown key `typed` of `section` ("" at the top) with this value, given every dotted
/// key. Messages call the section `owner`.
pub(crate) fn key_help(
    section: &str,
    owner: &str,
    typed: &str,
    value: GivenValue<'_>,
    known: &[String],
) -> String {
    let here = children(section, known);
    let moved = elsewhere(typed, known);
    if moved == [typed] {
        return format!("`{typed}` belongs to no section: it is a key of the top level");
    }
    if !moved.is_empty() {
        return format!("`{typed}` exists elsewhere: {}", ticked(&moved));
    }
    // The description of a box gets no answers about a config.
    if known.iter().any(|key| key == OF_A_CONFIG)
        && let Some(answer) = answer(typed, value)
    {
        return answer;
    }
    // As a key of any section, `r` is a misspelled `lr`.
    if section == "adapter" && typed == "r" {
        return "here it is called `rank`".into();
    }
    let near = nearest(typed, here.iter().copied());
    if !near.is_empty() {
        return format!("did you mean {}?", ticked(&near));
    }
    let leaves = known.iter().filter_map(|key| key.rsplit('.').next());
    if let Some(leaf) = nearest(typed, leaves).first() {
        return format!("did you mean {}?", ticked(&elsewhere(leaf, known)));
    }
    match here.as_slice() {
        [] => format!("{owner} takes no keys: take it out"),
        here => format!("the keys here are {}", ticked(here)),
    }
}

/// Dotted keys of `section` that `typed` may misspell.
pub(crate) fn keys_meant(section: &str, typed: &str, known: &[String]) -> Vec<String> {
    let near = nearest(typed, children(section, known));
    near.into_iter().map(|key| join(section, key)).collect()
}

/// Keys directly below `section`.
fn children<'a>(section: &str, known: &'a [String]) -> Vec<&'a str> {
    let prefix = join(section, "");
    let below = known.iter().filter_map(|key| key.strip_prefix(&prefix));
    below.filter(|rest| !rest.contains('.')).collect()
}

/// Dotted keys that end with the part `leaf`.
fn elsewhere<'a>(leaf: &str, known: &'a [String]) -> Vec<&'a str> {
    known.iter().filter(|key| key.rsplit('.').next() == Some(leaf)).map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_prefers_the_exact_key_elsewhere_then_other_tools_names_then_the_nearest_here() {
        let known = ["model", "model.layers", "optimizer", "optimizer.lr", "optimizer.beta1"]
            .into_iter()
            .chain(["train.steps"]);
        let known: Vec<String> = known.map(String::from).collect();
        let help = |section: &str, typed: &str| {
            key_help(section, "here", typed, GivenValue::default(), &known)
        };
        assert!(help("", "lr").contains("`optimizer.lr`"));
        assert!(help("model", "optimizer").contains("belongs to no section"));
        assert!(help("model", "layer").contains("did you mean `layers`?"));
        assert!(help("", "layer").contains("did you mean `model.layers`?"));
        assert!(help("", "learning_rate").contains("here it is called `optimizer.lr`"));
        assert!(help("", "lora_r").contains("here it is called `adapter.rank`"));
        let of_a_box = ["gpus".to_owned()];
        let help_box = key_help("", "a box", "lora_r", GivenValue::default(), &of_a_box);
        assert!(help_box.contains("the keys here are `gpus`"));
        assert!(help("optimizer", "bet").contains("`beta1`"));
        assert!(help("optimizer", "zzz").contains("are `lr` or `beta1`"));
    }

    #[test]
    fn aliases_are_sorted() {
        assert!(VALUE_ALIASES.is_sorted());
    }

    #[test]
    fn a_value_means_what_others_call_so_before_what_is_spelled_like_it() {
        let devices = ["Cpu", "Cuda", "Sim"];
        assert_eq!(meant("Gpu", devices), ["Cuda"]);
        assert_eq!(meant("cpu", devices), ["Cpu"]);
        assert_eq!(meant("CUDA", devices), ["Cuda"]);
        assert_eq!(meant("Cdua", devices), ["Cuda"]);
        let places = ["Host", "Device", "Split"];
        assert_eq!([meant("gpu", places), meant("Cpu", places)], [["Device"], ["Host"]]);
        assert_eq!(meant("half", ["Fp16", "Bf16", "Fp32"]), ["Fp16"]);
        assert_eq!(meant("gpu", ["Auto", "Near"]), [""; 0]);
    }
}
