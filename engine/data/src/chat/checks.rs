//! Tests of Jinja: `value is name`.

use super::arguments::Arguments;
use super::numbers::Number;
use super::operators::compare;
use super::print::text;
use super::value::{Form, ValueKind, name_of};
use minijinja::{State, Value};

/// A test of a value.
pub(super) type Test = fn(&State<'_, '_>, &Value, &Arguments) -> Result<bool, String>;

/// All tests by name.
pub(super) const TESTS: [(&str, Test); 35] = [
    ("boolean", |_, of, a| plain(a, matches!(ValueKind::of(of), ValueKind::Bool(_)))),
    ("callable", |_, of, a| {
        plain(a, matches!(ValueKind::of(of), ValueKind::Method(_) | ValueKind::Other))
    }),
    ("defined", |_, of, a| plain(a, !of.is_undefined())),
    ("divisibleby", |_, of, a| remainder(of, a)),
    ("eq", |state, of, a| compared(state, of, a, "==")),
    ("equalto", |state, of, a| compared(state, of, a, "==")),
    ("escaped", |_, of, a| plain(a, of.is_safe())),
    ("even", |_, of, a| parity(of, a, 0)),
    ("false", |_, of, a| plain(a, matches!(ValueKind::of(of), ValueKind::Bool(false)))),
    ("float", |_, of, a| plain(a, matches!(ValueKind::of(of), ValueKind::Float(_)))),
    ("ge", |state, of, a| compared(state, of, a, ">=")),
    ("greaterthan", |state, of, a| compared(state, of, a, ">")),
    ("gt", |state, of, a| compared(state, of, a, ">")),
    ("in", |state, of, a| compared(state, of, a, "in")),
    ("integer", |_, of, a| {
        plain(a, matches!(ValueKind::of(of), ValueKind::Int(_) | ValueKind::Digits(_)))
    }),
    ("iterable", |_, of, a| plain(a, is_iterable(of))),
    ("le", |state, of, a| compared(state, of, a, "<=")),
    ("lessthan", |state, of, a| compared(state, of, a, "<")),
    ("lower", |state, of, a| plain(a, is_cased(&text(state, of)?, char::is_uppercase))),
    ("lt", |state, of, a| compared(state, of, a, "<")),
    ("mapping", |_, of, a| plain(a, matches!(ValueKind::of(of), ValueKind::Dict(_)))),
    ("ne", |state, of, a| compared(state, of, a, "!=")),
    ("none", |_, of, a| plain(a, of.is_none())),
    ("number", |_, of, a| plain(a, is_number(of))),
    ("odd", |_, of, a| parity(of, a, 1)),
    ("sameas", |_, of, a| same(of, a)),
    ("sequence", |_, of, a| plain(a, is_sequence(of))),
    ("string", |_, of, a| plain(a, matches!(ValueKind::of(of), ValueKind::Text(_)))),
    ("test", |_, of, a| plain(a, of.as_str().is_some_and(|name| named(name).is_some()))),
    ("true", |_, of, a| plain(a, matches!(ValueKind::of(of), ValueKind::Bool(true)))),
    ("undefined", |_, of, a| plain(a, of.is_undefined())),
    ("upper", |state, of, a| plain(a, is_cased(&text(state, of)?, char::is_lowercase))),
    ("==", |state, of, a| compared(state, of, a, "==")),
    ("!=", |state, of, a| compared(state, of, a, "!=")),
    (">", |state, of, a| compared(state, of, a, ">")),
];

pub(super) fn named(name: &str) -> Option<Test> {
    TESTS.iter().find(|(other, _)| *other == name).map(|(_, test)| *test)
}

fn plain(arguments: &Arguments, holds: bool) -> Result<bool, String> {
    arguments.bind([])?;
    Ok(holds)
}

fn is_number(of: &Value) -> bool {
    matches!(
        ValueKind::of(of),
        ValueKind::Bool(_) | ValueKind::Int(_) | ValueKind::Digits(_) | ValueKind::Float(_)
    )
}

fn is_iterable(of: &Value) -> bool {
    match ValueKind::of(of) {
        ValueKind::Undefined | ValueKind::Text(_) | ValueKind::List(_) | ValueKind::Dict(_) => true,
        ValueKind::Other => of.try_iter().is_ok(),
        _ => false,
    }
}

fn is_sequence(of: &Value) -> bool {
    match ValueKind::of(of) {
        ValueKind::Undefined | ValueKind::Text(_) | ValueKind::Dict(_) => true,
        ValueKind::List(list) => matches!(list.form, Form::List | Form::Tuple | Form::Range),
        _ => false,
    }
}

/// Whether a text has letters, but no letter of the other case.
fn is_cased(text: &str, other: fn(char) -> bool) -> bool {
    text.chars().any(|c| c.is_lowercase() || c.is_uppercase()) && !text.chars().any(other)
}

fn one(arguments: &Arguments) -> Result<Value, String> {
    let [other] = arguments.bind(["other"])?;
    other.ok_or_else(|| arguments.wrong("nothing to compare with"))
}

fn compared(
    state: &State<'_, '_>,
    of: &Value,
    arguments: &Arguments,
    operator: &str,
) -> Result<bool, String> {
    compare(state, operator, of, &one(arguments)?)
}

fn rest(of: &Value, by: i128, arguments: &Arguments) -> Result<i128, String> {
    match Number::of(of) {
        Some(Number::Int(number)) if by != 0 => {
            number.checked_rem_euclid(by).ok_or_else(|| arguments.wrong("too large"))
        }
        _ => Err(arguments.wrong(&format!("{} by {by}", name_of(of)))),
    }
}

fn parity(of: &Value, arguments: &Arguments, wanted: i128) -> Result<bool, String> {
    plain(arguments, rest(of, 2, arguments)? == wanted)
}

fn remainder(of: &Value, arguments: &Arguments) -> Result<bool, String> {
    match Number::of(&one(arguments)?) {
        Some(Number::Int(by)) => Ok(rest(of, by, arguments)? == 0),
        _ => Err(arguments.wrong("not by an integer")),
    }
}

/// `is` of Python for true, false and None. Two other values are refused.
fn same(of: &Value, arguments: &Arguments) -> Result<bool, String> {
    let other = one(arguments)?;
    let single = |value: &Value| match ValueKind::of(value) {
        ValueKind::None => Some(0),
        ValueKind::Bool(value) => Some(1 + u8::from(value)),
        _ => None,
    };
    match (single(of), single(&other)) {
        (None, None) => Err(arguments.wrong(&format!(
            "{} and {}: only true, false and none are known",
            name_of(of),
            name_of(&other)
        ))),
        (a, b) => Ok(a == b),
    }
}
