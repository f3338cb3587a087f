//! Matrix product of the CPU backend: c = a b (+ bias) (+ beta c), with a and b in f32, f16 or
//! bf16, sums in f32 and one rounding (to nearest, ties to even) to the type of c.
//!
//! Called by every layer that multiplies: forward, input gradient, weight gradient, attention.
//! The structure is that of BLIS (Van Zee and van de Geijn, 2015): panels of a and b are packed
//! into caches and a block of c is kept in registers.
//!
//! Invariants:
//! - Each element of c is the sum, in order, over blocks of [`KC`] of a chain of fused
//!   multiply-adds that starts at 0, then + bias, then fma(beta, old c). This depends on k alone:
//!   never on m, n, the element's place, the number of threads or the width of SIMD registers. So
//!   a product cut into pieces along m or n has the same bits.
//! - No call allocates: all memory is in [`Scratch`], made once per thread.
//! - beta = 0 never reads c.
#![expect(unsafe_code, reason = "disjoint panels of one c; unchecked loads of packed a")]

use core::marker::PhantomData;
use core::ops::Range;

use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};
use rayon::ThreadPool;
use rayon::iter::{IndexedParallelIterator, IntoParallelRefMutIterator, ParallelIterator};

/// Terms summed in one chain; part of what the result is, so equal on every machine.
const KC: usize = 384;
/// Rows of a packed at a time: with KC, a quarter of a small second-level cache.
const MC: usize = 192;
/// Rows of c whose partial sums are kept when k > KC.
const MT: usize = 768;
/// Columns of b packed at a time, and of c whose partial sums are kept.
const NT: usize = 768;
/// Elements of packed b that stay in a second-level cache: then c is written row by row.
const SMALL_B: usize = 1 << 16;
/// Rows of a in a packed panel; a multiple of the rows of every microkernel.
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
/// Products below this number of operations are not worth waking other threads.
const PARALLEL_FLOP: usize = 20_000_000;

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
        Self { arch: Arch::new(), memory, start }
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
        Parts { a, b, c, lines, bias: &mut memory[..NT] }
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
}

impl<'a> Gemm<'a> {
    /// Computes the product on the calling thread.
    pub(crate) fn serial(self, scratch: &mut Scratch) {
        let (rows, cols) = (0..self.m, 0..self.n);
        // SAFETY: one panel, one thread; the task is not kept.
        unsafe { self.check().run(rows, cols, scratch) };
    }

    /// The same with c cut into one panel per thread, each with its own scratch (at least one).
    /// Small products, and all products in a pool of one thread, stay on the calling thread.
    /// From outside the pool, rayon itself allocates a block of its queue every 60 calls or so.
    pub(crate) fn parallel(self, pool: &ThreadPool, scratches: &mut [Scratch]) {
        let (m, n) = (self.m, self.n);
        let threads = pool.current_num_threads().min(scratches.len());
        let work = 2usize.saturating_mul(m).saturating_mul(n).saturating_mul(self.k);
        if threads <= 1 || work < PARALLEL_FLOP {
            return self.serial(&mut scratches[0]);
        }
        let task = self.check();
        let (down, across) = grid(m, n, threads);
        let panel_rows = m.div_ceil(down).next_multiple_of(A_ROWS);
        let panel_cols = n.div_ceil(across).next_multiple_of(NR_MAX);
        pool.install(|| {
            scratches[..threads].par_iter_mut().enumerate().with_max_len(1).for_each(
                |(panel, scratch)| {
                    let (i, j) = (panel / across * panel_rows, panel % across * panel_cols);
                    let rows = i.min(m)..(i + panel_rows).min(m);
                    let cols = j.min(n)..(j + panel_cols).min(n);
                    // SAFETY: each panel has its own number, so its own cell of a grid over c.
                    unsafe { task.run(rows, cols, scratch) };
                },
            );
        });
    }

    /// Checks every index, once, and makes c shareable between threads.
    fn check(self) -> Task<'a> {
        let Self { m, n, k, a, b, c, beta, bias } = self;
        a.assert_holds(m, k);
        b.assert_holds(k, n);
        assert!(bias.is_none_or(|bias| bias.len() >= n), "bias has fewer elements than c columns");
        let row_stride = c.row_stride;
        let (cells, len) = match c.data {
            Dst::F32(data) => (AnyCells::F32(Cells::new(data)), data.len()),
            Dst::F16(data) => (AnyCells::F16(Cells::new(data)), data.len()),
            Dst::Bf16(data) => (AnyCells::Bf16(Cells::new(data)), data.len()),
        };
        assert!(m <= 1 || row_stride >= n, "rows of c overlap");
        assert!(reach(m, row_stride, n, 1).is_some_and(|r| r <= len), "c is too short");
        Task { k, a, b, c: cells, row_stride, beta, bias, _c: PhantomData }
    }
}

/// How many panels down and across c: all threads, with the least packing.
fn grid(m: usize, n: usize, threads: usize) -> (usize, usize) {
    let splits = (1..=threads).filter(|down| threads.is_multiple_of(*down));
    let cost = |down: &usize| m.div_ceil(*down) + n.div_ceil(threads / down);
    let down = splits.min_by_key(cost).unwrap_or(1);
    (down, threads / down)
}

