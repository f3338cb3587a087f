//! State of a reading: every text, every error, every place, every origin.
//!
//! A value that cannot be read is reported, marked, and replaced by a stand-in. Reading continues,
//! so that all errors are reported together. A stand-in never leaves the callers of this module: a
//! reader with problems returns no configuration.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use super::{
    Complaint, ConfigError, ConfigSource, GivenValue, Item, Key, Node, Problem, Refusal, SHOWN,
    SourceKind, Span, Spot, Violation, join, short, suggest,
};
use crate::Origin;

/// Texts, and the state of the keys that were read.
#[derive(Default)]
pub(crate) struct ConfigReader {
    pub(crate) sources: Vec<ConfigSource>,
    pub(crate) problems: Vec<Problem>,
    pub(crate) origins: Vec<(String, String, Origin)>,
    pub(crate) places: HashMap<String, Span>,
    pub(crate) known: Vec<String>,
    pub(crate) unknown: Vec<UnknownKey>,
    /// Errors about missing keys, held back until all unknown keys are known.
    pub(crate) missing: Vec<Problem>,
    /// Whether the text is from a checkpoint or a run. It may be of another version, of another
    /// machine, or forged.
    pub(crate) stored: bool,
    /// Whether the box that the text names is not read.
    pub(crate) boxless: bool,
    /// Whether a search chooses the ranks. Then the box may be too small for the ranks of the text.
    pub(crate) searched: bool,
    /// Config of the run that this config resumes.
    pub(crate) of_run: Option<PathBuf>,
    /// Warnings about what a valid config names.
    pub(crate) warnings: Vec<String>,
    /// Reads values that an answer to a key of another tool proposes.
    pub(crate) refusal: Option<Refusal>,
    /// Unknown keys of a stored text.
    pub(crate) ignored: Vec<String>,
    pub(crate) bad: HashSet<String>,
    /// Descriptions of all keys, if they are collected.
    pub(crate) described: Option<Vec<Key>>,
}

/// A key that no section has read.
pub(crate) struct UnknownKey {
    pub(crate) section: String,
    pub(crate) owner: String,
    pub(crate) key: String,
    pub(crate) place: Span,
    /// Text of the value, if it is a short number, word or string.
    pub(crate) value: String,
}

impl ConfigReader {
    /// Adds a text and returns its number.
    pub(crate) fn add(&mut self, source: ConfigSource) -> usize {
        self.sources.push(source);
        self.sources.len() - 1
    }

    /// File of a place; `None` for the command line.
    pub(crate) fn file(&self, place: Span) -> Option<&ConfigSource> {
        let source = self.sources.get(place.source)?;
        matches!(source.kind, SourceKind::File { .. }).then_some(source)
    }

    pub(crate) fn item<'a>(&'a self, node: &'a Node) -> Item<'a> {
        let text = self.sources.get(node.place.source).map_or("", |source| source.at(node.place));
        Item { text, kind: &node.kind }
    }

    /// Reports an error at one place.
    pub(crate) fn report(&mut self, key: &str, place: Span, complaint: Complaint) {
        self.problems.push(Problem::at(key, place, complaint));
    }

    /// Reports a broken rule.
    pub(crate) fn refuse(&mut self, Violation { message, help, values }: Violation) {
        let key = values.first().map_or("", |(key, _)| key).to_string();
        let spots = values.into_iter().map(|(key, label)| self.spot(key, label)).collect();
        self.problems.push(Problem { key, message, help, spots });
    }

    /// Reports an error of a key's value at its place.
    pub(crate) fn refuse_value(&mut self, key: &str, Complaint { message, help }: Complaint) {
        let spot = self.places.get(key).map(|at| Spot::At(*at, String::new()));
        let spots = spot.into_iter().collect();
        self.problems.push(Problem { key: key.into(), message, help, spots });
    }

    /// Reports that a checkpoint's config names a box. The file of the box is outside of the
    /// checkpoint and is not opened.
    pub(crate) fn report_box(&mut self, key: &str, path: &str) {
        let message = format!("a checkpoint's config names the box `{}`", short(path));
        let help = "no run on a described box saves checkpoints, so onebox did not write this one: \
                    use a checkpoint of a run";
        self.refuse_value(key, Complaint { message, help: help.into() });
        self.mark_bad(key);
    }

