//! Names of a run's files, and checks whether a directory belongs to a run.

use super::directory::Directory;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folder of runs whose directory is not given.
pub const RUNS: &str = "runs";
/// The resolved config of the run.
pub const CONFIG: &str = "config.ron";
/// The trained weights.
pub const WEIGHTS: &str = "weights.safetensors";
/// The checkpoint from which a fork starts, until the fork has its own checkpoint.
pub const FORKED: &str = "forked-from";
/// The tokenizer of the run's text.
pub const TOKENIZER: &str = "tokenizer.json";
/// The settings of a tokenizer, for transformers.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Temporary name of the weights file while it is written, in the same folder.
pub const UNFINISHED: &str = ".weights.safetensors.tmp";
/// File with a line for each step, evaluation and end.
pub const METRICS: &str = "metrics.jsonl";

/// A copy of a metrics file with a damaged line, in the same folder.
pub const DAMAGED: &str = "metrics.jsonl.damaged";

/// The lock file of a run's directory.
pub const LOCK: &str = ".lock";

/// Folder in the run's directory for files that the run copies from the folder of `model.from`.
pub const KEPT: &str = "model.from";
/// The copied files, if they exist. An export takes only special tokens from this `config.json`.
pub const FILES: [&str; 14] = [
    "config.json",
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
];

/// File in the same folder that names the tensors which the run does not train, and their folder.
pub const UNTRAINED: &str = "untrained.json";

/// Settings of an adapter in a folder of PEFT.
pub const CONFIG_OF_ADAPTER: &str = "adapter_config.json";
/// Factors of an adapter in a folder of PEFT.
pub const WEIGHTS_OF_ADAPTER: &str = "adapter_model.safetensors";

/// File in the same folder that says whether the experts of the run's model were fused.
pub const EXPERTS: &str = "experts.json";

/// Files of onebox in the folder [`KEPT`], beside [`FILES`].
pub const OWN: [&str; 2] = [UNTRAINED, EXPERTS];

/// The folder of checkpoints in a run's directory.
pub const CHECKPOINTS: &str = "checkpoints";

/// The same folder while a command writes all checkpoints of a new run. It gets the name
/// [`CHECKPOINTS`] when all are complete.
pub const UNFINISHED_CHECKPOINTS: &str = ".checkpoints.tmp";

/// The name of a checkpoint, for example `step-00000120`.
pub fn checkpoint_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step in a file name that is [`checkpoint_name`] with one of `endings`.
pub fn step_of(file: &str, endings: &[&str]) -> Option<u64> {
    endings.iter().find_map(|ending| {
        let bare = file.strip_suffix(ending)?;
        let step = bare.strip_prefix("step-")?.parse().ok()?;
        (checkpoint_name(step) == bare).then_some(step)
    })
}

/// Steps and names of the entries named [`checkpoint_name`] and one of `endings`, oldest first.
pub fn entries(folder: &Directory, endings: &[&str]) -> io::Result<Vec<(u64, String)>> {
    let named = |name: OsString| {
        let name = name.into_string().ok()?;
        step_of(&name, endings).map(|step| (step, name))
    };
    let mut found: Vec<_> = folder.names()?.into_iter().filter_map(named).collect();
    found.sort();
    Ok(found)
}

/// Whether `folder` holds checkpoints, complete or broken.
pub fn any(folder: &Path) -> bool {
    Directory::open(folder).is_ok_and(|folder| any_in(&folder))
}

fn any_in(folder: &Directory) -> bool {
    entries(folder, &[""]).is_ok_and(|all| !all.is_empty())
}

/// Whether the run directory `run` holds checkpoints, complete or broken.
pub fn any_of(run: &Directory) -> bool {
    run.leads_to(CHECKPOINTS).is_ok_and(|folder| any_in(&folder))
}

/// Absolute path to which `path` leads. Its last parts need not exist.
pub fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let real = path.ancestors().find_map(|up| {
        let rest = path.strip_prefix(up).ok()?;
        up.canonicalize().ok().map(|up| up.join(rest))
    });
    real.unwrap_or(path)
}

/// Whether `dir` is a run's directory: it has files of a run and also the lock file.
pub fn is_run(dir: &Path) -> bool {
    is_there(&dir.join(LOCK)) && holds_run(dir)
}

/// Whether `dir` has files of a run.
pub fn holds_run(dir: &Path) -> bool {
    Directory::open(dir).is_ok_and(|dir| has_run(&dir))
}

/// Whether the open directory `dir` has files of a run: metrics, a config, or checkpoints.
pub fn has_run(dir: &Directory) -> bool {
    [METRICS, CONFIG].iter().any(|name| dir.has(name)) || any_of(dir)
}

/// Whether `path` exists. A link that leads nowhere counts too.
pub fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}
