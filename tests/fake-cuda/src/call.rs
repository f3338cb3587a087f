//! Result type of exported functions, and writes through a caller's pointers.
#![expect(unsafe_code, reason = "writes through the caller's pointers")]

use std::ffi::c_int;

use crate::code;

pub(crate) type CallResult = Result<(), c_int>;

/// Writes `value` through a caller's out-pointer; a null pointer is refused.
pub(crate) fn put<T>(out: *mut T, value: T) -> CallResult {
    if out.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the C interface demands that a non-null out-pointer be valid for one write.
    unsafe { out.write(value) };
    Ok(())
}

/// Copies a string with its terminator into a caller's buffer, cut to `len` bytes.
pub(crate) fn put_string(out: *mut std::ffi::c_char, len: i32, text: &str) -> CallResult {
    let Ok(len) = usize::try_from(len) else { return Err(code::INVALID_VALUE) };
    if out.is_null() || len == 0 {
        return Err(code::INVALID_VALUE);
    }
    let kept = text.len().min(len - 1);
    // SAFETY: the buffer holds `len` bytes by the C interface, and `kept + 1 <= len`.
    let buffer = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), kept + 1) };
    buffer[..kept].copy_from_slice(&text.as_bytes()[..kept]);
    buffer[kept] = 0;
    Ok(())
}
