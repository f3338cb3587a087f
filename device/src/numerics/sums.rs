//! Sums in fp32, and sums of squares by chunk, which also show whether all elements are finite.

use super::path::SimdPath;
use super::{round, simd};
use crate::{BLOCK, View};
use std::ops::Range;

/// The elements that a sum counts: all elements before `end` and outside `hole`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CountedRange {
    /// Index after the last counted element.
    pub end: usize,
    /// Start and end of a run of elements that the sum skips.
    pub hole: (usize, usize),
}

impl CountedRange {
    /// Counts the first `end` elements.
    pub const fn first(end: usize) -> Self {
        Self { end, hole: (0, 0) }
    }

    /// The same elements, with element `start` as number 0.
    #[must_use]
    pub const fn from(self, start: usize) -> Self {
        let (from, to) = self.hole;
        let hole = (from.saturating_sub(start), to.saturating_sub(start));
        Self { end: self.end.saturating_sub(start), hole }
    }
}

/// Lanes of the fixed summation tree of [`sum_of_squares`].
const SUM_LANES: usize = 16;

/// Sum of squares in fp64, in an order that depends on the length alone: element i goes to lane i
/// mod 16, and the lanes are added in order. The sum is not finite if an element is not finite.
pub fn sum_of_squares(x: View<'_>) -> f64 {
    sum_of_squares_on(SimdPath::current(), x, 0..0)
}

/// Computes [`sum_of_squares`] on `path`, with zeros in place of the elements in `hole`.
pub(super) fn sum_of_squares_on(path: SimdPath, x: View<'_>, hole: Range<usize>) -> f64 {
    simd::keep_denormals();
    path.run(
        #[inline(always)]
        || squares(path, x, &hole),
    )
}

#[inline(always)]
fn squares(path: SimdPath, x: View<'_>, hole: &Range<usize>) -> f64 {
    let mut lanes = [0.0f64; SUM_LANES];
    let mut block = [0.0f32; BLOCK];
    for at in (0..x.len()).step_by(BLOCK) {
        let n = BLOCK.min(x.len() - at);
        let hole = hole.start.clamp(at, at + n) - at..hole.end.clamp(at, at + n) - at;
        let block = match x {
            View::F32(wide) if hole.is_empty() => &wide[at..at + n],
            _ => {
                round::load(path, x, at, &mut block[..n]);
                block[hole].fill(0.0);
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

/// Sum of squares of the counted elements of `x`.
fn counted_squares(x: View<'_>, counted: CountedRange) -> f64 {
    let (start, end) = counted.hole;
    sum_of_squares_on(SimdPath::current(), x.slice(0..counted.end.min(x.len())), start..end)
}

/// Sums of squares of runs of `chunk` elements of `x`. Only the elements in `counted` count.
pub fn chunk_squares(x: View<'_>, partials: &mut [f64], chunk: usize, counted: CountedRange) {
    for (i, partial) in partials.iter_mut().enumerate() {
        let (start, end) = ((i * chunk).min(x.len()), ((i + 1) * chunk).min(x.len()));
        *partial = counted_squares(x.slice(start..end), counted.from(i * chunk));
    }
}

/// Sets into = x if `first`, otherwise into += x, in fp32.
pub fn accumulate(x: View<'_>, into: &mut [f32], first: bool) {
    accumulate_on(SimdPath::current(), x, into, first);
}

/// Runs [`accumulate`] on `path`.
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

/// Runs [`accumulate`] and then [`chunk_squares`], chunk by chunk while each is in the cache.
pub fn accumulate_chunks(
    x: View<'_>,
    into: &mut [f32],
    first: bool,
    partials: &mut [f64],
    chunk: usize,
    counted: CountedRange,
) {
    for (i, (sums, partial)) in into.chunks_mut(chunk.max(1)).zip(partials).enumerate() {
        let start = i * chunk;
        accumulate(x.slice(start..start + sums.len()), sums, first);
        *partial = counted_squares(View::F32(sums), counted.from(start));
    }
}
