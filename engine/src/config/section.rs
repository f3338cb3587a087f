//! One `( ... )` of a tree, read key by key.

use super::Origin;
use super::reader::{Reader, Unknown};
use super::report::{Problem, Spot};
use super::source::{Kind as SourceKind, Place};
use super::tree::{Field, Kind, Node, join};
use super::value::{Complaint, Parsed, name_of};

/// What a key is when the text leaves it out.
pub(super) enum Or<T> {
    /// An error; an example of the key for the help.
    Required(&'static str),
    /// A fixed value.
    Default(T),
    /// Computed, how in words, from these keys.
    Derived(T, &'static str, &'static [&'static str]),
}

impl Reader {
    /// Reads the whole tree as one section; then unknown keys are reported.
    ///
    /// `owner` says in messages who has the keys at the top: "a config".
    pub(super) fn read<T>(
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
pub(super) struct Section<'r, 'n> {
    pub(super) reader: &'r mut Reader,
    path: String,
    /// Who has these keys, for messages: "`model`", "`Cpu`".
    owner: String,
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

    /// A single value: read by `parse`, shown by `show`.
    pub(super) fn leaf<T: Default>(
        &mut self,
        key: &'static str,
        or: Or<T>,
        show: impl FnOnce(&T) -> String,
        parse: impl FnOnce(&Reader, &Node) -> Parsed<T>,
    ) -> T {
        let (path, field) = self.take(key);
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

    fn absent<T: Default>(
        &mut self,
        path: String,
        or: Or<T>,
        show: impl FnOnce(&T) -> String,
    ) -> T {
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
            Some(source) if source.kind != SourceKind::Set => {
                Origin::File { line: source.spot(field.value.place).line }
            }
            _ => Origin::Set,
        }
    }

    /// `key: (...)`.
    pub(super) fn section<T>(
        &mut self,
        key: &'static str,
        inside: impl FnOnce(&mut Section<'_, 'n>) -> T,
    ) -> T {
        let (path, field) = self.take(key);
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
        self.enter(path, owner, (fields, at, broken), inside)
    }

    fn in_file(&self, place: Place) -> bool {
        self.reader.sources.get(place.source).is_some_and(|source| source.kind != SourceKind::Set)
    }

    /// `key: Variant` or `key: Variant(...)`, one of `examples`; the fields are read by `inside`,
    /// which is given the variant's index.
    pub(super) fn choice<T>(
        &mut self,
        key: &'static str,
        examples: &[&'static str],
        or: Or<usize>,
        inside: impl FnOnce(usize, &mut Section<'_, 'n>) -> T,
    ) -> T {
        let show = |index: &usize| examples.get(*index).map_or("", |e| name_of(e)).to_string();
        let index = self.leaf(key, or, show, |reader, node| reader.item(node).variant(examples));
        let path = join(&self.path, key);
        let node = self.fields.iter().find(|field| field.key == key).map(|field| &field.value);
        let fields: &'n [Field] = match node.map(|node| &node.kind) {
            Some(Kind::Struct { fields, .. }) => fields,
            _ => &[],
        };
        let broken = !self.reader.ok(&[&path]) && node.is_some() || self.broken;
        let at = node.map_or(self.at, |node| node.place);
        let owner = format!("`{}`", show(&index));
        self.enter(path, owner, (fields, at, broken), |section| inside(index, section))
    }

    fn enter<T>(
        &mut self,
        path: String,
        owner: String,
        (fields, at, broken): (&'n [Field], Place, bool),
        inside: impl FnOnce(&mut Section<'_, 'n>) -> T,
    ) -> T {
        let reader = &mut *self.reader;
        let mut section = Section { reader, path, owner, fields, at, broken, keys: Vec::new() };
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

impl<T: Default> Or<T> {
    fn stand_in(self) -> T {
        match self {
            Self::Required(_) => T::default(),
            Self::Default(value) | Self::Derived(value, ..) => value,
        }
    }
}
