//! Prefetch of parameters to the device.
//!
//! A resident segment has its own buffer, and its parameters are sent after each update, once per
//! step. A streamed segment (`offload.parameters: Host`) shares a buffer with other segments, and
//! its parameters are sent before each read. A micro-batch group reads in a fixed order: all
//! segments forward, then the blocks backward. The number of a read is its place in this order.

use super::Trainer;
use device::{Device, Lane::Compute};
use tensor_parallel::SegmentRole::Block;

impl Trainer {
    /// Makes Compute wait for the parameters of `segment`, which the forward pass reads next. Also
    /// sends later segments: resident segments up to the lookahead and no further. A lane is a
    /// queue, so a copy that waits for Adam also holds up every later copy.
    ///
    /// Updates, copies and all-gathers still run on return. Ops that are queued on Compute from
    /// then on run after [`params_ready`](offload::Optimizer::params_ready) of `segment`.
    pub(super) fn await_params(&mut self, dev: &Device, segment: usize) {
        let last = self.decoder.num_segments() - 1;
        for target in segment..=(segment + self.schedule.lookahead).min(last) {
            let is_resident = self.optimizer.param_buffer(target).is_none();
            if is_resident && !self.is_delayed_update_queued(target) {
                self.optimizer.publish(dev, target);
            }
        }
        self.prefetch_params(dev, segment);
        dev.wait(Compute, self.optimizer.params_ready(segment));
    }

    /// Makes Compute wait for the parameters of a streamed block before its backward pass.
    /// Prefetches later reads, as [`await_params`](Self::await_params) does.
    pub(super) fn await_params_again(&mut self, dev: &Device, layer: usize) {
        let segment = self.decoder.segment(Block(layer));
        self.prefetch_params(
            dev,
            self.decoder.num_segments() + self.decoder.shape().layers - 1 - layer,
        );
        if self.optimizer.param_buffer(segment).is_some() {
            dev.wait(Compute, self.optimizer.params_ready(segment));
        }
    }

    /// Prefetches the parameters of read `next` and of the reads after it, in order. Stops before a
    /// read whose buffer holds parameters that an earlier read needs, and before a resident segment
    /// whose update must be sent first. Queues the all-gather over the data-parallel ranks for two
    /// reads only: the shards of later reads are still being copied.
    ///
    /// The ops still run on return; wait for [`params_ready`](offload::Optimizer::params_ready) of
    /// a segment after its all-gather is queued.
    fn prefetch_params(&mut self, dev: &Device, next: usize) {
        let reads = self.decoder.num_segments() + self.decoder.shape().layers;
        let end = if self.group_follows { next + reads } else { reads };
        for read in next..end {
            let segment = self.segment_of_read(read);
            let Some(buffer) = self.optimizer.param_buffer(segment) else {
                if self.optimizer.is_published(segment) {
                    continue;
                }
                break;
            };
            let holder = self.optimizer.holder(buffer).filter(|holder| *holder != segment);
            let is_needed = |holder| (next..read).any(|read| self.segment_of_read(read) == holder);
            if holder.is_some_and(is_needed) {
                break;
            }
            self.optimizer.fetch_shard(dev, segment);
        }
        for read in next..end.min(next + 2) {
            self.optimizer.all_gather(dev, self.segment_of_read(read));
        }
    }

    /// Segment that read number `read` needs. Numbers past the end of the group are reads of the
    /// next group.
    const fn segment_of_read(&self, read: usize) -> usize {
        let (segments, layers) = (self.decoder.num_segments(), self.decoder.shape().layers);
        let read = read % (segments + layers);
        if read < segments {
            read
        } else {
            self.decoder.segment(Block(segments + layers - 1 - read))
        }
    }
}
