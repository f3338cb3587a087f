//! Whether each write to a file from now on changes its [`Stamp`]: only then what was found in the file is kept under the stamp.
//!
//! Two kinds of writes change no time. A write within a tick of the clock after another one gets the same time. A program that has the
//! file mapped changes its times with the first write to a page, and not with further ones until the system has written the page to
//! the disk, half a minute later by default. So the last change must lie some seconds back, and pages that may wait for the disk since then are
//! written. File systems in memory write nothing to a disk.

use super::store::{Stamp, TokenFile};
use files::input;
use rustix::fs::fstatfs;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Within this time pages are written to the disk, and within ten times of what the system waits for.
const WRITTEN: Duration = Duration::from_hours(1);
/// Most files that are written to the disk: each may take some milliseconds, also where there is nothing to write.
const MOST: usize = 256;
/// tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// What is looked at before files are read whose findings are to be kept.
#[derive(Debug)]
pub(super) struct WriteWatch {
    /// How many files may yet be written to the disk.
    left: usize,
    /// Bytes of a file that is worth it.
    least: u64,
    /// Pages that have waited for so long are on the disk; none where they may wait forever.
    written: Option<Duration>,
}

impl WriteWatch {
    /// As this system writes pages. A file of fewer than `least` bytes waits until it has written them.
    pub(super) fn new(least: u64) -> Self {
        let hundredths = |name: &str| -> Option<u64> {
            input::text(Path::new(&format!("/proc/sys/vm/{name}_centisecs")), 64)
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        let (every, after) = (hundredths("dirty_writeback"), hundredths("dirty_expire"));
        // At 0 nothing is written by itself.
        let waits = every.filter(|every| *every > 0).zip(after).map(|(every, after)| every + after);
        let written = waits.map(|waits| WRITTEN.max(Duration::from_millis(100 * waits)));
        Self { left: MOST, least, written }
    }

    /// Whether each write to the file from now on shows in its stamp, which is still as when the file was opened.
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
    /// How long before `now` the file was changed.
    pub(super) fn age(&self, now: SystemTime) -> Duration {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let changed = u64::try_from(self.changed.0).map_or(Duration::ZERO, Duration::from_secs);
        since.saturating_sub(changed)
    }

    /// Whether the file was changed so long before `now` that another change has another time.
    pub(super) fn is_settled(&self, now: SystemTime) -> bool {
        /// Clocks of file systems tick more often than this.
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
            // What was changed long ago needs not to be written.
            watch.written = Some(Duration::from_secs(1));
            assert_eq!(watch.covers(&open(&path)), on_disk);
            let before = open(&path);
            fs::write(&path, [1; 100]).unwrap();
            assert!(!watch.covers(&before), "it is another one by now");
        }
    }
}
