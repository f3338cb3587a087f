//! Kinds of layers of a `config.json`.

use super::classes::ModelClass;
use super::keys::Keys;
use super::{LAYERS, TOKENS};
use crate::layer_pattern::{DELTA, FULL, UNROTATED, WINDOWED};
use files::json::shown;
use serde_json::{Value, json};

/// Default attention window in tokens, if a class has a window and its `config.json` gives no
/// number.
pub const WINDOW: usize = 4096;

/// Kinds of the layers of a model.
pub(super) struct LayerLetters {
    /// One letter for each layer.
    pub(super) letters: Vec<char>,
    /// Window of the windowed layers, in tokens.
    pub(super) window: Option<usize>,
}

/// Reads the kind of each of the `layers` layers.
pub(super) fn layer_letters(keys: &mut Keys, class: ModelClass, layers: usize) -> LayerLetters {
    let window = window(keys, class);
    let each = |kind: &dyn Fn(usize) -> char| (0..layers).map(kind).collect::<Vec<char>>();
    let every = |period: usize| {
        move |layer: usize| if (layer + 1).is_multiple_of(period) { FULL } else { WINDOWED }
    };
    let of_class = match class {
        ModelClass::Gpt2
        | ModelClass::Llama
        | ModelClass::Olmo2
        | ModelClass::Granite
        | ModelClass::SeedOss
        | ModelClass::Olmoe
        | ModelClass::Glm4Moe => vec![FULL; layers],
        ModelClass::Mistral
        | ModelClass::Ministral3
        | ModelClass::Phi3
        | ModelClass::Qwen3Moe
        | ModelClass::Mixtral => {
            vec![if window.is_some() { WINDOWED } else { FULL }; layers]
        }
        ModelClass::Qwen2 | ModelClass::Qwen3 => match window {
            Some(_) => {
                let first = keys.whole_or("max_window_layers", 0..=10_000, Some(28));
                each(&|layer| if layer >= first { WINDOWED } else { FULL })
            }
            None => {
                keys.read_keys.push("max_window_layers");
                vec![FULL; layers]
            }
        },
        ModelClass::Gemma2 | ModelClass::GptOss => each(&every(2)),
        ModelClass::Gemma3 => {
            let period = keys.whole_or("sliding_window_pattern", LAYERS, Some(6));
            each(&every(period))
        }
        ModelClass::Olmo3 => each(&every(4)),
        ModelClass::SmolLm3 => unrotated(keys, layers),
        ModelClass::Qwen35 | ModelClass::Qwen35Moe | ModelClass::Qwen3Next => {
            let period = keys.whole_or("full_attention_interval", LAYERS, Some(4));
            each(&|layer| if (layer + 1).is_multiple_of(period) { FULL } else { DELTA })
        }
    };
    let letters = named(keys, class, of_class);
    if letters.contains(&WINDOWED) && window.is_none() {
        let (key, value) = match class {
            ModelClass::Qwen2 | ModelClass::Qwen3 | ModelClass::Qwen3Moe => {
                ("use_sliding_window", "true")
            }
            _ => ("sliding_window", "a number of tokens"),
        };
        keys.wrong.push(format!("layers have sliding_attention, and `{key}` is not {value}"));
    }
    LayerLetters { letters, window }
}

/// Reads the window of windowed layers, in tokens; `None` if no layer can have one.
fn window(keys: &mut Keys, class: ModelClass) -> Option<usize> {
    let of_class = match class {
        ModelClass::Gpt2
        | ModelClass::Llama
        | ModelClass::Olmo2
        | ModelClass::Granite
        | ModelClass::SeedOss
        | ModelClass::Olmoe
        | ModelClass::Glm4Moe
        | ModelClass::Qwen35
        | ModelClass::Qwen35Moe
        | ModelClass::Qwen3Next => {
            // Their classes do not read these keys.
            keys.read_keys.extend(["max_window_layers", "sliding_window"]);
            return None;
        }
        ModelClass::SmolLm3 => {
            let why = "its layers with windows would have no rotary positions, which onebox lacks";
            keys.fixed("use_sliding_window", &[json!(false)], why);
            keys.read_keys.extend(["max_window_layers", "sliding_window"]);
            return None;
        }
        ModelClass::Qwen2 | ModelClass::Qwen3 => {
            if !keys.flag("use_sliding_window", false) {
                keys.read_keys.push("sliding_window");
                return None;
            }
            Some(WINDOW)
        }
        // All its layers have the window.
        ModelClass::Qwen3Moe => {
            keys.read_keys.push("max_window_layers");
            if !keys.flag("use_sliding_window", false) {
                keys.read_keys.push("sliding_window");
                return None;
            }
            Some(WINDOW)
        }
        ModelClass::Mistral => {
            keys.read_keys.push("max_window_layers");
            Some(WINDOW)
        }
        ModelClass::Gemma2 | ModelClass::Gemma3 | ModelClass::Olmo3 => Some(WINDOW),
        ModelClass::GptOss => Some(128),
        ModelClass::Ministral3 | ModelClass::Phi3 => None,
        ModelClass::Mixtral => {
            keys.read_keys.push("max_window_layers");
            None
        }
    };
    // Without the key a class has its window; null means no window.
    if keys.is_null("sliding_window")
        || of_class.is_none() && !keys.found.contains_key("sliding_window")
    {
        keys.read_keys.push("sliding_window");
        return None;
    }
    let window = keys.whole_or("sliding_window", TOKENS, of_class);
    // Files of Gemma 2 have the number under both names.
    if class == ModelClass::Gemma2
        && let Some(other) = keys.get("sliding_window_size").filter(|n| *n != json!(window))
    {
        let other = shown(&other);
        keys.wrong
            .push(format!("`sliding_window_size` is {other}, and `sliding_window` is {window}"));
    }
    Some(window)
}

