//! Listing, verification and comparison for `onebox checkpoint`; training does not use them.

use super::evaluations::Evaluation;
use super::manifest::{FileEntry, Hash, MANIFEST, Manifest, STATES, TensorEntry};
use super::read::{check_files, opened};
use super::{Checkpoint, CheckpointError, Summary, TensorState, file_name, newest, unreadable};
use files::directory::Directory;
use files::foreign_text::foreign;
use files::names::{CHECKPOINTS, checkpoint_name, entries, step_of};
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};
use topology::counted;

/// Elements of a tensor per read.
const BLOCK: usize = 1 << 16;

/// Distance between a tensor in one checkpoint and the tensor of the same name in another.
#[derive(Clone, Debug, PartialEq)]
pub struct Distance {
    /// Name of the tensor.
    pub name: String,
    /// Largest absolute difference of each state, in the order of [`STATE_NAMES`]; the last state
    /// exists only with a delayed update. `None` means equal bits, `NaN` a difference that is not a
    /// number. `Err`: only one checkpoint has the tensor or a delayed update, or the shapes differ.
    pub states: Result<[Option<f64>; 4], String>,
}

/// Names of the states of a tensor.
pub const STATE_NAMES: [&str; 4] = STATES;

/// The checkpoints that `path` names, oldest first: `path` itself, or all checkpoints of a run
/// directory or a checkpoint folder.
///
/// # Errors
/// [`CheckpointError::Io`] if `path` is none of them or contains no checkpoint.
pub fn checkpoints_of(path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let is_there = |path: &Path| std::fs::symlink_metadata(path);
    if is_there(&path.join(MANIFEST)).is_ok() {
        return Ok(vec![path.to_owned()]);
    }
    is_there(path).map_err(unreadable(path))?;
    let inside = path.join(CHECKPOINTS);
    let folder = if inside.is_dir() { inside } else { path.to_owned() };
    let found = Directory::open(&folder).and_then(|folder| entries(&folder, &[""]));
    let found = found.map_err(unreadable(&folder))?;
    if found.is_empty() {
        let why =
            "there is no checkpoint in it: name a run that has saved one, or a checkpoint of it";
        return Err(unreadable(path)(io::Error::new(io::ErrorKind::NotFound, why)));
    }
    Ok(found.into_iter().map(|(_, name)| folder.join(name)).collect())
}

/// The newest complete checkpoint that `path` names, all bytes checked, and the faults of newer
/// checkpoints.
///
/// # Errors
/// If no checkpoint is complete: the error of the newest checkpoint.
pub fn open_newest(path: &Path) -> Result<(Checkpoint, Vec<CheckpointError>), CheckpointError> {
    let mut all = checkpoints_of(path)?;
    if let [one] = &all[..]
        && one == path
    {
        let folder = opened(path)?;
        let step = Summary::within(&folder, step_in_name(path))?.manifest.step;
        return Checkpoint::within(&folder, step).map(|found| (found, Vec::new()));
    }
    let newest_path = all.pop().unwrap_or_else(|| path.to_owned());
    let folder = newest_path.parent().unwrap_or(path);
    let (found, broken) = newest(folder)?;
    let mut why: Vec<CheckpointError> = broken.into_iter().map(|(_, why)| why).collect();
    match found {
        Some(found) => Ok((found, why)),
        None => Err(why.swap_remove(0)),
    }
}

/// A choice among the checkpoints of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointChoice {
    /// The best checkpoint that the run has kept, or else the newest.
    Best,
    /// The newest checkpoint.
    Newest,
    /// The checkpoint of a step.
    Step(u64),
}

/// Why a checkpoint was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChoiceReason {
    /// It has the least validation loss of those that the run has saved.
    Best(Evaluation),
    /// It is the newest complete one.
    Newest,
    /// The user has named it.
    Named,
}

/// An opened checkpoint, the reason for it, and faults of newer checkpoints.
#[derive(Debug)]
pub struct ChosenCheckpoint {
    /// The checkpoint, all bytes checked.
    pub checkpoint: Checkpoint,
    /// Why it was chosen.
    pub reason: ChoiceReason,
    /// Faults of newer checkpoints.
    pub broken: Vec<CheckpointError>,
}

