//! The kinds of values that a section holds, each read by one call.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;

use super::bytes::format_bytes;
use super::reader::Reader;
use super::section::{About, Or, Section};
use super::source::Kind as SourceKind;
use super::tree::{Kind, Node};
use super::value::{Complaint, Interval, Parsed, float_text, grouped, quoted};

/// An enum without fields, by the names of its variants.
pub(crate) trait Named: Copy + PartialEq + 'static {
    /// Every variant.
    const ALL: &'static [(&'static str, Self)];
}

impl Section<'_, '_> {
    /// A whole number.
    pub(crate) fn uint<T: TryFrom<u64> + Default + Display>(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        or: Or<T>,
        doc: &'static str,
    ) -> T {
        let about = About { doc, values: &|| whole_words(&range) };
        self.leaf(key, or, about, T::to_string, |reader, node| whole(reader, node, &range))
    }

    /// A whole number, or 0 where it is not known.
    pub(crate) fn uint_or_unknown(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        doc: &'static str,
    ) -> usize {
        let about = About { doc, values: &|| format!("{}, or 0", whole_words(&range)) };
        self.leaf(key, Or::Default(0), about, usize::to_string, |reader, node| {
            if matches!(&node.kind, Kind::Word(word) if word == "0") {
                return Ok(0);
            }
            let or_0 =
                |c: Complaint| Complaint { help: format!("{}, or 0: not known", c.help), ..c };
            whole(reader, node, &range).map_err(or_0)
        })
    }

    /// A whole number or `None`.
    pub(crate) fn uint_or_none(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        doc: &'static str,
    ) -> Option<usize> {
        let about = About { doc, values: &|| format!("{}, or `None`", whole_words(&range)) };
        self.leaf(key, Or::Default(None), about, some_text(usize::to_string), |reader, node| {
            optional(node, |node| whole(reader, node, &range))
        })
    }

    /// A finite number.
    pub(crate) fn float(
        &mut self,
        key: &'static str,
        within: Interval,
        or: Or<f32>,
        doc: &'static str,
    ) -> f32 {
        let show = |value: &f32| float_text(*value);
        let about = About { doc, values: &|| format!("number {}", within.words()) };
        self.leaf(key, or, about, show, |reader, node| reader.item(node).float(within))
    }

    /// A finite number or `None`.
    pub(crate) fn float_or_none(
        &mut self,
        key: &'static str,
        within: Interval,
        or: Or<Option<f32>>,
        doc: &'static str,
    ) -> Option<f32> {
        let about = About { doc, values: &|| format!("number {}, or `None`", within.words()) };
        let show = some_text(|value: &f32| float_text(*value));
        self.leaf(key, or, about, show, |reader, node| {
            optional(node, |node| reader.item(node).float(within))
        })
    }

    /// A finite number, or none for `Auto`, which is the default.
    pub(crate) fn float_or_auto(
        &mut self,
        key: &'static str,
        within: Interval,
        doc: &'static str,
    ) -> Option<f32> {
        let about = About { doc, values: &|| format!("number {}, or `Auto`", within.words()) };
        let show = |value: &Option<f32>| value.map_or_else(|| "Auto".into(), float_text);
        self.leaf(key, Or::Default(None), about, show, |reader, node| match &node.kind {
            Kind::Word(word) if word == "Auto" => Ok(None),
            _ => reader.item(node).float(within).map(Some),
        })
    }

    /// `true` or `false`.
    pub(crate) fn flag(&mut self, key: &'static str, default: bool, doc: &'static str) -> bool {
        self.flag_or(key, Or::Default(default), doc)
    }

    /// `true` or `false`, where the default is not fixed.
    pub(crate) fn flag_or(&mut self, key: &'static str, or: Or<bool>, doc: &'static str) -> bool {
        let about = About { doc, values: &|| "`true` or `false`".into() };
        self.leaf(key, or, about, bool::to_string, |reader, node| reader.item(node).bool())
    }

    /// A size in bytes, from 1 KiB to `most`.
    pub(crate) fn bytes(
        &mut self,
        key: &'static str,
        most: u64,
        or: Or<u64>,
        doc: &'static str,
    ) -> u64 {
        let range = 1 << 10..=most;
        let show = |bytes: &u64| quoted(&format_bytes(*bytes));
        let values = || format!("size such as `\"512MiB\"`, at most {}", format_bytes(most));
        self.leaf(key, or, About { doc, values: &values }, show, |reader, node| {
            reader.item(node).bytes(&range)
        })
    }

