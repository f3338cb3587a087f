//! The user's cache folder as a whole: its size, its limit, and the removal of parts.
//!
//! A part is all files with the same name stem, which are used and removed together. Files with
//! names that onebox does not create are neither counted nor removed. Parts that a process is
//! reading are never removed.

use super::cache_file::CREATION;
use super::token_cache::Cache;
use super::use_list::{is_process_name, locked_to_remove, parts_in_use};
use files::directory::Directory;
use files::path_text::PathText;
use files::private;
use rustix::fs::{AtFlags, FileType, StatVfs, statat, statvfs};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, TryLockError};
use std::io;
use std::io::ErrorKind::{NotADirectory, NotFound, WouldBlock};
use std::path::Path;
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};
use topology::{counted, format_bytes, parse_bytes};

/// The environment variable that sets the size limit.
pub(super) const VARIABLE: &str = "ONEBOX_CACHE_LIMIT";
/// Default limit: the disk's size divided by this number.
const SHARE: u64 = 10;
/// An unfinished file that no process has locked, and without a write for this long, belongs to a
/// dead process.
const ABANDONED: Duration = Duration::from_hours(1);
/// Upper bound of the clock tick of file systems.
const TICK: Duration = Duration::from_secs(1);

/// Number and size of parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartCount {
    /// Number of parts.
    pub parts: usize,
    /// Bytes of all their files.
    pub bytes: u64,
}

impl PartCount {
    fn of<'a>(parts: impl Iterator<Item = &'a CachePart>) -> Self {
        parts.fold(Self::default(), |Self { parts, bytes }, part| Self {
            parts: parts + 1,
            bytes: bytes + part.bytes,
        })
    }
}

/// Content of the cache folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// All parts in the folder.
    pub all: PartCount,
    /// Parts that processes are reading.
    pub in_use: PartCount,
}

/// Result of a removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheRemoval {
    /// The removed parts.
    pub removed: PartCount,
    /// The remaining parts.
    pub left: PartCount,
}

/// A part: the files with the same name stem.
#[derive(Debug)]
struct CachePart {
    name: String,
    files: Vec<String>,
    bytes: u64,
    /// Time of the last use.
    used: SystemTime,
    /// Whether the part is a file that is being written, or that a dead process left.
    is_unfinished: bool,
}

impl Cache {
    /// Largest size of the folder, in bytes.
    ///
    /// # Errors
    /// The environment variable is not a number of bytes, or the size of the disk is unknown.
    pub fn limit(&self) -> Result<u64, String> {
        let asked = std::env::var_os(VARIABLE).filter(|asked| !asked.is_empty());
        if let Some(asked) = asked {
            let text = asked.to_string_lossy();
            return parse_bytes(&text).map_err(|why| format!("{VARIABLE}: {why}"));
        }
        let Some(folder) = &self.folder else { return Ok(0) };
        // A missing folder will be created on the disk of its nearest existing parent.
        let disk = folder.ancestors().find_map(|folder| statvfs(folder).ok());
        let bytes = |disk: StatVfs| disk.f_blocks.saturating_mul(disk.f_frsize);
        disk.map(|disk| bytes(disk) / SHARE)
            .ok_or_else(|| format!("{}: the size of its disk is not known", PathText(folder)))
    }

