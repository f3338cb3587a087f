//! The memory of the optimizer, planned once for all ranks, and the cut of every segment into pieces, shards
//! and tiles.
//!
//! A segment of n elements is reduced in pieces (buckets). Of each piece rank d of D owns the d-th part; what a
//! rank owns of a segment lies together in its host arrays, n / D elements. Norms are partial sums over fixed
//! chunks of the segment's flat index, so piece and tile boundaries are multiples of the chunk, and neither
//! changes a bit.

use crate::norm::LossScale;
use crate::state::{State, Storage};
use device::numerics::control;
use device::{Arena, Dtype, Group, Plan, Rule, Tensor};
use std::ops::Range;

/// Where states and update are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// fp32 states in host memory, the update on its cores.
    Host,
    /// Everything on the device, partitioned over the data-parallel ranks (ZeRO-2).
    Device,
}

/// Where the gradients of several micro-batches are summed, in fp32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sum {
    /// There is one micro-batch: the 16-bit shard is the gradient.
    None,
    /// 4 bytes per owned parameter on the device, and once down.
    Device,
    /// 4 bytes per owned parameter on the host, and every micro-batch down (with `Blocking` also up).
    Host,
}

/// How gradients and parameters cross between device and host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// Shards as soon as they are reduced, parameters tile by tile as they are updated.
    Streamed,
    /// As DeepSpeed did in 2020, to compare with: gradients cross as fp32, Compute waits until a segment's are on
    /// the host, each micro-batch takes the sum up, adds on the device and takes it down again, and
    /// parameters go up after the whole update. The same results; not its extra passes over host memory.
    Blocking,
}

/// What the optimizer needs to know of a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentSpec {
    /// For plans and errors.
    pub name: String,
    /// Its flat parameters on the device; the length is a multiple of dp_size x [`chunk_elements`].
    pub params: Tensor,
    /// Elements in use; the rest is padding.
    pub len: usize,
    /// Leading elements that take weight decay.
    pub decayed: usize,
    /// Its gradients share two buckets with other such segments, in turn; else it has a bucket of its own.
    pub shares_buckets: bool,
}

/// How the optimizer works.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The update rule.
    pub rule: Rule,
    /// Where.
    pub placement: Placement,
    /// Sums over micro-batches.
    pub sum: Sum,
    /// `Blocking` only with states on the host, and never with sums on the device.
    pub transfer: Transfer,
    /// How states are kept; other than fp32 only on the host.
    pub storage: Storage,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Data-parallel ranks.
    pub dp_size: usize,
    /// Ranks that hold other parts of the same model; their norms are added up.
    pub norm_group: Group,
    /// Largest gradient norm, if bounded.
    pub clip: Option<f64>,
    /// Dynamic loss scale, if any.
    pub loss_scale: Option<LossScale>,
    /// Most elements of a piece, and of a tile.
    pub bucket_elements: usize,
    /// See there.
    pub tile_elements: usize,
}

impl Spec {
    /// The host's cores add micro-batches up; else they come down as one gradient.
    pub(crate) fn host_adds(&self) -> bool {
        self.sum == Sum::Host && self.transfer == Transfer::Streamed
    }
}

/// Elements of one partial sum of the norm: a power of two, from the longest segment (unpadded), so that
/// about a thousand make a segment. A function of the segments alone, not of data-parallel
/// ranks or buckets.
pub fn chunk_elements(longest_segment: usize) -> usize {
    (longest_segment / 1024).next_power_of_two().clamp(64, 65_536)
}

/// One piece of a segment, reduced and gathered by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Piece {
    /// First element of the segment's flat buffer, and how many.
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// Where the gradients of a segment go: its own, or one of two that segments share in turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    pub(crate) tensor: Tensor,
    /// Among all buckets.
    pub(crate) number: usize,
}