/// Opens the checkpoint that `choice` means among those that `path` names.
///
/// # Errors
/// The checkpoint cannot be used, or does not exist.
pub fn open_chosen(
    path: &Path,
    choice: CheckpointChoice,
) -> Result<ChosenCheckpoint, CheckpointError> {
    let all = checkpoints_of(path)?;
    let is_one = matches!(&all[..], [one] if one == path);
    let (best, mut faults) = match choice {
        CheckpointChoice::Best if !is_one => best_of(&all)?,
        _ => (None, Vec::new()),
    };
    let step = match (choice, best) {
        (CheckpointChoice::Step(step), _) if !is_one => Some((step, ChoiceReason::Named)),
        (_, Some(best)) => Some((best.step, ChoiceReason::Best(best))),
        _ => None,
    };
    let Some((step, reason)) = step else {
        let (checkpoint, broken) = open_newest(path)?;
        let reason = if is_one { ChoiceReason::Named } else { ChoiceReason::Newest };
        return Ok(ChosenCheckpoint { checkpoint, reason, broken });
    };
    let folder = all.last().and_then(|newest| newest.parent()).unwrap_or(path);
    let checkpoint = Checkpoint::open(&folder.join(checkpoint_name(step)), step)?;
    faults.retain(|_| reason != ChoiceReason::Named);
    Ok(ChosenCheckpoint { checkpoint, reason, broken: faults })
}

/// The best checkpoint by the newest of `all` whose manifest is intact, and faults of newer
/// checkpoints.
///
/// # Errors
/// The system cannot read a manifest, which may still be intact.
pub fn best_of(
    all: &[PathBuf],
) -> Result<(Option<Evaluation>, Vec<CheckpointError>), CheckpointError> {
    let mut faults = Vec::new();
    for path in all.iter().rev() {
        match Summary::read(path) {
            Ok(summary) => return Ok((summary.best(), faults)),
            Err(error) if error.is_of_the_system() => return Err(error),
            Err(error) => faults.push(error),
        }
    }
    Ok((None, faults))
}

/// The step in a folder's name; a copy of a checkpoint may have any other name.
fn step_in_name(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    step_of(name, &[""])
}

/// Checks every byte of the checkpoint `path`; returns an error for each damaged file.
pub fn verify(path: &Path) -> Vec<CheckpointError> {
    let checked = opened(path).and_then(|folder| {
        let summary = Summary::within(&folder, step_in_name(path))?;
        let files = check_files(&folder, &summary.manifest).into_iter().filter_map(Result::err);
        Ok(files.chain(summary.check_cover().err()).collect())
    });
    checked.unwrap_or_else(|error| vec![error])
}