    /// Content of the folder; a missing folder is empty.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn usage(&self) -> io::Result<CacheUsage> {
        let Some(folder) = self.there()? else { return Ok(CacheUsage::default()) };
        let (parts, in_use) = (parts(&folder)?, parts_in_use(&folder, false)?);
        let used = parts.iter().filter(|part| in_use.contains(&part.name));
        Ok(CacheUsage { all: PartCount::of(parts.iter()), in_use: PartCount::of(used) })
    }

    /// Removes all parts that no process is reading.
    ///
    /// # Errors
    /// An error of the file system, or a read-only command is using the folder.
    pub fn clear(&self) -> io::Result<CacheRemoval> {
        match &self.folder {
            Some(path) if self.there()?.is_some() => remove(path, &|_, _| true),
            _ => Ok(CacheRemoval::default()),
        }
    }

    /// Removes the least recently used parts down to `limit` bytes, but no parts used after
    /// `began`.
    pub fn make_room(&self, limit: u64, began: SystemTime) {
        let Some(path) = self.folder.as_deref().filter(|_| !self.read_only) else { return };
        let began = began.checked_sub(TICK).unwrap_or(began);
        let ended = remove(path, &|part, bytes| bytes > limit && part.used < began);
        let (path, limit_text) = (PathText(path), format_bytes(limit));
        let CacheRemoval { removed, left } = match ended {
            Ok(removal) => removal,
            // The folder is missing, or a read-only command uses it and a later run makes room.
            Err(error) if matches!(error.kind(), NotFound | NotADirectory | WouldBlock) => return,
            Err(error) => {
                tracing::warn!("{path}: {error}; it may have more than {limit_text}");
                return;
            }
        };
        if removed.parts > 0 {
            let (bytes, parts) = (format_bytes(removed.bytes), counted(removed.parts, "part"));
            tracing::info!("{path}: {parts} ({bytes}) went, which were used longest ago");
        }
        if left.bytes > limit {
            let bytes = format_bytes(left.bytes);
            tracing::warn!(
                "{path}: runs use {bytes} there, and its limit is {limit_text}: later runs may make tokens again; {VARIABLE} sets the limit"
            );
        }
    }

    /// Opens the folder, if it exists.
    fn there(&self) -> io::Result<Option<Directory>> {
        let opened = self.folder.as_deref().map(Directory::open).transpose();
        match opened {
            Err(error) if error.kind() == NotFound => Ok(None),
            opened => opened,
        }
    }
}

/// Removes parts that no process uses, the least recently used first. `goes` decides about each
/// part; it gets the part and the current total size in bytes.
fn remove(path: &Path, goes: &dyn Fn(&CachePart, u64) -> bool) -> io::Result<CacheRemoval> {
    let folder = locked_to_remove(path)?;
    let in_use = parts_in_use(&folder, true)?;
    let mut all = parts(&folder)?;
    all.sort_by_key(|part| part.used);
    let (mut removed, mut left) = (PartCount::default(), PartCount::of(all.iter()));
    for part in all.iter().filter(|part| !in_use.contains(&part.name)) {
        let lock = if part.is_unfinished { abandoned(&folder, &part.name) } else { None };
        if lock.is_some() || !part.is_unfinished && goes(part, left.bytes) {
            part.files.iter().try_for_each(|file| folder.remove_file(file))?;
            removed = PartCount { parts: removed.parts + 1, bytes: removed.bytes + part.bytes };
            left = PartCount { parts: left.parts - 1, bytes: left.bytes - part.bytes };
        }
    }
    Ok(CacheRemoval { removed, left })
}

/// Removes the unfinished files that dead processes left in the folder.
pub(super) fn remove_abandoned(folder: &Directory) -> io::Result<()> {
    for file in folder.names()? {
        let Some(file) = file.to_str().filter(|file| is_unfinished(file)) else { continue };
        if let Some(_lock) = abandoned(folder, file) {
            folder.remove_file(file)?;
        }
    }
    Ok(())
}

/// An unfinished file that a dead process left, locked; `None` if its process may be alive.
fn abandoned(folder: &Directory, file: &str) -> Option<File> {
    let _creation = CREATION.lock().unwrap_or_else(PoisonError::into_inner);
    let lock = private::read(folder, file).ok()?;
    let written = lock.metadata().and_then(|found| found.modified()).ok()?;
    let is_old = written.elapsed().is_ok_and(|age| age >= ABANDONED);
    let is_dead = match lock.try_lock_shared() {
        // Earlier versions have not locked their files.
        Ok(()) => is_old || !is_alive(file),
        Err(TryLockError::WouldBlock) => false,
        // This file system has no locks.
        Err(TryLockError::Error(_)) => is_old,
    };
    is_dead.then_some(lock)
}

/// Whether another process with the number in the name of an unfinished file is alive.
fn is_alive(file: &str) -> bool {
    let process = file.split('.').nth(1).and_then(|name| name.split_once('-'));
    process.is_some_and(|(id, _)| {
        id != std::process::id().to_string() && Path::new("/proc").join(id).exists()
    })
}

