//! The optimizer of one rank: the ops that it submits, and the events that it waits for.

use crate::buckets::Bucket;
use crate::control;
use crate::frozen::FrozenPart;
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

/// Number of the array that holds a state, of two arrays; see [`control::STATE_BUFFER`].
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
    /// Task that predicts the decision, if updates are speculative.
    predict: Option<Arc<HostOp>>,
    decide: Arc<HostOp>,
    /// For each bucket, by its number, the event after which the bucket may be overwritten.
    bucket_free: Vec<Event>,
    /// Number of alternating buckets that were handed out.
    turn: usize,
    /// For each buffer of sums that segments share, the event after which it may be overwritten.
    sum_free: Vec<Event>,
    /// For each shared parameter buffer, the segment whose parameters it has, or will have.
    pub(crate) holders: Vec<Option<usize>>,
    /// Event after which the decision of the last step is on the device.
    control_on_device: Event,
    /// Number of the gradient buffer that the running step fills.
    pub(crate) gradient_buffer: usize,
    /// Gradient buffer of the last step, if its update is delayed.
    pub(crate) delayed: Option<usize>,
}

impl Optimizer {
    /// Makes the optimizer of `rank`. `counted` has, for each segment, the elements that count in
    /// this rank's part of the norm. A parameter that several ranks of the norm's group hold counts
    /// on one of them. `noise` has the [`NoiseRun`]s of each segment, for moments with stochastic
    /// rounding.
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

    /// Hands out a bucket for the gradients of `segment`, without elements if all its parameters are
    /// frozen. `slot` is the micro-batch's number among
    /// the micro-batches that run backward together. Compute waits for the bucket's last reader.
    pub fn bucket(&mut self, dev: &Device, segment: usize, slot: usize) -> Bucket {
        let Segment { spec, buckets, .. } = &self.layout.segments[segment];
        if buckets.is_empty() {
            return Bucket::none(spec.params);
        }
        let turn = match spec.bucket {
            BucketSharing::Alternating => {
                self.turn += 1;
                self.turn
            }
            BucketSharing::Own | BucketSharing::Shared | BucketSharing::PerSlot(_) => slot,
        };
        let Bucket { tensor, number } = buckets[turn % buckets.len()];
        dev.wait(Compute, self.bucket_free[number]);
        Bucket { tensor: tensor.slice(0..spec.trained), number }
    }

    /// Starts to reduce a full bucket: reduce-scatter over the data-parallel ranks, then this
    /// rank's shard goes to its sum or to staging. `micro` counts from 0. The work is only queued
    /// on return; [`bucket`](Self::bucket) waits for it. With blocking transfers, Compute waits.
    pub fn reduce(&mut self, dev: &Device, segment: usize, bucket: Bucket, micro: usize) {
        let layout = Arc::clone(&self.layout);
        let (s, Bucket { tensor: bucket, number }) = (&layout.segments[segment], bucket);
        if bucket.is_empty() {
            return;
        }
        if s.spec.len < bucket.len() {
            dev.submit(Compute, Op::Zero { x: bucket.slice(s.spec.len..bucket.len()) });
        }
        dev.follow(DpComm, Compute);
        let sum = s.sum.map(|sum| sum.number);
        if let Some(sum) = sum.filter(|_| micro == 0) {
            // The sum of the previous segment is still on its way down.
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
            // Recorded after the loop, so that pieces do not wait for each other's sums.
            self.work[segment].staging_free = [dev.record(Host); 2];
        }
        if let Some(sum) = sum {
            self.sum_free[sum] = dev.record(D2h);
        }
        // The store on the device comes first, so the last store decides.
        let goes_down = s.stores.last().is_some_and(Store::reads_bucket_down);
        let freed = dev.record(if goes_down { D2h } else { DpComm });
        if layout.spec.transfer == Transfer::Blocking {
            dev.wait(Compute, freed);
        }
        self.bucket_free[number] = freed;
    }

    /// Sums a piece over the data-parallel ranks, on DpComm. Returns this rank's part of the sum.
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

