//! Texts of hwloc: names, and values by their names.
#![expect(unsafe_code, reason = "reads strings of C")]

use std::ffi::{CStr, c_char, c_uint};

/// `struct hwloc_info_s` of hwloc 2.x.
#[repr(C)]
pub(crate) struct Info {
    name: *const c_char,
    value: *const c_char,
}

/// Names and values from `at`.
///
/// # Safety
/// `at` points to `count` entries, which do not change during the call.
pub(crate) unsafe fn infos(at: *const Info, count: c_uint) -> Vec<(String, String)> {
    let of = |i: usize| {
        // SAFETY: the caller guarantees `count` entries.
        let info = unsafe { at.wrapping_add(i).as_ref() }?;
        Some((text(info.name)?, text(info.value)?))
    };
    (0..count as usize).filter_map(of).collect()
}

/// A string of hwloc; none for NULL.
pub(crate) fn text(at: *const c_char) -> Option<String> {
    if at.is_null() {
        return None;
    }
    // SAFETY: hwloc's strings are NUL-terminated and live as long as their object.
    Some(unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}
