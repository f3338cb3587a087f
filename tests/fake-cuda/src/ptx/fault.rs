//! Faults that the interpreter finds in a kernel.

use std::fmt;

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FaultKind {
    /// Two threads access one byte, at least one writes it, and nothing orders the two accesses. A
    /// barrier of the block orders them, and so does `__syncwarp` within a warp; a shuffle does
    /// not. Nothing orders threads of two blocks. A copy by `cp.async` and accesses of its own
    /// thread are not ordered before the thread waits for the copy.
    Race,
    /// A read of bytes that were never written.
    Uninitialised,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// An access outside of the launch's memory.
    OutOfRange,
    /// A barrier, shuffle or matrix operation that some of its threads do not reach.
    Parted,
    /// A kernel that does not end.
    Endless,
}

/// A fault, the first of its kind at its instruction.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// The kernel's name.
    pub kernel: String,
    /// Line of the PTX text, from 1.
    pub line: usize,
    /// Line of the source; empty if the text has no line information.
    pub source: String,
    /// Index of the block in the grid.
    pub block: [u32; 3],
    /// Number of the thread in the block.
    pub thread: u32,
    /// Details: the address, and the other thread of a race.
    pub about: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, kernel, line, source, block, thread, about } = self;
        write!(
            to,
            "{kind:?} in {kernel}, PTX line {line} ({source}), block {block:?}, thread {thread}: {about}"
        )
    }
}
