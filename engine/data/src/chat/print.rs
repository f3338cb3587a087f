//! Texts of values as Python writes them: `str` and `repr`.

use super::source::code_of;
use super::value::{Form, List, Method, ValueKind, name_of, pay};
use minijinja::{State, Value};

/// `str(value)`.
pub(super) fn text(state: &State<'_, '_>, value: &Value) -> Result<String, String> {
    match ValueKind::of(value) {
        ValueKind::Text(text) => {
            pay(state, text.len())?;
            Ok(text.to_owned())
        }
        ValueKind::Undefined => Ok(String::new()),
        _ => {
            let mut out = String::new();
            write(state, value, &mut out)?;
            Ok(out)
        }
    }
}

/// `repr(value)`.
pub(super) fn write(state: &State<'_, '_>, value: &Value, out: &mut String) -> Result<(), String> {
    pay(state, 0)?;
    match ValueKind::of(value) {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool(value) => out.push_str(if value { "True" } else { "False" }),
        ValueKind::Int(number) => out.push_str(&number.to_string()),
        ValueKind::Digits(digits) => out.push_str(digits),
        ValueKind::Float(number) => out.push_str(&float(number)),
        ValueKind::Text(text) => {
            pay(state, 2 * text.len())?;
            quote(text, out);
        }
        ValueKind::List(List { form, items, .. }) => {
            let (open, close) = match form {
                Form::List => ("[", "]"),
                Form::Tuple if items.len() == 1 => ("(", ",)"),
                Form::Tuple => ("(", ")"),
                Form::View(name) => {
                    out.push_str(name);
                    ("([", "])")
                }
                Form::Generator | Form::Range => return Err(unprintable(value)),
            };
            out.push_str(open);
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                write(state, item, out)?;
            }
            out.push_str(close);
        }
        ValueKind::Dict(dict) => {
            out.push('{');
            for (i, (key, field)) in dict.fields.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                write(state, key, out)?;
                out.push_str(": ");
                write(state, field, out)?;
            }
            out.push('}');
        }
        ValueKind::Method(Method { name, .. }) => {
            return Err(format!(
                "`{name:.60}` is a method, which Python prints with its place in memory: for the key, write ['{name:.60}']"
            ));
        }
        ValueKind::Other => return Err(unprintable(value)),
    }
    Ok(())
}

fn unprintable(value: &Value) -> String {
    format!("{} is printed, which onebox does not know", name_of(value))
}

/// Shortest digits that give the same float, as Python writes them.
pub(super) fn float(number: f64) -> String {
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent @ -4..=15) => {
            let text = number.to_string();
            match exponent >= 0 && !text.contains('.') {
                true => text + ".0",
                false => text,
            }
        }
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        Err(_) => scientific,
    }
}

/// Writes a text in quotes.
fn quote(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => out.push_str(&code_of(c)),
        }
    }
    out.push(quote);
}

/// Whether Python prints the character, as `str.isprintable` says.
pub(super) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return matches!(c, ' '..='~');
    }
    // Rust leaves a combining character unescaped only after a letter.
    let mut pair = [0; 8];
    pair[0] = b'a';
    let bytes = 1 + c.encode_utf8(&mut pair[1..]).len();
    str::from_utf8(&pair[..bytes]).is_ok_and(|pair| pair.escape_debug().count() == 2)
}
