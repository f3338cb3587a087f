//! The microkernels, which keep a block of c in registers.
#![expect(unsafe_code, reason = "unchecked loads of a and b")]

use super::VECS;
use pulp::Simd;

/// Steps of k in one round of the loop.
const UNROLL: usize = 4;

/// Destination of a microkernel's sums.
pub(super) struct TileOutput<'a, F> {
    /// Partial sums, in whole microkernels of two vectors.
    pub(super) tile: &'a mut [f32],
    /// Whether the tile already holds sums to add to.
    pub(super) add: bool,
    /// Factor of the sums, applied after the last block.
    pub(super) scale: f32,
    /// Two vectors to add to each row after the last block.
    pub(super) bias: Option<&'a [f32]>,
    /// Factor of the old c.
    pub(super) beta: f32,
    /// Gives a row of c in f32, as long as the microkernel's vectors, after the last block. If
    /// `None`, the sums are written to the tile.
    pub(super) c: Option<F>,
}

/// The size of a microkernel's tile.
#[derive(Clone, Copy)]
pub(super) struct TileSize {
    /// Number of rows, a [`height`].
    pub(super) height: usize,
    /// Whether the tile has two vectors of columns; otherwise one.
    pub(super) both: bool,
}

/// Layout of a microkernel's rows of a.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    /// Each row is contiguous: element (i, p) is at `i * stride + p`.
    AlongK(&'a [f32], usize),
    /// Rows are side by side: element (i, p) is at `p * stride + i`.
    AlongM(&'a [f32], usize),
}

/// Number of `rows` that the next microkernel computes.
#[inline(always)]
pub(super) fn height<S: Simd>(rows: usize) -> usize {
    match rows {
        12.. if S::REGISTER_COUNT >= 32 => 12,
        8.. if S::REGISTER_COUNT >= 32 => 8,
        6.. if S::REGISTER_COUNT < 32 => 6,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Picks the microkernel for a [`height`] and one or two vectors.
#[inline(always)]
pub(super) fn kernels<'c, S: Simd>(
    simd: S,
    size: TileSize,
    kc: usize,
    a: Rows<'_>,
    b: &[f32],
    b_stride: usize,
    out: TileOutput<'_, impl Fn(usize) -> &'c mut [f32]>,
) {
    let TileSize { height, both } = size;
    macro_rules! pick {
        ($rows:literal) => {
            match (a, both) {
                (Rows::AlongK(a, stride), true) => {
                    kernel::<S, _, $rows, 2, false>(simd, kc, a, stride, b, b_stride, out);
                }
                (Rows::AlongK(a, stride), false) => {
                    kernel::<S, _, $rows, 1, false>(simd, kc, a, stride, b, b_stride, out);
                }
                (Rows::AlongM(a, stride), true) => {
                    kernel::<S, _, $rows, 2, true>(simd, kc, a, stride, b, b_stride, out);
                }
                (Rows::AlongM(a, stride), false) => {
                    kernel::<S, _, $rows, 1, true>(simd, kc, a, stride, b, b_stride, out);
                }
            }
        };
    }
    match height {
        1 => pick!(1),
        2 => pick!(2),
        4 => pick!(4),
        6 if S::REGISTER_COUNT < 32 => pick!(6),
        8 if S::REGISTER_COUNT >= 32 => pick!(8),
        12 if S::REGISTER_COUNT >= 32 => pick!(12),
        _ => debug_assert!(false, "no microkernel of {height} rows"),
    }
}

/// Computes the sum over p of a (ROWS, kc) b (kc, VECTORS), plus the old tile if `add`, times
/// scale, plus bias. Adds the result to beta times the rows of c, or writes it to the tile.
/// [`Rows`] gives the layout of a. Row p of b is at `p` times the given stride, which is the stride
/// of packed panels unless a lies along m.
#[inline(always)]
fn kernel<
    'c,
    S: Simd,
    F: Fn(usize) -> &'c mut [f32],
    const ROWS: usize,
    const VECTORS: usize,
    const ALONG_M: bool,
>(
    simd: S,
    kc: usize,
    a: &[f32],
    a_stride: usize,
    b: &[f32],
    given_stride: usize,
    out: TileOutput<'_, F>,
) {
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    // With two variable strides there are too few registers for addresses.
    let (to_row, to_step, b_stride) = match ALONG_M {
        true => (1, a_stride, given_stride),
        false => (a_stride, 1, VECS * S::F32_LANES),
    };
    debug_assert!(ALONG_M || b_stride == given_stride, "b is packed");
    let steps = kc.saturating_sub(1);
    assert!(kc == 0 || a.len() > (ROWS - 1) * to_row + steps * to_step);
    assert!(kc == 0 || b.len() >= VECTORS * S::F32_LANES + steps * b_stride);
    let (mut a, mut b) = (a.as_ptr(), b.as_ptr());
    macro_rules! fuse {
        ($step:expr) => {
            let b = b.wrapping_add($step * b_stride).cast::<[S::f32s; VECTORS]>();
            // SAFETY: a and b are at a step of k from which `step` more are below kc: the
            // assertion of b's length covers the vectors, which are plain numbers, at any address.
            let vectors = unsafe { b.read_unaligned() };
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as above, and row < ROWS: the assertion of a's length covers the element.
                let a = unsafe { *a.wrapping_add(row * to_row + $step * to_step) };
                let a = simd.splat_f32s(a);
                for (sum, b) in sums.iter_mut().zip(vectors) {
                    *sum = simd.mul_add_f32s(a, b, *sum);
                }
            }
        };
    }
    // Unrolling keeps the order of operations and only removes instructions between them.
    for _ in 0..kc / UNROLL {
        for step in 0..UNROLL {
            fuse!(step);
        }
        (a, b) = (a.wrapping_add(UNROLL * to_step), b.wrapping_add(UNROLL * b_stride));
    }
    for _ in 0..kc % UNROLL {
        fuse!(0);
        (a, b) = (a.wrapping_add(to_step), b.wrapping_add(b_stride));
    }
    let (tile, _) = S::as_mut_simd_f32s(out.tile);
    // A constant length keeps the sums in registers instead of memory.
    let tile = &mut tile[..ROWS * VECS];
    if out.add {
        for (tile, sums) in tile.chunks_exact(VECS).zip(&mut sums) {
            for (tile, sum) in tile.iter().zip(sums) {
                *sum = simd.add_f32s(*tile, *sum);
            }
        }
    }
    if out.scale != 1.0 {
        let scale = simd.splat_f32s(out.scale);
        sums.iter_mut().flatten().for_each(
            #[inline(always)]
            |sum| *sum = simd.mul_f32s(*sum, scale),
        );
    }
    if let Some((bias, _)) = out.bias.map(S::as_simd_f32s) {
        for sums in &mut sums {
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum = simd.add_f32s(*sum, *bias);
            }
        }
    }
    // Moving the sums here keeps them in registers instead of memory.
    let Some(c) = out.c else {
        for (tile, sums) in tile.chunks_exact_mut(VECS).zip(sums) {
            for (tile, sum) in tile.iter_mut().zip(sums) {
                *tile = sum;
            }
        }
        return;
    };
    let beta = simd.splat_f32s(out.beta);
    for (row, sums) in sums.into_iter().enumerate() {
        for (c, sum) in S::as_mut_simd_f32s(c(row)).0.iter_mut().zip(sums) {
            *c = if out.beta == 0.0 { sum } else { simd.mul_add_f32s(beta, *c, sum) };
        }
    }
}
