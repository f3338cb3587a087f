//! Files in the user's cache folder, which only the user may read. A small file is JSON followed by
//! the hash of its name and of the JSON, so a file under another name is invalid. A damaged file is
//! rebuilt.

use super::token_part::{self, FileRecord};
use super::use_list::process_name;
use files::directory::Directory;
use files::path_text::ShownPath;
use files::{input, private, regular_file};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;
use xxhash_rust::xxh3::Xxh3Default;

/// Largest small file, in bytes; larger content is not cached.
const LARGEST: u64 = 64 << 20;

/// The content of a file; `None` if missing, damaged or renamed. `is_use` marks it as used now.
pub(super) fn read<T: DeserializeOwned>(path: &Path, is_use: bool) -> Option<T> {
    let file = regular_file::read(path).ok()?;
    let bytes = input::rest(&file, LARGEST).ok()?;
    let json = bytes.split_last_chunk().filter(|(json, seal)| seal_of(path, json) == **seal);
    let content = json.and_then(|(json, _)| serde_json::from_slice(json).ok());
    if content.is_none() {
        warn_damaged(path);
    } else if is_use {
        // Another user's file keeps its time, which only decides which parts are removed first.
        drop(file.set_modified(SystemTime::now()));
    }
    content
}

pub(super) fn write<T: Serialize>(path: &Path, content: &T) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(content)?;
    bytes.extend(seal_of(path, &bytes));
    if bytes.len() as u64 > LARGEST {
        return Err(ErrorKind::FileTooLarge.into());
    }
    write_bytes(path, &[bytes]).map(drop)
}

/// Writes a file that gets its name after a sync, and creates the folder. An existing file with the
/// same bytes stays: another process may be reading it, and replacing it would change its times.
pub(super) fn write_bytes(path: &Path, parts: &[Vec<u8>]) -> io::Result<FileRecord> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str()))
    else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let folder = private::folder(folder)?;
    let unfinished = unfinished_name(name);
    let written = create_unfinished(&folder, &unfinished).and_then(|lock| {
        let record = token_part::fill(lock.try_clone()?, parts)?;
        name_whole(&folder, &unfinished, name, parts)?;
        Ok(record)
    });
    if written.is_err() {
        // The first error is the one to report.
        drop(folder.remove_file(&unfinished));
    }
    let record = written?;
    folder.sync()?;
    Ok(FileRecord { name: name.to_owned(), ..record })
}

/// Renames the file `unfinished`, which has the bytes of `parts`, to its final name.
fn name_whole(
    folder: &Directory,
    unfinished: &str,
    name: &str,
    parts: &[Vec<u8>],
) -> io::Result<()> {
    match folder.rename_new(unfinished, name) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            match has_bytes(folder, name, parts) {
                Ok(true) => folder.remove_file(unfinished),
                // A file that cannot be read is replaced as well.
                Ok(false) | Err(_) => folder.rename(unfinished, name),
            }
        }
        renamed => renamed,
    }
}

/// Whether the file has exactly the bytes of `parts`.
fn has_bytes(folder: &Directory, name: &str, parts: &[Vec<u8>]) -> io::Result<bool> {
    let mut file = folder.read(name)?;
    if file.metadata()?.len() != parts.iter().map(|part| part.len() as u64).sum::<u64>() {
        return Ok(false);
    }
    let mut block = vec![0; 1 << 16];
    for piece in parts.iter().flat_map(|part| part.chunks(1 << 16)) {
        let read = &mut block[..piece.len()];
        file.read_exact(read)?;
        if read != piece {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Held while an unfinished file of this process is there without its lock.
pub(super) static CREATION: Mutex<()> = Mutex::new(());

/// Creates an unfinished file and locks it: the lock says that its process is alive.
pub(super) fn create_unfinished(folder: &Directory, name: &str) -> io::Result<File> {
    let _creation = CREATION.lock().unwrap_or_else(PoisonError::into_inner);
    let file = private::create_new(folder, name)?;
    // A file system without locks keeps the file for a while, see `cache_folder`.
    drop(file.lock());
    Ok(file)
}

/// 128-bit xxh3 hash of `parts`, each preceded by its length.
pub(super) fn hash_of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u128 {
    let mut hash = Xxh3Default::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.digest128()
}

/// Hash of the content and of the file's name, which is derived from the content's sources.
fn seal_of(path: &Path, json: &[u8]) -> [u8; 16] {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    hash_of_parts([name, json]).to_le_bytes()
}

/// A name for an unfinished file. Of two simultaneous writes of the same bytes the first stays.
pub(super) fn unfinished_name(name: &str) -> String {
    let stem = name.split('.').next().unwrap_or(name);
    format!("{stem}.{}.tmp", process_name())
}

pub(super) fn warn_damaged(path: &Path) {
    tracing::warn!("{}: not what was written; it is made again", path.shown());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn an_unfinished_file_is_locked_while_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::open(folder.path()).unwrap();
        let file = create_unfinished(&directory, "a.tmp").unwrap();
        let other = File::open(folder.path().join("a.tmp")).unwrap();
        assert!(other.try_lock_shared().is_err());
        drop(file);
        other.try_lock_shared().unwrap();
    }

    #[test]
    fn a_file_of_the_same_bytes_stays_and_another_one_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.bin");
        let write = |bytes: &[u8]| {
            write_bytes(&path, &[bytes.to_vec(), b"end".to_vec()]).unwrap();
            assert_eq!(fs::read(&path).unwrap(), [bytes, b"end"].concat());
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
            let found = fs::metadata(&path).unwrap();
            (found.ino(), found.ctime_nsec())
        };
        let first = write(b"first");
        assert_eq!(write(b"first"), first);
        // The last contents are the beginning of those before.
        for other in [&b"First"[..], b"first and more", b"fir", b"", b"endend", b"end"] {
            assert_ne!(write(other), first);
        }
    }
}
