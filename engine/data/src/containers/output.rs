//! Writes unpacked text to a file or to memory, with limits.

use crate::unpack_error::{MOST_GROWTH, SMALL, UnpackError};
use files::directory::Directory;
use std::io::{self, Write};
use std::path::PathBuf;

/// Free space of the disk that gets the text.
#[derive(Clone, Debug)]
pub(super) struct DiskSpace {
    folder: PathBuf,
    /// The folder and the variable that sets it, in words after "another".
    setting: &'static str,
    /// Free bytes at the beginning.
    free: u64,
}

impl DiskSpace {
    pub(super) fn of(folder: &Directory, setting: &'static str) -> io::Result<Self> {
        Ok(Self { folder: folder.path().to_owned(), setting, free: folder.free()? })
    }

    /// Bytes that a text may have: some of the disk stays free.
    const fn most(&self) -> u64 {
        self.free - self.free / 10
    }
}

/// The receiver of unpacked text.
pub(super) struct Output<'a> {
    to: &'a mut dyn Write,
    /// Bytes of the packed file.
    packed: u64,
    /// Bytes that were written.
    pub(super) written: u64,
    disk: Option<DiskSpace>,
    /// Bytes that are enough; more end with [`UnpackError::Enough`].
    enough: u64,
}

impl<'a> Output<'a> {
    /// A receiver of the whole text of a file of `packed` bytes.
    pub(super) fn whole(to: &'a mut dyn Write, packed: u64, disk: DiskSpace) -> Self {
        Self { to, packed, written: 0, disk: Some(disk), enough: u64::MAX }
    }

    /// A receiver of the first `enough` bytes.
    pub(super) fn beginning(to: &'a mut dyn Write, packed: u64, enough: u64) -> Self {
        Self { to, packed, written: 0, disk: None, enough }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), UnpackError> {
        let written = self.written + bytes.len() as u64;
        if written > SMALL && written / MOST_GROWTH > self.packed {
            return Err(UnpackError::Bomb { packed: self.packed, unpacked: written });
        }
        if let Some(disk) = self.disk.as_ref().filter(|disk| written > disk.most()) {
            let DiskSpace { folder, setting, free } = disk.clone();
            return Err(UnpackError::NoRoom { unpacked: written, free, folder, setting });
        }
        self.to.write_all(bytes)?;
        self.written = written;
        if written >= self.enough { Err(UnpackError::Enough) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_too_much_or_needs_most_of_the_disk_is_refused_before_it_is_written() {
        let write = |packed, free| {
            let setting = "folder in TMPDIR";
            let disk = DiskSpace { folder: "/there".into(), setting, free };
            let (mut sink, block) = (io::sink(), vec![0; 1 << 20]);
            let mut out = Output::whole(&mut sink, packed, disk);
            let error = (0..200).find_map(|_| out.write(&block).err());
            (out.written >> 20, error.map(|error| error.to_string()))
        };
        let (written, bomb) = write(4 << 10, 1 << 40);
        assert_eq!(written, 64);
        let message =
            "its 4.00 KiB have become more than 65.00 MiB of text, over 250 times as many";
        assert!(bomb.as_ref().is_some_and(|bomb| bomb.starts_with(message)), "{bomb:?}");
        assert_eq!(write(1 << 20, 1 << 40), (200, None));
        let (written, full) = write(1 << 20, 100 << 20);
        assert_eq!(written, 90);
        let message = "it has more than 91.00 MiB of text, which need more than nine tenths of the 100.00 MiB that are free in /there";
        let remedy = "make room there, or give another folder in TMPDIR";
        let is_said = |full: &String| full.starts_with(message) && full.ends_with(remedy);
        assert!(full.as_ref().is_some_and(is_said), "{full:?}");
    }
}
