//! The optimizer of one rank: what it submits, and what it waits for.

use crate::buckets::Bucket;
use crate::control;
use crate::layout::{ActiveBuffers, OptimizerLayout, OwnedRun, Segment};
use crate::norm::{DecideTask, FoldPartials, SpreadPartials};
use crate::reduce::ReducedPiece;
use crate::schedule::{Rates, StepSchedule};
use crate::spec::{BucketSharing, Transfer};
use crate::speculation::PredictDecision;
use crate::store::Store;
use crate::update::NoiseRun;
use crate::work::{PieceWork, SegmentInputs, SegmentWork, segment_work, spread_runs};
use device::Lane::{Compute, D2h, DpComm, H2d, Host};
use device::numerics::CountedRange;
use device::{Device, Error, Event, Group, HostOp, Op, Rank, Reduction, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// Which of the two arrays of a state holds it; see [`control::STATE_BUFFER`].
#[derive(Clone, Copy, Debug)]
pub struct BufferIndex(usize);

impl BufferIndex {
    /// The arrays that hold the states before the first step.
    pub const FIRST: Self = Self(0);
}

/// The optimizer of one rank.
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) layout: Arc<OptimizerLayout>,
    pub(crate) rank: Rank,
    pub(crate) work: Vec<SegmentWork>,
    spread: Arc<HostOp>,
    fold: Arc<HostOp>,
    /// Where updates run ahead of the decision.
    predict: Option<Arc<HostOp>>,
    decide: Arc<HostOp>,
    /// For each bucket, by its number, the event behind which its former contents have gone.
    bucket_free: Vec<Event>,
    /// How many buckets were given out of those that take turns.
    turn: usize,
    /// The same for each buffer of sums that segments share.
    sum_free: Vec<Event>,
    /// The segment whose parameters each shared buffer has, or will have.
    pub(crate) holders: Vec<Option<usize>>,
    /// The event behind which the decision of the last step is on the device.
    control_on_device: Event,
    /// The number of the gradient buffer that the running step fills.
    pub(crate) gradient_buffer: usize,
    /// The gradient buffer of the last step, where its update is delayed.
    pub(crate) delayed: Option<usize>,
}

impl Optimizer {
    /// Makes the optimizer of `rank`. `counted` says for each segment which elements count in this rank's part of the
    /// norm (parameters that other ranks of the norm's group hold too count on one of them). `noise` has the runs of
    /// each segment, for moments that are rounded by chance.
    pub fn new(
        layout: &Arc<OptimizerLayout>,
        rank: Rank,
        counted: &[CountedRange],
        noise: &[Arc<[NoiseRun]>],
        given: Arc<dyn StepSchedule>,
    ) -> Self {
        let spec = &layout.spec;
        let work = |((s, &counted), noise): ((&Segment, &CountedRange), _)| {
            segment_work(layout, s, SegmentInputs { dp: rank.dp, counted, noise })
        };
        let segments = layout.segments.iter().zip(counted).zip(noise);
        let work: Vec<SegmentWork> = segments.map(work).collect();
        let summands = (spec.micro_batches * spec.dp_size) as f64;
        let rates = Rates { rule: spec.rule, summands, given };
        let predict = layout.predicted.map(|predicted| {
            HostOp::new(PredictDecision {
                control: layout.control,
                predicted,
                rates: rates.clone(),
            })
        });
        let decide = DecideTask {
            norm: layout.norm,
            control: layout.control,
            rates,
            clip: spec.clip,
            loss_scale: spec.loss_scale,
            predicted: layout.predicted,
        };
        let runs = spread_runs(layout, rank.dp, &work);
        Self {
            spread: HostOp::new(SpreadPartials {
                own: layout.partials,
                all: layout.all_partials,
                runs,
            }),
            fold: HostOp::new(FoldPartials { all: layout.all_partials, norm: layout.norm }),
            predict,
            decide: HostOp::new(decide),
            bucket_free: vec![Event::default(); layout.num_buckets],
            turn: 0,
            sum_free: vec![Event::default(); layout.num_sums],
            holders: vec![None; layout.num_param_buffers],
            control_on_device: Event::default(),
            gradient_buffer: 0,
            delayed: None,
            layout: Arc::clone(layout),
            rank,
            work,
        }
    }

