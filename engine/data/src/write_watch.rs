//! Checks whether every later write to a file changes its [`Stamp`]. Only then are findings kept.
//! Two kinds of writes do not change a time. A write within a clock tick after another write gets
//! the same time. A program that has the file mapped changes the times only with its first write to
//! a page, until the system has written that page to the disk: half a minute later by default. So
//! the last change must be some seconds old, and pages that may still wait are synced. File systems
//! in memory never write pages, so they are excluded.

use super::store::{Stamp, TokenFile};
use files::input;
use rustix::fs::fstatfs;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Least age at which pages count as written; at least ten times the system's delay.
const WRITTEN: Duration = Duration::from_hours(1);
/// Largest number of files that are synced: a sync may take milliseconds even without changes.
const MOST: usize = 256;
/// Magic numbers of tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// State of the checks before files are read.
#[derive(Debug)]
pub(super) struct WriteWatch {
    /// Number of files that may still be synced.
    left: usize,
    /// Smallest file that is synced, in bytes.
    least: u64,
    /// Age at which all pages are on the disk; `None` if pages may wait forever.
    written: Option<Duration>,
}

impl WriteWatch {
    /// Uses this system's write-back settings. Files of fewer than `least` bytes are not synced.
    pub(super) fn new(least: u64) -> Self {
        let hundredths = |name: &str| -> Option<u64> {
            input::text(Path::new(&format!("/proc/sys/vm/{name}_centisecs")), 64)
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        let (every, after) = (hundredths("dirty_writeback"), hundredths("dirty_expire"));
        // With 0 the system does not write pages periodically.
        let waits = every.filter(|every| *every > 0).zip(after).map(|(every, after)| every + after);
        let written = waits.map(|waits| WRITTEN.max(Duration::from_millis(100 * waits)));
        Self { left: MOST, least, written }
    }

    /// Whether every later write changes the stamp, and the stamp is still the stamp of the
    /// opening.
    pub(super) fn covers(&mut self, file: &TokenFile) -> bool {
        if !file.stamp.is_settled(file.opened) {
            return false;
        }
        let age = file.stamp.age(file.opened);
        let is_written = self.written.is_some_and(|written| age > written);
        if !is_written {
            let left = self.left.checked_sub(1).filter(|_| file.stamp.bytes >= self.least);
            let Some(left) = left else { return false };
            self.left = left;
        }
        let look = |opened: &File| -> io::Result<bool> {
            if IN_MEMORY.contains(&fstatfs(opened)?.f_type) {
                return Ok(false);
            }
            if !is_written {
                opened.sync_data()?;
            }
            Ok(Stamp::of(&opened.metadata()?) == file.stamp)
        };
        file.with_opened(look).unwrap_or(false)
    }
}

impl Stamp {
    /// Time between the last change of the file and `now`.
    pub(super) fn age(&self, now: SystemTime) -> Duration {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let changed = u64::try_from(self.changed.0).map_or(Duration::ZERO, Duration::from_secs);
        since.saturating_sub(changed)
    }

    /// Whether the last change is old enough that another change gets another time.
    pub(super) fn is_settled(&self, now: SystemTime) -> bool {
        /// Upper bound of the clock tick of file systems.
        const TICK: Duration = Duration::from_secs(1);
        self.age(now) > 2 * TICK
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::statfs;
    use std::fs;
    use std::path::Path;

    fn open(path: &Path) -> TokenFile {
        TokenFile::new(path, File::open(path).unwrap()).unwrap()
    }

    #[test]
    fn a_file_that_may_change_unnoticed_is_not_covered() {
        let disk = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").ok();
        let folders: Vec<&Path> =
            [Some(&disk), memory.as_ref()].into_iter().flatten().map(|f| f.path()).collect();
        let just_written = |folder: &&Path| {
            fs::write(folder.join("a"), [0; 100]).unwrap();
            WriteWatch::new(0).covers(&open(&folder.join("a")))
        };
        assert!(!folders.iter().any(just_written));
        std::thread::sleep(Duration::from_millis(3100));
        for folder in folders {
            let on_disk = !IN_MEMORY.contains(&statfs(folder).unwrap().f_type);
            let path = folder.join("a");
            let mut watch = WriteWatch::new(100);
            assert_eq!(watch.covers(&open(&path)), on_disk);
            assert_eq!(watch.covers(&open(&path).closed()), on_disk);
            assert!(!WriteWatch::new(101).covers(&open(&path)), "it is too short to be written");
            watch.left = 0;
            assert!(!watch.covers(&open(&path)), "too many were written");
            // A file that was changed long ago needs no sync.
            watch.written = Some(Duration::from_secs(1));
            assert_eq!(watch.covers(&open(&path)), on_disk);
            let before = open(&path);
            fs::write(&path, [1; 100]).unwrap();
            assert!(!watch.covers(&before), "it is another one by now");
        }
    }
}
