//! Streams, host functions, and waits for 32-bit values in memory.
#![expect(unsafe_code, reason = "exported C functions; values are read and written by address")]

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    time::Duration,
};

use super::memory::{Place, check_accessible, place};
use crate::{
    call::{CallResult, put},
    code,
    counters::STATS,
    machine::{current_device, driver_functions, machine, stream},
    overhead,
    stream::{Stream, wait_for_launches},
};

fn create(out: *mut *mut c_void, flags: c_uint, priority: c_int) -> CallResult {
    let device = current_device()?;
    if flags > 1 {
        return Err(code::INVALID_VALUE);
    }
    device.take_overhead(overhead::STREAM)?;
    let priority = priority.clamp(-5, 0);
    let stream = Stream::create(&device.health, flags, priority);
    put(out, machine().streams.insert(stream))
}

fn value_at(address: u64) -> Result<usize, c_int> {
    let usable = address.is_multiple_of(4)
        && matches!(place(address as usize, 4), Place::Device(_) | Place::Pinned);
    if usable { Ok(address as usize) } else { Err(code::INVALID_VALUE) }
}

fn wait_value(handle: *mut c_void, address: u64, value: u32, flags: c_uint) -> CallResult {
    const FLUSH: u32 = 1 << 30;
    let stream = stream(handle)?;
    let address = value_at(address)?;
    let condition: fn(u32, u32) -> bool = match flags & !FLUSH {
        0 => |now, value| now.wrapping_sub(value).cast_signed() >= 0,
        1 => |now, value| now == value,
        2 => |now, value| now & value != 0,
        3 => |now, value| !(now | value) != 0,
        _ => return Err(code::INVALID_VALUE),
    };
    STATS.value_ops.add(1);
    stream.push(move |device| {
        loop {
            check_accessible("wait for a value", address, 4)?;
            // SAFETY: the word was just found in the tables of live memory; it is 4-aligned.
            let now = unsafe { AtomicU32::from_ptr(address as *mut u32) }.load(SeqCst);
            if condition(now, value) || device.alive().is_err() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    });
    Ok(())
}

fn write_value(handle: *mut c_void, address: u64, value: u32) -> CallResult {
    let stream = stream(handle)?;
    let address = value_at(address)?;
    STATS.value_ops.add(1);
    stream.push(move |_| {
        check_accessible("write of a value", address, 4)?;
        // SAFETY: the word was just found in the tables of live memory; it is 4-aligned.
        unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(value, SeqCst);
        Ok(())
    });
    Ok(())
}

/// A caller's pointer that a job carries to the stream's thread.
struct UserData(*mut c_void);

// SAFETY: the C interface passes the pointer to the thread that runs the host function.
unsafe impl Send for UserData {}

impl UserData {
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

driver_functions! {
    fn cuStreamCreate(out: *mut *mut c_void, flags: c_uint) {
        create(out, flags, 0)
    }

    fn cuStreamCreateWithPriority(out: *mut *mut c_void, flags: c_uint, priority: c_int) {
        create(out, flags, priority)
    }

    /// Work that is still queued runs to its end.
    fn cuStreamDestroy_v2(handle: *mut c_void) {
        let stream = machine().streams.remove(handle)?;
        machine().devices[stream.device].free_overhead(overhead::STREAM);
        stream.close();
        Ok(())
    }

    fn cuStreamSynchronize(handle: *mut c_void) {
        wait_for_launches();
        stream(handle)?.synchronize()
    }

    fn cuStreamQuery(handle: *mut c_void) {
        wait_for_launches();
        if stream(handle)?.is_idle() { Ok(()) } else { Err(code::NOT_READY) }
    }

    fn cuStreamGetPriority(handle: *mut c_void, out: *mut c_int) {
        put(out, stream(handle)?.priority)
    }

    fn cuStreamGetFlags(handle: *mut c_void, out: *mut c_uint) {
        put(out, stream(handle)?.flags)
    }

    fn cuStreamIsCapturing(handle: *mut c_void, out: *mut c_int) {
        stream(handle)?;
        put(out, 0)
    }

    fn cuLaunchHostFunc(
        handle: *mut c_void,
        function: Option<unsafe extern "C" fn(*mut c_void)>,
        data: *mut c_void,
    ) {
        let stream = stream(handle)?;
        let function = function.ok_or(code::INVALID_VALUE)?;
        let data = UserData(data);
        STATS.host_functions.add(1);
        stream.push(move |_| {
            // SAFETY: the caller keeps function and data valid until it has run.
            unsafe { function(data.pointer()) };
            Ok(())
        });
        Ok(())
    }

    fn cuStreamWaitValue32(handle: *mut c_void, address: u64, value: u32, flags: c_uint) {
        wait_value(handle, address, value, flags)
    }

    fn cuStreamWaitValue32_v2(handle: *mut c_void, address: u64, value: u32, flags: c_uint) {
        wait_value(handle, address, value, flags)
    }

    fn cuStreamWriteValue32(handle: *mut c_void, address: u64, value: u32, _flags: c_uint) {
        write_value(handle, address, value)
    }

    fn cuStreamWriteValue32_v2(handle: *mut c_void, address: u64, value: u32, _flags: c_uint) {
        write_value(handle, address, value)
    }
}
