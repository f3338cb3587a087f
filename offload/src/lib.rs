//! ZeRO-Offload (arXiv 2101.06840) over named flat segments: gradients are reduce-scattered over the data-parallel
//! ranks bucket by bucket and go down to the host; fp32 states and the Adam step are there; 16-bit
//! parameters come up just before they are needed and are gathered.
//!
//! Every rank owns a shard of every bucket, so all host links work at once. With the optimizer on the device
//! the same schedule runs without the copies: the baseline, and the oracle.
//!
//! Words:
//!
//! - *segment*: parameters that are updated and published together (the embedding, a block ..), as one flat buffer, padded.
//! - *bucket*: a buffer on the device for the gradient of a segment in the storage type; segments and micro-batches may share it.
//! - *piece*: a run of a segment that is reduced and gathered by one collective.
//! - *shard*: of each piece, the part that this rank owns: states, gradient and update are here.
//! - *store*: the arrays for those elements of a rank's shard of a segment that are updated at one site, the host or the device.
//! - *tile*: a run of a piece's shard that one task of the host updates, and one copy sends up.
//! - *chunk*: a run of fixed length whose sum of squares is one partial sum of the norm; pieces and tiles are whole chunks.
//! - *slot*: a micro-batch's number among those that go backward together.
//! - *parameter buffer*: device memory that segments share in turn, where parameters do not stay on the device.
//! - *gradient buffer*: one of two arrays of gradients, of which a delayed update reads one while the next step fills the other.
//! - *state buffer*: one of two arrays of states, of which a speculative update reads one and writes the other.
//!
//! Who calls what, per step: [`Optimizer::bucket`] and [`Optimizer::reduce`] for each segment of each
//! micro-batch's backward pass, then [`Optimizer::decide`], then [`Optimizer::update`] for each segment, and
//! [`Optimizer::publish`] before the next forward pass reads it. Or [`Optimizer::delay_update`], and the update beside the
//! next step.
//!
//! Read in this order:
//!
//! 1. `spec`: what is asked for; `layout`: segments, buckets, pieces, and who owns what; `store`: what is kept where, for each
//!    placement;
//! 2. `optimizer`: the calls above, op by op; `reduce` has the route of a gradient for each placement, `work` what each
//!    segment's pieces have under way;
//! 3. `norm`: the norm over all ranks, and the decision to skip and to clip; `locate` finds the gradient that is not finite;
//! 4. `update`, [`control`]: the update rule by vectors, and the block of decisions that it reads;
//!    `adam` makes tasks of it, `state` says how states are kept;
//! 5. `schedule`, `start`: the learning rate that the loop gives; initial and restored states;
//! 6. `blocking`: transfers as DeepSpeed had them in 2020, to compare with.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod adam;
mod blocking;
mod buckets;
pub mod control;
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
pub use update::{NoiseRun, Rule, TileNoise};
