//! Lists every key of a config, from the code that reads it. `onebox config keys` and
//! `docs/config.md` show this list.

use super::Config;
use super::reading::{ConfigReader, ConfigSource, Key, SourceKind, described, tree};

/// Every key of a config, in reading order. A section is before its keys.
pub fn keys() -> Vec<Key> {
    described(|s| drop(Config::read(s, "")))
}

/// Remedy if the key `name` of a config does not take the value that it has in `text`, such as
/// `train: (steps: 100)`; `None` if it does. Rules between keys are not applied, and no file is opened.
pub(super) fn refusal(name: &str, text: &str) -> Option<String> {
    let kind = SourceKind::File { dir: None };
    let source = ConfigSource { kind, name: "a config".into(), text: format!("({text})") };
    let mut reader = ConfigReader { stored: true, boxless: true, ..ConfigReader::default() };
    let index = reader.add(source.clone());
    let Ok(root) = tree::parse(&source, index, 0) else {
        return Some("write a value of RON: a number, `true`, a name, or a text in quotes".into());
    };
    reader.read(&root, "a config", |s| drop(Config::read(s, "")));
    let is_read = reader.known.iter().any(|known| known == name);
    let found = reader.problems.into_iter().find(|problem| problem.key == name);
    found.filter(|_| is_read).map(|problem| problem.help)
}
