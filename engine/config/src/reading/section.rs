//! One `( ... )` of a tree, read key by key.

use super::key::Key;
use super::reader::{Reader, Unknown};
use super::report::{Problem, Spot};
use super::source::{Kind as SourceKind, Place};
use super::tree::{Field, Kind, Node, join};
use super::value::{Complaint, Parsed, name_of};
use crate::Origin;

/// What a key is when the text leaves it out.
pub(crate) enum Or<T> {
    /// An error; an example of the key for the help.
    Required(&'static str),
    /// A fixed value.
    Default(T),
    /// Computed, how in words, from these keys.
    Derived(T, &'static str, &'static [&'static str]),
}

/// What is said of a key.
#[derive(Clone, Copy)]
pub(crate) struct About<'a> {
    /// What it means, and its unit.
    pub(crate) doc: &'static str,
    /// The values that it takes, in words.
    pub(crate) values: &'a dyn Fn() -> String,
}

impl Reader {
    /// Reads the whole tree as one section; then unknown keys are reported.
    ///
    /// `owner` says in messages who has the keys at the top: "a config".
    pub(crate) fn read<T>(
        &mut self,
        root: &Node,
        owner: &str,
        inside: impl FnOnce(&mut Section<'_, '_>) -> T,
    ) -> T {
        let (fields, broken) = match &root.kind {
            Kind::Struct { name: None, fields } => (fields.as_slice(), false),
            _ => (&[][..], true),
        };
        if broken {
            let item = self.item(root);
            let found = item.found();
            let message = format!("expected `( key: value, ... )` around the keys, found {found}");
            let help = match item.text.starts_with('{') {
                true => "this looks like JSON: RON writes `( key: value )`, keys without quotes",
                false => "put one pair of parentheses around the whole file, without a name",
            };
            self.report("", root.place, Complaint { message, help: help.into() });
        }
        let start = Place { end: root.place.start + 1, ..root.place };
        let mut section = Section {
            reader: self,
            path: String::new(),
            owner: owner.into(),
            variant: None,
            fields,
            at: start,
            broken,
            keys: Vec::new(),
        };
        let value = inside(&mut section);
        section.close();
        self.report_unknown();
        value
    }
}

/// One `( ... )` of the tree, being read.
pub(crate) struct Section<'r, 'n> {
    pub(crate) reader: &'r mut Reader,
    path: String,
    /// Who has these keys, for messages: "`model`", "`Cpu`".
    owner: String,
    /// Of a choice with keys.
    variant: Option<&'static str>,
    fields: &'n [Field],
    /// Where a missing key is missing.
    at: Place,
    /// The section itself was reported: its keys are bad without further words.
    broken: bool,
    keys: Vec<&'static str>,
}

impl<'n> Section<'_, 'n> {
    /// The field called `key`, from now on a known key.
    fn take(&mut self, key: &'static str) -> (String, Option<&'n Field>) {
        let path = join(&self.path, key);
        self.reader.known.push(path.clone());
        self.keys.push(key);
        let field = self.fields.iter().find(|field| field.key == key);
        if let Some(field) = field {
            self.reader.places.insert(path.clone(), field.value.place);
        }
        if self.broken {
            self.reader.mark_bad(&path);
        }
        (path, field)
    }

    /// Refuses a key of earlier versions; `why` says what became of it.
    pub(crate) fn removed(&mut self, key: &'static str, why: &str) {
        let Some(field) = self.fields.iter().find(|field| field.key == key) else { return };
        self.keys.push(key);
        let message = format!("{} has no key `{key}` any more: {why}", self.owner);
        let complaint = Complaint { message, help: "leave it out".into() };
        self.reader.report(&join(&self.path, key), field.key_place, complaint);
    }

    /// A single value: read by `parse`, shown by `show`.
    pub(crate) fn leaf<T: Default>(
        &mut self,
        key: &'static str,
        or: Or<T>,
        about: About<'_>,
        show: impl Fn(&T) -> String,
        parse: impl FnOnce(&Reader, &Node) -> Parsed<T>,
    ) -> T {
        let (path, field) = self.take(key);
        self.describe(&path, &or, about, &show);
        let Some(field) = field else {
            return self.absent(path, or, show);
        };
        match parse(self.reader, &field.value) {
            Ok(value) => {
                let origin = self.origin(field);
                self.reader.origins.push((path, show(&value), origin));
                value
            }
            Err(complaint) => {
                self.reader.report(&path, field.value.place, complaint);
                self.reader.mark_bad(&path);
                or.stand_in()
            }
        }
    }

    /// Notes what can be said of a key, where that is asked for.
    fn describe<T>(
        &mut self,
        path: &str,
        or: &Or<T>,
        about: About<'_>,
        show: &dyn Fn(&T) -> String,
    ) {
        let Some(keys) = &mut self.reader.described else { return };
        keys.push(Key {
            name: path.to_owned(),
            of: self.variant,
            values: (about.values)(),
            default: match or {
                Or::Required(_) => None,
                Or::Default(value) => Some(show(value)),
                Or::Derived(_, how, _) => Some((*how).to_owned()),
            },
            doc: about.doc,
        });
    }

    fn absent<T: Default>(&mut self, path: String, or: Or<T>, show: impl Fn(&T) -> String) -> T {
        let origin = match &or {
            Or::Required(example) => {
                self.missing(&path, example);
                self.reader.mark_bad(&path);
                Origin::Default
            }
            Or::Default(_) => Origin::Default,
            Or::Derived(_, how, from) => {
                if !self.reader.ok(from) {
                    self.reader.mark_bad(&path);
                }
                Origin::Derived((*how).into())
            }
        };
        let value = or.stand_in();
        self.reader.origins.push((path, show(&value), origin));
        value
    }

    fn missing(&mut self, path: &str, example: &str) {
        if self.broken {
            return;
        }
        self.reader.missing.push(Problem {
            key: path.into(),
            message: "this key is required and missing".into(),
            help: match self.path.as_str() {
                "" => format!("add `{example}`"),
                path => format!("add `{example}` to `{path}`"),
            },
            spots: vec![Spot::At(self.at, String::new())],
        });
    }

    fn origin(&self, field: &Field) -> Origin {
        match self.reader.sources.get(field.value.place.source) {
            Some(source) if matches!(source.kind, SourceKind::File { .. }) => {
                Origin::File { line: source.spot(field.value.place).line }
            }
            _ => Origin::Set,
        }
    }

    /// `key: (...)`.
    pub(crate) fn section<T>(
        &mut self,
        key: &'static str,
        doc: &'static str,
        inside: impl FnOnce(&mut Section<'_, 'n>) -> T,
    ) -> T {
        let (path, field) = self.take(key);
        let about = About { doc, values: &|| "a section".into() };
        self.describe(&path, &Or::Default(()), about, &|()| String::new());
        let (mut fields, mut broken, mut at): (&'n [Field], _, _) = (&[], self.broken, self.at);
        if let Some(field) = field {
            if self.in_file(field.key_place) {
                at = field.key_place;
            }
            match &field.value.kind {
                Kind::Struct { name: None, fields: inner } => fields = inner,
                _ => {
                    broken = true;
                    let found = self.reader.item(&field.value).found();
                    let message = format!("expected `( key: value, ... )`, found {found}");
                    let help = format!("`{path}` is a section: write `{key}: ( ... )`");
                    self.reader.report(&path, field.value.place, Complaint { message, help });
                }
            }
        }
        let owner = format!("`{path}`");
        self.enter((path, owner, None), (fields, at, broken), inside)
    }

    fn in_file(&self, place: Place) -> bool {
        let source = self.reader.sources.get(place.source);
        source.is_some_and(|source| matches!(source.kind, SourceKind::File { .. }))
    }

    /// `key: Variant` or `key: Variant(...)`, one of `examples`; the fields are read by `inside`,
    /// which is given the variant's index.
    pub(crate) fn choice<T>(
        &mut self,
        key: &'static str,
        examples: &[&'static str],
        or: Or<usize>,
        doc: &'static str,
        mut inside: impl FnMut(usize, &mut Section<'_, 'n>) -> T,
    ) -> T {
        let name = |index: usize| examples.get(index).map_or("", |e| name_of(e));
        let show = |index: &usize| name(*index).to_string();
        let about = About { doc, values: &|| ticked_or(examples) };
        let parse = |reader: &Reader, node: &Node| reader.item(node).variant(examples);
        let index = self.leaf(key, or, about, show, parse);
        let path = join(&self.path, key);
        let node = self.fields.iter().find(|field| field.key == key).map(|field| &field.value);
        let fields: &'n [Field] = match node.map(|node| &node.kind) {
            Some(Kind::Struct { fields, .. }) => fields,
            _ => &[],
        };
        let broken = !self.reader.ok(&[&path]) && node.is_some() || self.broken;
        let at = node.map_or(self.at, |node| node.place);
        if self.reader.described.is_some() {
            for index in (0..examples.len()).filter(|index| examples[*index].contains('(')) {
                let variant = (path.clone(), String::new(), Some(name(index)));
                self.enter(variant, (&[], at, true), |section| inside(index, section));
            }
        }
        let described = self.reader.described.take();
        let variant = (path, format!("`{}`", show(&index)), Some(name(index)));
        let value = self.enter(variant, (fields, at, broken), |section| inside(index, section));
        self.reader.described = described;
        value
    }

    fn enter<T>(
        &mut self,
        (path, owner, variant): (String, String, Option<&'static str>),
        (fields, at, broken): (&'n [Field], Place, bool),
        inside: impl FnOnce(&mut Section<'_, 'n>) -> T,
    ) -> T {
        let reader = &mut *self.reader;
        let keys = Vec::new();
        let mut section = Section { reader, path, owner, variant, fields, at, broken, keys };
        let value = inside(&mut section);
        section.close();
        value
    }

    /// Notes the keys that nobody asked for.
    fn close(self) {
        if self.broken {
            return;
        }
        for field in self.fields {
            if !self.keys.iter().any(|key| *key == field.key) {
                self.reader.unknown.push(Unknown {
                    section: self.path.clone(),
                    owner: self.owner.clone(),
                    key: field.key.clone(),
                    place: field.key_place,
                });
            }
        }
    }
}

impl<T> Or<T> {
    /// The same, of another type.
    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> U) -> Or<U> {
        match self {
            Self::Required(example) => Or::Required(example),
            Self::Default(value) => Or::Default(f(value)),
            Self::Derived(value, how, from) => Or::Derived(f(value), how, from),
        }
    }

    /// `told` where there is one: what a folder's config.json says.
    pub(crate) fn told(self, told: Option<T>) -> Self {
        told.map_or(self, |value| Self::Derived(value, "config.json", &["model.from"]))
    }
}

impl<T: Default> Or<T> {
    fn stand_in(self) -> T {
        match self {
            Self::Required(_) => T::default(),
            Self::Default(value) | Self::Derived(value, ..) => value,
        }
    }
}

/// `` `Host`, `Device` or `Split(device_fraction: 0.2)` ``
fn ticked_or(examples: &[&str]) -> String {
    let all: Vec<String> = examples.iter().map(|example| format!("`{example}`")).collect();
    match all.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => all.concat(),
    }
}
