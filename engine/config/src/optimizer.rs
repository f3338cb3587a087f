//! Keys of the update rule, its learning rate and its loss scale.

use super::declare::{choice, section};
use super::fine_tune::FineTune;
use super::reading::{Interval, KeyDefault};
use super::{STEPS, TrainConfig};
use serde::Serialize;

section! {
    /// Keys of the update rule.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct OptimizerConfig, read(s, tune: Option<FineTune>) {
        /// Optimizer. `AdamW`: Adam with decoupled weight decay (arXiv 1711.05101). `Sgd`: plain
        /// gradient descent with decoupled weight decay.
        kind: OptimizerKind = choice(KeyDefault::Default(OptimizerKind::AdamW)), resume: Experiment;
        /// Peak learning rate. The default with pretrained weights is 2e-5, and 5e-5 for a model of
        /// less than a billion parameters; for adapters it is 2e-4.
        lr: f32 = float(
            Interval::above(0.0, 10.0), KeyDefault::Default(6e-4).or_tuned(tune.map(|tune| tune.lr))
        ), resume: Experiment;
        /// Decay of the first moment.
        beta1: f32 = float(Interval::below(0.0, 1.0), KeyDefault::Default(0.9)), resume: Experiment;
        /// Decay of the second moment. The default with pretrained weights is 0.999.
        beta2: f32 = float(
            Interval::below(0.0, 1.0), KeyDefault::Default(0.95).or_tuned(tune.map(|tune| tune.beta2))
        ), resume: Experiment;
        /// Number that is added to the square root of the second moment.
        eps: f32 = float(Interval::above(0.0, 1.0), KeyDefault::Default(1e-8)), resume: Experiment;
        /// Decoupled weight decay, on matrices only. The default with pretrained weights is 0.
        weight_decay: f32 = float(
            Interval::closed(0.0, 10.0), KeyDefault::Default(0.1).or_tuned(tune.map(|tune| tune.weight_decay))
        ), resume: Experiment;
        /// Global gradient norm above which gradients are scaled down. None: no clipping.
        clip: Option<f32> = float_or_none(Interval::above(0.0, 1e9), KeyDefault::Default(Some(1.0))), resume: Experiment;
        /// Tensors that are not trained: globs of their names in transformers, such as
        /// `["embed_tokens*", "model.layers.[0-9].*"]`. `*` stands for any characters, `?` for one,
        /// `[0-9]` for one of a set; the prefix of the model may be left out. A frozen tensor keeps its
        /// bytes, needs 2 bytes per parameter in 16 bits, and is in no checkpoint: its folder stays
        /// needed. Tensors that are multiplied as one, such as q, k and v, are frozen together.
        frozen: Vec<String> = globs(), resume: Experiment;
    }
}

choice! {
    /// Kind of the update rule.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay (arXiv 1711.05101).
        AdamW,
        /// p -= lr * g, with decoupled weight decay. For tests: the gradient's scale stays visible.
        Sgd,
    }
}

section! {
    /// Learning rate over the steps: a linear warm-up, then the curve of `kind`.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ScheduleConfig, read(s, optimizer: &OptimizerConfig, train: &TrainConfig, tune: Option<FineTune>) {
        /// Step at which the learning rate reaches its minimum. It may exceed `train.steps`.
        /// `Constant` and `InverseSqrt` do not use it.
        decay_steps: u64 = uint(1..=STEPS, KeyDefault::Derived(
            train.steps,
            if train.is_unread() { "train.steps, which is a stand-in" } else { "train.steps" },
            &["train.steps"],
        )), resume: Experiment;
        /// Number of warm-up steps, in which the learning rate rises linearly from 0 to the peak.
        /// At most `schedule.decay_steps`. The default with pretrained weights is 3 % of
        /// `schedule.decay_steps`, rounded up.
        warmup_steps: u64 = uint(0..=STEPS, match tune {
            Some(tune) => KeyDefault::Derived(
                tune.warmup_steps(decay_steps),
                if train.is_unread() {
                    "3 % of decay_steps, a stand-in: default of pretrained weights"
                } else {
                    "3 % of decay_steps: default of pretrained weights"
                },
                &["model.from", "model.weights", "schedule.decay_steps"],
            ),
            None => KeyDefault::Default(0),
        }), resume: Experiment;

        let until = (decay_steps - decay_steps / 10).max(warmup_steps);
        /// Curve of the learning rate after the warm-up. `Cosine` and `Linear` fall to
        /// `schedule.min_lr`. `Constant` stays at the peak. `Wsd` (warm-up, stable, decay) stays at
        /// the peak and then falls as `Cosine` does. `InverseSqrt` is the peak times the square
        /// root of `warmup_steps` / step; without a warm-up, of 10_000 / (10_000 + step). It never
        /// falls below `schedule.min_lr`.
        kind: ScheduleKind = choice_with(KeyDefault::Default(ScheduleKind::Cosine), until), resume: Experiment;
        /// Smallest learning rate after the warm-up; at most `optimizer.lr`. `Constant` does not
        /// use it.
        min_lr: f32 = float(
            Interval::closed(0.0, 10.0), KeyDefault::Derived(tenth(optimizer.lr), "lr / 10", &["optimizer.lr"])
        ), resume: Experiment;
    }
}

choice! {
    /// Curve of the learning rate after the warm-up.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum ScheduleKind, read(until: u64) {
        /// A cosine from the peak to `min_lr`.
        Cosine,
        /// A constant at the peak.
        Constant,
        /// A straight line from the peak to `min_lr`.
        Linear,
        /// Warm-up, stable, decay: a constant at the peak, then a cosine to `min_lr`.
        Wsd["(stable_until: 900)"] {
            /// Last step at the peak learning rate; from `schedule.warmup_steps` to
            /// `schedule.decay_steps`.
            stable_until: u64 = uint(0..=STEPS, KeyDefault::Derived(
                until,
                "9/10 of decay_steps, or warmup_steps where that is more",
                &["schedule.decay_steps", "schedule.warmup_steps"],
            ));
        },
        /// The peak times the square root of `warmup_steps` / step, never below `min_lr`.
        InverseSqrt,
    }
}

/// A tenth of the decimal number in the config: 6e-4 gives 6e-5, not 6.0000002e-5.
fn tenth(rate: f32) -> f32 {
    rate.to_string().parse::<f64>().map_or(rate / 10.0, |exact| (exact / 10.0) as f32)
}

/// Allowed values of a loss scale.
const SCALE: Interval = Interval::above(0.0, 16_777_216.0);

section! {
    /// Dynamic loss scale of `Fp16`.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct LossScaleConfig, read(s) {
        /// Loss scale at step 1: a power of two, at least `loss_scale.floor`.
        initial: f32 = float(SCALE, KeyDefault::Default(65536.0)), resume: Experiment;
        /// Number of steps in a row without an overflow before the loss scale doubles, up to 2^24.
        window: u64 = uint(1..=STEPS, KeyDefault::Default(1000)), resume: Experiment;
        /// Number of overflows after which the loss scale is halved, counted since it last doubled,
        /// or since the start. Every further overflow also halves it, until it doubles again. Good
        /// steps between overflows do not reset the count.
        hysteresis: u32 = uint(1..=1000, KeyDefault::Default(2)), resume: Experiment;
        /// Smallest loss scale; overflows do not lower it further.
        floor: f32 = float(SCALE, KeyDefault::Default(1.0)), resume: Experiment;
    }
}
