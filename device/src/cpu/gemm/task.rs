//! Divides c into panels among threads, and computes a panel block by block.
#![expect(unsafe_code, reason = "disjoint panels of one c")]

use super::element::Element;
use super::few_rows::FewRows;
use super::kernel::{Rows, TileOutput, TileSize, height, kernels};
use super::pack::{Order, chunks, pack_a, pack_b};
use super::{
    A_PAD, A_ROWS, A_STRIDE, B_PAD, FEW_ROWS, Gemm, KC, MAX_LANES, MC, MT, Matrix, NR_MAX, NT,
    PACK_A, PACK_B, PANEL_ROWS, PackedBlocks, Parts, RUN_ROWS, RUNS, SAME_SET, SHARED_FLOP,
    Scratch, VECS, has_room, reach,
};
use crate::{Divisible, View, ViewMut};
use core::marker::PhantomData;
use core::ops::Range;
use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use std::sync::atomic::{AtomicU64, Ordering};

impl<'a> Gemm<'a> {
    /// Computes the matmul on the calling thread.
    pub(crate) fn serial(self, scratch: &mut Scratch) {
        let (rows, cols) = (0..self.m, 0..self.n);
        // SAFETY: one panel, one thread; the task is not kept.
        unsafe { self.check().run(rows, cols, scratch) };
    }

    /// Whether the matmul is large enough to wake other threads for it.
    pub(crate) fn is_worth_sharing(&self) -> bool {
        2usize.saturating_mul(self.m).saturating_mul(self.n).saturating_mul(self.k) >= SHARED_FLOP
    }

    /// The matmul as panels that `threads` threads compute together.
    pub(crate) fn panels(self, threads: usize) -> Panels<'a> {
        let size @ (m, n) = (self.m, self.n);
        let task = self.check();
        let (down, across) = grid(!task.a.is_read_in_place(), size.0, size.1, threads);
        let cols = n.div_ceil(across).next_multiple_of(NR_MAX).max(NR_MAX);
        let shares_b = cols <= NT && has_room(task.k, cols);
        let runs = if shares_b { (m / down / RUN_ROWS).clamp(1, RUNS) } else { 1 };
        let rows = m.div_ceil(down * runs).next_multiple_of(A_ROWS).max(A_ROWS);
        static PRODUCTS: AtomicU64 = AtomicU64::new(1);
        let task = Task { product: PRODUCTS.fetch_add(1, Ordering::Relaxed), ..task };
        Panels { task, size, grid: (m.div_ceil(rows), n.div_ceil(cols)), panel: (rows, cols) }
    }

    /// Checks that all indices are in range, and makes c shareable between threads.
    pub(super) fn check(self) -> Task<'a> {
        let Self { m, n, k, a, b, c, scale, beta, bias } = self;
        a.assert_holds(m, k);
        b.assert_holds(k, n);
        assert!(bias.is_none_or(|bias| bias.len() >= n), "bias has fewer elements than c columns");
        let row_stride = c.row_stride;
        let (cells, len) = match c.data {
            ViewMut::F32(data) => (AnyCells::F32(Cells::new(data)), data.len()),
            ViewMut::F16(data) => (AnyCells::F16(Cells::new(data)), data.len()),
            ViewMut::Bf16(data) => (AnyCells::Bf16(Cells::new(data)), data.len()),
            _ => unreachable!("the caller has looked at it"),
        };
        assert!(m <= 1 || row_stride >= n, "rows of c overlap");
        assert!(reach(m, row_stride, n, 1).is_some_and(|r| r <= len), "c is too short");
        Task { product: 0, k, a, b, c: cells, row_stride, scale, beta, bias, _c: PhantomData }
    }
}

/// A matmul that is cut into panels of c.
pub(crate) struct Panels<'a> {
    task: Task<'a>,
    size: (usize, usize),
    grid: (usize, usize),
    panel: (usize, usize),
}

impl<'a> Panels<'a> {
    /// All panels, for threads to divide.
    pub(crate) fn all(&mut self) -> SomePanels<'_, 'a> {
        SomePanels { of: self, numbers: 0..self.grid.0 * self.grid.1 }
    }
}

/// Panels with a single owner: [`Panels::all`] borrows exclusively, and a cut splits the panels.
pub(crate) struct SomePanels<'p, 'a> {
    of: &'p Panels<'a>,
    numbers: Range<usize>,
}

impl Divisible for SomePanels<'_, '_> {
    fn units(&self) -> usize {
        self.numbers.units()
    }
    fn cut(self, units: usize) -> (Self, Self) {
        let (first, rest) = self.numbers.cut(units);
        (Self { numbers: first, ..self }, Self { numbers: rest, ..self })
    }
}

