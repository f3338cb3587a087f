//! Opens files that a user names, without blocking.

use super::problem::Problem;
use files::input::{self, NotAFile};
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a regular file for reading, and refuses others: opening a pipe would wait for a writer.
pub(super) fn open_regular(path: &Path) -> Result<File, Problem> {
    input::open(path).map_err(unopened)
}

/// The problem for an error of opening a file.
pub(super) fn unopened(error: io::Error) -> Problem {
    match error.kind() {
        io::ErrorKind::NotFound => Problem::Missing,
        _ if NotAFile::is(&error) => Problem::NotAFile,
        _ => Problem::Unreadable(error),
    }
}
