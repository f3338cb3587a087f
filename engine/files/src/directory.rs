//! An open directory. Its methods resolve names in the opened directory, even if it was moved or if
//! another directory or a link is now in its place.

use super::path_text::PathText;
use super::regular_file::{Identity, OtherKind, checked, identity};
use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, StatVfs, fstatvfs, mkdirat, openat, readlinkat,
    renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    file: File,
    /// Path at the time of opening.
    path: PathBuf,
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Directory {
    /// Opens the directory to which `path` leads; links are followed.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::opened(CWD, path, path.to_owned(), OFlags::empty())
    }

    /// Opens the directory `path` itself. A symbolic link is refused.
    pub fn itself(path: &Path) -> io::Result<Self> {
        Self::opened(CWD, path, path.to_owned(), OFlags::NOFOLLOW)
    }

    /// Opens the subdirectory `name`. A symbolic link is refused.
    pub fn folder(&self, name: &str) -> io::Result<Self> {
        Self::opened(self.as_fd(), in_it(name), self.called(name), OFlags::NOFOLLOW)
    }

    /// Opens the directory to which `name` in this directory leads; a link is followed.
    pub fn leads_to(&self, name: &str) -> io::Result<Self> {
        Self::opened(self.as_fd(), in_it(name), self.called(name), OFlags::empty())
    }

    fn opened(
        folder: BorrowedFd<'_>,
        name: &Path,
        path: PathBuf,
        more: OFlags,
    ) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC | more;
        match openat(folder, name, flags, Mode::empty()) {
            Ok(file) => Ok(Self { file: File::from(file), path }),
            Err(error) => Err(match link_at(folder, name) {
                Ok(Some(to)) if more.contains(OFlags::NOFOLLOW) => {
                    let why = format!(
                        "it is a symbolic link to {}, which onebox does not follow here: put the directory itself in its place",
                        PathText(&to)
                    );
                    OtherKind::error(error.kind(), why)
                }
                _ => error.into(),
            }),
        }
    }

    /// Path at the time of opening, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the entry `name` at the time of opening, for messages.
    pub fn called(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Current path of the directory, from the kernel.
    pub(super) fn real_path(&self) -> io::Result<PathBuf> {
        super::regular_file::name_of(&self.file)
    }

    /// Device and inode number of the directory.
    pub(super) fn identity(&self) -> io::Result<Identity> {
        Ok(identity(&self.file.metadata()?))
    }

    /// Device and inode number of the entry `name`. A link is not followed.
    pub(super) fn identity_of(&self, name: &str) -> io::Result<Identity> {
        let found = statat(self, in_it(name), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((found.st_dev, found.st_ino))
    }

    /// Whether the entry `name` is the open `file`; `None` if no entry has the name.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn holds(&self, name: &str, file: &File) -> io::Result<Option<bool>> {
        match self.identity_of(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => Ok(Some(found? == identity(&file.metadata()?))),
        }
    }

    /// Target of the symbolic link `name`; `None` if the entry is no link or is missing.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn link(&self, name: &str) -> io::Result<Option<PathBuf>> {
        link_at(self.as_fd(), in_it(name))
    }

    /// Current path of the directory, from the kernel; `None` if it is unknown.
    pub(super) fn place(&self) -> Option<PathBuf> {
        super::regular_file::name_of(&self.file).ok()
    }

    /// Whether `other` is the same directory.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn is(&self, other: &Self) -> io::Result<bool> {
        Ok(self.identity()? == other.identity()?)
    }

    /// Whether the directory was removed.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn is_removed(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.nlink() == 0)
    }

    /// Names of the entries, in no order.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.file)? {
            let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Whether an entry has the name. A link that leads nowhere counts too.
    pub fn has(&self, name: &str) -> bool {
        statat(self, in_it(name), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Opens the file `name` for reading; see [`regular_file::read`](super::regular_file::read).
    pub fn read(&self, name: &str) -> io::Result<File> {
        self.file(name, OFlags::RDONLY)
    }

    /// Opens the file `name` for reading and writing, and creates it if it is missing.
    pub fn open_or_create(&self, name: &str, more: OFlags) -> io::Result<File> {
        self.file(name, OFlags::RDWR | OFlags::CREATE | more)
    }

    /// Creates the file `name`, which must not exist yet.
    pub fn create_new(&self, name: &str) -> io::Result<File> {
        self.file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    /// Creates the file `name` and replaces a file or link of this name, but not a link's target.
    pub fn create(&self, name: &str) -> io::Result<File> {
        self.remove_file(name)?;
        self.create_new(name)
    }

    fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(self, in_it(name), flags, Mode::from_raw_mode(0o666));
        checked(opened.map(File::from).map_err(io::Error::from))
    }

    /// Creates the subdirectory `name`.
    pub fn make(&self, name: &str) -> io::Result<()> {
        Ok(mkdirat(self, in_it(name), Mode::from_raw_mode(0o777))?)
    }

    /// Renames the entry `from` to `to`.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(self, in_it(from), self, in_it(to))?)
    }

    /// Exchanges the names of two entries in one step.
    ///
    /// # Errors
    /// An entry is missing, or an error of the kind `Unsupported` if this file system cannot
    /// exchange names.
    pub fn exchange(&self, one: &str, other: &str) -> io::Result<()> {
        match renameat_with(self, in_it(one), self, in_it(other), RenameFlags::EXCHANGE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                Err(io::ErrorKind::Unsupported.into())
            }
            exchanged => Ok(exchanged?),
        }
    }

    /// Renames the entry `from` to `to`, which must not exist yet.
    ///
    /// # Errors
    /// Returns an error of the kind `AlreadyExists` if an entry has the name `to`.
    pub fn rename_new(&self, from: &str, to: &str) -> io::Result<()> {
        match renameat_with(self, in_it(from), self, in_it(to), RenameFlags::NOREPLACE) {
            // This file system cannot check and rename in one call.
            Err(Errno::INVAL | Errno::NOSYS) if self.has(to) => {
                Err(io::ErrorKind::AlreadyExists.into())
            }
            Err(Errno::INVAL | Errno::NOSYS) => self.rename(from, to),
            renamed => Ok(renamed?),
        }
    }

    /// Removes the file or link `name`, if it exists.
    pub fn remove_file(&self, name: &str) -> io::Result<()> {
        match unlinkat(self, in_it(name), AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            removed => Ok(removed?),
        }
    }

    /// Removes the empty subdirectory `name`.
    pub fn remove_empty(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(self, in_it(name), AtFlags::REMOVEDIR)?)
    }

    /// Removes the entry `name`: a directory with its contents, a file or a link (not its target).
    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.remove_any(in_it(name).as_os_str())
    }

    fn remove_any(&self, name: &OsStr) -> io::Result<()> {
        match unlinkat(self, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => {
                let path = self.path.join(name);
                let folder = Self::opened(self.as_fd(), Path::new(name), path, OFlags::NOFOLLOW)?;
                folder.names()?.iter().try_for_each(|name| folder.remove_any(name))?;
                Ok(unlinkat(self, name, AtFlags::REMOVEDIR)?)
            }
            removed => Ok(removed?),
        }
    }

    /// Makes the names in the directory durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Free bytes of the directory's file system for users other than root.
    pub fn free(&self) -> io::Result<u64> {
        Ok(available(&fstatvfs(self)?))
    }
}

