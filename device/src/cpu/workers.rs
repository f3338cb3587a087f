//! The threads that compute a kernel (the calling thread, alone or with a team) and their scratch.
//!
//! Work is cut into several runs of units per thread. A unit (a row, a head, a block of elements)
//! is computed the same way on every thread, so the number of threads changes no bit.

use super::gemm::{self, Gemm};
use crate::numerics::view::{BLOCK, copy};
use crate::op::{DELTA_CHUNK, DeltaHeads};
use crate::{Divisible, ThreadTeam, View, ViewMut};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of queries that attention processes at a time.
pub(super) const QUERY_ROWS: usize = 32;
/// Number of blocks in sums over rows; each block has a partial sum. The thread that sums a block
/// may have its rows in its caches from an earlier kernel. Results depend on the number of blocks,
/// so it is equal on every machine.
const ROW_BLOCKS: usize = 16;
/// Number of elements below which waking other threads saves no time.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// Scratch of kernels, in f32.
#[derive(Clone, Copy, Default, Debug)]
pub struct ScratchFloats {
    /// Elements for each kernel thread.
    pub each: usize,
    /// Elements for all kernel threads together, for sums over rows.
    pub sums: usize,
}

impl ScratchFloats {
    /// Scratch for samples of `seq_len` tokens, heads of `head_dim`, rows of `hidden` elements, and
    /// sums over rows of at most `widest` elements; a norm over the width of q and k sums over rows
    /// of (H + K) D.
    pub fn new(seq_len: usize, head_dim: usize, hidden: usize, widest: usize) -> Self {
        let each = attention_floats(seq_len, head_dim).max(norm_floats(hidden));
        let each = each.max(rotary_floats(head_dim));
        Self { each, sums: ROW_BLOCKS * widest.max(2 * hidden).max(2 * head_dim) }
    }

    /// The same with room for the gated delta rule: its kernels, and its sums over rows of
    /// `channels` channels of a convolution with `taps` weights each.
    pub const fn with_delta(self, heads: DeltaHeads, taps: usize) -> Self {
        let (each, widest) = (delta_floats(heads), heads.columns() * taps);
        let each = if each > self.each { each } else { self.each };
        let sums = ROW_BLOCKS * widest;
        Self { each, sums: if sums > self.sums { sums } else { self.sums } }
    }

    /// Bytes for `threads` kernel threads, including the packing buffers of matmuls.
    pub const fn bytes(self, threads: usize) -> u64 {
        let each = 4 * self.each + gemm::Scratch::bytes();
        (threads * each + 4 * self.sums) as u64
    }
}

/// f32 scratch of attention: two blocks of scores, a head's d_q, d_k and d_v, a number per token.
pub(super) const fn attention_floats(seq_len: usize, head_dim: usize) -> usize {
    2 * QUERY_ROWS * seq_len + 3 * seq_len * head_dim + seq_len
}

/// Scratch of rotary positions in f32 elements: a head, its norm and a gain.
pub(super) const fn rotary_floats(head_dim: usize) -> usize {
    3 * head_dim
}

/// Scratch of a norm in f32 elements: gain, bias and two rows.
pub(super) const fn norm_floats(hidden: usize) -> usize {
    4 * hidden
}

/// f32 scratch of the gated delta rule: backward a state and its gradients of the heads that share
/// keys, five blocks of keys, three of values and three of pairs; forward has less.
pub(super) const fn delta_floats(heads: DeltaHeads) -> usize {
    let DeltaHeads { key_dim, value_dim, .. } = heads;
    let of_rows = DELTA_CHUNK * (5 * key_dim + 3 * value_dim + 3 * DELTA_CHUNK);
    (heads.group() + 1) * key_dim * value_dim + of_rows
}

/// The threads that compute a lane's kernels. Everything is allocated in [`Workers::new`].
#[derive(Debug)]
pub(crate) struct Workers {
    team: Option<Arc<ThreadTeam>>,
    /// Scratch of each thread.
    scratch: Vec<Mutex<Scratch>>,
    /// Partial sums of each block of rows.
    sums: Mutex<Vec<f32>>,
}

/// One thread's scratch. It holds arbitrary values from earlier kernels.
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) gemm: gemm::Scratch,
    pub(super) floats: Vec<f32>,
}

impl Workers {
    /// Workers that run kernels on `team` together with the calling thread. Without a team, or with
    /// a team of one thread, kernels run on the calling thread alone.
    pub(crate) fn new(team: Option<Arc<ThreadTeam>>, floats: ScratchFloats) -> Self {
        let team = team.filter(|team| team.threads() > 1);
        let threads = team.as_ref().map_or(1, |team| team.threads());
        let scratch = || Scratch { gemm: gemm::Scratch::new(), floats: vec![0.0; floats.each] };
        let scratch = (0..threads).map(|_| Mutex::new(scratch())).collect();
        Self { team, scratch, sums: Mutex::new(vec![0.0; floats.sums]) }
    }

