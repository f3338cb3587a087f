//! Reads the kinds of values that a section holds, with one method for each kind.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;

use files::foreign_text::foreign;
use files::hub::{self, HubModel, MissingSnapshot};
use files::names::is_there;

use super::{
    Complaint, ConfigReader, Declaration, Interval, KeyDefault, Node, NodeKind, ParseResult,
    Section, SourceKind, float_text, format_bytes, grouped, is_name, quoted,
};

impl Section<'_, '_> {
    /// Reads a whole number.
    pub(crate) fn uint<T: TryFrom<u64> + Default + Display>(
        &mut self,
        key: Declaration,
        range: RangeInclusive<u64>,
        or: KeyDefault<T>,
    ) -> T {
        let values = whole_words(&range);
        self.leaf(key, or, values, T::to_string, |reader, node| whole(reader, node, &range))
    }

    /// Reads a whole number; 0 is unknown.
    pub(crate) fn uint_or_unknown<T: TryFrom<u64> + Default + Display>(
        &mut self,
        key: Declaration,
        range: RangeInclusive<u64>,
    ) -> T {
        let (or, values) = (KeyDefault::Default(T::default()), whole_words(&range) + ", or 0");
        self.leaf(key, or, values, T::to_string, |reader, node| match &node.kind {
            NodeKind::Word(word) if word == "0" => Ok(T::default()),
            _ => whole(reader, node, &range).map_err(|mut complaint| {
                complaint.help += ", or 0: not known";
                complaint
            }),
        })
    }

    /// Reads a whole number or `None`.
    pub(crate) fn uint_or_none(
        &mut self,
        key: Declaration,
        range: RangeInclusive<u64>,
        or: KeyDefault<Option<usize>>,
    ) -> Option<usize> {
        let values = whole_words(&range) + ", or `None`";
        self.leaf(key, or, values, some_text(usize::to_string), |reader, node| {
            optional(node, |node| whole(reader, node, &range))
        })
    }

    /// Reads a finite number.
    pub(crate) fn float(&mut self, key: Declaration, within: Interval, or: KeyDefault<f32>) -> f32 {
        let values = format!("number {}", within.words());
        self.leaf(key, or, values, float_text, |reader, node| reader.item(node).float(within))
    }

    /// Reads a finite number or `None`.
    pub(crate) fn float_or_none(
        &mut self,
        key: Declaration,
        within: Interval,
        or: KeyDefault<Option<f32>>,
    ) -> Option<f32> {
        let values = format!("number {}, or `None`", within.words());
        self.leaf(key, or, values, some_text(float_text), |reader, node| {
            let float = |node: &Node| reader.item(node).float(within);
            let is_off = matches!(&node.kind, NodeKind::Word(word) if word.parse() == Ok(0.0));
            optional(node, float).map_err(|mut complaint| {
                complaint.help += if is_off { "; `None` switches it off" } else { ", or `None`" };
                complaint
            })
        })
    }

    /// Reads a finite number, or `Auto` as `None`; `Auto` is the default.
    pub(crate) fn float_or_auto(&mut self, key: Declaration, within: Interval) -> Option<f32> {
        let values = format!("number {}, or `Auto`", within.words());
        let show = |value: &Option<f32>| value.as_ref().map_or_else(|| "Auto".into(), float_text);
        self.leaf(key, KeyDefault::Default(None), values, show, |reader, node| match &node.kind {
            NodeKind::Word(word) if is_name(word, "Auto") => Ok(None),
            _ => reader.item(node).float(within).map(Some),
        })
    }

    /// Reads a list of finite numbers.
    pub(crate) fn floats(
        &mut self,
        key: Declaration,
        within: Interval,
        or: KeyDefault<Vec<f32>>,
    ) -> Vec<f32> {
        let values = format!("list of numbers {}", within.words());
        let show = |list: &Vec<f32>| format!("{list:?}");
        self.leaf(key, or, values, show, |reader, node| match &node.kind {
            NodeKind::List(items) => {
                items.iter().map(|item| reader.item(item).float(within)).collect()
            }
            _ => Err(Complaint {
                message: format!("expected a list of numbers, found {}", reader.item(node).found()),
                help: "write a list such as `[1.0, 1.5]`".into(),
            }),
        })
    }

