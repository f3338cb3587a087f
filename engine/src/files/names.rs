//! The names of a run's files, and how the directory of a run is told from others.

use super::directory::Directory;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where runs go that are told no directory.
pub(crate) const RUNS: &str = "runs";
/// The resolved config of the run.
pub(crate) const CONFIG: &str = "config.ron";
/// What the run has trained.
pub(crate) const WEIGHTS: &str = "weights.safetensors";
/// The checkpoint that a fork starts from, until it has one of its own.
pub(crate) const FORKED: &str = "forked-from";
/// What made tokens of its text.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// The name under which weights grow, beside their own.
pub(crate) const UNFINISHED: &str = ".weights.safetensors.tmp";
/// A line for each step, evaluation and end.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// A copy of a metrics file with a damaged line, beside it.
pub(crate) const DAMAGED: &str = "metrics.jsonl.damaged";

/// The lock of a run's directory.
pub(crate) const LOCK: &str = ".lock";

/// Of the folder of `model.from`, what a run keeps, in a folder of this name.
pub(crate) const KEPT: &str = "model.from";
/// The files in it, where they are there. Of `config.json` an export takes the special tokens; the rest of it onebox writes itself.
pub(crate) const FILES: [&str; 12] = [
    "config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
];

/// The folder of checkpoints in the directory of a run.
pub const CHECKPOINTS: &str = "checkpoints";

/// `step-00000120`
pub(crate) fn checkpoint_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step that a name says, when it is [`checkpoint_name`] with one of `endings`.
pub(crate) fn step_of(file: &str, endings: &[&str]) -> Option<u64> {
    let bare = endings.iter().find_map(|ending| file.strip_suffix(ending))?;
    let step = bare.strip_prefix("step-")?.parse().ok()?;
    (checkpoint_name(step) == bare).then_some(step)
}

/// Steps and names of what is called as a checkpoint with one of `endings`, oldest first; other names are not ours.
pub(crate) fn entries(folder: &Directory, endings: &[&str]) -> io::Result<Vec<(u64, String)>> {
    let named = |name: OsString| {
        let name = name.into_string().ok()?;
        step_of(&name, endings).map(|step| (step, name))
    };
    let mut found: Vec<_> = folder.names()?.into_iter().filter_map(named).collect();
    found.sort();
    Ok(found)
}

/// Whether `folder` holds checkpoints, whole or broken.
pub(crate) fn any(folder: &Path) -> bool {
    Directory::open(folder).is_ok_and(|folder| any_in(&folder))
}

fn any_in(folder: &Directory) -> bool {
    entries(folder, &[""]).is_ok_and(|all| !all.is_empty())
}

/// Whether the run directory `run` holds checkpoints, whole or broken.
pub(crate) fn any_of(run: &Directory) -> bool {
    run.leads_to(CHECKPOINTS).is_ok_and(|folder| any_in(&folder))
}

/// Where `path` leads, also when its end is not there yet.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let real = path.ancestors().find_map(|up| {
        let rest = path.strip_prefix(up).ok()?;
        up.canonicalize().ok().map(|up| up.join(rest))
    });
    real.unwrap_or(path)
}

/// Whether a run of onebox was locked in `dir`, by which its directory is told from any with files of such names.
pub(crate) fn is_run(dir: &Path) -> bool {
    is_there(&dir.join(LOCK)) && holds_run(dir)
}

pub(crate) fn holds_run(dir: &Path) -> bool {
    Directory::open(dir).is_ok_and(|dir| has_run(&dir))
}

pub(crate) fn has_run(dir: &Directory) -> bool {
    [METRICS, CONFIG].iter().any(|name| dir.has(name)) || any_of(dir)
}

/// A link that leads nowhere is there, too.
pub(crate) fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}