/// The memory of c, shared by the threads that write disjoint panels of it.
#[derive(Clone, Copy)]
struct Cells<T> {
    start: *mut T,
    len: usize,
}

impl<T> Cells<T> {
    fn new(data: &mut [T]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len() }
    }
}

#[derive(Clone, Copy)]
enum AnyCells {
    F32(Cells<f32>),
    F16(Cells<f16>),
    Bf16(Cells<bf16>),
}

/// A checked product, of which threads compute disjoint panels.
struct Task<'a> {
    k: usize,
    a: Matrix<'a>,
    b: Matrix<'a>,
    c: AnyCells,
    row_stride: usize,
    beta: f32,
    bias: Option<Src<'a>>,
    _c: PhantomData<&'a mut [f32]>,
}

// SAFETY: `a`, `b` and `bias` are shared slices and only read; `c` comes from a `&mut` that
// `Gemm::check` consumed, and `Task::run` asks its callers to keep threads in disjoint panels.
unsafe impl Sync for Task<'_> {}

impl Task<'_> {
    /// Computes one panel of c.
    ///
    /// # Safety
    /// No other thread may be running a panel of this task that overlaps this one.
    unsafe fn run(&self, rows: Range<usize>, cols: Range<usize>, scratch: &mut Scratch) {
        if !rows.is_empty() && !cols.is_empty() {
            let arch = scratch.arch;
            arch.dispatch(Panel { task: self, rows, cols, parts: scratch.parts() });
        }
    }
}

/// A panel of c and what it is computed with; made by [`Task::run`] alone.
struct Panel<'a, 's> {
    task: &'a Task<'a>,
    rows: Range<usize>,
    cols: Range<usize>,
    parts: Parts<'s>,
}

impl WithSimd for Panel<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let k = self.task.k;
        let blocks = k.div_ceil(KC).max(1);
        // Without partial sums there is no need to cut the rows.
        let tile_rows = if blocks == 1 { self.rows.len() } else { MT };
        for cols in chunks(self.cols.clone(), NT) {
            if let Some(bias) = self.task.bias {
                bias.widen(cols.clone(), self.parts.bias);
            }
            for rows in chunks(self.rows.clone(), tile_rows) {
                for block in 0..blocks {
                    let ks = block * KC..((block + 1) * KC).min(k);
                    pack_b(simd, &self.task.b, ks.clone(), cols.clone(), &mut self.parts);
                    for part in chunks(rows.clone(), MC) {
                        let order = pack_a(&self.task.a, part.clone(), ks.clone(), &mut self.parts);
                        let first_row = part.start - rows.start;
                        let step =
                            Step { order, ks: ks.clone(), first_row, last: block + 1 == blocks };
                        self.multiply(simd, &step, part, cols.clone());
                    }
                }
            }
        }
    }
}

/// `range` in pieces of `len`, the last one shorter.
#[inline(always)]
fn chunks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..(start + len).min(end))
}

/// How packed a lies in memory.
enum Order {
    /// Element (i, p) at `i * A_STRIDE + p`.
    AlongK,
    /// Element (i, p) at `i / A_ROWS * A_ROWS * (kc + A_PAD) + p * A_ROWS + i % A_ROWS`.
    AlongM,
}

/// One packed block of a and b.
struct Step {
    order: Order,
    ks: Range<usize>,
    /// Of the block of a, in the tile of partial sums.
    first_row: usize,
    last: bool,
}

impl Panel<'_, '_> {
    /// Adds packed a times packed b to the partial sums, and after the last block writes c.
    #[inline(always)]
    fn multiply<S: Simd>(&mut self, simd: S, step: &Step, rows: Range<usize>, cols: Range<usize>) {
        let nr = VECS * S::F32_LANES;
        let mr = if S::REGISTER_COUNT >= 32 { A_ROWS } else { A_ROWS / 2 };
        let kc = step.ks.len();
        let (first, last) = (step.ks.start == 0, step.last);
        let (down, across) = (rows.len().div_ceil(mr), cols.len().div_ceil(nr));
        let by_rows = cols.len() * kc <= SMALL_B;
        for t in 0..down * across {
            let (i, j) = if by_rows { (t / across, t % across) } else { (t % down, t / down) };
            let (i, j) = (i * mr, j * nr);
            let b = &self.parts.b[j * (kc + B_PAD)..][..nr * kc];
            let width = (cols.len() - j).min(nr);
            let height = (rows.len() - i).min(mr);
            let tile = if first && last { 0 } else { j * MT + (step.first_row + i) * nr };
            let tile = &mut self.parts.c[tile..tile + mr * nr];
            let size = (height, width > S::F32_LANES);
            match step.order {
                Order::AlongK => {
                    let a = &self.parts.a[i * A_STRIDE..];
                    kernels::<S, A_STRIDE, 1>(simd, size, kc, a, b, tile, !first);
                }
                Order::AlongM => {
                    let a = &self.parts.a[i / A_ROWS * A_ROWS * (kc + A_PAD) + i % A_ROWS..];
                    kernels::<S, 1, A_ROWS>(simd, size, kc, a, b, tile, !first);
                }
            }
            if last {
                let bias = self.task.bias.map(|_| &self.parts.bias[j..j + width]);
                let at = (rows.start + i) * self.task.row_stride + cols.start + j;
                let tile = tile.chunks_exact_mut(nr).take(height);
                // Whole rows apart: a constant length makes for straight code.
                if width == nr {
                    finish(self.task, at, tile.map(|sums| &mut sums[..nr]), bias);
                } else if width == S::F32_LANES {
                    finish(self.task, at, tile.map(|sums| &mut sums[..S::F32_LANES]), bias);
                } else {
                    finish(self.task, at, tile.map(|sums| &mut sums[..width]), bias);
                }
            }
        }
    }
}

