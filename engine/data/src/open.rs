//! Opening what a user names, without waiting for it.

use super::problem::Problem;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file for reading, and nothing else: to open a pipe would wait for a writer.
pub(super) fn open_regular(path: &Path) -> Result<File, Problem> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = file.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Problem::Missing,
        _ => Problem::Unreadable(error),
    })?;
    let is_file = file.metadata().map_err(Problem::Unreadable)?.is_file();
    is_file.then_some(file).ok_or(Problem::NotAFile)
}
