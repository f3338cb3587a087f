//! Values of a template, as in Python. onebox has its own lists and dicts, which know their depth:
//! no template can build a value that is nested too deeply to be read.

use crate::bad_rows::TOO_LONG;
use files::json::{Json, Map};
use indexmap::IndexMap;
use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{ErrorKind, State, Value};
use std::sync::Arc;

/// A value, or an error message.
pub(super) type ValueResult = Result<Value, String>;

/// Maximum levels of a value that a template builds. JSON has at most 128 levels.
const DEEPEST: usize = 200;
/// Bytes that a template may write in one step.
const BYTES_OF_A_STEP: usize = 64;

/// Type of a sequence in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    List,
    Tuple,
    /// `dict.keys()`, `dict.values()` or `dict.items()`, with the name that Python prints.
    View(&'static str),
    /// Result of `map`, `select` and similar filters.
    Generator,
    Range,
}

/// Several values in order.
#[derive(Debug)]
pub(super) struct List {
    pub(super) form: Form,
    pub(super) items: Vec<Value>,
    depth: usize,
}

impl List {
    pub(super) fn of(form: Form, items: Vec<Value>) -> Result<Value, String> {
        let depth = depth_above(items.iter())?;
        Ok(Value::from_object(Self { form, items, depth }))
    }

    /// Whether the items have indices.
    pub(super) const fn is_sequence(&self) -> bool {
        matches!(self.form, Form::List | Form::Tuple | Form::Range)
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.form == Form::Generator || !self.items.is_empty()
    }
}

/// Values by key, in the order of insertion.
#[derive(Debug)]
pub(super) struct Dict {
    pub(super) fields: IndexMap<Value, Value>,
    depth: usize,
    /// Index of a message in its chat.
    pub(super) message: Option<usize>,
}

impl Dict {
    pub(super) fn of(fields: IndexMap<Value, Value>) -> Result<Value, String> {
        let depth = depth_above(fields.values().chain(fields.keys()))?;
        Ok(Value::from_object(Self { fields, depth, message: None }))
    }

    /// Each key with its value, as a tuple.
    pub(super) fn pairs(&self) -> Result<Vec<Value>, String> {
        let pair = |(key, field): (&Value, &Value)| {
            List::of(Form::Tuple, vec![key.clone(), field.clone()])
        };
        self.fields.iter().map(pair).collect()
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.fields.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.fields.keys().cloned().collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.fields.len())
    }
}

/// Depth of a value that contains these items.
fn depth_above<'a>(items: impl Iterator<Item = &'a Value>) -> Result<usize, String> {
    let mut deepest = 0;
    for item in items {
        if matches!(ValueKind::of(item), ValueKind::Other) {
            let name = name_of(item);
            return Err(format!("{name} stands in a list or a dict: onebox does not know that"));
        }
        deepest = deepest.max(depth_of(item));
    }
    match deepest < DEEPEST {
        true => Ok(deepest + 1),
        false => Err(format!("a value has more than {DEEPEST} levels")),
    }
}

/// An integer beyond 128 bits, in decimal digits.
#[derive(Debug)]
pub(super) struct Digits(pub(super) String);

