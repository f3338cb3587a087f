//! JSON of others: objects in which no key stands twice, and values that keep the order of keys.

use indexmap::IndexMap;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::{Number, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// An object in which no key stands twice.
#[derive(Debug)]
pub struct Object<T>(pub BTreeMap<String, T>);

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

/// A value, as far as a line shows it.
pub fn shown(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).unwrap_or_default();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

/// A value whose objects keep the order of their keys: a chat template prints it, as Python does.
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

/// An object. Of a key that stands twice, it has the first place and the last value, as a dict of Python does.
pub type Map = IndexMap<String, Json>;

/// Integers beyond 64 bits come out as texts: serde has no such number.
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
    /// The value of a key. None where this is no object, or has no such key.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(fields) => fields.get(key),
            _ => None,
        }
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The value that a text is.
    ///
    /// # Errors
    /// Where it is no JSON, as `serde_json` says it.
    pub fn read(text: &str) -> Result<Self, String> {
        // It says what is wrong, and how deep a value may be.
        serde_json::from_str::<Value>(text).map_err(|e| e.to_string())?;
        JsonReader { text, at: 0 }.value()
    }

    /// How many values it has in it, itself included, and the bytes of their texts.
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

/// Reads a text that is JSON. `serde_json` reads an integer beyond 64 bits as a float, and loses its digits.
struct JsonReader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> JsonReader<'a> {
    /// The next byte behind blanks.
    fn next(&mut self) -> u8 {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }

    fn value(&mut self) -> Result<Json, String> {
        match self.next() {
            b'{' => {
                let mut fields = Map::new();
                while self.item(b'}') {
                    let key = self.string()?;
                    self.next();
                    self.at += 1;
                    let value = self.value()?;
                    fields.insert(key, value);
                }
                Ok(Json::Object(fields))
            }
            b'[' => {
                let mut values = Vec::new();
                while self.item(b']') {
                    values.push(self.value()?);
                }
                Ok(Json::Array(values))
            }
            b'"' => self.string().map(Json::String),
            _ => self.word(),
        }
    }

    /// Steps over a bracket or a comma. False: behind the end of the list.
    fn item(&mut self, close: u8) -> bool {
        let opens = matches!(self.next(), b'{' | b'[') || self.next() == b',';
        self.at += 1;
        let ends = !opens || self.next() == close;
        self.at += usize::from(opens && ends);
        !ends
    }

    fn string(&mut self) -> Result<String, String> {
        self.next();
        let rest = &self.text[self.at..];
        let mut escaped = false;
        let end = rest.bytes().skip(1).position(|b| {
            let ends = b == b'"' && !escaped;
            escaped = b == b'\\' && !escaped;
            ends
        });
        let end = end.map_or(rest.len(), |end| end + 2);
        self.at += end;
        serde_json::from_str(&rest[..end]).map_err(|e| e.to_string())
    }

    /// A number, or a word such as `true`.
    fn word(&mut self) -> Result<Json, String> {
        let rest = &self.text[self.at..];
        let end = rest.find([',', ']', '}', ' ', '\t', '\n', '\r']).unwrap_or(rest.len());
        self.at += end;
        let word = &rest[..end];
        Ok(match word {
            "null" => Json::Null,
            "true" => Json::Bool(true),
            "false" => Json::Bool(false),
            // In Python an integer has no sign of its own where it is 0.
            "-0" => Json::Number(0.into()),
            _ if word.contains(['.', 'e', 'E']) => {
                let number = word.parse().ok().and_then(Number::from_f64);
                let wrong = || format!("the number {word:.60} is out of range");
                Json::Number(number.ok_or_else(wrong)?)
            }
            _ => match (word.parse::<u64>(), word.parse::<i64>()) {
                (Ok(number), _) => Json::Number(number.into()),
                (_, Ok(number)) => Json::Number(number.into()),
                _ => Json::Digits(word.to_owned()),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As `serde_json` shows it.
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
