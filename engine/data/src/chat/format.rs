//! `str.format` of Python, with the formats that chat templates use.

use super::arguments::Arguments;
use super::numbers::Number;
use super::print::{text, write};
use super::strings::padded;
use super::value::{ValueKind, name_of, pay};
use minijinja::{State, Value};

/// `"{} {name}".format(..)`.
pub(super) fn braces(
    state: &State<'_, '_>,
    format: &str,
    arguments: &Arguments,
) -> Result<String, String> {
    let (mut out, mut left, mut next) = (String::new(), format, 0);
    while let Some(at) = left.find(['{', '}']) {
        out.push_str(&left[..at]);
        let rest = &left[at..];
        if let Some(after) = rest.strip_prefix("{{").or_else(|| rest.strip_prefix("}}")) {
            out.push_str(&rest[..1]);
            left = after;
            continue;
        }
        let end = rest.find('}').filter(|end| *end > 0).ok_or("format: a single brace")?;
        let field = &rest[1..end];
        if field.contains('{') {
            return Err("format: a field in a field, which onebox does not know".into());
        }
        let (field, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = field.split_once('!').unwrap_or((field, ""));
        let value = match name.parse::<usize>() {
            Ok(place) => arguments.places.get(place),
            Err(_) if name.is_empty() => {
                next += 1;
                arguments.places.get(next - 1)
            }
            Err(_) => {
                arguments.names.iter().find(|(other, _)| other == name).map(|(_, value)| value)
            }
        };
        let value = value.ok_or_else(|| format!("format: there is no argument `{name:.60}`"))?;
        let shown = match conversion {
            "" => None,
            "s" => Some(Value::from(text(state, value)?)),
            "r" => {
                let mut shown = String::new();
                write(state, value, &mut shown)?;
                Some(Value::from(shown))
            }
            other => return Err(format!("format: `!{other:.60}`, which onebox does not know")),
        };
        let part = formatted(state, shown.as_ref().unwrap_or(value), spec)?;
        pay(state, part.len())?;
        out.push_str(&part);
        left = &rest[end + 1..];
    }
    Ok(out + left)
}

/// `format(value, spec)`.
fn formatted(state: &State<'_, '_>, value: &Value, spec: &str) -> Result<String, String> {
    if spec.is_empty() {
        return text(state, value);
    }
    let unknown = || {
        let of = name_of(value);
        format!("format: `:{spec:.60}` of {of}, which onebox does not know")
    };
    let mut chars = spec.chars();
    let (first, second) = (chars.next(), chars.next());
    let is_align = |c: Option<char>| c.is_some_and(|c| "<>^".contains(c));
    let (fill, align, rest) = match (first, second) {
        (Some(fill), align) if is_align(align) => (fill, align, chars.as_str()),
        (align, _) if is_align(align) => (' ', align, &spec[1..]),
        _ => (' ', None, spec),
    };
    let zeros = align.is_none() && rest.starts_with('0');
    let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (width, rest) = rest.split_at(digits(rest));
    let (precision, kind) = match rest.strip_prefix('.') {
        Some(rest) => {
            let (digits, kind) = rest.split_at(digits(rest));
            (Some(digits.parse::<usize>().map_err(|_| unknown())?), kind)
        }
        None => (None, rest),
    };
    let width = if width.is_empty() { 0 } else { width.parse::<i128>().map_err(|_| unknown())? };
    let is_text = matches!(ValueKind::of(value), ValueKind::Text(_));
    let shown = match (ValueKind::of(value), kind, precision) {
        (ValueKind::Text(text), "" | "s", _) if !zeros => {
            text.chars().take(precision.unwrap_or(usize::MAX)).collect()
        }
        (ValueKind::Int(number), "" | "d", None) => number.to_string(),
        (ValueKind::Int(number), "x", None) if number >= 0 => format!("{number:x}"),
        (ValueKind::Int(_) | ValueKind::Float(_), "f", _) => {
            let precision = precision.unwrap_or(6);
            let number = Number::of(value).filter(|_| precision <= 100).ok_or_else(unknown)?;
            format!("{:.precision$}", number.float())
        }
        (ValueKind::Float(_), "", None) => text(state, value)?,
        _ => return Err(unknown()),
    };
    let mut bytes = [0; 4];
    let fill = &*fill.encode_utf8(&mut bytes);
    let how = match align {
        Some('<') => "ljust",
        Some('>') => "rjust",
        // The right side gets one more fill character if their number is odd.
        Some(_) => {
            let more = (width - shown.chars().count() as i128).max(0);
            let left = padded(state, &shown, "rjust", width - (more - more / 2), fill)?;
            return padded(state, &left, "ljust", width, fill);
        }
        None if zeros => return padded(state, &shown, "zfill", width, "0"),
        None if is_text => "ljust",
        None => "rjust",
    };
    padded(state, &shown, how, width, fill)
}
