//! The optimizer of one rank: what it submits, and what it waits for.

use crate::adam::AdamTile;
use crate::layout::{Layout, Placement, Segment, Sum};
use crate::norm::{Accumulate, Decide, FoldPartials, SpreadPartials, Turn};
use crate::schedule::LearningRate;
use device::Lane::{Compute, D2h, DpComm, H2d, Host};
use device::numerics::control;
use device::{Device, Error, Event, Group, Op, Rank, Reduce, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A run of a segment that this rank owns.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    /// Its first element in the segment's flat buffer.
    pub start: usize,
    /// fp32 parameters, first and second moment.
    pub states: [Tensor; 3],
}

/// What this rank does with one piece of a segment.
#[derive(Debug)]
struct PieceWork {
    /// The piece in a flat buffer of the segment.
    flat: Range<usize>,
    /// This rank's part of it in the owned arrays.
    owned: Range<usize>,
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
    accumulate: Option<[Arc<Accumulate>; 3]>,
    adam: Option<Arc<AdamTile>>,
    /// The new parameters are in staging.
    updated: Event,
}

/// Where a segment stands.
#[derive(Debug)]
struct SegmentWork {
    pieces: Vec<PieceWork>,
    /// `update` has run and `publish` has not.
    unpublished: bool,
    /// The host has read what came down last.
    staging_free: Event,
    params_ready: Event,
}

/// The optimizer of one rank.
#[derive(Debug)]
pub struct Optimizer {
    layout: Arc<Layout>,
    rank: Rank,
    work: Vec<SegmentWork>,
    spread: Arc<SpreadPartials>,
    fold: Arc<FoldPartials>,
    decide: Arc<Decide>,
    shared_bucket_free: [Event; 2],
    own_bucket_free: Vec<Event>,
    control_on_device: Event,
}

