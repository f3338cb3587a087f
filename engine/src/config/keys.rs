//! Every key that a config or a box may have, as the reader itself asks for it: what `onebox config keys` prints and
//! `docs/config.md` is made of.

use super::reader::Reader;
use super::section::Section;
use super::source::Place;
use super::tree::{Kind, Node};
use super::{box_schema, schema};

/// A key, and what can be said of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Dotted: `model.layers`.
    pub name: String,
    /// The variant that has it: `Cpu`, for `device.count`.
    pub of: Option<&'static str>,
    /// The values that it takes, in words; `a section` of one that holds others.
    pub values: String,
    /// What it is where it is left out, in RON or in words; none of a required key.
    pub default: Option<String>,
    /// What it means, and its unit.
    pub doc: &'static str,
}

impl Key {
    /// Whether it holds other keys.
    pub fn is_section(&self) -> bool {
        self.values == "a section"
    }
}

/// Every key of a config, in reading order, a section before the keys in it.
pub fn keys() -> Vec<Key> {
    described(|s| drop(schema::config(s, "")))
}

/// Every key of the description of a box.
pub fn box_keys() -> Vec<Key> {
    described(|s| drop(box_schema::described_box(s, "")))
}

fn described(read: impl FnOnce(&mut Section<'_, '_>)) -> Vec<Key> {
    let mut reader = Reader::to_describe();
    let place = Place { source: 0, start: 0, end: 0 };
    let root = Node { place, kind: Kind::Struct { name: None, fields: Vec::new() } };
    reader.read(&root, "", read);
    reader.described.unwrap_or_default()
}