    /// Gives out a bucket for the gradients of `segment`, of the micro-batch in `slot` of those that go backward together; Compute waits
    /// until its former contents have gone.
    pub fn bucket(&mut self, dev: &Device, segment: usize, slot: usize) -> Bucket {
        let Segment { spec, buckets, .. } = &self.layout.segments[segment];
        let turn = match spec.bucket {
            BucketSharing::Alternating => {
                self.turn += 1;
                self.turn
            }
            BucketSharing::Own | BucketSharing::Shared | BucketSharing::PerSlot(_) => slot,
        };
        let Bucket { tensor, number } = buckets[turn % buckets.len()];
        dev.wait(Compute, self.bucket_free[number]);
        Bucket { tensor: tensor.slice(0..spec.params.len()), number }
    }

    /// Starts the way of a full bucket: reduce-scatter over the data-parallel ranks, then this rank's shard to
    /// where it is summed or staged. `micro` counts from 0. Nothing is finished on return; the bucket is free
    /// again when [`bucket`](Self::bucket) gives it out. Where transfers block, Compute waits for all of it.
    pub fn reduce(&mut self, dev: &Device, segment: usize, bucket: Bucket, micro: usize) {
        let layout = Arc::clone(&self.layout);
        let (s, Bucket { tensor: bucket, number }) = (&layout.segments[segment], bucket);
        if s.spec.len < bucket.len() {
            dev.submit(Compute, Op::Zero { x: bucket.slice(s.spec.len..bucket.len()) });
        }
        dev.follow(DpComm, Compute);
        let sum = s.sum.map(|sum| sum.number);
        if let Some(sum) = sum.filter(|_| micro == 0) {
            // The sum of the segment before is on its way down.
            dev.wait(DpComm, self.sum_free[sum]);
        }
        let work = &self.work[segment];
        for piece in &work.pieces {
            let own = self.sum_over_ranks(dev, bucket.slice(piece.flat.clone()));
            let (buffer, staging_free) =
                (self.gradient_buffer, work.staging_free[self.gradient_buffer]);
            let reduced =
                ReducedPiece { dev, layout: &layout, piece, own, buffer, micro, staging_free };
            reduced.send(&s.stores[piece.store]);
        }
        if layout.spec.host_adds() {
            // Only now: pieces do not wait for each other's sums.
            self.work[segment].staging_free = [dev.record(Host); 2];
        }
        if let Some(sum) = sum {
            self.sum_free[sum] = dev.record(D2h);
        }
        // What stays on the device comes first, so the last store decides.
        let goes_down = s.stores.last().is_some_and(Store::reads_bucket_down);
        let freed = dev.record(if goes_down { D2h } else { DpComm });
        if layout.spec.transfer == Transfer::Blocking {
            dev.wait(Compute, freed);
        }
        self.bucket_free[number] = freed;
    }

    /// Sums a piece over the data-parallel ranks, on DpComm. Returns this rank's part, which has the sum.
    fn sum_over_ranks(&self, dev: &Device, piece: Tensor) -> Tensor {
        let own = |t: Tensor| t.shard(self.rank.dp, self.rank.dp_size);
        let sum = |x| dev.submit(DpComm, Op::ReduceScatter { x, group: Group::Dp });
        if let Some(summed) = self.layout.summed {
            let summed = summed.slice(0..piece.len());
            dev.submit(DpComm, Op::Cast { x: piece, y: summed });
            sum(summed);
            dev.submit(DpComm, Op::Cast { x: own(summed), y: own(piece) });
        } else if self.rank.dp_size > 1 {
            sum(piece);
        }
        own(piece)
    }