impl Object for Digits {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// Function that calls a method by its name.
pub(super) type Call = fn(&mut State<'_, '_>, &Value, &str, &[Value]) -> Result<Value, String>;

/// Method of a value before its call: `a.items` in Jinja, even if `a` has a key `items`.
#[derive(Debug)]
pub(super) struct Method {
    pub(super) of: Value,
    pub(super) name: String,
    pub(super) call: Call,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn call(
        self: &Arc<Self>,
        state: &mut State<'_, '_>,
        arguments: &[Value],
    ) -> Result<Value, minijinja::Error> {
        (self.call)(state, &self.of, &self.name, arguments).map_err(refused)
    }
}

/// A value by its type in Python.
#[derive(Clone, Copy, Debug)]
pub(super) enum ValueKind<'a> {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Digits(&'a str),
    Float(f64),
    Text(&'a str),
    List(&'a List),
    Dict(&'a Dict),
    Method(&'a Method),
    /// A namespace, a macro, a loop.
    Other,
}

impl<'a> ValueKind<'a> {
    pub(super) fn of(value: &'a Value) -> Self {
        use minijinja::value::ValueKind;
        match value.kind() {
            ValueKind::Undefined => Self::Undefined,
            ValueKind::None => Self::None,
            ValueKind::Bool => Self::Bool(value.is_true()),
            ValueKind::Number if value.is_integer() => match i128::try_from(value.clone()) {
                Ok(number) => Self::Int(number),
                Err(_) => Self::Other,
            },
            ValueKind::Number => f64::try_from(value.clone()).map_or(Self::Other, Self::Float),
            ValueKind::String => value.as_str().map_or(Self::Other, Self::Text),
            _ => {
                if let Some(list) = value.downcast_object_ref() {
                    Self::List(list)
                } else if let Some(dict) = value.downcast_object_ref() {
                    Self::Dict(dict)
                } else if let Some(Digits(digits)) = value.downcast_object_ref() {
                    Self::Digits(digits)
                } else if let Some(method) = value.downcast_object_ref() {
                    Self::Method(method)
                } else {
                    Self::Other
                }
            }
        }
    }
}

/// The type of a value, in words.
pub(super) fn name_of(value: &Value) -> &'static str {
    match ValueKind::of(value) {
        ValueKind::Undefined => "an undefined value",
        ValueKind::None => "None",
        ValueKind::Bool(_) => "a truth value",
        ValueKind::Int(_) | ValueKind::Digits(_) => "an integer",
        ValueKind::Float(_) => "a float",
        ValueKind::Text(_) => "a text",
        ValueKind::List(list) => match list.form {
            Form::List => "a list",
            Form::Tuple => "a tuple",
            Form::View(_) => "a view of a dict",
            Form::Generator => "a generator",
            Form::Range => "a range",
        },
        ValueKind::Dict(_) => "a dict",
        ValueKind::Method(_) => "a method",
        ValueKind::Other => "a namespace, a macro or a loop",
    }
}

/// Error of minijinja with the reason of a refusal.
pub(super) fn refused(why: String) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, why)
}

/// Integer of any size from decimal digits, with `-` if it is negative.
pub(super) fn integer(digits: &str) -> Value {
    match digits.parse::<i128>() {
        Ok(number) => Value::from(number),
        Err(_) => Value::from_object(Digits(digits.to_owned())),
    }
}

/// Spends the steps for this many bytes, before a template writes them.
pub(super) fn pay(state: &State<'_, '_>, bytes: usize) -> Result<(), String> {
    state.consume_fuel((1 + bytes / BYTES_OF_A_STEP) as u64).map_err(|_| TOO_LONG.to_owned())
}

/// Items over which a loop iterates.
///
/// # Errors
/// A value over which Python cannot iterate.
pub(super) fn iterated(state: &State<'_, '_>, value: &Value) -> Result<Vec<Value>, String> {
    let items: Vec<Value> = match ValueKind::of(value) {
        ValueKind::Undefined => Vec::new(),
        ValueKind::Text(text) => {
            pay(state, 24 * text.len())?;
            text.chars().map(Value::from).collect()
        }
        ValueKind::List(list) => {
            pay(state, 24 * list.items.len())?;
            list.items.clone()
        }
        ValueKind::Dict(dict) => {
            pay(state, 24 * dict.fields.len())?;
            dict.fields.keys().cloned().collect()
        }
        _ => return Err(format!("{} is not iterable", name_of(value))),
    };
    Ok(items)
}

/// Value that a template gets for a JSON value.
pub(super) fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(whole), _) => Value::from(whole),
            (None, Some(whole)) => Value::from(whole),
            (None, None) => Value::from(number.as_f64()),
        },
        Json::Digits(digits) => integer(digits),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => list(values.iter().map(value).collect()),
        Json::Object(map) => object(map, None),
    }
}

/// Value of a JSON object, which may be a message of a chat.
fn object(map: &Map, message: Option<usize>) -> Value {
    let (mut fields, mut depth) = (IndexMap::with_capacity(map.len()), 0);
    for (key, one) in map {
        let field = value(one);
        depth = depth.max(depth_of(&field));
        fields.insert(Value::from(key.as_str()), field);
    }
    Value::from_object(Dict { fields, depth: depth + 1, message })
}

/// Value of the messages of a chat; each message knows its index.
pub(super) fn value_of_messages(messages: &[Json]) -> Value {
    let one = |(number, message): (usize, &Json)| match message {
        Json::Object(map) => object(map, Some(number)),
        other => value(other),
    };
    list(messages.iter().enumerate().map(one).collect())
}

fn list(items: Vec<Value>) -> Value {
    let depth = 1 + items.iter().map(depth_of).max().unwrap_or(0);
    Value::from_object(List { form: Form::List, items, depth })
}

fn depth_of(value: &Value) -> usize {
    match ValueKind::of(value) {
        ValueKind::List(list) => list.depth,
        ValueKind::Dict(dict) => dict.depth,
        _ => 0,
    }
}