impl SomePanels<'_, '_> {
    /// Computes these panels.
    pub(crate) fn compute(self, scratch: &mut Scratch) {
        let Panels { task, size: (m, n), grid: (down, _), panel: (rows, cols) } = self.of;
        for panel in self.numbers {
            let (i, j) = (panel % down * rows, panel / down * cols);
            let (rows, cols) = (i.min(*m)..(i + rows).min(*m), j.min(*n)..(j + cols).min(*n));
            // SAFETY: each panel is in one `SomePanels`, which this call consumes, and panels are
            // the disjoint cells of a grid over c.
            unsafe { task.run(rows, cols, scratch) };
        }
    }
}

/// Divides c into one part per thread: returns the numbers of parts down and across. Chooses the
/// split with the shortest time. Among equal splits, it prefers whole rows of c if a is not packed
/// and parts have enough rows, since other kernels divide rows too.
pub(super) fn grid(packs_a: bool, m: usize, n: usize, threads: usize) -> (usize, usize) {
    let cost = |down: &usize| {
        let across = threads / down;
        let (rows, cols) = (m.div_ceil(*down), n.div_ceil(across));
        let area = rows.next_multiple_of(A_ROWS) * cols.next_multiple_of(NR_MAX);
        let packed = PACK_B * cols + if packs_a { PACK_A * rows } else { 0 };
        let by_rows = !packs_a && rows >= PANEL_ROWS;
        let time = if packs_a { area + packed } else { area };
        (time, !by_rows, if by_rows { across } else { packed })
    };
    let splits = (1..=threads).filter(|down| threads.is_multiple_of(*down));
    let down = splits.min_by_key(cost).unwrap_or(1);
    (down, threads / down)
}

/// The memory of c, shared by threads that write disjoint panels.
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

/// A checked matmul. Several threads compute its disjoint panels.
pub(super) struct Task<'a> {
    /// A unique number if each thread computes several panels of the matmul, otherwise 0.
    product: u64,
    k: usize,
    a: Matrix<'a>,
    b: Matrix<'a>,
    c: AnyCells,
    row_stride: usize,
    scale: f32,
    beta: f32,
    bias: Option<View<'a>>,
    _c: PhantomData<&'a mut [f32]>,
}

// SAFETY: `a`, `b` and `bias` are shared slices and only read; `c` comes from a `&mut` that
// `Gemm::check` consumed, and the contract of `Task::run` keeps threads in disjoint panels.
unsafe impl Sync for Task<'_> {}

impl Task<'_> {
    /// Computes one panel of c.
    ///
    /// # Safety
    /// No other thread may run an overlapping panel of this task at the same time.
    unsafe fn run(&self, rows: Range<usize>, cols: Range<usize>, scratch: &mut Scratch) {
        if !rows.is_empty() && !cols.is_empty() {
            let arch = scratch.arch;
            arch.dispatch(Panel { task: self, rows, cols, parts: scratch.parts() });
        }
    }
}

/// A panel of c with its operands. Only [`Task::run`] makes one.
pub(super) struct Panel<'a, 's> {
    pub(super) task: &'a Task<'a>,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
    pub(super) parts: Parts<'s>,
}

impl WithSimd for Panel<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        if self.is_done_as_few_rows(simd) {
            return;
        }
        let k = self.task.k;
        let blocks = k.div_ceil(KC).max(1);
        // Without partial sums, the rows need not be cut.
        let tile_rows = if blocks == 1 { self.rows.len() } else { MT };
        // With few rows of a, packed panels of b stay in the first-level cache.
        let at_once = if self.rows.len() <= FEW_ROWS { NR_MAX } else { NT };
        for cols in chunks(self.cols.clone(), at_once) {
            if let Some(bias) = self.task.bias {
                bias.load(cols.start, &mut self.parts.bias[..cols.len()]);
            }
            let shares_b = has_room(k, cols.len());
            let in_place = self.b_in_place(cols.len(), S::F32_LANES);
            let of = |packed: &PackedBlocks| (packed.product, packed.first_col);
            if self.task.product == 0 || of(self.parts.packed) != (self.task.product, cols.start) {
                let (product, first_col) = (self.task.product, cols.start);
                *self.parts.packed = PackedBlocks { product, first_col, blocks: 0 };
            }
            for rows in chunks(self.rows.clone(), tile_rows) {
                for block in 0..blocks {
                    let ks = block * KC..((block + 1) * KC).min(k);
                    let room = (KC + B_PAD) * cols.len().next_multiple_of(NR_MAX);
                    let b = if shares_b { block * room } else { 0 };
                    if in_place.is_none() && (!shares_b || block >= self.parts.packed.blocks) {
                        pack_b(simd, &self.task.b, ks.clone(), cols.clone(), b, &mut self.parts);
                        self.parts.packed.blocks = block + 1;
                    }
                    let b = in_place.map_or(RightBlock::Packed(b), |(b, stride)| {
                        RightBlock::InPlace(&b[ks.start * stride + cols.start..], stride)
                    });
                    for part in chunks(rows.clone(), MC) {
                        let order = pack_a(&self.task.a, part.clone(), ks.clone(), &mut self.parts);
                        let first_row = part.start - rows.start;
                        let step =
                            Step { order, ks: ks.clone(), b, first_row, last: block + 1 == blocks };
                        self.multiply(simd, &step, part, cols.clone());
                    }
                }
            }
        }
    }
}