    /// Makes one norm over all ranks after the last micro-batch, and leaves the decision in memory on host and device.
    /// Behind the event the host's control block holds the decision of `step`.
    pub fn decide(&mut self, dev: &Device, step: u64) -> Event {
        let layout = &self.layout;
        if let Some(all) = layout.device_partials {
            // Those of segments that are updated ahead are down: the last segments, none of which is on the device alone.
            let ahead = self.work.iter().position(|w| w.norm_guard.is_some());
            let down = ahead.filter(|_| !layout.spec.host_adds());
            let end = down.map_or(all.len(), |first| layout.segments[first].chunks.own.start);
            self.copy_partials_down(dev, 0..end);
        }
        dev.follow(Host, D2h);
        dev.submit_host(&self.spread, 0);
        if self.rank.dp_size > 1 {
            let x = layout.all_partials;
            dev.submit(Host, Op::AllReduce { x, group: Group::Dp, reduce: Reduction::Sum });
        }
        dev.submit_host(&self.fold, 0);
        let (x, group) = (layout.norm, layout.spec.norm_group);
        dev.submit(Host, Op::AllReduce { x, group, reduce: Reduction::Sum });
        dev.wait(Host, self.control_on_device);
        dev.submit_host(&self.decide, step);
        let decided = dev.record(Host);
        dev.wait(H2d, decided);
        dev.follow(H2d, Compute); // the backward pass has read the old scale, and the parameters that `publish` replaces
        dev.submit(H2d, Op::Copy { src: layout.control, dst: layout.device_control });
        self.control_on_device = dev.record(H2d);
        decided
    }

    /// Queues the way of the gradient's sums of squares to the host, behind the last micro-batch's [`reduce`](Self::reduce), for
    /// [`squares`](Self::squares).
    pub fn copy_squares_down(&self, dev: &Device) {
        if let Some(all) = self.layout.device_partials {
            self.copy_partials_down(dev, 0..all.len());
        }
    }

    /// Copies sums of squares that the device has made down to the host.
    fn copy_partials_down(&self, dev: &Device, range: Range<usize>) {
        let Some(all) = self.layout.device_partials.filter(|_| !range.is_empty()) else { return };
        let (src, dst) = (all.slice(range.clone()), self.layout.partials.slice(range));
        dev.follow(D2h, DpComm);
        dev.submit(D2h, Op::Copy { src, dst });
    }

    /// Predicts the decision of `step`, before the first [`update_speculatively`](Self::update_speculatively) of the step. Does nothing where no
    /// update runs ahead.
    pub fn predict_decision(&self, dev: &Device, step: u64) {
        if let Some(predict) = &self.predict {
            dev.submit_host(predict, step);
        }
    }

    /// Queues the update of what this rank owns of `segment` by the predicted decision, behind its last micro-batch's
    /// [`reduce`](Self::reduce). [`update`](Self::update) must follow, behind the decision. Does nothing where the
    /// segment is not updated ahead.
    pub fn update_speculatively(&mut self, dev: &Device, segment: usize) {
        let Some(norm_guard) = &self.work[segment].norm_guard else { return };
        if !self.layout.spec.host_adds() {
            self.copy_partials_down(dev, self.layout.segments[segment].chunks.own.clone());
            dev.follow(Host, D2h);
        }
        dev.submit_host(norm_guard, 0);
        let w = &self.work[segment];
        // What was there before may still be on its way up.
        dev.wait(Host, w.uploaded);
        for tile in w.pieces.iter().flat_map(PieceWork::tiles) {
            if let Some(ahead) = &tile.speculate {
                dev.submit_host(ahead, 0);
            }
        }
    }

    /// Leaves the update that was just decided for later: the next step fills the other gradient buffer meanwhile.
    /// Before that one is decided, [`update_on_host`](Self::update_on_host) and then
    /// [`update_on_device`](Self::update_on_device) of every segment must follow.
    pub fn delay_update(&mut self) {
        self.delayed = Some(self.gradient_buffer);
        self.gradient_buffer ^= 1;
    }

    /// Whether an update waits.
    pub const fn has_delayed_update(&self) -> bool {
        self.delayed.is_some()
    }

    /// Notes that no update waits any more: all of it is queued.
    pub fn finish_delayed(&mut self) {
        self.delayed = None;
    }

