//! Merges `--set key=value` into the tree of the file before it is read.

use super::{
    Complaint, ConfigReader, ConfigSource, Field, GivenValue, Node, NodeKind, Problem, SourceKind,
    Span, answer, is_name, short, tree, words,
};

/// Keys with a string value; `--set` accepts their text without quotes.
const TEXT_KEYS: [&str; 8] = [
    "name",
    "data.train",
    "data.format.text",
    "data.system",
    "sample.prompt",
    "device.memory",
    "device.box",
    "model.layer_pattern",
];

/// Keys whose value is a string or `None`.
const TEXT_OR_NONE_KEYS: [&str; 4] =
    ["model.from", "data.validation", "data.tokenizer", "adapter.from"];

/// Most parts of a dotted key; every key has fewer.
const DEEPEST: usize = 8;

/// Prefix of the keys of columns, whose values are strings.
const COLUMN_KEYS: &str = "data.columns.";

/// Merges every `--set` in order, and reports errors.
pub(crate) fn apply(reader: &mut ConfigReader, root: &mut Node, sets: &[String]) {
    if !root.is_group() {
        return; // The reader reports it.
    }
    for set in sets {
        if let Some(path) = set.strip_prefix(BOX) {
            let source =
                ConfigSource { kind: SourceKind::Box, name: "--box".into(), text: path.into() };
            on_box(reader, root, source);
            continue;
        }
        let source =
            ConfigSource { kind: SourceKind::Set, name: "--set".into(), text: set.clone() };
        let index = reader.add(source.clone());
        let merged = assignment(&source, index).and_then(|Assignment { key, place, value }| {
            reader.report_duplicates(&value, key);
            put(root, key, place, value)
        });
        if let Err(problem) = merged {
            reader.problems.push(problem);
        }
    }
}

/// Prefix of an argument among the `--set` arguments that puts a config on a box, as `--box FILE`
/// of the command line does.
pub const BOX: &str = "--box=";

/// Replaces the device of the file by this box.
fn on_box(reader: &mut ConfigReader, root: &mut Node, source: ConfigSource) {
    let end = source.text.len();
    let place = Span { source: reader.add(source), start: 0, end };
    let path = Node { place, kind: NodeKind::Bare };
    let fields = vec![Field { key: "box".into(), key_place: place, value: path }];
    let value = Node { place, kind: NodeKind::Struct { name: Some("Sim".into()), fields } };
    let device = Field { key: "device".into(), key_place: place, value };
    if let Some(all) = fields_of(root) {
        all.retain(|field| field.key != "device");
        all.push(device);
    }
}

/// Both sides of the `=` in an argument.
struct Assignment<'a> {
    key: &'a str,
    place: Span,
    value: Node,
}

fn assignment(source: &ConfigSource, index: usize) -> Result<Assignment<'_>, Problem> {
    let text = source.text.as_str();
    let everything = Span { source: index, start: 0, end: text.len() };
    let Some((left, _)) = text.split_once('=') else {
        let help = "write `--set key=value`, for example `--set train.steps=100`".into();
        let complaint = Complaint { message: "`--set` without `=`".into(), help };
        return Err(Problem::at(text, everything, complaint));
    };
    let key = left.trim();
    let start = left.len() - left.trim_start().len();
    let key_place = Span { source: index, start, end: start + key.len() };
    let mut segments = key.split('.');
    if segments.clone().count() > DEEPEST || segments.any(str::is_empty) {
        let help = "write a dotted key such as `train.steps`".into();
        let complaint = Complaint { message: "this is no key".into(), help };
        return Err(Problem::at(key, key_place, complaint));
    }
    let value = value(source, index, key, left.len() + 1)?;
    Ok(Assignment { key, place: key_place, value })
}

/// Whether a text is a list of data sets, and not a glob that begins with a bracket.
fn is_list(text: &str) -> bool {
    let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).map(str::trim);
    inside.is_some_and(|inside| inside.is_empty() || inside.starts_with(['(', '"']))
}

/// Whether a text is a name with dashes.
fn is_dashed(text: &str) -> bool {
    let of_name = |c: char| c == '-' || c == '_' || c.is_ascii_alphanumeric();
    text.contains('-')
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(of_name)
}

