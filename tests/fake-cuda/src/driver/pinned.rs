//! Pinned host memory: allocated by the driver, or registered by its owner.
#![expect(unsafe_code, reason = "pinned memory is handed out by address")]

use std::{
    alloc::{Layout, alloc, dealloc},
    ffi::{c_int, c_uint, c_void},
};

use super::memory::{Place, place};
use crate::{
    call::put,
    code,
    counters::STATS,
    failure::fails,
    machine::{Device, context_of, current_device, driver_functions, machine, mapped_by},
    memory::HostRange,
    overhead::page_tables,
    sync::lock,
};

const PAGE: usize = 4096;

driver_functions! {
    fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: c_uint) {
        let device = current_device()?;
        if bytes == 0 || flags > 7 {
            return Err(code::INVALID_VALUE);
        }
        if fails("hostalloc", device.ordinal) {
            return Err(code::OUT_OF_MEMORY);
        }
        // SAFETY: the layout is not empty.
        let pointer = unsafe { alloc(layout(bytes)?) };
        if pointer.is_null() {
            return Err(code::OUT_OF_MEMORY);
        }
        // SAFETY: just allocated.
        unsafe { pointer.write_bytes(0xFF, bytes) };
        STATS.pinned.add(1);
        STATS.pinned_bytes.add(bytes as u64);
        lock(&machine().host).insert(pointer as usize, HostRange { bytes, owned: true, flags, device: device.ordinal });
        put(out, pointer.cast())
    }

    /// Waits for the current device first: a copy may still use the memory.
    fn cuMemFreeHost(pointer: *mut c_void) {
        let address = pointer as usize;
        let range = lock(&machine().host).get(&address).copied();
        let range = range.filter(|range| range.owned).ok_or(code::INVALID_VALUE)?;
        current_device()?.synchronize()?;
        lock(&machine().host).remove(&address);
        // SAFETY: allocated above with this layout, and no longer in the table.
        unsafe { dealloc(pointer.cast(), layout(range.bytes)?) };
        Ok(())
    }

    fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: c_uint) {
        let device = current_device()?;
        if pointer.is_null() || bytes == 0 || flags > 15 {
            return Err(code::INVALID_VALUE);
        }
        if fails("hostalloc", device.ordinal) {
            return Err(code::OUT_OF_MEMORY);
        }
        match place(pointer as usize, bytes) {
            Place::Unknown => {}
            Place::Device(_) => return Err(code::INVALID_VALUE),
            Place::Pinned | Place::Broken => return Err(code::HOST_MEMORY_ALREADY_REGISTERED),
        }
        let mut mapped = Vec::new();
        for other in mapped_by(device.ordinal, flags) {
            if let Err(error) = other.take_overhead(page_tables(bytes)) {
                mapped.iter().for_each(|other: &&Device| other.free_overhead(page_tables(bytes)));
                return Err(error);
            }
            mapped.push(other);
        }
        STATS.pinned.add(1);
        STATS.pinned_bytes.add(bytes as u64);
        let range = HostRange { bytes, owned: false, flags, device: device.ordinal };
        lock(&machine().host).insert(pointer as usize, range);
        Ok(())
    }

    /// A copy that runs later fails with `ILLEGAL_ADDRESS`: its memory is no longer pinned.
    fn cuMemHostUnregister(pointer: *mut c_void) {
        current_device()?;
        let mut host = lock(&machine().host);
        match host.get(&(pointer as usize)) {
            Some(range) if !range.owned => {
                mapped_by(range.device, range.flags)
                    .for_each(|device| device.free_overhead(page_tables(range.bytes)));
                host.remove(&(pointer as usize));
                Ok(())
            }
            Some(_) => Err(code::INVALID_VALUE),
            None => Err(code::HOST_MEMORY_NOT_REGISTERED),
        }
    }

    /// Device address of the first address of a range, which must have the flag `MAPPED`.
    fn cuMemHostGetDevicePointer_v2(out: *mut u64, pointer: *mut c_void, _flags: c_uint) {
        const MAPPED: u32 = 2;
        let device = current_device()?.ordinal;
        let range = lock(&machine().host).get(&(pointer as usize)).copied();
        let range = range.filter(|range| range.flags & MAPPED != 0 && range.is_pinned_for(device));
        put(out, range.map(|_| pointer as u64).ok_or(code::INVALID_VALUE)?)
    }

    fn cuMemHostGetFlags(out: *mut c_uint, pointer: *mut c_void) {
        current_device()?;
        let range = lock(&machine().host).get(&(pointer as usize)).copied();
        put(out, range.ok_or(code::INVALID_VALUE)?.flags)
    }

    /// Attributes: 1 context, 2 memory (1 host, 2 device), 3 and 4 addresses, 8 managed, 9 ordinal.
    fn cuPointerGetAttribute(out: *mut c_void, attribute: c_int, address: u64) {
        let found = place(address as usize, 1);
        let device = match found {
            Place::Device(device) => device,
            Place::Pinned => 0,
            _ => return Err(code::INVALID_VALUE),
        };
        match attribute {
            1 => put(out.cast(), context_of(device)),
            2 => put(out.cast::<c_uint>(), if found == Place::Pinned { 1 } else { 2 }),
            3 => put(out.cast(), address),
            4 if found == Place::Pinned => put(out.cast(), address),
            8 => put(out.cast::<c_uint>(), 0),
            9 => put(out.cast(), device as c_int),
            _ => Err(code::NOT_SUPPORTED),
        }
    }
}

fn layout(bytes: usize) -> Result<Layout, c_int> {
    Layout::from_size_align(bytes, PAGE).map_err(|_| code::OUT_OF_MEMORY)
}
