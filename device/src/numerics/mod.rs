//! The arithmetic that host and device must share bit for bit: the update rule, sums of squares, and the
//! control block through which a step's decisions travel.
//!
//! Everything is elementwise with explicit fma, IEEE square root and division, or an fp64 sum in a fixed
//! order; so neither threads, tiles nor SIMD width change a bit.

mod bounds;
mod elements;
mod lanes;
mod noise;
mod normals;
mod path;
mod round;
mod rules;
mod simd;
mod sums;
mod update;

pub use bounds::{Pass, multiply_add, sweep, traffic};
pub use noise::{Noise, NoiseRun};
pub use normals::normals;
pub(crate) use path::Inlined;
pub use path::SimdPath;
pub use round::{as_bf16_parameter, from_halves, lower_half};
pub(crate) use simd::ask;
pub use sums::{accumulate, accumulate_chunks, chunk_squares, sum_of_squares};
pub use update::{Master, States, Update, update};

/// Words (F64) of the control block: what one step decides and the update reads.
pub mod control {
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
    /// How many words.
    pub const WORDS: usize = 16;
}

/// Scalars of one update, from the control block.
#[derive(Clone, Copy, Debug)]
struct Scalars {
    skip: bool,
    factor: f32,
    lr: f32,
    momentum_correction: f32,
    variance_correction: f32,
}

impl Scalars {
    fn new(words: &[f64]) -> Self {
        Self {
            skip: words[control::SKIP] != 0.0,
            factor: words[control::FACTOR] as f32,
            lr: words[control::LR] as f32,
            momentum_correction: words[control::MOMENTUM_CORRECTION] as f32,
            variance_correction: words[control::VARIANCE_CORRECTION] as f32,
        }
    }
}

#[cfg(test)]
mod accuracy;
#[cfg(test)]
mod tests;
