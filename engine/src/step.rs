//! One training step in program order: tokens to loss, back through the layers, gradients to the host, and the update. Read this
//! file first. `step/prefetch.rs` sends parameters up, `step/group.rs` groups micro-batches, `step/delayed.rs` delays the update.
//!
//! Nothing here waits for the device. A method puts ops into the queues of six lanes and returns while they run; events order them.
//! "Compute waits for e" means: what is queued on Compute from now on runs after event e. So [`Trainer::train_step`] returns while
//! the update runs, and the next forward pass waits for it segment by segment. The same calls train on virtual GPUs and real ones.
//!
//! Segments are parts of the parameters: 0 the embedding, 1..=L the blocks, L + 1 the final norm, and L + 2 the output projection
//! if it is not tied to the embedding.

mod delayed;
pub(crate) mod group;
mod prefetch;

use crate::step::group::{ExecutionSchedule, Microbatch};
use crate::train::batch::{EvalBatch, Loader, Samples};
use config::UpdateMode;
use device::Lane::{Compute, D2h, Host};
use device::{Device, Event, Group, Op, Reduction, Tensor};
use layout::build::RankLayout;
use offload::Optimizer;
use std::ops::Range;
use tensor_parallel::SegmentRole::{Block, Embedding, FinalNorm, Head};
use tensor_parallel::{Decoder, HeadBuckets, LossTensors};

/// Everything that one rank trains with.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) decoder: Decoder,
    pub(crate) optimizer: Optimizer,
    pub(crate) loader: Loader,
    pub(crate) samples: Samples,
    pub(crate) schedule: ExecutionSchedule,
    /// The micro-batches that go through the blocks together, by slot.
    group: Vec<Microbatch>,
    /// Another group of the step follows.
    group_follows: bool,
    /// Passes of the step's micro-batches through a block, forward or backward, that are queued.
    block_passes: usize,
    /// Segments whose delayed update is queued on the host.
    delayed_segments: usize,
    /// The step runs as a trial: nothing of its update begins.
    is_trial: bool,
    /// F64 on the device: the loss of each micro-batch, then of an evaluation.
    losses: Tensor,
    /// The same on the host, summed over the data-parallel ranks: whole after `losses_on_host`.
    pub(crate) losses_host: Tensor,
    losses_on_host: Event,
}

impl Trainer {
    pub(crate) fn new(
        layout: &RankLayout,
        optimizer: Optimizer,
        loader: Loader,
        samples: Samples,
        schedule: ExecutionSchedule,
    ) -> Self {
        let [losses, losses_host] = layout.losses;
        Self {
            decoder: layout.decoder.clone(),
            optimizer,
            loader,
            samples,
            schedule,
            group: Vec::with_capacity(schedule.vertical_width),
            group_follows: false,
            block_passes: 0,
            delayed_segments: 0,
            is_trial: false,
            losses,
            losses_host,
            losses_on_host: Event::default(),
        }
    }

    /// Queues step `step` (from 1). Still running on return: all of it. After the event the host has the losses and the decision
    /// (norm, clip, skip). The update runs on: the next step, or [`Device::sync_all`], waits for it.
    pub(crate) fn train_step(&mut self, dev: &Device, step: u64) -> Event {
        self.forward_backward(dev, step);
        self.optimizer.finish_delayed();
        let decided = self.optimizer.decide(dev, step);
        self.start_update(dev, step);
        if self.schedule.update == UpdateMode::Serial {
            self.optimizer.publish_all(dev);
            dev.fence();
        }
        decided
    }

    /// Queues the update of `step`, or delays it: the next step then queues it. After an overflow that changes nothing, since a
    /// skipped update leaves the parameters that the next step reads anyway. Nothing is finished on return; the next step waits for
    /// [`params_ready`](Optimizer::params_ready) of each segment.
    pub(crate) fn start_update(&mut self, dev: &Device, step: u64) {
        match self.schedule.update {
            UpdateMode::Delayed { after_step } if step >= after_step => self.delay_update(),
            _ => (0..self.decoder.num_segments()).for_each(|s| self.optimizer.update(dev, s)),
        }
    }

