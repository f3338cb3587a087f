//! Lists every key of a config or a box, from the code that reads it. `onebox config keys` and
//! `docs/config.md` show this list.

use super::reading::{ConfigReader, Key, Node, Section};
use super::{BoxConfig, Config};

/// Every key of a config, in reading order. A section is before its keys.
pub fn keys() -> Vec<Key> {
    described(|s| drop(Config::read(s, "")))
}

/// Every key of the description of a box.
pub fn box_keys() -> Vec<Key> {
    described(|s| drop(BoxConfig::read(s, "")))
}

fn described(read: impl FnOnce(&mut Section<'_, '_>)) -> Vec<Key> {
    let mut reader =
        ConfigReader { boxless: true, described: Some(Vec::new()), ..ConfigReader::default() };
    reader.read(&Node::empty(), "", read);
    reader.described.unwrap_or_default()
}
