//! Files that a user names for onebox to write: a slip names a config or a text there, so only what onebox wrote as the
//! same is replaced.

use super::input;
use super::path_text::ShownPath;
use rustix::fs::{Access, OFlags, access, fcntl_getfl, fcntl_setfl};
use std::fs::{self, File, OpenOptions};
use std::io::{Error, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What is written.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// One word for it.
    pub what: &'static str,
    /// How every such file begins.
    pub beginning: &'static str,
}

impl Output {
    /// That `path` is no file, an empty one or such an output. What is neither a file nor a directory, as `/dev/null`, is
    /// written into.
    ///
    /// # Errors
    /// With the remedy; of the file system.
    pub fn may_replace(&self, path: &Path) -> Result<()> {
        let Ok(found) = fs::metadata(path) else { return Ok(()) };
        if found.is_dir() {
            return Err(Error::other("it is a directory; name a file in it"));
        }
        if !found.is_file() || found.len() == 0 {
            return Ok(());
        }
        let mut head = Vec::new();
        input::open(path)?.take(self.beginning.len() as u64).read_to_end(&mut head)?;
        if head == self.beginning.as_bytes() {
            return Ok(());
        }
        let what = self.what;
        Err(Error::other(format!(
            "it is there and is no {what} that onebox wrote, so it is not replaced; give another name, or remove it"
        )))
    }

    /// The file, empty, or what `path` leads to if that is no file.
    ///
    /// # Errors
    /// As [`may_replace`](Self::may_replace); a pipe that nobody reads.
    pub fn create(&self, path: &Path) -> Result<File> {
        self.may_replace(path)?;
        // Who opens a pipe waits for its reader otherwise.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        // What follows after somebody has cut the file off stands at its end.
        options.append(true).create(true).custom_flags(flags);
        let file = options.open(path)?;
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        fcntl_setfl(&file, fcntl_getfl(&file)?.difference(OFlags::NONBLOCK))?;
        Ok(file)
    }

    /// The same before the work whose result goes there, and that it can be written.
    ///
    /// # Errors
    /// As there.
    pub fn check(&self, path: &Path) -> Result<()> {
        self.may_replace(path)?;
        if path.exists() {
            return Ok(access(path, Access::WRITE_OK)?);
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        match folder.is_dir() {
            true => Ok(access(folder, Access::WRITE_OK)?),
            false => Err(Error::other(format!("there is no directory {}", folder.shown()))),
        }
    }
}
