//! Operators and literals of Python; an unknown operator or type is an error, never another value.

use super::numbers::{Number, arithmetic, order_of_numbers};
use super::print::text;
use super::value::{Dict, Form, List, ValueKind, ValueResult, integer, iterated, name_of, pay};
use indexmap::IndexMap;
use minijinja::{State, Value};
use std::cmp::Ordering;

pub(super) type Function = fn(&State<'_, '_>, &[Value]) -> ValueResult;

/// Functions that replace operators and literals.
pub(super) const FUNCTIONS: [(&str, Function); 12] = [
    ("__concat", concat),
    ("__sum", folded),
    ("__product", folded),
    ("__power", folded),
    ("__negative", |_, all| signed(all, true)),
    ("__positive", |_, all| signed(all, false)),
    ("__compare", compared),
    ("__list", |_, all| List::of(Form::List, all.to_vec())),
    ("__tuple", |_, all| List::of(Form::Tuple, all.to_vec())),
    ("__dict", dict),
    ("__iterated", |state, all| Ok(iterated(state, one(all)?)?.into_iter().collect())),
    ("__integer", |_, all| Ok(integer(all[0].as_str().unwrap_or_default()))),
];

fn one(all: &[Value]) -> Result<&Value, String> {
    match all {
        [one] => Ok(one),
        _ => Err(format!("{} values stand where one should", all.len())),
    }
}

fn concat(state: &State<'_, '_>, all: &[Value]) -> ValueResult {
    let mut out = String::new();
    for value in all {
        let part = text(state, value)?;
        pay(state, part.len())?;
        out.push_str(&part);
    }
    Ok(Value::from(out))
}

fn dict(_: &State<'_, '_>, all: &[Value]) -> ValueResult {
    let mut fields = IndexMap::with_capacity(all.len() / 2);
    for pair in all.chunks_exact(2) {
        fields.insert(key(&pair[0])?, pair[1].clone());
    }
    Dict::of(fields)
}

/// A value as the key of a dict.
pub(super) fn key(value: &Value) -> ValueResult {
    use ValueKind::{Bool, Float, Int, List, None, Text, Undefined};
    let is_plain = |value| {
        matches!(ValueKind::of(value), Undefined | None | Bool(_) | Int(_) | Float(_) | Text(_))
    };
    let is_key = match ValueKind::of(value) {
        // The comparison of nested tuples could be slow.
        List(list) if list.form == Form::Tuple => list.items.iter().all(is_plain),
        _ => is_plain(value),
    };
    match is_key {
        true => Ok(value.clone()),
        false => Err(format!("{} is no key of a dict", name_of(value))),
    }
}

/// Applies operators between operands, from left to right.
fn folded(state: &State<'_, '_>, all: &[Value]) -> ValueResult {
    let mut left = all[0].clone();
    for pair in all[1..].chunks_exact(2) {
        let operator = pair[0].as_str().unwrap_or_default();
        left = binary(state, operator, &left, &pair[1])?;
    }
    Ok(left)
}

fn refused(operator: &str, left: &Value, right: &Value) -> String {
    format!("`{operator}` of {} and {}", name_of(left), name_of(right))
}

pub(super) fn binary(
    state: &State<'_, '_>,
    operator: &str,
    left: &Value,
    right: &Value,
) -> ValueResult {
    if let (Some(a), Some(b)) = (Number::of(left), Number::of(right)) {
        return arithmetic(operator, a, b);
    }
    if left.is_safe() || right.is_safe() {
        return Err(format!(
            "`{operator}` of a text from `safe` or `escape`, which onebox does not know"
        ));
    }
    match (operator, ValueKind::of(left), ValueKind::of(right)) {
        ("+", ValueKind::Text(a), ValueKind::Text(b)) => {
            pay(state, a.len() + b.len())?;
            Ok(Value::from([a, b].concat()))
        }
        ("+", ValueKind::List(a), ValueKind::List(b))
            if a.form == b.form && matches!(a.form, Form::List | Form::Tuple) =>
        {
            pay(state, 24 * (a.items.len() + b.items.len()))?;
            List::of(a.form, [a.items.as_slice(), &b.items].concat())
        }
        ("*", of @ (ValueKind::Text(_) | ValueKind::List(_)), _) => {
            repeated(state, of, right)?.ok_or_else(|| refused(operator, left, right))
        }
        ("*", _, of @ (ValueKind::Text(_) | ValueKind::List(_))) => {
            repeated(state, of, left)?.ok_or_else(|| refused(operator, left, right))
        }
        _ => Err(refused(operator, left, right)),
    }
}

