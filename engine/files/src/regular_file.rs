//! Opens the files of a run: follows no link, refuses pipes, sockets and directories, never waits.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::error::Error;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Opens a file. Links, pipes, sockets and directories are refused; it never waits.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    checked(options.custom_flags(flags.bits().cast_signed()).open(path))
}

/// Returns the opened file unless it is a pipe, socket or directory, and gives errors a reason.
pub(super) fn checked(opened: io::Result<File>) -> io::Result<File> {
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP) => other("it is a symbolic link, which onebox does not follow here"),
        Some(Errno::NXIO) => other("it is a pipe or a socket, not a file"),
        _ => error,
    })?;
    let kind = file.metadata()?.file_type();
    match kind.is_fifo() || kind.is_socket() || kind.is_dir() {
        true => Err(other("it is no file")),
        false => Ok(file),
    }
}

/// Opens a file for reading.
///
/// # Errors
/// Returns the error of the file system, or an error for a link, pipe, socket or directory.
pub fn read(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().read(true))
}

/// Opens a file for writing and keeps its contents; creates it if it is missing.
///
/// # Errors
/// Returns the errors of [`read`].
pub fn open_or_create(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().write(true).create(true).truncate(false))
}

/// Opens a regular file or a directory for reading. A link is not followed; a pipe is not awaited.
pub fn open_at(folder: impl std::os::fd::AsFd, name: &Path, more: OFlags) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | more;
    let file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    if !more.contains(OFlags::DIRECTORY) && !file.metadata()?.is_file() {
        return Err(OtherKind::error(io::ErrorKind::Other, "not a regular file"));
    }
    Ok(file)
}

/// Error of a name that is not a file or a directory but a link, a pipe or a socket.
#[derive(Debug)]
pub(super) struct OtherKind(String);

impl OtherKind {
    pub(super) fn error(kind: io::ErrorKind, why: impl Into<String>) -> io::Error {
        io::Error::new(kind, Self(why.into()))
    }
}

impl fmt::Display for OtherKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for OtherKind {}

/// Whether `error` means that the name was a link, a pipe or a socket. The contents are then not
/// damaged.
pub fn is_other_kind(error: &io::Error) -> bool {
    let is_link = Errno::from_io_error(error) == Some(Errno::LOOP);
    is_link || error.get_ref().is_some_and(|inner| inner.is::<OtherKind>())
}

/// Whether `path` leads to the open `file`.
///
/// # Errors
/// Returns the error of the file system, also if `path` leads nowhere.
pub fn leads_to(path: &Path, file: &File) -> io::Result<bool> {
    Ok(identity(&fs::metadata(path)?) == identity(&file.metadata()?))
}

pub(super) fn other(why: &str) -> io::Error {
    io::Error::other(why.to_owned())
}

/// Identity of a file or directory: device and inode number.
pub(super) type Identity = (u64, u64);

pub(super) fn identity(metadata: &fs::Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

/// Current path of an open file, from the kernel.
pub(super) fn name_of(file: &File) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::super::directory::Directory;
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_and_pipes_are_neither_followed_nor_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let [victim, link, pipe] = ["victim", "link", "pipe"].map(|name| folder.path().join(name));
        fs::write(&victim, "theirs").unwrap();
        symlink(&victim, &link).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true);
        for (path, why) in [(&link, "symbolic link"), (&pipe, "no file")] {
            assert!(open(path, &mut options).unwrap_err().to_string().contains(why));
            assert!(read(path).is_err() && open_or_create(path).is_err());
        }
        let for_writing = open(&pipe, OpenOptions::new().write(true)).unwrap_err();
        assert!(for_writing.to_string().contains("a pipe"), "{for_writing}");
        assert!(open(folder.path(), OpenOptions::new().read(true)).is_err());
        let directory = Directory::open(folder.path()).unwrap();
        for (name, path) in [("link", &link), ("pipe", &pipe)] {
            assert!(directory.read(name).is_err() && directory.create_new(name).is_err());
            directory.create(name).unwrap().write_all(b"ours").unwrap();
            assert_eq!(fs::read(path).unwrap(), b"ours");
        }
        assert_eq!(fs::read(&victim).unwrap(), b"theirs");
    }
}
