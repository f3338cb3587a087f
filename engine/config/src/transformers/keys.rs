//! Reads the keys of a `config.json` one by one, and collects errors.

use super::VOCAB;
use files::json::shown;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Allowed factors of activations, and caps.
pub(super) const SCALES: RangeInclusive<f64> = 1e-6..=1e6;

/// Allowed factors of frequencies.
pub(super) const FACTORS: RangeInclusive<f64> = 0.01..=1e6;

/// Keys with the ids of special tokens.
pub const SPECIAL: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// Whether the value of one of these keys is a token of a vocabulary of `vocab` tokens, or a list
/// of tokens.
fn is_special(value: &Value, vocab: usize) -> bool {
    match value {
        Value::Array(ids) => ids.iter().all(|id| !id.is_array() && is_special(id, vocab)),
        id => id.as_u64().is_some_and(|id| id < vocab as u64),
    }
}

/// Keys of a `config.json`, and what is wrong with them.
pub(super) struct Keys {
    pub(super) found: BTreeMap<String, Value>,
    pub(super) wrong: Vec<String>,
    /// Keys that onebox has read; it refuses the others if they may matter.
    pub(super) read_keys: Vec<&'static str>,
}

/// A key with its number.
#[derive(Clone, Copy)]
pub(super) struct Number {
    pub(super) key: &'static str,
    pub(super) value: usize,
}

impl Keys {
    /// The keys of a file; none is read yet.
    pub(super) const fn of(found: BTreeMap<String, Value>) -> Self {
        Self { found, wrong: Vec::new(), read_keys: Vec::new() }
    }

    /// Whether a key is there and null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.found.get(key).is_some_and(Value::is_null)
    }

    /// Value of a key; `None` if it is missing or null.
    pub(super) fn get(&mut self, key: &'static str) -> Option<Value> {
        self.read_keys.push(key);
        self.found.get(key).filter(|value| !value.is_null()).cloned()
    }

    /// Requires that `key` is missing, null, or one of the `allowed` values.
    pub(super) fn fixed(&mut self, key: &'static str, allowed: &[Value], why: &str) {
        self.read_keys.push(key);
        let odd = |value: &&Value| !value.is_null() && !allowed.contains(value);
        if let Some(value) = self.found.get(key).filter(odd) {
            let some = allowed.iter().filter(|value| !value.is_null());
            let expected: Vec<String> = some.map(Value::to_string).collect();
            let not = match expected.is_empty() {
                true => String::new(),
                false => format!(", not {}", expected.join(" or ")),
            };
            self.wrong.push(format!("`{key}` is {}{not}: {why}", shown(value)));
        }
    }

    /// Reads a whole number; `or` if the key is missing.
    pub(super) fn whole_or(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        or: Option<usize>,
    ) -> usize {
        let why = match (self.get(key), or) {
            (None, Some(or)) => return or,
            (None, None) => "missing".into(),
            (Some(value), _) => match value.as_u64() {
                Some(n) if range.contains(&n) => return n as usize,
                Some(n) => format!("{n}, not from {} to {}", range.start(), range.end()),
                None => format!("{}, not a whole number", shown(&value)),
            },
        };
        self.wrong.push(format!("`{key}` is {why}"));
        // The error is recorded, so no caller uses this value.
        1
    }

    pub(super) fn whole(&mut self, key: &'static str, range: RangeInclusive<u64>) -> usize {
        self.whole_or(key, range, None)
    }

    /// Reads a number of at least `least`; `or` if the key is missing.
    pub(super) fn number(&mut self, key: &'static str, least: f64, or: f64) -> f32 {
        self.number_within(key, least..=1e12, or) as f32
    }

    /// Reads a number; `or` if the key is missing.
    pub(super) fn number_within(
        &mut self,
        key: &'static str,
        range: RangeInclusive<f64>,
        or: f64,
    ) -> f64 {
        let value = self.get(key);
        let number = value.as_ref().map_or(Some(or), Value::as_f64);
        match number.filter(|n| range.contains(n)) {
            Some(number) => number,
            None => {
                let value = value.as_ref().map_or_else(String::new, shown);
                let (least, most) = (range.start(), range.end());
                // A long number reads better with an exponent.
                let most = if *most >= 1e9 { format!("{most:e}") } else { most.to_string() };
                self.wrong.push(format!("`{key}` is {value}, not a number from {least} to {most}"));
                or
            }
        }
    }

    /// Reads a number above 0; `or` if the key is missing, `None` if it is null.
    pub(super) fn cap(&mut self, key: &'static str, or: Option<f64>) -> Option<f32> {
        if self.is_null(key) || or.is_none() && !self.found.contains_key(key) {
            self.read_keys.push(key);
            return None;
        }
        Some(self.number_within(key, SCALES, or.unwrap_or(1.0)) as f32)
    }

    /// Reads a list of factors of frequencies.
    pub(super) fn factors(&mut self, key: &'static str) -> Vec<f32> {
        let value = self.get(key);
        let all = value.as_ref().and_then(Value::as_array);
        let factor = |value: &Value| value.as_f64().filter(|factor| FACTORS.contains(factor));
        let all = all.and_then(|all| all.iter().map(factor).collect::<Option<Vec<f64>>>());
        if let Some(all) = all {
            return all.into_iter().map(|factor| factor as f32).collect();
        }
        self.wrong.push(match value {
            None => format!("`{key}` is missing"),
            Some(value) => {
                format!("`{key}` is {}, not a list of numbers from 0.01 to 1e6", shown(&value))
            }
        });
        Vec::new()
    }

    /// Reads the size of the vocabulary, and requires that it holds the special tokens; `or` if the
    /// key is missing.
    pub(super) fn vocab(&mut self, or: Option<usize>) -> usize {
        let vocab = self.whole_or("vocab_size", VOCAB, or);
        for key in SPECIAL {
            let odd = |value: &Value| !is_special(value, vocab);
            // An impossible size is already reported.
            if let Some(value) = self.get(key).filter(odd)
                && VOCAB.contains(&(vocab as u64))
            {
                let (value, most) = (shown(&value), vocab - 1);
                self.wrong.push(format!(
                    "`{key}` is {value}, and `vocab_size` is {vocab}: write null, or a token from 0 to {most}"
                ));
            }
        }
        vocab
    }

    /// Requires that the value of `part` divides the value of `whole`.
    pub(super) fn divides(&mut self, part: Number, whole: Number, why: &str) {
        if !whole.value.is_multiple_of(part.value) {
            self.wrong.push(format!(
                "`{}` is {}, not a multiple of `{}`, which is {}: {why}",
                whole.key, whole.value, part.key, part.value
            ));
        }
    }

    pub(super) fn flag(&mut self, key: &'static str, or: bool) -> bool {
        match self.get(key) {
            None => or,
            Some(Value::Bool(flag)) => flag,
            Some(other) => {
                self.wrong.push(format!("`{key}` is {}, not true or false", shown(&other)));
                or
            }
        }
    }
}
