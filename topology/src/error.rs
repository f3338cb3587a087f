//! Errors of discovery and binding.

use std::io;
use std::path::PathBuf;

/// An error of this crate. CPU lists are written the Linux way: `0-3,8`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The loaded libhwloc lays out its structures differently from the Rust binding.
    #[error("libhwloc has API version {found:#x}, but only hwloc 2.x (0x2....) can be used")]
    HwlocVersion {
        /// The result of `hwloc_get_api_version`.
        found: u32,
    },
    /// hwloc returned no topology.
    #[error("hwloc could not read the topology: {why}")]
    HwlocLoad {
        /// The operating system's reason.
        why: String,
    },
    /// A text does not describe a box.
    #[error("this is no topology that hwloc 2 wrote: {why}")]
    NotABox {
        /// The reason, in words.
        why: String,
    },
    /// hwloc does not understand a synthetic description.
    #[error(
        "hwloc does not understand this description: {why}; an example is \"pack:2 numa:1 core:8 \
         pu:2\", where each count is per item of the level before and pu comes last"
    )]
    NotSynthetic {
        /// The operating system's reason.
        why: String,
    },
    /// The box has fewer GPUs than the requested ranks.
    #[error("{ranks} ranks are asked for, but the box has {}", crate::counted(.gpus, "GPU"))]
    TooFewGpus {
        /// Requested ranks, TP x DP.
        ranks: usize,
        /// GPUs of the box.
        gpus: usize,
    },
    /// The operating system refused memory.
    #[error("cannot map {} of host memory: {source}", crate::format_bytes(*bytes as u64))]
    Map {
        /// Requested bytes.
        bytes: usize,
        /// The operating system's reason.
        source: io::Error,
    },
    /// hwloc describes a file or a synthetic machine. Binding through it would do nothing and
    /// report success.
    #[error(
        "hwloc does not describe this machine, so threads cannot be bound; \
         unset HWLOC_XMLFILE and HWLOC_SYNTHETIC if they are set"
    )]
    NotThisMachine,
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The operating system refused the binding.
    #[error("cannot bind the thread to CPUs {cpus:?}: {source}")]
    Bind {
        /// The requested CPUs.
        cpus: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The operating system accepted the binding but left out some of the CPUs.
    #[error("asked to bind the thread to CPUs {requested:?}, but it may only use {got:?}")]
    BoundElsewhere {
        /// The requested CPUs.
        requested: String,
        /// The CPUs on which the thread now runs.
        got: String,
    },
    /// The binding of the calling thread could not be read.
    #[error("cannot read the CPU binding of the thread: {source}")]
    ReadBinding {
        /// The operating system's reason.
        source: io::Error,
    },
}
