//! Opening what a user names, without waiting for it.

use super::problem::Problem;
use files::input::{self, NotAFile};
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a regular file for reading, and nothing else: to open a pipe would wait for a writer.
pub(super) fn open_regular(path: &Path) -> Result<File, Problem> {
    input::open(path).map_err(unopened)
}

/// Why a file is not opened.
pub(super) fn unopened(error: io::Error) -> Problem {
    match error.kind() {
        io::ErrorKind::NotFound => Problem::Missing,
        _ if NotAFile::is(&error) => Problem::NotAFile,
        _ => Problem::Unreadable(error),
    }
}
