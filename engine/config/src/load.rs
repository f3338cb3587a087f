//! From a file and `--set` arguments to a checked [`Config`](super::Config).

use std::path::{Path, PathBuf};

use super::bundled;
use super::checks::{self, MachineRules};
use super::file::{LARGEST, read, utf8};
use super::reading::reader::Reader;
use super::reading::report::{ConfigError, Problem, Spot};
use super::reading::set;
use super::reading::source::{Kind as SourceKind, Place, Source};
use super::reading::tree::{self, Kind, Node};
use super::reading::value::Complaint;
use super::{BoxConfig, Config, GpuConfig, HostConfig, Loaded, box_schema, schema, told};

/// Reads the config at `path`, or from the standard input where that is `-`, applies the `--set` arguments, and checks everything.
///
/// All errors come out together. Relative paths in the file are relative to it, those in `sets`
/// to the working directory; both come out absolute.
pub fn load(path: &Path, sets: &[String]) -> Result<Loaded, ConfigError> {
    load_file(Reader::default(), path, sets, &Further::NONE)
}

/// Further trouble with a config, found outside of it: of each key what is wrong with its value, and what to do.
pub type Trouble<'a> = dyn Fn(&Config, &Valid<'_>) -> Vec<(&'static str, String, String)> + 'a;

/// What of a config is valid: keys that are not hold stand-ins.
#[expect(missing_debug_implementations, reason = "it is lent for two questions")]
pub struct Valid<'a> {
    reader: &'a Reader,
    config: &'a Config,
    of_machine: &'a MachineRules<'a>,
}

/// What a config is checked for besides its own rules.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "it has two functions")]
pub struct Further<'a> {
    /// Trouble that the caller finds.
    pub trouble: &'a Trouble<'a>,
    /// Rules of the machine that trains.
    pub of_machine: &'a MachineRules<'a>,
}

impl Further<'_> {
    /// Nothing.
    pub const NONE: Self = Further { trouble: &|_, _| Vec::new(), of_machine: &|_| Vec::new() };
}

impl Valid<'_> {
    /// Whether all of these keys have valid values.
    pub fn has(&self, keys: &[&str]) -> bool {
        self.reader.ok(keys)
    }

    /// Whether nothing is wrong with the config, rules between keys included.
    pub fn is_all(&self) -> bool {
        self.reader.problems.is_empty()
            && self.config.is_sound()
            && (self.of_machine)(self.config).is_empty()
    }
}

/// [`load`] for a search of layouts: ranks of the file's own that its box has no room for are no error.
///
/// # Errors
/// As [`load`].
pub fn load_to_search(
    path: &Path,
    sets: &[String],
    further: &Further<'_>,
) -> Result<Loaded, ConfigError> {
    load_file(Reader::to_search(), path, sets, further)
}

/// [`load`], with what is found `further` among the errors.
///
/// # Errors
/// As [`load`].
pub fn load_and_look(
    path: &Path,
    sets: &[String],
    further: &Further<'_>,
) -> Result<Loaded, ConfigError> {
    load_file(Reader::default(), path, sets, further)
}

fn load_file(
    reader: Reader,
    path: &Path,
    sets: &[String],
    further: &Further<'_>,
) -> Result<Loaded, ConfigError> {
    let stdin = path == Path::new("-");
    let name = if stdin { "stdin".to_owned() } else { path.display().to_string() };
    let text = if stdin { utf8(std::io::stdin().lock()) } else { read(path) };
    let text = text.map_err(|unreadable| {
        let Complaint { message, help } = unreadable;
        ConfigError::plain(&name, format!("cannot read the config `{name}`: {message}"), help)
    })?;
    let dir = path.parent().unwrap_or(Path::new(""));
    read_all(reader, &text, (&name, dir), sets, further)
}

/// [`load`] for a text that was read already; messages call it `name`, and its relative paths are
/// relative to `base_dir`.
pub fn load_str(
    text: &str,
    name: &str,
    base_dir: &Path,
    sets: &[String],
) -> Result<Loaded, ConfigError> {
    read_all(Reader::default(), text, (name, base_dir), sets, &Further::NONE)
}

/// [`load_str`] for a search of layouts.
///
/// # Errors
/// As [`load`].
pub fn load_text_to_search(
    text: &str,
    name: &str,
    base_dir: &Path,
    sets: &[String],
) -> Result<Loaded, ConfigError> {
    read_all(Reader::to_search(), text, (name, base_dir), sets, &Further::NONE)
}

/// The config that a checkpoint holds. It may be of another version or made up: keys that this version does not know are
/// ignored, and no file that it names is opened.
pub fn load_stored(text: &str, sets: &[String]) -> Result<Loaded, ConfigError> {
    read_all(
        Reader::of_a_checkpoint(),
        text,
        ("the checkpoint's config", Path::new("/")),
        sets,
        &Further::NONE,
    )
}

