//! Device memory (NaN when new, a poison byte when freed), and pinned ranges of the host.
#![expect(unsafe_code, reason = "device memory is host memory that is handed out by address")]

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::{BTreeMap, VecDeque},
    ffi::{c_int, c_void},
};

use crate::{
    call::CallResult,
    code,
    config::config,
    counters::{MemoryUse, STATS},
    overhead::DeviceOverhead,
    sync::complain,
};

const ALIGNMENT: usize = 256;
const FRESH: u8 = 0xFF;
const FREED: u8 = 0xEE;
/// Bytes of freed memory that a device keeps to detect later writes.
const QUARANTINE_BYTES: usize = 16 << 20;

/// One device's allocations, by first address.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) live: BTreeMap<usize, usize>,
    freed: VecDeque<(usize, usize)>,
    freed_bytes: usize,
    used: usize,
    peak: usize,
    pub(crate) overhead: DeviceOverhead,
    peak_in_all: usize,
}

/// A pinned host range: allocated by the fake driver, or registered by its owner.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostRange {
    pub(crate) bytes: usize,
    pub(crate) owned: bool,
    pub(crate) flags: u32,
    /// The device in whose context it was pinned.
    pub(crate) device: usize,
}

impl HostRange {
    /// Whether the range is pinned for copies of `device`.
    pub(crate) const fn is_pinned_for(&self, device: usize) -> bool {
        const PORTABLE: u32 = 1;
        self.device == device || self.flags & PORTABLE != 0
    }
}

impl Memory {
    pub(crate) fn in_use(&self) -> MemoryUse {
        MemoryUse {
            used: self.used as u64,
            peak: self.peak as u64,
            overhead: self.overhead.bytes as u64,
            peak_in_all: self.peak_in_all as u64,
        }
    }

    /// Bytes in use, inside and outside of allocations.
    pub(crate) const fn taken(&self) -> usize {
        self.used + self.overhead.bytes
    }

    pub(crate) fn note_peak(&mut self) {
        self.peak = self.peak.max(self.used);
        self.peak_in_all = self.peak_in_all.max(self.taken());
    }

    pub(crate) fn allocate(&mut self, bytes: usize, limit: usize) -> Result<usize, c_int> {
        if self.taken().saturating_add(bytes) > limit {
            return Err(code::OUT_OF_MEMORY);
        }
        let address = if config().accounting { reserve(bytes)? } else { fresh(bytes)? };
        self.used += bytes;
        self.note_peak();
        self.live.insert(address, bytes);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: usize) -> CallResult {
        let bytes = self.live.remove(&address).ok_or(code::INVALID_VALUE)?;
        self.used -= bytes;
        if config().accounting {
            return Ok(());
        }
        // SAFETY: the range was allocated here and is released only by `evict`.
        unsafe { (address as *mut u8).write_bytes(FREED, bytes) };
        self.freed.push_back((address, bytes));
        self.freed_bytes += bytes;
        while self.freed_bytes > QUARANTINE_BYTES {
            self.evict();
        }
        Ok(())
    }

    fn evict(&mut self) {
        let Some((address, bytes)) = self.freed.pop_front() else { return };
        self.freed_bytes -= bytes;
        // SAFETY: the range was allocated here with this layout and is not freed yet.
        let content = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
        // The inner loop has no early end, so that it compares many bytes at once.
        let differs = |part: &[u8]| part.iter().fold(0, |found, byte| found | (byte ^ FREED)) != 0;
        if content.chunks(4096).any(differs) {
            STATS.writes_after_free.add(1);
            complain(&format!("{bytes} freed bytes at {address:#x} were written to"));
        }
        if let Ok(layout) = layout(bytes) {
            // SAFETY: see above.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }
}

/// Address of `bytes` of new memory, filled with NaN.
fn fresh(bytes: usize) -> Result<usize, c_int> {
    // SAFETY: the layout is not empty, and the new memory is valid for writes of `bytes`.
    let pointer = unsafe { alloc(layout(bytes)?) };
    if pointer.is_null() {
        return Err(code::OUT_OF_MEMORY);
    }
    // SAFETY: see above.
    unsafe { pointer.write_bytes(FRESH, bytes) };
    Ok(pointer as usize)
}

/// Reserves addresses without memory: each access crashes. The addresses are never reused.
fn reserve(bytes: usize) -> Result<usize, c_int> {
    const NO_ACCESS: c_int = 0;
    const PRIVATE_ANONYMOUS_NORESERVE: c_int = 0x2 | 0x20 | 0x4000;
    let none = std::ptr::null_mut();
    // SAFETY: a new mapping of its own, at no given address.
    let at = unsafe { mmap(none, bytes, NO_ACCESS, PRIVATE_ANONYMOUS_NORESERVE, -1, 0) };
    if at as isize == -1 { Err(code::OUT_OF_MEMORY) } else { Ok(at as usize) }
}

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        bytes: usize,
        access: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
}

fn layout(bytes: usize) -> Result<Layout, c_int> {
    Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| code::OUT_OF_MEMORY)
}
