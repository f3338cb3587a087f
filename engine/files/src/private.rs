//! Folders and files that hold a user's text: only their owner may read them.

use super::directory::Directory;
use super::regular_file::open_at;
use rustix::fs::{CWD, Mode, OFlags, fchmod, fstat, openat};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Permission bits of users other than the owner.
const OTHERS: u32 = 0o077;

/// Opens the folder at `path` or creates it. If this user owns the folder, others lose access.
///
/// # Errors
/// Returns the error of the file system.
pub fn folder(path: &Path) -> io::Result<Directory> {
    DirBuilder::new().recursive(true).mode(0o777 & !OTHERS).create(path)?;
    let folder = Directory::open(path)?;
    let found = fstat(&folder)?;
    let is_ours = found.st_uid == rustix::process::geteuid().as_raw();
    if is_ours && found.st_mode & OTHERS != 0 {
        let narrow = Mode::from_raw_mode(found.st_mode & 0o7777 & !OTHERS);
        if let Err(error) = fchmod(&folder, narrow) {
            tracing::warn!("{}: others may enter it: {error}", path.display());
        }
    }
    Ok(folder)
}

/// Creates the file `name` in a folder.
///
/// # Errors
/// Returns the error of the file system, also if the name exists.
pub fn create_new(folder: &Directory, name: &str) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(openat(folder, name, flags, Mode::from_raw_mode(0o666 & !OTHERS))?))
}

/// Creates a file without a name in a folder; the file ends with its last handle.
///
/// # Errors
/// Returns the error of the file system.
pub fn nameless(folder: &Directory) -> io::Result<File> {
    let mode = Mode::from_raw_mode(0o666 & !OTHERS);
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match openat(folder, ".", flags, mode) {
        Ok(file) => Ok(File::from(file)),
        // This file system has no files without a name.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
            let name = format!("onebox.{}-{time}.tmp", std::process::id());
            let flags =
                OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(folder, name.as_str(), flags, mode)?;
            folder.remove_file(&name)?;
            Ok(File::from(file))
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens a file without a name again for reading, from its first byte and with an offset of its own.
///
/// # Errors
/// Returns the error of the file system; `/proc` must be mounted.
pub fn reopened(nameless: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", nameless.as_raw_fd());
    Ok(openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// Opens the regular file `name` in a folder for reading. A link is refused.
///
/// # Errors
/// Returns the error of the file system.
pub fn read(folder: &Directory, name: &str) -> io::Result<File> {
    open_at(folder, Path::new(name), OFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;

    fn rights(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_nameless_file_leaves_nothing_behind() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Directory::open(parent.path()).unwrap();
        let mut file = nameless(&folder).unwrap();
        file.write_all(b"text").unwrap();
        for _ in 0..2 {
            let mut text = String::new();
            reopened(&file).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!((text.as_str(), folder.names().unwrap().len()), ("text", 0));
        }
    }

    #[test]
    fn others_neither_enter_the_folder_nor_read_its_files() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        let made = folder(&path).unwrap();
        create_new(&made, "new").unwrap();
        assert_eq!([rights(&path), rights(&path.join("new"))], [0o700, 0o600]);
        assert!(create_new(&made, "new").is_err());
        // Permissions that an earlier version left.
        for wide in [0o755, 0o2770] {
            fs::set_permissions(&path, fs::Permissions::from_mode(wide)).unwrap();
            folder(&path).unwrap();
            assert_eq!(rights(&path), wide & 0o2700);
        }
    }
}
