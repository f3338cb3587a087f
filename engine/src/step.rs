//! One training step in program order: tokens to loss, back through the layers, gradients to the host, the
//! update on its way. Read this file first.
//!
//! Nothing here waits for anything: [`Trainer::train_step`] returns when all is queued, with the update still
//! running; the next forward pass waits for it layer by layer. What may run at once is decided by lanes and
//! events alone, so the same calls train on virtual GPUs and real ones. Segments: 0 the embedding, 1..=L the
//! blocks, L + 1 the final norm, and L + 2 the output projection where it is not tied to the embedding.

use crate::config::UpdateMode;
use crate::layout::build::Built;
use crate::train::batch::{Batch, Deal, Loader, Samples};
use device::{
    Device, Event, Group,
    Lane::{Compute, D2h, H2d, Host},
    Op, Reduce, Tensor, random,
};
use offload::{Bucket, Optimizer};
use std::ops::Range;
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
    /// For each of them the event behind which the input of the block that goes backward next is there.
    inputs: Vec<Event>,
    /// For each of them the bucket of a tied embedding that the output layer has begun.
    tied_buckets: Vec<Option<Bucket>>,
    /// Whether more micro-batches of the step follow.
    more: bool,
    /// Segments whose late update is queued.
    caught_up: usize,
    /// The passes are those of a trial: nothing of their own update follows.
    is_trial: bool,
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
    /// All micro-batches do so, and backward, too.
    pub(crate) together_back: bool,
}

