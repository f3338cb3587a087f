//! The optimizer of one rank: what it submits, and what it waits for.

use crate::adam::AdamTile;
use crate::blocking::widen;
use crate::layout::{Layout, Placement, Segment, Sum, Transfer};
use crate::norm::{Accumulate, Decide, FoldPartials, SpreadPartials, Turn};
use crate::schedule::LearningRate;
use crate::state::State;
use device::Lane::{Compute, D2h, DpComm, H2d, Host};
use device::numerics::NoiseRun;
use device::{Device, Event, Group, HostOp, Op, Rank, Reduce, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A run of a segment that this rank owns.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    /// Its first element in the segment's flat buffer.
    pub start: usize,
    /// Masters, first and second moment.
    pub states: [State; 3],
}

/// What this rank does with one piece of a segment.
#[derive(Debug)]
pub(crate) struct PieceWork {
    /// The piece in a flat buffer of the segment.
    flat: Range<usize>,
    /// This rank's part of it in the owned arrays.
    pub(crate) owned: Range<usize>,
    /// This rank's partial sums of it.
    chunks: Range<usize>,
    /// Leading elements of the part that count in the norm, and that take weight decay.
    counted: usize,
    decayed: usize,
    tiles: Vec<Tile>,
}

/// What the host does at once. Tasks are made here, once.
#[derive(Debug)]
struct Tile {
    /// In the owned arrays.
    owned: Range<usize>,
    /// In the segment's flat buffer.
    start: usize,
    /// First, middle and last micro-batch.
    accumulate: Option<[Arc<HostOp>; 3]>,
    adam: Option<Arc<HostOp>>,
    /// The new parameters are in staging.
    updated: Event,
}

/// Where a segment stands.
#[derive(Debug)]
pub(crate) struct SegmentWork {
    pub(crate) pieces: Vec<PieceWork>,
    /// `update` has run and `publish` has not.
    pub(crate) unpublished: bool,
    /// The host has read what came down last.
    staging_free: Event,
    params_ready: Event,
}

/// The optimizer of one rank.
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) layout: Arc<Layout>,
    pub(crate) rank: Rank,
    pub(crate) work: Vec<SegmentWork>,
    spread: Arc<HostOp>,
    fold: Arc<HostOp>,
    decide: Arc<HostOp>,
    /// By number of the bucket: its former contents have gone.
    bucket_free: Vec<Event>,
    control_on_device: Event,
}

impl Optimizer {
    /// For `rank`. `counted`: leading elements of each segment that count in this rank's part of the norm
    /// (parameters that other ranks of the norm's group hold too count on one of them). `noise`: by segment, for
    /// moments that are rounded by chance.
    pub fn new(
        layout: &Arc<Layout>,
        rank: Rank,
        (counted, noise): (&[usize], &[Arc<[NoiseRun]>]),
        learning_rate: Arc<dyn LearningRate>,
    ) -> Self {
        let spec = &layout.spec;
        let work = |((s, &counted), noise): ((&Segment, &usize), _)| {
            segment_work(layout, s, rank.dp, (counted, noise))
        };
        let segments = layout.segments.iter().zip(counted).zip(noise);
        let work: Vec<SegmentWork> = segments.map(work).collect();
        let decide = Decide {
            norm: layout.norm,
            control: layout.control,
            rule: spec.rule,
            summands: (spec.micro_batches * spec.dp_size) as f64,
            clip: spec.clip,
            loss_scale: spec.loss_scale,
            learning_rate,
        };
        let runs = spread_runs(layout, rank.dp, &work);
        Self {
            spread: HostOp::new(SpreadPartials {
                own: layout.partials,
                all: layout.all_partials,
                runs,
            }),
            fold: HostOp::new(FoldPartials { all: layout.all_partials, norm: layout.norm }),
            decide: HostOp::new(decide),
            bucket_free: vec![Event::default(); layout.num_buckets],
            control_on_device: Event::default(),
            layout: Arc::clone(layout),
            rank,
            work,
        }
    }

    /// A bucket for the gradients of `segment`; Compute waits until its former contents have gone.
    pub fn bucket(&self, dev: &Device, segment: usize) -> Tensor {
        let Segment { spec, bucket, .. } = &self.layout.segments[segment];
        dev.wait(Compute, self.bucket_free[bucket.number]);
        bucket.tensor.slice(0..spec.params.len())
    }

