//! The delayed update of ZeRO-Offload (arXiv 2101.06840, "one-step delayed parameter update"): the
//! update of step k runs on the host while step k + 1 computes on the parameters of step k - 1.
//!
//! Staging holds the parameters of step k - 1 until they are published. The new parameters of a
//! segment go to the device after the last op of step k + 1 that reads the segment. The segments
//! are updated in the order of their last reads: first the embedding, whose tied table the head
//! reads, then the last segment down to the first block.

use super::Trainer;
use device::Device;
use device::Lane::{Compute, H2d};

impl Trainer {
    /// Delays the update of the step that was just decided until the next step. Queues no op.
    pub(super) fn delay_update(&mut self) {
        self.optimizer.delay_update();
        self.delayed_segments = 0;
    }

    /// Counts one pass through a block, and queues the share of the delayed update that is due now.
    /// A larger share would hold up other work of this step on the Host lane.
    pub(super) fn advance_delayed(&mut self, dev: &Device) {
        self.block_passes += 1;
        let all = 2 * self.decoder.shape().layers * self.samples.split.micro_batches;
        let due = (self.decoder.num_segments() * self.block_passes).div_ceil(all);
        self.queue_delayed(dev, due);
    }

    /// Sends the parameters of a delayed update to the device, after all ops that are queued on
    /// Compute: these ops read the older parameters. The ops still run on return; wait for
    /// [`params_ready`](offload::Optimizer::params_ready) of `segment`.
    pub(super) fn publish_delayed(&mut self, dev: &Device, segment: usize) {
        if self.optimizer.has_delayed_update() {
            self.queue_delayed(dev, self.delayed_order(segment) + 1);
            self.optimizer.update_on_device(dev, segment);
            dev.follow(H2d, Compute);
            self.optimizer.publish(dev, segment);
        }
    }

    /// Queues the whole delayed update, between steps. The next published parameters are the
    /// parameters of the last step. The ops still run on return; [`Device::sync_all`] waits for
    /// them.
    pub(crate) fn finish_update(&mut self, dev: &Device) {
        if self.optimizer.has_delayed_update() {
            for index in 0..self.decoder.num_segments() {
                self.optimizer.update(dev, self.delayed_order(index));
            }
            self.optimizer.finish_delayed();
        }
    }

    /// Whether the delayed update of `segment` is queued. Staging then holds the next step's
    /// parameters, or will hold them.
    pub(super) const fn is_delayed_update_queued(&self, segment: usize) -> bool {
        self.optimizer.has_delayed_update() && self.delayed_order(segment) < self.delayed_segments
    }

    /// Queues the host part of the delayed update, up to the first `due` segments.
    fn queue_delayed(&mut self, dev: &Device, due: usize) {
        while self.optimizer.has_delayed_update() && self.delayed_segments < due {
            let segment = self.delayed_order(self.delayed_segments);
            self.optimizer.publish(dev, segment); // older parameters, which staging still holds
            self.optimizer.update_on_host(dev, segment);
            self.delayed_segments += 1;
        }
    }

    /// Maps a segment to its place in the order of a delayed update, and a place to its segment:
    /// the function is its own inverse.
    const fn delayed_order(&self, index: usize) -> usize {
        if index == 0 { 0 } else { self.decoder.num_segments() - index }
    }
}
