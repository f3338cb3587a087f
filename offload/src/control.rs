//! The control block: the decision of a step, which the update reads. Its words are F64.

/// Number of steps so far, this step and skipped steps included.
pub const STEP: usize = 0;
/// Number of applied updates (Adam's t).
pub const APPLIED: usize = 1;
/// 1 if this step's gradients are not finite, so that no parameter is updated; else 0.
pub const SKIP: usize = 2;
/// Factor of a summed gradient: unscaling, the mean over ranks and micro-batches, and clipping.
pub const FACTOR: usize = 3;
/// Learning rate of this step.
pub const LR: usize = 4;
/// Adam's bias correction of the momentum, 1 / (1 - beta1^t).
pub const MOMENTUM_CORRECTION: usize = 5;
/// Adam's bias correction of the variance, 1 / (1 - beta2^t).
pub const VARIANCE_CORRECTION: usize = 6;
/// Norm of the unscaled mean gradient before clipping.
pub const NORM: usize = 7;
/// Loss scale of the running step; after its decision, the loss scale of the next step.
pub const LOSS_SCALE: usize = 8;
/// Loss scale of the decided step.
pub const LOSS_SCALE_USED: usize = 9;
/// Number of steps since the last overflow or the last doubling of the loss scale.
pub const GOOD_STEPS: usize = 10;
/// Number of overflows until the loss scale halves. At 0 or below, every overflow halves it.
pub const HYSTERESIS_LEFT: usize = 11;
/// Number of skipped steps so far.
pub const SKIPPED: usize = 12;
/// Number of the array that holds each state, 0 or 1, if segments are updated speculatively.
pub const STATE_BUFFER: usize = 13;
/// Moving average of the share of clipped or skipped steps; the newest step has the weight 1/8.
pub const CLIP_RATE: usize = 14;
/// Outcome of the speculative updates: [`NOT_SPECULATED`], [`COMMITTED`] or [`REDONE`].
pub const SPECULATION: usize = 15;
/// No speculative update ran.
pub const NOT_SPECULATED: f64 = 0.0;
/// The decision was the predicted one, so the speculative updates are valid.
pub const COMMITTED: f64 = 1.0;
/// The decision was another one: speculative updates are redone, or dropped in a skipped step.
pub const REDONE: f64 = 2.0;
/// Number of words in a control block.
pub const WORDS: usize = 16;
