//! The delayed update of ZeRO-Offload (arXiv 2101.06840, "one-step delayed parameter update"): the update of step k runs on the host
//! while step k + 1 computes on the parameters of step k - 1.
//!
//! Staging holds the parameters of step k - 1 until they are published. A segment's new parameters go up after its last reader in
//! step k + 1, so segments are updated in the order of their last readers: the embedding, whose tied table the head reads last, then
//! from the last segment down to the first block.

use super::Trainer;
use device::Device;
use device::Lane::{Compute, H2d};

impl Trainer {
    /// Leaves the update that was just decided to the next step. Queues nothing.
    pub(super) fn delay_update(&mut self) {
        self.optimizer.delay_update();
        self.delayed_segments = 0;
    }

    /// Counts one more pass through a block, and queues the share of the delayed update that is due by now. Not all of it at once:
    /// the Host lane has work of this step too, which would wait behind it. Nothing is finished on return.
    pub(super) fn advance_delayed(&mut self, dev: &Device) {
        self.block_passes += 1;
        let all = 2 * self.decoder.shape().layers * self.samples.split.micro_batches;
        let due = (self.decoder.num_segments() * self.block_passes).div_ceil(all);
        self.queue_delayed(dev, due);
    }

    /// Sends the parameters of a delayed update to the device, after all ops that Compute has been given: they read the older ones.
    /// Nothing is finished on return; wait for [`params_ready`](offload::Optimizer::params_ready) of `segment`.
    pub(super) fn publish_delayed(&mut self, dev: &Device, segment: usize) {
        if self.optimizer.has_delayed_update() {
            self.queue_delayed(dev, self.delayed_order(segment) + 1);
            self.optimizer.update_on_device(dev, segment);
            dev.follow(H2d, Compute);
            self.optimizer.publish(dev, segment);
        }
    }

    /// Queues a delayed update to its end, between steps. The next parameters that are published are those of the last step. Nothing
    /// is finished on return; wait for all lanes, as [`Device::sync_all`] does.
    pub(crate) fn finish_update(&mut self, dev: &Device) {
        if self.optimizer.has_delayed_update() {
            for index in 0..self.decoder.num_segments() {
                self.optimizer.update(dev, self.delayed_order(index));
            }
            self.optimizer.finish_delayed();
        }
    }

    /// Whether staging holds the parameters of a delayed update of `segment`, or will hold them: they are for the next step.
    pub(super) const fn is_delayed_update_queued(&self, segment: usize) -> bool {
        self.optimizer.has_delayed_update() && self.delayed_order(segment) < self.delayed_segments
    }

    /// Queues the host's part of the first `due` segments of a delayed update.
    fn queue_delayed(&mut self, dev: &Device, due: usize) {
        while self.optimizer.has_delayed_update() && self.delayed_segments < due {
            let segment = self.delayed_order(self.delayed_segments);
            self.optimizer.publish(dev, segment); // of the step before, which staging still holds
            self.optimizer.update_on_host(dev, segment);
            self.delayed_segments += 1;
        }
    }

    /// The place of a segment in the order of a delayed update, and the segment at a place: the function is its own inverse.
    const fn delayed_order(&self, index: usize) -> usize {
        if index == 0 { 0 } else { self.decoder.num_segments() - index }
    }
}