impl Summary {
    /// Reads the manifest of the checkpoint `path`.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], but only for the manifest.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        Self::within(&opened(path)?, step_in_name(path))
    }

    /// The best checkpoint of the run up to this one, if the run keeps it.
    pub fn best(&self) -> Option<Evaluation> {
        self.manifest.evaluations.and_then(|seen| seen.best())
    }

    /// Hash of the weights over which the run trains adapters; `None` if it has none, or if they are
    /// random.
    pub const fn base(&self) -> Option<&Hash> {
        self.manifest.base.as_ref()
    }

    /// Bytes of all files except the manifest.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// Number of ranks' files.
    pub const fn num_files(&self) -> usize {
        self.manifest.files.len()
    }

    /// The tensors, in the order of the model.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.manifest.tensors
    }

    /// Steps, tokens, data and decisions as lines: (label, text).
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let Manifest { step, tokens, onebox, format, control, data, .. } = &self.manifest;
        let mut lines = vec![
            ("step", format!("{step}, trained on {}; {control}", counted(tokens, "token"))),
            ("written by", format!("onebox {}, format {format}", foreign(onebox))),
            ("data", data.to_string()),
        ];
        if let Ok(Some(choices)) = self.manifest.matmul_choices() {
            let (count, machine) = (counted(choices.len(), "choice"), foreign(choices.machine()));
            lines.push(("matmuls", format!("{count} by the clock, for {machine}")));
        }
        lines
    }

    /// The manifest as JSON, without the hashes of files and ranges.
    pub fn json(&self) -> Value {
        let file = |(number, file): (usize, &FileEntry)| json!({ "name": file_name(number), "bytes": file.bytes });
        let Manifest { step, tokens, onebox, format, control, data, config, files, .. } =
            &self.manifest;
        let tensor = |t: &TensorEntry| json!({ "name": t.name, "shape": t.shape, "elements": t.num_elements(), "files": t.files() });
        let evaluation = |seen: Evaluation| json!({ "step": seen.step, "loss": seen.loss() });
        let evaluations = self.manifest.evaluations.map(|seen| {
            json!({
                "best": seen.best().map(evaluation), "least": seen.least().map(evaluation),
                "without_improvement": seen.without_improvement(),
            })
        });
        let mut json = json!({
            "path": self.path, "step": step, "tokens": tokens, "format": format, "onebox": onebox,
            "bytes": self.bytes(), "control": control, "data": data, "config": config,
            "files": files.iter().enumerate().map(file).collect::<Vec<_>>(),
            "tensors": self.tensors().iter().map(tensor).collect::<Vec<_>>(),
        });
        if let Some(evaluations) = evaluations {
            json["evaluations"] = evaluations;
        }
        if !self.manifest.matmuls.is_empty() {
            json["matmuls"] = json!(self.manifest.matmuls);
        }
        if let Some(base) = self.base() {
            json["base"] = json!(base);
        }
        json
    }
}

/// Compares all states of each tensor of both checkpoints, and passes each result to `tell`.
///
/// # Errors
/// The file that cannot be read.
pub fn distances(
    a: &Checkpoint,
    b: &Checkpoint,
    tell: &mut dyn FnMut(Distance),
) -> Result<(), CheckpointError> {
    let (there, saved) = (&b.manifest().tensors, a.manifest().states().len());
    for (here, tensor) in a.manifest().tensors.iter().enumerate() {
        let found = there.iter().position(|other| other.name == tensor.name);
        let states = match found {
            None => Err("only in the first".into()),
            Some(i) if there[i].shape != tensor.shape => {
                Err(format!("{:?} and {:?}", tensor.shape, there[i].shape))
            }
            Some(_) if a.has_late_update() != b.has_late_update() => {
                Err("an update waits in one of them only".into())
            }
            Some(i) => {
                let mut states = [None; 4];
                for (state, difference) in states.iter_mut().enumerate().take(saved) {
                    let in_a = TensorState { tensor: here, state };
                    let in_b = TensorState { tensor: i, state };
                    *difference = largest_difference(a, in_a, b, in_b, tensor.num_elements())?;
                }
                Ok(states)
            }
        };
        tell(Distance { name: tensor.name.clone(), states });
    }
    let first = &a.manifest().tensors;
    for tensor in there.iter().filter(|t| first.iter().all(|other| other.name != t.name)) {
        tell(Distance { name: tensor.name.clone(), states: Err("only in the second".into()) });
    }
    Ok(())
}

/// Largest absolute difference of a state; `None` if all bits are equal.
fn largest_difference(
    a: &Checkpoint,
    in_a: TensorState,
    b: &Checkpoint,
    in_b: TensorState,
    len: usize,
) -> Result<Option<f64>, CheckpointError> {
    let (a, b) = (a.reader(), b.reader());
    let (mut x, mut y) = (vec![0.0f32; BLOCK.min(len)], vec![0.0f32; BLOCK.min(len)]);
    let mut difference = None;
    for from in (0..len).step_by(BLOCK) {
        let n = BLOCK.min(len - from);
        a.read(in_a, from..from + n, &mut x[..n])?;
        b.read(in_b, from..from + n, &mut y[..n])?;
        for (x, y) in x[..n].iter().zip(&y[..n]).filter(|(x, y)| x.to_bits() != y.to_bits()) {
            let d = (f64::from(*x) - f64::from(*y)).abs();
            let most = difference.unwrap_or(0.0);
            difference = Some(if d > most || d.is_nan() { d } else { most });
            if d.is_nan() {
                return Ok(difference);
            }
        }
    }
    Ok(difference)
}
