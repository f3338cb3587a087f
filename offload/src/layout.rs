//! The memory of the optimizer, planned once for all ranks, and the cut of every segment into
//! pieces, shards and tiles.
//!
//! A segment of n elements is reduced in pieces. Rank d of D owns the d-th part of each piece. A
//! rank's n / D elements of a segment are contiguous in its host arrays. Norms are partial sums
//! over fixed chunks of the segment's flat index. Piece and tile boundaries are multiples of the
//! chunk, so no cut changes a bit.

use crate::buckets::{Bucket, plan_buckets, plan_sums};
use crate::control;
use crate::frozen::FrozenPart;
use crate::spec::{GradAccumulation, OptimizerSpec, SegmentSpec, Transfer};
use crate::state::State;
use crate::store::{BlockingBuffers, Store, StorePlanner};
use device::{Arena, Dtype, Plan, Tensor};
use std::ops::Range;

/// A run of a segment that this rank owns.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedRun {
    /// First element of the run in the segment's flat buffer.
    pub start: usize,
    /// The masters, the first moments and the second moments.
    pub states: [State; 3],
    /// Gradient of the delayed update, if an update is delayed.
    pub delayed_gradient: Option<State>,
}

/// The arrays that hold the current states and the delayed gradient of a rank.
#[derive(Clone, Copy)]
pub(crate) struct ActiveBuffers {
    /// Number of the arrays of states: [`control::STATE_BUFFER`].
    pub(crate) states: usize,
    /// Gradient buffer of the delayed update, if an update is delayed.
    pub(crate) delayed: Option<usize>,
}

/// Elements of one partial sum of the norm: a power of two, so that the longest segment (without
/// padding) has about a thousand sums. It does not depend on data-parallel ranks or buckets.
pub fn chunk_elements(longest_segment: usize) -> usize {
    (longest_segment / 1024).next_power_of_two().clamp(64, 65_536)
}

/// One piece of a segment; each piece has its own reduce-scatter and all-gather.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Piece {
    /// First element of the piece in the segment's flat buffer.
    pub(crate) start: usize,
    /// Number of elements of the piece on all ranks together.
    pub(crate) len: usize,
    /// Index of the piece's store in [`Segment::stores`].
    pub(crate) store: usize,
}

/// The positions of a segment's chunks.
#[derive(Clone, Debug)]
pub(crate) struct Chunks {
    /// Range of the chunks among a rank's partial sums.
    pub(crate) own: Range<usize>,
    /// Range of the chunks among all ranks' partial sums.
    pub(crate) all: Range<usize>,
}

/// A segment's share of every rank's memory.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) spec: SegmentSpec,
    pub(crate) pieces: Vec<Piece>,
    /// Buckets of the segment: several if micro-batches or segments alternate between buckets.
    pub(crate) buckets: Vec<Bucket>,
    /// Buffer of the segment's sums, if segments share such buffers.
    pub(crate) sum: Option<Bucket>,
    /// The store on the device, then the store on the host; a place without elements has no store.
    pub(crate) stores: Vec<Store>,
    /// The frozen parameters, if the segment has any.
    pub(crate) frozen: Option<FrozenPart>,
    /// Positions of the segment's chunks.
    pub(crate) chunks: Chunks,
}

/// Handles of all memory that the optimizer owns: the same on every rank.
#[derive(Clone, Debug)]
pub struct OptimizerLayout {
    pub(crate) spec: OptimizerSpec,
    pub(crate) chunk: usize,
    pub(crate) segments: Vec<Segment>,
    /// Number of buckets of all segments.
    pub(crate) num_buckets: usize,
    /// Number of buffers of sums that segments share.
    pub(crate) num_sums: usize,
    /// Number of buffers that parameters share.
    pub(crate) num_param_buffers: usize,
    /// Buffer of one piece in fp32 on the device, if the ranks sum 16-bit gradients in fp32.
    pub(crate) summed: Option<Tensor>,
    /// Sums of squares of this rank's first chunks, in F64 on the device; the host sums the others.
    pub(crate) device_partials: Option<Tensor>,
    /// Sums of squares of all chunks of this rank, in F64 on the host.
    pub(crate) partials: Tensor,
    /// Sums of squares of every rank's chunks in index order, in F64 on the host.
    pub(crate) all_partials: Tensor,
    /// Sum of all squares, one F64 on the host.
    pub(crate) norm: Tensor,
    /// The [control block](crate::control) on the host.
    pub(crate) control: Tensor,
    /// Copy of the control block on the device.
    pub(crate) device_control: Tensor,
    /// Predicted control block that speculative updates read.
    pub(crate) predicted: Option<Tensor>,
}

/// Cuts a range into pieces of at most `most` elements, or one `unit`; all are multiples of `unit`.
fn pieces(range: Range<usize>, most: usize, unit: usize, store: usize) -> Vec<Piece> {
    let (step, end) = ((most / unit).max(1) * unit, range.end);
    range.step_by(step).map(|start| Piece { start, len: step.min(end - start), store }).collect()
}

