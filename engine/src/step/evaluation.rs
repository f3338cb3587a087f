//! Evaluation of one micro-batch: the forward pass of a step, and its loss.

use super::Trainer;
use crate::step::group::Microbatch;
use crate::train::batch::EvalBatch;
use device::{Device, Event, Lane::Compute};

impl Trainer {
    /// Queues the forward pass of one micro-batch of an evaluation. After the returned event, the
    /// last element of `losses_host` is the loss of this micro-batch, summed over tokens and
    /// data-parallel ranks.
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
}