impl<'a> Panel<'a, '_> {
    /// Computes the panel if it has few rows. Returns whether it did.
    #[inline(always)]
    fn is_done_as_few_rows<S: Simd>(&self, simd: S) -> bool {
        let Some(few) = self.few() else { return false };
        let (rows, cols, lanes) = (self.rows.clone(), self.cols.clone(), S::F32_LANES);
        if lanes == 1 || cols.len() < lanes {
            return false;
        }
        for col in cols.clone().step_by(lanes) {
            // The last vector overlaps the previous one and repeats its sums there.
            let col = col.min(cols.end - lanes);
            let mut row = rows.start;
            while row < rows.end {
                row += match rows.end - row {
                    8.. => self.write::<S, 8>(simd, few, row, col),
                    4.. => self.write::<S, 4>(simd, few, row, col),
                    2.. => self.write::<S, 2>(simd, few, row, col),
                    _ => self.write::<S, 1>(simd, few, row, col),
                };
            }
        }
        true
    }

    /// The panel's operands, if it has few rows and its operands lie along k, as in models.
    fn few(&self) -> Option<FewRows<'a>> {
        let task = self.task;
        let along_k = task.a.col_stride == 1 && task.b.row_stride == 1;
        let fits = along_k && self.rows.len() <= FEW_ROWS && task.k > 0 && task.beta == 0.0;
        match (task.a.data, task.b.data, task.c) {
            (View::F32(a), View::F32(b), AnyCells::F32(_)) if fits => {
                Some(FewRows { k: task.k, a: (a, task.a.row_stride), b: (b, task.b.col_stride) })
            }
            _ => None,
        }
    }

    /// Writes a vector of columns of `ROWS` rows of c. Returns `ROWS`.
    #[inline(always)]
    fn write<S: Simd, const ROWS: usize>(
        &self,
        simd: S,
        few: FewRows<'_>,
        row: usize,
        col: usize,
    ) -> usize {
        let mut all = few.sums::<S, ROWS>(simd, row, col);
        let mut line = [0.0; MAX_LANES];
        let line = &mut line[..S::F32_LANES];
        if let Some(bias) = self.task.bias {
            bias.load(col, line);
            let bias = S::as_simd_f32s(line).0[0];
            for sum in &mut all {
                *sum = simd.add_f32s(*sum, bias);
            }
        }
        let AnyCells::F32(c) = self.task.c else { unreachable!("`few` looked at its type") };
        for (i, sum) in all.into_iter().enumerate() {
            let to = c.row((row + i) * self.task.row_stride + col, S::F32_LANES);
            S::as_mut_simd_f32s(to).0[0] = sum;
        }
        ROWS
    }
}

/// A block of b.
#[derive(Clone, Copy)]
enum RightBlock<'a> {
    /// Index of the block's first element in the packing buffer.
    Packed(usize),
    /// Rows of f32 that are read in place, and the stride between them.
    InPlace(&'a [f32], usize),
}

/// A block of a and a block of b.
struct Step<'a> {
    order: Order,
    ks: Range<usize>,
    b: RightBlock<'a>,
    /// First row of the block of a in the tile of partial sums.
    first_row: usize,
    last: bool,
}