/// Picks the microkernel for the rows and vectors (one, or else both) that are left.
#[inline(always)]
fn kernels<S: Simd, const A_ROW: usize, const A_K: usize>(
    simd: S,
    (height, both): (usize, bool),
    kc: usize,
    a: &[f32],
    b: &[f32],
    tile: &mut [f32],
    add: bool,
) {
    macro_rules! pick {
        ($rows:literal) => {
            if both {
                kernel::<S, $rows, 2, A_ROW, A_K>(simd, kc, a, b, tile, add);
            } else {
                kernel::<S, $rows, 1, A_ROW, A_K>(simd, kc, a, b, tile, add);
            }
        };
    }
    match height {
        1 => pick!(1),
        2..=4 => pick!(4),
        5..=6 if S::REGISTER_COUNT < 32 => pick!(6),
        5..=8 if S::REGISTER_COUNT >= 32 => pick!(8),
        _ => pick!(12),
    }
}

/// tile (ROWS, 2 vectors) = sum over p of a (ROWS, kc) b (kc, VECTORS), plus the old tile if `add`.
#[inline(always)]
fn kernel<
    S: Simd,
    const ROWS: usize,
    const VECTORS: usize,
    const A_ROW: usize,
    const A_K: usize,
>(
    simd: S,
    kc: usize,
    a: &[f32],
    b: &[f32],
    tile: &mut [f32],
    add: bool,
) {
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    let (b, _) = S::as_simd_f32s(b);
    assert!(kc == 0 || a.len() > (ROWS - 1) * A_ROW + (kc - 1) * A_K);
    for (p, b) in b.chunks_exact(VECS).take(kc).enumerate() {
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: row < ROWS and p < kc, so the assertion above covers the index.
            let a = unsafe { *a.get_unchecked(row * A_ROW + p * A_K) };
            let a = simd.splat_f32s(a);
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = simd.mul_add_f32s(a, *b, *sum);
            }
        }
    }
    let (tile, _) = S::as_mut_simd_f32s(tile);
    for (tile, sums) in tile.chunks_exact_mut(VECS).zip(sums) {
        for (tile, sum) in tile.iter_mut().zip(sums) {
            *tile = if add { simd.add_f32s(*tile, sum) } else { sum };
        }
    }
}

/// Writes finished rows to c from element `at` on; they must lie in the caller's panel.
#[inline(always)]
fn finish<'t>(
    task: &Task<'_>,
    at: usize,
    rows: impl Iterator<Item = &'t mut [f32]>,
    bias: Option<&[f32]>,
) {
    for (row, sums) in rows.enumerate() {
        if let Some(bias) = bias {
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum += bias;
            }
        }
        let at = at + row * task.row_stride;
        match task.c {
            AnyCells::F32(c) => write(c, at, sums, task.beta),
            AnyCells::F16(c) => write(c, at, sums, task.beta),
            AnyCells::Bf16(c) => write(c, at, sums, task.beta),
        }
    }
}

#[inline(always)]
fn write<T: Element>(c: Cells<T>, at: usize, sums: &mut [f32], beta: f32) {
    assert!(at <= c.len && sums.len() <= c.len - at);
    // SAFETY: in bounds by the assertion.
    let row = unsafe { c.start.add(at) };
    // SAFETY: in bounds by the assertion; `Gemm::check` took c by `&mut` and has asserted that its
    // rows do not overlap, and no other thread has this panel (contract of `Task::run`).
    let row = unsafe { core::slice::from_raw_parts_mut(row, sums.len()) };
    if beta != 0.0 {
        let mut old = [0.0; NR_MAX];
        let old = &mut old[..sums.len()];
        T::widen(row, old);
        for (sum, old) in sums.iter_mut().zip(old) {
            *sum = beta.mul_add(*old, *sum);
        }
    }
    T::narrow(sums, row);
}

/// A storage type.
trait Element: Copy {
    /// `src` in f32, in `line` if it has to be converted.
    fn as_f32<'a>(src: &'a [Self], line: &'a mut [f32]) -> &'a [f32];
    fn widen(src: &[Self], dst: &mut [f32]);
    fn narrow(src: &[f32], dst: &mut [Self]);
}

