//! One training step of a rank, in program order: tokens to loss, backward pass, gradients to the
//! host, update. Read this file first. `step/prefetch.rs` sends parameters to the device,
//! `step/group.rs` groups micro-batches, `step/delayed.rs` delays the update, `step/losses.rs` fetches
//! losses, and `step/evaluation.rs` evaluates a micro-batch.
//!
//! No method here waits for the device. A rank has eight lanes; a lane is a queue of ops. A method
//! queues ops and returns while the ops run. Events order ops of different lanes: "Compute waits
//! for e" means that each op that is queued on Compute later runs after event e.
//! [`Trainer::train_step`] returns while the update runs. The next forward pass waits for the
//! update of a segment before it reads the segment. [`Optimizer::decide`] waits for all gradients.
//! Virtual and real GPUs get the same calls.
//!
//! The parameters are divided into segments. With L blocks, segment 0 is the embedding, segments 1
//! to L are the blocks, and segment L+1 is the final norm. Segment L+2 is the output projection, if
//! it is not tied to the embedding.

mod delayed;
mod evaluation;
pub(crate) mod group;
mod losses;
mod prefetch;

use crate::step::group::{ExecutionSchedule, Microbatch};
use crate::train::batch::{Loader, Samples};
use config::UpdateMode;
use device::Lane::Compute;
use device::{Device, Event, Tensor};
use layout::build::RankLayout;
use offload::Optimizer;
use std::ops::Range;
use tensor_parallel::SegmentRole::{Block, Embedding, FinalNorm, Head};
use tensor_parallel::{ActivationCopies, Decoder, HeadBuckets, LossTensors};

