//! The control block: what one step decides, for the update to read. Its words are F64.

/// Optimizer steps begun, this one included; skipped ones too.
pub const STEP: usize = 0;
/// Updates applied (Adam's t).
pub const APPLIED: usize = 1;
/// 1: this step's gradients are not finite and nothing is updated.
pub const SKIP: usize = 2;
/// By what a summed gradient is multiplied: unscale, mean over ranks and micro-batches, clip.
pub const FACTOR: usize = 3;
/// Learning rate of this step.
pub const LR: usize = 4;
/// 1 / (1 - beta1^t)
pub const MOMENTUM_CORRECTION: usize = 5;
/// 1 / (1 - beta2^t)
pub const VARIANCE_CORRECTION: usize = 6;
/// Norm of the unscaled mean gradient, before clipping.
pub const NORM: usize = 7;
/// Loss scale of the step now running (of the next one, once this one is decided).
pub const LOSS_SCALE: usize = 8;
/// Loss scale that the decided step had.
pub const LOSS_SCALE_USED: usize = 9;
/// Steps without overflow since the scale last changed.
pub const GOOD_STEPS: usize = 10;
/// Overflows that the scale still forgives.
pub const HYSTERESIS_LEFT: usize = 11;
/// Skipped steps so far.
pub const SKIPPED: usize = 12;
/// How many words there are.
pub const WORDS: usize = 16;
