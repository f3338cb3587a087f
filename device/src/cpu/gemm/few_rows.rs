//! Matmuls of few rows with the transpose of an f32 matrix, as in token generation. Each vector of
//! the matrix is read once, transposed in registers, and multiplied there. Packing would be slower.

use super::pack::{chunks, transpose};
use super::{KC, MAX_LANES};
use crate::numerics::ask;
use pulp::Simd;

/// Operands of a matmul of few rows.
#[derive(Clone, Copy)]
pub(super) struct FewRows<'a> {
    pub(super) k: usize,
    /// Rows of a, and the stride between them.
    pub(super) a: (&'a [f32], usize),
    /// Rows of the transpose of b, and the stride between them.
    pub(super) b: (&'a [f32], usize),
}

impl FewRows<'_> {
    /// One vector of columns of `ROWS` rows of the result, from element (row, col) on.
    #[inline(always)]
    pub(super) fn sums<S: Simd, const ROWS: usize>(
        self,
        simd: S,
        row: usize,
        col: usize,
    ) -> [S::f32s; ROWS] {
        let ((a, a_stride), (b, b_stride)) = (self.a, self.b);
        let next = S::F32_LANES * b_stride;
        let mut all = [simd.splat_f32s(0.0); ROWS];
        for ks in chunks(0..self.k, KC) {
            let a: [&[f32]; ROWS] =
                core::array::from_fn(|i| &a[(row + i) * a_stride + ks.start..][..ks.len()]);
            let b: [&[f32]; MAX_LANES] = core::array::from_fn(|i| {
                &b[(col + i % S::F32_LANES) * b_stride + ks.start..][..ks.len()]
            });
            let mut sums = [simd.splat_f32s(0.0); ROWS];
            for p in (0..ks.len()).step_by(S::F32_LANES) {
                let steps = S::F32_LANES.min(ks.len() - p);
                let mut block = [simd.splat_f32s(0.0); MAX_LANES];
                for i in 0..S::F32_LANES {
                    block[i] = match steps == S::F32_LANES {
                        true => S::as_simd_f32s(&b[i][p..p + S::F32_LANES]).0[0],
                        false => simd.partial_load_f32s(&b[i][p..]),
                    };
                    // The hardware prefetches long rows, but short rows end before it does.
                    if self.k <= KC {
                        ask(b[i], next + p..next + p + 1);
                    }
                }
                transpose(simd, &mut block);
                for (step, b) in block.into_iter().enumerate().take(steps) {
                    for (sum, a) in sums.iter_mut().zip(a) {
                        *sum = simd.mul_add_f32s(simd.splat_f32s(a[p + step]), b, *sum);
                    }
                }
            }
            for (all, sum) in all.iter_mut().zip(sums) {
                *all = if ks.start == 0 { sum } else { simd.add_f32s(*all, sum) };
            }
        }
        all
    }
}
