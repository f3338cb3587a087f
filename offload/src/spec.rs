//! The specification of an optimizer: its segments and its settings.

use crate::norm::LossScale;
use crate::state::Storage;
use crate::update::Rule;
use device::{Group, Tensor};

/// The place of the fp32 sums of gradients over micro-batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GradAccumulation {
    /// Nowhere: there is one micro-batch, whose shard is the gradient.
    None,
    /// On the device, where it takes 4 bytes per owned parameter; the sum comes down once.
    Device,
    /// On the device, in buffers that segments share as they share buckets: all micro-batches of a step go backward through a
    /// segment before the next one.
    Shared,
    /// On the host, where it takes 4 bytes per owned parameter; every micro-batch comes down. With `Blocking` the sum is in
    /// the storage type, and also goes up.
    Host,
}

/// The way of gradients and parameters between device and host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// Shards go down as soon as they are reduced, parameters go up tile by tile as they are updated.
    Streamed,
    /// As DeepSpeed did in 2020, to compare with (its `stage2.py` of that time): Compute waits until a segment's
    /// gradients are on the host, each micro-batch takes their sum up, adds on the device and takes it down again, in
    /// the storage type, the last one as fp32, and parameters go up after the whole update. The same results
    /// where the storage type is fp32 or there is one micro-batch; not its extra passes over host memory.
    Blocking,
}

/// Which bucket the gradients of a segment go through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketSharing {
    /// One of its own.
    Own,
    /// Two buckets take turns among all such segments: one fills while the other is reduced.
    Alternating,
    /// All such segments share one bucket, since long work lies between them.
    Shared,
    /// One for each of as many micro-batches as go backward together: each is begun long before it is complete.
    PerSlot(usize),
}

/// A segment, as the optimizer sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentSpec {
    /// Its name in plans and errors.
    pub name: String,
    /// Its flat parameters on the device; the length is a multiple of dp_size x [`chunk_elements`](crate::chunk_elements).
    pub params: Tensor,
    /// Number of leading elements in use; the rest is padding.
    pub len: usize,
    /// Number of leading elements that take weight decay.
    pub decayed: usize,
    /// Which bucket its gradients go through.
    pub bucket: BucketSharing,
    /// The number of the buffer that `params` shares with those of other segments, where they are there for their uses only.
    pub param_buffer: Option<usize>,
}

/// Settings of the optimizer.
#[derive(Clone, Debug)]
pub struct OptimizerSpec {
    /// The update rule.
    pub rule: Rule,
    /// The share of the parameters, 0 to 1, whose states and update are on the device: the first ones in the order of the
    /// forward pass. The others' are on the host.
    pub device_fraction: f64,
    /// Whether an update may wait until the next step's gradients are there, so that both steps' need room.
    pub delayed: bool,
    /// The share of the parameters behind the first segment, 0 to 1, that may be updated ahead of the decision: whole segments,
    /// the last ones, whose gradients are complete first.
    pub speculative_fraction: f64,
    /// The place of sums over micro-batches.
    pub accumulation: GradAccumulation,
    /// The way between device and host: `Blocking` goes with all states on the host, without sums on the device and
    /// without delayed updates.
    pub transfer: Transfer,
    /// Storage of states on the host; on the device they are fp32.
    pub storage: Storage,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// Number of data-parallel ranks.
    pub dp_size: usize,
    /// Whether gradients cross between the data-parallel ranks as fp32, so that their sum is rounded once.
    pub reduce_fp32: bool,
    /// The ranks that hold other parts of the same model, whose norms are added up.
    pub norm_group: Group,
    /// The largest norm of a gradient, where it is bounded.
    pub clip: Option<f64>,
    /// The rule of the loss scale, where there is one.
    pub loss_scale: Option<LossScale>,
    /// The most elements that a piece has.
    pub bucket_elements: usize,
    /// The most elements that a tile has.
    pub tile_elements: usize,
}

impl OptimizerSpec {
    /// Whether the host's cores add micro-batches up; else they come down as one gradient.
    pub(crate) fn host_adds(&self) -> bool {
        self.accumulation == GradAccumulation::Host && self.transfer == Transfer::Streamed
    }

    /// Asserts that `Blocking` comes with what it can do.
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
