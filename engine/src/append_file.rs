//! A file that a run appends to. A full disk does not stop training: the writer warns of the first
//! failure, counts the lost pieces, and tries to write later pieces.
//!
//! Before each piece the writer checks that its file still has its name in the run's directory. A
//! file that was removed is written again from the open file. After a replacement or a truncation,
//! the writer continues with the new contents, and warns of lost pieces.

use files::held::LockedRunDir;
use files::path_text::ShownPath;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Number of bytes that are copied or compared at a time.
const BLOCK: usize = 1 << 16;

/// Error of a file that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.shown())]
pub struct MetricsError {
    /// Path of the file.
    pub path: PathBuf,
    /// Error of the system.
    pub source: io::Error,
}

/// Kind of the pieces of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pieces {
    /// Lines: after an incomplete line, a newline begins the next line.
    Lines,
    /// Records: after an incomplete record, a reader finds no other record.
    Records,
}

/// Writer that appends each piece with one write.
#[derive(Debug)]
pub(crate) struct AppendFile {
    run: Arc<LockedRunDir>,
    name: String,
    pub(crate) file: File,
    pieces: Pieces,
    /// Bytes of the complete pieces. Bytes after them, from a failed write, are cut off.
    length: u64,
    pub(crate) torn: bool,
    pub(crate) dropped: u64,
    /// Whether the next line needs a newline before it: the file ends with an incomplete line.
    is_behind_half: bool,
    /// Whether earlier records are lost, so that later records belong into another file.
    is_over: bool,
    /// Last failure that the writer warned of.
    last_warning: String,
}

impl AppendFile {
    /// Makes the writer of `file`, which is `name` in the directory of `run`, is open to read and
    /// to append, and has `length` bytes.
    pub(crate) fn new(
        run: &Arc<LockedRunDir>,
        name: &str,
        pieces: Pieces,
        file: File,
        length: u64,
    ) -> Self {
        Self {
            run: Arc::clone(run),
            name: name.to_owned(),
            file,
            pieces,
            length,
            torn: false,
            dropped: 0,
            is_behind_half: false,
            is_over: false,
            last_warning: String::new(),
        }
    }

    pub(crate) fn write(&mut self, piece: &[u8]) {
        if let Err(error) = self.try_write(piece) {
            self.fail(&error);
        }
    }

    /// Counts a lost piece, and warns of the error.
    pub(crate) fn fail(&mut self, error: &io::Error) {
        self.dropped += 1;
        self.warn("write", error);
    }

    /// Syncs the file to the disk. A failure is a warning.
    pub(crate) fn sync(&mut self) {
        if let Err(error) = self.look().and_then(|()| self.file.sync_all()) {
            self.warn("sync", &error);
        }
    }

    /// Whether the next piece belongs into another file.
    pub(crate) fn is_over(&mut self) -> bool {
        // The write of the next piece reports an error.
        drop(self.look());
        self.is_over
    }

    /// Warns of a failure, unless the last warning was the same.
    fn warn(&mut self, action: &str, error: &io::Error) {
        let error = error.to_string();
        if self.last_warning != error {
            let (path, what) = (self.path(), self.what());
            tracing::warn!(
                "cannot {action} {path}: {error}; training goes on without these {what}"
            );
            self.last_warning = error;
        }
    }

