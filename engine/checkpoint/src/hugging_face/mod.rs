//! Models in the format of Hugging Face's transformers: a folder with `config.json` and safetensors
//! files. Training can start from such a folder (`model.from`); `onebox checkpoint` exports to it
//! and imports from it. The content is untrusted. A different model is refused and never converted.

pub(crate) mod config_json;
mod decoder_json;
mod experts_file;
mod export_error;
pub(crate) mod folder;
mod numbers;
mod parameters;
mod peft;
mod peft_tensors;
mod row_place;
mod tensor_codes;
mod tensors;
mod untrained;
pub(crate) mod weight_index;
mod weights;
mod write;

pub use export_error::ExportError;
use files::path_text::ShownPath;
pub use folder::Folder;
pub use numbers::Numbers;
pub use peft::{check_adapters, export_adapters, not_in_peft, read_adapters};
pub use tensor_codes::has_codes;
pub use untrained::UntrainedTensors;
pub use weights::PretrainedWeights;
pub use write::{ModelExport, export};

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

/// Reasons why a folder cannot be read or written.
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

/// Largest number of problems in a message; a corrupt file can have very many.
const SHOWN: usize = 50;

fn lines(problems: &[String]) -> String {
    let some = problems.iter().take(SHOWN).map(|line| format!("\n  {line}")).collect();
    match problems.len().saturating_sub(SHOWN) {
        0 => some,
        more => some + &format!("\n  and {more} more"),
    }
}

/// Writes the weights of `folder` into the checkpoint folder `run`: step 0, with zero moments.
///
/// # Errors
/// [`FolderError::OtherModel`] with every key of `config.json` that differs, or a file that cannot
/// be read or written.
pub fn import(
    folder: &Folder,
    config: &Config,
    built: &RankLayout,
    data: &Dataset,
    run: &RunFolder,
) -> Result<SealedCheckpoint, FolderError> {
    let places = folder.places(&built.decoder)?;
    // The current tensor. Files of all ranks read it in many pieces, but never while it changes.
    let now = RwLock::new(Vec::new());
    let begin = |tensor: usize| {
        // Free the previous tensor before the next is read.
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

/// The transpose of `values`: from (rows, columns) row-major to (columns, rows) row-major.
fn transposed(values: &[f32], (rows, columns): (usize, usize)) -> Vec<f32> {
    // Square blocks keep both sides in the cache.
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
    fn a_matrix_transposed_twice_is_itself() {
        let values: Vec<f32> = (0..70 * 41).map(|i| i as f32).collect();
        let result = transposed(&values, (70, 41));
        assert_eq!(result[..3], [0.0, 41.0, 82.0]);
        assert_eq!(transposed(&result, (41, 70)), values);
    }
}
