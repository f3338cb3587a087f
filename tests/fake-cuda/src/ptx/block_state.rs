//! State of a running block, and the results of a launch.

use std::collections::HashSet;

use super::count::Counts;
use super::fault::{Fault, FaultKind};
use super::kernel::Kernel;
use super::memory::{Memory, Region};
use super::op::Instruction;

/// Results of a launch.
#[derive(Debug, Default)]
pub struct Run {
    /// The first fault of each kind at each instruction. A fault of kind `Parted` or `Endless` ends
    /// the launch early.
    pub faults: Vec<Fault>,
    /// Counts over all blocks.
    pub counts: Counts,
}

/// State of a running block.
#[derive(Debug)]
pub(super) struct BlockState<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) memory: &'a mut Memory,
    pub(super) shared: Region,
    pub(super) run: Run,
    pub(super) seen: HashSet<(FaultKind, usize)>,
    pub(super) block: [u32; 3],
    /// Number of the block in the grid.
    pub(super) number: usize,
    /// Number of barriers that the block has passed.
    pub(super) epoch: u64,
}

impl BlockState<'_> {
    /// Records the first fault of a kind at an instruction.
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