    /// Starts the way of a full bucket: reduce-scatter over the data-parallel ranks, then this rank's shard to
    /// where it is summed or staged. `micro` counts from 0. Nothing is finished on return; the bucket is free
    /// again when [`bucket`](Self::bucket) gives it out. Where transfers block, Compute waits for all of it.
    pub fn reduce(&mut self, dev: &Device, segment: usize, bucket: Tensor, micro: usize) {
        let layout = Arc::clone(&self.layout);
        let s = &layout.segments[segment];
        if s.spec.len < bucket.len() {
            dev.submit(Compute, Op::Zero { x: bucket.slice(s.spec.len..bucket.len()) });
        }
        dev.follow(DpComm, Compute);
        for index in 0..self.work[segment].pieces.len() {
            self.reduce_piece(dev, s, (segment, index), bucket, micro);
        }
        if layout.spec.host_adds() {
            // Only now: pieces do not wait for each other's sums.
            self.work[segment].staging_free = dev.record(Host);
        }
        // On D2h where the bucket itself goes down, else on DpComm.
        let freed = if s.kept.is_none() { dev.record(D2h) } else { dev.record(DpComm) };
        if layout.spec.transfer == Transfer::Blocking {
            dev.wait(Compute, freed);
        }
        self.bucket_free[s.bucket.number] = freed;
    }

    fn reduce_piece(
        &self,
        dev: &Device,
        s: &Segment,
        (segment, index): (usize, usize),
        bucket: Tensor,
        micro: usize,
    ) {
        let (layout, rank) = (Arc::clone(&self.layout), self.rank);
        let last = micro + 1 == layout.spec.micro_batches;
        let work = &self.work[segment];
        let piece = &work.pieces[index];
        let flat = bucket.slice(piece.flat.clone());
        if rank.dp_size > 1 {
            dev.submit(DpComm, Op::ReduceScatter { x: flat, group: Group::Dp });
        }
        let own = flat.shard(rank.dp, rank.dp_size);
        let mut gradient = own;
        if let Some(kept) = s.kept {
            let kept = kept.slice(piece.owned.clone());
            match layout.spec.sum {
                Sum::Device if micro > 0 => dev.submit(DpComm, Op::Add { x: own, into: kept }),
                Sum::Device => dev.submit(DpComm, Op::Cast { x: own, y: kept }),
                Sum::None | Sum::Host => dev.submit(DpComm, Op::Copy { src: own, dst: kept }),
            }
            gradient = kept;
        }
        if let (Some(wide), Some(sum)) = (layout.wide, s.down) {
            gradient = wide.slice(0..own.len());
            let sum = sum.slice(piece.owned.clone());
            widen(dev, own, gradient, (micro > 0).then_some(sum));
        }
        if let (true, Some(partials)) = (last, layout.device_partials) {
            let partials = partials.slice(piece.chunks.clone());
            let (chunk, counted) = (layout.chunk, piece.counted);
            dev.submit(DpComm, Op::ChunkSquares { x: gradient, partials, chunk, counted });
        }
        let Some(down) = s.down else { return };
        if layout.spec.sum == Sum::Device && !last {
            return;
        }
        dev.follow(D2h, DpComm);
        dev.wait(D2h, work.staging_free);
        dev.submit(D2h, Op::Copy { src: gradient, dst: down.slice(piece.owned.clone()) });
        if layout.spec.host_adds() {
            dev.follow(Host, D2h);
            let turn = if micro == 0 {
                Turn::First
            } else if last {
                Turn::Last
            } else {
                Turn::Middle
            };
            for tasks in piece.tiles.iter().filter_map(|t| t.accumulate.as_ref()) {
                dev.submit_host(&tasks[turn as usize], 0);
            }
        }
    }

    /// After the last micro-batch: one norm over all ranks, and the decision, left in memory on host and device.
    /// The event: the host's control block holds the decision of `step`.
    pub fn decide(&mut self, dev: &Device, step: u64) -> Event {
        let layout = &self.layout;
        if let Some(src) = layout.device_partials {
            dev.follow(D2h, DpComm);
            dev.submit(D2h, Op::Copy { src, dst: layout.partials });
        }
        dev.follow(Host, D2h);
        dev.submit_host(&self.spread, 0);
        if self.rank.dp_size > 1 {
            let x = layout.all_partials;
            dev.submit(Host, Op::AllReduce { x, group: Group::Dp, reduce: Reduce::Sum });
        }
        dev.submit_host(&self.fold, 0);
        let (x, group) = (layout.norm, layout.spec.norm_group);
        dev.submit(Host, Op::AllReduce { x, group, reduce: Reduce::Sum });
        dev.wait(Host, self.control_on_device);
        dev.submit_host(&self.decide, step);
        let decided = dev.record(Host);
        dev.wait(H2d, decided);
        dev.follow(H2d, Compute); // the backward pass has read the old scale, and the parameters that `publish` replaces
        dev.submit(H2d, Op::Copy { src: layout.control, dst: layout.device_control });
        self.control_on_device = dev.record(H2d);
        decided
    }