impl Element for f32 {
    #[inline(always)]
    fn as_f32<'a>(src: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        src
    }

    #[inline(always)]
    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    #[inline(always)]
    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }
}

impl Element for f16 {
    #[inline(always)]
    fn as_f32<'a>(src: &'a [Self], line: &'a mut [f32]) -> &'a [f32] {
        let line = &mut line[..src.len()];
        Self::widen(src, line);
        line
    }

    #[inline(always)]
    fn widen(src: &[Self], dst: &mut [f32]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f16_to_f32(*src);
        }
    }

    #[inline(always)]
    fn narrow(src: &[f32], dst: &mut [Self]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f16_from_f32(*src);
        }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn as_f32<'a>(src: &'a [Self], line: &'a mut [f32]) -> &'a [f32] {
        let line = &mut line[..src.len()];
        Self::widen(src, line);
        line
    }

    #[inline(always)]
    fn widen(src: &[Self], dst: &mut [f32]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f32::from_bits(u32::from(src.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn narrow(src: &[f32], dst: &mut [Self]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            // Without branches, so that it vectorises; the carry rounds up to infinity rightly.
            let bits = src.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let bits = if src.is_nan() { bits >> 16 | 0x40 } else { rounded };
            *dst = Self::from_bits(bits as u16);
        }
    }
}

/// Exact, and without branches, so that it vectorises: calls into `half` would not be inlined.
#[inline(always)]
fn f16_to_f32(value: f16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    let bits = u32::from(value.to_bits());
    let magnitude = (bits & 0x7fff) << 13;
    let exponent = magnitude & EXPONENT;
    // The bias of the exponent grows by 112; that of infinities and NaN by 112 more.
    let normal = magnitude + (112 << 23);
    let special = normal + (112 << 23);
    // A subnormal gets an implicit 1 that it does not have, which is taken off again.
    let subnormal = f32::from_bits(normal + (1 << 23)) - f32::from_bits(113 << 23);
    let small = if exponent == 0 { subnormal.to_bits() } else { normal };
    let magnitude = if exponent == EXPONENT { special } else { small };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// To nearest, ties to even, without branches.
#[inline(always)]
fn f16_from_f32(value: f32) -> f16 {
    let sign = value.to_bits() & 0x8000_0000;
    let bits = value.to_bits() ^ sign;
    // Below 2^-14 an addition aligns the binary point and rounds.
    let magic = f32::from_bits(126 << 23);
    let subnormal = (f32::from_bits(bits) + magic).to_bits().wrapping_sub(magic.to_bits());
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + (bits >> 13 & 1)) >> 13;
    let small = if bits < 113 << 23 { subnormal } else { normal };
    let nan = 0x7e00 | (bits >> 13 & 0x3ff);
    let special = if bits > 255 << 23 { nan } else { 0x7c00 };
    let magnitude = if bits >= 143 << 23 { special } else { small };
    f16::from_bits((magnitude | sign >> 16) as u16)
}

impl Src<'_> {
    #[inline(always)]
    fn widen(&self, range: Range<usize>, dst: &mut [f32]) {
        let dst = &mut dst[..range.len()];
        match self {
            Self::F32(data) => f32::widen(&data[range], dst),
            Self::F16(data) => f16::widen(&data[range], dst),
            Self::Bf16(data) => bf16::widen(&data[range], dst),
        }
    }
}

/// Elements of a [`Matrix`] of known type.
#[derive(Clone, Copy)]
struct Typed<'a, T> {
    data: &'a [T],
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Element> Typed<'a, T> {
    #[inline(always)]
    fn new(data: &'a [T], matrix: &Matrix<'_>) -> Self {
        Self { data, row_stride: matrix.row_stride, col_stride: matrix.col_stride }
    }

    /// `len` elements of row i from column j on, if rows are contiguous.
    #[inline(always)]
    fn run(&self, i: usize, j: usize, len: usize) -> &'a [T] {
        &self.data[i * self.row_stride + j..][..len]
    }

    #[inline(always)]
    fn get(&self, i: usize, j: usize) -> f32 {
        let at = i * self.row_stride + j * self.col_stride;
        let mut value = [0.0];
        T::widen(&self.data[at..=at], &mut value);
        value[0]
    }

    #[inline(always)]
    fn transpose(&self) -> Self {
        Self { data: self.data, row_stride: self.col_stride, col_stride: self.row_stride }
    }
}

#[inline(always)]
fn pack_a(a: &Matrix<'_>, rows: Range<usize>, ks: Range<usize>, parts: &mut Parts<'_>) -> Order {
    if ks.is_empty() {
        return Order::AlongK;
    }
    match a.data {
        Src::F32(data) => pack_a_typed(Typed::new(data, a), rows, ks, parts),
        Src::F16(data) => pack_a_typed(Typed::new(data, a), rows, ks, parts),
        Src::Bf16(data) => pack_a_typed(Typed::new(data, a), rows, ks, parts),
    }
}