    /// Queues step `step` forward and backward without its update, so that a second run can be compared with it; the step itself
    /// must follow. Still running on return: all of it. After [`Device::sync_all`] the host has the losses and the
    /// [sums of squares](Optimizer::squares).
    pub(crate) fn try_step(&mut self, dev: &Device, step: u64) {
        self.is_trial = true;
        self.forward_backward(dev, step);
        self.is_trial = false;
        self.optimizer.copy_squares_down(dev);
        self.loader.skip_to(step - 1);
        self.loader.prefetch(dev);
    }

    /// Queues all micro-batches forward and backward, group by group. Nothing is finished on return; the losses are on the host
    /// after `losses_on_host`, and [`Optimizer::decide`] waits for the gradients.
    fn forward_backward(&mut self, dev: &Device, step: u64) {
        let micro_batches = self.samples.split.micro_batches;
        let mut first = 0;
        self.block_passes = 0;
        while first < micro_batches {
            let numbers = self.schedule.group(first, micro_batches);
            first = numbers.end;
            self.load_group(dev, step, numbers);
            self.forward(dev);
            for slots in self.schedule.backward_order(self.group.len()) {
                self.backward(dev, step, slots);
            }
        }
        self.fetch_losses(dev, 0..micro_batches);
    }

    /// Takes the batches of the micro-batches `numbers`, which become the group. Compute waits for their copies.
    fn load_group(&mut self, dev: &Device, step: u64, numbers: Range<usize>) {
        self.group.clear();
        self.group_follows = numbers.end < self.samples.split.micro_batches;
        for (slot, number) in numbers.enumerate() {
            let batch = self.loader.take(dev);
            self.group.push(Microbatch::of_step(&self.samples.split, step, number, slot, batch));
        }
    }

    /// Queues the group forward, from the tokens to the output of the last block. Compute waits for the parameters of each segment
    /// right before it reads them; the update of later segments runs on meanwhile. Nothing is finished on return; what is queued on
    /// Compute from now on reads the result.
    fn forward(&mut self, dev: &Device) {
        self.await_params(dev, self.decoder.segment(Embedding));
        for microbatch in &self.group {
            self.decoder.embed(dev, &microbatch.context, &microbatch.batch.tensors);
        }
        for layer in 0..self.decoder.shape().layers {
            self.await_params(dev, self.decoder.segment(Block(layer)));
            for slot in 0..self.group.len() {
                let context = self.group[slot].context;
                self.decoder.block_forward(dev, &context, layer);
                if context.training {
                    self.advance_delayed(dev);
                }
            }
        }
        self.await_params(dev, self.decoder.segment(FinalNorm));
        if self.decoder.head() == Head {
            self.await_params(dev, self.decoder.segment(Head));
        }
    }

    /// Queues the backward pass of the micro-batches in `slots`: head, blocks from the last to the first, embedding. The gradients
    /// of a block begin their route, reduce-scatter and then to the host, before the block below begins. With the last micro-batch
    /// of a step its updates begin. Nothing is finished on return; [`Optimizer::decide`] waits for the gradients.
    fn backward(&mut self, dev: &Device, step: u64, slots: Range<usize>) {
        let done = self.group[slots.end - 1].number + 1;
        let ends_step = !self.is_trial && done == self.samples.split.micro_batches;
        for slot in slots.clone() {
            self.loss_backward(dev, slot);
        }
        if ends_step {
            self.update_head(dev, step);
        }
        for layer in (0..self.decoder.shape().layers).rev() {
            let segment = self.decoder.segment(Block(layer));
            self.await_params_again(dev, layer);
            for slot in slots.clone() {
                let bucket = self.optimizer.bucket(dev, segment, slot);
                let Microbatch { number, context, checkpoint_ready, .. } = &mut self.group[slot];
                self.decoder.block_backward(dev, context, layer, bucket.tensor, checkpoint_ready);
                self.optimizer.reduce(dev, segment, bucket, *number);
                self.advance_delayed(dev);
            }
            if ends_step {
                self.optimizer.update_speculatively(dev, segment);
                self.publish_delayed(dev, segment);
            }
        }
        for slot in slots {
            self.embed_backward(dev, slot);
        }
    }