    const fn what(&self) -> &'static str {
        match self.pieces {
            Pieces::Lines => "lines",
            Pieces::Records => "events",
        }
    }

    fn path(&self) -> String {
        self.run.called(&self.name).shown().to_string()
    }

    fn try_write(&mut self, piece: &[u8]) -> io::Result<()> {
        self.look()?;
        if self.torn && self.file.metadata()?.is_file() {
            self.file.set_len(self.length)?;
        }
        let newline: &[u8] = if self.is_behind_half { b"\n" } else { b"" };
        let bytes = [newline, piece].concat();
        self.torn = true;
        self.file.write_all(&bytes)?;
        self.file.flush()?;
        (self.torn, self.is_behind_half) = (false, false);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Checks that the file still has its name and its bytes. Otherwise restores the file, or
    /// continues with the file under its name, and warns.
    fn look(&mut self) -> io::Result<()> {
        if self.run.is_taken() {
            return Err(io::Error::other("another process has locked the run's directory"));
        }
        match self.run.holds(&self.name, &self.file) {
            // If the system does not answer, the writer keeps the open file.
            Ok(Some(true)) | Err(_) => self.look_at_its_length(),
            Ok(Some(false)) => self.take_another(),
            Ok(None) => self.make_again(),
        }
    }

    fn look_at_its_length(&mut self) -> io::Result<()> {
        let (found, was) = (self.file.metadata()?, self.length);
        if !found.is_file() || found.len() >= was {
            return Ok(());
        }
        self.go_on_after(found.len())?;
        tracing::warn!(
            "{}: it was cut off under the run, from {was} to {} bytes: what stood behind is lost; {}",
            self.path(),
            found.len(),
            self.later()
        );
        Ok(())
    }

    /// Creates the removed file again, with all bytes of the open file.
    fn make_again(&mut self) -> io::Result<()> {
        self.look_at_its_length()?;
        let directory = self.run.check()?;
        let file = directory.open_or_create(&self.name, OFlags::EXCL | OFlags::APPEND)?;
        let written = copied(&self.file, &file, 0..self.length);
        let written = written.and_then(|()| file.sync_all()).and_then(|()| directory.sync());
        if let Err(error) = written {
            // The first error is reported. The next piece tries again.
            drop(directory.remove_file(&self.name));
            return Err(error);
        }
        (self.file, self.torn) = (file, false);
        tracing::warn!(
            "{}: it was removed under the run; it is written again, and none of its {} is lost",
            self.path(),
            self.what()
        );
        Ok(())
    }

    /// Continues with another file that has the name now.
    fn take_another(&mut self) -> io::Result<()> {
        self.look_at_its_length()?;
        let file = self.run.check()?.open_or_create(&self.name, OFlags::APPEND)?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        let (there, was) = (found.len(), self.length);
        let same = is_same(&self.file, &file, there.min(was))?;
        if same && let Err(error) = copied(&self.file, &file, there..was) {
            // The file gets its old length back. The next piece tries again.
            drop(file.set_len(there));
            return Err(error);
        }
        (self.file, self.torn) = (file, false);
        if same {
            self.length = there.max(was);
            tracing::warn!(
                "{}: it was replaced under the run; what the new file lacked is written into it, and none of its {} is lost",
                self.path(),
                self.what()
            );
            return Ok(());
        }
        self.go_on_after(there)?;
        tracing::warn!(
            "{}: it was replaced under the run by a file with other contents, which stay; what it lacks of the {} before is \
             lost; {}",
            self.path(),
            self.what(),
            self.later()
        );
        Ok(())
    }

    /// Continues after the `length` bytes of the file, which may end with an incomplete piece.
    fn go_on_after(&mut self, length: u64) -> io::Result<()> {
        let mut last = [b'\n'];
        if length > 0 {
            self.file.read_exact_at(&mut last, length - 1)?;
        }
        (self.length, self.torn) = (length, false);
        self.is_behind_half = self.pieces == Pieces::Lines && last != [b'\n'];
        self.is_over = self.pieces == Pieces::Records;
        Ok(())
    }

    const fn later(&self) -> &'static str {
        match self.pieces {
            Pieces::Lines => "later lines follow",
            Pieces::Records => "later events go into a file of their own",
        }
    }
}

/// Appends the bytes in `range` of `from` to `to`.
fn copied(from: &File, mut to: &File, range: Range<u64>) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    let mut at = range.start;
    while at < range.end {
        let part = &mut block[..BLOCK.min((range.end - at) as usize)];
        from.read_exact_at(part, at)?;
        to.write_all(part)?;
        at += part.len() as u64;
    }
    Ok(())
}

/// Whether the first `bytes` bytes of two files are equal.
fn is_same(one: &File, other: &File, bytes: u64) -> io::Result<bool> {
    let (mut a, mut b) = (vec![0; BLOCK], vec![0; BLOCK]);
    let mut at = 0;
    while at < bytes {
        let part = BLOCK.min((bytes - at) as usize);
        one.read_exact_at(&mut a[..part], at)?;
        other.read_exact_at(&mut b[..part], at)?;
        if a[..part] != b[..part] {
            return Ok(false);
        }
        at += part as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
