//! Parses a text into its tree. Helps with syntax errors, and with files of another kind.

use super::file::LARGEST;
use super::reading::{
    Complaint, ConfigReader, ConfigSource, GivenValue, Node, NodeKind, Problem, SourceKind, answer,
    translation, tree,
};
use std::path::{Path, PathBuf};

/// Expected kind of a file, and help for a file of the other kind.
pub(super) struct FileKind {
    /// Name of this kind, such as `a config`.
    what: &'static str,
    /// Keys of this kind; every file of this kind has one of them.
    own: &'static [&'static str],
    /// Keys of the other kind.
    others: &'static [&'static str],
    /// Name of the other kind.
    other: &'static str,
    /// Remedy for a file of the other kind.
    help: &'static str,
    /// Remedy for the XML of a topology.
    xml_help: &'static str,
}

const OF_A_CONFIG: &[&str] = &["model", "train"];
const OF_A_BOX: &[&str] = &["gpu_memory", "node_memory"];

pub(super) const A_CONFIG: FileKind = FileKind {
    what: "a config",
    own: OF_A_CONFIG,
    others: OF_A_BOX,
    other: "the description of a box",
    help: "name a config, such as configs/quickstart.ron, and give the box by `--box FILE`",
    xml_help: "see it with `onebox topology --xml FILE`; a config names a box, and a box its topology",
};

pub(super) const A_BOX: FileKind = FileKind {
    what: "a box",
    own: OF_A_BOX,
    others: OF_A_CONFIG,
    other: "a training config",
    help: "name the description of a box, such as configs/boxes/dgx2.ron; the config stands before `--box`",
    xml_help: "see it with `onebox topology --xml FILE`; the description of a box names it, as configs/boxes/dgx2.ron \
               does: `topology: \"FILE\"`",
};

impl FileKind {
    /// Whether the text with the tree `root` is of the other kind.
    fn refuses(&self, root: &Node) -> bool {
        let NodeKind::Struct { fields, .. } = &root.kind else { return false };
        let has = |keys: &[&str]| fields.iter().any(|field| keys.contains(&field.key.as_str()));
        has(self.others) && !has(self.own)
    }
}

/// Whether a text is XML, such as an export of hwloc.
fn is_xml(text: &str) -> bool {
    let text = text.trim_start();
    ["<?xml", "<!DOCTYPE", "<topology"].iter().any(|start| text.starts_with(start))
}

/// Adds a file's text to the reader and parses it. Reports a syntax error, or a file of another
/// kind.
pub(super) fn parse(
    reader: &mut ConfigReader,
    text: &str,
    name: &str,
    dir: Option<&Path>,
    wanted: &FileKind,
) -> Option<Node> {
    let absolute = |dir: &Path| {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        std::path::absolute(dir).unwrap_or_else(|_| PathBuf::from(dir))
    };
    let kind = SourceKind::File { dir: dir.map(absolute) };
    let source = ConfigSource { kind, name: name.into(), text: text.into() };
    let index = reader.add(source);
    let mut refuse = |message: String, help: &str| {
        let help = help.into();
        reader.problems.push(Problem { key: String::new(), message, help, spots: Vec::new() });
        None
    };
    if text.len() as u64 > LARGEST {
        let message = format!("the text is larger than {}", topology::format_bytes(LARGEST));
        return refuse(message, "a config is a few kilobytes of RON: is this the right file?");
    }
    let is_other = |other: &str| format!("`{name}` is {other}, not {}", wanted.what);
    if is_xml(text) {
        return refuse(is_other("an XML, as of hwloc's topologies"), wanted.xml_help);
    }
    let parsed = reader.sources.get(index).map(|source| tree::parse(source, index, 0))?;
    match parsed {
        Ok(node) if wanted.refuses(&node) => refuse(is_other(wanted.other), wanted.help),
        Ok(node) => Some(node),
        Err(error) => {
            let help = syntax_help(text, &error);
            let complaint = Complaint { message: format!("not RON: {}", error.message), help };
            reader.report("", error.place, complaint);
            None
        }
    }
}

/// Help for the usual cause of a message of the RON parser.
fn syntax_help(text: &str, error: &tree::SyntaxError) -> String {
    let message = error.message.as_str();
    let first = text.trim_start().chars().next();
    let here = text.get(error.place.start..).unwrap_or_default();
    if let Some(format) = other_format(text) {
        return format!(
            "this looks like {format}, and a config is RON: `( model: (layers: 12, ...), train: (steps: 100) )`{}",
            translation(text)
        );
    }
    if let Some(answer) = dashed_key(text, error.place.start).and_then(|key| {
        answer(key, GivenValue::default()).map(|answer| format!("`{key}`: {answer}"))
    }) {
        return answer;
    }
    let help = match first {
        None => "the file is empty: write `( model: ( ... ), train: ( ... ) )`",
        Some('#') if !text.trim_start().starts_with("#!") => "comments start with `//`",
        Some(c) if c.is_alphabetic() || c == '-' => {
            "a config is one pair of parentheses around everything: `( model: ( ... ), ... )`"
        }
        _ if here.starts_with('#') => "comments start with `//`",
        _ if here.starts_with('=') || message.contains("colon") => {
            "between a key and its value stands `:`"
        }
        _ if here.starts_with(['.', '/', '-']) => "text stands in quotes: `train: \"my.txt\"`",
        _ if message.contains("closing `)`") || message.contains("comma") => {
            "before this a comma is missing, or a `)`"
        }
        _ if message.contains("identifier") => "a key is a plain word: `key: value`",
        _ if message.contains("end of RON") => "a `)` is missing at the end",
        _ if message.contains("string") => "close the string by `\"`",
        _ if message.contains("trailing") => "nothing may follow the last `)`",
        _ => "a config looks like `( model: (layers: 12, ...), train: (steps: 100) )`",
    };
    help.into()
}

/// A word with dashes at this byte of a text, such as an option of another tool; no key has dashes.
fn dashed_key(text: &str, at: usize) -> Option<&str> {
    let of_word = |c: char| c == '-' || c == '_' || c.is_ascii_alphanumeric();
    let (before, after) = text.split_at_checked(at)?;
    let start = before.rfind(|c| !of_word(c)).map_or(0, |end| end + 1);
    let end = at + after.find(|c| !of_word(c)).unwrap_or(after.len());
    text.get(start..end).filter(|word| word.contains('-'))
}

/// Name of another config format, recognized by the first line that is no comment.
fn other_format(text: &str) -> Option<&'static str> {
    let lines = text.lines().map(str::trim);
    let line = lines.filter(|line| !line.is_empty()).find(|line| !line.starts_with(['#', '/']))?;
    let word = |c: char| c.is_ascii_alphanumeric() || "_-.\"".contains(c);
    let end = line.find(|c| !word(c)).unwrap_or(line.len());
    let (key, rest) = line.split_at(end);
    let rest = rest.trim_start();
    if line.starts_with('{') {
        Some("JSON")
    } else if line.starts_with('[') && line.ends_with(']')
        || !key.is_empty() && rest.starts_with('=')
    {
        Some("TOML")
    } else if line == "---"
        || !key.is_empty() && (rest == ":" || rest.starts_with(": ") && !rest.starts_with(": ("))
    {
        Some("YAML")
    } else {
        None
    }
}

/// Name of a file without its extension; the default name of a config or a box.
pub(super) fn stem(name: &str) -> String {
    let stem = Path::new(name).file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let stem = stem.filter(|stem| !stem.is_empty()).unwrap_or_else(|| "run".into());
    stem.replace(char::is_control, "_")
}
