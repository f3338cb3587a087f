//! Values of JSON as values of a template.

use crate::json::Json;
use minijinja::Value;

/// The value that a template gets for one of JSON.
pub(super) fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(whole), _) => Value::from(whole),
            (None, Some(whole)) => Value::from(whole),
            (None, None) => Value::from(number.as_f64()),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => values.iter().map(value).collect(),
        Json::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(key, field)| (key.as_str(), value(field))))
        }
    }
}
