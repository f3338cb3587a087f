//! Input files that a user or another file names. Links are followed, because the name is meant to
//! lead to the file. Only [`stream`] waits for a pipe. Reading a whole file has a limit in bytes.

use super::regular_file::{self, other};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens the regular file to which `path` leads. It never waits.
///
/// # Errors
/// Returns the error of the file system, or [`NotAFile`] for a directory, pipe, socket or device.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        // Only opening a socket fails with this error.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
            return Err(NotAFile.into());
        }
        opened => opened?,
    };
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(NotAFile.into()),
    }
}

/// Error of a path that leads to something other than a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAFile;

impl std::fmt::Display for NotAFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("it is not a regular file")
    }
}

impl std::error::Error for NotAFile {}

impl From<NotAFile> for io::Error {
    fn from(error: NotAFile) -> Self {
        Self::other(error)
    }
}

impl NotAFile {
    /// Whether `error` contains [`NotAFile`].
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

/// Opens a file or a pipe, such as `<(command)` of a shell, and waits for the pipe's writer.
///
/// # Errors
/// Returns the error of the file system.
pub fn stream(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// All bytes of a regular file, at most `most`.
///
/// # Errors
/// Returns the errors of [`open`], or the kind `FileTooLarge` if the file is larger.
pub fn bytes(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    rest(&open(path)?, most)
}

/// All bytes of a file that onebox wrote, at most `most`. Links are not followed.
///
/// # Errors
/// Returns the errors of [`regular_file::read`], or the kind `FileTooLarge` if the file is larger.
pub fn own_bytes(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    rest(&regular_file::read(path)?, most)
}

/// All bytes of an open file after its position. The whole file has at most `most` bytes.
///
/// # Errors
/// Returns the error of reading, or the kind `FileTooLarge` if the file is larger than `most`.
pub fn rest(file: &File, most: u64) -> io::Result<Vec<u8>> {
    check_length(file, most)?;
    // The file may grow after the check.
    whole(file, most)
}

/// Checks that an open file has at most `most` bytes.
///
/// # Errors
/// Returns the kind `FileTooLarge` if the file is larger.
pub fn check_length(file: &File, most: u64) -> io::Result<()> {
    if file.metadata()?.len() > most { Err(too_large(most)) } else { Ok(()) }
}

/// The first bytes of `from`, at most `most`. Further bytes may follow.
///
/// # Errors
/// Returns the error of reading.
pub fn beginning(from: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// All bytes of `from`, at most `most`.
///
/// # Errors
/// Returns the error of reading, or the kind `FileTooLarge` if `from` has more than `most` bytes.
pub fn whole(from: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let bytes = beginning(from, most.saturating_add(1))?;
    if bytes.len() as u64 > most {
        return Err(too_large(most));
    }
    Ok(bytes)
}

fn too_large(most: u64) -> io::Error {
    let why = format!("it has more than {most} bytes, which no such file has");
    io::Error::new(ErrorKind::FileTooLarge, why)
}

/// The whole text of a regular UTF-8 file, at most `most` bytes.
///
/// # Errors
/// Returns the errors of [`bytes`], or an error if the file is not UTF-8.
pub fn text(path: &Path, most: u64) -> io::Result<String> {
    let text = String::from_utf8(bytes(path, most)?);
    text.map_err(|error| other(&format!("it is not UTF-8: {}", error.utf8_error())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_a_file_within_the_limit_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "four").unwrap();
        symlink("file", at("link")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("pipe", at("link to a pipe")).unwrap();
        symlink("/dev/zero", at("zeros")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(bytes(&at(name), 4).unwrap(), b"four");
            let error = text(&at(name), 3).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::FileTooLarge);
            assert!(error.to_string().contains("more than 3 bytes"), "{error}");
        }
        for name in ["pipe", "link to a pipe", "socket", "zeros", "folder"] {
            let error = bytes(&at(name), 4).unwrap_err();
            assert!(NotAFile::is(&error), "{name}: {error}");
        }
        let missing = bytes(&at("missing"), 4).unwrap_err();
        assert!(missing.kind() == ErrorKind::NotFound && !NotAFile::is(&missing));
        // An endless file.
        File::create(at("holes")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(bytes(&at("holes"), 4).unwrap_err().kind(), ErrorKind::FileTooLarge);
        fs::write(at("file"), [0xff]).unwrap();
        assert!(text(&at("file"), 4).unwrap_err().to_string().contains("UTF-8"));
    }
}
