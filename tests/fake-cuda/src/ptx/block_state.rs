//! Where a block runs, and what a launch shows.

use std::collections::HashSet;

use super::count::Counts;
use super::fault::{Fault, FaultKind};
use super::kernel::Kernel;
use super::memory::{Memory, Region};
use super::op::Instruction;

/// What a launch showed.
#[derive(Debug, Default)]
pub struct Run {
    /// The first fault of each kind at each instruction. After one of kind `Parted` or `Endless` the launch is not
    /// complete.
    pub faults: Vec<Fault>,
    /// Counts over all blocks.
    pub counts: Counts,
}

/// Where a block runs.
#[derive(Debug)]
pub(super) struct BlockState<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) memory: &'a mut Memory,
    pub(super) shared: Region,
    pub(super) run: Run,
    pub(super) seen: HashSet<(FaultKind, usize)>,
    pub(super) block: [u32; 3],
    /// Of the block.
    pub(super) number: usize,
    /// Barriers so far.
    pub(super) epoch: u64,
}

impl BlockState<'_> {
    /// Keeps the first fault of a kind at an instruction.
    pub(super) fn report(&mut self, kind: FaultKind, at: usize, thread: usize, about: String) {
        if !self.seen.insert((kind, at)) {
            return;
        }
        let Instruction { line, source, .. } =
            &self.kernel.code[at.min(self.kernel.code.len() - 1)];
        self.run.faults.push(Fault {
            kind,
            kernel: self.kernel.name.clone(),
            line: *line,
            source: source.clone(),
            block: self.block,
            thread: thread as u32,
            about,
        });
    }
}