/// Repeats a text or a list. None: the values cannot be multiplied.
fn repeated(
    state: &State<'_, '_>,
    of: ValueKind<'_>,
    times: &Value,
) -> Result<Option<Value>, String> {
    let Some(Number::Int(times)) = Number::of(times) else { return Ok(None) };
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    match of {
        ValueKind::Text(text) => {
            pay(state, text.len().saturating_mul(times))?;
            let times = if text.is_empty() { 0 } else { times };
            Ok(Some(Value::from(text.repeat(times))))
        }
        ValueKind::List(List { form: form @ (Form::List | Form::Tuple), items, .. }) => {
            pay(state, items.len().saturating_mul(times).saturating_mul(24))?;
            let times = if items.is_empty() { 0 } else { times };
            let all = (0..times).flat_map(|_| items.iter().cloned());
            List::of(*form, all.collect()).map(Some)
        }
        _ => Ok(None),
    }
}

fn signed(all: &[Value], negative: bool) -> ValueResult {
    match (Number::of(&all[0]), ValueKind::of(&all[0])) {
        (Some(Number::Int(number)), _) if negative => {
            number.checked_neg().map(Value::from).ok_or_else(|| "`-` beyond 128 bits".into())
        }
        (Some(Number::Int(number)), _) => Ok(Value::from(number)),
        (Some(Number::Float(number)), _) => {
            Ok(Value::from(if negative { -number } else { number }))
        }
        (None, ValueKind::Digits(digits)) if negative => Ok(match digits.strip_prefix('-') {
            Some(digits) => integer(digits),
            None => integer(&format!("-{digits}")),
        }),
        _ => Err(format!("`{}` of {}", if negative { '-' } else { '+' }, name_of(&all[0]))),
    }
}

/// Whether all parts of `a < b <= c` hold.
fn compared(state: &State<'_, '_>, all: &[Value]) -> ValueResult {
    let mut left = &all[0];
    for pair in all[1..].chunks_exact(2) {
        if !compare(state, pair[0].as_str().unwrap_or_default(), left, &pair[1])? {
            return Ok(Value::from(false));
        }
        left = &pair[1];
    }
    Ok(Value::from(true))
}

/// Whether this comparison holds.
pub(super) fn compare(
    state: &State<'_, '_>,
    operator: &str,
    left: &Value,
    right: &Value,
) -> Result<bool, String> {
    let holds = match operator {
        "==" => return equal(state, left, right),
        "!=" => return Ok(!equal(state, left, right)?),
        "in" => return contains(state, right, left),
        "not in" => return Ok(!contains(state, right, left)?),
        "<" => Ordering::is_lt,
        ">" => Ordering::is_gt,
        "<=" => Ordering::is_le,
        _ => Ordering::is_ge,
    };
    Ok(order(state, operator, left, right)?.is_some_and(holds))
}

