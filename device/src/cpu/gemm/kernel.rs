//! The microkernels: a block of c in registers.
#![expect(unsafe_code, reason = "unchecked loads of packed a")]

use super::VECS;
use pulp::Simd;

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

/// Picks the microkernel for the rows and vectors (one, or else both) that are left.
#[inline(always)]
pub(super) fn kernels<'c, S: Simd, const A_ROW: usize, const A_K: usize>(
    simd: S,
    (height, both): (usize, bool),
    kc: usize,
    a: &[f32],
    b: &[f32],
    out: Out<'_, impl Fn(usize) -> &'c mut [f32]>,
) {
    macro_rules! pick {
        ($rows:literal) => {
            if both {
                kernel::<S, _, $rows, 2, A_ROW, A_K>(simd, height, kc, a, b, out);
            } else {
                kernel::<S, _, $rows, 1, A_ROW, A_K>(simd, height, kc, a, b, out);
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

/// The sum over p of a (ROWS, kc) b (kc, VECTORS), plus the old tile if `add`, plus bias: to the first `height` rows of
/// c, plus beta times what is there, or to the tile.
#[inline(always)]
fn kernel<
    'c,
    S: Simd,
    F: Fn(usize) -> &'c mut [f32],
    const ROWS: usize,
    const VECTORS: usize,
    const A_ROW: usize,
    const A_K: usize,
>(
    simd: S,
    height: usize,
    kc: usize,
    a: &[f32],
    b: &[f32],
    out: Out<'_, F>,
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
    let (tile, _) = S::as_mut_simd_f32s(out.tile);
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
    for (row, sums) in sums.into_iter().enumerate().take(height) {
        for (c, sum) in S::as_mut_simd_f32s(c(row)).0.iter_mut().zip(sums) {
            *c = if out.beta == 0.0 { sum } else { simd.mul_add_f32s(beta, *c, sum) };
        }
    }
}
