//! A warp: its registers, and the paths of its lanes.

use super::copies::Copies;
use super::kernel::Kernel;
use super::op::{Reg, SpecialRegister};
use super::tensor::Lanes;

/// Lanes that run together.
#[derive(Clone, Copy, Debug)]
struct Path {
    next: usize,
    /// Instruction at which they wait for the lanes below them on the stack.
    until: usize,
    lanes: u32,
}

/// 32 threads of a block, or fewer in its last warp.
#[derive(Debug)]
pub(super) struct Warp {
    pub(super) file: Vec<Lanes>,
    /// Number of the first thread.
    pub(super) first: usize,
    /// The lanes that have a thread.
    pub(super) all: u32,
    /// Number of `__syncwarp`s since the last barrier.
    pub(super) within: u64,
    /// Whether the warp waits at a barrier of the block.
    pub(super) waits: bool,
    pub(super) copies: Copies,
    paths: Vec<Path>,
}

impl Warp {
    pub(super) fn new(kernel: &Kernel, first: usize, threads: usize) -> Self {
        let all = if threads >= 32 { u32::MAX } else { (1 << threads) - 1 };
        let mut file = vec![[0; 32]; kernel.registers];
        for &(register, bits) in &kernel.constants {
            file[register] = [bits; 32];
        }
        Self {
            file,
            first,
            all,
            within: 0,
            waits: false,
            copies: Copies::default(),
            paths: Vec::new(),
        }
    }

    /// Puts all lanes at the kernel's start, for another block.
    pub(super) fn start(&mut self, kernel: &Kernel, block: [u32; 3], grid: [u32; 3], threads: u32) {
        let first = self.first as u64;
        for &(register, special) in &kernel.specials {
            self.file[register] = std::array::from_fn(|lane| match special {
                SpecialRegister::Thread(0) => first + lane as u64,
                SpecialRegister::Thread(_) => 0,
                SpecialRegister::Threads(axis) => u64::from(if axis == 0 { threads } else { 1 }),
                SpecialRegister::Block(axis) => u64::from(block[axis]),
                SpecialRegister::Blocks(axis) => u64::from(grid[axis]),
                SpecialRegister::Lane => lane as u64,
                SpecialRegister::Warp => first / 32,
            });
        }
        (self.within, self.waits, self.copies) = (0, false, Copies::default());
        self.paths = vec![Path { next: 0, until: usize::MAX, lanes: self.all }];
    }

    /// The next instruction and its lanes; `None` at the end.
    pub(super) fn next(&mut self, kernel: &Kernel) -> Option<(usize, u32)> {
        loop {
            let path = *self.paths.last()?;
            if path.lanes == 0 || path.next == path.until || path.next >= kernel.code.len() {
                self.paths.pop();
            } else {
                return Some((path.next, path.lanes));
            }
        }
    }

    /// The part of `lanes` whose guard holds.
    pub(super) fn guarded(&self, guard: Option<(Reg, bool)>, lanes: u32) -> u32 {
        let Some((register, wanted)) = guard else { return lanes };
        let holds = self.file[register].iter().rev().fold(0, |bits, x| bits << 1 | (x & 1) as u32);
        lanes & if wanted { holds } else { !holds }
    }

    pub(super) fn advance(&mut self) {
        if let Some(path) = self.paths.last_mut() {
            path.next += 1;
        }
    }

    /// Sends the lanes `taken` to `to`, the others to the next instruction; all reconverge at
    /// `meet`.
    pub(super) fn branch(&mut self, taken: u32, to: usize, meet: usize) {
        let Some(path) = self.paths.last_mut() else { return };
        let others = path.lanes & !taken;
        if taken == 0 || others == 0 {
            path.next = if taken == 0 { path.next + 1 } else { to };
            return;
        }
        let after = path.next + 1;
        path.next = meet;
        for (next, lanes) in [(after, others), (to, taken)] {
            if next != meet {
                self.paths.push(Path { next, until: meet, lanes });
            }
        }
    }

    /// Ends these lanes.
    pub(super) fn end(&mut self, lanes: u32) {
        if let Some(path) = self.paths.last_mut().filter(|path| path.lanes != lanes) {
            path.next += 1;
        }
        self.paths.iter_mut().for_each(|path| path.lanes &= !lanes);
    }
}