/// The parts in a folder, without files that disappear during the call.
fn parts(folder: &Directory) -> io::Result<Vec<CachePart>> {
    let mut parts: BTreeMap<String, CachePart> = BTreeMap::new();
    let names: BTreeSet<_> = folder.names()?.into_iter().collect();
    for file in names.iter().filter_map(|name| name.to_str()) {
        let Some(name) = part_of(file) else { continue };
        let Ok(found) = statat(folder, file, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            continue;
        }
        let since =
            Duration::new(found.st_mtime.max(0).cast_unsigned(), found.st_mtime_nsec as u32);
        let (bytes, used) = (found.st_size.cast_unsigned(), SystemTime::UNIX_EPOCH + since);
        let is_unfinished = is_unfinished(file);
        let part = parts.entry(name.to_owned()).or_insert_with(|| CachePart {
            name: name.to_owned(),
            files: Vec::new(),
            bytes: 0,
            used,
            is_unfinished,
        });
        part.files.push(file.to_owned());
        part.bytes += bytes;
        part.used = part.used.max(used);
    }
    let mut parts: Vec<_> = parts.into_values().collect();
    // The list is removed first: a part without a list is ignored.
    let is_data = |file: &String| !file.ends_with(LIST);
    parts.iter_mut().for_each(|part| part.files.sort_by_key(is_data));
    Ok(parts)
}

/// Suffix of a list.
const LIST: &str = ".json";
/// Suffixes of the other files. Files of earlier versions have no suffix.
const OTHERS: [&str; 7] = [".bin", ".idx", ".mask", ".checked", ".texts", ".unpacked", ""];

/// The part of a file; an unfinished file is its own part. `None` for names not of onebox.
fn part_of(file: &str) -> Option<&str> {
    let (name, kind) = file.split_at_checked(32)?;
    let is_hash = name.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    let unfinished = kind.strip_prefix('.').and_then(|kind| kind.strip_suffix(".tmp"));
    match () {
        () if !is_hash => None,
        () if kind == LIST || OTHERS.contains(&kind) => Some(name),
        () => unfinished.is_some_and(is_process_name).then_some(file),
    }
}

/// Whether a file is being written, or was when its process died.
fn is_unfinished(file: &str) -> bool {
    file.ends_with(".tmp") && part_of(file) == Some(file)
}

#[cfg(test)]
mod tests {
    use super::super::use_list::UseList;
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    fn name(i: u8) -> String {
        format!("{i:032x}")
    }

    fn write(path: &Path, bytes: usize, age: u64) {
        fs::write(path, vec![0; bytes]).unwrap();
        let used = SystemTime::now() - Duration::from_secs(age);
        File::open(path).unwrap().set_modified(used).unwrap();
    }

    /// A folder with six parts of 100 bytes; the first part is the least recently used.
    fn folder() -> (TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        for i in 0..6u8 {
            let at = |kind: &str| folder.path().join(name(i) + kind);
            let age = 1000 - 100 * u64::from(i);
            match i {
                5 => write(&at(".checked"), 100, age),
                _ => {
                    write(&at(".json"), 10, age);
                    write(&at(".bin"), 60, 5000);
                    write(&at(".idx"), 20, 5000);
                    write(&at(".mask"), 10, 5000);
                }
            }
        }
        let cache = Cache { folder: Some(folder.path().to_owned()), read_only: false };
        (folder, cache)
    }

