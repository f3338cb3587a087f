//! Models as Hugging Face's transformers keeps them: a folder with `config.json` and safetensors files. Training starts
//! from one (`model.from`); `onebox checkpoint` exports to it and imports from it. Nothing of such a folder is trusted, and nothing of another model is bent into shape.

pub(crate) mod config_json;
pub(crate) mod folder;
mod names;
mod weights;
mod write;

use files::path_text::ShownPath;
pub use folder::Folder;
pub use weights::PretrainedWeights;
pub use write::{ExportError, ModelExport, Numbers, export};

use crate::RunFolder;
use crate::rewrite::{RewriteError, SealedCheckpoint, TensorSource, start};
use config::Config;
use data::Dataset;
use data::model_files::ModelFileError;
use layout::build::RankLayout;
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
    #[error(transparent)]
    File(#[from] ModelFileError),
    #[error("cannot write {}: {source}", path.shown())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} is not the model to import:{}", path.shown(), lines(problems))]
    OtherModel { path: PathBuf, problems: Vec<String> },
    #[error(transparent)]
    Rewrite(#[from] RewriteError),
}

/// Problems that a message shows; a file of nonsense has very many.
const SHOWN: usize = 50;

fn lines(problems: &[String]) -> String {
    let some = problems.iter().take(SHOWN).map(|line| format!("\n  {line}")).collect();
    match problems.len().saturating_sub(SHOWN) {
        0 => some,
        more => some + &format!("\n  and {more} more"),
    }
}

/// Writes the weights of `folder` into the folder `run` of a run's checkpoints, as one of step 0 with moments of zero.
///
/// # Errors
/// [`FolderError::OtherModel`] with every key of `config.json` that differs; what cannot be read or written.
pub fn import(
    folder: &Folder,
    config: &Config,
    built: &RankLayout,
    data: &Dataset,
    run: &RunFolder,
) -> Result<SealedCheckpoint, FolderError> {
    let places = folder.places(&built.decoder)?;
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
    Ok(start(config, built, data, run, TensorSource { begin: &begin, values: &values })?)
}

impl FolderError {
    fn refused(path: &Path, problem: impl Into<String>) -> Self {
        ModelFileError::refused(path, problem).into()
    }
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
