//! A directory that is held open. Names in it are names in the directory that was opened: who moves it, or puts another one
//! or a link in its place, changes nothing of what is done here.

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

/// A directory that is held open.
#[derive(Debug)]
pub struct Directory {
    file: File,
    /// What it was called when it was opened.
    path: PathBuf,
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Directory {
    /// The directory to which `path` leads.
    ///
    /// # Errors
    /// Of the file system.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::opened(CWD, path, path.to_owned(), OFlags::empty())
    }

    /// The directory `path` itself; a link is refused.
    pub fn itself(path: &Path) -> io::Result<Self> {
        Self::opened(CWD, path, path.to_owned(), OFlags::NOFOLLOW)
    }

    /// The directory `name` in it; a link is refused.
    pub fn folder(&self, name: &str) -> io::Result<Self> {
        Self::opened(self.as_fd(), in_it(name), self.called(name), OFlags::NOFOLLOW)
    }

    /// The directory to which `name` in it leads.
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

    /// What it was called when it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What `name` in it is called, for messages.
    pub fn called(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Which directory it is.
    pub(super) fn identity(&self) -> io::Result<Identity> {
        Ok(identity(&self.file.metadata()?))
    }

    /// Which file `name` in it is; a link itself.
    pub(super) fn identity_of(&self, name: &str) -> io::Result<Identity> {
        let found = statat(self, in_it(name), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((found.st_dev, found.st_ino))
    }

    /// Whether `name` in it is the open `file`; none where nothing has the name.
    ///
    /// # Errors
    /// Of the file system.
    pub fn holds(&self, name: &str, file: &File) -> io::Result<Option<bool>> {
        match self.identity_of(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => Ok(Some(found? == identity(&file.metadata()?))),
        }
    }

    /// What the link `name` in it says; none where that is no link, or not there.
    ///
    /// # Errors
    /// Of the file system.
    pub fn link(&self, name: &str) -> io::Result<Option<PathBuf>> {
        link_at(self.as_fd(), in_it(name))
    }

    /// Where it is now, as the system knows it; none where that is not known.
    pub(super) fn place(&self) -> Option<PathBuf> {
        super::regular_file::name_of(&self.file).ok()
    }

    /// Whether it is the one that `other` is.
    ///
    /// # Errors
    /// Of the file system.
    pub fn is(&self, other: &Self) -> io::Result<bool> {
        Ok(self.identity()? == other.identity()?)
    }

    /// Whether it was removed.
    ///
    /// # Errors
    /// Of the file system.
    pub fn is_removed(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.nlink() == 0)
    }

    /// The names in it, in no order.
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

    /// Whether anything has the name, also a link that leads nowhere.
    pub fn has(&self, name: &str) -> bool {
        statat(self, in_it(name), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Opens the file `name` for reading; see [`own::open`](super::own::open).
    pub fn read(&self, name: &str) -> io::Result<File> {
        self.file(name, OFlags::RDONLY)
    }

    /// Opens the file `name`, which is made where it is not there.
    pub fn open_or_create(&self, name: &str, more: OFlags) -> io::Result<File> {
        self.file(name, OFlags::RDWR | OFlags::CREATE | more)
    }

    /// A new file.
    pub fn create_new(&self, name: &str) -> io::Result<File> {
        self.file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    /// A new file in the place of whatever has the name; what a link leads to stays as it is.
    pub fn create(&self, name: &str) -> io::Result<File> {
        self.remove_file(name)?;
        self.create_new(name)
    }

    fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(self, in_it(name), flags, Mode::from_raw_mode(0o666));
        checked(opened.map(File::from).map_err(io::Error::from))
    }

    /// A new directory.
    pub fn make(&self, name: &str) -> io::Result<()> {
        Ok(mkdirat(self, in_it(name), Mode::from_raw_mode(0o777))?)
    }

    /// Gives what is called `from` the name `to`.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(self, in_it(from), self, in_it(to))?)
    }

    /// Gives what is called `from` the name `to`, which nothing has.
    ///
    /// # Errors
    /// Of the kind `AlreadyExists` if anything has it.
    pub fn rename_new(&self, from: &str, to: &str) -> io::Result<()> {
        match renameat_with(self, in_it(from), self, in_it(to), RenameFlags::NOREPLACE) {
            // A file system that cannot ask and rename at once.
            Err(Errno::INVAL | Errno::NOSYS) if self.has(to) => {
                Err(io::ErrorKind::AlreadyExists.into())
            }
            Err(Errno::INVAL | Errno::NOSYS) => self.rename(from, to),
            renamed => Ok(renamed?),
        }
    }

    /// Removes a file or a link, if it is there.
    pub fn remove_file(&self, name: &str) -> io::Result<()> {
        match unlinkat(self, in_it(name), AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            removed => Ok(removed?),
        }
    }

    /// Removes a directory in which nothing is.
    pub fn remove_empty(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(self, in_it(name), AtFlags::REMOVEDIR)?)
    }

    /// Removes a directory with all in it; a file or a link itself, not what it leads to.
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

    /// Makes the names in it durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Bytes that are free in its file system for who is not root.
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

/// Bytes of a file system that are free for who is not root.
pub const fn available(disk: &StatVfs) -> u64 {
    disk.f_bavail.saturating_mul(disk.f_frsize)
}

/// A name in a directory: with a path the system would leave it.
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
