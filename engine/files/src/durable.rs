//! Files and names that are on the disk on return.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// A new file in the place of whatever has the name; what a link leads to stays as it is.
///
/// # Errors
/// Of the file system; a directory is not replaced.
pub fn create(path: &Path) -> io::Result<File> {
    remove(path)?;
    create_new(path)
}

/// A new file.
///
/// # Errors
/// Of the file system; of the kind `AlreadyExists` if anything has the name, also a link that leads nowhere.
pub fn create_new(path: &Path) -> io::Result<File> {
    File::create_new(path)
}

/// Removes a file or a link, if it is there.
///
/// # Errors
/// Of the file system; a directory is not removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Gives a file or folder another name in the same file system, and makes that durable. A file that has the name is replaced.
///
/// # Errors
/// Of the file system.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    to.parent().map_or(Ok(()), sync_folder)
}

/// Makes the names in a folder durable: those of files that were created, renamed or removed in it.
///
/// # Errors
/// Of the file system.
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
