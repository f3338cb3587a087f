//! Names of the columns of chat rows.

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// Names of the columns of a data set, by the name that onebox gives the column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatColumns(BTreeMap<&'static str, String>);

impl ChatColumns {
    /// Columns that can have another name: one list for each form of rows, and last the columns
    /// that rows of every form may have.
    pub const FORMS: [&[&str]; 4] = [
        &["messages", "role", "content"],
        &["prompt", "completion"],
        &["instruction", "input", "output", "history"],
        &["system", "tools"],
    ];

    /// Columns that can have another name.
    pub fn keys() -> impl Iterator<Item = &'static str> + Clone {
        Self::FORMS.into_iter().flatten().copied()
    }

    /// Sets the name of the column `key`, which is one of [`keys`](Self::keys).
    #[must_use]
    pub fn with(mut self, key: &str, name: &str) -> Self {
        let Some(key) = Self::keys().find(|known| *known == key) else {
            unreachable!("`{key}` is no column of chats")
        };
        self.0.insert(key, name.to_owned());
        self
    }

    /// Name of a column, if the config gives it one.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Whether no column has a name of its own.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The columns with names of their own, and these names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(key, name)| (*key, name.as_str()))
    }

    /// The first columns of two different forms, if the config names such columns. No row has both.
    pub(crate) fn of_two_forms(&self) -> Option<[&'static str; 2]> {
        let [forms @ .., _] = Self::FORMS;
        let named = |form: &'static [&'static str]| {
            form.iter().copied().find(|key| self.get(key).is_some())
        };
        let mut found = forms.into_iter().filter_map(named);
        Some([found.next()?, found.next()?])
    }
}

impl Serialize for ChatColumns {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_empty() {
            return serializer.serialize_none();
        }
        let mut all = serializer.serialize_struct("ChatColumns", self.0.len())?;
        self.0.iter().try_for_each(|(key, name)| all.serialize_field(key, name))?;
        all.end()
    }
}