/// Number of leading elements that the device updates, for each segment: multiples of `unit`.
fn cuts(segments: &[SegmentSpec], fraction: f64, unit: usize) -> Vec<usize> {
    let total: usize = segments.iter().map(|s| s.trained / unit).sum();
    let mut left = (fraction * total as f64).round() as usize;
    let cut = |s: &SegmentSpec| {
        let units = left.min(s.trained / unit);
        left -= units;
        units * unit
    };
    segments.iter().map(cut).collect()
}

/// Finds the first of the segments that are updated speculatively: the last segments that together
/// have at most the share `fraction` of all elements after segment 0.
fn first_speculative(segments: &[SegmentSpec], fraction: f64) -> usize {
    let len = |s: &SegmentSpec| s.trained as f64;
    let candidates = segments.get(1..).unwrap_or_default();
    let most = fraction * candidates.iter().map(len).sum::<f64>();
    let mut taken = 0.0;
    let fits = |s: &&SegmentSpec| {
        taken += len(s);
        taken <= most
    };
    segments.len() - candidates.iter().rev().take_while(fits).count()
}

/// Plans a buffer for one piece of `len` elements on the device.
fn plan_piece(plan: &mut Plan, name: &str, dtype: Dtype, len: usize) -> Tensor {
    plan.tensor((Arena::Device, "gradient buckets"), name, dtype, (1, len))
}

impl BlockingBuffers {
    fn plan(
        plan: &mut Plan,
        spec: &OptimizerSpec,
        unit: usize,
        segments: &[SegmentSpec],
    ) -> Option<Self> {
        if spec.transfer == Transfer::Streamed {
            return None;
        }
        let of = |s: &SegmentSpec| pieces(0..s.trained, spec.bucket_elements, unit, 0);
        let longest = segments.iter().flat_map(of).map(|p| p.len).max().unwrap_or(0);
        let storage = segments.first().map_or(Dtype::F32, |s| s.params.dtype());
        let own = longest / spec.dp_size;
        let wide = plan_piece(plan, "bucket.fp32", Dtype::F32, own);
        let sums = spec.accumulation == GradAccumulation::Host;
        Some(Self { wide, incoming: sums.then(|| plan_piece(plan, "sum", storage, own)) })
    }
}

/// Plans the fp32 buffer in which the ranks sum one piece, if they sum 16-bit gradients in fp32.
fn plan_summed(plan: &mut Plan, spec: &OptimizerSpec, segments: &[Segment]) -> Option<Tensor> {
    let is_wide = segments.iter().all(|s| s.spec.params.dtype() == Dtype::F32);
    if !spec.reduce_fp32 || spec.dp_size == 1 || is_wide {
        return None;
    }
    let longest = segments.iter().flat_map(|s| &s.pieces).map(|piece| piece.len).max()?;
    Some(plan_piece(plan, "bucket.sum_fp32", Dtype::F32, longest))
}

impl OptimizerLayout {
    /// Lays out buckets, staging, states and sums. `chunk` is [`chunk_elements`] of the model.
    pub fn plan(
        plan: &mut Plan,
        spec: &OptimizerSpec,
        chunk: usize,
        segments: &[SegmentSpec],
    ) -> Self {
        spec.check();
        let (buckets, num_buckets) = plan_buckets(plan, segments);
        let (sums, num_sums) = plan_sums(plan, spec, segments);
        let num_slots =
            segments.iter().filter_map(|s| s.param_buffer).max().map_or(0, |most| most + 1);
        let unit = spec.dp_size * chunk;
        let blocking = BlockingBuffers::plan(plan, spec, unit, segments);
        let cuts = cuts(segments, spec.device_fraction, unit);
        let first_speculative = first_speculative(segments, spec.speculative_fraction);
        let words = (1, control::WORDS);
        let at = (Arena::Pinned, "norms and decisions");
        let has_host_part = |(s, cut): (&SegmentSpec, &usize)| *cut < s.trained;
        let predicted =
            segments[first_speculative..].iter().zip(&cuts[first_speculative..]).any(has_host_part);
        let predicted = predicted.then(|| plan.tensor(at, "presumed", Dtype::F64, words));
        let (mut own_end, mut all_end, mut number) = (0, 0, 0);
        type Buffers = (Vec<Bucket>, Option<Bucket>);
        let mut segment = |((s, (buckets, sum)), &cut): ((&SegmentSpec, Buffers), &usize)| {
            let chunks = s.trained / chunk;
            let (own_start, all_start) = (own_end, all_end);
            let predicted = predicted.filter(|_| number >= first_speculative);
            number += 1;
            own_end += chunks / spec.dp_size;
            all_end += chunks;
            let (mut pieces, mut stores) = (Vec::new(), Vec::new());
            for (on_device, range) in [(true, 0..cut), (false, cut..s.trained)] {
                if range.is_empty() {
                    continue;
                }
                // A segment with two stores needs two names.
                let is_split = on_device && cut < s.trained;
                let name = if is_split { format!("{}.on_device", s.name) } else { s.name.clone() };
                let (len, dtype) = (range.len() / spec.dp_size, s.params.dtype());
                pieces.extend(self::pieces(range, spec.bucket_elements, unit, stores.len()));
                let arrays = StorePlanner { plan, spec, name, len, dtype, chunk };
                stores.push(match on_device {
                    true => arrays.on_device(),
                    false => arrays.on_host(blocking, sum, predicted),
                });
            }
            let chunks = Chunks { own: own_start..own_end, all: all_start..all_end };
            let frozen = self::pieces(s.trained..s.params.len(), spec.bucket_elements, unit, 0);
            let frozen = frozen.into_iter().map(|piece| piece.start..piece.start + piece.len);
            let frozen = FrozenPart::plan(plan, s, frozen.collect(), spec.dp_size);
            Segment { spec: s.clone(), pieces, buckets, sum, stores, frozen, chunks }
        };
        let segments: Vec<Segment> = segments
            .iter()
            .zip(buckets.into_iter().zip(sums))
            .zip(&cuts)
            .map(&mut segment)
            .collect();
        let summed = plan_summed(plan, spec, &segments);
        let mut words = |arena, name: &str, len: usize| {
            plan.tensor((arena, "norms and decisions"), name, Dtype::F64, (1, len))
        };
        let cut = cuts.iter().sum::<usize>() / unit;
        let on_device = if spec.host_adds() { cut } else { own_end };
        let device_partials =
            (on_device > 0).then(|| words(Arena::Device, "device_partials", on_device));
        Self {
            chunk,
            segments,
            num_buckets,
            num_sums,
            num_param_buffers: num_slots,
            summed,
            device_partials,
            partials: words(Arena::Pinned, "partials", own_end),
            all_partials: words(Arena::Pinned, "all_partials", all_end),
            norm: words(Arena::Pinned, "norm", 1),
            control: words(Arena::Pinned, "control", control::WORDS),
            device_control: words(Arena::Device, "device_control", control::WORDS),
            predicted,
            spec: spec.clone(),
        }
    }

