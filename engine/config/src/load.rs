//! Loads a checked [`Config`](super::Config) from a file and `--set` arguments.

use std::path::Path;

use super::checks::MachineRules;
use super::file::{read_stream, utf8};
use super::keys::refusal;
use super::parse::{A_CONFIG, parse, stem};
use super::reading::{Complaint, ConfigError, ConfigReader, Node, Violation, set};
use super::{Adapter, Config, LoadedConfig, checks, model_folder, schema};
use files::foreign_text::foreign;
use files::path_text::PathText;

/// Reads the config at `path` (`-` is the standard input), applies the `--set` arguments, and
/// checks everything.
///
/// Returns all errors together. Relative paths in the file are relative to it, and relative paths
/// in `sets` to the working directory. Both become absolute.
pub fn load(path: &Path, sets: &[String]) -> Result<LoadedConfig, ConfigError> {
    load_and_look(path, sets, &Further::NONE)
}

/// Finds errors of a config for a caller outside of this crate. Each error has a key, a message and
/// a remedy.
pub type Trouble<'a> = dyn Fn(&Config, &ValidKeys<'_>) -> Vec<(&'static str, String, String)> + 'a;

/// Valid keys of a config; all other keys hold stand-ins.
#[expect(missing_debug_implementations, reason = "it is lent for two questions")]
pub struct ValidKeys<'a> {
    reader: &'a ConfigReader,
    config: &'a Config,
    of_machine: &'a MachineRules<'a>,
}

/// Checks of a config in addition to its own rules.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "it has two functions")]
pub struct Further<'a> {
    /// Finds the errors that the caller knows.
    pub trouble: &'a Trouble<'a>,
    /// Finds broken rules of the machine that trains.
    pub of_machine: &'a MachineRules<'a>,
    /// Whether a search of layouts chooses the ranks. Then the box may be too small for the ranks
    /// of the file.
    pub searched: bool,
    /// Config of the resumed run, if the config resumes one. Its adapters are in its checkpoint, so that
    /// `adapter.from` is not read.
    pub of_run: Option<&'a Path>,
}

impl Further<'_> {
    /// No further checks.
    pub const NONE: Self = Further {
        trouble: &|_, _| Vec::new(),
        of_machine: &|_| Vec::new(),
        searched: false,
        of_run: None,
    };
}

impl ValidKeys<'_> {
    /// Whether all of these keys have valid values.
    pub fn has(&self, keys: &[&str]) -> bool {
        self.reader.ok(keys)
    }

    /// Whether the config has no errors, including broken rules between keys.
    pub fn is_all(&self) -> bool {
        self.reader.problems.is_empty()
            && self.config.is_sound()
            && (self.of_machine)(self.config).is_empty()
    }
}

/// [`load`], with the errors of `further`.
///
/// # Errors
/// As [`load`].
pub fn load_and_look(
    path: &Path,
    sets: &[String],
    further: &Further<'_>,
) -> Result<LoadedConfig, ConfigError> {
    let of_run = further.of_run.map(Path::to_owned);
    load_file(ConfigReader { of_run, ..reader() }, path, sets, further)
}

fn load_file(
    reader: ConfigReader,
    path: &Path,
    sets: &[String],
    further: &Further<'_>,
) -> Result<LoadedConfig, ConfigError> {
    let stdin = path == Path::new("-");
    let name = if stdin { "stdin".to_owned() } else { path.display().to_string() };
    let text = if stdin { utf8(std::io::stdin().lock()) } else { read_stream(path) };
    let text = text.map_err(|unreadable| {
        let Complaint { message, help } = unreadable;
        ConfigError::plain(&name, format!("cannot read the config `{name}`: {message}"), help)
    })?;
    let dir = path.parent().unwrap_or(Path::new(""));
    read_all(reader, &text, &name, dir, sets, further)
}

/// [`load`] for a text in memory. Messages call it `name`, and its relative paths are relative to
/// `base_dir`.
pub fn load_str(
    text: &str,
    name: &str,
    base_dir: &Path,
    sets: &[String],
) -> Result<LoadedConfig, ConfigError> {
    load_str_and_look(text, name, base_dir, sets, &Further::NONE)
}

/// [`load_str`], with the errors of `further`.
///
/// # Errors
/// As [`load`].
pub fn load_str_and_look(
    text: &str,
    name: &str,
    base_dir: &Path,
    sets: &[String],
    further: &Further<'_>,
) -> Result<LoadedConfig, ConfigError> {
    read_all(reader(), text, name, base_dir, sets, further)
}

/// Reader of a user's own config.
fn reader() -> ConfigReader {
    ConfigReader { refusal: Some(refusal), ..ConfigReader::default() }
}

