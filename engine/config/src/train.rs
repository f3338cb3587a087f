//! Length of a run, its evaluations and checkpoints, and what it writes at its end.

use super::STEPS;
use super::declare::{choice, section};
use super::reading::{Interval, KeyDefault};
use serde::Serialize;

/// Steps of a run of epochs whose data nobody has read: what needs the number reads it.
pub(super) const UNREAD_STEPS: u64 = 1_000_000;

/// Share of its time that training waits for checkpoints where the config says nothing of them.
const OVERHEAD: f32 = 0.01;

section! {
    /// Length and rhythm of a run.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct TrainConfig, read(s, hysteresis: u32) {
        /// Number of times that the run takes every sample, instead of `steps`. The number of steps follows from it,
        /// rounded up, when the data is read.
        epochs: Option<f32> = float_or_none(Interval::above(0.0, 1e6), KeyDefault::Default(None)), resume: Harmless;
        /// Optimizer steps.
        steps: u64 = uint(1..=STEPS, steps(epochs)), resume: Harmless;
        /// Steps between evaluations. 0: only after the last step.
        eval_every: u64 = uint(0..=STEPS, KeyDefault::Default(0)), resume: Harmless;
        /// Most global batches of an evaluation. 0: all. None: 8 between steps, and 600 after the last step.
        eval_batches: Option<usize> = uint_or_none(0..=STEPS), resume: Harmless;
        /// Write the curves into event files for TensorBoard, too, in the run's directory.
        tensorboard: bool = flag(KeyDefault::Default(false)), resume: Harmless;
        /// Steps between checkpoints. 0: not by steps. A run that saves any checkpoint also saves one at its end.
        checkpoint_every: u64 = uint(0..=STEPS, KeyDefault::Default(0)), resume: Harmless;
        /// Minutes between checkpoints. None: not by the clock.
        checkpoint_minutes: Option<f32> = float_or_none(Interval::above(0.0, 1e6), KeyDefault::Default(None)), resume: Harmless;

        let rhythm = checkpoint_every > 0 || checkpoint_minutes.is_some();
        /// Share of its time that training may wait for checkpoints, as the last one made it wait; they are at least
        /// ten minutes apart. None: not by this. With none of the three keys the run leaves no checkpoint.
        checkpoint_overhead: Option<f32> = float_or_none(Interval::above(0.0, 1.0), KeyDefault::Derived(
            (!rhythm).then_some(OVERHEAD),
            "0.01 where neither checkpoint_every nor checkpoint_minutes is given",
            &["train.checkpoint_every", "train.checkpoint_minutes"],
        )), resume: Harmless;
        /// `Background`: ranks copy their states, 12 bytes for each parameter, and go on. `Foreground`: ranks wait for
        /// the disk. `Auto`: in the background where the copy fits the host's memory.
        checkpoint_writer: CheckpointWriter = choice(KeyDefault::Default(CheckpointWriter::Auto)), resume: Harmless;
        /// Number of newest checkpoints that stay.
        checkpoint_keep: usize = uint(1..=1_000_000, KeyDefault::Default(2)), resume: Harmless;
        /// When a run writes `weights.safetensors`, its fp32 parameters: when it is done (and at an interrupt where no
        /// checkpoint holds the states), at every end, or never.
        weights: WeightsPolicy = choice(KeyDefault::Default(WeightsPolicy::Complete)), resume: Harmless;

        // The first overflow that halves a loss scale of 2^24, 23 more until it is 1, and a margin.
        let hopeless = u64::from(hysteresis) + 23 + 28;
        /// Skipped steps in a row that end the run. The default is the `hysteresis` + 23 overflows in which a loss
        /// scale falls from 2^24 to 1, and 28 more.
        stop_after_skipped: u64 = uint(
            1..=STEPS, KeyDefault::Derived(hopeless, "hysteresis + 51", &["loss_scale.hysteresis"])
        ), resume: Harmless;
        /// Steps between those whose forward and backward passes run twice, to see whether the bits are the same. A
        /// difference means faulty hardware: the run names rank and tensor, and goes on. 0: never.
        verify_every: u64 = uint(0..=STEPS, KeyDefault::Default(0)), resume: Harmless;
        /// Times that the run goes back to the newest checkpoint from before such steps, and on from there with other
        /// samples, before it ends.
        rollbacks: u64 = uint(0..=1_000_000, KeyDefault::Default(0)), resume: Harmless;
        /// Seed of weights, samples and dropout.
        seed: u64 = uint(0..=u64::MAX, KeyDefault::Default(1337)), resume: Experiment;
    }
}

/// The default of `train.steps`.
const fn steps(epochs: Option<f32>) -> KeyDefault<u64> {
    match epochs {
        None => KeyDefault::Required("steps: 1000"),
        Some(_) => KeyDefault::Derived(
            UNREAD_STEPS,
            "a stand-in: the data says how many train.epochs need",
            &["train.epochs"],
        ),
    }
}

impl TrainConfig {
    /// Whether the run leaves checkpoints.
    pub const fn saves(&self) -> bool {
        self.checkpoint_every > 0
            || self.checkpoint_minutes.is_some()
            || self.checkpoint_overhead.is_some()
    }
}

choice! {
    /// Whether training goes on while a checkpoint is written.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum CheckpointWriter {
        /// In the background where the copy of the states fits the host's memory.
        Auto,
        /// Ranks copy their states, 12 bytes per parameter, and go on.
        Background,
        /// Ranks write their states and wait for the disk.
        Foreground,
    }
}

choice! {
    /// When a run writes `weights.safetensors`, its fp32 parameters.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum WeightsPolicy {
        /// When it is done; at an interrupt only where no checkpoint holds the states.
        Complete,
        /// At every end, also at an interrupt.
        Always,
        /// At no end: `generate` and `checkpoint export` read the newest checkpoint.
        Never,
    }
}

section! {
    /// The text sampled after the last step.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct SampleConfig, read(s) {
        /// Start of the text.
        prompt: String = text(KeyDefault::Default("\n".into()), nonempty), resume: Harmless;
        /// Tokens to draw. 0: none.
        tokens: usize = uint(0..=1_000_000, KeyDefault::Default(0)), resume: Harmless;
        /// Temperature of the draw. 0: always the likeliest token.
        temperature: f32 = float(Interval::closed(0.0, 10.0), KeyDefault::Default(0.8)), resume: Harmless;
    }
}

const fn nonempty(text: &str) -> Result<(), &'static str> {
    if text.is_empty() { Err("must hold at least one character to start from") } else { Ok(()) }
}
