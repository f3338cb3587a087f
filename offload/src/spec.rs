//! The specification of an optimizer: its segments and its settings.

use crate::norm::LossScale;
use crate::state::Storage;
use crate::update::Rule;
use device::{Group, Tensor};

/// The place of the fp32 sums of gradients over micro-batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GradAccumulation {
    /// No sums: the step has one micro-batch, whose shard is the gradient.
    None,
    /// On the device, with 4 bytes per owned parameter; the sum is copied down once.
    Device,
    /// On the device, in buffers that segments share as they share buckets. All micro-batches of a
    /// step run backward through a segment before the next segment.
    Shared,
    /// On the host, with 4 bytes per owned parameter; the shard of every micro-batch is copied
    /// down. With `Blocking` the sum has the storage type, and is also copied up.
    Host,
}

/// How gradients and parameters cross between device and host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// Shards go down when they are reduced. Tiles of parameters go up when they are updated.
    Streamed,
    /// The transfers of DeepSpeed in 2020 (its `stage2.py` of that time), for comparison. Compute
    /// waits until a segment's gradients are on the host. Each micro-batch copies the sum up, adds
    /// on the device and copies the sum down, in the storage type and the last time as fp32.
    /// Parameters go up after the whole update. The results are the same if the storage type is
    /// fp32 or the step has one micro-batch. DeepSpeed's extra passes over host memory are omitted.
    Blocking,
}

/// How a segment's gradients share buckets with other segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketSharing {
    /// The segment has its own bucket.
    Own,
    /// All such segments alternate between two buckets: one fills while the other is reduced.
    Alternating,
    /// All such segments share one bucket, since long work lies between them.
    Shared,
    /// The segment has this many buckets, one for each micro-batch that runs backward at the same
    /// time. Each bucket starts to fill long before it is complete.
    PerSlot(usize),
}

/// A segment of parameters for the optimizer.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentSpec {
    /// Name of the segment in plans and errors.
    pub name: String,
    /// Flat parameters on the device; the length is a multiple of dp_size x
    /// [`chunk_elements`](crate::chunk_elements).
    pub params: Tensor,
    /// Number of leading elements that the optimizer updates, padding included: a multiple like the
    /// length. The others are frozen.
    pub trained: usize,
    /// Number of leading elements in use; the other trained ones are padding.
    pub len: usize,
    /// Number of leading elements with weight decay.
    pub decayed: usize,
    /// Sharing of the bucket for the segment's gradients.
    pub bucket: BucketSharing,
    /// Number of the buffer that `params` shares with other segments, if the parameters are on the
    /// device only during their uses.
    pub param_buffer: Option<usize>,
}

/// Settings of the optimizer.
#[derive(Clone, Debug)]
pub struct OptimizerSpec {
    /// The update rule.
    pub rule: Rule,
    /// Share of the parameters, 0 to 1, whose states and update are on the device: the first in the
    /// order of the forward pass. The other states are on the host.
    pub device_fraction: f64,
    /// Whether an update may be delayed until the next step's gradients exist; the gradients of
    /// both steps then need memory.
    pub delayed: bool,
    /// Share of the parameters after segment 0, 0 to 1, that may be updated speculatively: whole
    /// segments from the end, whose gradients are complete first.
    pub speculative_fraction: f64,
    /// Place of the sums over micro-batches.
    pub accumulation: GradAccumulation,
    /// Transfers between device and host. `Blocking` needs all states on the host, no sums on the
    /// device and no delayed updates.
    pub transfer: Transfer,
    /// Storage of states on the host; states on the device are fp32.
    pub storage: Storage,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// Number of data-parallel ranks.
    pub dp_size: usize,
    /// Whether the data-parallel ranks sum gradients in fp32, so that the sum is rounded once.
    pub reduce_fp32: bool,
    /// The ranks that hold other parts of the same model; the norm is summed over this group.
    pub norm_group: Group,
    /// Largest norm of a gradient, if gradients are clipped.
    pub clip: Option<f64>,
    /// Rule of the loss scale, if the step has one.
    pub loss_scale: Option<LossScale>,
    /// Largest number of elements of a piece.
    pub bucket_elements: usize,
    /// Largest number of elements of a tile.
    pub tile_elements: usize,
}

impl OptimizerSpec {
    /// Whether the host's cores add the micro-batches; otherwise one gradient is copied down.
    pub(crate) fn host_adds(&self) -> bool {
        self.accumulation == GradAccumulation::Host && self.transfer == Transfer::Streamed
    }

    /// Asserts that the settings can be combined.
    pub(crate) fn check(&self) {
        let delayed = self.delayed || self.speculative_fraction > 0.0;
        let host_alone = self.device_fraction == 0.0
            && self.accumulation != GradAccumulation::Device
            && self.accumulation != GradAccumulation::Shared
            && !delayed;
        assert!(
            !self.delayed || self.speculative_fraction == 0.0,
            "an update runs ahead of its decision or waits for the next step, never both"
        );
        assert!(
            self.accumulation != GradAccumulation::Shared
                || (self.device_fraction == 0.0 && !self.delayed),
            "sums that segments share go down before the next segment's begin"
        );
        assert!(
            self.transfer == Transfer::Streamed || host_alone,
            "the config refuses blocking transfers beside states or sums on the device, and beside updates that are delayed or ahead of the decision"
        );
    }
}
