//! Checkpoints: `RUN/checkpoints/step-00000120/` with a safetensors file of each rank's fp32 states
//! and a `MANIFEST`. The manifest says which elements of which whole tensors are in each file. So
//! the format is independent of the ranks' layout, and a run with any other layout can resume.
//!
//! Invariant: a directory named `step-N` is complete and durable. It is written as `step-N.tmp` and
//! renamed when every byte is on the disk. Before removal it is renamed to `step-N.old`,
//! and while another one takes its name to `step-N.replaced` if names cannot be exchanged. A command
//! that writes a whole run has all of its checkpoints in `.checkpoints.tmp` until they are complete.

// The crate `files` opens, creates, reads and renames files.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod compare;
pub mod disk_space;
pub mod evaluations;
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
    ReplacedCheckpoint, gone, newest, newest_as_restored, newest_name, newest_step_until,
    newest_until, open_named, open_step, remove_after, remove_all, replaced, restore, set_aside,
    sizes,
};
pub use read::{Checkpoint, CheckpointReader, Summary, TensorState};
pub use run_folder::RunFolder;

use files::regular_file::is_other_kind;
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Reasons why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The checkpoint does not exist or cannot be read.
    #[error("cannot read {}: {}", path.shown(), in_words(source))]
    Io {
        /// The file or directory that cannot be read.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The content differs from what was written.
    #[error("{} is broken: {problem}", path.shown())]
    Broken {
        /// The damaged file.
        path: PathBuf,
        /// The damage, with the name of the tensor if it is in one.
        problem: String,
    },
    /// The checkpoint is sound but belongs to another model.
    #[error("{} is of another model: {problem}", path.shown())]
    OtherModel {
        /// The directory of the checkpoint.
        path: PathBuf,
        /// The first tensor that differs.
        problem: String,
    },
}

impl CheckpointError {
    /// Whether the error comes from the system, so that the content may still be sound: a bad disk,
    /// too many open files, an unreachable share, a link or a pipe in place of a file. A missing
    /// file, or a file in place of a directory, is a fault of the content.
    pub fn is_of_the_system(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        let content = [Errno::NOENT, Errno::NOTDIR].map(Errno::raw_os_error);
        is_other_kind(source) || source.raw_os_error().is_some_and(|code| !content.contains(&code))
    }
}

/// The error as text. It explains a symbolic link, for which the system reports "too many links".
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

/// Hashes of the config and of the data, with names. They must be equal in all processes of a run.
pub fn identity(config: &config::Config, data: &data::Dataset) -> [(&'static str, String); 2] {
    let seen = format!("{:?}", manifest::DataIdentity::of(data));
    let of = |text: &str| format!("{:016x}", xxhash_rust::xxh3::xxh3_64(text.as_bytes()));
    [("the config", of(&config.to_ron())), ("the data", of(&seen))]
}

/// Name of the file of rank `number`.
fn file_name(number: usize) -> String {
    format!("rank-{number:05}.safetensors")
}
