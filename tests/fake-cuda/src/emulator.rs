//! Kernels on the CPU: the emulator of `shim/`, if it is built in, and a few kernels for this
//! crate's own tests.
#![expect(unsafe_code, reason = "kernels get and use raw addresses")]

use std::{
    ffi::{CStr, c_void},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use crate::sync::complain;

#[cfg(kernel_emulator)]
mod shim {
    use std::ffi::{c_char, c_int, c_void};

    unsafe extern "C" {
        /// Number of a kernel's parameters, and their sizes in bytes; -1 for an unknown kernel.
        pub(super) fn onebox_emulated_parameters(
            kernel: *const c_char,
            sizes: *mut *const u32,
        ) -> c_int;
        /// Runs a kernel to its end; 0 on success.
        pub(super) fn onebox_emulated_launch(
            kernel: *const c_char,
            grid: *const u32,
            block: u32,
            shared_bytes: u32,
            arguments: *mut *mut c_void,
        ) -> c_int;
    }
}

#[cfg(not(kernel_emulator))]
mod shim {
    use std::ffi::{c_char, c_int, c_void};

    pub(super) unsafe fn onebox_emulated_parameters(
        _kernel: *const c_char,
        _sizes: *mut *const u32,
    ) -> c_int {
        -1
    }

    pub(super) unsafe fn onebox_emulated_launch(
        _kernel: *const c_char,
        _grid: *const u32,
        _block: u32,
        _shared_bytes: u32,
        _arguments: *mut *mut c_void,
    ) -> c_int {
        -1
    }
}

/// The kernels of this crate's tests: name, and parameter sizes in bytes.
const BUILT_IN: [(&CStr, &[usize]); 3] = [
    // x[i] = value, for i < n
    (c"fake_fill", &[8, 4, 4]),
    // x[i] += y[i], for i < n
    (c"fake_add", &[8, 8, 4]),
    // counter += threads, atomically
    (c"fake_count", &[8]),
];

/// Sizes of a kernel's parameters in bytes; `None` for an unknown kernel.
pub(crate) fn parameter_sizes(kernel: &CStr) -> Option<Vec<usize>> {
    if let Some((_, sizes)) = BUILT_IN.iter().find(|(name, _)| *name == kernel) {
        return Some(sizes.to_vec());
    }
    let mut sizes = std::ptr::null();
    // SAFETY: a terminated string and an out-pointer, used during the call only.
    let count = unsafe { shim::onebox_emulated_parameters(kernel.as_ptr(), &raw mut sizes) };
    let count = usize::try_from(count).ok()?;
    // SAFETY: the emulator's table has `count` sizes and is never changed.
    Some((0..count).map(|index| unsafe { *sizes.add(index) } as usize).collect())
}

/// Runs a kernel to its end, on this thread.
pub(crate) fn run(
    kernel: &CStr,
    grid: [u32; 3],
    block: u32,
    shared_bytes: u32,
    mut values: Vec<u64>,
) -> Result<(), ()> {
    if BUILT_IN.iter().any(|(name, _)| *name == kernel) {
        run_built_in(kernel, grid[0] * block, &values);
        return Ok(());
    }
    let mut arguments: Vec<*mut c_void> =
        values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    // SAFETY: the emulator copies from `arguments`, one entry for each parameter, 8 bytes each. The
    // addresses in the entries are the caller's: a kernel with a wrong address should crash.
    let code = unsafe {
        shim::onebox_emulated_launch(
            kernel.as_ptr(),
            grid.as_ptr(),
            block,
            shared_bytes,
            arguments.as_mut_ptr(),
        )
    };
    if code == 0 {
        return Ok(());
    }
    complain(&format!("kernel {kernel:?} failed with {code}"));
    Err(())
}

fn run_built_in(kernel: &CStr, threads: u32, values: &[u64]) {
    let count = |value: u64| (value as u32).min(threads) as usize;
    match kernel.to_bytes() {
        b"fake_fill" => {
            // SAFETY: the test passes an array of at least this many floats.
            let x =
                unsafe { std::slice::from_raw_parts_mut(values[0] as *mut f32, count(values[2])) };
            x.fill(f32::from_bits(values[1] as u32));
        }
        b"fake_add" => {
            for index in 0..count(values[2]) {
                // SAFETY: as above, for both arrays.
                unsafe {
                    *(values[0] as *mut f32).add(index) += *(values[1] as *const f32).add(index);
                }
            }
        }
        _ => {
            // SAFETY: the test passes the address of an aligned word.
            let counter = unsafe { AtomicU32::from_ptr(values[0] as *mut u32) };
            counter.fetch_add(threads, Relaxed);
        }
    }
}
