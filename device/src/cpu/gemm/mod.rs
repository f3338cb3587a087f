//! Matmul of the CPU backend: c = scale a b (+ bias) (+ beta c), with a and b in f32, f16, bf16 or
//! fp8, sums in f32 and one rounding (to nearest, ties to even) to the type of c.
//!
//! Every matmul of a model calls it: forward, input gradient, weight gradient, attention. The
//! structure follows BLIS (Van Zee and van de Geijn, 2015): panels of a and b are packed into
//! caches where necessary, and a block of c stays in registers.
//!
//! Invariants:
//! - Each element of c is the sum, in order, over blocks of [`KC`] of a chain of fused
//!   multiply-adds that starts at 0, then times the scale, then + bias, then fma(beta, old c). The
//!   result depends on k alone, never on m, n, the element's position, the number of threads or the
//!   width of SIMD registers. A matmul that is cut along m or n therefore has the same bits.
//! - No call allocates: all memory is in [`Scratch`], which is allocated once per thread.
//! - beta = 0 never reads c.
//!
//! `task.rs` cuts c into panels and iterates over their blocks, `pack.rs` packs blocks for the
//! caches, and `kernel.rs` has the microkernels. `few_rows.rs` computes matmuls of few rows without
//! packing, and `element.rs` converts storage types.

mod element;
mod few_rows;
mod kernel;
mod pack;
mod task;
#[cfg(test)]
mod tests;

use crate::{View, ViewMut};
use pulp::Arch;

/// Terms in one chain of sums. It is equal on every machine, since results depend on it.
const KC: usize = 384;
/// Rows of a packed at a time. MC x KC elements fill a quarter of a small second-level cache.
const MC: usize = 192;
/// Rows of c for which partial sums are stored if k > KC.
const MT: usize = 768;
/// Columns of b that are packed at a time, and columns of c for which partial sums are stored.
const NT: usize = 768;
/// Rows of a in a packed panel. Microkernels of 12, 8, 4, 2 and 1 rows, or 6, 4, 2 and 1, used in
/// this order, never cross the boundary of two panels.
const A_ROWS: usize = 12;
/// Distance between packed rows of a that lie along k. Not a power of two, so that rows fall on
/// different cache sets.
const A_STRIDE: usize = KC + 16;
/// Unused steps of k after each packed panel, so that panels fall on different cache sets.
const A_PAD: usize = 4;
const B_PAD: usize = 1;
/// Vectors of b and of c per microkernel.
const VECS: usize = 2;
/// Columns in the widest panel of b.
const NR_MAX: usize = VECS * MAX_LANES;
/// Elements of the widest vector.
const MAX_LANES: usize = 16;
/// Number of elements between addresses in the same set of a first-level cache with at least 8
/// ways.
const SAME_SET: usize = 1024;
/// Largest number of rows of a matmul without packing, as in token generation.
const FEW_ROWS: usize = 8;
/// Smallest number of rows for which packing all of b saves time.
const PANEL_ROWS: usize = 128;
/// Panels per thread if they share a packed b: several, since threads differ in speed.
const RUNS: usize = 4;
/// Smallest number of rows of a panel if a thread has several panels.
const RUN_ROWS: usize = 96;
/// Cost of packing an element of a, in multiply-adds.
const PACK_A: usize = 32;
/// Cost of packing an element of b, in multiply-adds.
const PACK_B: usize = 16;
/// Operations below which one thread computes a matmul: some ten microseconds of a core.
const SHARED_FLOP: usize = 1_000_000;

const _: () = assert!(MC.is_multiple_of(A_ROWS) && MT.is_multiple_of(MC));
const _: () = assert!(A_PAD <= A_STRIDE - KC);
const _: () = assert!(NT.is_multiple_of(NR_MAX) && NT <= LINES_LEN && MC <= LINES_LEN);

/// A strided matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: View<'a>,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