    /// The same layout with another number of micro-batches, for dry runs.
    #[must_use]
    pub fn with_micro_batches(&self, micro_batches: usize) -> Self {
        Self { spec: OptimizerSpec { micro_batches, ..self.spec.clone() }, ..self.clone() }
    }

    /// Number of data-parallel ranks.
    pub const fn dp_size(&self) -> usize {
        self.spec.dp_size
    }

    /// Whether any parameter is updated speculatively. Even the last segment may be larger than the
    /// configured share.
    pub const fn is_speculative(&self) -> bool {
        self.predicted.is_some()
    }

    /// Number of trained parameters that a rank owns, padding included: the elements of each of its
    /// states.
    pub fn owned_elements(&self) -> u64 {
        let stores = self.segments.iter().flat_map(|segment| &segment.stores);
        stores.map(|store| store.master.len() as u64).sum()
    }

    /// Lists the runs of a segment that rank `dp` owns, in order, with the states' first arrays.
    pub fn owned(&self, segment: usize, dp: usize) -> Vec<OwnedRun> {
        self.owned_on(segment, dp, ActiveBuffers { states: 0, delayed: None })
    }

    /// [`owned`](Self::owned) with the arrays that `active` names.
    pub(crate) fn owned_on(
        &self,
        segment: usize,
        dp: usize,
        active: ActiveBuffers,
    ) -> Vec<OwnedRun> {
        let s = &self.segments[segment];
        let mut ends = vec![0; s.stores.len()];
        let part = |piece: &Piece| {
            let (store, len) = (&s.stores[piece.store], piece.len / self.spec.dp_size);
            let end = &mut ends[piece.store];
            let owned = *end..*end + len;
            *end = owned.end;
            let part = |state: State| state.slice(owned.clone());
            OwnedRun {
                start: piece.start + dp * len,
                states: store.states(active.states).map(part),
                delayed_gradient: active
                    .delayed
                    .map(|buffer| part(State::whole(store.gradient(buffer)))),
            }
        };
        s.pieces.iter().map(part).collect()
    }

    /// The control block before step 1.
    pub fn initial_control(&self) -> [f64; control::WORDS] {
        let scale = self.spec.loss_scale;
        let mut words = [0.0; control::WORDS];
        words[control::LOSS_SCALE] = scale.map_or(1.0, |s| s.initial);
        words[control::HYSTERESIS_LEFT] = scale.map_or(0.0, |s| f64::from(s.hysteresis));
        words
    }

    /// Loss scale of the running step's backward pass: one F64 on the device.
    pub(crate) const fn device_loss_scale(&self) -> Tensor {
        self.device_control.slice(control::LOSS_SCALE..control::LOSS_SCALE + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_segment_in_whole_units() {
        for (len, most, unit) in
            [(640, 200, 64), (640, 10, 64), (640, 1_000_000, 128), (64, 64, 64)]
        {
            let pieces = pieces(0..len, most, unit, 0);
            let mut at = 0;
            for piece in &pieces {
                assert!(piece.start == at && piece.len.is_multiple_of(unit) && piece.len > 0);
                assert!(piece.len <= most.max(unit));
                at += piece.len;
            }
            assert_eq!(at, len);
        }
    }
}
