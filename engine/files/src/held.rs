//! The locked directory of a run, and checks that the lock and the path are still the run's.

use super::directory::Directory;
use super::names::LOCK;
use super::path_text::PathText;
use super::regular_file::{identity, other};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A run's directory with its lock; dropping it frees the lock. The path may later lead to another
/// run: callers use names in the [`Directory`] that [`check`](Self::check) returns.
#[derive(Debug)]
pub struct LockedRunDir {
    directory: Directory,
    /// The lock file; `None` if another process of the same run holds the lock.
    lock: Option<Mutex<File>>,
}

impl Drop for LockedRunDir {
    /// Closing the file does not free the lock: a child process has a copy of the descriptor until
    /// its `exec`.
    fn drop(&mut self) {
        if let Some(lock) = &mut self.lock {
            // If this fails, closing the descriptor frees the lock.
            let _ = lock.get_mut().unwrap_or_else(|e| e.into_inner()).unlock();
        }
    }
}

impl LockedRunDir {
    /// Builds the directory from an open directory and its lock file, which is locked.
    pub fn new(directory: Directory, lock: File) -> Self {
        Self { directory, lock: Some(Mutex::new(lock)) }
    }

    /// Opens the directory `path` without a lock.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be opened.
    pub fn unlocked(path: &Path) -> io::Result<Arc<Self>> {
        Ok(Self::by_another(Directory::open(path)?))
    }

    /// A directory without a lock, because another process of the same run holds it.
    pub fn by_another(directory: Directory) -> Arc<Self> {
        Arc::new(Self { directory, lock: None })
    }

    /// Path of the directory when the run opened it, for messages.
    pub fn shown(&self) -> PathText<'_> {
        PathText(self.directory.path())
    }

    /// Path of the entry `name` when the run opened the directory, for messages.
    pub fn called(&self, name: &str) -> PathBuf {
        self.directory.called(name)
    }

    /// Current path of the directory; `None` if it is unknown, for example after removal.
    pub fn place(&self) -> Option<PathBuf> {
        let directory = self.directory.identity().ok()?;
        let is =
            |place: &Path| fs::metadata(place).is_ok_and(|found| identity(&found) == directory);
        let path = self.directory.path();
        if is(path) {
            return Some(path.to_owned());
        }
        self.directory.place().filter(|place| is(place))
    }

    /// Returns the directory after checking its path and its lock. A removed lock file is created
    /// and locked again.
    ///
    /// # Errors
    /// Returns an error if the directory was removed or moved, or if another process holds its
    /// lock.
    pub fn check(&self) -> io::Result<&Directory> {
        let gone = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => other("the run's directory is gone: it was removed or moved"),
            _ => error,
        };
        let here = fs::metadata(self.directory.path()).map_err(gone)?;
        if identity(&here) != self.directory.identity()? {
            return Err(other("another directory is in the place of the run's: it was moved"));
        }
        self.check_lock()?;
        Ok(&self.directory)
    }

    /// Whether another process has replaced the lock file.
    pub fn is_taken(&self) -> bool {
        let Some(lock) = &self.lock else { return false };
        let lock = lock.lock().unwrap_or_else(|e| e.into_inner());
        let is_ours = |found| lock.metadata().is_ok_and(|lock| identity(&lock) == found);
        self.directory.identity_of(LOCK).is_ok_and(|found| !is_ours(found))
    }

    /// Whether the entry `name` of the directory, which may have moved, is the open `file`; `None`
    /// if it is missing.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn holds(&self, name: &str, file: &File) -> io::Result<Option<bool>> {
        self.directory.holds(name, file)
    }

    /// Checks the lock of the directory, which may have moved. A removed lock file is created and
    /// locked again.
    ///
    /// # Errors
    /// Returns an error if another process holds the lock.
    pub fn check_lock(&self) -> io::Result<()> {
        let Some(lock) = &self.lock else { return Ok(()) };
        let mut lock = lock.lock().unwrap_or_else(|e| e.into_inner());
        match self.directory.identity_of(LOCK) {
            Ok(found) if found == identity(&lock.metadata()?) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                *lock = take(self.directory.create_new(LOCK)?)?;
            }
            _ => return Err(other("another process has locked the run's directory")),
        }
        Ok(())
    }
}

/// Locks `file` and writes the id of this process into it.
fn take(mut file: File) -> io::Result<File> {
    file.try_lock().map_err(|error| match error {
        TryLockError::Error(error) => error,
        TryLockError::WouldBlock => other("another process has locked the run's directory"),
    })?;
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_let_go_is_free_whoever_has_a_copy_of_its_descriptor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK);
        let lock = File::create(&path).unwrap();
        lock.try_lock().unwrap();
        let copy = lock.try_clone().unwrap();
        drop(LockedRunDir::new(Directory::open(folder.path()).unwrap(), lock));
        File::open(&path).unwrap().try_lock().unwrap();
        drop(copy);
    }

    #[test]
    fn a_directory_is_held_until_it_is_another_one_or_anothers() {
        let folder = tempfile::tempdir().unwrap();
        let [run, moved] = ["run", "moved"].map(|name| folder.path().join(name));
        let make = || {
            fs::create_dir(&run).unwrap();
            let lock = File::create_new(run.join(LOCK)).unwrap();
            LockedRunDir::new(Directory::open(&run).unwrap(), take(lock).unwrap())
        };
        let held = make();
        held.check().unwrap();
        // A removed lock is locked again, and then no other process can lock it.
        fs::remove_file(run.join(LOCK)).unwrap();
        held.check().unwrap();
        assert!(File::open(run.join(LOCK)).unwrap().try_lock().is_err());
        fs::rename(&run, &moved).unwrap();
        assert!(held.check().unwrap_err().to_string().contains("is gone"));
        assert_eq!(held.place().unwrap(), moved.canonicalize().unwrap());
        let other = make();
        assert!(held.check().unwrap_err().to_string().contains("another directory"));
        fs::remove_file(run.join(LOCK)).unwrap();
        fs::write(run.join(LOCK), "").unwrap();
        assert!(other.check().unwrap_err().to_string().contains("another process"));
        assert!(other.is_taken() && !held.is_taken());
    }
}