    /// Queues the update of what this rank owns of `segment`. [`publish`](Self::publish) must follow.
    pub fn update(&mut self, dev: &Device, segment: usize) {
        self.update_on_host(dev, segment);
        self.update_on_device(dev, segment);
    }

    /// Queues the part of [`update`](Self::update) that runs on the host.
    pub fn update_on_host(&mut self, dev: &Device, segment: usize) {
        let buffer = self.delayed.unwrap_or(self.gradient_buffer);
        let w = &mut self.work[segment];
        // What was there before may still be on its way up.
        dev.wait(Host, w.uploaded);
        for tile in w.pieces.iter_mut().flat_map(PieceWork::tiles_mut) {
            dev.submit_host(&tile.adam[buffer], 0);
            tile.updated = dev.record(Host);
        }
        if !self.layout.spec.host_adds() {
            w.staging_free[buffer] = dev.record(Host);
        }
        w.unpublished = true;
    }

    /// Queues the part of [`update`](Self::update) that runs on the device: Compute must be done with its parameters.
    pub fn update_on_device(&mut self, dev: &Device, segment: usize) {
        let buffer = self.delayed.unwrap_or(self.gradient_buffer);
        let w = &mut self.work[segment];
        let mut updates = w.pieces.iter().filter_map(PieceWork::update_on_device).peekable();
        if updates.peek().is_some() {
            dev.wait(Compute, self.control_on_device);
            dev.follow(Compute, DpComm);
        }
        for tasks in updates {
            dev.submit(Compute, Op::Task { task: Arc::clone(&tasks[buffer]) });
        }
        w.unpublished = true;
    }

    /// Sends what `update` made up to the device, tile by tile as it is done, and to the other ranks. No earlier
    /// than needed: a lane is a queue, and what stands behind a copy that waits for Adam waits too. Does
    /// nothing when there is nothing new.
    pub fn publish(&mut self, dev: &Device, segment: usize) {
        assert!(self.param_buffer(segment).is_none(), "parameters that do not stay are fetched");
        if std::mem::take(&mut self.work[segment].unpublished) {
            self.upload(dev, segment);
            self.gather(dev, segment);
        }
    }

    /// Whether [`publish`](Self::publish) of a segment has nothing new.
    pub fn is_published(&self, segment: usize) -> bool {
        !self.work[segment].unpublished
    }

    /// Publishes every segment that stays on the device at the end of a step, as [`publish`](Self::publish) does. Where transfers block, nothing goes up
    /// before the whole update, and nothing to other ranks before all is up.
    pub fn publish_all(&mut self, dev: &Device) {
        let segments = 0..self.work.len();
        if self.layout.spec.transfer == Transfer::Streamed {
            for segment in segments {
                if self.param_buffer(segment).is_none() {
                    self.publish(dev, segment);
                }
            }
            return;
        }
        dev.follow(H2d, Host);
        segments.clone().for_each(|segment| self.upload(dev, segment));
        segments.clone().for_each(|segment| self.gather(dev, segment));
        segments.for_each(|segment| self.work[segment].unpublished = false);
    }

    /// The number of the buffer that the parameters of `segment` share with others, where they do not stay on the device.
    pub fn param_buffer(&self, segment: usize) -> Option<usize> {
        self.layout.segments[segment].spec.param_buffer
    }

    /// The segment whose parameters a shared buffer has, or will have.
    pub fn holder(&self, buffer: usize) -> Option<usize> {
        self.holders[buffer]
    }

    /// Starts to bring the parameters of a segment up into the buffer that it shares with others, piece by piece as an update makes
    /// them, behind all that Compute has been given: nothing of it may read what the buffer has later. Does nothing where they
    /// are there already. [`all_gather`](Self::all_gather) must follow.
    pub fn fetch_shard(&mut self, dev: &Device, segment: usize) {
        let Some(buffer) = self.param_buffer(segment) else { unreachable!("its parameters stay") };
        let is_new = std::mem::take(&mut self.work[segment].unpublished);
        if self.holders[buffer].replace(segment) == Some(segment) && !is_new {
            return;
        }
        dev.follow(H2d, Compute);
        self.upload(dev, segment);
        self.work[segment].is_partial = true;
        if self.rank.dp_size == 1 {
            self.all_gather(dev, segment);
        }
    }