/// A segment's share of every rank's memory. Owned arrays have n / dp_size elements.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) spec: SegmentSpec,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bucket: Bucket,
    /// Device, fp32: sum over micro-batches. Or device, 16 bit: the only micro-batch, kept for a device update.
    pub(crate) kept: Option<Tensor>,
    /// Host: the shard as it comes down; where transfers block, the sum so far.
    pub(crate) down: Option<Tensor>,
    /// Host, fp32: sum over micro-batches.
    pub(crate) host_sum: Option<Tensor>,
    /// fp32, or the lower halves of what `up` holds the upper ones of.
    pub(crate) master: Tensor,
    pub(crate) momentum: Tensor,
    pub(crate) variance: Tensor,
    /// Host, 16 bit: the new parameters before they go up.
    pub(crate) up: Option<Tensor>,
    /// This segment's chunks of a rank's partial sums, and of all ranks'.
    pub(crate) own_chunks: Range<usize>,
    pub(crate) all_chunks: Range<usize>,
}

/// Handles of everything the optimizer owns: the same on every rank.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(crate) spec: Spec,
    pub(crate) chunk: usize,
    pub(crate) segments: Vec<Segment>,
    /// Of all segments together.
    pub(crate) num_buckets: usize,
    /// F32, device: a reduced piece on its way to and from the host, where transfers block.
    pub(crate) wide: Option<Tensor>,
    /// F64, device and host: sums of squares of this rank's chunks.
    pub(crate) device_partials: Option<Tensor>,
    pub(crate) partials: Tensor,
    /// F64, host: every rank's chunks, in index order.
    pub(crate) all_partials: Tensor,
    /// F64 (1), host: the global sum of squares.
    pub(crate) norm: Tensor,
    /// F64, host and device: see [`device::numerics::control`].
    pub(crate) control: Tensor,
    pub(crate) device_control: Tensor,
}

/// Cuts n elements into as few pieces as allowed, all multiples of `unit`.
fn pieces(len: usize, most: usize, unit: usize) -> Vec<Piece> {
    let step = (most / unit).max(1) * unit;
    (0..len).step_by(step).map(|start| Piece { start, len: step.min(len - start) }).collect()
}

/// The bucket of every segment, and how many there are.
fn plan_buckets(plan: &mut Plan, segments: &[SegmentSpec]) -> (Vec<Bucket>, usize) {
    let storage = segments.first().map_or(Dtype::F32, |s| s.params.dtype());
    let mut num_buckets = 0;
    let mut bucket = |name: String, len: usize| {
        let at = (Arena::Device, "gradient buckets");
        num_buckets += 1;
        Bucket { tensor: plan.tensor(at, name, storage, (1, len)), number: num_buckets - 1 }
    };
    let sharing = segments.iter().filter(|s| s.shares_buckets);
    let longest = sharing.clone().map(|s| s.params.len()).max().unwrap_or(0);
    let shared: Vec<Bucket> =
        (0..sharing.count().min(2)).map(|i| bucket(format!("bucket.{i}"), longest)).collect();
    let one = |(index, s): (usize, &SegmentSpec)| {
        if s.shares_buckets {
            shared[index % shared.len()]
        } else {
            bucket(format!("{}.bucket", s.name), s.params.len())
        }
    };
    let buckets = segments.iter().enumerate().map(one).collect();
    (buckets, num_buckets)
}

impl Layout {
    /// Lays out buckets, staging, states and sums. `chunk` is [`chunk_elements`] of the model.
    pub fn plan(plan: &mut Plan, spec: &Spec, chunk: usize, segments: &[SegmentSpec]) -> Self {
        let (buckets, num_buckets) = plan_buckets(plan, segments);
        let wide = (spec.transfer == Transfer::Blocking).then(|| {
            let of = |s: &SegmentSpec| {
                pieces(s.params.len(), spec.bucket_elements, spec.dp_size * chunk)
            };
            let longest = segments.iter().flat_map(of).map(|p| p.len).max().unwrap_or(0);
            let at = (Arena::Device, "gradient buckets");
            plan.tensor(at, "bucket.fp32", Dtype::F32, (1, longest / spec.dp_size))
        });
        let (mut own_end, mut all_end) = (0, 0);
        let mut segment = |(s, bucket): (&SegmentSpec, Bucket)| {
            let chunks = s.params.len() / chunk;
            let (own_start, all_start) = (own_end, all_end);
            own_end += chunks / spec.dp_size;
            all_end += chunks;
            Segment::plan(plan, spec, chunk, (s, bucket), (own_start..own_end, all_start..all_end))
        };
        let segments: Vec<Segment> = segments.iter().zip(buckets).map(&mut segment).collect();
        let mut sums = |arena, name: &str, len: usize| {
            plan.tensor((arena, "norms and decisions"), name, Dtype::F64, (1, len))
        };
        let on_device = !spec.host_adds() || spec.placement == Placement::Device;
        Self {
            chunk,
            segments,
            num_buckets,
            wide,
            device_partials: on_device.then(|| sums(Arena::Device, "device_partials", own_end)),
            partials: sums(Arena::Pinned, "partials", own_end),
            all_partials: sums(Arena::Pinned, "all_partials", all_end),
            norm: sums(Arena::Pinned, "norm", 1),
            control: sums(Arena::Pinned, "control", control::WORDS),
            device_control: sums(Arena::Device, "device_control", control::WORDS),
            spec: spec.clone(),
        }
    }