    /// Checks that each thread's scratch holds `floats` elements.
    pub(super) fn need(&self, floats: usize) -> Result<(), String> {
        let have = self.scratch(0).floats.len();
        if floats <= have {
            Ok(())
        } else {
            Err(format!("needs scratch of {floats} floats, was opened with {have}"))
        }
    }

    /// The scratch of a thread of the team. No other thread uses it at the same time.
    fn scratch(&self, thread: usize) -> MutexGuard<'_, Scratch> {
        self.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of threads that compute a kernel.
    pub(super) fn threads(&self) -> usize {
        self.scratch.len()
    }

    /// Computes a matmul.
    pub(super) fn multiply(&self, product: Gemm<'_>) {
        match &self.team {
            Some(team) if product.is_worth_sharing() => {
                let mut panels = product.panels(team.threads());
                team.parallel_for(panels.all(), &|thread, some| {
                    some.compute(&mut self.scratch(thread).gemm);
                });
            }
            _ => product.serial(&mut self.scratch(0).gemm),
        }
    }

    /// Copies elements of one type.
    pub(super) fn copy(&self, from: View<'_>, to: ViewMut<'_>) {
        let len = from.len();
        let to = Rows { view: to, each: BLOCK };
        self.split(len.div_ceil(BLOCK), len, to, &|blocks, mut to, _| {
            let first = blocks.start * BLOCK;
            copy(from.slice(first..first + to.view.len()), &mut to.view);
        });
    }

    /// Sums over `rows` rows of `width` numbers, which may be computed from each row. `f` writes
    /// the sums over a block of rows, and gets the block's part of `out` and scratch. `done` gets
    /// the sums over all blocks, added in order. `elements` is the amount of work.
    pub(super) fn sum_rows<P: Parts>(
        &self,
        rows: usize,
        width: usize,
        elements: usize,
        out: P,
        f: &(impl Fn(Range<usize>, P, &mut [f32], &mut [f32]) + Sync),
        done: impl FnOnce(&[f32]),
    ) -> Result<(), String> {
        let each = rows.div_ceil(ROW_BLOCKS).max(1);
        let blocks = rows.div_ceil(each).max(1);
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let have = sums.len();
        let Some(partials) = sums.get_mut(..blocks * width) else {
            return Err(format!("sums over rows need {} floats, there are {have}", blocks * width));
        };
        let of_blocks = |blocks: Range<usize>, mut out: P, sums: &mut [f32], floats: &mut [f32]| {
            for (block, sums) in blocks.zip(sums.chunks_exact_mut(width.max(1))) {
                let rows = block * each..((block + 1) * each).min(rows);
                let (part, rest) = out.part(rows.len());
                f(rows, part, sums, floats);
                out = rest;
            }
        };
        match &self.team {
            Some(team) if elements >= PARALLEL_ELEMENTS => {
                let out = Groups { of: out, each };
                let all = Units(0..blocks, (out, Slice { data: &mut *partials, each: width }));
                team.parallel_for(all, &|thread, Units(blocks, (out, sums))| {
                    of_blocks(blocks, out.of, sums.data, &mut self.scratch(thread).floats);
                });
            }
            _ => of_blocks(0..blocks, out, partials, &mut self.scratch(0).floats),
        }
        let (sums, others) = partials.split_at_mut(width);
        for more in others.chunks_exact(width.max(1)) {
            sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
        done(sums);
        Ok(())
    }

    /// Splits `0..units` into ranges, and calls `f` for each range with its part of `out`.
    /// `elements` is the amount of work: small work runs on one thread.
    pub(super) fn split<P: Parts>(
        &self,
        units: usize,
        elements: usize,
        out: P,
        f: &(impl Fn(Range<usize>, P, &mut Scratch) + Sync),
    ) {
        match &self.team {
            Some(team) if elements >= PARALLEL_ELEMENTS && units > 1 => {
                team.parallel_for(Units(0..units, out), &|thread, Units(units, out)| {
                    f(units, out, &mut self.scratch(thread));
                });
            }
            _ if units > 0 => f(0..units, out, &mut self.scratch(0)),
            _ => {}
        }
    }
}

struct Units<P>(Range<usize>, P);

impl<P: Parts> Divisible for Units<P> {
    fn units(&self) -> usize {
        self.0.len()
    }
    fn cut(self, units: usize) -> (Self, Self) {
        let ((first, rest), (out, others)) = (self.0.cut(units), self.1.part(units));
        (Self(first, out), Self(rest, others))
    }
}

/// Output that can be cut between units.
pub(super) trait Parts: Send + Sized {
    /// The part of the first `units` units, and the rest.
    fn part(self, units: usize) -> (Self, Self);
}

/// Output that is not cut, since the threads share it by other means.
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

/// Output with `each` units of `P` per unit.
struct Groups<P> {
    of: P,
    each: usize,
}

impl<P: Parts> Parts for Groups<P> {
    fn part(self, units: usize) -> (Self, Self) {
        let (first, rest) = self.of.part(units * self.each);
        (Self { of: first, ..self }, Self { of: rest, ..self })
    }
}

/// A view with `each` elements per unit. The last unit may have fewer.
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

/// A slice with `each` elements per unit. The last unit may have fewer.
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