/// `left == right`.
pub(super) fn equal(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<bool, String> {
    if let (Some(a), Some(b)) = (Number::of(left), Number::of(right)) {
        return Ok(order_of_numbers(a, b) == Some(Ordering::Equal));
    }
    Ok(match (ValueKind::of(left), ValueKind::of(right)) {
        (ValueKind::Undefined, ValueKind::Undefined) | (ValueKind::None, ValueKind::None) => true,
        (ValueKind::Text(a), ValueKind::Text(b)) => {
            pay(state, if a.len() == b.len() { a.len() } else { 0 })?;
            a == b
        }
        (ValueKind::Digits(a), ValueKind::Digits(b)) => a == b,
        (ValueKind::Digits(_), ValueKind::Float(_))
        | (ValueKind::Float(_), ValueKind::Digits(_)) => {
            return Err("`==` of a float and an integer beyond 128 bits".into());
        }
        (ValueKind::List(a), ValueKind::List(b)) => {
            if a.form != b.form || a.items.len() != b.items.len() {
                return Ok(false);
            }
            pay(state, 0)?;
            for (a, b) in a.items.iter().zip(&b.items) {
                if !equal(state, a, b)? {
                    return Ok(false);
                }
            }
            true
        }
        (ValueKind::Dict(a), ValueKind::Dict(b)) => {
            if a.fields.len() != b.fields.len() {
                return Ok(false);
            }
            pay(state, 0)?;
            for (key, a) in &a.fields {
                let Some(b) = b.fields.get(key) else { return Ok(false) };
                if !equal(state, a, b)? {
                    return Ok(false);
                }
            }
            true
        }
        (ValueKind::Other | ValueKind::Method(_), _)
        | (_, ValueKind::Other | ValueKind::Method(_)) => {
            return Err(refused("==", left, right));
        }
        _ => false,
    })
}

/// Order of two values. None: one of them is NaN.
pub(super) fn order(
    state: &State<'_, '_>,
    operator: &str,
    left: &Value,
    right: &Value,
) -> Result<Option<Ordering>, String> {
    if let (Some(a), Some(b)) = (Number::of(left), Number::of(right)) {
        return Ok(order_of_numbers(a, b));
    }
    pay(state, 0)?;
    match (ValueKind::of(left), ValueKind::of(right)) {
        (ValueKind::Text(a), ValueKind::Text(b)) => {
            pay(state, a.len().min(b.len()))?;
            Ok(Some(a.cmp(b)))
        }
        (ValueKind::List(a), ValueKind::List(b))
            if a.form == b.form && matches!(a.form, Form::List | Form::Tuple) =>
        {
            for (a, b) in a.items.iter().zip(&b.items) {
                if !equal(state, a, b)? {
                    return order(state, operator, a, b);
                }
            }
            Ok(Some(a.items.len().cmp(&b.items.len())))
        }
        _ => Err(refused(operator, left, right)),
    }
}

/// `one in all`.
fn contains(state: &State<'_, '_>, all: &Value, one: &Value) -> Result<bool, String> {
    match (ValueKind::of(all), ValueKind::of(one)) {
        (ValueKind::Text(all), ValueKind::Text(one)) => {
            pay(state, all.len())?;
            Ok(all.contains(one))
        }
        (ValueKind::Dict(dict), _) => Ok(dict.fields.contains_key(&key(one)?)),
        (ValueKind::List(list), _) => {
            for item in &list.items {
                pay(state, 0)?;
                if equal(state, item, one)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (ValueKind::Undefined, _) => Ok(false),
        _ => Err(refused("in", one, all)),
    }
}

/// Sorts by a key; values with equal keys keep their order.
pub(super) fn sort<T>(
    state: &State<'_, '_>,
    all: &mut [T],
    key: impl Fn(&T) -> &Value,
) -> Result<(), String> {
    let mut wrong = None;
    pay(state, 24 * all.len())?;
    all.sort_by(|a, b| match order(state, "<", key(a), key(b)) {
        Ok(order) => order.unwrap_or(Ordering::Equal),
        Err(why) => {
            wrong.get_or_insert(why);
            Ordering::Equal
        }
    });
    wrong.map_or(Ok(()), Err)
}
