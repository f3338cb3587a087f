//! Checkpoints: `RUN/checkpoints/step-00000120/`, a safetensors file of each rank's fp32 states and a `MANIFEST` that
//! says which elements of which whole tensors they are. Nothing in it knows the layout of ranks, so any other can go on.
//!
//! Invariant: a directory named `step-N` is whole and on the disk. It grows as `step-N.tmp` and is renamed when
//! every byte is there; it leaves as `step-N.old`.

mod compare;
mod folder;
pub(crate) mod header;
pub mod inspect;
pub(crate) mod manifest;
pub(crate) mod read;
pub mod rewrite;
mod save;
mod span;
mod write;

pub use compare::{Difference, Kind, differences};
pub use folder::newest;
pub(crate) use folder::{any, newest_until, remove_after, remove_all, set_aside};
pub use read::Checkpoint;
pub(crate) use save::Saver;

use std::io;
use std::path::{Path, PathBuf};

/// In the run directory.
pub const FOLDER: &str = "checkpoints";

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It is not there, or cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// A file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is not what was written.
    #[error("{} is broken: {problem}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// With the tensor, where it is one's.
        problem: String,
    },
    /// It is sound and of another model.
    #[error("{} is of another model: {problem}", path.display())]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// The first tensor that differs.
        problem: String,
    },
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Io { path: path.to_owned(), source }
}

/// Name of a rank's file.
fn file_name(number: usize) -> String {
    format!("rank-{number:05}.safetensors")
}