/// The config that a run has written, for who looks at what it trained. As with a checkpoint's, unknown keys are ignored,
/// with a warning, and no file that it names is opened: of a box only the name is there.
///
/// # Errors
/// As [`load`].
pub fn load_of_run(path: &Path) -> Result<Loaded, ConfigError> {
    let loaded = load_file(Reader::of_a_run(), path, &[], &Further::NONE)?;
    loaded.warn_of_ignored(path);
    Ok(loaded)
}

/// Unknown keys that are named; there may be very many.
const NAMED: usize = 10;

impl Loaded {
    /// Says which keys of a stored config, of `path`, this version does not know.
    pub fn warn_of_ignored(&self, path: &Path) {
        let all = self.ignored.len();
        if all > 0 {
            let keys = self.ignored[..all.min(NAMED)].join("`, `");
            let more =
                if all > NAMED { format!(" and {} more", all - NAMED) } else { String::new() };
            tracing::warn!(
                "{}: its config has `{keys}`{more}, which onebox {} does not know: ignored",
                path.display(),
                env!("CARGO_PKG_VERSION")
            );
        }
    }
}

fn read_all(
    mut reader: Reader,
    text: &str,
    (name, base_dir): (&str, &Path),
    sets: &[String],
    further: &Further<'_>,
) -> Result<Loaded, ConfigError> {
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
    let root = parse(&mut reader, text, (name, Some(base_dir)), &A_CONFIG);
    let mut tree = root.unwrap_or_else(empty);
    let parsed = reader.problems.is_empty();
    reader.report_duplicates(&tree, "");
    set::apply(&mut reader, &mut tree, sets);
    if !parsed {
        // What the file holds is unknown: more errors would be noise.
        return Err(finish(reader, name));
    }
    let config = reader.read(&tree, "a config", |s| schema::config(s, &stem(name)));
    let valid = Valid { reader: &reader, config: &config, of_machine: further.of_machine };
    let found = (further.trouble)(&config, &valid);
    for (key, message, help) in found {
        let spots = vec![reader.spot(key, String::new())];
        reader.problems.push(Problem { key: key.into(), message, help, spots });
        if key == "model.from" {
            // Rules say nothing of what such a folder lacks.
            reader.mark_bad(key);
        }
    }
    told::refuse_bytes(&mut reader, &config.model, &config.data);
    checks::all(&mut reader, &config, further.of_machine);
    if reader.problems.is_empty() {
        let (mut origins, source, ignored) = (reader.origins, text.to_string(), reader.ignored);
        origins.sort_by_key(|(key, ..)| schema::rank(key));
        return Ok(Loaded { config, origins, source, ignored, chosen: None });
    }
    Err(finish(reader, name))
}

/// Reads the description of a box: a file such as `configs/boxes/dgx2.ron`, or a bundled one by its name.
pub fn load_box(path: &Path) -> Result<BoxConfig, ConfigError> {
    let mut reader = Reader::default();
    let described = box_of(&mut reader, "", &path.display().to_string());
    if reader.problems.is_empty() {
        return Ok(described);
    }
    Err(finish(reader, &path.display().to_string()))
}

/// The box in the file at `path`, which is the value of `key`. Errors of the file are added to
/// the reader's, and the places of its keys stand below `key`.
pub(super) fn box_of(reader: &mut Reader, key: &str, path: &str) -> BoxConfig {
    let mut inner = Reader::default();
    let mut described = no_box();
    if reader.stored && !reader.boxless && reader.ok(&[key]) {
        reader.report_box(key, path);
    }
    if reader.boxless || !reader.ok(&[key]) {
        reader.mark_bad(&format!("{key}.gpus"));
        return described;
    }
    let (text, dir) = match bundled::text(path) {
        Some(text) => (Ok(text.to_owned()), None),
        None => (read(Path::new(path)), Some(Path::new(path).parent().unwrap_or(Path::new("")))),
    };
    match text {
        Ok(text) => {
            let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
            if let Some(root) = parse(&mut inner, text, (path, dir), &A_BOX) {
                inner.report_duplicates(&root, "");
                described =
                    inner.read(&root, "a box", |s| box_schema::described_box(s, &stem(path)));
            }
        }
        Err(Complaint { message, help }) => {
            let message = format!("cannot read the box `{path}`: {message}");
            let bundled = || format!("{help}; `onebox boxes` lists the boxes that need no file");
            let help = bundled::near(path).unwrap_or_else(bundled);
            let spots = reader.places.get(key).map(|at| Spot::At(*at, String::new()));
            let spots = spots.into_iter().collect();
            reader.mark_bad(&format!("{key}.gpus"));
            reader.problems.push(Problem { key: key.into(), message, help, spots });
        }
    }
    if !inner.problems.is_empty() {
        reader.mark_bad(&format!("{key}.gpus"));
    }
    reader.absorb(inner, key);
    described
}

/// What a file is to hold, and what to do with one that holds something else that onebox reads.
struct Wanted {
    /// `a config`
    what: &'static str,
    /// Keys of which every such file has one.
    own: &'static [&'static str],
    /// Those of the other kind of file.
    others: &'static [&'static str],
    /// What that other kind is.
    other: &'static str,
    /// Where that belongs.
    help: &'static str,
    /// Where the XML of a topology belongs.
    xml_help: &'static str,
}

