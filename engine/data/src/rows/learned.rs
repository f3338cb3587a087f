//! Keys that say whether a message is a target: `weight` of OpenAI, `train` and `training` of axolotl, `loss` of ms-swift, and
//! `label` and `kto_tag` of unpaired preferences (KTO).

use super::shown;
use files::json::{Json, Map};

const KEYS: [&str; 6] = ["weight", "train", "training", "loss", "kto_tag", "label"];

/// Decision of a key about a message.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Word {
    /// Key and value, as a message to the user shows them.
    pub(super) shown: String,
    pub(super) learns: bool,
}

/// Removes [`KEYS`] from a message, and returns their decision.
///
/// # Errors
/// A value that is neither yes nor no, keys that contradict each other, and `train_detail`.
pub(super) fn of_message(fields: &mut Map) -> Result<Option<Word>, String> {
    if let Some(detail) = fields.shift_remove("train_detail")
        && detail != Json::Array(Vec::new())
    {
        return Err(
            "it has `train_detail`, and onebox learns a message whole or not at all: set `train` in its place".into(),
        );
    }
    taken(fields, &KEYS)
}

/// Removes [`KEYS`] from a row, and returns their decision. A `label` that names a class stays.
///
/// # Errors
/// A value that is neither yes nor no, and keys that contradict each other.
pub(super) fn of_row(row: &mut Map) -> Result<Option<Word>, String> {
    let is_class = row.get("label").is_some_and(|label| of_value(label).is_none());
    taken(row, if is_class { &KEYS[..KEYS.len() - 1] } else { &KEYS })
}

fn taken(fields: &mut Map, keys: &[&str]) -> Result<Option<Word>, String> {
    let mut found: Option<Word> = None;
    for key in keys {
        let Some(value) = fields.shift_remove(*key) else { continue };
        let shown = format!("`{key}` {}", shown(&value));
        let Some(learns) = of_value(&value) else {
            return Err(format!(
                "it has {shown}, and onebox learns a message whole (1 or true) or not at all (0 or false): write one of these, or \
                 remove the key"
            ));
        };
        match &found {
            Some(other) if other.learns != learns => {
                let other = &other.shown;
                return Err(format!(
                    "{other} and {shown} contradict each other: remove one of them"
                ));
            }
            _ => found = Some(Word { shown, learns }),
        }
    }
    Ok(found)
}

fn of_value(value: &Json) -> Option<bool> {
    match value {
        Json::Bool(learns) => Some(*learns),
        Json::Number(weight) if weight.as_f64() == Some(0.0) => Some(false),
        Json::Number(weight) if weight.as_f64() == Some(1.0) => Some(true),
        // A table has texts only.
        Json::String(word) => match word.trim().to_ascii_lowercase().as_str() {
            "true" | "1" | "1.0" => Some(true),
            "false" | "0" | "0.0" => Some(false),
            _ => None,
        },
        _ => None,
    }
}
