//! Reads data sets: one path, or a list of entries with a path each.

use std::collections::BTreeSet;

use super::{
    Complaint, ConfigReader, Declaration, Interval, KeyDefault, Node, NodeKind, ParseResult,
    Section, absolute, is_name, quoted,
};
use crate::{Source, Sources, in_line};
use files::foreign_text::foreign;

/// Most data sets of a list.
const MOST: usize = 256;
/// Most bytes of a name.
const LONGEST: usize = 64;

/// Keys that an entry may have besides `path`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entries {
    /// `name` and `weight`.
    Weighed,
    /// `name`.
    Named,
}

impl Entries {
    const fn example(self) -> &'static str {
        match self {
            Self::Weighed => "[(path: \"a\", weight: 0.7), (path: \"b\", weight: 0.3)]",
            Self::Named => "[(name: \"code\", path: \"a\"), (name: \"prose\", path: \"b\")]",
        }
    }

    /// All keys of an entry, in order.
    const fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Weighed => &["name", "path", "weight"],
            Self::Named => &["name", "path"],
        }
    }

    fn help(self) -> String {
        format!("write a path in quotes, or a list: `{}`", self.example())
    }
}

impl Section<'_, '_> {
    /// Reads a path or a list of entries; `None` is allowed for entries without weights.
    pub(crate) fn sources(&mut self, key: Declaration, entries: Entries) -> Sources {
        let none = if entries == Entries::Named { ", or `None`" } else { "" };
        let values = format!("path in quotes, or `{}`{none}", entries.example());
        let show = |all: &Sources| match all.is_empty() && entries == Entries::Weighed {
            true => quoted(""),
            false => in_line(all),
        };
        self.leaf(key, KeyDefault::Default(Sources::default()), values, show, |reader, node| {
            sources(reader, node, entries)
        })
    }
}

fn sources(reader: &ConfigReader, node: &Node, entries: Entries) -> ParseResult<Sources> {
    match &node.kind {
        NodeKind::Word(word) if is_name(word, "None") && entries == Entries::Named => {
            Ok(Sources::default())
        }
        NodeKind::Tuple { name: Some(name), items } if name == "Some" && items.len() == 1 => {
            sources(reader, &items[0], entries)
        }
        NodeKind::List(items) => {
            let count = items.len();
            if !(1..=MOST).contains(&count) {
                let message = format!("expected 1 to {MOST} data sets, found {count}");
                return Err(Complaint { message, help: entries.help() });
            }
            let all: Vec<Source> = items
                .iter()
                .map(|item| source(reader, item, entries))
                .collect::<ParseResult<_>>()?;
            let mut names = BTreeSet::new();
            let mut all_names = all.iter().filter_map(|source| source.name.as_ref());
            if let Some(name) = all_names.find(|name| !names.insert(*name)) {
                let message = format!("two data sets are called {}", foreign(quoted(name)));
                return Err(Complaint { message, help: "give each a name of its own".into() });
            }
            match <[Source; 1]>::try_from(all) {
                // A single data set has all samples.
                Ok([one]) => Ok(Sources(vec![Source { weight: 1.0, ..one }])),
                Err(all) => Ok(Sources(all)),
            }
        }
        NodeKind::Struct { .. } | NodeKind::Other(_) => {
            let message = format!("expected data sets, found {}", reader.item(node).found());
            Err(Complaint { message, help: entries.help() })
        }
        _ => Ok(Sources::one(absolute(reader, node)?)),
    }
}

fn source(reader: &ConfigReader, node: &Node, entries: Entries) -> ParseResult<Source> {
    let complain = |message: String| Complaint { message, help: entries.help() };
    let NodeKind::Struct { name: None, fields } = &node.kind else {
        let found = reader.item(node).found();
        return Err(complain(format!("expected `(path: ..)` in a list, found {found}")));
    };
    let mut source = Source { name: None, path: String::new(), weight: 1.0 };
    for field in fields {
        let item = reader.item(&field.value);
        match field.key.as_str() {
            key if !entries.keys().contains(&key) => {
                let known: Vec<_> = entries.keys().iter().map(|key| format!("`{key}`")).collect();
                let known = known.join(" and ");
                let key = foreign(quoted(key));
                return Err(complain(format!("an entry has no key {key}; it has {known}")));
            }
            "path" => source.path = absolute(reader, &field.value)?,
            "weight" => {
                let of_weight = |why: Complaint| Complaint {
                    message: format!("its `weight` {}", why.message),
                    ..why
                };
                source.weight = item.float(Interval::above(0.0, 1e6)).map_err(of_weight)?;
            }
            _ => source.name = Some(item.string()?),
        }
    }
    if source.path.is_empty() {
        return Err(complain("an entry has no `path`".into()));
    }
    let is_bad =
        |name: &String| name.is_empty() || name.len() > LONGEST || name.contains(char::is_control);
    if let Some(name) = source.name.as_ref().filter(|name| is_bad(name)) {
        return Err(complain(format!(
            "{} is no name of 1 to {LONGEST} bytes",
            foreign(quoted(name))
        )));
    }
    Ok(source)
}
