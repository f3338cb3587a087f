//! Device memory that the driver and the libraries use outside of allocations: code, buffers and
//! tables, as on a real GPU. Some of them are created at their first use.

use std::collections::BTreeSet;

use crate::config::config;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Code that is loaded once for a device and stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LoadedCode {
    /// The driver's code, loaded with the primary context.
    Context,
    /// cuBLASLt's matmuls for the architecture, loaded with the first handle.
    CublasLt,
    /// NCCL's kernels, loaded with the first communicator.
    Nccl,
    /// Code of a kind of matmul (types, transposition, epilogue), loaded at its first use.
    Product(u64),
}

impl LoadedCode {
    /// Bytes on an architecture, for cuBLASLt and NCCL counted in the files of 12.8.4 and 2.27.5.
    pub(crate) fn bytes(self, sm: i32) -> usize {
        let of = |volta: usize, ampere: usize, hopper: usize| match sm {
            ..80 => volta,
            80..90 => ampere,
            _ => hopper,
        };
        match self {
            Self::Context => of(300, 400, 500) * MIB,
            Self::CublasLt => of(97, 189, 357) * MIB,
            Self::Nccl => of(47, 47, 101) * MIB,
            Self::Product(_) => MIB,
        }
    }
}

/// Bytes of a module, of a kernel at its first launch, of a stream, and of an event.
pub(crate) const MODULE: usize = 2 * MIB;
pub(crate) const KERNEL: usize = 64 * KIB;
pub(crate) const STREAM: usize = MIB;
pub(crate) const EVENT: usize = 256;

/// Bytes of a communicator's rank: when it joins, at its first collective, and at its first
/// collective of more than [`LARGE`] bytes.
pub(crate) const JOINED: usize = 8 * MIB;
pub(crate) const CONNECTED: usize = 500 * MIB;
pub(crate) const CONNECTED_LARGE: usize = 100 * MIB;

/// Bytes of a collective above which NCCL uses another algorithm, with its own buffers.
pub(crate) const LARGE: usize = 256 * KIB;

/// Bytes of the page tables of pinned memory, in each context that maps the memory: 8 for 4 KiB.
pub(crate) const fn page_tables(bytes: usize) -> usize {
    bytes.div_ceil(4096) * 8
}

/// Memory of one device that is used outside of allocations.
#[derive(Debug, Default)]
pub(crate) struct DeviceOverhead {
    pub(crate) loaded: BTreeSet<LoadedCode>,
    pub(crate) bytes: usize,
}

/// Part of `bytes` that counts, by the percentage in `FAKECUDA_BESIDE`.
pub(crate) fn share(bytes: usize) -> usize {
    bytes * config().overhead_percent / 100
}
