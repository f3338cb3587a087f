//! A file that a run appends to and never waits for: training does not stop for a full disk. The first failure is warned
//! of, pieces that are lost are counted, and later ones are tried again.

use files::path_text::ShownPath;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The file cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.shown())]
pub struct MetricsError {
    /// The file.
    pub path: PathBuf,
    /// What the system says.
    pub source: io::Error,
}

/// Gets whole pieces; one write for each.
#[derive(Debug)]
pub(crate) struct AppendFile {
    pub(crate) file: File,
    path: PathBuf,
    /// Bytes of the whole pieces; what follows them after a failed write is cut off.
    length: u64,
    pub(crate) torn: bool,
    pub(crate) dropped: u64,
}

impl AppendFile {
    /// `file` is open to append, and is `length` bytes long.
    pub(crate) fn new(file: File, path: &Path, length: u64) -> Self {
        Self { file, path: path.to_owned(), length, torn: false, dropped: 0 }
    }

    pub(crate) fn write(&mut self, piece: &[u8]) {
        if let Err(error) = self.try_write(piece) {
            self.torn = true;
            if self.dropped == 0 {
                let path = self.path.shown();
                tracing::warn!(
                    "cannot write {path}: {error}; training goes on without these lines"
                );
            }
            self.dropped += 1;
        }
    }

    /// Everything is on the disk on return; where it cannot be, that is warned of.
    pub(crate) fn sync(&self) {
        if let Err(error) = self.file.sync_all() {
            tracing::warn!("cannot sync {}: {error}", self.path.shown());
        }
    }

    fn try_write(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.torn {
            self.file.set_len(self.length)?;
            self.torn = false;
        }
        self.file.write_all(piece)?;
        self.length += piece.len() as u64;
        self.file.flush()
    }
}
