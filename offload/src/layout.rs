//! The memory of the optimizer, planned once for all ranks, and the cut of every segment into pieces, shards
//! and tiles.
//!
//! A segment of n elements is reduced in pieces (buckets). Of each piece rank d of D owns the d-th part; what a
//! rank owns of a segment lies together in its host arrays, n / D elements. Norms are partial sums over fixed
//! chunks of the segment's flat index, so piece and tile boundaries are multiples of the chunk, and neither
//! changes a bit.

use crate::control;
use crate::norm::LossScale;
use crate::state::{State, Storage};
use crate::update::Rule;
use device::{Arena, Cargo, Dtype, Group, Plan, Pool, Tensor};
use std::ops::Range;

/// Masters and moments.
const STATES: Pool = Pool::of_the_host("optimizer states");
/// fp32 sums of gradients over micro-batches.
const SUMS: Pool = Pool::of_the_host("gradient sums");
/// Sums that go back to the device, where the next micro-batch's gradient is added.
const SUMS_TO_ADD: Pool = Pool::new("gradient sums to add").carrying(Cargo::Gradient);
/// Gradients of a rank's shard, where the optimizer is on the device.
const SHARDS: Pool = Pool::new("gradient shards");
/// Gradients on their way down.
const GRADIENT_STAGING: Pool = Pool::staging("gradient staging").carrying(Cargo::Gradient);
/// Parameters on their way up.
const PARAMETER_STAGING: Pool = Pool::staging("parameter staging");

/// A run of a segment that this rank owns.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    /// Its first element in the segment's flat buffer.
    pub start: usize,
    /// Masters, first and second moment.
    pub states: [State; 3],
    /// The gradient of the update that waits, where one does.
    pub gradient: Option<State>,
}

/// Where states and update are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// fp32 states in host memory, the update on its cores.
    Host,
    /// On the device, partitioned over the data-parallel ranks (ZeRO-2).
    Device,
}

/// Where the gradients of several micro-batches are summed, in fp32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sum {
    /// There is one micro-batch: the 16-bit shard is the gradient.
    None,
    /// 4 bytes per owned parameter on the device, and once down.
    Device,
    /// 4 bytes per owned parameter on the host, and every micro-batch down (with `Blocking` also up, and in the
    /// storage type).
    Host,
}

/// How gradients and parameters cross between device and host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// Shards as soon as they are reduced, parameters tile by tile as they are updated.
    Streamed,
    /// As DeepSpeed did in 2020, to compare with (its `stage2.py` of that time): Compute waits until a segment's
    /// gradients are on the host, each micro-batch takes their sum up, adds on the device and takes it down again, in
    /// the storage type, the last one as fp32, and parameters go up after the whole update. The same results
    /// where the storage type is fp32 or there is one micro-batch; not its extra passes over host memory.
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
    /// Of the parameters, from the first on in the order of the forward pass: their states and update are on the device,
    /// the others' on the host. 0: all on the host, 1: all on the device.
    pub device_fraction: f64,
    /// An update may wait until the next step's gradients are there, so there is room for both steps'.
    pub delayed: bool,
    /// Sums over micro-batches.
    pub sum: Sum,
    /// `Blocking` only with all states on the host, never with sums on the device nor with delayed updates.
    pub transfer: Transfer,
    /// How states on the host are kept; on the device they are fp32.
    pub storage: Storage,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Data-parallel ranks.
    pub dp_size: usize,
    /// Gradients cross between the data-parallel ranks as fp32, and their sum is rounded once.
    pub reduce_fp32: bool,
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

    /// Where the gradients of what is updated at `place` are summed.
    fn sum_at(&self, place: Place) -> Sum {
        match (place, self.sum) {
            (Place::Device, Sum::Host) => Sum::Device,
            (_, sum) => sum,
        }
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
    /// Into [`Segment::stores`].
    pub(crate) store: usize,
}

/// Where the gradients of a segment go: its own, or one of two that segments share in turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    pub(crate) tensor: Tensor,
    /// Among all buckets.
    pub(crate) number: usize,
}