    fn names(folder: &TempDir) -> BTreeSet<String> {
        let all = fs::read_dir(folder.path()).unwrap();
        all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Numbers of the existing parts; asserts that each part is complete.
    fn there(folder: &TempDir) -> Vec<u8> {
        let all = names(folder);
        let files = |i: u8| all.iter().filter(|file| file.starts_with(&name(i))).count();
        let there = (0..6u8).filter(|i| files(*i) > 0);
        there.inspect(|i| assert_eq!(files(*i), if *i == 5 { 1 } else { 4 })).collect()
    }

    #[test]
    fn parts_that_were_used_longest_ago_make_room() {
        let (folder, cache) = folder();
        let now = SystemTime::now();
        cache.make_room(600, now);
        Cache { read_only: true, ..cache.clone() }.make_room(0, now);
        assert_eq!(there(&folder), [0, 1, 2, 3, 4, 5]);
        cache.make_room(599, now);
        assert_eq!(there(&folder), [1, 2, 3, 4, 5]);
        cache.make_room(250, now);
        assert_eq!(there(&folder), [4, 5]);
        // Parts that the run has used since its start stay, even above the limit.
        cache.make_room(0, now - Duration::from_secs(550));
        assert_eq!(there(&folder), [5]);
        cache.make_room(0, now - Duration::from_secs(550));
        assert_eq!(there(&folder), [5]);
    }

    #[test]
    fn parts_in_use_stay_and_go_when_nobody_uses_them() {
        let (folder, cache) = folder();
        let mut list = UseList::new(folder.path(), false).unwrap();
        drop(list.add(&name(0)).unwrap());
        drop(list.add(&name(3)).unwrap());
        cache.make_room(0, SystemTime::now());
        assert_eq!(there(&folder), [0, 3]);
        let two = PartCount { parts: 2, bytes: 200 };
        assert_eq!(cache.usage().unwrap(), CacheUsage { all: two, in_use: two });
        let stays = CacheRemoval { removed: PartCount::default(), left: two };
        assert_eq!(cache.clear().unwrap(), stays);
        drop(list);
        // A dry run writes nothing, and its lock keeps all parts.
        let quiet = UseList::new(folder.path(), true).unwrap();
        cache.make_room(0, SystemTime::now());
        assert_eq!(cache.clear().unwrap_err().kind(), WouldBlock);
        assert_eq!(there(&folder), [0, 3]);
        drop(quiet);
        let goes = CacheRemoval { removed: two, left: PartCount::default() };
        assert_eq!(cache.clear().unwrap(), goes);
        assert!(names(&folder).is_empty());
        assert_eq!(cache.usage().unwrap(), CacheUsage::default());
    }

    #[test]
    fn what_onebox_did_not_write_is_neither_counted_nor_removed() {
        let (folder, cache) = folder();
        let strange = [
            "notes.bin",
            "tokens.json",
            "my.use",
            "0123456789abcdef0123456789abcdeg.bin",
            "0123456789abcdef0123456789abcdef.txt",
            "0123456789abcdef0123456789abcdef.mine.tmp",
            "0123456789ABCDEF0123456789abcdef.bin",
            "0123456789abcdef",
        ];
        for file in strange {
            write(&folder.path().join(file), 1000, 9000);
        }
        let (link, within) = (name(9) + ".bin", name(8) + ".bin");
        symlink(folder.path().join("notes.bin"), folder.path().join(&link)).unwrap();
        fs::create_dir(folder.path().join(&within)).unwrap();
        // Files that are being written, and files that dead processes left. Process 1 lives.
        let unfinished = |id: u32, time: u8| format!("{}.{id}-{time}.tmp", name(7));
        let own = std::process::id();
        for (id, time, age) in
            [(own, 1, 5000), (1, 2, 0), (own, 3, 0), (u32::MAX, 4, 0), (1, 5, 5000)]
        {
            write(&folder.path().join(unfinished(id, time)), 5, age);
        }
        let lock = File::open(folder.path().join(unfinished(own, 1))).unwrap();
        lock.lock().unwrap();
        let all = PartCount { parts: 11, bytes: 625 };
        assert_eq!(cache.usage().unwrap().all, all);
        cache.make_room(0, SystemTime::now());
        let left = names(&folder);
        let mut expected: BTreeSet<_> = strange.map(str::to_owned).into();
        expected.extend([link, within, unfinished(own, 1), unfinished(1, 2)]);
        assert_eq!(left, expected);
        assert_eq!(cache.clear().unwrap().left, PartCount { parts: 2, bytes: 10 });
        assert_eq!(names(&folder), expected);
        // A missing folder is empty.
        let none = Cache { folder: Some(folder.path().join("none")), read_only: false };
        assert_eq!(none.usage().unwrap(), CacheUsage::default());
        assert_eq!(none.clear().unwrap(), CacheRemoval::default());
        none.make_room(0, SystemTime::now());
        assert!(none.limit().unwrap() > 0);
    }
}
