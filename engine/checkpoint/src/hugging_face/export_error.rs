//! Reasons why an export failed.

use super::FolderError;
use crate::CheckpointError;
use files::path_text::ShownPath;
use std::path::PathBuf;

/// Reasons why an export failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum ExportError {
    #[error(transparent)]
    From(#[from] CheckpointError),
    #[error(transparent)]
    To(#[from] FolderError),
    #[error("{} exists; give another folder", .0.shown())]
    Exists(PathBuf),
    #[error(
        "{} is not what an export left that was interrupted, and nothing was removed; remove it, or \
         give another folder", .0.shown()
    )]
    NotOurs(PathBuf),
    #[error("another onebox is writing {}; wait for it, or give another folder", .0.shown())]
    InUse(PathBuf),
    #[error("`{tensor}` was written to {} and reads otherwise", path.shown())]
    Unequal { path: PathBuf, tensor: String },
}