/// What a rank keeps of its elements of a segment that are updated at one place. Arrays have one element for each.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) place: Place,
    pub(crate) sum: Sum,
    /// Device, fp32: sum over micro-batches. Or device, 16 bit: the only micro-batch, kept for a device update. Of this
    /// and the next two: of two steps in turn where the updates that read them are delayed, else the same twice.
    pub(crate) kept: Option<[Tensor; 2]>,
    /// Host: the shard as it comes down.
    pub(crate) down: Option<[Tensor; 2]>,
    /// Host, where transfers block and micro-batches are summed: what they come to so far, in the storage type.
    pub(crate) sum_so_far: Option<Tensor>,
    /// Host, fp32: sum over micro-batches.
    pub(crate) host_sum: Option<[Tensor; 2]>,
    /// fp32, or the lower halves of what `up` holds the upper ones of.
    pub(crate) master: Tensor,
    pub(crate) momentum: Tensor,
    pub(crate) variance: Tensor,
    /// Host, 16 bit: the new parameters before they go up.
    pub(crate) up: Option<Tensor>,
}

/// A segment's share of every rank's memory.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) spec: SegmentSpec,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bucket: Bucket,
    /// What is updated on the device, what on the host; what there is none of is absent.
    pub(crate) stores: Vec<Store>,
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
    /// F32, device: a reduced piece on its way to the host, where transfers block.
    pub(crate) wide: Option<Tensor>,
    /// F32, device: a piece while it is summed, where the ranks' sums are fp32 and the gradients are not.
    pub(crate) summed: Option<Tensor>,
    /// Device: the host's sum of a piece, come up to be added.
    pub(crate) incoming: Option<Tensor>,
    /// F64, device: sums of squares of this rank's first chunks, those that are not made on the host.
    pub(crate) device_partials: Option<Tensor>,
    /// F64, host: of all its chunks.
    pub(crate) partials: Tensor,
    /// F64, host: every rank's chunks, in index order.
    pub(crate) all_partials: Tensor,
    /// F64 (1), host: the global sum of squares.
    pub(crate) norm: Tensor,
    /// F64, host and device: see [`control`](crate::control).
    pub(crate) control: Tensor,
    pub(crate) device_control: Tensor,
}

/// Cuts a range into as few pieces as allowed, all multiples of `unit`.
fn pieces(range: Range<usize>, most: usize, unit: usize, store: usize) -> Vec<Piece> {
    let (step, end) = ((most / unit).max(1) * unit, range.end);
    range.step_by(step).map(|start| Piece { start, len: step.min(end - start), store }).collect()
}

