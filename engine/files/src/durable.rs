//! Creates, removes and renames files, and makes names durable.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Creates a file and replaces a file or link of this name. The target of a link is not changed.
///
/// # Errors
/// Returns the error of the file system. A directory is not replaced.
pub fn create(path: &Path) -> io::Result<File> {
    remove(path)?;
    create_new(path)
}

/// Creates a file, which must not exist yet.
///
/// # Errors
/// Returns the error of the file system: `AlreadyExists` also for a link that leads nowhere.
pub fn create_new(path: &Path) -> io::Result<File> {
    File::create_new(path)
}

/// Removes a file or a link, if it exists.
///
/// # Errors
/// Returns the error of the file system. A directory is not removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Renames a file or folder in one file system, replaces a file `to`, and makes the name durable.
///
/// # Errors
/// Returns the error of the file system.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    to.parent().map_or(Ok(()), sync_folder)
}

/// Creates `unfinished`, which `fill` writes and syncs, and renames it to `path`. An error leaves `path` as
/// it was, and no `unfinished`.
///
/// # Errors
/// Returns the error of `fill` or of the file system.
pub fn replace<T>(
    path: &Path,
    unfinished: &Path,
    fill: impl FnOnce(File) -> io::Result<T>,
) -> io::Result<T> {
    let filled = create(unfinished).and_then(fill);
    let done = filled.and_then(|result| rename(unfinished, path).map(|()| result));
    if done.is_err() {
        // The first error is the one to report.
        drop(remove(unfinished));
    }
    done
}

/// Makes the names in a folder durable: those of files that were created, renamed or removed there.
///
/// # Errors
/// Returns the error of the file system.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(here)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_a_link_leads_to_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let [victim, link] = ["victim", "link"].map(|name| folder.path().join(name));
        fs::write(&victim, "theirs").unwrap();
        symlink(&victim, &link).unwrap();
        create(&link).unwrap().write_all(b"ours").unwrap();
        assert_eq!(fs::read(&link).unwrap(), b"ours");
        fs::remove_file(&link).unwrap();
        symlink(&victim, &link).unwrap();
        let new = folder.path().join("new");
        fs::write(&new, "new").unwrap();
        rename(&new, &link).unwrap();
        assert_eq!(fs::read(&link).unwrap(), b"new");
        assert_eq!(fs::read(&victim).unwrap(), b"theirs");
        fs::create_dir(&new).unwrap();
        assert!(create(&new).is_err() && new.is_dir());
    }
}