    /// Computes one norm over all ranks after the last micro-batch, and writes the decision to
    /// memory on host and device. After the returned event the host's control block holds the
    /// decision of `step`.
    pub fn decide(&mut self, dev: &Device, step: u64) -> Event {
        let layout = &self.layout;
        if let Some(all) = layout.device_partials {
            // The sums of squares of speculative segments are on the host already. These segments
            // are the last, and each has a part on the host.
            let first_speculative = self.work.iter().position(|w| w.norm_guard.is_some());
            let down = first_speculative.filter(|_| !layout.spec.host_adds());
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
        dev.follow(H2d, Compute); // after backward, which reads the old scale and parameters
        dev.submit(H2d, Op::Copy { src: layout.control, dst: layout.device_control });
        self.control_on_device = dev.record(H2d);
        decided
    }

    /// Queues the copy of the gradient's sums of squares to the host, after the last micro-batch's
    /// [`reduce`](Self::reduce), for [`squares`](Self::squares).
    pub fn copy_squares_down(&self, dev: &Device) {
        if let Some(all) = self.layout.device_partials {
            self.copy_partials_down(dev, 0..all.len());
        }
    }

    /// Copies sums of squares from the device to the host.
    fn copy_partials_down(&self, dev: &Device, range: Range<usize>) {
        let Some(all) = self.layout.device_partials.filter(|_| !range.is_empty()) else { return };
        let (src, dst) = (all.slice(range.clone()), self.layout.partials.slice(range));
        dev.follow(D2h, DpComm);
        dev.submit(D2h, Op::Copy { src, dst });
    }

    /// Predicts the decision of `step`, before the first
    /// [`update_speculatively`](Self::update_speculatively) of the step. Does nothing if no update
    /// is speculative.
    pub fn predict_decision(&self, dev: &Device, step: u64) {
        if let Some(predict) = &self.predict {
            dev.submit_host(predict, step);
        }
    }

    /// Queues the speculative update of this rank's part of `segment` by the predicted decision,
    /// after its last micro-batch's [`reduce`](Self::reduce). [`update`](Self::update) must follow
    /// after the decision. Does nothing if the segment is not updated speculatively.
    pub fn update_speculatively(&mut self, dev: &Device, segment: usize) {
        let Some(norm_guard) = &self.work[segment].norm_guard else { return };
        if !self.layout.spec.host_adds() {
            self.copy_partials_down(dev, self.layout.segments[segment].chunks.own.clone());
            dev.follow(Host, D2h);
        }
        dev.submit_host(norm_guard, 0);
        let w = &self.work[segment];
        // The previous parameters may still be on their way up.
        dev.wait(Host, w.uploaded);
        for tile in w.pieces.iter().flat_map(PieceWork::tiles) {
            if let Some(speculation) = &tile.speculate {
                dev.submit_host(speculation, 0);
            }
        }
    }

    /// Delays the update of the last decided step; meanwhile the next step fills the other gradient
    /// buffer. Before the next step's decision, [`update_on_host`](Self::update_on_host) and then
    /// [`update_on_device`](Self::update_on_device) of every segment must follow.
    pub fn delay_update(&mut self) {
        self.delayed = Some(self.gradient_buffer);
        self.gradient_buffer ^= 1;
    }

    /// Whether an update is delayed.
    pub const fn has_delayed_update(&self) -> bool {
        self.delayed.is_some()
    }

    /// Ends the delay, after the whole delayed update is queued.
    pub fn finish_delayed(&mut self) {
        self.delayed = None;
    }

    /// Queues the update of this rank's part of `segment`. [`publish`](Self::publish) must follow.
    pub fn update(&mut self, dev: &Device, segment: usize) {
        self.update_on_host(dev, segment);
        self.update_on_device(dev, segment);
    }

    /// Queues the part of [`update`](Self::update) that runs on the host.
    pub fn update_on_host(&mut self, dev: &Device, segment: usize) {
        let buffer = self.delayed.unwrap_or(self.gradient_buffer);
        let w = &mut self.work[segment];
        // The previous parameters may still be on their way up.
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

    /// Queues the part of [`update`](Self::update) that runs on the device. Compute must have
    /// finished with the segment's parameters.
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

    /// Sends updated parameters to the device, tile by tile as the update finishes them, and to the
    /// other ranks. Call it no earlier than needed: a copy that waits for Adam blocks all later ops
    /// on its lane. Does nothing if the segment has no new update.
    pub fn publish(&mut self, dev: &Device, segment: usize) {
        assert!(self.param_buffer(segment).is_none(), "parameters that do not stay are fetched");
        if std::mem::take(&mut self.work[segment].unpublished) {
            self.upload(dev, segment);
            self.gather(dev, segment);
        }
    }

    /// Whether [`publish`](Self::publish) of a segment has no new update to send.
    pub fn is_published(&self, segment: usize) -> bool {
        !self.work[segment].unpublished
    }

    /// Publishes every segment that stays on the device at the end of a step, as
    /// [`publish`](Self::publish) does. With blocking transfers, uploads wait for the whole update,
    /// and gathers wait for all uploads.
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

    /// Number of the shared buffer for the parameters of `segment`. `None` if the parameters stay
    /// on the device.
    pub fn param_buffer(&self, segment: usize) -> Option<usize> {
        self.layout.segments[segment].spec.param_buffer
    }

    /// The segment whose parameters a shared buffer has, or will have.
    pub fn holder(&self, buffer: usize) -> Option<usize> {
        self.holders[buffer]
    }

    /// Starts the upload of a segment's parameters into their shared buffer, piece by piece as the
    /// update finishes them. The upload waits for all queued ops of Compute, which may read the old
    /// contents. Does nothing if the buffer already has these parameters.
    /// [`all_gather`](Self::all_gather) must follow.
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

    /// Gathers the parameters that [`fetch_shard`](Self::fetch_shard) uploads from all ranks.
    /// DpComm waits for the upload, and all later ops on DpComm wait too.
    pub fn all_gather(&mut self, dev: &Device, segment: usize) {
        if std::mem::take(&mut self.work[segment].is_partial) {
            self.gather(dev, segment);
        }
    }

    /// Copies the parameters that this rank's host has updated up to the device.
    fn upload(&mut self, dev: &Device, segment: usize) {
        let (s, w) = (&self.layout.segments[segment], &self.work[segment]);
        for piece in &w.pieces {
            let Some(up) = s.stores[piece.store].staging() else { continue };
            if s.spec.param_buffer.is_some() {
                // The prefetch runs blocks early: fewer copies matter more than an early first one.
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
        self.upload_frozen(dev, segment);
        self.work[segment].uploaded = dev.record(H2d);
    }

    /// Gathers the parameters from all ranks, after all queued uploads.
    fn gather(&mut self, dev: &Device, segment: usize) {
        let (s, w) = (&self.layout.segments[segment], &mut self.work[segment]);
        let is_any = |on_host| s.stores.iter().any(|store| store.is_on_host() == on_host);
        let of_frozen = s.frozen.as_ref().is_some_and(FrozenPart::is_on_host);
        let (here, host) = (is_any(false), is_any(true) || of_frozen);
        if self.rank.dp_size == 1 {
            // Compute itself updates the parameters on the device.
            w.params_ready = dev.record(if host { H2d } else { Compute });
            return;
        }
        if here {
            dev.follow(DpComm, Compute);
        }
        if s.spec.param_buffer.is_some() {
            // H2d also has the copies of later segments.
            dev.wait(DpComm, w.uploaded);
        } else if host {
            dev.follow(DpComm, H2d);
        }
        for piece in &w.pieces {
            let x = s.spec.params.slice(piece.flat.clone());
            dev.submit(DpComm, Op::AllGather { x, group: Group::Dp });
        }
        self.gather_frozen(dev, segment);
        self.work[segment].params_ready = dev.record(DpComm);
    }

    /// Event after which the parameters of the last update are complete on the device.
    pub fn params_ready(&self, segment: usize) -> Event {
        self.work[segment].params_ready
    }

    /// Loss scale of the coming backward pass: one F64 on the device.
    pub fn loss_scale(&self) -> Tensor {
        self.layout.device_loss_scale()
    }

    /// Decisions of the last step, on the host; see [`control`](crate::control).
    pub fn control(&self) -> Tensor {
        self.layout.control
    }

    /// Event after which [`loss_scale`](Self::loss_scale) holds the coming step's scale.
    pub const fn loss_scale_ready(&self) -> Event {
        self.control_on_device
    }

    /// Reads which arrays hold the states after the last step, for [`owned`](Self::owned). All
    /// lanes must have finished that step.
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

    /// Lists the runs of a segment that this rank owns, in order.
    pub fn owned(&self, segment: usize, BufferIndex(states): BufferIndex) -> Vec<OwnedRun> {
        self.layout.owned_on(segment, self.rank.dp, ActiveBuffers { states, delayed: self.delayed })
    }
}