/// By segment, how many leading elements are updated on the device: multiples of `unit`.
fn cuts(segments: &[SegmentSpec], fraction: f64, unit: usize) -> Vec<usize> {
    let total: usize = segments.iter().map(|s| s.params.len() / unit).sum();
    let mut left = (fraction * total as f64).round() as usize;
    let cut = |s: &SegmentSpec| {
        let units = left.min(s.params.len() / unit);
        left -= units;
        units * unit
    };
    segments.iter().map(cut).collect()
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

/// Where transfers block: a reduced piece in fp32, and the host's sum of it, come up to be added.
fn plan_blocking(
    plan: &mut Plan,
    spec: &Spec,
    unit: usize,
    segments: &[SegmentSpec],
) -> [Option<Tensor>; 2] {
    let of = |s: &SegmentSpec| pieces(0..s.params.len(), spec.bucket_elements, unit, 0);
    let longest = segments.iter().flat_map(of).map(|p| p.len).max().unwrap_or(0);
    let mut one_piece = |name: &str, dtype| {
        plan.tensor((Arena::Device, "gradient buckets"), name, dtype, (1, longest / spec.dp_size))
    };
    let blocking = spec.transfer == Transfer::Blocking;
    let storage = segments.first().map_or(Dtype::F32, |s| s.params.dtype());
    let wide = blocking.then(|| one_piece("bucket.fp32", Dtype::F32));
    [wide, (blocking && spec.sum == Sum::Host).then(|| one_piece("sum", storage))]
}

/// One piece in fp32, the longest of all, where the ranks' sums are to be made from that.
fn plan_summed(plan: &mut Plan, spec: &Spec, segments: &[Segment]) -> Option<Tensor> {
    let is_wide = segments.iter().all(|s| s.spec.params.dtype() == Dtype::F32);
    if !spec.reduce_fp32 || spec.dp_size == 1 || is_wide {
        return None;
    }
    let longest = segments.iter().flat_map(|s| &s.pieces).map(|piece| piece.len).max()?;
    let at = (Arena::Device, "gradient buckets");
    Some(plan.tensor(at, "bucket.sum_fp32", Dtype::F32, (1, longest)))
}

impl Layout {
    /// Lays out buckets, staging, states and sums. `chunk` is [`chunk_elements`] of the model.
    pub fn plan(plan: &mut Plan, spec: &Spec, chunk: usize, segments: &[SegmentSpec]) -> Self {
        let (buckets, num_buckets) = plan_buckets(plan, segments);
        let unit = spec.dp_size * chunk;
        let [wide, incoming] = plan_blocking(plan, spec, unit, segments);
        let cuts = cuts(segments, spec.device_fraction, unit);
        let (mut own_end, mut all_end) = (0, 0);
        let mut segment = |((s, bucket), &cut): ((&SegmentSpec, Bucket), &usize)| {
            let chunks = s.params.len() / chunk;
            let (own_start, all_start) = (own_end, all_end);
            own_end += chunks / spec.dp_size;
            all_end += chunks;
            let chunks = (own_start..own_end, all_start..all_end);
            Segment::plan(plan, spec, (s, bucket), (cut, unit), chunks)
        };
        let segments: Vec<Segment> =
            segments.iter().zip(buckets).zip(&cuts).map(&mut segment).collect();
        let summed = plan_summed(plan, spec, &segments);
        let mut sums = |arena, name: &str, len: usize| {
            plan.tensor((arena, "norms and decisions"), name, Dtype::F64, (1, len))
        };
        let cut = cuts.iter().sum::<usize>() / unit;
        let on_device = if spec.host_adds() { cut } else { own_end };
        let device_partials =
            (on_device > 0).then(|| sums(Arena::Device, "device_partials", on_device));
        Self {
            chunk,
            segments,
            num_buckets,
            wide,
            summed,
            incoming,
            device_partials,
            partials: sums(Arena::Pinned, "partials", own_end),
            all_partials: sums(Arena::Pinned, "all_partials", all_end),
            norm: sums(Arena::Pinned, "norm", 1),
            control: sums(Arena::Pinned, "control", control::WORDS),
            device_control: sums(Arena::Device, "device_control", control::WORDS),
            spec: spec.clone(),
        }
    }

    /// The same memory for steps of another number of micro-batches, for who plays a step without data.
    #[must_use]
    pub fn with_micro_batches(&self, micro_batches: usize) -> Self {
        Self { spec: Spec { micro_batches, ..self.spec.clone() }, ..self.clone() }
    }

    /// Data-parallel ranks.
    pub const fn dp_size(&self) -> usize {
        self.spec.dp_size
    }

    /// Parameters that a rank owns, padding included: elements of each of its states.
    pub fn owned_elements(&self) -> u64 {
        let stores = self.segments.iter().flat_map(|segment| &segment.stores);
        stores.map(|store| store.master.len() as u64).sum()
    }

    /// What rank `dp` owns of a segment, in order; `late` is the side of the gradient whose update waits.
    pub fn owned(&self, segment: usize, dp: usize, late: Option<usize>) -> Vec<Owned> {
        let s = &self.segments[segment];
        let mut ends = vec![0; s.stores.len()];
        let part = |piece: &Piece| {
            let (store, len) = (&s.stores[piece.store], piece.len / self.spec.dp_size);
            let end = &mut ends[piece.store];
            let owned = *end..*end + len;
            *end = owned.end;
            let part = |state: State| state.slice(owned.clone());
            Owned {
                start: piece.start + dp * len,
                states: store.states().map(part),
                gradient: late.map(|side| part(State::whole(store.gradient(side)))),
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

    /// The loss scale that the running step's backward pass multiplies by. Device, F64 (1).
    pub(crate) const fn device_loss_scale(&self) -> Tensor {
        self.device_control.slice(control::LOSS_SCALE..control::LOSS_SCALE + 1)
    }
}

impl Segment {
    /// The first `cut` elements are updated on the device.
    fn plan(
        plan: &mut Plan,
        spec: &Spec,
        (s, bucket): (&SegmentSpec, Bucket),
        (cut, unit): (usize, usize),
        (own_chunks, all_chunks): (Range<usize>, Range<usize>),
    ) -> Self {
        let (mut all, mut stores) = (Vec::new(), Vec::new());
        for (place, range) in [(Place::Device, 0..cut), (Place::Host, cut..s.params.len())] {
            if !range.is_empty() {
                // A segment in two places has its names twice.
                let split = 0 < cut && cut < s.params.len() && place == Place::Device;
                let name = if split { format!("{}.on_device", s.name) } else { s.name.clone() };
                let (owned, storage) = (range.len() / spec.dp_size, s.params.dtype());
                all.extend(pieces(range, spec.bucket_elements, unit, stores.len()));
                stores.push(Store::plan(plan, spec, place, (&name, owned, storage)));
            }
        }
        Self { pieces: all, bucket, stores, own_chunks, all_chunks, spec: s.clone() }
    }
}

impl Store {
    /// For `owned` elements of what is called `name`.
    fn plan(
        plan: &mut Plan,
        spec: &Spec,
        place: Place,
        (name, owned, storage): (&str, usize, Dtype),
    ) -> Self {
        let (host, sum) = (place == Place::Host, spec.sum_at(place));
        let states = if host { Arena::Pinned } else { Arena::Device };
        let mut tensor =
            |at, what: &str, dtype| plan.tensor(at, format!("{name}.{what}"), dtype, (1, owned));
        let sum_so_far = (host && spec.transfer == Transfer::Blocking && sum == Sum::Host)
            .then(|| tensor((Arena::Pinned, SUMS_TO_ADD), "grad_sum", storage));
        let mut gradient = |at, what: &str, dtype, read_by_update: bool| {
            let first = tensor(at, what, dtype);
            let twice = spec.delayed && read_by_update;
            [first, if twice { tensor(at, &format!("{what}.late"), dtype) } else { first }]
        };
        let kept = match sum {
            Sum::Device => Some((Dtype::F32, SUMS)),
            Sum::None if !host => Some((storage, SHARDS)),
            Sum::None | Sum::Host => None,
        };
        let fp32_down = sum == Sum::Device || spec.transfer == Transfer::Blocking;
        let down_dtype = if fp32_down { Dtype::F32 } else { storage };
        let host_adds = host && spec.host_adds();
        let kept = kept.map(|(dtype, pool)| gradient((Arena::Device, pool), "grad", dtype, !host));
        let down = host.then(|| {
            gradient((Arena::Pinned, GRADIENT_STAGING), "grad_down", down_dtype, !host_adds)
        });
        let host_sum =
            host_adds.then(|| gradient((Arena::Pinned, SUMS), "grad_sum", Dtype::F32, true));
        // On the device all states are fp32.
        let small = if host { spec.storage } else { Storage::default() };
        let (master, moments) =
            (if small.split_master { Dtype::U16 } else { Dtype::F32 }, small.moments);
        Self {
            place,
            sum,
            kept,
            down,
            sum_so_far,
            host_sum,
            master: tensor((states, STATES), "master", master),
            momentum: tensor((states, STATES), "momentum", moments),
            variance: tensor((states, STATES), "variance", moments),
            up: host.then(|| tensor((Arena::Pinned, PARAMETER_STAGING), "params_up", storage)),
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

    /// What the update of the step that used `side` reads.
    pub(crate) fn gradient(&self, side: usize) -> Tensor {
        let on_device = if self.place == Place::Device { self.kept } else { None };
        match on_device.or(self.host_sum).or(self.down) {
            Some(sides) => sides[side],
            None => unreachable!(
                "a store keeps its gradient on the device, sums it on the host, or has it come down"
            ),
        }
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
