//! Access of tests to the counters.
#![expect(unsafe_code, reason = "the counters cross a C interface")]

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::{
    clock,
    counters::{MemoryUse, Stats, snapshot},
    machine::machine,
    sync::lock,
};

/// Fills `out` with the counters; `size` is the caller's `sizeof(Stats)`. 0 on success.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_stats(out: *mut Stats, size: usize) -> c_int {
    if out.is_null() || size != size_of::<Stats>() {
        return 1;
    }
    // SAFETY: not null, and the caller has said that it is of this size.
    unsafe { out.write(snapshot()) };
    0
}

/// Fills `out` with one device's memory use. 0 on success.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_memory(device: c_int, out: *mut MemoryUse) -> c_int {
    let found = usize::try_from(device).ok().and_then(|index| machine().devices.get(index));
    let Some(device) = found.filter(|_| !out.is_null()) else { return 1 };
    let use_now = lock(&device.memory).in_use();
    // SAFETY: not null; the interface demands a pointer to a `MemoryUse`.
    unsafe { out.write(use_now) };
    0
}

/// Sets the clock of events forward, by seconds.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_advance(seconds: u64) {
    clock::advance(seconds);
}

/// The counters of the libraries that this process opened by name; `None` if they are not fake.
pub fn stats() -> Option<Stats> {
    let mut stats = Stats::default();
    let function = symbol(c"fakecuda_stats")?;
    // SAFETY: the function of this name, above, has this type.
    let function = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Stats, usize) -> c_int>(
            function,
        )
    };
    // SAFETY: a pointer to a local of the given size.
    let result = unsafe { function(&raw mut stats, size_of::<Stats>()) };
    (result == 0).then_some(stats)
}

/// The memory use of a device of the libraries that this process opened by name; `None` if they are
/// not fake or the device does not exist.
pub fn memory_use(device: i32) -> Option<MemoryUse> {
    let mut memory = MemoryUse::default();
    let function = symbol(c"fakecuda_memory")?;
    // SAFETY: the function of this name, above, has this type.
    let function = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *mut MemoryUse) -> c_int>(
            function,
        )
    };
    // SAFETY: a pointer to a local.
    let result = unsafe { function(device, &raw mut memory) };
    (result == 0).then_some(memory)
}

/// Sets the clock of events in the opened libraries forward, by seconds. False if they are not
/// fake.
pub fn advance(seconds: u64) -> bool {
    let Some(function) = symbol(c"fakecuda_advance") else { return false };
    // SAFETY: the function of this name, above, has this type.
    let function = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(u64)>(function) };
    function(seconds);
    true
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Address of a function in the opened library, which counts the calls; this copy of the crate does
/// not.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    const RTLD_LAZY: c_int = 1;
    // SAFETY: a string that ends in 0.
    let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_LAZY) };
    if library.is_null() {
        return None;
    }
    // SAFETY: `library` was opened and is never closed.
    let symbol = unsafe { dlsym(library, name.as_ptr()) };
    (!symbol.is_null()).then_some(symbol)
}