/// Model, optimizer, data loader and schedule of one rank.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) decoder: Decoder,
    pub(crate) optimizer: Optimizer,
    pub(crate) loader: Loader,
    pub(crate) samples: Samples,
    pub(crate) schedule: ExecutionSchedule,
    /// Copies of activations that blocks keep on the host.
    activation_copies: ActivationCopies,
    /// Micro-batches that pass through the blocks together. The index of a micro-batch is its slot.
    group: Vec<Microbatch>,
    /// Whether another group of the step follows.
    group_follows: bool,
    /// Number of block passes that are queued in this step. A pass is one micro-batch through one
    /// block, forward or backward.
    block_passes: usize,
    /// Number of segments whose delayed update is queued on the host.
    delayed_segments: usize,
    /// Whether the running step is a trial ([`try_step`](Self::try_step)). A trial has no update.
    is_trial: bool,
    /// Losses on the device (F64): an element for each micro-batch, and a last element for
    /// evaluations.
    losses: Tensor,
    /// Losses on the host, summed over the data-parallel ranks. Complete after `losses_on_host`.
    pub(crate) losses_host: Tensor,
    /// Loads of the experts in the step on the host, summed over the data-parallel ranks, if the
    /// model has experts. Complete after `losses_on_host`.
    expert_loads_host: Option<Tensor>,
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
            activation_copies: layout.decoder.activation_copies(),
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
            expert_loads_host: layout.expert_loads,
            losses_on_host: Event::default(),
        }
    }

    /// Queues training step `step` (from 1): forward, backward, decision and update. After the
    /// returned event the host has the losses and the decision (norm, clip, skip). The update may
    /// still run then; the next step, or [`Device::sync_all`], waits for it.
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

    /// Queues the update of `step`, or delays it: the next step then queues it. A skipped step
    /// needs no special case, since its update changes no parameter. The next step waits for
    /// [`params_ready`](Optimizer::params_ready) of each segment.
    pub(crate) fn start_update(&mut self, dev: &Device, step: u64) {
        match self.schedule.update {
            UpdateMode::Delayed { after_step } if step >= after_step => self.delay_update(),
            _ => (0..self.decoder.num_segments()).for_each(|s| self.optimizer.update(dev, s)),
        }
    }

    /// Queues the forward and backward passes of `step` without its update. The caller then runs
    /// the same step with [`train_step`](Self::train_step) and compares the two results. After
    /// [`Device::sync_all`] the host has the losses of the trial and the
    /// [sums of squares](Optimizer::squares) of its gradient.
    pub(crate) fn try_step(&mut self, dev: &Device, step: u64) {
        self.is_trial = true;
        self.forward_backward(dev, step);
        self.is_trial = false;
        self.optimizer.copy_squares_down(dev);
        self.loader.skip_to(step - 1);
        self.loader.prefetch(dev);
    }

    /// Queues the forward and backward passes of all micro-batches, group by group. The losses are
    /// on the host after `losses_on_host`.
    fn forward_backward(&mut self, dev: &Device, step: u64) {
        let micro_batches = self.samples.split.micro_batches;
        let counted_share = 1.0 / self.samples.weight(step);
        let mut first = 0;
        self.block_passes = 0;
        if self.expert_loads_host.is_some() {
            dev.wait(Compute, self.losses_on_host); // before it overwrites the last loads
            self.decoder.reset_expert_loads(dev);
        }
        while first < micro_batches {
            let numbers = self.schedule.group(first, micro_batches);
            first = numbers.end;
            self.load_group(dev, step, numbers, counted_share);
            self.forward(dev);
            for slots in self.schedule.backward_order(self.group.len()) {
                self.backward(dev, step, slots);
            }
        }
        self.fetch_expert_loads(dev);
        self.fetch_losses(dev, 0..micro_batches);
    }

    /// Replaces the group by the micro-batches with these numbers. Compute waits for the copies of
    /// their batches. `counted_share`: share of the step's tokens whose target counts.
    fn load_group(&mut self, dev: &Device, step: u64, numbers: Range<usize>, counted_share: f64) {
        self.group.clear();
        self.group_follows = numbers.end < self.samples.split.micro_batches;
        for (slot, number) in numbers.enumerate() {
            let batch = self.loader.take(dev);
            let split = &self.samples.split;
            self.group.push(Microbatch::of_step(split, step, number, slot, batch, counted_share));
        }
    }

    /// Queues the forward pass of the group, from the tokens to the output of the last block.
    /// Compute waits for the parameters of a segment right before it reads them; the updates of
    /// later segments may still run. An op that is queued on Compute later may read the output.
    fn forward(&mut self, dev: &Device) {
        self.await_params(dev, self.decoder.segment(Embedding));
        for microbatch in &self.group {
            self.decoder.embed(dev, &microbatch.context, &microbatch.batch.tensors);
        }
        for layer in 0..self.decoder.shape().layers {
            self.await_params(dev, self.decoder.segment(Block(layer)));
            for slot in 0..self.group.len() {
                let context = self.group[slot].context;
                self.decoder.block_forward(dev, &context, layer, &mut self.activation_copies);
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

    /// Queues the backward pass of the micro-batches in `slots`: head, blocks from last to first,
    /// embedding. The reduce-scatter of a block's gradients and their copy to the host are queued
    /// before the next block. The last backward pass of a step also starts updates: see
    /// [`update_head`](Self::update_head).
    fn backward(&mut self, dev: &Device, step: u64, slots: Range<usize>) {
        let done = self.group[slots.end - 1].number + 1;
        let ends_step = !self.is_trial && done == self.samples.split.micro_batches;
        self.decoder.begin_backward(dev, &slots, &mut self.activation_copies);
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
                let (tensor, copies) = (bucket.tensor, &mut self.activation_copies);
                self.decoder.block_backward(dev, context, layer, tensor, checkpoint_ready, copies);
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

    /// Queues the forward and backward pass of the head for a micro-batch: from the output of the
    /// last block to the gradient of this output.
    fn loss_backward(&mut self, dev: &Device, slot: usize) {
        self.loader.prefetch(dev); // queued on H2d after the parameters: they are needed first
        dev.wait(Compute, self.losses_on_host); // before it overwrites the last losses
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

    /// Queues the backward pass of the embedding for a micro-batch, and frees its batch.
    fn embed_backward(&mut self, dev: &Device, slot: usize) {
        let Microbatch { number, context, batch, tied_bucket, .. } = self.group[slot];
        let segment = self.decoder.segment(Embedding);
        self.loader.prefetch(dev); // into the slots of finished micro-batches
        let bucket = tied_bucket.unwrap_or_else(|| self.optimizer.bucket(dev, segment, slot));
        self.decoder.embed_backward(dev, &context, &batch.tensors, bucket.tensor);
        self.optimizer.reduce(dev, segment, bucket, number);
        self.loader.release(dev, &batch);
    }

    /// Begins the updates that run during the last backward pass; the segments that the head reads
    /// are first. A speculative update (SuperOffload, arXiv 2509.21271) uses a predicted decision,
    /// which [`Optimizer::decide`] validates. If the update of the last step was delayed, the new
    /// parameters of these segments are sent to the device now, since no later op of this step
    /// reads the old parameters. The next step waits for
    /// [`params_ready`](Optimizer::params_ready) of each segment.
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
}
