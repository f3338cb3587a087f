//! Allocates device memory, with a limit per device, and finds the memory of an address.
#![expect(unsafe_code, reason = "exported C functions")]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
};

use crate::{
    call::{CallResult, put},
    code,
    config::config,
    counters::STATS,
    failure::fails,
    machine::{Device, current_device, device, driver_functions, machine, stream},
    sync::{complain, lock},
};

/// Memory that contains an address range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Device(usize),
    Pinned,
    /// A range that overlaps a known range but is not inside.
    Broken,
    Unknown,
}

/// Finds `bytes` at `address` among the device allocations and the pinned ranges.
pub(crate) fn place(address: usize, bytes: usize) -> Place {
    for device in &machine().devices {
        match within(&lock(&device.memory).live, address, bytes, |&size| size) {
            Some(true) => return Place::Device(device.ordinal),
            Some(false) => return Place::Broken,
            None => {}
        }
    }
    match within(&lock(&machine().host), address, bytes, |range| range.bytes) {
        Some(true) => Place::Pinned,
        Some(false) => Place::Broken,
        None => Place::Unknown,
    }
}

/// `Some(true)` if the bytes are inside a range, `Some(false)` if they cross an edge, else `None`.
fn within<T>(
    ranges: &BTreeMap<usize, T>,
    address: usize,
    bytes: usize,
    size: impl Fn(&T) -> usize,
) -> Option<bool> {
    let end = address.saturating_add(bytes.max(1));
    let (first, range) = ranges.range(..end).next_back()?;
    let last = first + size(range);
    (address < last).then_some(address >= *first && end <= last)
}

/// Whether the host range at `address` is pinned for copies of `device`.
pub(crate) fn is_pinned_for(address: usize, device: usize) -> bool {
    let host = lock(&machine().host);
    host.range(..=address).next_back().is_some_and(|(_, range)| range.is_pinned_for(device))
}

/// Checks, when an op runs, that a range is device memory or pinned memory.
pub(crate) fn check_accessible(what: &str, address: usize, bytes: usize) -> CallResult {
    match place(address, bytes) {
        Place::Device(_) | Place::Pinned => Ok(()),
        found => {
            complain(&format!("{what}: {bytes} bytes at {address:#x}: {found:?} memory"));
            Err(code::ILLEGAL_ADDRESS)
        }
    }
}

fn allocate_on(device: &Device, bytes: usize) -> Result<usize, c_int> {
    if bytes == 0 {
        return Err(code::INVALID_VALUE);
    }
    if fails("alloc", device.ordinal) {
        return Err(code::OUT_OF_MEMORY);
    }
    STATS.allocations.add(1);
    lock(&device.memory).allocate(bytes, config().memory)
}

/// Frees the device allocation that starts at `address`.
fn free_at(address: usize) -> CallResult {
    STATS.frees.add(1);
    let found = machine().devices.iter().map(|device| lock(&device.memory).free(address));
    if found.into_iter().any(|freed| freed.is_ok()) { Ok(()) } else { Err(code::INVALID_VALUE) }
}

driver_functions! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let device = current_device()?;
        let limit = config().memory;
        put(free, limit - lock(&device.memory).taken())?;
        put(total, limit)
    }

    fn cuMemAlloc_v2(out: *mut u64, bytes: usize) {
        put(out, allocate_on(current_device()?, bytes)? as u64)
    }

    /// Waits for the device first, as the driver does.
    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return Ok(());
        }
        match place(address as usize, 1) {
            Place::Device(ordinal) => machine().devices[ordinal].synchronize()?,
            _ => return Err(code::INVALID_VALUE),
        }
        free_at(address as usize)
    }

    fn cuMemAllocAsync(out: *mut u64, bytes: usize, handle: *mut c_void) {
        let stream = stream(handle)?;
        put(out, allocate_on(&machine().devices[stream.device], bytes)? as u64)
    }

    fn cuMemAllocFromPoolAsync(out: *mut u64, bytes: usize, pool: *mut c_void, handle: *mut c_void) {
        let stream = stream(handle)?;
        pool_device(pool)?;
        put(out, allocate_on(&machine().devices[stream.device], bytes)? as u64)
    }

    fn cuMemFreeAsync(address: u64, handle: *mut c_void) {
        let stream = stream(handle)?;
        if !matches!(place(address as usize, 1), Place::Device(_)) {
            return Err(code::INVALID_VALUE);
        }
        stream.push(move |_| free_at(address as usize));
        Ok(())
    }

    fn cuDeviceGetDefaultMemPool(out: *mut *mut c_void, ordinal: c_int) {
        put(out, pool_of(device(ordinal)?.ordinal))
    }

    fn cuDeviceGetMemPool(out: *mut *mut c_void, ordinal: c_int) {
        put(out, pool_of(device(ordinal)?.ordinal))
    }

    fn cuDeviceSetMemPool(ordinal: c_int, pool: *mut c_void) {
        device(ordinal)?;
        pool_device(pool).map(drop)
    }

    /// Attributes are 32 bits wide below 4 and 64 bits wide from 4 on.
    fn cuMemPoolGetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) {
        let used = lock(&pool_device(pool)?.memory).in_use();
        match attribute {
            1..=3 => put(value.cast::<c_int>(), 1),
            5 | 7 => put(value.cast::<u64>(), used.used),
            6 | 8 => put(value.cast::<u64>(), used.peak),
            _ => put(value.cast::<u64>(), 0),
        }
    }

    fn cuMemPoolSetAttribute(pool: *mut c_void, _attribute: c_int, value: *mut c_void) {
        pool_device(pool)?;
        if value.is_null() { Err(code::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuMemPoolTrimTo(pool: *mut c_void, _keep: usize) {
        pool_device(pool).map(drop)
    }

    fn cuMemPoolSetAccess(pool: *mut c_void, _map: *const c_void, _count: usize) {
        pool_device(pool).map(drop)
    }
}

/// Handle of the default pool of device 0. A device has no other pool.
const FIRST_POOL: usize = 0x1000;

fn pool_of(device: usize) -> *mut c_void {
    (FIRST_POOL + device) as *mut c_void
}

fn pool_device(pool: *mut c_void) -> Result<&'static Device, c_int> {
    let index = (pool as usize).checked_sub(FIRST_POOL);
    index.and_then(|index| machine().devices.get(index)).ok_or(code::INVALID_VALUE)
}