/// Widens a block of a, in whichever order is a copy; rows up to the next whole panel are 0.
#[inline(always)]
fn pack_a_typed<T: Element>(
    a: Typed<'_, T>,
    rows: Range<usize>,
    ks: Range<usize>,
    parts: &mut Parts<'_>,
) -> Order {
    let kc = ks.len();
    if a.row_stride == 1 && a.col_stride != 1 {
        let a = a.transpose();
        for (p, k) in ks.enumerate() {
            let line = T::as_f32(a.run(k, rows.start, rows.len()), parts.lines);
            let (panels, rest) = line.as_chunks::<A_ROWS>();
            let mut at = p * A_ROWS;
            for panel in panels {
                parts.a[at..at + A_ROWS].copy_from_slice(panel);
                at += A_ROWS * (kc + A_PAD);
            }
            if !rest.is_empty() {
                let mut panel = [0.0; A_ROWS];
                panel[..rest.len()].copy_from_slice(rest);
                parts.a[at..at + A_ROWS].copy_from_slice(&panel);
            }
        }
        return Order::AlongM;
    }
    for (to, row) in parts.a.chunks_exact_mut(A_STRIDE).zip(rows.clone()) {
        if a.col_stride == 1 {
            T::widen(a.run(row, ks.start, kc), &mut to[..kc]);
        } else {
            for (to, k) in to.iter_mut().zip(ks.clone()) {
                *to = a.get(row, k);
            }
        }
    }
    let height = rows.len();
    for i in height..height.next_multiple_of(A_ROWS) {
        parts.a[i * A_STRIDE..][..kc].fill(0.0);
    }
    Order::AlongK
}

#[inline(always)]
fn pack_b<S: Simd>(
    simd: S,
    b: &Matrix<'_>,
    ks: Range<usize>,
    cols: Range<usize>,
    parts: &mut Parts<'_>,
) {
    if ks.is_empty() {
        return;
    }
    match b.data {
        Src::F32(data) => pack_b_typed(simd, Typed::new(data, b), ks, cols, parts),
        Src::F16(data) => pack_b_typed(simd, Typed::new(data, b), ks, cols, parts),
        Src::Bf16(data) => pack_b_typed(simd, Typed::new(data, b), ks, cols, parts),
    }
}

/// Widens a block of b into panels as wide as the microkernel; missing columns are 0.
#[inline(always)]
fn pack_b_typed<S: Simd, T: Element>(
    simd: S,
    b: Typed<'_, T>,
    ks: Range<usize>,
    cols: Range<usize>,
    parts: &mut Parts<'_>,
) {
    let nr = VECS * S::F32_LANES;
    let kc = ks.len();
    if b.col_stride == 1 {
        for (p, k) in ks.enumerate() {
            let line = T::as_f32(b.run(k, cols.start, cols.len()), parts.lines);
            let panels = line.chunks_exact(nr);
            let rest = panels.remainder();
            let mut at = p * nr;
            for panel in panels {
                parts.b[at..at + nr].copy_from_slice(panel);
                at += nr * (kc + B_PAD);
            }
            if !rest.is_empty() {
                let (values, padding) = parts.b[at..at + nr].split_at_mut(rest.len());
                values.copy_from_slice(rest);
                padding.fill(0.0);
            }
        }
        return;
    }
    for (panel, cols) in chunks(cols, nr).enumerate() {
        let panel = &mut parts.b[panel * nr * (kc + B_PAD)..][..nr * kc];
        if b.row_stride == 1 {
            let b = b.transpose();
            for half in 0..VECS {
                let first = (cols.start + half * S::F32_LANES).min(cols.end);
                let cols = first..(first + S::F32_LANES).min(cols.end);
                let (panel, _) = S::as_mut_simd_f32s(panel);
                pack_transposed(simd, b, cols, &ks, parts.lines, &mut panel[half..]);
            }
        } else {
            for (to, k) in panel.chunks_exact_mut(nr).zip(ks.clone()) {
                let (values, padding) = to.split_at_mut(cols.len());
                for (value, col) in values.iter_mut().zip(cols.clone()) {
                    *value = b.get(k, col);
                }
                padding.fill(0.0);
            }
        }
    }
}

/// Packs contiguous rows of the transpose of b as one column of vectors of a panel.
#[inline(always)]
fn pack_transposed<S: Simd, T: Element>(
    simd: S,
    b: Typed<'_, T>,
    rows: Range<usize>,
    ks: &Range<usize>,
    lines: &mut [f32],
    column: &mut [S::f32s],
) {
    let kc = ks.len();
    static ZEROS: [f32; KC] = [0.0; KC];
    let mut values = [&ZEROS[..kc]; MAX_LANES];
    for ((values, row), line) in values.iter_mut().zip(rows).zip(lines.chunks_exact_mut(A_STRIDE)) {
        *values = T::as_f32(b.run(row, ks.start, kc), line);
    }
    let whole = kc - kc % S::F32_LANES;
    for p in (0..whole).step_by(S::F32_LANES) {
        let mut block = [simd.splat_f32s(0.0); MAX_LANES];
        for i in 0..S::F32_LANES {
            block[i] = S::as_simd_f32s(&values[i][p..p + S::F32_LANES]).0[0];
        }
        transpose(simd, &mut block);
        let to = &mut column[p * VECS..][..(S::F32_LANES - 1) * VECS + 1];
        for i in 0..S::F32_LANES {
            to[i * VECS] = block[i];
        }
    }
    if whole < kc {
        let mut block = [simd.splat_f32s(0.0); MAX_LANES];
        for (vector, values) in block.iter_mut().zip(values).take(S::F32_LANES) {
            *vector = simd.partial_load_f32s(&values[whole..]);
        }
        transpose(simd, &mut block);
        for (to, vector) in column[whole * VECS..].iter_mut().step_by(VECS).zip(block) {
            *to = vector;
        }
    }
}

