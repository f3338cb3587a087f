//! Counters of what the fake libraries do.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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

        pub(crate) fn snapshot() -> Stats {
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
