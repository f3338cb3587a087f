//! Attributes, subscripts and slices of Python.

use super::methods;
use super::numbers::Number;
use super::operators::{Function, key};
use super::value::{List, Method, ValueKind, ValueResult, name_of, pay};
use minijinja::{State, Value};

/// Functions that replace attributes, subscripts and slices.
pub(super) const FUNCTIONS: [(&str, Function); 3] = [
    ("__attribute", |_, all| attribute(&all[0], &all[1])),
    ("__item", |_, all| item(&all[0], &all[1])),
    ("__slice", slice),
];

/// `of.name`: a method of Python's type has priority over a key.
pub(super) fn attribute(of: &Value, name: &Value) -> ValueResult {
    let text = name.as_str().unwrap_or_default();
    match ValueKind::of(of) {
        ValueKind::Undefined => Err(format!("`.{text:.60}` of an undefined value")),
        ValueKind::Other => of.get_attr(text).map_err(|e| e.to_string()),
        _ if methods::has(of, text) => Ok(method(of, text)),
        ValueKind::Dict(dict) => Ok(dict.fields.get(name).cloned().unwrap_or_default()),
        _ => Ok(Value::UNDEFINED),
    }
}

fn method(of: &Value, name: &str) -> Value {
    Value::from_object(Method { of: of.clone(), name: name.to_owned(), call: methods::call })
}

/// `of[name]`: a key has priority over a method of Python's type.
pub(super) fn item(of: &Value, name: &Value) -> ValueResult {
    let found = match ValueKind::of(of) {
        ValueKind::Undefined => return Err("a subscript of an undefined value".into()),
        ValueKind::Other => return of.get_item(name).map_err(|e| e.to_string()),
        ValueKind::Dict(dict) => key(name).ok().and_then(|key| dict.fields.get(&key).cloned()),
        ValueKind::List(list) if list.is_sequence() => {
            place(name, list.items.len()).and_then(|at| list.items.get(at).cloned())
        }
        ValueKind::Text(text) => {
            let at = place(name, text.chars().count());
            at.and_then(|at| text.chars().nth(at)).map(Value::from)
        }
        _ => None,
    };
    Ok(match (found, name.as_str()) {
        (Some(found), _) => found,
        (None, Some(name)) if methods::has(of, name) => method(of, name),
        _ => Value::UNDEFINED,
    })
}

/// Index of an item; a negative number counts from the end.
fn place(number: &Value, length: usize) -> Option<usize> {
    let Some(Number::Int(number)) = Number::of(number) else { return None };
    let at = if number < 0 { number + length as i128 } else { number };
    usize::try_from(at).ok().filter(|at| *at < length)
}

/// `of[start:stop:step]`.
fn slice(state: &State<'_, '_>, all: &[Value]) -> ValueResult {
    let [of, start, stop, step] = all else { return Err("a slice has three places".into()) };
    let bound = |value: &Value| match (ValueKind::of(value), Number::of(value)) {
        (ValueKind::None, _) => Some(None),
        (_, Some(Number::Int(number))) => Some(Some(number)),
        _ => None,
    };
    let (Some(start), Some(stop), Some(step)) = (bound(start), bound(stop), bound(step)) else {
        return Err("a slice from or to something that is no integer".into());
    };
    if step == Some(0) {
        return Err("a slice with the step 0".into());
    }
    let places = |length| places(length, start, stop, step.unwrap_or(1));
    match ValueKind::of(of) {
        ValueKind::Text(text) => {
            pay(state, 4 * text.len())?;
            let chars: Vec<char> = text.chars().collect();
            Ok(Value::from(places(chars.len()).into_iter().map(|at| chars[at]).collect::<String>()))
        }
        ValueKind::List(list) if list.is_sequence() => {
            pay(state, 24 * list.items.len())?;
            let items = places(list.items.len()).into_iter().map(|at| list.items[at].clone());
            List::of(list.form, items.collect())
        }
        _ => Err(format!("a slice of {}", name_of(of))),
    }
}

/// Indices of the items in a slice.
fn places(length: usize, start: Option<i128>, stop: Option<i128>, step: i128) -> Vec<usize> {
    let length = length as i128;
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |number: Option<i128>, or_else: i128| match number {
        None => or_else,
        Some(number) if number < 0 => number.saturating_add(length).clamp(low, high),
        Some(number) => number.clamp(low, high),
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    let (mut at, stop) = (bound(start, first), bound(stop, last));
    let mut places = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        places.extend(usize::try_from(at));
        at = at.saturating_add(step);
    }
    places
}