/// Loads the config of a checkpoint, which may be of another version or forged. Keys that this
/// version does not know are ignored, and no file that it names is opened.
pub fn load_stored(text: &str, sets: &[String]) -> Result<LoadedConfig, ConfigError> {
    let reader = ConfigReader { stored: true, ..ConfigReader::default() };
    read_all(reader, text, "the checkpoint's config", Path::new("/"), sets, &Further::NONE)
}

/// Loads the config of a run, for commands that inspect the run. Unknown keys are ignored with a
/// warning, and no file that it names is opened. Of a box only the name is known.
///
/// # Errors
/// As [`load`].
pub fn load_of_run(path: &Path) -> Result<LoadedConfig, ConfigError> {
    let loaded = stored_file(path)?;
    loaded.warn_of_ignored(path);
    Ok(loaded)
}

/// [`load_of_run`] without the warning.
fn stored_file(path: &Path) -> Result<LoadedConfig, ConfigError> {
    let reader = ConfigReader { stored: true, boxless: true, ..ConfigReader::default() };
    load_file(reader, path, &[], &Further::NONE)
}

/// Most unknown keys that the warning names; a config may have very many.
const NAMED: usize = 10;

impl LoadedConfig {
    /// Warns of the keys of a stored config, of `path`, that this version does not know.
    pub fn warn_of_ignored(&self, path: &Path) {
        let all = self.ignored.len();
        if all > 0 {
            let keys = self.ignored[..all.min(NAMED)].iter().map(|key| foreign(key).to_string());
            let keys = keys.collect::<Vec<_>>().join("`, `");
            let more =
                if all > NAMED { format!(" and {} more", all - NAMED) } else { String::new() };
            tracing::warn!(
                "{}: its config has `{keys}`{more}, which onebox {} does not know: ignored",
                PathText(path),
                env!("CARGO_PKG_VERSION")
            );
        }
    }
}

/// The config of the run that the config of `reader` resumes. A config of a run that cannot be read
/// is reported where the run is resumed.
fn config_of_run(reader: &ConfigReader) -> Option<Config> {
    Some(stored_file(reader.of_run.as_deref()?).ok()?.config)
}

/// The adapters of the run that the config of `reader` resumes.
pub(super) fn adapter_of_run(reader: &ConfigReader) -> Option<Adapter> {
    Some(config_of_run(reader)?.adapter)
}

/// Adds to the errors of `model.from` that the folder has the frozen weights of the resumed run.
fn name_base(reader: &mut ConfigReader) {
    let is_wrong = reader.problems.iter().any(|problem| problem.key == "model.from");
    let freezes = |run: Config| run.adapter != Adapter::None || !run.optimizer.frozen.is_empty();
    if !is_wrong || !config_of_run(reader).is_some_and(freezes) {
        return;
    }
    for problem in reader.problems.iter_mut().filter(|problem| problem.key == "model.from") {
        problem.message += "; the folder has the frozen weights of this run";
        problem.help = "name the new place of the folder: `--set model.from=DIR`".into();
    }
}

fn read_all(
    mut reader: ConfigReader,
    text: &str,
    name: &str,
    base_dir: &Path,
    sets: &[String],
    further: &Further<'_>,
) -> Result<LoadedConfig, ConfigError> {
    reader.searched = further.searched;
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
    let root = parse(&mut reader, text, name, Some(base_dir), &A_CONFIG);
    let mut tree = root.unwrap_or_else(Node::empty);
    let parsed = reader.problems.is_empty();
    reader.report_duplicates(&tree, "");
    set::apply(&mut reader, &mut tree, sets);
    if !parsed {
        // The content of the file is unknown, so further errors would be noise.
        return Err(reader.into_error(name));
    }
    let config = reader.read(&tree, "a config", |s| Config::read(s, &stem(name)));
    name_base(&mut reader);
    let valid = ValidKeys { reader: &reader, config: &config, of_machine: further.of_machine };
    let found = (further.trouble)(&config, &valid);
    for (key, message, help) in found {
        reader.refuse(Violation { message, help, values: vec![(key, String::new())] });
        if key == "model.from" {
            // The rules then do not also report what the folder lacks.
            reader.mark_bad(key);
        }
    }
    model_folder::refuse_bytes(&mut reader, &config.model, &config.data);
    checks::all(&mut reader, &config, further.of_machine);
    if reader.problems.is_empty() {
        let (mut origins, source) = (reader.origins, text.to_string());
        let (ignored, warnings) = (reader.ignored, reader.warnings);
        origins.sort_by_key(|(key, ..)| schema::rank(key));
        return Ok(LoadedConfig { config, origins, source, ignored, warnings, chosen: None });
    }
    Err(reader.into_error(name))
}