    /// The loss scale that the running step's backward pass multiplies by. Device, F64 (1).
    pub(crate) const fn device_loss_scale(&self) -> Tensor {
        self.device_control.slice(control::LOSS_SCALE..control::LOSS_SCALE + 1)
    }
}

impl Segment {
    fn plan(
        plan: &mut Plan,
        spec: &Spec,
        chunk: usize,
        (s, bucket): (&SegmentSpec, Bucket),
        (own_chunks, all_chunks): (Range<usize>, Range<usize>),
    ) -> Self {
        let owned = s.params.len() / spec.dp_size;
        let storage = s.params.dtype();
        let host = spec.placement == Placement::Host;
        let states = if host { Arena::Pinned } else { Arena::Device };
        let mut tensor = |at, name: &str, dtype| {
            plan.tensor(at, format!("{}.{name}", s.name), dtype, (1, owned))
        };
        let (kept_dtype, kept_pool) = match spec.sum {
            Sum::Device => (Some(Dtype::F32), "gradient sums"),
            Sum::None if !host => (Some(storage), "gradient shards"),
            Sum::None | Sum::Host => (None, ""),
        };
        let fp32_down = spec.sum == Sum::Device || spec.transfer == Transfer::Blocking;
        let down_dtype = if fp32_down { Dtype::F32 } else { storage };
        let master = if spec.storage.split_master { Dtype::U16 } else { Dtype::F32 };
        Self {
            pieces: pieces(s.params.len(), spec.bucket_elements, spec.dp_size * chunk),
            bucket,
            kept: kept_dtype.map(|dtype| tensor((Arena::Device, kept_pool), "grad", dtype)),
            down: host
                .then(|| tensor((Arena::Pinned, "gradient staging"), "grad_down", down_dtype)),
            host_sum: spec
                .host_adds()
                .then(|| tensor((Arena::Pinned, "gradient sums"), "grad_sum", Dtype::F32)),
            master: tensor((states, "optimizer states"), "master", master),
            momentum: tensor((states, "optimizer states"), "momentum", spec.storage.moments),
            variance: tensor((states, "optimizer states"), "variance", spec.storage.moments),
            up: host.then(|| tensor((Arena::Pinned, "parameter staging"), "params_up", storage)),
            own_chunks,
            all_chunks,
            spec: s.clone(),
        }
    }

    /// Masters, first and second moments.
    pub(crate) fn states(&self) -> [State; 3] {
        let master = match self.up.filter(|_| self.master.dtype() == Dtype::U16) {
            Some(upper) => State::halves(self.master, upper),
            None => State::whole(self.master),
        };
        [master, State::whole(self.momentum), State::whole(self.variance)]
    }

    /// For each piece: where rank `dp`'s part starts in the flat buffer, and its range in the owned arrays.
    pub(crate) fn owned(&self, dp: usize, dp_size: usize) -> Vec<(usize, Range<usize>)> {
        let mut end = 0;
        let part = |piece: &Piece| {
            let (start, len) = (end, piece.len / dp_size);
            end += len;
            (piece.start + dp * len, start..end)
        };
        self.pieces.iter().map(part).collect()
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
            let pieces = pieces(len, most, unit);
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