    /// Queues the head of a micro-batch forward and backward, down to the gradient of the last block's output. Nothing is finished
    /// on return; the gradients of the head and the final norm are on their route to the host.
    fn loss_backward(&mut self, dev: &Device, slot: usize) {
        self.loader.prefetch(dev); // after the parameters on H2d, which are needed first
        dev.wait(Compute, self.losses_on_host); // the last step's, before they are overwritten
        let Microbatch { number, context, batch, .. } = self.group[slot];
        let [norm, table] = [FinalNorm, self.decoder.head()].map(|role| self.decoder.segment(role));
        let head = self.optimizer.bucket(dev, table, slot);
        let final_norm = self.optimizer.bucket(dev, norm, slot);
        let (loss, scale) = (self.losses.slice(number..number + 1), self.optimizer.loss_scale());
        dev.wait(Compute, self.optimizer.loss_scale_ready());
        let buckets = HeadBuckets { final_norm: final_norm.tensor, head: head.tensor };
        let loss = LossTensors { loss, scale };
        self.decoder.loss_backward(dev, &context, &batch.tensors, loss, buckets);
        self.optimizer.reduce(dev, norm, final_norm, number);
        if self.decoder.head() == Head {
            self.optimizer.reduce(dev, table, head, number);
        } else {
            self.group[slot].tied_bucket = Some(head); // the embedding's backward pass completes it
        }
    }

    /// Queues the backward pass of the embedding, and frees the batch of a micro-batch. Nothing is finished on return; the gradient
    /// of the embedding is on its route to the host.
    fn embed_backward(&mut self, dev: &Device, slot: usize) {
        let Microbatch { number, context, batch, tied_bucket, .. } = self.group[slot];
        let segment = self.decoder.segment(Embedding);
        self.loader.prefetch(dev); // each micro-batch of a vertical group makes room for one more
        let bucket = tied_bucket.unwrap_or_else(|| self.optimizer.bucket(dev, segment, slot));
        self.decoder.embed_backward(dev, &context, &batch.tensors, bucket.tensor);
        self.optimizer.reduce(dev, segment, bucket, number);
        self.loader.release(dev, &batch);
    }

    /// Begins the updates that run under the last backward pass, with the segments that the head reads. A speculative update
    /// (SuperOffload, arXiv 2509.21271) goes by a predicted decision, which [`Optimizer::decide`] validates; a delayed update
    /// publishes its parameters, since the head was their last reader. Nothing is finished on
    /// return; the next step waits for [`params_ready`](Optimizer::params_ready) of each segment.
    fn update_head(&mut self, dev: &Device, step: u64) {
        let roles = [Embedding, FinalNorm, self.decoder.head()];
        let [embedding, norm, head] = roles.map(|role| self.decoder.segment(role));
        self.optimizer.predict_decision(dev, step);
        self.optimizer.update_speculatively(dev, norm);
        if head != embedding {
            self.optimizer.update_speculatively(dev, head);
        }
        self.publish_delayed(dev, embedding);
        if head != embedding {
            self.publish_delayed(dev, head);
        }
        self.publish_delayed(dev, norm);
    }

    /// Queues a micro-batch of an evaluation. After the event its loss, summed over tokens and data-parallel ranks, is in the last
    /// element of `losses_host`.
    pub(crate) fn evaluate(&mut self, dev: &Device, batch: EvalBatch) -> Event {
        let batch = self.loader.take_evaluation(dev, batch);
        let last = self.samples.split.micro_batches;
        let microbatch = Microbatch::of_evaluation(last, batch);
        self.group.clear();
        self.group.push(microbatch);
        self.group_follows = false;
        self.forward(dev);
        dev.wait(Compute, self.losses_on_host);
        let loss = self.losses.slice(last..last + 1);
        self.decoder.loss(dev, &microbatch.context, &batch.tensors, loss);
        self.loader.release(dev, &batch);
        self.fetch_losses(dev, last..last + 1);
        self.losses_on_host
    }

    /// Queues the copy of losses to the host, and their sum over the data-parallel ranks in rank order. Nothing is finished on
    /// return; wait for `losses_on_host`.
    fn fetch_losses(&mut self, dev: &Device, range: Range<usize>) {
        let (src, dst) = (self.losses.slice(range.clone()), self.losses_host.slice(range));
        dev.follow(D2h, Compute);
        dev.submit(D2h, Op::Copy { src, dst });
        dev.follow(Host, D2h);
        if dev.rank().dp_size > 1 {
            dev.submit(Host, Op::AllReduce { x: dst, group: Group::Dp, reduce: Reduction::Sum });
        }
        self.losses_on_host = dev.record(Host);
    }
}