const OF_A_CONFIG: &[&str] = &["model", "train"];
const OF_A_BOX: &[&str] = &["gpu_memory", "node_memory"];

const A_CONFIG: Wanted = Wanted {
    what: "a config",
    own: OF_A_CONFIG,
    others: OF_A_BOX,
    other: "the description of a box",
    help: "name a config, such as configs/quickstart.ron, and give the box by `--box FILE`",
    xml_help: "see it with `onebox topology --xml FILE`; a config names a box, and a box its topology",
};

const A_BOX: Wanted = Wanted {
    what: "a box",
    own: OF_A_BOX,
    others: OF_A_CONFIG,
    other: "a training config",
    help: "name the description of a box, such as configs/boxes/dgx2.ron; the config stands before `--box`",
    xml_help: "see it with `onebox topology --xml FILE`; the description of a box names it, as configs/boxes/dgx2.ron \
               does: `topology: \"FILE\"`",
};

impl Wanted {
    /// Whether a text that was parsed to `root` is of the other kind.
    fn refuses(&self, root: &Node) -> bool {
        let Kind::Struct { fields, .. } = &root.kind else { return false };
        let has = |keys: &[&str]| fields.iter().any(|field| keys.contains(&field.key.as_str()));
        has(self.others) && !has(self.own)
    }
}

/// An export of hwloc, or another XML.
fn is_xml(text: &str) -> bool {
    let text = text.trim_start();
    ["<?xml", "<!DOCTYPE", "<topology"].iter().any(|start| text.starts_with(start))
}

/// Adds a file's text and parses it; a syntax error is reported, and a file of another kind.
fn parse(
    reader: &mut Reader,
    text: &str,
    (name, dir): (&str, Option<&Path>),
    wanted: &Wanted,
) -> Option<Node> {
    let absolute = |dir: &Path| {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        std::path::absolute(dir).unwrap_or_else(|_| PathBuf::from(dir))
    };
    let kind = SourceKind::File { dir: dir.map(absolute) };
    let source = Source { kind, name: name.into(), text: text.into() };
    let index = reader.add(source);
    if text.len() as u64 > LARGEST {
        let help = "a config is a few kilobytes of RON: is this the right file?".into();
        let message = format!("the text is larger than {}", topology::format_bytes(LARGEST));
        let problem = Problem { key: String::new(), message, help, spots: Vec::new() };
        reader.problems.push(problem);
        return None;
    }
    let mut another = |other: &str, help: &str| {
        let message = format!("`{name}` is {other}, not {}", wanted.what);
        let problem = Problem { key: String::new(), message, help: help.into(), spots: Vec::new() };
        reader.problems.push(problem);
        None
    };
    if is_xml(text) {
        return another("an XML, as of hwloc's topologies", wanted.xml_help);
    }
    let parsed = reader.sources.get(index).map(|source| tree::parse(source, index, 0))?;
    match parsed {
        Ok(node) if wanted.refuses(&node) => another(wanted.other, wanted.help),
        Ok(node) => Some(node),
        Err(error) => {
            let help = syntax_help(text, &error);
            let complaint = Complaint { message: format!("not RON: {}", error.message), help };
            reader.report("", error.place, complaint);
            None
        }
    }
}

/// What usually lies behind a message of the RON parser.
fn syntax_help(text: &str, error: &tree::SyntaxError) -> String {
    let message = error.message.as_str();
    let first = text.trim_start().chars().next();
    let here = text.get(error.place.start..).unwrap_or_default();
    if let Some(format) = other_format(text) {
        return format!(
            "this looks like {format}, and a config is RON: `( model: (layers: 12, ...), train: (steps: 100) )`"
        );
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

/// Another format that people write configs in, told by the first line that is no comment.
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

fn stem(name: &str) -> String {
    let stem = Path::new(name).file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let stem = stem.filter(|stem| !stem.is_empty()).unwrap_or_else(|| "run".into());
    stem.replace(char::is_control, "_")
}

/// Stands in for a box that cannot be read.
fn no_box() -> BoxConfig {
    BoxConfig {
        name: String::new(),
        gpus: 0,
        gpu_memory: 0,
        numa_nodes: 0,
        node_memory: 0,
        topology: None,
        machine: None,
        machines: 1,
        network_gb_per_s: 0.0,
        gpu: GpuConfig::default(),
        host: HostConfig::default(),
        measured: None,
    }
}

/// A config without keys, standing in for one that cannot be parsed.
fn empty() -> Node {
    let place = Place { source: 0, start: 0, end: 0 };
    Node { place, kind: Kind::Struct { name: None, fields: Vec::new() } }
}

fn finish(mut reader: Reader, name: &str) -> ConfigError {
    reader.problems.sort_by_key(Problem::order);
    ConfigError { name: name.into(), sources: reader.sources, problems: reader.problems }
}
