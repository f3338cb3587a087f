//! What the interpreter finds wrong with a kernel.

use std::fmt;

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FaultKind {
    /// Two threads touch one byte, at least one writes it, and nothing orders the two accesses: no barrier of the block
    /// and, within a warp, no `__syncwarp`. A shuffle orders no memory. Nothing orders threads of two blocks. Nor does anything
    /// order a copy by `cp.async` and what its own thread does before it waits for the copy.
    Race,
    /// A read of bytes that nothing has written.
    Uninitialised,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// An access outside the memory that the launch was given.
    OutOfRange,
    /// A barrier, shuffle or matrix operation that some of its threads do not reach.
    Parted,
    /// The kernel runs on and on.
    Endless,
}

/// A fault, the first of its kind at its instruction.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What is wrong.
    pub kind: FaultKind,
    /// The kernel's name.
    pub kernel: String,
    /// Line of the PTX text, from 1.
    pub line: usize,
    /// Line of the source, where the text has line information.
    pub source: String,
    /// The block.
    pub block: [u32; 3],
    /// The thread of the block.
    pub thread: u32,
    /// The address, and the other thread of a race.
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
