//! Counters of calls, ops, bytes and memory of the fake libraries.

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
        /// Counts of the fake libraries since the process started.
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
    /// Ops that streams have run: copies, fills, kernels, matmuls, collectives, host functions.
    ops,
    /// Kernels launched.
    launches,
    /// Matmuls enqueued.
    gemms,
    /// Matmuls enqueued by another algorithm than the first of the heuristic.
    other_gemms,
    /// Matmuls enqueued with an epilogue other than a bias.
    fused_gemms,
    /// Graphs of cuDNN enqueued.
    graphs,
    /// Matmuls enqueued with a target number of multiprocessors.
    gemms_beside,
    /// Communicators of ranks that were made with a bound of blocks.
    bounded_communicators,
    /// Sum of these bounds.
    communicator_ctas,
    /// Collectives enqueued, per rank.
    collectives,
    /// Payload bytes of the enqueued collectives, per rank.
    collective_bytes,
    /// Bytes copied from host to device.
    h2d_bytes,
    /// Bytes copied from device to host.
    d2h_bytes,
    /// Bytes copied within or between devices.
    d2d_bytes,
    /// Bytes filled.
    memset_bytes,
    /// Copies that blocked because the host memory was not pinned.
    pageable_copies,
    /// Event records.
    records,
    /// Stream waits for events.
    waits,
    /// Stream ops that wait for a 32-bit value or write one.
    value_ops,
    /// Host functions enqueued.
    host_functions,
    /// Device allocations.
    allocations,
    /// Device frees.
    frees,
    /// Pinned allocations and registrations.
    pinned,
    /// Bytes of the pinned allocations and registrations.
    pinned_bytes,
    /// NVRTC compilations.
    compilations,
    /// Times that the caller blocked for a stream, event or device.
    synchronizations,
    /// Uses of memory outside of allocations: code, buffers, streams, events, page tables.
    overhead_allocations,
    /// Enqueues that found a full queue and blocked their thread.
    blocked,
    /// Freed allocations in which a later write was found.
    writes_after_free,
}

/// Memory use of one device.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes allocated now.
    pub used: u64,
    /// Peak of the allocated bytes.
    pub peak: u64,
    /// Bytes used now outside of allocations, by code, buffers and tables.
    pub overhead: u64,
    /// Peak of the bytes used inside and outside of allocations together.
    pub peak_in_all: u64,
}