impl<'a> Panel<'a, '_> {
    /// b and the stride of its rows, if b is read in place: its rows are whole vectors of f32 on
    /// different cache sets, and there are too few rows of c for packing to save time. A shared
    /// matmul has more panels, which all use the packed b.
    fn b_in_place(&self, cols: usize, lanes: usize) -> Option<(&'a [f32], usize)> {
        let Task { product, k, a, b, .. } = self.task;
        let few = *product == 0 && self.rows.len() < PANEL_ROWS && *k > 0;
        let whole = b.col_stride == 1 && cols.is_multiple_of(lanes);
        let is_spread = !b.row_stride.is_multiple_of(SAME_SET / 4);
        match b.data {
            View::F32(data) if few && whole && is_spread && a.is_along_m() => {
                Some((data, b.row_stride))
            }
            _ => None,
        }
    }

    /// Adds a times b to the partial sums, and after the last block writes c, row by row.
    #[inline(always)]
    fn multiply<S: Simd>(
        &mut self,
        simd: S,
        step: &Step<'_>,
        rows: Range<usize>,
        cols: Range<usize>,
    ) {
        let nr = VECS * S::F32_LANES;
        let (kc, row_stride) = (step.ks.len(), self.task.row_stride);
        let (first, last) = (step.ks.start == 0, step.last);
        let (mut i, mut j) = (0, 0);
        while i < rows.len() {
            let height = height::<S>(rows.len() - i);
            debug_assert!(i % A_ROWS + height <= A_ROWS, "a microkernel across two panels");
            let (b, b_stride) = match step.b {
                RightBlock::Packed(at) => (&self.parts.b[at + j * (kc + B_PAD)..][..nr * kc], nr),
                RightBlock::InPlace(b, stride) => (&b[j..], stride),
            };
            let width = (cols.len() - j).min(nr);
            let tile = if first && last { 0 } else { j * MT + (step.first_row + i) * nr };
            let tile = &mut self.parts.c[tile..tile + height * nr];
            let at = (rows.start + i) * row_stride + cols.start + j;
            let c = match self.task.c {
                AnyCells::F32(c) if last && width.is_multiple_of(S::F32_LANES) => Some(c),
                _ => None,
            };
            let out = TileOutput {
                tile: &mut *tile,
                add: !first,
                scale: if last { self.task.scale } else { 1.0 },
                bias: self.task.bias.filter(|_| last).map(|_| &self.parts.bias[j..j + nr]),
                beta: self.task.beta,
                c: c.map(|c| move |row| c.row(at + row * row_stride, width)),
            };
            let size = TileSize { height, both: width > S::F32_LANES };
            let a = match (&step.order, self.task.a.data) {
                (Order::InPlace, View::F32(a)) => {
                    let Matrix { row_stride, col_stride, .. } = self.task.a;
                    let a = &a[(rows.start + i) * row_stride + step.ks.start * col_stride..];
                    match self.task.a.is_along_m() {
                        true => Rows::AlongM(a, col_stride),
                        false => Rows::AlongK(a, row_stride),
                    }
                }
                (Order::AlongM, _) => {
                    let panel = i / A_ROWS * A_ROWS * (kc + A_PAD);
                    Rows::AlongM(&self.parts.a[panel + i % A_ROWS..], A_ROWS)
                }
                _ => Rows::AlongK(&self.parts.a[i * A_STRIDE..], A_STRIDE),
            };
            kernels(simd, size, kc, a, b, b_stride, out);
            if last && c.is_none() {
                let tile = tile.chunks_exact_mut(nr);
                // Full width is a separate case, since a constant length compiles to faster code.
                if width == nr {
                    finish(self.task, at, tile.map(|sums| &mut sums[..nr]));
                } else {
                    finish(self.task, at, tile.map(|sums| &mut sums[..width]));
                }
            }
            j += nr;
            if j >= cols.len() {
                (i, j) = (i + height, 0);
            }
        }
    }
}

/// Writes finished rows to c from element `at` on. The rows lie in the caller's panel.
#[inline(always)]
fn finish<'t>(task: &Task<'_>, at: usize, rows: impl Iterator<Item = &'t mut [f32]>) {
    for (row, sums) in rows.enumerate() {
        let at = at + row * task.row_stride;
        match task.c {
            AnyCells::F32(c) => write(c.row(at, sums.len()), sums, task.beta),
            AnyCells::F16(c) => write(c.row(at, sums.len()), sums, task.beta),
            AnyCells::Bf16(c) => write(c.row(at, sums.len()), sums, task.beta),
        }
    }
}

impl<T> Cells<T> {
    /// Elements `at..at + len`, which lie in one row of the caller's panel.
    #[inline(always)]
    fn row<'c>(self, at: usize, len: usize) -> &'c mut [T] {
        assert!(at <= self.len && len <= self.len - at);
        // SAFETY: in bounds by the assertion.
        let row = unsafe { self.start.add(at) };
        // SAFETY: in bounds by the assertion; `Gemm::check` took c by `&mut` and has asserted that
        // its rows do not overlap, and no other thread has this panel (contract of `Task::run`).
        unsafe { core::slice::from_raw_parts_mut(row, len) }
    }
}

#[inline(always)]
fn write<T: Element>(row: &mut [T], sums: &mut [f32], beta: f32) {
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
