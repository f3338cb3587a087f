//! Matrix product of the CPU backend: c = a b (+ bias) (+ beta c), with a and b in f32, f16 or
//! bf16, sums in f32 and one rounding (to nearest, ties to even) to the type of c.
//!
//! Called by every layer that multiplies: forward, input gradient, weight gradient, attention.
//! The structure is that of BLIS (Van Zee and van de Geijn, 2015): panels of a and b, where they
//! have to be, are packed into caches and a block of c is kept in registers.
//!
//! Invariants:
//! - Each element of c is the sum, in order, over blocks of [`KC`] of a chain of fused
//!   multiply-adds that starts at 0, then + bias, then fma(beta, old c). This depends on k alone:
//!   never on m, n, the element's place, the number of threads or the width of SIMD registers. So
//!   a product cut into pieces along m or n has the same bits.
//! - No call allocates: all memory is in [`Scratch`], made once per thread.
//! - beta = 0 never reads c.
//!
//! `task.rs` cuts c into panels and walks their blocks, `pack.rs` fills the caches, `kernel.rs` holds the registers,
//! `element.rs` converts storage types.

mod element;
mod kernel;
mod pack;
mod task;
#[cfg(test)]
mod tests;

use half::{bf16, f16};
use pulp::Arch;

/// Terms summed in one chain; part of what the result is, so equal on every machine.
const KC: usize = 384;
/// Rows of a packed at a time: with KC, a quarter of a small second-level cache.
const MC: usize = 192;
/// Rows of c whose partial sums are kept when k > KC.
const MT: usize = 768;
/// Columns of b packed at a time, and of c whose partial sums are kept.
const NT: usize = 768;
/// Rows of a in a packed panel. Microkernels of 12, 8, 4, 2 and 1 rows, or 6, 4, 2 and 1, taken in this order, never reach
/// across two of them.
const A_ROWS: usize = 12;
/// Distance between packed rows of a when they lie along k; not a power of two, to spread sets.
const A_STRIDE: usize = KC + 16;
/// Steps of k left free after each packed panel of a and b, so that panels fall on different sets.
const A_PAD: usize = 4;
const B_PAD: usize = 1;
/// Vectors of b, and of c, per microkernel.
const VECS: usize = 2;
/// Columns in the widest panel of b.
const NR_MAX: usize = VECS * MAX_LANES;
/// Elements of the widest vector.
const MAX_LANES: usize = 16;
/// Elements after which an address falls on the same set of a first-level cache, which has 8 ways at least.
const SAME_SET: usize = 1024;
/// Rows that are worth packing all of b for.
const PANEL_ROWS: usize = 128;
/// Panels that a thread's part is cut into where b is packed once for all of them: threads are not equally fast.
const RUNS: usize = 4;
/// Fewest rows of such a panel.
const RUN_ROWS: usize = 96;
/// What packing an element of a takes, in multiply-adds.
const PACK_A: usize = 32;
/// What packing an element of b takes, in multiply-adds.
const PACK_B: usize = 16;
/// Products below this number of operations, some ten microseconds of a core, are computed by one thread.
const SHARED_FLOP: usize = 1_000_000;

const _: () = assert!(MC.is_multiple_of(A_ROWS) && MT.is_multiple_of(MC));
const _: () = assert!(A_PAD <= A_STRIDE - KC);
const _: () = assert!(NT.is_multiple_of(NR_MAX) && NT <= LINES_LEN && MC <= LINES_LEN);

/// Elements to multiply, in one of the storage types.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Src<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// Elements to write.
#[derive(Debug)]
pub(crate) enum Dst<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

/// A strided matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: Src<'a>,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

/// A matrix to write: element (i, j) is `data[i * row_stride + j]`.
#[derive(Debug)]
pub(crate) struct MatrixMut<'a> {
    pub(crate) data: Dst<'a>,
    pub(crate) row_stride: usize,
}

/// One product: c (m, n) = a (m, k) b (k, n) + bias (n) + beta c.
#[derive(Debug)]
pub(crate) struct Gemm<'a> {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix<'a>,
    pub(crate) b: Matrix<'a>,
    pub(crate) c: MatrixMut<'a>,
    /// What the old c is multiplied by; at 0 it is not read.
    pub(crate) beta: f32,
    pub(crate) bias: Option<Src<'a>>,
}

