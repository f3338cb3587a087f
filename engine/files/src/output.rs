//! Output files that a user names. A user may name a config or a text by mistake, so onebox
//! replaces only an output of the same kind that it wrote itself.

use super::path_text::ShownPath;
use super::{durable, input};
use rustix::fs::{Access, OFlags, access, fcntl_getfl, fcntl_setfl};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A kind of output.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Noun for the output, one word for messages.
    pub what: &'static str,
    /// First characters of every output of this kind.
    pub beginning: &'static str,
}

impl Output {
    /// Checks that `path` is missing, an empty file, or an output of this kind. Devices such as
    /// `/dev/null` and pipes are accepted too.
    ///
    /// # Errors
    /// Returns an error with the remedy, or the error of the file system.
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

    /// Creates or empties the file; a path to something else, such as a pipe, is only opened.
    ///
    /// # Errors
    /// Returns the errors of [`may_replace`](Self::may_replace), or an error for a pipe without a
    /// reader.
    pub fn create(&self, path: &Path) -> Result<File> {
        self.may_replace(path)?;
        // Without this flag, opening a pipe waits for its reader.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        // If another process truncates the file, later writes go to its new end.
        options.append(true).create(true).custom_flags(flags);
        let file = options.open(path)?;
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        fcntl_setfl(&file, fcntl_getfl(&file)?.difference(OFlags::NONBLOCK))?;
        Ok(file)
    }

    /// Writes the whole output. A file at `path` is replaced in one step, so an error, such as a full
    /// disk, leaves it as it was. A link, a pipe or a device is written in place; so is a file that only
    /// its folder forbids to replace.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Self::create), or the error of the file system.
    pub fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        self.check(path)?;
        let in_place = || self.create(path)?.write_all(bytes);
        let found = fs::symlink_metadata(path).ok();
        let name = path.file_name().filter(|_| found.as_ref().is_none_or(Metadata::is_file));
        let Some(name) = name else { return in_place() };
        let name = [OsStr::new("."), name, OsStr::new(".part")].join(OsStr::new(""));
        let replaced = durable::replace(path, &path.with_file_name(name), |mut file| {
            // The new file has the permissions of the old one.
            found.map_or(Ok(()), |found| file.set_permissions(found.permissions()))?;
            file.write_all(bytes)?;
            file.sync_all()
        });
        match replaced {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => in_place(),
            replaced => replaced,
        }
    }

    /// Checks that [`create`](Self::create) can write `path`, before a command begins its work.
    ///
    /// # Errors
    /// Returns the errors of [`may_replace`](Self::may_replace), or an error if `path` is not
    /// writable.
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
