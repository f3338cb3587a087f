//! Every key that a config or a box may have, as the reader itself asks for it: what `onebox config keys` prints and
//! `docs/config.md` is made of.

use super::reading::{ConfigReader, Key, Node, Section};
use super::{BoxConfig, Config};

/// Every key of a config, in reading order, a section before the keys in it.
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
