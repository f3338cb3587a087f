//! Who computes a kernel: the calling thread, or it and a pool; and the scratch of each.
//!
//! Work is cut into one run of units per thread. A unit (a row, a head, a block of elements) is computed
//! the same way wherever it lands, so the number of threads changes no bit.

use super::gemm;
use crate::ViewMut;
use std::ops::Range;
use std::sync::Arc;

/// Query rows that attention takes at a time.
pub(super) const QUERY_ROWS: usize = 64;
/// Rows of attention scores are padded to a multiple of this, so that no loop has a remainder.
pub(super) const SCORE_PAD: usize = 32;
/// Below so many elements other threads are not worth waking.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// Scratch (in f32, per thread) that kernels need for samples of `seq_len` tokens, heads of `head_dim`
/// and rows of `hidden` elements.
pub fn scratch_floats(seq_len: usize, head_dim: usize, hidden: usize) -> usize {
    attention_floats(seq_len, head_dim).max(norm_floats(hidden))
}

/// Bytes of scratch that one kernel thread holds: `floats` and what a matrix product packs into.
pub const fn scratch_bytes(floats: usize) -> u64 {
    4 * floats as u64 + gemm::Scratch::bytes() as u64
}

/// Two blocks of scores, d_q, d_k and d_v of a head, and a number per token.
pub(super) const fn attention_floats(seq_len: usize, head_dim: usize) -> usize {
    let width = seq_len.next_multiple_of(SCORE_PAD);
    2 * QUERY_ROWS * width + 3 * seq_len * head_dim + seq_len
}

/// Gain, bias, and two rows.
pub(super) const fn norm_floats(hidden: usize) -> usize {
    4 * hidden
}

/// The threads that compute a lane's kernels. Everything is allocated in [`Workers::new`].
#[derive(Debug)]
pub(crate) struct Workers {
    pool: Option<Arc<rayon::ThreadPool>>,
    gemm: Vec<gemm::Scratch>,
    floats: Vec<f32>,
    floats_each: usize,
}

/// One thread's scratch. Contents are left over from earlier kernels.
pub(super) struct Scratch<'a> {
    pub(super) gemm: &'a mut gemm::Scratch,
    pub(super) floats: &'a mut [f32],
}

impl Workers {
    /// The threads of `pool`; without one, or with a pool of one thread, the calling thread.
    pub(crate) fn new(pool: Option<Arc<rayon::ThreadPool>>, scratch_floats: usize) -> Self {
        let pool = pool.filter(|pool| pool.current_num_threads() > 1);
        let threads = pool.as_ref().map_or(1, |pool| pool.current_num_threads());
        Self {
            pool,
            gemm: (0..threads).map(|_| gemm::Scratch::new()).collect(),
            floats: vec![0.0; threads * scratch_floats],
            floats_each: scratch_floats,
        }
    }

    /// The threads besides the calling one, if any.
    pub(crate) fn pool(&self) -> Option<&rayon::ThreadPool> {
        self.pool.as_deref()
    }

    /// What a parallel product takes.
    pub(super) fn for_gemm(&mut self) -> (Option<&rayon::ThreadPool>, &mut [gemm::Scratch]) {
        (self.pool.as_deref(), &mut self.gemm)
    }

    /// That each thread's scratch holds `floats`.
    pub(super) fn need(&self, floats: usize) -> Result<(), String> {
        if floats <= self.floats_each {
            Ok(())
        } else {
            Err(format!("needs scratch of {floats} floats, was opened with {}", self.floats_each))
        }
    }

    /// Runs `f` on runs of `0..units` that together are all of them, with the parts of `out` that belong
    /// to the run. `elements` says how much work it is.
    pub(super) fn split<P: Parts>(
        &mut self,
        units: usize,
        elements: usize,
        out: P,
        f: &(impl Fn(Range<usize>, P, &mut Scratch<'_>) + Sync),
    ) {
        let each = self.floats_each;
        let task = Task { units: 0..units, out, gemm: &mut self.gemm, floats: &mut self.floats };
        match &self.pool {
            Some(pool) if elements >= PARALLEL_ELEMENTS && units > 1 => {
                pool.install(|| task.run(each, f));
            }
            _ => task.run_here(each, f),
        }
    }
}

struct Task<'a, P> {
    units: Range<usize>,
    out: P,
    gemm: &'a mut [gemm::Scratch],
    floats: &'a mut [f32],
}

impl<P: Parts> Task<'_, P> {
    /// Halves the threads, and the units in proportion, until each thread has its run.
    fn run(self, each: usize, f: &(impl Fn(Range<usize>, P, &mut Scratch<'_>) + Sync)) {
        let (threads, units) = (self.gemm.len(), self.units.len());
        if threads <= 1 || units <= 1 {
            return self.run_here(each, f);
        }
        let left_threads = threads / 2;
        let mid = units * left_threads / threads;
        let (left_out, right_out) = self.out.part(mid);
        let (left_gemm, right_gemm) = self.gemm.split_at_mut(left_threads);
        let (left_floats, right_floats) = self.floats.split_at_mut(left_threads * each);
        let Range { start, end } = self.units;
        let left =
            Task { units: start..start + mid, out: left_out, gemm: left_gemm, floats: left_floats };
        let right = Task {
            units: start + mid..end,
            out: right_out,
            gemm: right_gemm,
            floats: right_floats,
        };
        rayon::join(|| left.run(each, f), || right.run(each, f));
    }

    fn run_here(self, each: usize, f: &impl Fn(Range<usize>, P, &mut Scratch<'_>)) {
        if let Some(gemm) = self.gemm.first_mut()
            && !self.units.is_empty()
        {
            f(self.units, self.out, &mut Scratch { gemm, floats: &mut self.floats[..each] });
        }
    }
}

/// Output that can be cut between units.
pub(super) trait Parts: Send + Sized {
    /// The part of the first `units` units, and the rest.
    fn part(self, units: usize) -> (Self, Self);
}

/// Output that is not cut: the threads share it otherwise.
impl Parts for () {
    fn part(self, _: usize) -> (Self, Self) {
        ((), ())
    }
}

impl<A: Parts, B: Parts> Parts for (A, B) {
    fn part(self, units: usize) -> (Self, Self) {
        let ((a, c), (b, d)) = (self.0.part(units), self.1.part(units));
        ((a, b), (c, d))
    }
}

/// A view of which each unit has `each` elements; the last may have fewer.
#[derive(Debug)]
pub(super) struct Rows<'a> {
    pub(super) view: ViewMut<'a>,
    pub(super) each: usize,
}

impl Parts for Rows<'_> {
    fn part(self, units: usize) -> (Self, Self) {
        let mid = (units * self.each).min(self.view.len());
        let (left, right) = self.view.split_at(mid);
        (Self { view: left, each: self.each }, Self { view: right, each: self.each })
    }
}

/// The same, of known type.
#[derive(Debug)]
pub(super) struct Slice<'a, T> {
    pub(super) data: &'a mut [T],
    pub(super) each: usize,
}

impl<T: Send> Parts for Slice<'_, T> {
    fn part(self, units: usize) -> (Self, Self) {
        let mid = (units * self.each).min(self.data.len());
        let (left, right) = self.data.split_at_mut(mid);
        (Self { data: left, each: self.each }, Self { data: right, each: self.each })
    }
}
