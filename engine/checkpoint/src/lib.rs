//! Checkpoints: `RUN/checkpoints/step-00000120/`, a safetensors file of each rank's fp32 states and a `MANIFEST` that
//! says which elements of which whole tensors they are. Nothing in it knows the layout of ranks, so any other can go on.
//!
//! Invariant: a directory named `step-N` is whole and on the disk. It grows as `step-N.tmp` and is renamed when
//! every byte is there; it leaves as `step-N.old`.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod compare;
pub mod disk_space;
pub mod folder;
pub mod header;
pub mod hugging_face;
pub mod inspect;
pub mod manifest;
pub mod parsers;
pub mod read;
pub mod rewrite;
pub mod rollback;
mod run_folder;
pub mod save_progress;
mod span;
pub mod write;

pub use compare::{Difference, differences_of};
pub use disk_space::room;
use files::path_text::ShownPath;
pub use folder::{
    gone, newest, newest_name, newest_step_until, newest_until, open_named, open_step,
    remove_after, remove_all, set_aside, sizes,
};
pub use read::{Checkpoint, CheckpointReader, Summary, TensorState};
pub use run_folder::RunFolder;

use files::regular_file::is_other_kind;
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It is not there, or cannot be read.
    #[error("cannot read {}: {}", path.shown(), in_words(source))]
    Io {
        /// A file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is not what was written.
    #[error("{} is broken: {problem}", path.shown())]
    Broken {
        /// The file.
        path: PathBuf,
        /// With the tensor, where it is one's.
        problem: String,
    },
    /// It is sound and of another model.
    #[error("{} is of another model: {problem}", path.shown())]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// The first tensor that differs.
        problem: String,
    },
}

impl CheckpointError {
    /// It could not be read just now, which says nothing of what was written: a bad disk, too many open files, a share that
    /// is away; a link or a pipe in its place. What is not there, and a file that has the name of a folder, was written
    /// otherwise.
    pub fn is_of_the_system(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        let content = [Errno::NOENT, Errno::NOTDIR].map(Errno::raw_os_error);
        is_other_kind(source) || source.raw_os_error().is_some_and(|code| !content.contains(&code))
    }
}

/// Of a link the system says that there are too many.
fn in_words(source: &io::Error) -> String {
    match Errno::from_io_error(source) {
        Some(Errno::LOOP) => {
            "it is a symbolic link, which onebox does not follow here: put the file itself in its place"
                .to_owned()
        }
        _ => source.to_string(),
    }
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Io { path: path.to_owned(), source }
}

/// What all processes of a run have in common: hashes of the config and of the data.
pub fn identity(config: &config::Config, data: &data::Dataset) -> [(&'static str, String); 2] {
    let seen = format!("{:?}", manifest::DataIdentity::of(data));
    let of = |text: &str| format!("{:016x}", xxhash_rust::xxh3::xxh3_64(text.as_bytes()));
    [("the config", of(&config.to_ron())), ("the data", of(&seen))]
}

/// Name of a rank's file.
fn file_name(number: usize) -> String {
    format!("rank-{number:05}.safetensors")
}
