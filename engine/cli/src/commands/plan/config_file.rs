//! The config that `onebox plan --model --write` makes of its answer: short, with comments, for
//! `onebox train`.

use super::super::simulate::seconds;
use super::super::{CommandError, Failable, code, quoted_path, say, unwritten};
use crate::report::progress::si;
use config::{Config, LoadedConfig, Origin, load_str};
use data::chat::Template;
use data::model_files::ModelFiles;
use files::durable::create_new;
use files::foreign_text::foreign;
use files::path_text::ShownPath;
use predict::search::Layout;
use std::fmt::Write as _;
use std::io::{Error, ErrorKind, Write as _};
use std::path::{Path, PathBuf, absolute};
use topology::counted;

/// Stands for the path of the user's data.
const NO_DATA: &str = "YOUR-DATA.jsonl";

/// A config to write.
pub(super) struct ConfigFile<'a> {
    /// The path of the file.
    pub(super) path: &'a Path,
    /// Folder of the model, or its name in the Hugging Face cache.
    pub(super) model: PathBuf,
    /// Folder of the model.
    pub(super) folder: PathBuf,
    /// The user's data, if named.
    pub(super) data: Option<&'a Path>,
    /// The config that was planned, on its box.
    pub(super) planned: &'a Config,
    /// Name of the box.
    pub(super) box_name: &'a str,
    pub(super) layout: &'a Layout,
    /// All settings `key=value` of the layout.
    pub(super) sets: &'a [String],
}

/// Refuses a path that exists. Users edit configs, so onebox replaces none.
pub(super) fn may_create(path: &Path) -> Result<(), CommandError> {
    match path.symlink_metadata() {
        Ok(_) => Err(exists(path)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            match folder.is_dir() {
                true => Ok(()),
                false => {
                    let why = format!("there is no directory {}", folder.shown());
                    Err(unwritten(path, &Error::other(why)))
                }
            }
        }
        Err(error) => Err(unwritten(path, &error)),
    }
}

fn exists(path: &Path) -> CommandError {
    let path = path.shown();
    let why = format!(
        "--write {path}: it exists, and no file is replaced; give another name, or remove it"
    );
    CommandError::new(code::NO_RUN_DIR, why)
}

