//! The control block: what one step decides, for the update to read. Its words are F64.

/// Number of steps that have begun, this one and skipped ones included.
pub const STEP: usize = 0;
/// Number of applied updates (Adam's t).
pub const APPLIED: usize = 1;
/// 1 where this step's gradients are not finite, so that nothing is updated; else 0.
pub const SKIP: usize = 2;
/// The factor of a summed gradient: unscaling, the mean over ranks and micro-batches, clipping.
pub const FACTOR: usize = 3;
/// The learning rate of this step.
pub const LR: usize = 4;
/// Adam's bias correction of the momentum, 1 / (1 - beta1^t).
pub const MOMENTUM_CORRECTION: usize = 5;
/// Adam's bias correction of the variance, 1 / (1 - beta2^t).
pub const VARIANCE_CORRECTION: usize = 6;
/// The norm of the unscaled mean gradient before clipping.
pub const NORM: usize = 7;
/// The loss scale of the running step, and of the next one once this one is decided.
pub const LOSS_SCALE: usize = 8;
/// The loss scale that the decided step had.
pub const LOSS_SCALE_USED: usize = 9;
/// Number of steps without overflow since the scale last changed.
pub const GOOD_STEPS: usize = 10;
/// Number of overflows that the scale still forgives.
pub const HYSTERESIS_LEFT: usize = 11;
/// Number of skipped steps so far.
pub const SKIPPED: usize = 12;
/// Which of the two arrays of a state holds it, where segments are updated ahead of the decision: 0 or 1.
pub const STATE_BUFFER: usize = 13;
/// Share of the recent steps that were clipped or skipped, an average that forgets an eighth with each step.
pub const CLIP_RATE: usize = 14;
/// What became of the updates ahead of the decision: [`NOT_SPECULATED`], [`COMMITTED`] or [`REDONE`].
pub const SPECULATION: usize = 15;
/// No update ran ahead of the decision.
pub const NOT_SPECULATED: f64 = 0.0;
/// The decision was the predicted one: the updates ahead of it stand.
pub const COMMITTED: f64 = 1.0;
/// The decision was another one: the updates ahead of it, where the step made any, are redone, or dropped where it is skipped.
pub const REDONE: f64 = 2.0;
/// Number of words.
pub const WORDS: usize = 16;
