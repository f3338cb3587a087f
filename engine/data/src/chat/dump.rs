//! `json.dumps` of Python.

use super::operators::sort;
use super::print::float;
use super::value::{Form, List, ValueKind, name_of, pay};
use minijinja::{State, Value};

/// The options of `json.dumps`.
#[derive(Debug)]
pub(super) struct Dump {
    pub(super) ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) between: String,
    pub(super) behind_key: String,
    pub(super) sorted: bool,
}

/// Writes `json.dumps(value)` to `out`; `level` containers are open around it.
pub(super) fn json(
    state: &State<'_, '_>,
    value: &Value,
    dump: &Dump,
    level: usize,
    out: &mut String,
) -> Result<(), String> {
    pay(state, 0)?;
    let line = |level: usize, out: &mut String| -> Result<(), String> {
        if let Some(indent) = &dump.indent {
            pay(state, indent.len() * level)?;
            out.push('\n');
            out.push_str(&indent.repeat(level));
        }
        Ok(())
    };
    match ValueKind::of(value) {
        ValueKind::Text(text) => {
            pay(state, 2 * text.len())?;
            json_text(text, dump.ascii, out);
        }
        ValueKind::List(List { form: Form::List | Form::Tuple, items, .. }) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { &dump.between });
                line(level + 1, out)?;
                json(state, item, dump, level + 1, out)?;
            }
            if !items.is_empty() {
                line(level, out)?;
            }
            out.push(']');
        }
        ValueKind::Dict(dict) => {
            let mut fields: Vec<(&Value, &Value)> = dict.fields.iter().collect();
            if dump.sorted {
                sort(state, &mut fields, |(key, _)| key)?;
            }
            out.push('{');
            for (i, (key, field)) in fields.into_iter().enumerate() {
                out.push_str(if i == 0 { "" } else { &dump.between });
                line(level + 1, out)?;
                json_text(&json_key(key)?, dump.ascii, out);
                out.push_str(&dump.behind_key);
                json(state, field, dump, level + 1, out)?;
            }
            if !dict.fields.is_empty() {
                line(level, out)?;
            }
            out.push('}');
        }
        kind => {
            let word = word(kind);
            out.push_str(&word.ok_or_else(|| format!("tojson: {} is no JSON", name_of(value)))?);
        }
    }
    Ok(())
}

/// Text of a value that is a word or a number in JSON.
fn word(value: ValueKind<'_>) -> Option<String> {
    Some(match value {
        ValueKind::None => "null".into(),
        ValueKind::Bool(value) => value.to_string(),
        ValueKind::Int(number) => number.to_string(),
        ValueKind::Digits(digits) => digits.to_owned(),
        ValueKind::Float(number) => match float(number).as_str() {
            "nan" => "NaN".into(),
            "inf" => "Infinity".into(),
            "-inf" => "-Infinity".into(),
            text => text.into(),
        },
        _ => return None,
    })
}

fn json_key(key: &Value) -> Result<String, String> {
    match ValueKind::of(key) {
        ValueKind::Text(text) => Ok(text.to_owned()),
        kind => word(kind).ok_or_else(|| format!("tojson: {} is no key of JSON", name_of(key))),
    }
}

fn json_text(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ascii && !matches!(c, ' '..='~')) => {
                for half in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{half:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
