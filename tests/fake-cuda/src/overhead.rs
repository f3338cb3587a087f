//! What the driver and the libraries take of a device's memory beside allocations: code, buffers and tables that a real
//! GPU holds too, some of them made as late as their first use.

use std::collections::BTreeSet;

use crate::config::config;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// What is loaded once for a device and stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LoadedCode {
    /// The driver's own, with the primary context.
    Context,
    /// cuBLASLt's products for the architecture, with the first handle.
    CublasLt,
    /// NCCL's kernels, with the first communicator.
    Nccl,
    /// What a product needs at its first use: types and transposition.
    Product(u64),
}

impl LoadedCode {
    /// Bytes on an architecture. cuBLASLt and NCCL: counted in the files of 12.8.4 and 2.27.5.
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

/// Of a module, of a kernel at its first launch, of a stream, of an event.
pub(crate) const MODULE: usize = 2 * MIB;
pub(crate) const KERNEL: usize = 64 * KIB;
pub(crate) const STREAM: usize = MIB;
pub(crate) const EVENT: usize = 256;

/// Of a rank of a communicator: when it joins, at its first collective, at the first one of more than [`LARGE`] bytes.
pub(crate) const JOINED: usize = 8 * MIB;
pub(crate) const CONNECTED: usize = 500 * MIB;
pub(crate) const CONNECTED_LARGE: usize = 100 * MIB;

/// Bytes from which NCCL takes another algorithm, with buffers of its own.
pub(crate) const LARGE: usize = 256 * KIB;

/// Page tables of so many pinned bytes, in each context that maps them: 8 bytes for 4 KiB.
pub(crate) const fn page_tables(bytes: usize) -> usize {
    bytes.div_ceil(4096) * 8
}

/// Bytes of one device beside its allocations.
#[derive(Debug, Default)]
pub(crate) struct DeviceOverhead {
    pub(crate) loaded: BTreeSet<LoadedCode>,
    pub(crate) bytes: usize,
}

/// What is taken for `bytes`: the part of them that `FAKECUDA_BESIDE` says.
pub(crate) fn share(bytes: usize) -> usize {
    bytes * config().beside_percent / 100
}