    /// Queues the update of what this rank owns of `segment`. [`publish`](Self::publish) must follow.
    pub fn update(&mut self, dev: &Device, segment: usize) {
        let layout = Arc::clone(&self.layout);
        let (s, w) = (&layout.segments[segment], &mut self.work[segment]);
        for tile in w.pieces.iter_mut().flat_map(|p| &mut p.tiles) {
            if let Some(task) = &tile.adam {
                dev.submit_host(task, 0);
                tile.updated = dev.record(Host);
            }
        }
        if layout.spec.placement == Placement::Host {
            w.staging_free = dev.record(Host);
        } else {
            dev.wait(Compute, self.control_on_device);
            dev.follow(Compute, DpComm);
            for piece in &w.pieces {
                dev.submit(Compute, device_update(&layout, s, piece, self.rank));
            }
        }
        w.unpublished = true;
    }

    /// Sends what `update` made up to the device, tile by tile as it is done, and to the other ranks. No earlier
    /// than needed: a lane is a queue, and what stands behind a copy that waits for Adam waits too. Does
    /// nothing when there is nothing new.
    pub fn publish(&mut self, dev: &Device, segment: usize) {
        if std::mem::take(&mut self.work[segment].unpublished) {
            self.upload(dev, segment);
            self.gather(dev, segment);
        }
    }

    /// [`publish`](Self::publish) of every segment, at the end of a step. Where transfers block, nothing goes up
    /// before the whole update, and nothing to other ranks before all is up.
    pub fn publish_all(&mut self, dev: &Device) {
        let segments = 0..self.work.len();
        if self.layout.spec.transfer == Transfer::Streamed {
            return segments.for_each(|segment| self.publish(dev, segment));
        }
        dev.follow(H2d, Host);
        segments.clone().for_each(|segment| self.upload(dev, segment));
        segments.clone().for_each(|segment| self.gather(dev, segment));
        segments.for_each(|segment| self.work[segment].unpublished = false);
    }

    /// What this rank owns, up to the device; where the update is there, nothing.
    fn upload(&self, dev: &Device, segment: usize) {
        let (s, w) = (&self.layout.segments[segment], &self.work[segment]);
        let Some(up) = s.up else { return };
        for tile in w.pieces.iter().flat_map(|p| &p.tiles) {
            dev.wait(H2d, tile.updated);
            let src = up.slice(tile.owned.clone());
            let dst = s.spec.params.slice(tile.start..tile.start + tile.owned.len());
            dev.submit(H2d, Op::Copy { src, dst });
        }
    }

    /// To the other ranks, behind all that has been queued to go up.
    fn gather(&mut self, dev: &Device, segment: usize) {
        let (s, w) = (&self.layout.segments[segment], &mut self.work[segment]);
        let from = if s.up.is_some() { H2d } else { Compute };
        if self.rank.dp_size == 1 {
            w.params_ready = dev.record(from);
            return;
        }
        dev.follow(DpComm, from);
        for piece in &w.pieces {
            let x = s.spec.params.slice(piece.flat.clone());
            dev.submit(DpComm, Op::AllGather { x, group: Group::Dp });
        }
        w.params_ready = dev.record(DpComm);
    }

    /// The parameters of the last update are whole on the device.
    pub fn params_ready(&self, segment: usize) -> Event {
        self.work[segment].params_ready
    }

    /// Where the coming backward pass reads its loss scale: F64 (1), device.
    pub fn loss_scale(&self) -> Tensor {
        self.layout.device_loss_scale()
    }

    /// The decisions of the last step; see [`device::numerics::control`]. F64, host.
    pub fn control(&self) -> Tensor {
        self.layout.control
    }

    /// It is there.
    pub const fn loss_scale_ready(&self) -> Event {
        self.control_on_device
    }

