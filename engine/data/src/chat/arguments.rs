//! The arguments of filters, tests and methods, bound to parameters as Python binds them.

use super::value::{ValueKind, name_of};
use minijinja::Value;
use minijinja::value::Kwargs;

/// The arguments of a call.
#[derive(Debug)]
pub(super) struct Arguments {
    /// The name of the filter, test or method, for errors.
    name: String,
    pub(super) places: Vec<Value>,
    pub(super) names: Vec<(String, Value)>,
}

impl Arguments {
    /// Arguments of a call of an object: the last value may hold the named arguments.
    pub(super) fn of(name: &str, all: &[Value]) -> Result<Self, String> {
        match all.split_last() {
            Some((last, places)) if last.is_kwargs() => {
                let names = Kwargs::try_from(last.clone()).map_err(|e| e.to_string())?;
                Self::with(name, places, &names)
            }
            _ => Ok(Self { name: name.to_owned(), places: all.to_vec(), names: Vec::new() }),
        }
    }

    pub(super) fn with(name: &str, places: &[Value], names: &Kwargs) -> Result<Self, String> {
        let value = |name: &str| names.get::<Value>(name).map_err(|e| e.to_string());
        let named: Result<Vec<_>, String> =
            names.args().map(|name| Ok((name.to_owned(), value(name)?))).collect();
        Ok(Self { name: name.to_owned(), places: places.to_vec(), names: named? })
    }

    /// The values of these parameters.
    pub(super) fn bind<const N: usize>(
        &self,
        parameters: [&str; N],
    ) -> Result<[Option<Value>; N], String> {
        let mut bound = parameters.map(|_| None);
        if self.places.len() > N {
            return Err(format!(
                "{} takes at most {N} arguments, not {}",
                self.name,
                self.places.len()
            ));
        }
        for (place, value) in bound.iter_mut().zip(&self.places) {
            *place = Some(value.clone());
        }
        for (name, value) in &self.names {
            let at = parameters.iter().position(|parameter| parameter == name);
            match at.map(|at| &mut bound[at]) {
                Some(place @ None) => *place = Some(value.clone()),
                Some(Some(_)) => return Err(format!("{} is given `{name:.60}` twice", self.name)),
                None => return Err(format!("{} has no argument `{name:.60}`", self.name)),
            }
        }
        Ok(bound)
    }

    pub(super) fn wrong(&self, why: &str) -> String {
        format!("{}: {why}", self.name)
    }
}

/// Text of a value. None: the value is None or missing.
pub(super) fn text_or_none(value: Option<&Value>) -> Result<Option<&str>, String> {
    match value.map(|value| (value, ValueKind::of(value))) {
        None | Some((_, ValueKind::None)) => Ok(None),
        Some((_, ValueKind::Text(text))) => Ok(Some(text)),
        Some((value, _)) => Err(format!("{} stands where a text should", name_of(value))),
    }
}

/// Integer of a value, or `or_else` if the value is missing.
pub(super) fn whole(value: Option<&Value>, or_else: i128) -> Result<i128, String> {
    match value.map(|value| (value, ValueKind::of(value))) {
        None => Ok(or_else),
        Some((_, ValueKind::Int(number))) => Ok(number),
        Some((_, ValueKind::Bool(value))) => Ok(value.into()),
        Some((value, _)) => Err(format!("{} stands where an integer should", name_of(value))),
    }
}

/// Whether a value is true in Python. A missing value is false.
pub(super) fn truth(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_true)
}