    /// Reports every key that stands twice in one text.
    pub(crate) fn report_duplicates(&mut self, node: &Node, path: &str) {
        node.duplicates(path, &mut |key, first, second| {
            self.problems.push(Problem {
                key,
                message: "this key is given twice".into(),
                help: "take one of the two out".into(),
                spots: vec![
                    Spot::At(second, "and again here".into()),
                    Spot::At(first, "first here".into()),
                ],
            });
        });
    }

    /// Whether every one of these keys holds a valid value.
    pub(crate) fn ok(&self, keys: &[&str]) -> bool {
        !keys.iter().any(|key| self.bad.contains(*key))
    }

    /// Whether no key of a section has an invalid value.
    pub(crate) fn section_is_ok(&self, section: &str) -> bool {
        !self.bad.iter().any(|key| key.split('.').next() == Some(section))
    }

    /// Marks a key with an invalid value.
    pub(crate) fn mark_bad(&mut self, key: &str) {
        self.bad.insert(key.into());
    }

    /// Shows the value of `key` in an error: its place, or the origin of its default.
    pub(crate) fn spot(&self, key: &str, label: String) -> Spot {
        if let Some(place) = self.places.get(key) {
            return Spot::At(*place, label);
        }
        let origin = self.origins.iter().find(|(name, ..)| name == key);
        Spot::Note(match origin {
            Some((_, value, Origin::Derived(how))) => format!("`{key}` is {value} ({how})"),
            Some((_, value, _)) => format!("`{key}` is {value} by default"),
            None => format!("`{key}`: {label}"),
        })
    }

    /// Reports unknown keys. Also reports missing keys, except keys that an unknown key may
    /// misspell. An error that is not shown gets no help, because the search would be slow for very
    /// many keys.
    pub(crate) fn report_unknown(&mut self) {
        let mut missing = std::mem::take(&mut self.missing);
        let mut unknown = std::mem::take(&mut self.unknown);
        unknown.sort_by_key(|unknown| (unknown.place.source, unknown.place.start));
        self.ignore(&mut unknown);
        for (number, unknown) in unknown.into_iter().enumerate() {
            let UnknownKey { section, owner, key, place, value } = unknown;
            let (is_set, refusal) = (self.file(place).is_none(), self.refusal);
            let given = GivenValue { text: &value, is_set, refusal };
            let help = match number < SHOWN {
                true => suggest::key_help(&section, &owner, &key, given, &self.known),
                false => String::new(),
            };
            let message = format!("unknown key: {owner} has no key `{}`", short(&key));
            self.report(&join(&section, &key), place, Complaint { message, help });
            let meant = suggest::keys_meant(&section, &key, &self.known);
            missing.retain(|problem| !meant.contains(&problem.key));
        }
        self.problems.append(&mut missing);
    }

    /// Moves the keys of a stored text from `unknown` to `ignored`; the keys of `--set` remain.
    fn ignore(&mut self, unknown: &mut Vec<UnknownKey>) {
        if !self.stored {
            return;
        }
        let sources = &self.sources;
        let set = |at: Span| sources.get(at.source).is_some_and(|s| s.kind == SourceKind::Set);
        let ignored = unknown.extract_if(.., |unknown| !set(unknown.place));
        let name = |unknown: UnknownKey| short(&join(&unknown.section, &unknown.key));
        self.ignored.extend(ignored.map(name));
    }

    /// Returns all problems as the error of the file `name`.
    pub(crate) fn into_error(mut self, name: &str) -> ConfigError {
        self.problems.sort_by_key(Problem::order);
        ConfigError { name: name.into(), sources: self.sources, problems: self.problems }
    }

    /// Adds the results of another file's reader; its keys get a prefix.
    pub(crate) fn absorb(&mut self, mut other: Self, prefix: &str) {
        let shift = self.sources.len();
        let moved = |place: &Span| Span { source: place.source + shift, ..*place };
        for problem in &mut other.problems {
            for spot in &mut problem.spots {
                if let Spot::At(place, _) = spot {
                    *place = moved(place);
                }
            }
        }
        self.places.extend(other.places.iter().map(|(key, at)| (join(prefix, key), moved(at))));
        self.bad.extend(other.bad.iter().map(|key| join(prefix, key)));
        self.sources.append(&mut other.sources);
        self.problems.append(&mut other.problems);
    }
}
