//! Copies and fills.
#![expect(unsafe_code, reason = "copies bytes between addresses that were checked before")]

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use super::memory::{Place, check_accessible, is_pinned_for, place};
use crate::{
    call::CallResult,
    code,
    config::config,
    counters::{Counter, STATS},
    failure::fails,
    machine::{context_device, current_device, driver_functions, stream},
    stream::Stream,
    wrong::is_wrong,
};

/// One end of a copy, of the kind that the caller declares.
#[derive(Debug, Clone, Copy)]
enum End {
    Host(usize),
    Device(usize),
}

impl End {
    fn address(self) -> usize {
        match self {
            Self::Host(address) | Self::Device(address) => address,
        }
    }

    /// Whether the end is pageable host memory; the copy must then be done when the call returns.
    fn is_pageable(self, bytes: usize, device: usize) -> Result<bool, c_int> {
        match (self, place(self.address(), bytes)) {
            (Self::Device(_), Place::Device(_) | Place::Pinned) => Ok(false),
            (Self::Host(address), Place::Pinned) => Ok(!is_pinned_for(address, device)),
            (Self::Host(address), Place::Unknown) if address != 0 => Ok(true),
            _ => Err(code::INVALID_VALUE),
        }
    }
}

fn copy(stream: &Arc<Stream>, to: End, from: End, bytes: usize) -> CallResult {
    if bytes == 0 {
        return Ok(());
    }
    if fails("memcpy", stream.device) {
        return Err(code::INVALID_VALUE);
    }
    let pageable = [to.is_pageable(bytes, stream.device)?, from.is_pageable(bytes, stream.device)?];
    let crosses = [to, from].iter().any(|end| matches!(end, End::Host(_)));
    let is_cut = crosses && pageable == [false; 2] && is_wrong("copy");
    let moved = if is_cut { bytes.saturating_sub(4) } else { bytes };
    stream.push(move |_| {
        for (end, pageable) in [(to, pageable[0]), (from, pageable[1])] {
            if !pageable {
                check_accessible("copy", end.address(), bytes)?;
            }
        }
        if !config().accounting {
            // SAFETY: both ranges were just found in the tables of live memory, or are pageable memory
            // of a caller that waits for this copy.
            unsafe {
                std::ptr::copy(from.address() as *const u8, to.address() as *mut u8, moved);
            }
        }
        counter(to, from).add(bytes as u64);
        Ok(())
    });
    if pageable.contains(&true) {
        STATS.pageable_copies.add(1);
        return stream.synchronize();
    }
    Ok(())
}

fn counter(to: End, from: End) -> &'static Counter {
    match (to, from) {
        (End::Device(_), End::Host(_)) => &STATS.h2d_bytes,
        (End::Host(_), _) => &STATS.d2h_bytes,
        (End::Device(_), End::Device(_)) => &STATS.d2d_bytes,
    }
}

/// A synchronous copy, on the default stream.
fn copy_now(to: End, from: End, bytes: usize) -> CallResult {
    let stream = &current_device()?.null;
    copy(stream, to, from, bytes)?;
    stream.synchronize()
}

/// Fills `count` elements of `N` bytes each.
fn fill<const N: usize>(
    stream: &Stream,
    address: u64,
    element: [u8; N],
    count: usize,
) -> CallResult {
    let (address, bytes) = (address as usize, count * N);
    if bytes == 0 {
        return Ok(());
    }
    if !address.is_multiple_of(N)
        || !matches!(place(address, bytes), Place::Device(_) | Place::Pinned)
    {
        return Err(code::INVALID_VALUE);
    }
    stream.push(move |_| {
        check_accessible("fill", address, bytes)?;
        if !config().accounting {
            // SAFETY: the range was just found in the tables of live memory.
            let range = unsafe { std::slice::from_raw_parts_mut(address as *mut [u8; N], count) };
            range.fill(element);
        }
        STATS.memset_bytes.add(bytes as u64);
        Ok(())
    });
    Ok(())
}

fn fill_now<const N: usize>(address: u64, element: [u8; N], count: usize) -> CallResult {
    let stream = &current_device()?.null;
    fill(stream, address, element, count)?;
    stream.synchronize()
}

fn device_end(address: u64) -> End {
    End::Device(address as usize)
}

driver_functions! {
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        copy_now(device_end(to), End::Host(from as usize), bytes)
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        copy_now(End::Host(to as usize), device_end(from), bytes)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now(device_end(to), device_end(from), bytes)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, handle: *mut c_void) {
        copy(&stream(handle)?, device_end(to), End::Host(from as usize), bytes)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, handle: *mut c_void) {
        copy(&stream(handle)?, End::Host(to as usize), device_end(from), bytes)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, handle: *mut c_void) {
        copy(&stream(handle)?, device_end(to), device_end(from), bytes)
    }

    fn cuMemcpyPeerAsync(
        to: u64,
        to_context: *mut c_void,
        from: u64,
        from_context: *mut c_void,
        bytes: usize,
        handle: *mut c_void,
    ) {
        for (address, context) in [(to, to_context), (from, from_context)] {
            let device = context_device(context)?.ordinal;
            if bytes > 0 && place(address as usize, bytes) != Place::Device(device) {
                return Err(code::INVALID_VALUE);
            }
        }
        copy(&stream(handle)?, device_end(to), device_end(from), bytes)
    }

    /// The direction follows from the addresses.
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, handle: *mut c_void) {
        let end = |address: u64| match place(address as usize, bytes) {
            Place::Device(_) => End::Device(address as usize),
            _ => End::Host(address as usize),
        };
        copy(&stream(handle)?, end(to), end(from), bytes)
    }

    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) {
        fill_now(address, [value], count)
    }

    fn cuMemsetD16_v2(address: u64, value: u16, count: usize) {
        fill_now(address, value.to_ne_bytes(), count)
    }

    fn cuMemsetD32_v2(address: u64, value: u32, count: usize) {
        fill_now(address, value.to_ne_bytes(), count)
    }

    fn cuMemsetD8Async(address: u64, value: u8, count: usize, handle: *mut c_void) {
        fill(&*stream(handle)?, address, [value], count)
    }

    fn cuMemsetD16Async(address: u64, value: u16, count: usize, handle: *mut c_void) {
        fill(&*stream(handle)?, address, value.to_ne_bytes(), count)
    }

    fn cuMemsetD32Async(address: u64, value: u32, count: usize, handle: *mut c_void) {
        fill(&*stream(handle)?, address, value.to_ne_bytes(), count)
    }
}
