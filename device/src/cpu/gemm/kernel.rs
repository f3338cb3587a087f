//! The microkernels: a block of c in registers.
#![expect(unsafe_code, reason = "unchecked loads of a")]

use super::{A_ROWS, VECS};
use pulp::Simd;

/// Steps of k between two counts.
const UNROLL: usize = 4;

/// Where a microkernel's sums go.
pub(super) struct Out<'a, F> {
    /// Partial sums, in whole microkernels of two vectors.
    pub(super) tile: &'a mut [f32],
    /// The tile has sums to add to.
    pub(super) add: bool,
    /// Two vectors to add to each row, after the last block.
    pub(super) bias: Option<&'a [f32]>,
    /// What the old c is multiplied by.
    pub(super) beta: f32,
    /// After the last block: a row of c, of f32 and as long as the microkernel's vectors. Without, the tile is written.
    pub(super) c: Option<F>,
}

/// Where a microkernel's rows of a lie: row i at `i * stride`.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    /// Each contiguous.
    AlongK(&'a [f32], usize),
    /// Interleaved: element (i, p) at `p * A_ROWS + i`.
    AlongM(&'a [f32]),
}

/// How many of `rows` the next microkernel takes.
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

/// Picks the microkernel for a [`height`] and the vectors (one, or else both) that are left.
#[inline(always)]
pub(super) fn kernels<'c, S: Simd>(
    simd: S,
    (height, both): (usize, bool),
    kc: usize,
    a: Rows<'_>,
    b: &[f32],
    out: Out<'_, impl Fn(usize) -> &'c mut [f32]>,
) {
    macro_rules! pick {
        ($rows:literal) => {
            match (a, both) {
                (Rows::AlongK(a, stride), true) => {
                    kernel::<S, _, $rows, 2, 1>(simd, kc, (a, stride), b, out);
                }
                (Rows::AlongK(a, stride), false) => {
                    kernel::<S, _, $rows, 1, 1>(simd, kc, (a, stride), b, out);
                }
                (Rows::AlongM(a), true) => {
                    kernel::<S, _, $rows, 2, A_ROWS>(simd, kc, (a, 1), b, out);
                }
                (Rows::AlongM(a), false) => {
                    kernel::<S, _, $rows, 1, A_ROWS>(simd, kc, (a, 1), b, out);
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

/// The sum over p of a (ROWS, kc) b (kc, VECTORS), plus the old tile if `add`, plus bias: to the rows of c, plus beta
/// times what is there, or to the tile. Element (i, p) of a lies at `i * stride + p * A_K`.
#[inline(always)]
fn kernel<
    'c,
    S: Simd,
    F: Fn(usize) -> &'c mut [f32],
    const ROWS: usize,
    const VECTORS: usize,
    const A_K: usize,
>(
    simd: S,
    kc: usize,
    (a, stride): (&[f32], usize),
    b: &[f32],
    out: Out<'_, F>,
) {
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    let (b, _) = S::as_simd_f32s(b);
    let b = &b[..kc * VECS];
    assert!(kc == 0 || a.len() > (ROWS - 1) * stride + (kc - 1) * A_K);
    let mut a = a.as_ptr();
    macro_rules! fuse {
        ($ahead:expr, $b:expr) => {
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: a is at a step of k from which `ahead` more are below kc, and row < ROWS: the assertion
                // above covers the element.
                let a = unsafe { *a.wrapping_add(row * stride + $ahead * A_K) };
                let a = simd.splat_f32s(a);
                for (sum, b) in sums.iter_mut().zip($b) {
                    *sum = simd.mul_add_f32s(a, *b, *sum);
                }
            }
        };
    }
    // By the same chains, with fewer instructions between them.
    let (runs, rest) = b.as_chunks::<{ VECS * UNROLL }>();
    for run in runs {
        for ahead in 0..UNROLL {
            fuse!(ahead, &run[ahead * VECS..][..VECS]);
        }
        a = a.wrapping_add(UNROLL * A_K);
    }
    for b in rest.chunks_exact(VECS) {
        fuse!(0, b);
        a = a.wrapping_add(A_K);
    }
    let (tile, _) = S::as_mut_simd_f32s(out.tile);
    // Of constant length, or the sums would live in memory all along.
    let tile = &mut tile[..ROWS * VECS];
    if out.add {
        for (tile, sums) in tile.chunks_exact(VECS).zip(&mut sums) {
            for (tile, sum) in tile.iter().zip(sums) {
                *sum = simd.add_f32s(*tile, *sum);
            }
        }
    }
    if let Some((bias, _)) = out.bias.map(S::as_simd_f32s) {
        for sums in &mut sums {
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum = simd.add_f32s(*sum, *bias);
            }
        }
    }
    // By value from here on, or the sums would live in memory all along.
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
