//! Filters of Jinja that compare values by a sorting key.

use super::arguments::{Arguments, text_or_none, truth};
use super::operators::{compare, key, sort};
use super::subscripts::item;
use super::value::{Form, List, ValueKind, ValueResult, iterated, name_of, pay};
use indexmap::IndexSet;
use minijinja::{State, Value};

/// Sorting key of a value: a text in lower case, unless `as_it_is`.
pub(super) fn sorting_key(
    state: &State<'_, '_>,
    of: &Value,
    attribute: Option<&Value>,
    as_it_is: bool,
) -> ValueResult {
    let of = part(of, attribute)?;
    match ValueKind::of(&of) {
        ValueKind::Text(text) if !as_it_is => {
            pay(state, text.len())?;
            Ok(Value::from(text.to_lowercase()))
        }
        _ => Ok(of),
    }
}

/// Part of a value at a path, or the whole value without a path.
pub(super) fn part(of: &Value, path: Option<&Value>) -> ValueResult {
    path.map_or_else(|| Ok(of.clone()), |path| by_path(of, path))
}

/// Part of a value at a path such as `a.b.0`.
pub(super) fn by_path(of: &Value, path: &Value) -> ValueResult {
    let mut found = of.clone();
    match ValueKind::of(path) {
        ValueKind::Text(path) => {
            for part in path.split('.') {
                let is_number = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
                let part = match part.parse::<i64>() {
                    Ok(number) if is_number => Value::from(number),
                    _ => Value::from(part),
                };
                found = item(&found, &part)?;
            }
        }
        _ => found = item(&found, path)?,
    }
    Ok(found)
}

pub(super) fn some(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !value.is_none())
}

pub(super) fn dictsort(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [as_it_is, by, reverse] = arguments.bind(["case_sensitive", "by", "reverse"])?;
    let ValueKind::Dict(dict) = ValueKind::of(of) else { return Err(arguments.wrong(name_of(of))) };
    let place = match text_or_none(by.as_ref())? {
        None | Some("key") => 0,
        Some("value") => 1,
        Some(other) => {
            return Err(arguments.wrong(&format!("`by` is `{other:.60}`, not `key` or `value`")));
        }
    };
    let mut pairs = Vec::new();
    for (key, field) in &dict.fields {
        let pair = [key.clone(), field.clone()];
        let by = sorting_key(state, &pair[place], None, truth(as_it_is.as_ref()))?;
        pairs.push((by, List::of(Form::Tuple, pair.to_vec())?));
    }
    List::of(Form::List, in_order(state, pairs, truth(reverse.as_ref()))?)
}

/// Sorts by the first values. As in Python, equal keys keep their order also in reverse.
pub(super) fn in_order(
    state: &State<'_, '_>,
    mut pairs: Vec<(Value, Value)>,
    reverse: bool,
) -> Result<Vec<Value>, String> {
    if reverse {
        pairs.reverse();
    }
    sort(state, &mut pairs, |(by, _)| by)?;
    if reverse {
        pairs.reverse();
    }
    Ok(pairs.into_iter().map(|(_, value)| value).collect())
}

pub(super) fn sorted(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [reverse, as_it_is, attribute] =
        arguments.bind(["reverse", "case_sensitive", "attribute"])?;
    let mut pairs = Vec::new();
    for one in iterated(state, of)? {
        let paths = paths(some(attribute.as_ref())).into_iter();
        let by = paths
            .map(|path| sorting_key(state, &one, path.as_ref(), truth(as_it_is.as_ref())))
            .collect::<Result<_, _>>()?;
        pairs.push((List::of(Form::List, by)?, one));
    }
    List::of(Form::List, in_order(state, pairs, truth(reverse.as_ref()))?)
}

/// Paths that are separated by commas.
pub(super) fn paths(attribute: Option<&Value>) -> Vec<Option<Value>> {
    match attribute.and_then(Value::as_str) {
        Some(text) => text.split(',').map(|path| Some(Value::from(path))).collect(),
        None => vec![attribute.cloned()],
    }
}

pub(super) fn extreme(
    state: &State<'_, '_>,
    of: &Value,
    arguments: &Arguments,
    largest: bool,
) -> ValueResult {
    let [as_it_is, attribute] = arguments.bind(["case_sensitive", "attribute"])?;
    let mut best: Option<(Value, Value)> = None;
    for one in iterated(state, of)? {
        let by = sorting_key(state, &one, some(attribute.as_ref()), truth(as_it_is.as_ref()))?;
        let better = match &best {
            None => true,
            Some((best, _)) => compare(state, if largest { ">" } else { "<" }, &by, best)?,
        };
        if better {
            best = Some((by, one));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, one)| one))
}

pub(super) fn unique(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [as_it_is, attribute] = arguments.bind(["case_sensitive", "attribute"])?;
    let (mut seen, mut items) = (IndexSet::new(), Vec::new());
    for one in iterated(state, of)? {
        let by = sorting_key(state, &one, some(attribute.as_ref()), truth(as_it_is.as_ref()))?;
        if seen.insert(key(&by)?) {
            items.push(one);
        }
    }
    List::of(Form::Generator, items)
}
