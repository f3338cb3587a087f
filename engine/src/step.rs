//! One training step in program order: tokens to loss, back through the layers, gradients to the host, the
//! update on its way. Read this file first.
//!
//! Nothing here waits for anything: [`Trainer::train_step`] returns when all is queued, with the update still
//! running; the next forward pass waits for it layer by layer. What may run at once is decided by lanes and
//! events alone, so the same calls train on virtual GPUs and real ones. Segments: 0 the embedding, 1..=L the
//! blocks, L + 1 the final norm, and L + 2 the output projection where it is not tied to the embedding.

use crate::config::UpdateMode;
use crate::train::batch::{Batch, Loader, Samples};
use crate::train::build::Built;
use device::{
    Device, Event, Group,
    Lane::{Compute, D2h, H2d, Host},
    Op, Reduce, Tensor, random,
};
use offload::Optimizer;
use tensor_parallel::Part::{Block, Embedding, FinalNorm, Head};
use tensor_parallel::{Gpt, HeadBuckets, Pass};

/// Word that keys dropout under the seed of a run.
const DROPOUT_STREAM: u64 = 0x6472_6f70;

/// Everything that one rank trains with.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) gpt: Gpt,
    pub(crate) optimizer: Optimizer,
    pub(crate) loader: Loader,
    pub(crate) samples: Samples,
    pub(crate) schedule: Schedule,
    /// Micro-batches that go through a block together, with their passes.
    together: Vec<(Pass, Batch)>,
    /// Segments whose late update is queued.
    caught_up: usize,
    /// F64 on the device: the loss of each micro-batch, then of an evaluation.
    losses: Tensor,
    /// The same on the host, summed over the data-parallel ranks.
    losses_host: Tensor,
    losses_on_host: Event,
}

/// What runs when; the same results in any case but that of a delayed update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) update: UpdateMode,
    /// Segments that are sent up ahead of the forward pass.
    pub(crate) lookahead: usize,
    /// Micro-batches whose first forward passes go through each block together.
    pub(crate) first_forward: usize,
}

/// Passes through a block, forward or backward: of a step, and of these how many are queued.
struct Beside {
    done: usize,
    all: usize,
}

impl Trainer {
    pub(crate) fn new(
        built: &Built,
        optimizer: Optimizer,
        loader: Loader,
        samples: Samples,
        schedule: Schedule,
    ) -> Self {
        let [losses, losses_host] = built.losses;
        let (gpt, losses_on_host) = (built.gpt.clone(), Event::default());
        Self {
            gpt,
            optimizer,
            loader,
            samples,
            schedule,
            together: Vec::with_capacity(schedule.first_forward),
            caught_up: 0,
            losses,
            losses_host,
            losses_on_host,
        }
    }