    /// Gathers what [`fetch_shard`](Self::fetch_shard) brings up from all ranks. DpComm waits for it: what stands behind it there waits, too.
    pub fn all_gather(&mut self, dev: &Device, segment: usize) {
        if std::mem::take(&mut self.work[segment].is_partial) {
            self.gather(dev, segment);
        }
    }

    /// Copies what this rank's host has updated up to the device.
    fn upload(&mut self, dev: &Device, segment: usize) {
        let (s, w) = (&self.layout.segments[segment], &mut self.work[segment]);
        for piece in &w.pieces {
            let Some(up) = s.stores[piece.store].staging() else { continue };
            if s.spec.param_buffer.is_some() {
                // Ahead of its use by whole blocks: fewer copies are worth more than an early first one.
                if let Some(last) = piece.tiles().last() {
                    dev.wait(H2d, last.updated);
                }
                let (start, src) = (piece.flat_start(self.rank), up.slice(piece.owned.clone()));
                let dst = s.spec.params.slice(start..start + src.len());
                dev.submit(H2d, Op::Copy { src, dst });
                continue;
            }
            for tile in piece.tiles() {
                dev.wait(H2d, tile.updated);
                let src = up.slice(tile.owned.clone());
                let dst = s.spec.params.slice(tile.start..tile.start + tile.owned.len());
                dev.submit(H2d, Op::Copy { src, dst });
            }
        }
        w.uploaded = dev.record(H2d);
    }

    /// Gathers the parameters from all ranks, behind all that has been queued to go up.
    fn gather(&mut self, dev: &Device, segment: usize) {
        let (s, w) = (&self.layout.segments[segment], &mut self.work[segment]);
        let is_any = |on_host| s.stores.iter().any(|store| store.is_on_host() == on_host);
        let (here, host) = (is_any(false), is_any(true));
        if self.rank.dp_size == 1 {
            // Compute itself updates what is here.
            w.params_ready = dev.record(if host { H2d } else { Compute });
            return;
        }
        if here {
            dev.follow(DpComm, Compute);
        }
        if s.spec.param_buffer.is_some() {
            // Segments behind it are on their way up, too.
            dev.wait(DpComm, w.uploaded);
        } else if host {
            dev.follow(DpComm, H2d);
        }
        for piece in &w.pieces {
            let x = s.spec.params.slice(piece.flat.clone());
            dev.submit(DpComm, Op::AllGather { x, group: Group::Dp });
        }
        w.params_ready = dev.record(DpComm);
    }

    /// The event behind which the parameters of the last update are whole on the device.
    pub fn params_ready(&self, segment: usize) -> Event {
        self.work[segment].params_ready
    }

    /// The loss scale of the coming backward pass: one F64 on the device.
    pub fn loss_scale(&self) -> Tensor {
        self.layout.device_loss_scale()
    }

    /// The decisions of the last step, on the host; see [`control`](crate::control).
    pub fn control(&self) -> Tensor {
        self.layout.control
    }

    /// The event behind which [`loss_scale`](Self::loss_scale) holds the coming step's.
    pub const fn loss_scale_ready(&self) -> Event {
        self.control_on_device
    }

    /// Finds out which arrays hold the states after the last step, for [`owned`](Self::owned). All lanes are done with it.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub fn state_buffer(&self, dev: &Device) -> Result<BufferIndex, Error> {
        let mut buffer = [0.0];
        dev.read(
            self.layout.control.slice(control::STATE_BUFFER..control::STATE_BUFFER + 1),
            &mut buffer,
        )?;
        Ok(BufferIndex(usize::from(buffer[0] != 0.0)))
    }

    /// Lists what this rank owns of a segment, in order.
    pub fn owned(&self, segment: usize, BufferIndex(states): BufferIndex) -> Vec<OwnedRun> {
        self.layout.owned_on(segment, self.rank.dp, ActiveBuffers { states, delayed: self.delayed })
    }
}