/// Layers of a SmolLM3: those without rotary positions have a 0 in a list.
fn unrotated(keys: &mut Keys, layers: usize) -> Vec<char> {
    let every = keys.whole_or("no_rope_layer_interval", LAYERS, Some(4));
    let of_interval =
        |layer: usize| if (layer + 1).is_multiple_of(every) { UNROTATED } else { FULL };
    let Some(listed) = keys.get("no_rope_layers") else {
        return (0..layers).map(of_interval).collect();
    };
    let letter = |value: &Value| match value.as_u64() {
        Some(0) => Some(UNROTATED),
        Some(1) => Some(FULL),
        _ => None,
    };
    let letters =
        listed.as_array().and_then(|all| all.iter().map(letter).collect::<Option<Vec<char>>>());
    match letters {
        // The list of the class has at least a number for each layer.
        Some(letters) if letters.len() >= layers => letters.into_iter().take(layers).collect(),
        _ => {
            let listed = shown(&listed);
            keys.wrong.push(format!(
                "`no_rope_layers` is {listed}, not 0 or 1 for each of {layers} layers"
            ));
            vec![FULL; layers]
        }
    }
}

/// The kinds that `layer_types` names, or those of the class if the key is missing. If transformers
/// does not read the key for a class, the key must name the kinds of the class.
fn named(keys: &mut Keys, class: ModelClass, of_class: Vec<char>) -> Vec<char> {
    let Some(types) = keys.get("layer_types") else { return of_class };
    let letter = |value: &Value| match value.as_str() {
        Some("full_attention") => Some(FULL),
        Some("sliding_attention") if !class.has_delta_nets() => Some(WINDOWED),
        Some("linear_attention") if class.has_delta_nets() => Some(DELTA),
        _ => None,
    };
    let letters =
        types.as_array().and_then(|all| all.iter().map(letter).collect::<Option<Vec<char>>>());
    let shown = shown(&types);
    let Some(letters) = letters else {
        let why = match class.has_delta_nets() {
            true => "its class has full_attention and linear_attention",
            false => "onebox has full_attention and sliding_attention",
        };
        keys.wrong.push(format!("`layer_types` is {shown}: {why}"));
        return of_class;
    };
    let layers = of_class.len();
    // A wrong number of layers is already reported.
    let is_known = keys.found.get("num_hidden_layers").is_some_and(|n| *n == json!(layers));
    if letters.len() != layers {
        if is_known {
            let all = letters.len();
            keys.wrong.push(format!(
                "`layer_types` is {shown}, with {all} layers, and `num_hidden_layers` is {layers}"
            ));
        }
        return of_class;
    }
    let reads = match class {
        ModelClass::Qwen2
        | ModelClass::Qwen3
        | ModelClass::Gemma2
        | ModelClass::Gemma3
        | ModelClass::Olmo3
        | ModelClass::GptOss
        | ModelClass::Qwen35
        | ModelClass::Qwen35Moe
        | ModelClass::Qwen3Next => true,
        ModelClass::Gpt2
        | ModelClass::Llama
        | ModelClass::Mistral
        | ModelClass::Ministral3
        | ModelClass::Olmo2
        | ModelClass::SmolLm3
        | ModelClass::Phi3
        | ModelClass::Granite
        | ModelClass::SeedOss
        | ModelClass::Qwen3Moe
        | ModelClass::Mixtral
        | ModelClass::Olmoe
        | ModelClass::Glm4Moe => false,
    };
    if reads {
        let pattern = keys.found.get("sliding_window_pattern");
        if pattern.is_some_and(|pattern| !pattern.is_null()) && letters != of_class {
            keys.wrong.push(format!(
                "`layer_types` is {shown}, and `sliding_window_pattern` gives other layers"
            ));
        }
        return letters;
    }
    // Layers without rotary positions have full attention.
    let attends = |letter: &char| if *letter == WINDOWED { WINDOWED } else { FULL };
    if !of_class.iter().map(attends).eq(letters) {
        keys.wrong.push(format!(
            "`layer_types` is {shown}, and its class gives its layers other kinds: take it out"
        ));
    }
    of_class
}
