//! Names and types of the fields of JSON documents, without their values.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Count of each type at each path, over all documents: `a.b` is a field, `a[]` an element.
#[derive(Default)]
pub(super) struct Fields(BTreeMap<String, BTreeMap<&'static str, usize>>);

impl Fields {
    /// Adds one document, or several documents, one per line.
    pub(super) fn add(&mut self, text: &str) {
        for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
            self.value("", &value.unwrap_or_else(|e| panic!("{e}: {text}")));
        }
    }

    pub(super) fn value(&mut self, path: &str, value: &Value) {
        let name = match value {
            Value::Null => "null",
            Value::Bool(_) => "bool",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "list",
            Value::Object(_) => "object",
        };
        *self.0.entry(path.to_owned()).or_default().entry(name).or_default() += 1;
        match value {
            Value::Array(all) => all.iter().for_each(|one| self.value(&format!("{path}[]"), one)),
            Value::Object(all) => {
                for (key, value) in all {
                    let dot = if path.is_empty() { "" } else { "." };
                    self.value(&format!("{path}{dot}{key}"), value);
                }
            }
            _ => {}
        }
    }

    /// Lines `path: type or type`.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (path, types) in self.0.iter().filter(|(path, _)| !path.is_empty()) {
            let mut names: Vec<&str> = types.keys().copied().collect();
            let holder = path.rsplit_once('.').map_or("", |(holder, _)| holder);
            let objects = self.0.get(holder).and_then(|types| types.get("object"));
            let is_field = !path.ends_with("[]");
            if is_field && objects.is_some_and(|objects| *objects > types.values().sum()) {
                names.push("absent");
            }
            let _ = writeln!(text, "{path}: {}", names.join(" or "));
        }
        text
    }
}