impl ConfigFile<'_> {
    /// Writes the file, and names the next commands.
    pub(super) fn write(&self) -> Result<(), CommandError> {
        let loaded = self.loaded()?;
        let text = self.text(settings(&loaded));
        self.check(&text, &loaded.config)?;
        let written = create_new(self.path).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => exists(self.path),
            _ => unwritten(self.path, &error),
        })?;
        let (shown, path) = (self.path.shown(), quoted_path(self.path));
        let edit = match text.contains(NO_DATA) {
            false => String::new(),
            true => format!("; its `data` line needs the path of your data in place of {NO_DATA}"),
        };
        say(&format!(
            "{shown}: written{edit}\n\nnext, try:\n  onebox config check {path}\n  onebox train {path}"
        ));
        Ok(())
    }

    /// The planned config on GPUs instead of a box, with the settings that the text gets.
    fn loaded(&self) -> Result<LoadedConfig, CommandError> {
        let from = text_of(&self.folder);
        let length = length(self.sets, 1);
        let text = format!("(model: (from: {from}, weights: Random), {length})");
        let sets = self.sets.iter().filter(|set| !set.starts_with("device")).cloned();
        let sets: Vec<String> = sets.chain(["device=Cuda".into()]).collect();
        load_str(&text, "the planned config", Path::new(""), &sets).fail_with(code::CONFIG)
    }

    fn text(&self, mut settings: Vec<Setting>) -> String {
        let Layout { tensor, data, micro, micro_batches, words, .. } = self.layout;
        let name = &self.planned.name;
        let mut out = format!(
            "// Fine-tunes {} on the box {}, as `onebox plan --model` proposes: {words};\n\
             // {}tok/s, a step in {} (simulated, not measured).\n(\n    name: {name:?},\n    device: Cuda,\n",
            foreign(name),
            foreign(self.box_name),
            si(self.layout.tokens_per_second),
            seconds(self.layout.step_seconds),
        );
        let mut section = |comment: &str, name: &str, keys: Vec<String>| {
            if !keys.is_empty() {
                let keys = keys.join(", ");
                let _ = writeln!(out, "\n    // {comment}\n    {name}: ({keys}),");
            }
        };
        let of_model =
            [vec![format!("from: {}", text_of(&self.model))], take(&mut settings, "model")];
        let comment = "The model, with the weights to start from. A sample has seq_len tokens.";
        section(comment, "model", of_model.concat());
        let (comment, keys) = self.data_keys(take(&mut settings, "data"));
        section(comment, "data", keys);
        let gpus = counted(tensor * data, "GPU");
        let comment = format!("{gpus}: tensor parallel {tensor} x data parallel {data}.");
        section(&comment, "parallel", take(&mut settings, "parallel"));
        let comment = format!(
            "A step of the optimizer takes {}. Each GPU computes {micro} at once, {}.",
            counted(self.planned.batch.global, "sample"),
            if *micro_batches == 1 { "once".into() } else { format!("{micro_batches} times") },
        );
        section(&comment, "batch", take(&mut settings, "batch"));
        let comment =
            "Where the parameters and the states of the optimizer are, and when the update runs.";
        section(comment, "offload", take(&mut settings, "offload"));
        let mut train = take(&mut settings, "train");
        train.retain(|key| key != "epochs: None");
        if !train.iter().any(|key| key.starts_with("steps:") || key.starts_with("epochs:")) {
            train.insert(0, "epochs: 1".into());
        }
        let comment = "How long. `onebox config show` lists all other keys with their defaults.";
        section(comment, "train", train);
        if !settings.is_empty() {
            out.push('\n');
        }
        while let Some((key, value)) = settings.first() {
            match key.split_once('.') {
                None => {
                    let _ = writeln!(out, "    {key}: {value},");
                    settings.remove(0);
                }
                Some((section, _)) => {
                    let section = section.to_owned();
                    let keys = take(&mut settings, &section).join(", ");
                    let _ = writeln!(out, "    {section}: ({keys}),");
                }
            }
        }
        out + ")\n"
    }

    /// The comment and the keys of the section `data`, with the keys that the user set.
    fn data_keys(&self, mut given: Vec<String>) -> (&'static str, Vec<String>) {
        let mut keys = Vec::new();
        let mut comment = "The data.";
        if let Some(data) = self.data {
            given.retain(|key| !key.starts_with("train:"));
            keys.push(format!(
                "train: {}",
                text_of(&absolute(data).unwrap_or_else(|_| data.into()))
            ));
        } else if !given.iter().any(|key| key.starts_with("train:")) {
            comment = "TO EDIT: the path of your data, and its format (see docs/data.md).";
            keys.push(format!("train: {NO_DATA:?}"));
        }
        let kind = self.data.and_then(Path::extension);
        let is_plain = kind.is_some_and(|kind| kind == "txt" || kind == "md");
        if !is_plain && !given.iter().any(|key| key.starts_with("format:")) {
            // Without a chat template, rows hold texts.
            let model_files = ModelFiles::open(&self.folder).map_err(|error| error.to_string());
            let format = match model_files.and_then(|model_files| Template::of(&model_files)) {
                Ok(_) => "format: Chat",
                Err(_) => "format: Jsonl(text: \"text\")",
            };
            keys.push(format.into());
        }
        keys.extend(given);
        (comment, keys)
    }

    /// Checks that the text means the planned config. The data and the weights need not be there.
    fn check(&self, text: &str, planned: &Config) -> Result<(), CommandError> {
        let is_given = self.sets.iter().any(|set| set.starts_with("data.format"));
        let format = (!is_given).then(|| "data.format=U32".to_owned());
        let sets: Vec<String> = format.into_iter().chain(["model.weights=Random".into()]).collect();
        let read = load_str(text, "the config to write", Path::new(""), &sets);
        let mut read = read.fail_with(code::INTERNAL)?.config;
        // These may be named otherwise, and change no layout.
        read.name.clone_from(&planned.name);
        read.model.from.clone_from(&planned.model.from);
        read.data = planned.data.clone();
        read.train = planned.train.clone();
        read.schedule = planned.schedule.clone();
        if read == *planned {
            return Ok(());
        }
        let why = format!("the config to write is not the planned one:\n{text}");
        Err(CommandError::new(code::INTERNAL, why))
    }
}