/// A matrix to write: element (i, j) is `data[i * row_stride + j]`.
#[derive(Debug)]
pub(crate) struct MatrixMut<'a> {
    pub(crate) data: ViewMut<'a>,
    pub(crate) row_stride: usize,
}

/// One matmul: c (m, n) = scale a (m, k) b (k, n) + bias (n) + beta c.
#[derive(Debug)]
pub(crate) struct Gemm<'a> {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix<'a>,
    pub(crate) b: Matrix<'a>,
    pub(crate) c: MatrixMut<'a>,
    /// Factor of the sums.
    pub(crate) scale: f32,
    /// Factor of the old c. If it is 0, the old c is not read.
    pub(crate) beta: f32,
    pub(crate) bias: Option<View<'a>>,
}

/// Packing buffers and partial sums of one thread. Every call reuses them.
#[derive(Debug)]
pub(crate) struct Scratch {
    arch: Arch,
    packed: PackedBlocks,
    memory: Vec<f32>,
    /// Index of the first element of `memory` at the start of a cache line.
    start: usize,
}

impl<'a> Matrix<'a> {
    /// A matrix with contiguous rows.
    pub(crate) fn by_rows(data: View<'a>, row_stride: usize) -> Self {
        Self { data, row_stride, col_stride: 1 }
    }

    /// The transpose of a matrix stored [by rows](Self::by_rows).
    pub(crate) fn transposed(data: View<'a>, row_stride: usize) -> Self {
        Self { data, row_stride: 1, col_stride: row_stride }
    }

    /// Whether the matrix, as a left operand, needs no packing. f32 elements need packing only if
    /// they are so far apart that the first-level cache holds few of them.
    fn is_read_in_place(&self) -> bool {
        let is_spread = match (self.row_stride, self.col_stride) {
            (stride, 1) => !stride.is_multiple_of(SAME_SET),
            // Each of hundreds of steps of k is some cache lines after the previous step.
            (1, stride) => stride < SAME_SET && !stride.is_multiple_of(SAME_SET / 4),
            _ => false,
        };
        is_spread && matches!(self.data, View::F32(_))
    }

    /// Whether the matrix, as a left operand, stores its columns contiguously.
    fn is_along_m(&self) -> bool {
        self.row_stride == 1 && self.col_stride != 1
    }

    fn assert_holds(&self, rows: usize, cols: usize) {
        let len = self.data.len();
        assert!(reach(rows, self.row_stride, cols, self.col_stride).is_some_and(|r| r <= len));
    }
}

/// One past the last index of a (rows, cols) matrix. `None` if the computation overflows.
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
    /// Allocates the buffers. Later uses allocate nothing.
    pub(crate) fn new() -> Self {
        let memory = vec![0.0f32; Self::bytes() / size_of::<f32>()];
        let start = memory.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        Self { arch: Arch::new(), packed: PackedBlocks::default(), memory, start }
    }

    /// Bytes of the scratch's only allocation.
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
    /// (MC, KC): rows that lie along k, or panels of `A_ROWS` interleaved rows.
    a: &'a mut [f32],
    /// (KC, NT): panels with the columns of a microkernel.
    b: &'a mut [f32],
    /// (MT, NT): tiles of microkernels.
    c: &'a mut [f32],
    /// Widened runs of a 16-bit operand.
    lines: &'a mut [f32],
    bias: &'a mut [f32],
    packed: &'a mut PackedBlocks,
}

/// Contents of the packing buffer `b`. A thread reuses them for successive panels of one matmul.
#[derive(Clone, Copy, Default, Debug)]
struct PackedBlocks {
    /// Number of the matmul; 0 means none.
    product: u64,
    first_col: usize,
    /// Number of packed blocks.
    blocks: usize,
}

/// Whether all of b (k, cols) fits the packing buffer, in panels of at most [`NR_MAX`] columns.
const fn has_room(k: usize, cols: usize) -> bool {
    k.div_ceil(KC) * (KC + B_PAD) * cols.next_multiple_of(NR_MAX) <= B_LEN
}
