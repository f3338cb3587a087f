//! Reads one `( ... )` of a tree key by key.

use super::{
    Complaint, ConfigReader, Declaration, Field, Key, Node, NodeKind, ParseResult, Problem, Span,
    Spot, UnknownKey, is_name, join, name_of, ticked,
};
use crate::{Origin, ResumeEffect};

/// Message about a key that is required and left out.
pub(crate) const MISSING: &str = "this key is required and missing";

/// Value of a key that the text leaves out.
pub(crate) enum KeyDefault<T> {
    /// The key is required; the text is an example for the help.
    Required(&'static str),
    /// A fixed value.
    Default(T),
    /// A value computed from other keys: the value, the computation in words, and these keys.
    Derived(T, &'static str, &'static [&'static str]),
}

/// Enum of a config. Its variants may have keys: `Delayed(after_step: 40)`.
pub(crate) trait Choice: Sized {
    /// Values that the defaults of a variant's keys depend on.
    type Context: Clone;
    /// Each variant, as a config writes it.
    const EXAMPLES: &'static [&'static str];

    /// Name of the variant.
    fn name(&self) -> &'static str;

    /// Reads the variant of this name, which is in `EXAMPLES`.
    fn read(variant: &str, section: &mut Section<'_, '_>, context: Self::Context) -> Self;
}

impl ConfigReader {
    /// Reads the whole tree as one section, and then reports unknown keys.
    ///
    /// `owner` names the owner of the top-level keys in messages: "a config".
    pub(crate) fn read<T>(
        &mut self,
        root: &Node,
        owner: &str,
        inside: impl FnOnce(&mut Section<'_, '_>) -> T,
    ) -> T {
        let (fields, broken) = match &root.kind {
            NodeKind::Struct { name: None, fields } => (fields.as_slice(), false),
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
        let start = Span { end: root.place.start + 1, ..root.place };
        let (path, owner) = (String::new(), owner.into());
        let group = Group { path, owner, variant: None, resume: None, fields, at: start, broken };
        let value = self.enter(group, inside);
        self.report_unknown();
        value
    }

    fn enter<'n, T>(
        &mut self,
        group: Group<'n>,
        inside: impl FnOnce(&mut Section<'_, 'n>) -> T,
    ) -> T {
        let mut section = Section { reader: self, group, keys: Vec::new() };
        let value = inside(&mut section);
        section.close();
        value
    }
}

/// Descriptions of all keys that `read` reads, in reading order. A section is before its keys.
pub(crate) fn described(read: impl FnOnce(&mut Section<'_, '_>)) -> Vec<Key> {
    let mut reader =
        ConfigReader { boxless: true, described: Some(Vec::new()), ..ConfigReader::default() };
    reader.read(&Node::empty(), "", read);
    reader.described.unwrap_or_default()
}

/// One `( ... )` of the tree.
pub(super) struct Group<'n> {
    path: String,
    /// Owner of the keys in messages: "`model`", "`Cpu`".
    owner: String,
    /// Variant that has the keys, if they belong to a choice.
    variant: Option<&'static str>,
    /// Effect of a change of the choice.
    resume: Option<ResumeEffect>,
    pub(super) fields: &'n [Field],
    /// Place that the error of a missing key shows.
    at: Span,
    /// Whether this group is already reported. Then its keys count as invalid, and no further error
    /// is reported.
    broken: bool,
}

/// One `( ... )` of the tree while it is read.
pub(crate) struct Section<'r, 'n> {
    pub(crate) reader: &'r mut ConfigReader,
    pub(super) group: Group<'n>,
    /// Keys that were read.
    keys: Vec<&'static str>,
}

impl<'n> Section<'_, 'n> {
    /// Returns the field `key`, which becomes a known key.
    fn take(&mut self, key: &'static str) -> (String, Option<&'n Field>) {
        let path = join(&self.group.path, key);
        self.reader.known.push(path.clone());
        self.keys.push(key);
        let field = self.group.fields.iter().find(|field| field.key == key);
        if let Some(field) = field {
            self.reader.places.insert(path.clone(), field.value.place);
        }
        if self.group.broken {
            self.reader.mark_bad(&path);
        }
        (path, field)
    }

    /// Refuses a key of earlier versions; `why` explains the change.
    pub(crate) fn removed(&mut self, key: &'static str, why: &str) {
        let Some(field) = self.group.fields.iter().find(|field| field.key == key) else { return };
        self.keys.push(key);
        let message = format!("{} has no key `{key}` any more: {why}", self.group.owner);
        let complaint = Complaint { message, help: "leave it out".into() };
        self.reader.report(&join(&self.group.path, key), field.key_place, complaint);
    }

