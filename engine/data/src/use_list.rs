//! List of the cache parts that a data set reads, which protects them from removal.
//!
//! Each process writes the names of its parts into a file of its own and holds a lock on that file.
//! A process that removes parts reads all locked lists first. A read-only process locks the folder
//! itself instead. The system releases the locks of a process when it ends.

use files::directory::Directory;
use files::{input, private};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::ErrorKind::WouldBlock;
use std::io::{self, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Suffix of a list; the name of the process comes first.
const KIND: &str = ".use";
/// How long a removal waits for processes that are adding to their lists.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two attempts.
const LOOK: Duration = Duration::from_millis(20);

/// The list of one process; its parts are protected until it is dropped.
#[derive(Debug)]
pub(super) struct UseList {
    /// The folder; locked if there is no file.
    folder: Directory,
    /// The name of the list file, and the file.
    file: Option<(String, File)>,
}

impl UseList {
    /// A list without parts. With `read_only`, no file is written.
    pub(super) fn new(folder: &Path, read_only: bool) -> io::Result<Self> {
        if read_only {
            return Ok(Self { folder: locked(folder, FlockOperation::LockShared)?, file: None });
        }
        let _adding = locked(folder, FlockOperation::LockShared)?;
        let (folder, name) = (private::folder(folder)?, process_name() + KIND);
        let file = private::create_new(&folder, &name)?;
        let list = Self { folder, file: Some((name, file)) };
        list.file.as_ref().map_or(Ok(()), |(_, file)| file.lock())?;
        Ok(list)
    }

    /// Adds a part. Until the result is dropped no part is removed, so the part can be opened.
    pub(super) fn add(&mut self, part: &str) -> io::Result<Option<Directory>> {
        let Some((_, file)) = &mut self.file else { return Ok(None) };
        let adding = locked(self.folder.path(), FlockOperation::LockShared)?;
        writeln!(file, "{part}")?;
        Ok(Some(adding))
    }
}

impl Drop for UseList {
    fn drop(&mut self) {
        if let Some((name, _)) = &self.file {
            // Without its lock the list is no longer valid.
            drop(self.folder.remove_file(name));
        }
    }
}

/// Opens the folder and locks it until dropped; not locked if the file system cannot.
fn locked(folder: &Path, how: FlockOperation) -> io::Result<Directory> {
    let folder = Directory::open(folder)?;
    match flock(&folder, how) {
        Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK.into()),
        _ => Ok(folder),
    }
}

/// Locks the folder for a removal, until dropped. `WouldBlock` while a read-only command uses it.
pub(super) fn locked_to_remove(folder: &Path) -> io::Result<Directory> {
    let since = Instant::now();
    loop {
        match locked(folder, FlockOperation::NonBlockingLockExclusive) {
            // A process that adds to its list holds the lock only briefly.
            Err(error) if error.kind() == WouldBlock && since.elapsed() < PATIENCE => sleep(LOOK),
            ended => return ended,
        }
    }
}

/// Longest list in bytes: about two million parts.
const LONGEST: u64 = 64 << 20;

/// The parts that processes read. `removes` also deletes the lists of dead processes; the caller
/// must have locked the folder.
pub(super) fn parts_in_use(folder: &Directory, removes: bool) -> io::Result<BTreeSet<String>> {
    let mut parts = BTreeSet::new();
    for name in folder.names()? {
        let Some(name) = name.to_str().filter(|name| is_list(name)) else { continue };
        let Ok(file) = private::read(folder, name) else { continue };
        match file.try_lock_shared() {
            Ok(()) if removes => folder.remove_file(name)?,
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let text = input::rest(&file, LONGEST)?;
                let text = String::from_utf8(text).map_err(io::Error::other)?;
                parts.extend(text.lines().map(str::to_owned));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(parts)
}

fn is_list(name: &str) -> bool {
    name.strip_suffix(KIND).is_some_and(is_process_name)
}

/// A name that is unique among processes and over time.
pub(super) fn process_name() -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    format!("{}-{time}", std::process::id())
}

pub(super) fn is_process_name(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.split_once('-').is_some_and(|(id, time)| is_number(id) && is_number(time))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn parts_are_in_use_until_the_list_is_dropped_or_its_process_ends() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path();
        let folder = Directory::open(path).unwrap();
        let in_use = |removes| Vec::from_iter(parts_in_use(&folder, removes).unwrap());
        let mut list = UseList::new(path, false).unwrap();
        let adding = list.add("b").unwrap();
        // A part that is being added may be opened before any removal.
        assert_eq!(locked_to_remove(path).unwrap_err().kind(), WouldBlock);
        drop(adding);
        drop(list.add("a").unwrap());
        let mut other = UseList::new(path, false).unwrap();
        drop(other.add("c").unwrap());
        // The list of a killed process, and a file of another program.
        fs::write(path.join("7-7.use"), "d\n").unwrap();
        fs::write(path.join("my.use"), "e\n").unwrap();
        assert_eq!(in_use(false), ["a", "b", "c"]);
        drop(list);
        assert_eq!(in_use(true), ["c"]);
        drop(other);
        assert_eq!(fs::read_dir(path).unwrap().count(), 1);
        // A read-only process protects all parts.
        let quiet = UseList::new(path, true).unwrap();
        assert_eq!(locked_to_remove(path).unwrap_err().kind(), WouldBlock);
        drop(UseList::new(path, false).unwrap());
        drop(quiet);
        drop(locked_to_remove(path).unwrap());
    }
}
