//! The config of a checkpoint against the one that goes on from it: what each key that differs means for the run.

use super::manifest::Seen;
use super::{Checkpoint, CheckpointError};
use crate::config::{Loaded, UpdateMode, load_stored};
use crate::data::Dataset;
use crate::train::build::update_mode;
use std::fmt;
use std::path::Path;

/// What a difference means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Nothing that training computes changes.
    Harmless,
    /// The same mathematics: sums may add in another order, or numbers be stored otherwise.
    Layout,
    /// Another experiment.
    Experiment,
}

/// A key whose values differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Dotted, of the config.
    pub key: String,
    /// (in the checkpoint, now), in RON.
    pub values: [String; 2],
    /// What it means.
    pub kind: Kind,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [was, is] = &self.values;
        write!(f, "{:<26} {was} -> {is}", self.key)
    }
}

/// How far a key reaches.
fn kind(key: &str) -> Kind {
    let section = key.split('.').next().unwrap_or(key);
    match (section, key) {
        ("name" | "sample", _) => Kind::Harmless,
        (_, "train.seed") => Kind::Experiment,
        ("train", _) => Kind::Harmless,
        ("device" | "parallel" | "offload" | "recompute", _)
        | ("partition_checkpoints" | "host_checkpoints", _)
        | (_, "batch.micro" | "precision") => Kind::Layout,
        _ => Kind::Experiment,
    }
}

/// From which update on, if from any, they are one step late.
fn delayed(loaded: &Loaded) -> Option<u64> {
    match update_mode(&loaded.config) {
        UpdateMode::Delayed { after_step } => Some(after_step),
        UpdateMode::Serial | UpdateMode::Overlapped => None,
    }
}

/// What differs between the run that wrote `checkpoint` and the one that `now` and `data` describe.
///
/// # Errors
/// [`CheckpointError::Broken`] when the stored config cannot be read.
pub fn differences(
    checkpoint: &Checkpoint,
    now: &Loaded,
    data: &Dataset,
) -> Result<Vec<Difference>, CheckpointError> {
    let stored = stored_config(checkpoint.path(), checkpoint.config())?;
    Ok(between((&stored, &checkpoint.manifest().data), (now, &Seen::of(data))))
}

/// The config that a checkpoint holds. Keys of another version are ignored with a warning.
pub(super) fn stored_config(path: &Path, ron: &str) -> Result<Loaded, CheckpointError> {
    let stored = load_stored(ron, &[]).map_err(|error| CheckpointError::Broken {
        path: path.to_owned(),
        problem: error.to_string(),
    })?;
    stored.warn_of_ignored(path);
    Ok(stored)
}

/// What differs between two runs and what they are trained on.
pub(super) fn between(
    (stored, seen): (&Loaded, &Seen),
    (now, sees): (&Loaded, &Seen),
) -> Vec<Difference> {
    let scaled = |loaded: &Loaded| loaded.config.precision == crate::config::Precision::Fp16;
    let idle = !scaled(stored) && !scaled(now);
    let find = |all: &Loaded, key: &str| {
        let found = all.origins.iter().find(|(name, ..)| name == key);
        found.map_or_else(|| "absent".to_owned(), |(_, value, _)| value.clone())
    };
    let mut keys: Vec<&String> = now.origins.iter().map(|(key, ..)| key).collect();
    let gone = stored.origins.iter().map(|(key, ..)| key).filter(|key| !keys.contains(key));
    let gone: Vec<&String> = gone.collect();
    keys.extend(gone);
    keys.retain(|key| !(idle && key.starts_with("loss_scale.")));
    // Where the tokens are known, it does not matter which files they came from.
    let same = seen.is_same(sees);
    let known_same = same && seen.hashes().and(sees.hashes()).is_some();
    let difference = |key: &String| {
        let values = [find(stored, key), find(now, key)];
        // Earlier versions called `Bytes` what is `Auto` now.
        let text = |value: &String| ["Auto", "Bytes"].contains(&value.as_str());
        let differs = values[0] != values[1] && !(key == "data.format" && values.iter().all(text));
        let kind = if known_same && key.starts_with("data.") { Kind::Harmless } else { kind(key) };
        differs.then(|| Difference { key: key.clone(), kind, values })
    };
    let mut found: Vec<Difference> = keys.into_iter().filter_map(difference).collect();
    // Delayed updates are other mathematics, from another step on too.
    if delayed(stored) != delayed(now) {
        let decides = |key: &str| key.starts_with("offload.update") || key == "offload.optimizer";
        let those = found.iter_mut().filter(|difference| decides(&difference.key));
        those.for_each(|difference| difference.kind = Kind::Experiment);
    }
    if !same {
        let key = "data (what the files hold)".to_owned();
        let values = [seen, sees].map(ToString::to_string);
        found.push(Difference { key, values, kind: Kind::Experiment });
    }
    found
}
