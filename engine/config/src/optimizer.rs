//! The update rule, its learning rate, and its loss scale.

use super::declare::{choice, section};
use super::reading::{Interval, KeyDefault};
use super::{STEPS, TrainConfig};
use serde::Serialize;

section! {
    /// The update rule.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct OptimizerConfig, read(s) {
        /// AdamW (arXiv 1711.05101), or plain gradient descent with decoupled weight decay.
        kind: OptimizerKind = choice(KeyDefault::Default(OptimizerKind::AdamW)), resume: Experiment;
        /// Peak learning rate.
        lr: f32 = float(Interval::above(0.0, 10.0), KeyDefault::Default(6e-4)), resume: Experiment;
        /// Decay of the first moment.
        beta1: f32 = float(Interval::below(0.0, 1.0), KeyDefault::Default(0.9)), resume: Experiment;
        /// Decay of the second moment.
        beta2: f32 = float(Interval::below(0.0, 1.0), KeyDefault::Default(0.95)), resume: Experiment;
        /// Added to the root of the second moment.
        eps: f32 = float(Interval::above(0.0, 1.0), KeyDefault::Default(1e-8)), resume: Experiment;
        /// Decoupled weight decay, on matrices only.
        weight_decay: f32 = float(Interval::closed(0.0, 10.0), KeyDefault::Default(0.1)), resume: Experiment;
        /// Global gradient norm above which gradients are scaled down. None: never.
        clip: Option<f32> = float_or_none(Interval::above(0.0, 1e9), KeyDefault::Default(Some(1.0))), resume: Experiment;
    }
}

choice! {
    /// The update rule's kind.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum OptimizerKind {
        /// Decoupled weight decay (arXiv 1711.05101).
        AdamW,
        /// p -= lr * g, with decoupled weight decay. For tests: it does not hide the gradient's scale.
        Sgd,
    }
}

section! {
    /// Linear warm-up, then the kind's curve.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ScheduleConfig, read(s, optimizer: &OptimizerConfig, train: &TrainConfig) {
        /// Steps from 0 to the peak; at most `decay_steps`.
        warmup_steps: u64 = uint(0..=STEPS, KeyDefault::Default(0)), resume: Experiment;
        /// Step that reaches the minimum. It may exceed `train.steps`. `Constant` and `InverseSqrt` do not use it.
        decay_steps: u64 = uint(1..=STEPS, KeyDefault::Derived(train.steps, "train.steps", &["train.steps"])), resume: Experiment;

        let until = (decay_steps - decay_steps / 10).max(warmup_steps);
        /// Curve after the warm-up. `Wsd` (warm-up, stable, decay) stays at the peak and then falls as `Cosine` does.
        /// `InverseSqrt` is the peak times the root of `warmup_steps` / step; without a warm-up, of 10_000 / (10_000 +
        /// step).
        kind: ScheduleKind = choice_with(KeyDefault::Default(ScheduleKind::Cosine), until), resume: Experiment;
        /// Least learning rate after the warm-up; at most `optimizer.lr`. `Constant` does not use it.
        min_lr: f32 = float(
            Interval::closed(0.0, 10.0), KeyDefault::Derived(tenth(optimizer.lr), "lr / 10", &["optimizer.lr"])
        ), resume: Experiment;
    }
}

choice! {
    /// What follows the warm-up.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum ScheduleKind, read(until: u64) {
        /// Cosine to `min_lr`.
        Cosine,
        /// The peak throughout.
        Constant,
        /// A straight line to `min_lr`.
        Linear,
        /// Warm-up, stable, decay: the peak, and then a cosine to `min_lr`.
        Wsd["(stable_until: 900)"] {
            /// Last step at the peak; from `warmup_steps` to `decay_steps`.
            stable_until: u64 = uint(0..=STEPS, KeyDefault::Derived(
                until,
                "9/10 of decay_steps, or warmup_steps where that is more",
                &["schedule.decay_steps", "schedule.warmup_steps"],
            ));
        },
        /// The peak times the root of `warmup_steps` / step, never below `min_lr`.
        InverseSqrt,
    }
}

/// A tenth of the number that was written, so that 6e-4 gives 6e-5 and not 6.0000002e-5.
fn tenth(rate: f32) -> f32 {
    rate.to_string().parse::<f64>().map_or(rate / 10.0, |exact| (exact / 10.0) as f32)
}

/// Of a loss scale.
const SCALE: Interval = Interval::above(0.0, 16_777_216.0);

section! {
    /// Dynamic loss scale of `Fp16`.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct LossScaleConfig, read(s) {
        /// Scale at step 1: a power of two, at least `floor`.
        initial: f32 = float(SCALE, KeyDefault::Default(65536.0)), resume: Experiment;
        /// Good steps before the scale doubles.
        window: u64 = uint(1..=STEPS, KeyDefault::Default(1000)), resume: Experiment;
        /// The overflow that halves the scale, counted from the last time that it doubled; every further one halves it,
        /// too, until it doubles again. Good steps between overflows do not begin the count anew.
        hysteresis: u32 = uint(1..=1000, KeyDefault::Default(2)), resume: Experiment;
        /// The scale never falls below it.
        floor: f32 = float(SCALE, KeyDefault::Default(1.0)), resume: Experiment;
    }
}
