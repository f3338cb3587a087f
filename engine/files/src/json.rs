//! JSON of others: objects without duplicate keys, and values that keep the order of keys.

use super::foreign_text::{foreign, reason};
use indexmap::IndexMap;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::{Number, Value, value::RawValue};
use std::collections::BTreeMap;
use std::fmt;

/// An object without duplicate keys. Reading a duplicate key is an error.
#[derive(Debug)]
pub struct Object<T>(pub BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(BTreeMap::new()))
    }
}

/// The visitor adds the entries to itself.
impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((key, value)) = map.next_entry::<String, T>()? {
            if self.0.contains_key(&key) {
                return Err(A::Error::custom(format!("`{}` stands there twice", foreign(key))));
            }
            self.0.insert(key, value);
        }
        Ok(self)
    }
}

/// A value in the form that a message line shows: at most 60 characters of its JSON.
pub fn shown(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).unwrap_or_default();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}..", foreign(&text[..end])),
        None => foreign(text).to_string(),
    }
}

/// A value with the keys of objects in the given order, which a chat template prints.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the variants are the types of JSON")]
pub enum Json {
    Null,
    Bool(bool),
    Number(Number),
    /// An integer beyond 64 bits, in decimal digits.
    Digits(String),
    String(String),
    Array(Vec<Self>),
    Object(Map),
}

/// An object. As in Python, a duplicate key has the place of the first and the value of the last.
pub type Map = IndexMap<String, Json>;

/// An integer beyond 64 bits is written as a string, because serde has no number type for it.
impl Serialize for Json {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => to.serialize_unit(),
            Self::Bool(value) => to.serialize_bool(*value),
            Self::Number(value) => value.serialize(to),
            Self::String(value) | Self::Digits(value) => to.serialize_str(value),
            Self::Array(values) => to.collect_seq(values),
            Self::Object(fields) => to.collect_map(fields),
        }
    }
}

impl Json {
    /// The value of a key; `None` if this is no object or has no such key.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(fields) => fields.get(key),
            _ => None,
        }
    }

    /// The text of a string; `None` if this is no string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// Parses `text`.
    ///
    /// # Errors
    /// Returns the message of `serde_json` if the text is no JSON.
    pub fn read(text: &str) -> Result<Self, String> {
        // The first parse finds every error, also in a value that a later duplicate key replaces,
        // and limits the depth of values.
        let read = serde_json::from_str::<Value>(text).and_then(|_| serde_json::from_str(text));
        read.and_then(value).map_err(|e| reason(e).to_string())
    }

    /// Number of values, nested values included, and the bytes of their texts.
    pub fn size(&self) -> (usize, usize) {
        let sum = |(a, b): (usize, usize), (c, d): (usize, usize)| (a + c, b + d);
        match self {
            Self::Null | Self::Bool(_) | Self::Number(_) => (1, 0),
            Self::Digits(text) | Self::String(text) => (1, text.len()),
            Self::Array(values) => values.iter().map(Self::size).fold((1, 0), sum),
            Self::Object(fields) => {
                let field = |(key, value): (&String, &Self)| sum(value.size(), (0, key.len()));
                fields.iter().map(field).fold((1, 0), sum)
            }
        }
    }
}

/// Converts a text that `serde_json` has checked. `serde_json` itself makes a float of an integer
/// beyond 64 bits. Every array or object around a value parses the value's text once more.
fn value(raw: &RawValue) -> serde_json::Result<Json> {
    let text = raw.get();
    Ok(match text.as_bytes()[0] {
        b'{' => {
            let fields: IndexMap<String, &RawValue> = serde_json::from_str(text)?;
            let fields = fields.into_iter().map(|(key, raw)| Ok((key, value(raw)?)));
            Json::Object(fields.collect::<serde_json::Result<_>>()?)
        }
        b'[' => {
            let values: Vec<&RawValue> = serde_json::from_str(text)?;
            Json::Array(values.into_iter().map(value).collect::<serde_json::Result<_>>()?)
        }
        b'"' => Json::String(serde_json::from_str(text)?),
        b'n' => Json::Null,
        b't' | b'f' => Json::Bool(text == "true"),
        // An integer 0 of Python has no sign.
        _ if text == "-0" => Json::Number(0.into()),
        _ if text.contains(['.', 'e', 'E']) => {
            let number = text.parse().ok().and_then(Number::from_f64);
            let wrong = || Error::custom(format!("the number {text:.60} is out of range"));
            Json::Number(number.ok_or_else(wrong)?)
        }
        _ => match (text.parse::<u64>(), text.parse::<i64>()) {
            (Ok(number), _) => Json::Number(number.into()),
            (_, Ok(number)) => Json::Number(number.into()),
            _ => Json::Digits(text.to_owned()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The value of `serde_json` for `json`.
    fn shown(json: &Json) -> Value {
        match json {
            Json::Null => Value::Null,
            Json::Bool(value) => (*value).into(),
            Json::Number(number) => Value::Number(number.clone()),
            Json::Digits(text) | Json::String(text) => text.as_str().into(),
            Json::Array(values) => values.iter().map(shown).collect(),
            Json::Object(fields) => Value::Object(
                fields.iter().map(|(key, value)| (key.clone(), shown(value))).collect(),
            ),
        }
    }

    #[test]
    fn json_is_read_as_serde_json_reads_it() {
        for text in [
            "{}",
            " [ ] ",
            "[[],{},[{}]]",
            r#"{"a": {"b": [1, -2, 3.5, 1e3, 0.1E-7, true, false, null]}, "": "x", "a\"\\": "\\\" \u00e9\ud83d\ude00"}"#,
            "\t{\n\"k\" :\r[ 18446744073709551615 ,-9223372036854775808, -0.0 ]}",
            "\"a\"",
            " 12 ",
        ] {
            let read = Json::read(text).unwrap();
            assert_eq!(shown(&read), serde_json::from_str::<Value>(text).unwrap(), "{text}");
        }
        for text in
            ["", "{", "[1,]", "{'a': 1}", "[1e999]", r#"["\ud800"]"#, "[01]", "[NaN]", "1 2"]
        {
            assert!(Json::read(text).is_err(), "{text}");
        }
        // Numbers beyond every float, and values that a later duplicate key replaces.
        let digits = "1".repeat(400);
        for text in [&digits, r#"{"a": 1e999, "a": 1}"#, r#"{"a": "\ud800", "a": 1}"#] {
            assert!(Json::read(text).is_err(), "{text}");
        }
        let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        assert!(Json::read(&deep(127)).is_ok() && Json::read(&deep(100_000)).is_err());
    }

    #[test]
    fn an_integer_of_any_size_keeps_its_digits() {
        let text =
            "[123456789012345678901234567890, -99999999999999999999, -0, 18446744073709551616]";
        let digits = ["123456789012345678901234567890", "-99999999999999999999"];
        let read = shown(&Json::read(text).unwrap());
        assert_eq!(read, json!([digits[0], digits[1], 0, "18446744073709551616"]));
    }

    #[test]
    fn a_key_that_stands_twice_has_the_first_place_and_the_last_value() {
        let Json::Object(fields) = Json::read(r#"{"b": 1, "a": 2, "b": 3}"#).unwrap() else {
            panic!("it is an object")
        };
        let pairs: Vec<String> =
            fields.iter().map(|(key, value)| format!("{key}{}", shown(value))).collect();
        assert_eq!(pairs, ["b3", "a2"]);
    }
}
