//! A program that writes to a file through mapped memory, as numpy's `memmap` does.
#![expect(unsafe_code, reason = "maps a file, writes to it, and unmaps it")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::null_mut;

/// A mapped file. Writes to this memory change the file.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    bytes: usize,
}

impl Mapping {
    pub(crate) fn of(path: &Path) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let bytes = file.metadata().unwrap().len() as usize;
        let (rights, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: the system chooses an unused address range.
        let start = unsafe { libc::mmap(null_mut(), bytes, rights, libc::MAP_SHARED, fd, 0) };
        assert!(start != libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { start: start.cast(), bytes }
    }

    pub(crate) fn set(&self, at: usize, byte: u8) {
        assert!(at < self.bytes);
        // SAFETY: the offset is within the mapping.
        let place = unsafe { self.start.add(at) };
        // SAFETY: no reference to this byte exists.
        unsafe { place.write_volatile(byte) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the region was mapped with this length, and is not used afterwards.
        let ended = unsafe { libc::munmap(self.start.cast(), self.bytes) };
        assert_eq!(ended, 0);
    }
}