    /// Queues step `step` (from 1). The event: its losses and its decision (norm, skip) are on the host.
    pub(crate) fn train_step(&mut self, dev: &Device, step: u64) -> Event {
        let num_blocks = self.gpt.shape().layers;
        let mut late = Beside { done: 0, all: 2 * num_blocks * self.samples.deal.micro_batches };
        let mut forward_done = 0;
        let tied = self.gpt.head() == Embedding;
        for micro in 0..self.samples.deal.micro_batches {
            let last = micro + 1 == self.samples.deal.micro_batches;
            if micro == forward_done {
                let together = if micro == 0 { self.schedule.first_forward } else { 1 };
                forward_done += together;
                self.take(dev, step, micro..forward_done);
                self.forward(dev, &mut late);
            }
            let (pass, batch) = self.together[micro % self.together.len()];
            self.loader.prefetch(dev); // behind the parameters on H2d: those are needed first
            dev.wait(Compute, self.losses_on_host); // the last step's, before they are overwritten
            let loss = self.losses.slice(micro..micro + 1);
            let head = self.optimizer.bucket(dev, self.gpt.segment(self.gpt.head()));
            let final_norm = self.optimizer.bucket(dev, self.gpt.segment(FinalNorm));
            let loss_scale = self.optimizer.loss_scale();
            dev.wait(Compute, self.optimizer.loss_scale_ready());
            self.gpt.loss_backward(
                dev,
                (&pass, &batch.tensors),
                loss,
                loss_scale,
                HeadBuckets { final_norm, head },
            );
            self.optimizer.reduce(dev, self.gpt.segment(FinalNorm), final_norm, micro);
            if !tied {
                self.optimizer.reduce(dev, self.gpt.segment(Head), head, micro);
            }
            if last {
                self.optimizer.presume(dev, step);
                self.optimizer.update_ahead(dev, self.gpt.segment(FinalNorm));
                if !tied {
                    self.optimizer.update_ahead(dev, self.gpt.segment(Head));
                }
                // The output layer was the last reader of its table, and of a tied embedding.
                self.replace(dev, self.gpt.segment(Embedding));
                if !tied {
                    self.replace(dev, self.gpt.segment(Head));
                }
                self.replace(dev, self.gpt.segment(FinalNorm));
            }
            for layer in (0..num_blocks).rev() {
                let segment = self.gpt.segment(Block(layer));
                let bucket = self.optimizer.bucket(dev, segment);
                self.gpt.block_backward(dev, &pass, layer, bucket);
                self.optimizer.reduce(dev, segment, bucket, micro);
                self.catch_up(dev, &mut late);
                if last {
                    self.optimizer.update_ahead(dev, segment);
                    self.replace(dev, segment);
                }
            }
            let own = || self.optimizer.bucket(dev, self.gpt.segment(Embedding));
            let embedding = if tied { head } else { own() };
            self.gpt.embed_backward(dev, &pass, &batch.tensors, embedding);
            self.optimizer.reduce(dev, self.gpt.segment(Embedding), embedding, micro);
            self.loader.release(dev, &batch);
        }
        self.fetch_losses(dev, 0..self.samples.deal.micro_batches);
        self.optimizer.caught_up();

        let decided = self.optimizer.decide(dev, step);
        self.start_update(dev, step);
        if self.schedule.update == UpdateMode::Serial {
            self.optimizer.publish_all(dev);
            dev.fence();
        }
        decided
    }

    /// Queues the update of `step`, or leaves it for the next one to queue beside its own work, on the parameters of the
    /// step before. Where gradients overflowed that changes nothing: an update that is skipped leaves the
    /// parameters that the next step has anyway, so the step after an overflow is never stale.
    pub(crate) fn start_update(&mut self, dev: &Device, step: u64) {
        if matches!(self.schedule.update, UpdateMode::Delayed { after_step } if step >= after_step)
        {
            self.optimizer.defer();
            self.caught_up = 0;
            return;
        }
        (0..self.num_segments()).for_each(|segment| self.optimizer.update(dev, segment));
    }

    /// Queues as much of the late update, if there is one, as belongs beside so many passes through a block: Host has
    /// this step's work too, which would wait behind all of it.
    fn catch_up(&mut self, dev: &Device, beside: &mut Beside) {
        beside.done += 1;
        let due = (self.num_segments() * beside.done).div_ceil(beside.all);
        self.queue_late(dev, due);
    }

    /// Queues the host's part of the first `due` segments in [`late_order`](Self::late_order).
    fn queue_late(&mut self, dev: &Device, due: usize) {
        while self.optimizer.is_late() && self.caught_up < due {
            let segment = self.late_order(self.caught_up);
            self.optimizer.publish(dev, segment); // of the step before, which staging still holds
            self.optimizer.update_on_host(dev, segment);
            self.caught_up += 1;
        }
    }

    /// Sends the parameters of a late update to the device, behind the last op of this step that reads the older ones.
    fn replace(&mut self, dev: &Device, segment: usize) {
        if self.optimizer.is_late() {
            self.queue_late(dev, self.late_order(segment) + 1);
            self.optimizer.update_on_device(dev, segment);
            dev.follow(H2d, Compute);
            self.optimizer.publish(dev, segment);
        }
    }

    /// Queues what is left of a late update. Between steps: what is published next are its parameters.
    pub(crate) fn finish_update(&mut self, dev: &Device) {
        if self.optimizer.is_late() {
            for index in 0..self.num_segments() {
                self.optimizer.update(dev, self.late_order(index));
            }
            self.optimizer.caught_up();
        }
    }

    /// The order in which a late update replaces parameters, that of their last readers: the embedding, then from the last
    /// segment backward. Its own inverse.
    const fn late_order(&self, index: usize) -> usize {
        if index == 0 { 0 } else { self.num_segments() - index }
    }

