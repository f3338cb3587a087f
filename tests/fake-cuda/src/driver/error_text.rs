//! Names and texts of error codes.
#![expect(unsafe_code, reason = "exported C functions")]

use std::ffi::{CStr, c_char, c_int};

use crate::{
    call::put,
    code::{INVALID_VALUE, SUCCESS, name_and_text},
};

fn put_text(out: *mut *const c_char, text: Option<&'static CStr>) -> c_int {
    let pointer = text.map_or(std::ptr::null(), CStr::as_ptr);
    match (put(out, pointer), text) {
        (Ok(()), Some(_)) => SUCCESS,
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: c_int, out: *mut *const c_char) -> c_int {
    put_text(out, name_and_text(code).map(|(name, _)| name))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: c_int, out: *mut *const c_char) -> c_int {
    put_text(out, name_and_text(code).map(|(_, text)| text))
}
