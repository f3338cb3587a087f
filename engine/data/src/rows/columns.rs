//! Columns of a row under the names that onebox knows, as `data.columns` says.

use super::{has, name_of};
use crate::ignored_keys::IgnoredKeys;
use config::ChatColumns;
use files::json::{Json, Map};

/// Keys of `data.columns` that name keys of a message, and not of a row.
const OF_MESSAGES: [&str; 2] = ["role", "content"];

/// Renames the columns of a row.
///
/// # Errors
/// The row lacks a column that `columns` names.
pub(super) fn of_row(
    row: Map,
    columns: &ChatColumns,
    unread: &mut IgnoredKeys,
) -> Result<Map, String> {
    let names = || columns.iter().filter(|(key, _)| !OF_MESSAGES.contains(key));
    renamed(row, names, &mut |name| {
        unread.keys.insert(name_of(name));
    })
}

/// Renames the keys of a message.
///
/// # Errors
/// The message lacks a key that `columns` names.
pub(super) fn of_message(
    message: Json,
    columns: &ChatColumns,
    unread: &mut IgnoredKeys,
) -> Result<Json, String> {
    let names = || columns.iter().filter(|(key, _)| OF_MESSAGES.contains(key));
    match message {
        Json::Object(fields) if names().next().is_some() => {
            let mut leave = |name: &str| {
                unread.of_messages.insert(name_of(name));
            };
            renamed(fields, names, &mut leave).map(Json::Object)
        }
        other => Ok(other),
    }
}

/// Name that a column has in the rows, for messages.
pub(super) fn called<'a>(columns: &'a ChatColumns, key: &'a str) -> String {
    name_of(columns.get(key).unwrap_or(key))
}

/// The fields under the keys of `names`. `leave` gets a key that another column has replaced.
fn renamed<'a, I: Iterator<Item = (&'static str, &'a str)>>(
    fields: Map,
    names: impl Fn() -> I,
    leave: &mut dyn FnMut(&str),
) -> Result<Map, String> {
    if let Some((key, name)) = names().find(|(_, name)| !fields.contains_key(*name)) {
        let (name, has) = (name_of(name), has(&fields));
        return Err(format!("it has no {name}, which data.columns names as `{key}`{has}"));
    }
    let mut renamed = Map::new();
    for (name, value) in fields {
        match names().find(|(_, other)| *other == name) {
            Some((key, _)) => drop(renamed.insert(key.to_owned(), value)),
            None if names().any(|(key, _)| key == name) => leave(&name),
            None => drop(renamed.insert(name, value)),
        }
    }
    Ok(renamed)
}