    const fn num_segments(&self) -> usize {
        self.gpt.num_segments()
    }

    /// Takes the batches of some micro-batches, to go through the blocks together.
    fn take(&mut self, dev: &Device, step: u64, micros: std::ops::Range<usize>) {
        self.together.clear();
        for (set, micro) in micros.enumerate() {
            let batch = self.loader.take(dev);
            let pass = self.training_pass(step, micro, set);
            self.together.push((Pass { starts: batch.starts, ..pass }, batch));
        }
    }

    /// Tokens to the last block's output, of what goes together. Each segment's parameters are sent up a little ahead and
    /// waited for where they are first read; the update of later segments goes on meanwhile.
    fn forward(&mut self, dev: &Device, late: &mut Beside) {
        self.await_params(dev, self.gpt.segment(Embedding));
        for (pass, batch) in &self.together {
            self.gpt.embed(dev, pass, &batch.tensors);
        }
        for layer in 0..self.gpt.shape().layers {
            self.await_params(dev, self.gpt.segment(Block(layer)));
            for i in 0..self.together.len() {
                let pass = self.together[i].0;
                self.gpt.block_forward(dev, &pass, layer);
                if pass.training {
                    self.catch_up(dev, late);
                }
            }
        }
        self.await_params(dev, self.gpt.segment(FinalNorm));
        if self.gpt.head() == Head {
            self.await_params(dev, self.gpt.segment(Head));
        }
    }

    /// Publishes the update of the segments up to `segment` + lookahead, no further: a lane is a queue, and
    /// what stands behind a copy that waits for Adam waits too. Compute waits for `segment`.
    fn await_params(&mut self, dev: &Device, segment: usize) {
        let last = self.num_segments() - 1;
        for ahead in segment..=(segment + self.schedule.lookahead).min(last) {
            // What a late update has left in staging is for the next step.
            if !(self.optimizer.is_late() && self.late_order(ahead) < self.caught_up) {
                self.optimizer.publish(dev, ahead);
            }
        }
        dev.wait(Compute, self.optimizer.params_ready(segment));
    }

    /// Loss summed over micro-batch `index` of the evaluation of a corpus, and over the data-parallel ranks. The event: it
    /// stands in the last element of [`losses_host`](Self::losses_host).
    pub(crate) fn evaluate(&mut self, dev: &Device, (corpus, index): (usize, u64)) -> Event {
        let batch = self.loader.evaluation(dev, (corpus, index));
        let pass =
            Pass { dropout_key: 0, first_token: 0, training: false, starts: batch.starts, set: 0 };
        self.together.clear();
        self.together.push((pass, batch));
        self.forward(dev, &mut Beside { done: 0, all: 1 });
        let last = self.samples.deal.micro_batches;
        dev.wait(Compute, self.losses_on_host);
        self.gpt.loss(dev, &pass, &batch.tensors, self.losses.slice(last..last + 1));
        self.loader.release(dev, &batch);
        self.fetch_losses(dev, last..last + 1);
        self.losses_on_host
    }

    /// Brings losses down and adds up those of the data-parallel ranks, in rank order.
    fn fetch_losses(&mut self, dev: &Device, range: std::ops::Range<usize>) {
        let (src, dst) = (self.losses.slice(range.clone()), self.losses_host.slice(range));
        dev.follow(D2h, Compute);
        dev.submit(D2h, Op::Copy { src, dst });
        dev.follow(Host, D2h);
        if dev.rank().dp_size > 1 {
            dev.submit(Host, Op::AllReduce { x: dst, group: Group::Dp, reduce: Reduce::Sum });
        }
        self.losses_on_host = dev.record(Host);
    }

    fn training_pass(&self, step: u64, micro: usize, set: usize) -> Pass {
        let seq_len = self.gpt.shape().seq_len;
        Pass {
            dropout_key: random::key(random::key(self.samples.deal.seed, DROPOUT_STREAM), step),
            first_token: (self.samples.deal.first_sample(micro) * seq_len) as u64,
            training: true,
            starts: None,
            set,
        }
    }

    /// F64, host: the micro-batches' losses, then an evaluation's.
    pub(crate) const fn losses_host(&self) -> Tensor {
        self.losses_host
    }
}
