//! Methods of Python's texts, lists and dicts.

use super::arguments::{Arguments, whole};
use super::operators::{equal, key};
use super::strings;
use super::value::{Dict, Form, List, ValueKind, ValueResult, iterated, name_of, pay};
use indexmap::IndexMap;
use minijinja::{State, Value};

/// Methods of `str`.
const OF_TEXTS: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
/// Methods of `dict` that change no value; [`OF_LISTS`] has the methods of `list` and `tuple`.
const OF_DICTS: [&str; 6] = ["copy", "fromkeys", "get", "items", "keys", "values"];
const OF_LISTS: [&str; 3] = ["copy", "count", "index"];
/// Methods that change a list or a dict; transformers refuses them.
const CHANGES: [&str; 13] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "add",
    "discard",
];

/// Whether a value has a method of this name.
pub(super) fn has(of: &Value, name: &str) -> bool {
    match ValueKind::of(of) {
        ValueKind::Text(_) => OF_TEXTS.contains(&name),
        ValueKind::Dict(_) => OF_DICTS.contains(&name),
        ValueKind::List(list) => match list.form {
            Form::List => OF_LISTS.contains(&name),
            Form::Tuple | Form::Range => OF_LISTS[1..].contains(&name),
            Form::View(_) | Form::Generator => false,
        },
        ValueKind::Int(_) | ValueKind::Bool(_) => {
            ["bit_length", "bit_count", "as_integer_ratio", "conjugate", "is_integer"]
                .contains(&name)
        }
        ValueKind::Float(_) => {
            ["as_integer_ratio", "conjugate", "hex", "is_integer"].contains(&name)
        }
        _ => false,
    }
}

/// `of.name(..)`.
pub(super) fn call(
    state: &mut State<'_, '_>,
    of: &Value,
    name: &str,
    arguments: &[Value],
) -> ValueResult {
    match ValueKind::of(of) {
        ValueKind::Undefined => return Err(format!("`.{name:.60}()` of an undefined value")),
        ValueKind::Other => {
            return of.call_method(state, name, arguments).map_err(|e| e.to_string());
        }
        _ if has(of, name) => {}
        ValueKind::Dict(dict) if !CHANGES.contains(&name) => {
            return match dict.fields.get(&Value::from(name)) {
                Some(field) => {
                    Err(format!("`{name:.60}` is {}, which is no method", name_of(field)))
                }
                None => Err(format!("a dict has no method `{name:.60}`")),
            };
        }
        _ if CHANGES.contains(&name) => {
            return Err(format!("`{name}` changes {}, which transformers refuses", name_of(of)));
        }
        _ => return Err(format!("{} has no method `{name:.60}`", name_of(of))),
    }
    let bound = Arguments::of(name, arguments)?;
    if let Some((argument, _)) = bound.names.first()
        && !["split", "rsplit", "splitlines", "format"].contains(&name)
    {
        return Err(bound.wrong(&format!("`{argument:.60}` has no name in Python")));
    }
    let found = match ValueKind::of(of) {
        ValueKind::Text(text) if name == "format" => {
            Some(Value::from(super::format::braces(state, text, &bound)?))
        }
        ValueKind::Text(text) => strings::method(state, text, name, &bound)?,
        ValueKind::Dict(dict) => of_dict(state, dict, name, &bound)?,
        ValueKind::List(list) => of_list(state, list, name, &bound)?,
        _ => None,
    };
    found.ok_or_else(|| format!("`{name}` of {}, which onebox does not know", name_of(of)))
}

fn of_dict(
    state: &State<'_, '_>,
    dict: &Dict,
    name: &str,
    arguments: &Arguments,
) -> Result<Option<Value>, String> {
    pay(state, 24 * dict.fields.len())?;
    if name == "get" {
        let [of, or_else] = arguments.bind(["key", "default"])?;
        let of = of.ok_or_else(|| arguments.wrong("no key"))?;
        let found = dict.fields.get(&key(&of)?).cloned();
        return Ok(found.or(or_else).or_else(|| Some(Value::from(()))));
    }
    arguments.bind([])?;
    let view = |name, items: Vec<Value>| List::of(Form::View(name), items).map(Some);
    match name {
        "items" => view("dict_items", dict.pairs()?),
        "keys" => view("dict_keys", dict.fields.keys().cloned().collect()),
        "values" => view("dict_values", dict.fields.values().cloned().collect()),
        "copy" => Dict::of(dict.fields.clone()).map(Some),
        _ => Ok(None),
    }
}

fn of_list(
    state: &State<'_, '_>,
    list: &List,
    name: &str,
    arguments: &Arguments,
) -> Result<Option<Value>, String> {
    if name == "copy" {
        arguments.bind([])?;
        return List::of(list.form, list.items.clone()).map(Some);
    }
    let [of] = arguments.bind(["value"])?;
    let of = of.ok_or_else(|| arguments.wrong("no value"))?;
    let mut many = 0_usize;
    for (at, item) in list.items.iter().enumerate() {
        if equal(state, item, &of)? {
            if name == "index" {
                return Ok(Some(Value::from(at)));
            }
            many += 1;
        }
    }
    match name {
        "count" => Ok(Some(Value::from(many))),
        _ => Err(arguments.wrong("the value is not in the list")),
    }
}

/// `dict(..)`.
pub(super) fn dict(state: &State<'_, '_>, arguments: &Arguments) -> ValueResult {
    let mut fields = IndexMap::new();
    match &arguments.places[..] {
        [] => {}
        [from] => match ValueKind::of(from) {
            ValueKind::Dict(dict) => fields = dict.fields.clone(),
            _ => {
                for pair in iterated(state, from)? {
                    match &iterated(state, &pair)?[..] {
                        [of, field] => fields.insert(key(of)?, field.clone()),
                        _ => return Err("dict: an item is no pair".into()),
                    };
                }
            }
        },
        _ => return Err(arguments.wrong("more than one argument")),
    }
    for (name, value) in &arguments.names {
        fields.insert(Value::from(name.as_str()), value.clone());
    }
    Dict::of(fields)
}

/// `range(..)`, with the same limit of numbers as in transformers.
pub(super) fn range(state: &State<'_, '_>, arguments: &Arguments) -> ValueResult {
    const MOST: u128 = 100_000;
    let [first, second, step] = arguments.bind(["start", "stop", "step"])?;
    let step = whole(step.as_ref(), 1)?;
    let (start, stop) = match second {
        Some(stop) => (whole(first.as_ref(), 0)?, whole(Some(&stop), 0)?),
        None if first.is_none() => return Err("range: no number".into()),
        None => (0, whole(first.as_ref(), 0)?),
    };
    if step == 0 {
        return Err("range: the step is 0".into());
    }
    let far = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let many = far.max(0).unsigned_abs().div_ceil(step.unsigned_abs());
    if many > MOST {
        return Err(format!("range: {many} numbers, and at most {MOST} are allowed"));
    }
    pay(state, 24 * many as usize)?;
    let numbers = (0..many as i128).map(|n| Value::from(start + n * step));
    List::of(Form::Range, numbers.collect())
}