    /// What this rank owns of a segment, in order.
    pub fn owned(&self, segment: usize) -> Vec<Owned> {
        let s = &self.layout.segments[segment];
        let part = |p: &PieceWork| Owned {
            start: p.flat_start(self.rank),
            states: s.states().map(|state| state.slice(p.owned.clone())),
        };
        self.work[segment].pieces.iter().map(part).collect()
    }
}

impl PieceWork {
    pub(crate) fn flat_start(&self, rank: Rank) -> usize {
        self.flat.start + rank.dp * self.owned.len()
    }
}

fn segment_work(
    layout: &Layout,
    s: &Segment,
    dp: usize,
    (counted, noise): (usize, &Arc<[NoiseRun]>),
) -> SegmentWork {
    let owned = s.owned(dp, layout.spec.dp_size);
    let pieces = s.pieces.iter().zip(owned).map(|(piece, (start, owned))| {
        let chunks = s.own_chunks.start + owned.start / layout.chunk
            ..s.own_chunks.start + owned.end / layout.chunk;
        let within = |prefix: usize| prefix.saturating_sub(start).min(owned.len());
        PieceWork {
            flat: piece.start..piece.start + piece.len,
            chunks,
            counted: within(counted),
            decayed: within(s.spec.decayed),
            tiles: tiles(layout, s, (start, &owned), (counted, noise)),
            owned,
        }
    });
    SegmentWork {
        pieces: pieces.collect(),
        unpublished: false,
        staging_free: Event::default(),
        params_ready: Event::default(),
    }
}

/// Cuts an owned run that starts at flat element `start` into tiles, with their tasks.
fn tiles(
    layout: &Layout,
    s: &Segment,
    (start, owned): (usize, &Range<usize>),
    (counted, noise): (usize, &Arc<[NoiseRun]>),
) -> Vec<Tile> {
    let (spec, chunk) = (&layout.spec, layout.chunk);
    let size = (spec.tile_elements / chunk).max(1) * chunk;
    let tile = |at: usize| {
        let range = at..(at + size).min(owned.end);
        let first = start + (at - owned.start);
        let within = |prefix: usize| prefix.saturating_sub(first).min(range.len());
        let part = |t: Tensor| t.slice(range.clone());
        let chunks =
            s.own_chunks.start + range.start / chunk..s.own_chunks.start + range.end / chunk;
        let accumulate = s.host_sum.zip(s.down).map(|(sum, down)| {
            [Turn::First, Turn::Middle, Turn::Last].map(|turn| {
                let (grad, sum) = (part(down), part(sum));
                let (partials, counted) = (layout.partials.slice(chunks.clone()), within(counted));
                HostOp::new(Accumulate { grad, sum, turn, partials, chunk, counted })
            })
        });
        let adam = s.host_sum.or(s.down).zip(s.up).map(|(grad, up)| {
            HostOp::new(AdamTile {
                rule: spec.rule,
                control: layout.control,
                grad: part(grad),
                master: part(s.master),
                momentum: part(s.momentum),
                variance: part(s.variance),
                param: part(up),
                decayed: within(s.spec.decayed),
                noise: (Arc::clone(noise), first),
            })
        });
        Tile { owned: range, start: first, accumulate, adam, updated: Event::default() }
    };
    owned.clone().step_by(size).map(tile).collect()
}

/// Where this rank's chunks stand among all: runs of (own, all, length).
fn spread_runs(layout: &Layout, dp: usize, work: &[SegmentWork]) -> Vec<(usize, usize, usize)> {
    let mut runs = Vec::new();
    for (s, w) in layout.segments.iter().zip(work) {
        for p in &w.pieces {
            let start = p.flat.start + dp * p.owned.len();
            let all = s.all_chunks.start + start / layout.chunk;
            runs.push((p.chunks.start, all, p.chunks.len()));
        }
    }
    runs
}

fn device_update(layout: &Layout, s: &Segment, piece: &PieceWork, rank: Rank) -> Op {
    let part = |t: Tensor| t.slice(piece.owned.clone());
    let start = piece.flat_start(rank);
    Op::Update {
        rule: layout.spec.rule,
        // The layout keeps a gradient on the device whenever the update is there.
        grad: part(s.kept.unwrap_or(s.master)),
        master: part(s.master),
        momentum: part(s.momentum),
        variance: part(s.variance),
        param: s.spec.params.slice(start..start + piece.owned.len()),
        control: layout.device_control,
        decayed: piece.decayed,
    }
}
