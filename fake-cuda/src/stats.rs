//! Counters for tests.
#![expect(unsafe_code, reason = "the counters cross a C interface")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{machine::machine, sync::lock};

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }
}

macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// What the fake libraries have done since the process started.
        #[repr(C)]
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
        pub struct Stats { $($(#[$meta])* pub $name: u64,)* }

        #[derive(Debug)]
        pub(crate) struct Counters { $(pub(crate) $name: Counter,)* }

        pub(crate) static STATS: Counters = Counters { $($name: Counter::new(),)* };

        fn snapshot() -> Stats {
            Stats { $($name: STATS.$name.0.load(Relaxed),)* }
        }
    };
}

counters! {
    /// Driver calls.
    calls,
    /// Driver calls that returned an error (not counting `NOT_READY`).
    errors,
    /// Work that streams have run: copies, fills, kernels, products, collectives, host functions.
    ops,
    /// Kernels launched.
    launches,
    /// Matrix products enqueued.
    gemms,
    /// Collectives enqueued, per rank.
    collectives,
    /// Payload bytes of these, per rank.
    collective_bytes,
    /// Bytes copied from host to device.
    h2d_bytes,
    /// Bytes copied from device to host.
    d2h_bytes,
    /// Bytes copied within or between devices.
    d2d_bytes,
    /// Bytes filled.
    memset_bytes,
    /// Async copies that blocked because the host memory was not pinned.
    pageable_copies,
    /// Event records.
    records,
    /// Stream waits for events.
    waits,
    /// Stream waits for and writes of 32-bit values.
    value_ops,
    /// Host functions enqueued.
    host_functions,
    /// Device allocations.
    allocations,
    /// Device frees.
    frees,
    /// Pinned allocations and registrations.
    pinned,
    /// Bytes of these.
    pinned_bytes,
    /// NVRTC compilations.
    compilations,
    /// Times that the caller blocked for a stream, event or device.
    synchronizations,
    /// Times that memory beside allocations was taken: code, buffers, streams, events, page tables.
    taken_beside,
    /// Enqueues that found their queue full: each blocked its thread.
    blocked,
    /// Writes found in freed memory.
    writes_after_free,
}

/// Memory of one device.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes allocated now.
    pub used: u64,
    /// The most that were allocated at once.
    pub peak: u64,
    /// Bytes taken now beside allocations.
    pub beside: u64,
    /// The most that were taken at once, allocations and what lies beside them.
    pub peak_in_all: u64,
}

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

/// Sets the clock of events forward.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_advance(seconds: u64) {
    crate::driver::events::advance(seconds);
}

/// The counters of the libraries that this process opened by name; `None` when they are not fake.
pub fn stats() -> Option<Stats> {
    let mut stats = Stats::default();
    let function = symbol(c"fakecuda_stats")?;
    // SAFETY: the function of this name, above, has this type.
    let function = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Stats, usize) -> c_int>(
            function,
        )
    };
    // SAFETY: a pointer to a local of the size that is said.
    let result = unsafe { function(&raw mut stats, size_of::<Stats>()) };
    (result == 0).then_some(stats)
}

/// The memory use of a device of the libraries that this process opened by name.
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

/// From here on the events of the libraries that this process opened by name say that so much more time has gone by.
/// False: these are not fake.
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

/// Asks the opened library, not this copy of the crate: only that one has seen any calls.
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
