//! Sums in fp32, and sums of squares by chunk, which also say whether all is finite.

use super::path::SimdPath;
use super::{round, simd};
use crate::View;
use crate::view::BLOCK;

/// Lanes of the fixed summation tree of [`sum_of_squares`].
const SUM_LANES: usize = 16;

/// Sum of squares in fp64, in an order that depends on the length alone: element i goes to lane i mod 16,
/// lanes are added in order. Not finite if any element is not.
pub fn sum_of_squares(x: View<'_>) -> f64 {
    sum_of_squares_on(SimdPath::current(), x)
}

/// [`sum_of_squares`] by `path`.
pub(super) fn sum_of_squares_on(path: SimdPath, x: View<'_>) -> f64 {
    simd::keep_denormals();
    path.run(
        #[inline(always)]
        || squares(path, x),
    )
}

#[inline(always)]
fn squares(path: SimdPath, x: View<'_>) -> f64 {
    let mut lanes = [0.0f64; SUM_LANES];
    let mut block = [0.0f32; BLOCK];
    for at in (0..x.len()).step_by(BLOCK) {
        let n = BLOCK.min(x.len() - at);
        let block = match x {
            View::F32(wide) => &wide[at..at + n],
            _ => {
                round::load(path, x, at, &mut block[..n]);
                &block[..n]
            }
        };
        let (whole, rest) = block.as_chunks::<SUM_LANES>();
        for run in whole {
            for i in 0..SUM_LANES {
                lanes[i] += f64::from(run[i]) * f64::from(run[i]);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(*x) * f64::from(*x);
        }
    }
    lanes.iter().sum()
}

/// Sums of squares of runs of `chunk` elements, of which the first `counted` elements of x count.
pub fn chunk_squares(x: View<'_>, partials: &mut [f64], chunk: usize, counted: usize) {
    for (i, partial) in partials.iter_mut().enumerate() {
        let end = ((i + 1) * chunk).min(x.len()).min(counted);
        let start = (i * chunk).min(end);
        *partial = sum_of_squares(x.slice(start..end));
    }
}

/// into = x, or into += x, in fp32.
pub fn accumulate(x: View<'_>, into: &mut [f32], first: bool) {
    accumulate_on(SimdPath::current(), x, into, first);
}

/// [`accumulate`] by `path`.
pub(super) fn accumulate_on(path: SimdPath, x: View<'_>, into: &mut [f32], first: bool) {
    simd::keep_denormals();
    path.run(
        #[inline(always)]
        || add(path, x, into, first),
    );
}

#[inline(always)]
fn add(path: SimdPath, x: View<'_>, into: &mut [f32], first: bool) {
    let mut block = [0.0f32; BLOCK];
    for at in (0..into.len()).step_by(BLOCK) {
        let n = BLOCK.min(into.len() - at);
        let sums = &mut into[at..at + n];
        if first {
            round::load(path, x, at, sums);
        } else {
            let block = &mut block[..n];
            round::load(path, x, at, block);
            for i in 0..n {
                sums[i] += block[i];
            }
        }
    }
}

/// [`accumulate`] and [`chunk_squares`] of the result, chunk by chunk, while each is in the cache.
pub fn accumulate_chunks(
    x: View<'_>,
    into: &mut [f32],
    first: bool,
    (partials, chunk, counted): (&mut [f64], usize, usize),
) {
    for (i, (sums, partial)) in into.chunks_mut(chunk.max(1)).zip(partials).enumerate() {
        let start = i * chunk;
        accumulate(x.slice(start..start + sums.len()), sums, first);
        let counted = counted.saturating_sub(start).min(sums.len());
        *partial = sum_of_squares(View::F32(&sums[..counted]));
    }
}