impl Schedule {
    /// Micro-batches that go forward together from number `micro` on, as far as a step has them.
    const fn together(&self, micro: usize) -> usize {
        if micro == 0 || self.together_back { self.first_forward } else { 1 }
    }
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
            inputs: vec![Event::default(); schedule.first_forward],
            tied_buckets: vec![None; schedule.first_forward],
            more: false,
            caught_up: 0,
            is_trial: false,
            losses,
            losses_host,
            losses_on_host,
        }
    }

    /// Queues step `step` (from 1). The event: its losses and its decision (norm, skip) are on the host.
    pub(crate) fn train_step(&mut self, dev: &Device, step: u64) -> Event {
        self.passes(dev, step);
        self.optimizer.caught_up();

        let decided = self.optimizer.decide(dev, step);
        self.start_update(dev, step);
        if self.schedule.update == UpdateMode::Serial {
            self.optimizer.publish_all(dev);
            dev.fence();
        }
        decided
    }

    /// Queues the passes of step `step` and nothing of its update, so that they can be compared with those of the step itself, which
    /// must follow. Behind all of it the losses and the [sums of squares](Optimizer::squares) are on the host.
    pub(crate) fn try_step(&mut self, dev: &Device, step: u64) {
        self.is_trial = true;
        self.passes(dev, step);
        self.is_trial = false;
        self.optimizer.bring_squares_down(dev);
        self.loader.skip_to(step - 1);
        self.loader.prefetch(dev);
    }

    /// All micro-batches forward and backward, and their losses to the host.
    fn passes(&mut self, dev: &Device, step: u64) {
        let Deal { micro_batches, .. } = self.samples.deal;
        let mut late = Beside { done: 0, all: 2 * self.gpt.shape().layers * micro_batches };
        let mut micro = 0;
        while micro < micro_batches {
            let together = self.schedule.together(micro).min(micro_batches - micro);
            self.more = micro + together < micro_batches;
            self.take(dev, step, micro..micro + together);
            self.forward(dev, &mut late);
            let back = if self.schedule.together_back { together } else { 1 };
            for set in (0..together).step_by(back) {
                self.backward(dev, step, (micro + set, set..set + back), &mut late);
            }
            micro += together;
        }
        self.fetch_losses(dev, 0..self.samples.deal.micro_batches);
    }

    /// The output layer and the blocks backward, of the micro-batches of `sets`, of which `first` is the first: a block's gradients
    /// of all of them are on their way before those of the block below.
    fn backward(
        &mut self,
        dev: &Device,
        step: u64,
        (first, sets): (usize, Range<usize>),
        late: &mut Beside,
    ) {
        let last = !self.is_trial && first + sets.len() == self.samples.deal.micro_batches;
        let micros = first..first + sets.len();
        for (micro, set) in micros.clone().zip(sets.clone()) {
            self.loss_backward(dev, micro, set);
        }
        if last {
            self.update_under_backward(dev, step);
        }
        self.inputs.fill(Event::default());
        for layer in (0..self.gpt.shape().layers).rev() {
            let segment = self.gpt.segment(Block(layer));
            self.await_again(dev, layer);
            for (micro, set) in micros.clone().zip(sets.clone()) {
                let bucket = self.optimizer.bucket(dev, segment, set);
                let to = (bucket.tensor, &mut self.inputs[set]);
                self.gpt.block_backward(dev, &self.together[set].0, layer, to);
                self.optimizer.reduce(dev, segment, bucket, micro);
                self.catch_up(dev, late);
            }
            if last {
                self.optimizer.update_ahead(dev, segment);
                self.replace(dev, segment);
            }
        }
        for (micro, set) in micros.zip(sets) {
            self.embed_backward(dev, micro, set);
        }
    }

    /// The output layer forward and backward, down to the gradient of the last block's output.
    fn loss_backward(&mut self, dev: &Device, micro: usize, set: usize) {
        self.loader.prefetch(dev); // behind the parameters on H2d: those are needed first
        dev.wait(Compute, self.losses_on_host); // the last step's, before they are overwritten
        let (pass, batch) = self.together[set];
        let (norm, table) = (self.gpt.segment(FinalNorm), self.gpt.segment(self.gpt.head()));
        let head = self.optimizer.bucket(dev, table, set);
        let final_norm = self.optimizer.bucket(dev, norm, set);
        let loss = (self.losses.slice(micro..micro + 1), self.optimizer.loss_scale());
        dev.wait(Compute, self.optimizer.loss_scale_ready());
        let buckets = HeadBuckets { final_norm: final_norm.tensor, head: head.tensor };
        self.gpt.loss_backward(dev, (&pass, &batch.tensors), loss, buckets);
        self.optimizer.reduce(dev, norm, final_norm, micro);
        if self.gpt.head() == Head {
            self.optimizer.reduce(dev, table, head, micro);
        } else {
            self.tied_buckets[set] = Some(head); // the embedding's backward pass completes it
        }
    }

    fn embed_backward(&mut self, dev: &Device, micro: usize, set: usize) {
        let ((pass, batch), segment) = (self.together[set], self.gpt.segment(Embedding));
        self.loader.prefetch(dev); // of batches that go backward together, each makes room for one
        let begun = self.tied_buckets[set].take();
        let bucket = begun.unwrap_or_else(|| self.optimizer.bucket(dev, segment, set));
        self.gpt.embed_backward(dev, &pass, &batch.tensors, bucket.tensor);
        self.optimizer.reduce(dev, segment, bucket, micro);
        self.loader.release(dev, &batch);
    }

    /// Behind the last micro-batch's output layer: begins the updates that run under the backward pass, those ahead of the decision
    /// and the late ones.
    fn update_under_backward(&mut self, dev: &Device, step: u64) {
        self.optimizer.presume(dev, step);
        self.optimizer.update_ahead(dev, self.gpt.segment(FinalNorm));
        let tied = self.gpt.head() == Embedding;
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
    fn take(&mut self, dev: &Device, step: u64, micros: Range<usize>) {
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
            let stays = self.optimizer.slot(ahead).is_none();
            // What a late update has left in staging is for the next step.
            if stays && !(self.optimizer.is_late() && self.late_order(ahead) < self.caught_up) {
                self.optimizer.publish(dev, ahead);
            }
        }
        self.bring_up(dev, segment);
        dev.wait(Compute, self.optimizer.params_ready(segment));
    }

    /// Compute waits for the parameters of a block that goes backward, where they do not stay on the device.
    fn await_again(&mut self, dev: &Device, layer: usize) {
        let segment = self.gpt.segment(Block(layer));
        self.bring_up(dev, self.num_segments() + self.gpt.shape().layers - 1 - layer);
        if self.optimizer.slot(segment).is_some() {
            dev.wait(Compute, self.optimizer.params_ready(segment));
        }
    }

    /// Brings up the parameters that are read from read number `at` of a group on, as far as their buffers' contents are not read
    /// before, and no further than the first update that a resident segment waits for: what is read first goes up first. The ranks'
    /// parts are put together one read ahead: further ones are still on their way up.
    fn bring_up(&mut self, dev: &Device, at: usize) {
        let reads = self.num_segments() + self.gpt.shape().layers;
        let end = if self.more { at + reads } else { reads };
        for read in at..end {
            let segment = self.read(read);
            let Some(slot) = self.optimizer.slot(segment) else {
                if self.optimizer.is_published(segment) {
                    continue;
                }
                break;
            };
            let holder = self.optimizer.holder(slot).filter(|holder| *holder != segment);
            if holder.is_some_and(|holder| (at..read).any(|before| self.read(before) == holder)) {
                break;
            }
            self.optimizer.fetch(dev, segment);
        }
        for read in at..end.min(at + 2) {
            self.optimizer.complete(dev, self.read(read));
        }
    }

    /// The segment whose parameters are read number `at` of the micro-batches that go together, or of the next ones: all forward,
    /// then the blocks backward.
    const fn read(&self, at: usize) -> usize {
        let (segments, layers) = (self.num_segments(), self.gpt.shape().layers);
        let at = at % (segments + layers);
        if at < segments { at } else { self.gpt.segment(Block(segments + layers - 1 - at)) }
    }

    /// Loss summed over micro-batch `index` of the evaluation of a corpus, and over the data-parallel ranks. The event: it
    /// stands in the last element of [`losses_host`](Self::losses_host).
    pub(crate) fn evaluate(&mut self, dev: &Device, (corpus, index): (usize, u64)) -> Event {
        let batch = self.loader.evaluation(dev, (corpus, index));
        let pass =
            Pass { dropout_key: 0, first_token: 0, training: false, starts: batch.starts, set: 0 };
        self.together.clear();
        self.together.push((pass, batch));
        self.more = false;
        self.forward(dev, &mut Beside { done: 0, all: 1 });
        let last = self.samples.deal.micro_batches;
        dev.wait(Compute, self.losses_on_host);
        self.gpt.loss(dev, &pass, &batch.tensors, self.losses.slice(last..last + 1));
        self.loader.release(dev, &batch);
        self.fetch_losses(dev, last..last + 1);
        self.losses_on_host
    }

    /// Brings losses down and adds up those of the data-parallel ranks, in rank order.
    fn fetch_losses(&mut self, dev: &Device, range: Range<usize>) {
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