    /// Reads a list of whole numbers.
    pub(crate) fn uints(
        &mut self,
        key: Declaration,
        range: RangeInclusive<u64>,
        or: KeyDefault<Vec<usize>>,
    ) -> Vec<usize> {
        let values = format!(
            "list of whole numbers from {} to {}",
            grouped(*range.start()),
            grouped(*range.end())
        );
        let show = |list: &Vec<usize>| format!("{list:?}");
        self.leaf(key, or, values, show, |reader, node| match &node.kind {
            NodeKind::List(items) => items.iter().map(|item| whole(reader, item, &range)).collect(),
            _ => Err(Complaint {
                message: format!(
                    "expected a list of whole numbers, found {}",
                    reader.item(node).found()
                ),
                help: "write a list such as `[0, 3]`".into(),
            }),
        })
    }

    /// Reads a list of globs; the default has none.
    pub(crate) fn globs(&mut self, key: Declaration) -> Vec<String> {
        let (or, values) = (KeyDefault::Default(Vec::new()), "list of globs".into());
        let show = |list: &Vec<String>| format!("{list:?}");
        self.leaf(key, or, values, show, |reader, node| match &node.kind {
            NodeKind::List(items) => items.iter().map(|item| reader.item(item).string()).collect(),
            _ => Err(Complaint {
                message: format!("expected a list of globs, found {}", reader.item(node).found()),
                help: "write a list such as `[\"embed_tokens*\", \"*.mlp.experts.*\"]`".into(),
            }),
        })
    }

    /// Reads `true` or `false`.
    pub(crate) fn flag(&mut self, key: Declaration, or: KeyDefault<bool>) -> bool {
        let values = "`true` or `false`".into();
        self.leaf(key, or, values, bool::to_string, |reader, node| reader.item(node).bool())
    }

    /// Reads a size in bytes, from 1 KiB to `most`.
    pub(crate) fn bytes(&mut self, key: Declaration, most: u64, or: KeyDefault<u64>) -> u64 {
        let show = |bytes: &u64| quoted(&format_bytes(*bytes));
        let values = format!("size such as `\"512MiB\"`, at most {}", format_bytes(most));
        self.leaf(key, or, values, show, |reader, node| reader.item(node).bytes(&(1 << 10..=most)))
    }

    /// Reads a string that `check` accepts.
    pub(crate) fn text(
        &mut self,
        key: Declaration,
        or: KeyDefault<String>,
        check: fn(&str) -> Result<(), &'static str>,
    ) -> String {
        self.leaf(
            key,
            or,
            "text in quotes".into(),
            |text| quoted(text),
            |reader, node| {
                let text = reader.item(node).string()?;
                let wrong = |why: &str| Complaint {
                    message: format!("{why}, found {}", foreign(quoted(&text))),
                    help: "choose another text".into(),
                };
                check(&text).map_err(wrong)?;
                Ok(text)
            },
        )
    }

    /// Reads a path. A name that `is_known` stays unchanged, unless there is a file of this name.
    pub(crate) fn path_or_name(
        &mut self,
        key: Declaration,
        or: KeyDefault<String>,
        is_known: impl Fn(&str) -> bool,
    ) -> String {
        self.leaf(
            key,
            or,
            "path or name in quotes".into(),
            |text| quoted(text),
            |reader, node| {
                let path = absolute(reader, node)?;
                let name = reader.item(node).string()?;
                Ok(if is_known(&name) && !Path::new(&path).is_file() { name } else { path })
            },
        )
    }

    /// Reads `None`, the path of a model's folder or `config.json`, or the name of a model in the
    /// cache of the Hugging Face hub, which becomes the path of its files. A stored config keeps
    /// the name.
    pub(crate) fn model_path(
        &mut self,
        key: Declaration,
        or: KeyDefault<Option<String>>,
    ) -> Option<String> {
        let values = "path or name `\"ORG/NAME\"` in quotes, or `None`";
        self.optional_text(key, or, values, model_path)
    }

