//! Models as Hugging Face's transformers keeps them: a folder with `config.json` and safetensors files. Training starts
//! from one (`model.from`); `onebox checkpoint` exports to it and imports from it. Nothing of such a folder is trusted, and nothing of another model is bent into shape.

mod beside;
mod config_json;
mod folder;
mod names;
mod tokenizers;
mod weights;
mod write;

pub use beside::Beside;
pub use folder::Folder;
pub(crate) use tokenizers::{tokenizer_file, unread_tokenizers};
pub use weights::Pretrained;
pub use write::{ExportError, Numbers, export};

use crate::checkpoint::RunFolder;
use crate::checkpoint::rewrite::{RewriteError, Sealed, Source, start};
use crate::config::{Config, ModelConfig};
use crate::data::Dataset;
use crate::train::build::Built;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

const CONFIG: &str = "config.json";
const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Why a folder cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum FolderError {
    #[error("cannot read {}: {source}{}", path.display(), local(path, source))]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} cannot be used: {problem}", path.display())]
    Refused { path: PathBuf, problem: String },
    #[error("{} is not the model to import:{}", path.display(), lines(problems))]
    OtherModel { path: PathBuf, problems: Vec<String> },
    #[error(transparent)]
    Rewrite(#[from] RewriteError),
}

/// For the name of a model in the place of a folder.
fn local(path: &Path, error: &io::Error) -> &'static str {
    let inside =
        path.parent().is_some_and(|folder| !folder.as_os_str().is_empty() && folder.is_dir());
    match error.kind() {
        io::ErrorKind::NotFound if !inside => {
            "; nothing is downloaded: name a folder on this machine, with config.json and model.safetensors"
        }
        _ => "",
    }
}

fn lines(problems: &[String]) -> String {
    problems.iter().map(|line| format!("\n  {line}")).collect()
}

/// Writes the weights of `folder` into the folder `run` of a run's checkpoints, as one of step 0 with moments of zero.
///
/// # Errors
/// [`FolderError::OtherModel`] with every key of `config.json` that differs; what cannot be read or written.
pub fn import(
    folder: &Folder,
    (config, built, data): (&Config, &Built, &Dataset),
    run: &RunFolder,
) -> Result<Sealed, FolderError> {
    let places = folder.places(&built.gpt)?;
    // The tensor that is being written: the files of all ranks ask for it in many pieces. Nobody asks while it changes.
    let now = RwLock::new(Vec::new());
    let begin = |tensor: usize| {
        // The one before makes room first.
        *now.write().unwrap_or_else(PoisonError::into_inner) = Vec::new();
        let values = folder.read(&places[tensor]);
        let values = values.map_err(|e| RewriteError::Source(e.to_string()))?;
        *now.write().unwrap_or_else(PoisonError::into_inner) = values;
        Ok(())
    };
    let values = |_, wanted: Range<usize>, out: &mut [f32]| {
        out.copy_from_slice(&now.read().unwrap_or_else(PoisonError::into_inner)[wanted]);
        Ok(())
    };
    Ok(start((config, built, data), run, Source { begin: &begin, values: &values })?)
}

impl FolderError {
    fn refused(path: &Path, problem: impl Into<String>) -> Self {
        Self::Refused { path: path.to_owned(), problem: problem.into() }
    }
}

pub(crate) fn check_index(json: &[u8]) -> Result<(), String> {
    folder::index(json).map(drop)
}

pub(crate) fn count_mismatches(json: &[u8], model: &ModelConfig) -> usize {
    config_json::mismatches(json, model).len()
}

/// (columns, rows) row-major, of `values` that are (rows, columns) row-major.
fn transposed(values: &[f32], (rows, columns): (usize, usize)) -> Vec<f32> {
    // Square blocks, so that both sides stay in the cache.
    const BLOCK: usize = 32;
    let mut out = vec![0.0; values.len()];
    let some = |(block, out): (usize, &mut [f32])| {
        let first = block * BLOCK;
        for row in (0..rows).step_by(BLOCK) {
            for (c, out) in out.chunks_mut(rows).enumerate() {
                for r in row..(row + BLOCK).min(rows) {
                    out[r] = values[r * columns + first + c];
                }
            }
        }
    };
    out.par_chunks_mut((BLOCK * rows).max(1)).enumerate().for_each(some);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_turned_twice_is_itself() {
        let values: Vec<f32> = (0..70 * 41).map(|i| i as f32).collect();
        let turned = transposed(&values, (70, 41));
        assert_eq!(turned[..3], [0.0, 41.0, 82.0]);
        assert_eq!(transposed(&turned, (41, 70)), values);
    }
}
