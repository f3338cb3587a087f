//! A compiled kernel.

use super::flow;
use super::op::{Instruction, Reg, SpecialRegister};

/// A kernel, ready to run.
#[derive(Debug, Default)]
pub struct Kernel {
    /// Its name in the source.
    pub name: String,
    /// Bytes of each parameter.
    pub parameters: Vec<usize>,
    /// Bytes of shared memory that the source declares.
    pub shared_bytes: usize,
    pub(super) code: Vec<Instruction>,
    /// By instruction, the instruction at which separated lanes reconverge.
    pub(super) meets: Vec<usize>,
    /// Number of registers.
    pub(super) registers: usize,
    pub(super) constants: Vec<(Reg, u64)>,
    pub(super) specials: Vec<(Reg, SpecialRegister)>,
    /// Register of each parameter.
    pub(super) arguments: Vec<Reg>,
    /// The registers that hold the start of dynamic shared memory.
    pub(super) dynamic: Vec<Reg>,
}

impl Kernel {
    /// Number of PTX instructions.
    pub fn instructions(&self) -> usize {
        self.code.len()
    }

    pub(super) fn finish(mut self) -> Self {
        self.meets = flow::meets(&self.code);
        self
    }
}