/// Section `train` for a config of a model. Its length is `steps`, or epochs if `sets` have them: a run
/// has only one of the two.
pub(super) fn length(sets: &[String], steps: u64) -> String {
    let is_epochs = |set: &String| {
        set.split_once('=').is_some_and(|(key, value)| match key.trim() {
            "train.epochs" => !value.trim().eq_ignore_ascii_case("none"),
            "train" => value.contains("epochs"),
            _ => false,
        })
    };
    match sets.iter().any(is_epochs) {
        true => "train: (epochs: 1)".into(),
        false => format!("train: (steps: {steps})"),
    }
}

/// A key and its value in RON.
type Setting = (String, String);

/// The settings of the layout and of the user.
fn settings(loaded: &LoadedConfig) -> Vec<Setting> {
    let set = |(key, value, origin): &(String, String, Origin)| {
        (*origin == Origin::Set && key != "device" && !key.starts_with("device."))
            .then(|| (key.clone(), value.clone()))
    };
    folded(loaded.origins.iter().filter_map(set).collect())
}

/// Settings with two parts of a key at most: `offload.optimizer.device_fraction` becomes a part of the
/// value of `offload.optimizer`, as in `Split(device_fraction: 0.25)`. A key with a value of its own
/// has all its parts in this value, as in `activations: Tiers(host_blocks: 3)`.
fn folded(mut all: Vec<Setting>) -> Vec<Setting> {
    let parts = |key: &str| key.matches('.').count() + 1;
    let is_inner = |all: &[Setting], key: &str| {
        let is_outer =
            |(outer, _): &Setting| key.rsplit_once('.').is_some_and(|(of, _)| of == outer);
        parts(key) > 2 || all.iter().any(is_outer)
    };
    loop {
        // The first of those with the most parts.
        let inner = (0..all.len()).rev().filter(|at| is_inner(&all, &all[*at].0));
        let Some(first) = inner.max_by_key(|at| parts(&all[*at].0)) else { return all };
        let (key, value) = all.remove(first);
        let Some((outer, last)) = key.rsplit_once('.') else { return all };
        match all.iter_mut().find(|(key, _)| key == outer) {
            Some((_, text)) => match text.strip_suffix(')') {
                Some(open) => *text = format!("{open}, {last}: {value})"),
                None => *text = format!("{text}({last}: {value})"),
            },
            None => all.push((outer.to_owned(), format!("({last}: {value})"))),
        }
    }
}

/// Removes the keys of a section, as they stand in it.
fn take(settings: &mut Vec<Setting>, section: &str) -> Vec<String> {
    let is_of = |key: &str| key.split_once('.').is_some_and(|(first, _)| first == section);
    let taken = settings.extract_if(.., |(key, _)| is_of(key));
    let in_section = |(key, value): Setting| format!("{}: {value}", &key[section.len() + 1..]);
    taken.map(in_section).collect()
}

/// A path as a text in RON.
fn text_of(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_keys_become_parts_of_their_values() {
        let all = [
            ("offload.optimizer", "Split"),
            ("offload.optimizer.device_fraction", "0.25"),
            ("model.rope.theta", "1e6"),
            ("model.rope.scaling", "Llama3"),
            ("model.rope.scaling.factor", "8.0"),
            ("model.rope.scaling.original_seq_len", "8192"),
            ("precision", "Bf16"),
            ("activations", "Tiers"),
            ("activations.gpu_blocks", "0"),
            ("activations.host_mlps", "Some(2)"),
            ("adapter.rank", "4"),
        ];
        let all = all.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let folded: Vec<String> =
            folded(all.into()).into_iter().map(|(key, value)| format!("{key}: {value}")).collect();
        let expected = [
            "offload.optimizer: Split(device_fraction: 0.25)",
            "precision: Bf16",
            "activations: Tiers(gpu_blocks: 0, host_mlps: Some(2))",
            "adapter.rank: 4",
            "model.rope: (theta: 1e6, scaling: Llama3(factor: 8.0, original_seq_len: 8192))",
        ];
        assert_eq!(folded, expected);
    }
}