/// Transposes the square of the first vectors: halves of blocks of 2, 4, 8 and 16 change places.
#[inline(always)]
fn transpose<S: Simd>(simd: S, block: &mut [S::f32s; MAX_LANES]) {
    swap_halves::<S, 1>(simd, block);
    swap_halves::<S, 2>(simd, block);
    swap_halves::<S, 4>(simd, block);
    swap_halves::<S, 8>(simd, block);
}

#[inline(always)]
fn swap_halves<S: Simd, const HALF: usize>(simd: S, block: &mut [S::f32s; MAX_LANES]) {
    const LANE: [u32; MAX_LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    if HALF >= S::F32_LANES {
        return;
    }
    let lane = S::as_simd_u32s(&LANE).0[0];
    let bit = simd.and_u32s(lane, simd.splat_u32s(HALF as u32));
    let first = simd.equal_u32s(bit, simd.splat_u32s(0));
    for pair in 0..S::F32_LANES / 2 {
        let i = pair / HALF * 2 * HALF + pair % HALF;
        let (upper, lower) = (block[i], block[i + HALF]);
        block[i] = simd.select_f32s(first, upper, simd.rotate_right_f32s(lower, HALF));
        block[i + HALF] = simd.select_f32s(first, simd.rotate_left_f32s(upper, HALF), lower);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// splitmix64.
    struct Random(u64);

    impl Random {
        fn bits(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }

        fn below(&mut self, bound: usize) -> usize {
            (self.bits() % bound as u64) as usize
        }

        fn value(&mut self) -> f32 {
            (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
        }

        fn data(&mut self, kind: usize, len: usize) -> Data {
            let values = (0..len).map(|_| self.value());
            match kind {
                0 => Data::F32(values.collect()),
                1 => Data::F16(values.map(f16::from_f32).collect()),
                _ => Data::Bf16(values.map(bf16::from_f32).collect()),
            }
        }
    }

    #[derive(Clone, Debug, PartialEq)]
    enum Data {
        F32(Vec<f32>),
        F16(Vec<f16>),
        Bf16(Vec<bf16>),
    }

    impl Data {
        fn src(&self, from: usize) -> Src<'_> {
            match self {
                Self::F32(data) => Src::F32(&data[from..]),
                Self::F16(data) => Src::F16(&data[from..]),
                Self::Bf16(data) => Src::Bf16(&data[from..]),
            }
        }

        fn dst(&mut self, from: usize) -> Dst<'_> {
            match self {
                Self::F32(data) => Dst::F32(&mut data[from..]),
                Self::F16(data) => Dst::F16(&mut data[from..]),
                Self::Bf16(data) => Dst::Bf16(&mut data[from..]),
            }
        }

        fn get(&self, i: usize) -> f64 {
            match self {
                Self::F32(data) => f64::from(data[i]),
                Self::F16(data) => f64::from(data[i]),
                Self::Bf16(data) => f64::from(data[i]),
            }
        }

        /// Half a unit in the last place of 1.
        fn half_ulp(&self) -> f64 {
            match self {
                Self::F32(_) => 2f64.powi(-24),
                Self::F16(_) => 2f64.powi(-11),
                Self::Bf16(_) => 2f64.powi(-8),
            }
        }
    }

    /// A random product, owned.
    #[derive(Debug)]
    struct Case {
        size: [usize; 3],
        a: (Data, usize, usize),
        b: (Data, usize, usize),
        c: (Data, usize),
        beta: f32,
        bias: Option<Data>,
    }

    fn operand(r: &mut Random, rows: usize, cols: usize) -> (Data, usize, usize) {
        let gap = r.below(3) * r.below(9);
        let (row_stride, col_stride) = match r.below(5) {
            0 | 1 => (cols + gap, 1),
            2 | 3 => (1, rows + gap),
            _ => ((cols + gap) * 2, 2),
        };
        let kind = r.below(3);
        let len = reach(rows, row_stride, cols, col_stride).unwrap();
        (r.data(kind, len), row_stride, col_stride)
    }

    impl Case {
        fn new(r: &mut Random, m: usize, n: usize, k: usize) -> Self {
            let (a, b) = (operand(r, m, k), operand(r, k, n));
            let row_stride = n + r.below(2) * r.below(40);
            let kind = r.below(3);
            let c = (r.data(kind, reach(m, row_stride, n, 1).unwrap()), row_stride);
            let beta = [0.0, 1.0, -0.37][r.below(3)];
            let kind = r.below(4);
            let bias = (kind < 3).then(|| r.data(kind, n));
            Self { size: [m, n, k], a, b, c, beta, bias }
        }

        /// The part of the product that computes these rows and columns of c.
        fn part<'a>(&'a self, c: &'a mut Data, rows: Range<usize>, cols: Range<usize>) -> Gemm<'a> {
            let (a, b) = (&self.a, &self.b);
            let from = |at: usize, empty: bool| if empty { 0 } else { at };
            let k = self.size[2];
            Gemm {
                m: rows.len(),
                n: cols.len(),
                k,
                a: Matrix {
                    data: a.0.src(from(rows.start * a.1, k == 0)),
                    row_stride: a.1,
                    col_stride: a.2,
                },
                b: Matrix {
                    data: b.0.src(from(cols.start * b.2, k == 0)),
                    row_stride: b.1,
                    col_stride: b.2,
                },
                c: MatrixMut {
                    data: c.dst(rows.start * self.c.1 + cols.start),
                    row_stride: self.c.1,
                },
                beta: self.beta,
                bias: self.bias.as_ref().map(|bias| bias.src(cols.start)),
            }
        }

        fn whole<'a>(&'a self, c: &'a mut Data) -> Gemm<'a> {
            self.part(c, 0..self.size[0], 0..self.size[1])
        }

        fn run(&self, scratch: &mut Scratch) -> Data {
            let mut c = self.c.0.clone();
            self.whole(&mut c).serial(scratch);
            c
        }

        fn run_with<S: Simd>(&self, simd: S, scratch: &mut Scratch) -> Data {
            let mut c = self.c.0.clone();
            let (rows, cols) = (0..self.size[0], 0..self.size[1]);
            let task = self.whole(&mut c).check();
            simd.vectorize(Panel { task: &task, rows, cols, parts: scratch.parts() });
            c
        }

        fn assert_near_f64(&self, c: &Data) {
            let [m, n, k] = self.size;
            for i in 0..m {
                for j in 0..n {
                    let (mut sum, mut size) = (0.0, 0.0);
                    for p in 0..k {
                        let a = self.a.0.get(i * self.a.1 + p * self.a.2);
                        let term = a * self.b.0.get(p * self.b.1 + j * self.b.2);
                        sum += term;
                        size += term.abs();
                    }
                    let old = f64::from(self.beta) * self.c.0.get(i * self.c.1 + j);
                    let bias = self.bias.as_ref().map_or(0.0, |bias| bias.get(j));
                    sum += old + bias;
                    size += old.abs() + bias.abs();
                    let got = c.get(i * self.c.1 + j);
                    // One rounding to the type of c, and a few in f32.
                    let allowed = sum.abs() * c.half_ulp() + size * 2f64.powi(-20) + 1e-7;
                    assert!((got - sum).abs() <= allowed, "({i}, {j}): {got}, not {sum}; {self:?}");
                }
            }
        }

        /// Elements between the rows of c are not the product's to write.
        fn assert_gaps_kept(&self, c: &Data) {
            for i in 0..self.size[0].saturating_sub(1) {
                for at in i * self.c.1 + self.size[1]..(i + 1) * self.c.1 {
                    assert_eq!(c.get(at), self.c.0.get(at));
                }
            }
        }
    }

    #[test]
    fn is_the_product_within_rounding() {
        let (mut r, mut scratch) = (Random(1), Scratch::new());
        for round in 0..600 {
            let most = [5, 20, 70, 140][round % 4];
            let (m, n) = (1 + r.below(most), 1 + r.below(most));
            let k = [r.below(most), r.below(most), KC, 2 * KC + r.below(500)][r.below(4)];
            let case = Case::new(&mut r, m, n, k);
            let c = case.run(&mut scratch);
            case.assert_near_f64(&c);
            case.assert_gaps_kept(&c);
        }
    }

    #[test]
    fn blocks_meet_without_seams() {
        let (mut r, mut scratch) = (Random(2), Scratch::new());
        for [m, n, k] in [[MT + 13, 40, KC + 1], [21, NT + 33, KC + 7], [MC + 5, NT + 1, 9]] {
            for _ in 0..4 {
                let case = Case::new(&mut r, m, n, k);
                case.assert_near_f64(&case.run(&mut scratch));
            }
        }
    }

    #[test]
    fn every_small_size_is_right() {
        let (mut r, mut scratch) = (Random(3), Scratch::new());
        for m in 0..26 {
            for n in [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48] {
                for k in [0, 1, 2, 15, 17, 33] {
                    let case = Case::new(&mut r, m, n, k);
                    case.assert_near_f64(&case.run(&mut scratch));
                }
            }
        }
    }

    #[test]
    fn the_order_of_the_sum_is_the_documented_one() {
        let (mut r, mut scratch) = (Random(4), Scratch::new());
        let (m, n, k) = (19, 45, 2 * KC + 77);
        for _ in 0..6 {
            let case = Case::new(&mut r, m, n, k);
            let Data::F32(got) = case.run(&mut scratch) else { continue };
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let a = |p: usize| case.a.0.get(i * case.a.1 + p * case.a.2) as f32;
                let b = |p: usize| case.b.0.get(p * case.b.1 + j * case.b.2) as f32;
                let chain = |ks: Range<usize>| ks.fold(0f32, |sum, p| a(p).mul_add(b(p), sum));
                let mut sum = chain(0..KC);
                for ks in chunks(KC..k, KC) {
                    sum += chain(ks);
                }
                if let Some(bias) = &case.bias {
                    sum += bias.get(j) as f32;
                }
                if case.beta != 0.0 {
                    sum = case.beta.mul_add(case.c.0.get(i * case.c.1 + j) as f32, sum);
                }
                assert_eq!(got[i * case.c.1 + j].to_bits(), sum.to_bits());
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let (mut r, mut scratch) = (Random(5), Scratch::new());
        for threads in 1..=5 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut scratches: Vec<_> = (0..threads).map(|_| Scratch::new()).collect();
            for [m, n, k] in [[210, 333, 400], [1, 90_000, 300], [90_000, 1, 300], [30, 31, 32]] {
                let case = Case::new(&mut r, m, n, k);
                let mut c = case.c.0.clone();
                case.whole(&mut c).parallel(&pool, &mut scratches);
                assert_eq!(c, case.run(&mut scratch), "{threads} threads, {m} {n} {k}");
            }
        }
    }

    #[test]
    fn cuts_along_m_and_n_change_no_bit() {
        let (mut r, mut scratch) = (Random(6), Scratch::new());
        for _ in 0..40 {
            let (m, n) = (2 + r.below(150), 2 + r.below(150));
            let k = 1 + r.below(3 * KC);
            let case = Case::new(&mut r, m, n, k);
            let (i, j) = (1 + r.below(m - 1), 1 + r.below(n - 1));
            let mut c = case.c.0.clone();
            for rows in [0..i, i..m] {
                for cols in [0..j, j..n] {
                    case.part(&mut c, rows.clone(), cols).serial(&mut scratch);
                }
            }
            assert_eq!(c, case.run(&mut scratch), "cut at {i}, {j} of {m}, {n}");
        }
    }

    #[test]
    fn the_width_of_vectors_changes_no_bit() {
        let (mut r, mut scratch) = (Random(7), Scratch::new());
        for _ in 0..40 {
            let (m, n, k) = (1 + r.below(60), 1 + r.below(90), 1 + r.below(2 * KC));
            let case = Case::new(&mut r, m, n, k);
            let widest = case.run(&mut scratch);
            assert_eq!(case.run_with(pulp::Scalar::new(), &mut scratch), widest);
            #[cfg(target_arch = "x86_64")]
            if let Some(simd) = pulp::x86::V3::try_new() {
                assert_eq!(case.run_with(simd, &mut scratch), widest);
            }
        }
    }

    #[test]
    fn beta_0_does_not_read_c() {
        let mut scratch = Scratch::new();
        let mut c = [f32::NAN; 4];
        let ones = [1.0; 4];
        let matrix = Matrix::by_rows(Src::F32(&ones), 2);
        let c_matrix = MatrixMut { data: Dst::F32(&mut c), row_stride: 2 };
        Gemm { m: 2, n: 2, k: 2, a: matrix, b: matrix, c: c_matrix, beta: 0.0, bias: None }
            .serial(&mut scratch);
        assert_eq!(c, [2.0; 4]);
    }

    #[test]
    #[should_panic(expected = "rows of c overlap")]
    fn overlapping_rows_of_c_are_refused() {
        let ones = [1.0; 4];
        let matrix = Matrix::by_rows(Src::F32(&ones), 2);
        let mut c = [0.0; 4];
        let c_matrix = MatrixMut { data: Dst::F32(&mut c), row_stride: 1 };
        Gemm { m: 2, n: 2, k: 2, a: matrix, b: matrix, c: c_matrix, beta: 0.0, bias: None }
            .serial(&mut Scratch::new());
    }

    #[test]
    fn sixteen_bit_conversions_are_those_of_half() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            let mut wide = [0.0];
            f16::widen(&[half], &mut wide);
            assert!(
                wide[0].to_bits() == half.to_f32().to_bits() || half.is_nan() && wide[0].is_nan()
            );
            bf16::widen(&[brain], &mut wide);
            assert!(
                wide[0].to_bits() == brain.to_f32().to_bits() || brain.is_nan() && wide[0].is_nan()
            );
            // Around every tie of either type, and at random.
            let lows = [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff];
            for low in lows.into_iter().chain([Random(bits.into()).bits() as u32 & 0xffff]) {
                for high in [u32::from(bits) << 16, (u32::from(bits) << 16) ^ 0x3000] {
                    let value = f32::from_bits(high ^ low);
                    let (mut half, mut brain) = ([f16::ZERO], [bf16::ZERO]);
                    f16::narrow(&[value], &mut half);
                    bf16::narrow(&[value], &mut brain);
                    assert_eq!(half[0].to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
                    assert_eq!(brain[0].to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
                }
            }
        }
    }
}
