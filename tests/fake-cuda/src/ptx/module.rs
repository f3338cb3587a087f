//! A compiled program.

use super::kernel::Kernel;
use super::parse;

/// The kernels of a PTX text.
#[derive(Debug)]
pub struct Module {
    /// Kernels in the order of the text.
    pub kernels: Vec<Kernel>,
}

impl Module {
    /// Reads a PTX text. The error names the line and the instruction that the interpreter does not know.
    pub fn parse(text: &str) -> Result<Self, String> {
        parse::module(text).map(|kernels| Self { kernels })
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}