fn link_at(folder: BorrowedFd<'_>, name: &Path) -> io::Result<Option<PathBuf>> {
    match readlinkat(folder, name, Vec::new()) {
        Ok(to) => Ok(Some(OsString::from_vec(to.into_bytes()).into())),
        Err(Errno::INVAL | Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Free bytes of a file system for users other than root.
pub const fn available(disk: &StatVfs) -> u64 {
    disk.f_bavail.saturating_mul(disk.f_frsize)
}

/// Checks that `name` is one name and no path: a path would leave the directory.
fn in_it(name: &str) -> &Path {
    let path = Path::new(name);
    let mut parts = path.components();
    let one = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    assert!(one, "{name:?} is a path, where a name in a directory is asked for");
    path
}

#[cfg(test)]
mod tests {
    use super::super::regular_file::is_other_kind;
    use super::*;
    use std::fs;
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_done_is_done_in_the_directory_that_was_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [run, moved] = ["run", "moved"].map(|name| folder.path().join(name));
        let make = |words: &str| {
            fs::create_dir_all(run.join("checkpoints/step/deeper")).unwrap();
            for file in ["a", "b", "checkpoints/step/deeper/c"] {
                fs::write(run.join(file), words).unwrap();
            }
            symlink("checkpoints", run.join("link")).unwrap();
        };
        make("ours");
        let held = Directory::open(&run).unwrap();
        fs::rename(&run, &moved).unwrap();
        make("theirs");
        held.create("a").unwrap().write_all(b"new").unwrap();
        held.rename("b", "d").unwrap();
        held.make("e").unwrap();
        for checkpoints in [held.folder("checkpoints"), held.leads_to("link")] {
            checkpoints.unwrap().create("f").unwrap();
        }
        let refused = held.folder("link").unwrap_err();
        assert!(is_other_kind(&refused), "{refused}");
        assert!(refused.to_string().contains("a symbolic link to checkpoints, which"), "{refused}");
        assert_eq!(refused.kind(), io::ErrorKind::NotADirectory);
        assert_eq!(held.link("link").unwrap(), Some("checkpoints".into()));
        assert!(held.link("a").unwrap().is_none() && held.link("nothing").unwrap().is_none());
        let file = held.read("d").unwrap();
        for (name, holds) in [("d", Some(true)), ("a", Some(false)), ("nothing", None)] {
            assert_eq!(held.holds(name, &file).unwrap(), holds);
        }
        let mut text = String::new();
        held.read("d").unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(
            (text.as_str(), fs::read_to_string(moved.join("a")).unwrap().as_str()),
            ("ours", "new")
        );
        held.leads_to("checkpoints").unwrap().remove("step").unwrap();
        held.remove("link").unwrap();
        let mut names = held.names().unwrap();
        names.sort();
        assert_eq!(names, ["a", "checkpoints", "d", "e"]);
        assert_eq!(fs::read_dir(moved.join("checkpoints")).unwrap().count(), 1);
        let theirs =
            ["a", "b", "checkpoints/step/deeper/c"].map(|file| fs::read(run.join(file)).unwrap());
        assert_eq!(theirs, [b"theirs"; 3]);
        assert_eq!(fs::read_dir(&run).unwrap().count(), 4);
        assert_eq!(fs::read_dir(run.join("checkpoints")).unwrap().count(), 1);
    }

    #[test]
    #[should_panic(expected = "where a name in a directory is asked for")]
    fn a_path_is_no_name_in_a_directory() {
        let folder = tempfile::tempdir().unwrap();
        let _ = Directory::open(folder.path()).unwrap().read("/etc/passwd");
    }
}
