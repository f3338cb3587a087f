//! ZeRO-Offload (arXiv 2101.06840) over named flat segments. A reduce-scatter sums gradients over
//! the data-parallel ranks bucket by bucket, and the shards go down to the host. The host has the
//! fp32 states and runs Adam. 16-bit parameters go up just before their use, and an all-gather
//! completes them.
//!
//! Every rank owns a shard of every bucket, so all host links work at the same time. With the
//! optimizer on the device the same schedule runs without the copies, as the baseline and as the
//! reference of tests.
//!
//! Words:
//!
//! - *segment*: parameters that are updated and uploaded together (the embedding, a block ..),
//!   stored in one padded flat buffer.
//! - *bucket*: a device buffer for a segment's gradient in the storage type; segments and
//!   micro-batches may share it.
//! - *piece*: a run of a segment with its own reduce-scatter and all-gather.
//! - *shard*: this rank's part of each piece; the rank has its states and gradient, and updates it.
//! - *store*: a rank's arrays for the elements of a segment that the host updates, or for the
//!   elements that the device updates.
//! - *tile*: a run of a piece's shard that one host task updates, and one copy sends up.
//! - *chunk*: a run of fixed length with one partial sum of the norm; pieces and tiles are whole
//!   chunks.
//! - *slot*: a micro-batch's number among the micro-batches that run backward together.
//! - *parameter buffer*: device memory that segments share in turn, if parameters do not stay
//!   there.
//! - *gradient buffer*: one of two arrays; a delayed update reads one while the next step fills the
//!   other.
//! - *state buffer*: one of two arrays of states; a speculative update reads one and writes the
//!   other.
//!
//! Calls of a step: [`Optimizer::bucket`] and [`Optimizer::reduce`] for each segment of each
//! micro-batch's backward pass, then [`Optimizer::decide`], then [`Optimizer::update`] for each
//! segment, and [`Optimizer::publish`] before the next forward pass reads the segment. With
//! [`Optimizer::delay_update`] the update runs during the next step.
//!
//! Read in this order:
//!
//! 1. `spec`: the settings; `layout`: segments, pieces and shards; `store`: the arrays for each
//!    placement;
//! 2. `optimizer`: the calls above, op by op; `reduce`: the route of a gradient for each placement;
//!    `work`: the tasks and events of each segment's pieces;
//! 3. `norm`: the norm over all ranks, and the decision to skip and to clip; `locate` finds the
//!    gradient that is not finite;
//! 4. `update`, [`control`]: the SIMD update rule, and the block of decisions that it reads; `adam`
//!    makes tasks of the rule, `state` defines how states are stored;
//! 5. `schedule`, `start`: the learning rate that the loop provides; initial and restored states;
//! 6. `blocking`: transfers as in DeepSpeed of 2020, for comparison.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod adam;
mod blocking;
mod buckets;
pub mod control;
mod frozen;
mod frozen_copies;
mod layout;
mod locate;
mod norm;
mod optimizer;
mod reduce;
mod schedule;
mod spec;
mod speculation;
mod start;
mod state;
mod store;
mod update;
mod work;

pub use adam::{AdamTile, DeviceUpdate, PROGRAMS, TrafficTile};
pub use buckets::Bucket;
pub use layout::{OptimizerLayout, OwnedRun, chunk_elements};
pub use locate::NonFiniteGradient;
pub use norm::LossScale;
pub use optimizer::{BufferIndex, Optimizer};
pub use schedule::StepSchedule;
pub use spec::{BucketSharing, GradAccumulation, OptimizerSpec, SegmentSpec, Transfer};
pub use speculation::{
    MAX_CLIP_RATE, Phase, SpeculationBuffers, SpeculationOutcome, SpeculativeTile,
    SpeculativeTraffic,
};
pub use start::{ParameterSource, StatePosition, StateSource, StopCheck};
pub use state::{State, Storage};
pub use update::{NoiseRun, Rule, StoreKind, TileNoise, TrafficLoop};