impl Optimizer {
    /// For `rank`. `counted`: leading elements of each segment that count in this rank's part of the norm
    /// (parameters that other ranks of the norm's group hold too count on one of them).
    pub fn new(
        layout: &Arc<Layout>,
        rank: Rank,
        counted: &[usize],
        learning_rate: Arc<dyn LearningRate>,
    ) -> Self {
        let spec = &layout.spec;
        let work = |(s, &counted): (&Segment, &usize)| segment_work(layout, s, rank.dp, counted);
        let work: Vec<SegmentWork> = layout.segments.iter().zip(counted).map(work).collect();
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
            spread: Arc::new(SpreadPartials {
                own: layout.partials,
                all: layout.all_partials,
                runs,
            }),
            fold: Arc::new(FoldPartials { all: layout.all_partials, norm: layout.norm }),
            decide: Arc::new(decide),
            shared_bucket_free: Default::default(),
            own_bucket_free: vec![Event::default(); layout.segments.len()],
            control_on_device: Event::default(),
            layout: Arc::clone(layout),
            rank,
            work,
        }
    }

    /// The states before step 1, as if an update had just left them; the first forward pass publishes the
    /// parameters like any other. `param` gives an element of a segment's flat buffer.
    ///
    /// # Errors
    /// As [`Device::write`].
    pub fn init(&mut self, dev: &Device, param: &dyn Fn(usize, usize) -> f64) -> Result<(), Error> {
        let layout = Arc::clone(&self.layout);
        for (index, (s, w)) in layout.segments.iter().zip(&mut self.work).enumerate() {
            for piece in &w.pieces {
                let first = piece.flat_start(self.rank);
                let value = |i: usize| param(index, first + i);
                dev.write(s.master.slice(piece.owned.clone()), &value)?;
                dev.write(s.momentum.slice(piece.owned.clone()), &|_| 0.0)?;
                dev.write(s.variance.slice(piece.owned.clone()), &|_| 0.0)?;
                if let Some(up) = s.up {
                    dev.write(up.slice(piece.owned.clone()), &value)?;
                } else {
                    let own = s.spec.params.slice(first..first + piece.owned.len());
                    dev.write(own, &value)?;
                }
            }
            w.unpublished = true;
        }
        let scale = self.layout.spec.loss_scale;
        let word = |i| match i {
            control::LOSS_SCALE => scale.map_or(1.0, |s| s.initial),
            control::HYSTERESIS_LEFT => scale.map_or(0.0, |s| f64::from(s.hysteresis)),
            _ => 0.0,
        };
        dev.write(self.layout.control, &word)?;
        dev.write(self.layout.device_control, &word)
    }

    /// A bucket for the gradients of `segment`; Compute waits until its former contents have gone.
    pub fn bucket(&self, dev: &Device, segment: usize) -> Tensor {
        let (layout, len) = (&self.layout, self.layout.segments[segment].spec.params.len());
        let (bucket, free) = match layout.own_buckets[segment] {
            Some(bucket) => (bucket, self.own_bucket_free[segment]),
            None => {
                let slot = segment % 2;
                let bucket = layout.shared_buckets[slot].or(layout.shared_buckets[0]);
                let free = if layout.shared_buckets[1].is_some() { slot } else { 0 };
                // A segment without a bucket of its own shares one: the layout made it.
                let Some(bucket) = bucket else { return layout.segments[segment].spec.params };
                (bucket, self.shared_bucket_free[free])
            }
        };
        dev.wait(Compute, free);
        bucket.slice(0..len)
    }

    /// Starts the way of a full bucket: reduce-scatter over the data-parallel ranks, then this rank's shard to
    /// where it is summed or staged. `micro` counts from 0. Nothing is finished on return; the bucket is free
    /// again when [`bucket`](Self::bucket) gives it out.
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
        if layout.spec.sum == Sum::Host {
            // Only now: pieces do not wait for each other's sums.
            self.work[segment].staging_free = dev.record(Host);
        }
        // On D2h where the bucket itself goes down, else on DpComm.
        let freed = if s.kept.is_none() { dev.record(D2h) } else { dev.record(DpComm) };
        if layout.own_buckets[segment].is_some() {
            self.own_bucket_free[segment] = freed;
        } else {
            let slots = if layout.shared_buckets[1].is_some() { 2 } else { 1 };
            self.shared_bucket_free[segment % slots] = freed;
        }
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
        if layout.spec.sum == Sum::Host {
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
        let layout = Arc::clone(&self.layout);
        let (s, w) = (&layout.segments[segment], &mut self.work[segment]);
        if !std::mem::take(&mut w.unpublished) {
            return;
        }
        let params = s.spec.params;
        let from = if let Some(up) = s.up {
            for tile in w.pieces.iter().flat_map(|p| &p.tiles) {
                dev.wait(H2d, tile.updated);
                let src = up.slice(tile.owned.clone());
                let dst = params.slice(tile.start..tile.start + tile.owned.len());
                dev.submit(H2d, Op::Copy { src, dst });
            }
            H2d
        } else {
            Compute
        };
        if self.rank.dp_size == 1 {
            w.params_ready = dev.record(from);
            return;
        }
        dev.follow(DpComm, from);
        for piece in &w.pieces {
            let x = params.slice(piece.flat.clone());
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
            states: [s.master, s.momentum, s.variance].map(|t| t.slice(p.owned.clone())),
        };
        self.work[segment].pieces.iter().map(part).collect()
    }
}

impl PieceWork {
    fn flat_start(&self, rank: Rank) -> usize {
        self.flat.start + rank.dp * self.owned.len()
    }
}

fn segment_work(layout: &Layout, s: &Segment, dp: usize, counted: usize) -> SegmentWork {
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
            tiles: tiles(layout, s, (start, &owned), counted),
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
    counted: usize,
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
                Arc::new(Accumulate { grad, sum, turn, partials, chunk, counted })
            })
        });
        let adam = s.host_sum.or(s.down).zip(s.up).map(|(grad, up)| {
            Arc::new(AdamTile {
                rule: spec.rule,
                control: layout.control,
                grad: part(grad),
                master: part(s.master),
                momentum: part(s.momentum),
                variance: part(s.variance),
                param: part(up),
                decayed: within(s.spec.decayed),
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