/// Parses the tree right of the `=`.
fn value(source: &ConfigSource, index: usize, key: &str, start: usize) -> Result<Node, Problem> {
    let rest = source.text.get(start..).unwrap_or_default();
    let text = rest.trim();
    let from = start + rest.len() - rest.trim_start().len();
    let place = Span { source: index, start: from, end: from + text.len() };
    let in_quotes = ["\"", "r\"", "r#"].iter().any(|prefix| text.starts_with(prefix));
    let is_option = is_name(text, "None") || text.starts_with("Some(");
    let is_text = TEXT_KEYS.contains(&key)
        || key.starts_with(COLUMN_KEYS)
        || TEXT_OR_NONE_KEYS.contains(&key) && !is_option;
    if is_text && !in_quotes && !is_list(text) {
        return Ok(Node { place, kind: NodeKind::Bare });
    }
    if text.is_empty() {
        let help = format!("write a RON value after `{key}=`");
        let complaint = Complaint { message: "the value is empty".into(), help };
        return Err(Problem::at(key, place, complaint));
    }
    if is_dashed(text) {
        // A name such as `inverse-sqrt`, which RON cannot hold.
        return Ok(Node { place, kind: NodeKind::Word(text.into()) });
    }
    tree::parse(source, index, start).map_err(|error| {
        let name = key.rsplit('.').next().unwrap_or(key);
        if let Some(help) = answer(name, GivenValue { is_set: true, ..GivenValue::default() }) {
            let message = format!("unknown key: a config has no key `{}`", short(key));
            return Problem::at(key, error.place, Complaint { message, help });
        }
        let help = "the value is RON: a number, `true`, a variant, or a string in quotes \
                    (mind the quotes of the shell: --set 'device=Cpu(count: 2)')";
        let message = format!("the value is not RON: {}", error.message);
        let complaint = Complaint { message, help: help.into() };
        Problem::at(key, error.place, complaint)
    })
}

/// Stores a value at the dotted key `key`, which stands at `key_place`.
fn put(root: &mut Node, key: &str, key_place: Span, value: Node) -> Result<(), Problem> {
    let (mut node, mut start) = (root, key_place.start);
    for segment in key.split('.') {
        let place = Span { start, end: start + segment.len(), ..key_place };
        let Some(fields) = fields_of(node) else {
            let up = key.get(..start.saturating_sub(key_place.start + 1)).unwrap_or_default();
            let message = format!("`{up}` is a single value: it has no key `{segment}`");
            let help = format!("write {}", words::ticked(&[&format!("--set {up}=...")]));
            return Err(Problem::at(key, place, Complaint { message, help }));
        };
        let field = field_of(fields, segment, place, start == key_place.start);
        if place.end == key_place.end && !value.is_group() {
            *field = Field { key: segment.into(), key_place: place, value };
            return Ok(());
        }
        (node, start) = (&mut field.value, place.end + 1);
    }
    merge(node, value);
    Ok(())
}

/// Fields below a node; `None` for a single value. A variant without fields gets an empty list, and
/// the reader decides which fields are allowed.
fn fields_of(node: &mut Node) -> Option<&mut Vec<Field>> {
    if let NodeKind::Word(word) = &node.kind
        && word.starts_with(|c: char| c.is_ascii_alphabetic())
        && !["none", "nan", "inf", "true", "false"].contains(&&*word.to_lowercase())
    {
        node.kind = NodeKind::Struct { name: Some(word.clone()), fields: Vec::new() };
    }
    match &mut node.kind {
        NodeKind::Struct { fields, .. } => Some(fields),
        _ => None,
    }
}

/// Returns the field `key`, and adds a missing field. A new `device` is a `Cpu`.
fn field_of<'a>(fields: &'a mut Vec<Field>, key: &str, place: Span, top: bool) -> &'a mut Field {
    let found = fields.iter().position(|field| field.key == key);
    if found.is_none() {
        let name = (top && key == "device").then(|| "Cpu".to_string());
        let value = Node { place, kind: NodeKind::Struct { name, fields: Vec::new() } };
        fields.push(Field { key: key.into(), key_place: place, value });
    }
    let at = found.unwrap_or(fields.len() - 1);
    &mut fields[at]
}

/// Merges `value` into `node`: a group of keys is merged key by key, any other value replaces the
/// node.
fn merge(node: &mut Node, value: Node) {
    let NodeKind::Struct { name: None, fields: new } = value.kind else {
        *node = value;
        return;
    };
    let place = value.place;
    let Some(fields) = fields_of(node) else {
        *node = Node { place, kind: NodeKind::Struct { name: None, fields: new } };
        return;
    };
    for field in new {
        match fields.iter_mut().find(|old| old.key == field.key) {
            Some(old) if field.value.is_group() => merge(&mut old.value, field.value),
            Some(old) => *old = field,
            None => fields.push(field),
        }
    }
}