/// Packing buffers and partial sums of one thread, reused by every call.
#[derive(Debug)]
pub(crate) struct Scratch {
    arch: Arch,
    packed: Packed,
    memory: Vec<f32>,
    /// Where the first cache line begins.
    start: usize,
}

impl Src<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::F16(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }
}

impl<'a> Matrix<'a> {
    /// Rows of contiguous elements.
    pub(crate) fn by_rows(data: Src<'a>, row_stride: usize) -> Self {
        Self { data, row_stride, col_stride: 1 }
    }

    /// The transpose of a matrix stored [by rows](Self::by_rows).
    pub(crate) fn transposed(data: Src<'a>, row_stride: usize) -> Self {
        Self { data, row_stride: 1, col_stride: row_stride }
    }

    /// As a left operand: f32 need no packing, unless they lie so far apart that the first-level cache
    /// holds only a few of them.
    fn is_read_in_place(&self) -> bool {
        let apart = match (self.row_stride, self.col_stride) {
            (stride, 1) => !stride.is_multiple_of(SAME_SET),
            // Hundreds of steps of k, each some lines behind the last.
            (1, stride) => stride < SAME_SET && !stride.is_multiple_of(SAME_SET / 4),
            _ => false,
        };
        apart && matches!(self.data, Src::F32(_))
    }

    /// As a left operand: its rows lie side by side.
    fn is_along_m(&self) -> bool {
        self.row_stride == 1 && self.col_stride != 1
    }

    fn assert_holds(&self, rows: usize, cols: usize) {
        let len = self.data.len();
        assert!(reach(rows, self.row_stride, cols, self.col_stride).is_some_and(|r| r <= len));
    }
}

/// One past the last index of a (rows, cols) matrix, unless it overflows.
fn reach(rows: usize, row_stride: usize, cols: usize, col_stride: usize) -> Option<usize> {
    if rows == 0 || cols == 0 {
        return Some(0);
    }
    let last_row = (rows - 1).checked_mul(row_stride)?;
    last_row.checked_add((cols - 1).checked_mul(col_stride)?)?.checked_add(1)
}

const A_LEN: usize = MC * A_STRIDE;
const B_LEN: usize = (KC + B_PAD) * NT;
const C_LEN: usize = MT * NT;
const LINES_LEN: usize = MAX_LANES * A_STRIDE;
const LINE: usize = 16;

impl Scratch {
    /// Allocates; every later use of it does not.
    pub(crate) fn new() -> Self {
        let memory = vec![0.0f32; Self::bytes() / size_of::<f32>()];
        let start = memory.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        Self { arch: Arch::new(), packed: Packed::default(), memory, start }
    }

    /// Size of the one allocation.
    pub(crate) const fn bytes() -> usize {
        (A_LEN + B_LEN + C_LEN + LINES_LEN + NT + LINE) * size_of::<f32>()
    }

    fn parts(&mut self) -> Parts<'_> {
        let memory = &mut self.memory[self.start..];
        let (a, memory) = memory.split_at_mut(A_LEN);
        let (b, memory) = memory.split_at_mut(B_LEN);
        let (c, memory) = memory.split_at_mut(C_LEN);
        let (lines, memory) = memory.split_at_mut(LINES_LEN);
        Parts { a, b, c, lines, bias: &mut memory[..NT], packed: &mut self.packed }
    }
}

struct Parts<'a> {
    /// (MC, KC): rows along k, or panels of A_ROWS interleaved.
    a: &'a mut [f32],
    /// (KC, NT) in panels of a microkernel's columns.
    b: &'a mut [f32],
    /// (MT, NT) in microkernel tiles.
    c: &'a mut [f32],
    /// Widened runs of a 16-bit operand.
    lines: &'a mut [f32],
    bias: &'a mut [f32],
    packed: &'a mut Packed,
}

/// What `b` holds: panels of one product that a thread computes one after the other share it.
#[derive(Clone, Copy, Default, Debug)]
struct Packed {
    /// The product; 0 is none.
    product: u64,
    first_col: usize,
    /// So many blocks of it.
    blocks: usize,
}

/// Whether all of b (k, cols) has room, in panels of at most [`NR_MAX`] columns.
const fn has_room(k: usize, cols: usize) -> bool {
    k.div_ceil(KC) * (KC + B_PAD) * cols.next_multiple_of(NR_MAX) <= B_LEN
}
