//! Random bits by which moments are rounded: those of the element, wherever it lies.

use crate::random;
use std::ops::Range;

/// A run of a flat buffer that lies together in a tensor of the whole model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoiseRun {
    /// In the flat buffer.
    pub flat: Range<usize>,
    /// By what the tensor's random bits differ from all others'.
    pub stream: u64,
    /// Index in the whole tensor of the first element.
    pub global: u64,
}

/// Random bits for moments of 16 bits: functions of tensor, step and index in the whole tensor, and of no layout.
#[derive(Clone, Copy, Debug)]
pub struct Noise<'a> {
    /// In ascending order; what is in none (padding) gets zeros.
    pub runs: &'a [NoiseRun],
    /// Where the first element of the update stands in the flat buffer.
    pub start: usize,
}

impl Noise<'_> {
    /// Random bits of the elements from `at` on.
    #[inline(always)]
    pub(super) fn fill(&self, step: u64, at: usize, out: &mut [u16]) {
        let (first, end) = (self.start + at, self.start + at + out.len());
        let mut run = self.runs.partition_point(|run| run.flat.end <= first);
        let mut done = first;
        while done < end {
            let (upto, global) = match self.runs.get(run) {
                Some(run) if run.flat.start <= done => {
                    let global = run.global + (done - run.flat.start) as u64;
                    (run.flat.end.min(end), Some((random::key(run.stream, step), global)))
                }
                Some(run) => (run.flat.start.min(end), None),
                None => (end, None),
            };
            let out = &mut out[done - first..upto - first];
            match global {
                None => out.fill(0),
                Some((stream, global)) => {
                    random_run(stream, global, out);
                    run += 1;
                }
            }
            done = upto;
        }
    }
}

/// Random bits of the elements from `first` on of a tensor: two elements share 32.
#[inline(always)]
fn random_run(stream: u64, first: u64, out: &mut [u16]) {
    let (head, pairs) = out.split_at_mut(out.len().min((first % 2) as usize));
    for odd in head {
        *odd = (random::bits32(stream, first / 2) >> 16) as u16;
    }
    let first = first.div_ceil(2);
    // The upper half of the index changes at most once in a block.
    let same = u64::from(u32::MAX) - (first & u64::from(u32::MAX)) + 1;
    let (same, next) = pairs.split_at_mut(pairs.len().min(2 * same as usize));
    random_pairs(stream, first, same);
    random_pairs(stream, first + same.len() as u64 / 2, next);
}

/// Random bits of pairs whose indices share their upper half.
#[inline(always)]
fn random_pairs(stream: u64, first: u64, out: &mut [u16]) {
    let upper = first & !u64::from(u32::MAX);
    let bits = |i: u32| {
        let lower = (first as u32).wrapping_add(i);
        random::bits32(stream, upper | u64::from(lower))
    };
    let (pairs, last) = out.as_chunks_mut::<2>();
    for (i, pair) in (0u32..).zip(&mut *pairs) {
        let bits = bits(i);
        *pair = [bits as u16, (bits >> 16) as u16];
    }
    for even in last {
        *even = bits(pairs.len() as u32) as u16;
    }
}
