//! What can go wrong while the machine is read or a thread is bound.

use std::io;
use std::path::PathBuf;

/// An error of this crate. CPU lists are written the Linux way: `0-3,8`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The loaded libhwloc has another layout than the one that its Rust binding reads.
    #[error("libhwloc has API version {found:#x}, but only hwloc 2.x (0x2....) can be used")]
    HwlocVersion {
        /// What `hwloc_get_api_version` returned.
        found: u32,
    },
    /// hwloc gave no topology at all.
    #[error("hwloc could not read the topology: {why}")]
    HwlocLoad {
        /// The operating system's reason.
        why: String,
    },
    /// A text does not describe a box.
    #[error("this is no topology that hwloc 2 wrote: {why}")]
    NotABox {
        /// What is wrong with it.
        why: String,
    },
    /// A synthetic description that hwloc does not understand.
    #[error(
        "hwloc does not understand this description: {why}; an example is \"pack:2 numa:1 core:8 \
         pu:2\", where each count is per item of the level before and pu comes last"
    )]
    NotSynthetic {
        /// The operating system's reason.
        why: String,
    },
    /// More ranks are asked for than there are GPUs.
    #[error("{ranks} ranks are asked for, but the box has {}", crate::counted(.gpus, "GPU"))]
    TooFewGpus {
        /// TP x DP.
        ranks: usize,
        /// GPUs of the box.
        gpus: usize,
    },
    /// The operating system refused memory.
    #[error("cannot map {} of host memory: {source}", crate::format_bytes(*bytes as u64))]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// The operating system's reason.
        source: io::Error,
    },
    /// hwloc describes a file or a synthetic machine; binding through it would do nothing, without an error.
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
        /// The CPUs asked for.
        cpus: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The operating system accepted the binding but left some of the CPUs out.
    #[error("asked to bind the thread to CPUs {asked:?}, but it may only use {got:?}")]
    BoundElsewhere {
        /// The CPUs asked for.
        asked: String,
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
