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
/// Number of words.
pub const WORDS: usize = 16;
