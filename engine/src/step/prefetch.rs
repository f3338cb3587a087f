//! Parameters on their way to the device, ahead of their use.
//!
//! A resident segment has a buffer of its own; an update makes its parameters new once per step. A streamed segment
//! (`offload.parameters: Host`) shares a buffer with others, and its parameters go up before each read. A micro-batch group reads in a
//! fixed order: all segments forward, then the blocks backward. Reads are counted in this order from the beginning of the group.

use super::Trainer;
use device::{Device, Lane::Compute};
use tensor_parallel::SegmentRole::Block;

impl Trainer {
    /// Makes Compute wait for the parameters of `segment`, which the forward pass reads next. Later segments are sent up too:
    /// resident ones up to the lookahead and no further, since a lane is a queue, and a copy that waits for Adam holds up all behind
    /// it.
    ///
    /// Still running on return: updates, copies and all-gathers of parameters. Work that is queued on Compute from now on runs after
    /// [`params_ready`](offload::Optimizer::params_ready) of `segment`.
    pub(super) fn await_params(&mut self, dev: &Device, segment: usize) {
        let last = self.decoder.num_segments() - 1;
        for ahead in segment..=(segment + self.schedule.lookahead).min(last) {
            let is_resident = self.optimizer.param_buffer(ahead).is_none();
            if is_resident && !self.is_delayed_update_queued(ahead) {
                self.optimizer.publish(dev, ahead);
            }
        }
        self.prefetch_params(dev, segment);
        dev.wait(Compute, self.optimizer.params_ready(segment));
    }

    /// Makes Compute wait for the parameters of a block that goes backward, if they are streamed. As
    /// [`await_params`](Self::await_params) otherwise.
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

    /// Prefetches the parameters of read `next` and the reads after it, in their order. Stops before a read whose buffer holds
    /// parameters that an earlier read needs, and before a resident segment whose update must go up first. The all-gather over the
    /// data-parallel ranks is queued for two reads only: the shards of later ones are still on their way up.
    ///
    /// Nothing is finished on return; wait for [`params_ready`](offload::Optimizer::params_ready) of a segment, once its all-gather
    /// is queued.
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

    /// The segment whose parameters read `read` needs. Numbers past the end of the group are reads of the next group.
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
