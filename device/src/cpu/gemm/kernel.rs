//! The microkernels: a block of c in registers.
#![expect(unsafe_code, reason = "unchecked loads of packed a")]

use super::VECS;
use pulp::Simd;

/// Picks the microkernel for the rows and vectors (one, or else both) that are left.
#[inline(always)]
pub(super) fn kernels<S: Simd, const A_ROW: usize, const A_K: usize>(
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