    /// The path that key `inner` of the choice `outer` names, before the choice is read. Errors at the
    /// key then show its place. `None` if it names no path.
    pub(crate) fn named_path(&mut self, outer: &str, inner: &str) -> Option<String> {
        let field = self.group.fields.iter().find(|field| field.key == outer)?;
        let NodeKind::Struct { fields, .. } = &field.value.kind else { return None };
        let field = fields.iter().find(|field| field.key == inner)?;
        let path = match field.value.kind {
            NodeKind::Text | NodeKind::Bare => absolute(self.reader, &field.value).ok(),
            _ => None,
        };
        self.reader.places.insert(format!("{outer}.{inner}"), field.value.place);
        path
    }

    /// Reads a path or `None`.
    pub(crate) fn path(
        &mut self,
        key: Declaration,
        or: KeyDefault<Option<String>>,
    ) -> Option<String> {
        self.optional_text(key, or, "path in quotes, or `None`", absolute)
    }

    /// Reads `None`, or a text of which `read` makes the value. `values`: what the key takes.
    fn optional_text(
        &mut self,
        key: Declaration,
        or: KeyDefault<Option<String>>,
        values: &str,
        read: fn(&ConfigReader, &Node) -> ParseResult<String>,
    ) -> Option<String> {
        let text = some_text(|text: &String| quoted(text));
        self.leaf(key, or, values.into(), text, |reader, node| {
            optional(node, |node| read(reader, node))
        })
    }
}

fn whole_words(range: &RangeInclusive<u64>) -> String {
    format!("whole number from {} to {}", grouped(*range.start()), grouped(*range.end()))
}

fn whole<T: TryFrom<u64>>(
    reader: &ConfigReader,
    node: &Node,
    range: &RangeInclusive<u64>,
) -> ParseResult<T> {
    let value = reader.item(node).uint(range)?;
    T::try_from(value).map_err(|_| Complaint {
        message: format!("{value} does not fit this machine's word"),
        help: "choose a smaller number".into(),
    })
}

/// Parses `None`, `Some(value)` or the plain value.
fn optional<T>(node: &Node, parse: impl FnOnce(&Node) -> ParseResult<T>) -> ParseResult<Option<T>> {
    match &node.kind {
        NodeKind::Tuple { name: Some(name), items } if name == "Some" => match items.as_slice() {
            [inner] => parse(inner).map(Some),
            _ => parse(node).map(Some),
        },
        NodeKind::Word(word) if is_name(word, "None") => Ok(None),
        _ => parse(node).map(Some),
    }
}

/// Shows an option without `Some`, as a config writes it.
fn some_text<T>(show: impl Fn(&T) -> String) -> impl Fn(&Option<T>) -> String {
    move |value| value.as_ref().map_or_else(|| "None".into(), &show)
}

/// The path of a model's files; see [`Section::model_path`].
fn model_path(reader: &ConfigReader, node: &Node) -> ParseResult<String> {
    let path = absolute(reader, node)?;
    if reader.stored {
        return Ok(path);
    }
    let missing = |why: MissingSnapshot| Complaint { message: why.to_string(), help: why.help() };
    if is_there(Path::new(&path)) {
        let newest = hub::newest_snapshot(Path::new(&path)).map_err(missing)?;
        return Ok(newest.map_or(path, |newest| newest.display().to_string()));
    }
    let name = reader.item(node).string()?;
    let Some(model) = HubModel::parse(&name) else { return Ok(path) };
    let snapshot = model.snapshot(hub::cache_folder().as_deref()).map_err(missing)?;
    Ok(snapshot.display().to_string())
}

/// Joins a path to the directory of its file; a path of `--set` to the working directory.
pub(super) fn absolute(reader: &ConfigReader, node: &Node) -> ParseResult<String> {
    let text = reader.item(node).string()?;
    let complain = |why: &str| Complaint {
        message: format!("{why}, found {}", foreign(quoted(&text))),
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