    /// Reads a single value. `values` describes the allowed values, `parse` reads a value, and
    /// `show` writes it.
    pub(crate) fn leaf<T: Default>(
        &mut self,
        key: Declaration,
        or: KeyDefault<T>,
        values: String,
        show: impl Fn(&T) -> String,
        parse: impl FnOnce(&ConfigReader, &Node) -> ParseResult<T>,
    ) -> T {
        let (path, field) = self.take(key.name);
        self.describe(&path, key, &or, values, &show);
        let Some(field) = field else {
            return self.absent(path, or, show);
        };
        match parse(self.reader, &field.value) {
            Ok(value) => {
                let place = field.value.place;
                let line = self.reader.file(place).map(|source| source.spot(place).line);
                let origin = line.map_or(Origin::Set, |line| Origin::File { line });
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

    /// Records the description of a key, if descriptions are collected.
    fn describe<T>(
        &mut self,
        path: &str,
        key: Declaration,
        or: &KeyDefault<T>,
        values: String,
        show: &dyn Fn(&T) -> String,
    ) {
        let Some(keys) = &mut self.reader.described else { return };
        keys.push(Key {
            name: path.to_owned(),
            of: self.group.variant,
            values,
            default: match or {
                KeyDefault::Required(_) => None,
                KeyDefault::Default(value) => Some(show(value)),
                KeyDefault::Derived(_, how, _) => Some((*how).to_owned()),
            },
            // Each line of a comment begins with a space.
            doc: key.doc.trim_start(),
            resume: key.resume.or(self.group.resume),
        });
    }

    fn absent<T: Default>(
        &mut self,
        path: String,
        or: KeyDefault<T>,
        show: impl Fn(&T) -> String,
    ) -> T {
        let origin = match &or {
            KeyDefault::Required(example) => {
                self.missing(&path, example);
                self.reader.mark_bad(&path);
                Origin::Default
            }
            KeyDefault::Default(_) => Origin::Default,
            KeyDefault::Derived(_, how, from) => {
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
        if self.group.broken {
            return;
        }
        self.reader.missing.push(Problem {
            key: path.into(),
            message: MISSING.into(),
            help: match self.group.path.as_str() {
                "" => format!("add `{example}`"),
                path => format!("add `{example}` to `{path}`"),
            },
            spots: vec![Spot::At(self.group.at, String::new())],
        });
    }

    /// Reads `key: (...)`.
    pub(crate) fn section<T>(
        &mut self,
        key: Declaration,
        inside: impl FnOnce(&mut Section<'_, 'n>) -> T,
    ) -> T {
        let (path, field) = self.take(key.name);
        self.describe(&path, key, &KeyDefault::Default(()), "a section".into(), &|()| {
            String::new()
        });
        let group = self.group_of(key, path, field, field.map(|field| &field.value));
        self.reader.enter(group, inside)
    }

    /// Reads `key: (...)`, or `None`. A key that is left out is a section of defaults if `folder`,
    /// the folder of the model, has the section; else it is `None`.
    pub(crate) fn section_or_none<T>(
        &mut self,
        key: Declaration,
        folder: Option<bool>,
        inside: impl FnOnce(&mut Section<'_, 'n>) -> T,
    ) -> Option<T> {
        let (path, field) = self.take(key.name);
        self.describe(&path, key, &KeyDefault::Default(()), "section, or `None`".into(), &|()| {
            "None".into()
        });
        if self.reader.described.is_some() {
            let group = Group { broken: true, ..self.group_of(key, path, None, None) };
            self.reader.enter(group, inside);
            return None;
        }
        let value = field.map(|field| match &field.value.kind {
            NodeKind::Tuple { name: Some(name), items } if name == "Some" && items.len() == 1 => {
                &items[0]
            }
            _ => &field.value,
        });
        let is_none =
            |node: &Node| matches!(&node.kind, NodeKind::Word(word) if is_name(word, "None"));
        if !value.map_or(folder == Some(true), |node| !is_none(node)) {
            let origin = match (field, folder) {
                (Some(field), _) => {
                    let place = field.value.place;
                    let line = self.reader.file(place).map(|source| source.spot(place).line);
                    line.map_or(Origin::Set, |line| Origin::File { line })
                }
                (None, Some(_)) => Origin::Derived("config.json".into()),
                (None, None) => Origin::Default,
            };
            self.reader.origins.push((path, "None".into(), origin));
            return None;
        }
        let group = self.group_of(key, path, field, value);
        Some(self.reader.enter(group, inside))
    }

    /// The keys of the section `key`, which are those of `value`, the value of `field`.
    fn group_of(
        &mut self,
        key: Declaration,
        path: String,
        field: Option<&'n Field>,
        value: Option<&'n Node>,
    ) -> Group<'n> {
        let (mut fields, mut broken): (&'n [Field], _) = (&[], self.group.broken);
        let mut at = self.group.at;
        if let (Some(field), Some(value)) = (field, value) {
            if self.reader.file(field.key_place).is_some() {
                at = field.key_place;
            }
            match &value.kind {
                NodeKind::Struct { name: None, fields: inner } => fields = inner,
                _ => {
                    broken = true;
                    let found = self.reader.item(value).found();
                    let message = format!("expected `( key: value, ... )`, found {found}");
                    let help = format!("`{path}` is a section: write `{}: ( ... )`", key.name);
                    self.reader.report(&path, field.value.place, Complaint { message, help });
                }
            }
        }
        let owner = format!("`{path}`");
        Group { path, owner, variant: None, resume: None, fields, at, broken }
    }

    /// Reads `key: Variant` or `key: Variant(...)` if the keys need no context.
    pub(crate) fn choice<T: Choice<Context = ()>>(
        &mut self,
        key: Declaration,
        or: KeyDefault<T>,
    ) -> T {
        self.choice_with(key, or, ())
    }

    /// Reads `key: Variant` or `key: Variant(...)`.
    pub(crate) fn choice_with<T: Choice>(
        &mut self,
        key: Declaration,
        or: KeyDefault<T>,
        context: T::Context,
    ) -> T {
        let name = |index: usize| T::EXAMPLES.get(index).map_or("", |e| name_of(e));
        let index_of = |value: T| {
            let index = T::EXAMPLES.iter().position(|example| name_of(example) == value.name());
            index.unwrap_or_else(|| unreachable!("`{}` is no example", value.name()))
        };
        let show = |index: &usize| name(*index).to_string();
        let parse = |reader: &ConfigReader, node: &Node| reader.item(node).variant(T::EXAMPLES);
        let index = self.leaf(key, or.map(index_of), ticked(T::EXAMPLES), show, parse);
        let path = join(&self.group.path, key.name);
        let node = self.group.fields.iter().find(|f| f.key == key.name).map(|field| &field.value);
        let fields: &'n [Field] = match node.map(|node| &node.kind) {
            Some(NodeKind::Struct { fields, .. }) => fields,
            _ => &[],
        };
        let broken = !self.reader.ok(&[&path]) && node.is_some() || self.group.broken;
        let at = node.map_or(self.group.at, |node| node.place);
        let resume = key.resume;
        let group = |variant: &'static str, fields, broken| {
            let owner = format!("`{variant}`");
            Group { path: path.clone(), owner, variant: Some(variant), resume, fields, at, broken }
        };
        if self.reader.described.is_some() {
            for example in T::EXAMPLES.iter().filter(|example| example.contains('(')) {
                let variant = name_of(example);
                let (group, context) = (group(variant, &[], true), context.clone());
                self.reader.enter(group, |section| T::read(variant, section, context));
            }
        }
        let described = self.reader.described.take();
        let variant = name(index);
        let group = group(variant, fields, broken);
        let value = self.reader.enter(group, |section| T::read(variant, section, context));
        self.reader.described = described;
        value
    }

    /// Records the unknown keys of the section.
    fn close(self) {
        if self.group.broken {
            return;
        }
        for field in self.group.fields {
            if !self.keys.iter().any(|key| *key == field.key) {
                self.reader.unknown.push(UnknownKey {
                    section: self.group.path.clone(),
                    owner: self.group.owner.clone(),
                    key: field.key.clone(),
                    place: field.key_place,
                    value: self.reader.item(&field.value).brief(),
                });
            }
        }
    }
}

impl<T> KeyDefault<T> {
    /// Converts the default to another type.
    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> U) -> KeyDefault<U> {
        match self {
            Self::Required(example) => KeyDefault::Required(example),
            Self::Default(value) => KeyDefault::Default(f(value)),
            Self::Derived(value, how, from) => KeyDefault::Derived(f(value), how, from),
        }
    }

    /// Replaces the default by the value of a folder's config.json, if there is a folder.
    pub(crate) fn unless(self, folder: Option<T>) -> Self {
        folder.map_or(self, |value| Self::Derived(value, "config.json", &["model.from"]))
    }
}

impl<T: Default> KeyDefault<T> {
    fn stand_in(self) -> T {
        match self {
            Self::Required(_) => T::default(),
            Self::Default(value) | Self::Derived(value, ..) => value,
        }
    }
}
