//! Packs blocks of a and b in the order in which the microkernels read them.

use super::element::Element;
use super::{A_PAD, A_ROWS, A_STRIDE, B_PAD, KC, MAX_LANES, Matrix, Parts, VECS};
use crate::View;
use core::ops::Range;
use pulp::Simd;

/// Cuts `range` into pieces of `len`; the last piece may be shorter.
#[inline(always)]
pub(super) fn chunks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..(start + len).min(end))
}

/// Layout of a block of a.
pub(super) enum Order {
    /// Not packed: f32 elements are read in place.
    InPlace,
    /// Element (i, p) is at `i * A_STRIDE + p`.
    AlongK,
    /// Element (i, p) is at `i / A_ROWS * A_ROWS * (kc + A_PAD) + p * A_ROWS + i % A_ROWS`.
    AlongM,
}

/// A [`Matrix`] with elements of known type.
#[derive(Clone, Copy)]
struct TypedMatrix<'a, T> {
    data: &'a [T],
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Element> TypedMatrix<'a, T> {
    #[inline(always)]
    fn new(data: &'a [T], matrix: &Matrix<'_>) -> Self {
        Self { data, row_stride: matrix.row_stride, col_stride: matrix.col_stride }
    }

    /// `len` elements of row i from column j on, if the rows are contiguous.
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
pub(super) fn pack_a(
    a: &Matrix<'_>,
    rows: Range<usize>,
    ks: Range<usize>,
    parts: &mut Parts<'_>,
) -> Order {
    if ks.is_empty() {
        return Order::AlongK;
    }
    match a.data {
        _ if a.is_read_in_place() => Order::InPlace,
        View::F32(data) => pack_a_typed(data, a, rows, ks, parts),
        View::F16(data) => pack_a_typed(data, a, rows, ks, parts),
        View::Bf16(data) => pack_a_typed(data, a, rows, ks, parts),
        View::E4m3(data) => pack_a_typed(data, a, rows, ks, parts),
        View::E5m2(data) => pack_a_typed(data, a, rows, ks, parts),
        View::F64(_) | View::I32(_) | View::U16(_) => unreachable!("the caller has looked at it"),
    }
}

/// Widens a block of a into the order that needs no transposition.
#[inline(always)]
fn pack_a_typed<T: Element>(
    data: &[T],
    a: &Matrix<'_>,
    rows: Range<usize>,
    ks: Range<usize>,
    parts: &mut Parts<'_>,
) -> Order {
    let (kc, along_m) = (ks.len(), a.is_along_m());
    let a = TypedMatrix::new(data, a);
    if along_m {
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
                parts.a[at..at + rest.len()].copy_from_slice(rest);
            }
        }
        return Order::AlongM;
    }
    for (to, row) in parts.a.chunks_exact_mut(A_STRIDE).zip(rows) {
        if a.col_stride == 1 {
            T::widen(a.run(row, ks.start, kc), &mut to[..kc]);
        } else {
            for (to, k) in to.iter_mut().zip(ks.clone()) {
                *to = a.get(row, k);
            }
        }
    }
    Order::AlongK
}

#[inline(always)]
pub(super) fn pack_b<S: Simd>(
    simd: S,
    b: &Matrix<'_>,
    ks: Range<usize>,
    cols: Range<usize>,
    at: usize,
    parts: &mut Parts<'_>,
) {
    if ks.is_empty() {
        return;
    }
    let to = (&mut parts.b[at..], &mut *parts.lines);
    match b.data {
        View::F32(data) => pack_b_typed(simd, TypedMatrix::new(data, b), ks, cols, to.0, to.1),
        View::F16(data) => pack_b_typed(simd, TypedMatrix::new(data, b), ks, cols, to.0, to.1),
        View::Bf16(data) => pack_b_typed(simd, TypedMatrix::new(data, b), ks, cols, to.0, to.1),
        View::E4m3(data) => pack_b_typed(simd, TypedMatrix::new(data, b), ks, cols, to.0, to.1),
        View::E5m2(data) => pack_b_typed(simd, TypedMatrix::new(data, b), ks, cols, to.0, to.1),
        View::F64(_) | View::I32(_) | View::U16(_) => unreachable!("the caller has looked at it"),
    }
}

/// Widens a block of b into panels as wide as the microkernel; missing columns are 0.
#[inline(always)]
fn pack_b_typed<S: Simd, T: Element>(
    simd: S,
    b: TypedMatrix<'_, T>,
    ks: Range<usize>,
    cols: Range<usize>,
    to: &mut [f32],
    lines: &mut [f32],
) {
    let nr = VECS * S::F32_LANES;
    let kc = ks.len();
    if b.col_stride == 1 {
        for (p, k) in ks.enumerate() {
            let line = T::as_f32(b.run(k, cols.start, cols.len()), lines);
            let panels = line.chunks_exact(nr);
            let rest = panels.remainder();
            let mut at = p * nr;
            for panel in panels {
                to[at..at + nr].copy_from_slice(panel);
                at += nr * (kc + B_PAD);
            }
            if !rest.is_empty() {
                let (values, padding) = to[at..at + nr].split_at_mut(rest.len());
                values.copy_from_slice(rest);
                padding.fill(0.0);
            }
        }
        return;
    }
    for (panel, cols) in chunks(cols, nr).enumerate() {
        let panel = &mut to[panel * nr * (kc + B_PAD)..][..nr * kc];
        if b.row_stride == 1 {
            let b = b.transpose();
            for half in 0..VECS {
                let first = (cols.start + half * S::F32_LANES).min(cols.end);
                let cols = first..(first + S::F32_LANES).min(cols.end);
                let (panel, _) = S::as_mut_simd_f32s(panel);
                pack_transposed(simd, b, cols, &ks, lines, &mut panel[half..]);
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
    b: TypedMatrix<'_, T>,
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

/// Transposes the square matrix of the first vectors: swaps the halves of blocks of 2, 4, 8 and 16.
#[inline(always)]
pub(super) fn transpose<S: Simd>(simd: S, block: &mut [S::f32s; MAX_LANES]) {
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