    /// A string that `check` finds nothing wrong with.
    pub(crate) fn text(
        &mut self,
        key: &'static str,
        or: Or<String>,
        check: fn(&str) -> Result<(), &'static str>,
        doc: &'static str,
    ) -> String {
        self.leaf(
            key,
            or,
            About { doc, values: &|| "text in quotes".into() },
            |text| quoted(text),
            |reader, node| {
                let text = reader.item(node).string()?;
                let wrong = |why: &str| Complaint {
                    message: format!("{why}, found {}", quoted(&text)),
                    help: "choose another text".into(),
                };
                check(&text).map_err(wrong)?;
                Ok(text)
            },
        )
    }

    /// A path, or as it stands a name that `is_known`, where no file has it.
    pub(crate) fn path_or_name(
        &mut self,
        key: &'static str,
        or: Or<String>,
        doc: &'static str,
        is_known: impl Fn(&str) -> bool,
    ) -> String {
        let about = About { doc, values: &|| "path or name in quotes".into() };
        self.leaf(
            key,
            or,
            about,
            |text| quoted(text),
            |reader, node| {
                let path = absolute(reader, node)?;
                let name = reader.item(node).string()?;
                Ok(if is_known(&name) && !Path::new(&path).is_file() { name } else { path })
            },
        )
    }

    /// A path or `None`.
    pub(crate) fn path_or_none(&mut self, key: &'static str, doc: &'static str) -> Option<String> {
        self.path_or(key, Or::Default(None), doc)
    }

    /// A path or `None`, where the default is not fixed.
    pub(crate) fn path_or(
        &mut self,
        key: &'static str,
        or: Or<Option<String>>,
        doc: &'static str,
    ) -> Option<String> {
        let show = some_text(|text: &String| quoted(text));
        let about = About { doc, values: &|| "path in quotes, or `None`".into() };
        self.leaf(key, or, about, show, |reader, node| {
            optional(node, |node| absolute(reader, node))
        })
    }

    /// One of an enum without fields.
    pub(crate) fn named<T: Named>(
        &mut self,
        key: &'static str,
        default: T,
        doc: &'static str,
    ) -> T {
        self.named_or(key, Or::Default(default), doc)
    }

    /// One of an enum without fields, where the default is not fixed.
    pub(crate) fn named_or<T: Named>(
        &mut self,
        key: &'static str,
        or: Or<T>,
        doc: &'static str,
    ) -> T {
        let names: Vec<&'static str> = T::ALL.iter().map(|(name, _)| *name).collect();
        let or = or.map(|default| {
            let index = T::ALL.iter().position(|(_, variant)| *variant == default);
            index.unwrap_or_else(|| unreachable!("{key} has a value without a name"))
        });
        self.choice(key, &names, or, doc, |index, _| T::ALL[index].1)
    }
}

fn whole_words(range: &RangeInclusive<u64>) -> String {
    format!("whole number from {} to {}", grouped(*range.start()), grouped(*range.end()))
}

fn whole<T: TryFrom<u64>>(reader: &Reader, node: &Node, range: &RangeInclusive<u64>) -> Parsed<T> {
    let value = reader.item(node).uint(range)?;
    T::try_from(value).map_err(|_| Complaint {
        message: format!("{value} does not fit this machine's word"),
        help: "choose a smaller number".into(),
    })
}

/// `None`, `Some(value)` or the plain value.
fn optional<T>(node: &Node, parse: impl FnOnce(&Node) -> Parsed<T>) -> Parsed<Option<T>> {
    match &node.kind {
        Kind::Tuple { name: Some(name), items } if name == "Some" => match items.as_slice() {
            [inner] => parse(inner).map(Some),
            _ => parse(node).map(Some),
        },
        Kind::Word(word) if word == "None" => Ok(None),
        _ => parse(node).map(Some),
    }
}

/// RON without `Some`: a config takes the plain value.
fn some_text<T>(show: impl Fn(&T) -> String) -> impl Fn(&Option<T>) -> String {
    move |value| value.as_ref().map_or_else(|| "None".into(), &show)
}

/// A path joined to the directory of its file, or to the working directory from `--set`.
pub(super) fn absolute(reader: &Reader, node: &Node) -> Parsed<String> {
    let text = reader.item(node).string()?;
    let complain = |why: &str| Complaint {
        message: format!("{why}, found {}", quoted(&text)),
        help: "write the path of a file, a directory or a glob".into(),
    };
    if text.is_empty() || text.contains('\0') {
        return Err(complain("expected a path"));
    }
    let base = match reader.sources.get(node.place.source).map(|source| &source.kind) {
        Some(SourceKind::File { dir: Some(dir) }) => dir.as_path(),
        Some(SourceKind::File { dir: None }) => return Ok(text),
        _ => Path::new(""),
    };
    let joined = std::path::absolute(base.join(&text))
        .map_err(|error| complain(&format!("the working directory is unknown ({error})")))?;
    joined.into_os_string().into_string().map_err(|_| complain("its directory is not UTF-8"))
}
