//! Keys for the length of a run, its evaluations, its checkpoints, and its files at the end.

use super::STEPS;
use super::declare::{choice, section};
use super::reading::{Interval, KeyDefault};
use serde::Serialize;

/// Stand-in for the number of steps if `train.epochs` decides it. Code that needs the number reads
/// the data first.
const UNREAD_STEPS: u64 = 1_000_000;

/// Default share of training time for waiting, if the config has no key for the times of
/// checkpoints.
const OVERHEAD: f32 = 0.01;

section! {
    /// Length of a run, and times of its evaluations and checkpoints.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct TrainConfig, read(s, hysteresis: u32) {
        /// Length of the run in epochs, instead of `train.steps`; only one of the two keys is
        /// allowed. An epoch has as many samples as all training data. onebox computes the number
        /// of steps, rounded up, when it reads the data. None: `train.steps` is the length.
        epochs: Option<f32> = float_or_none(Interval::above(0.0, 1e6), KeyDefault::Default(None)), resume: Harmless;
        /// Number of optimizer steps of the run. Not allowed with `train.epochs`, which gives this
        /// number.
        steps: u64 = uint(1..=STEPS, steps(epochs)), resume: Harmless;
        /// Number of optimizer steps between evaluations on the validation set. 0: only after the
        /// last step.
        eval_every: u64 = uint(0..=STEPS, KeyDefault::Default(0)), resume: Harmless;
        /// Largest number of global batches of each validation set in an evaluation. 0: no limit.
        /// None: 8 between steps, and 600 after the last step.
        eval_batches: Option<usize> = uint_or_none(0..=STEPS, KeyDefault::Default(None)), resume: Harmless;
        /// Number of evaluations in a row without a new least validation loss after which the run
        /// ends, with its final checkpoint and weights. Needs `train.eval_every`. None: the run
        /// ends after its last step.
        patience: Option<usize> = uint_or_none(1..=STEPS, KeyDefault::Default(None)), resume: Harmless;
        /// Whether the run also writes its curves into event files for TensorBoard, in the run's
        /// directory.
        tensorboard: bool = flag(KeyDefault::Default(false)), resume: Harmless;
        /// Number of optimizer steps between checkpoints. 0: no checkpoints by steps. A run that
        /// saves any checkpoint also saves one at its end.
        checkpoint_every: u64 = uint(0..=STEPS, KeyDefault::Default(0)), resume: Harmless;
        /// Minutes of training between checkpoints. None: no checkpoints by time.
        checkpoint_minutes: Option<f32> = float_or_none(Interval::above(0.0, 1e6), KeyDefault::Default(None)), resume: Harmless;

        let rhythm = checkpoint_every > 0 || checkpoint_minutes.is_some();
        /// Share of the training time that may be spent waiting for checkpoints; the wait for the
        /// last checkpoint sets the time of the next. These checkpoints are at least ten minutes
        /// apart. None: no checkpoints by this key. If `train.checkpoint_every` and
        /// `train.checkpoint_minutes` are off, too, the run saves no checkpoints.
        checkpoint_overhead: Option<f32> = float_or_none(Interval::above(0.0, 1.0), KeyDefault::Derived(
            (!rhythm).then_some(OVERHEAD),
            "0.01 where neither checkpoint_every nor checkpoint_minutes is given",
            &["train.checkpoint_every", "train.checkpoint_minutes"],
        )), resume: Harmless;
        /// How checkpoints are written. `Background`: each rank copies its states, 12 bytes for
        /// each parameter that it owns (16 with `offload.update: Delayed`), and training continues
        /// during the write; only in a run of one process. `Foreground`: training waits for the
        /// disk. `Auto`: `Background` if the run is one process and the copy fits into host memory,
        /// else `Foreground`.
        checkpoint_writer: CheckpointWriter = choice(KeyDefault::Default(CheckpointWriter::Auto)), resume: Harmless;
        /// Number of newest checkpoints to keep.
        checkpoint_keep: usize = uint(1..=1_000_000, KeyDefault::Default(2)), resume: Harmless;
        /// Whether the run also keeps the checkpoint with the least validation loss. The run then
        /// saves a checkpoint after each evaluation with a new least loss. `generate` and
        /// `checkpoint export` use that checkpoint. Needs `train.eval_every` and checkpoints.
        keep_best: bool = flag(KeyDefault::Default(false)), resume: Harmless;
        /// When the run writes its fp32 parameters to `weights.safetensors`. `Complete`: when the
        /// run ends, also by `train.stop_after_skipped`; at an interrupt only if no checkpoint
        /// holds the states. `Always`: also at every interrupt. `Never`: at no time.
        weights: WeightsPolicy = choice(KeyDefault::Default(WeightsPolicy::Complete)), resume: Harmless;

        // Overflow number `hysteresis` halves a loss scale of 2^24, 23 more lower it to 1; 28 are a
        // margin.
        let hopeless = u64::from(hysteresis) + 23 + 28;
        /// Number of skipped steps in a row after which the run ends. The default is
        /// `loss_scale.hysteresis` + 51: `loss_scale.hysteresis` + 23 overflows lower a loss scale
        /// from 2^24 to 1, and 28 steps are a margin.
        stop_after_skipped: u64 = uint(
            1..=STEPS, KeyDefault::Derived(hopeless, "hysteresis + 51", &["loss_scale.hysteresis"])
        ), resume: Harmless;
        /// Number of steps from one verified step to the next. A verified step runs its forward and
        /// backward passes twice and compares the bits. A difference means faulty hardware: the run
        /// names the rank and the tensor, and continues. 0: never.
        verify_every: u64 = uint(0..=STEPS, KeyDefault::Default(0)), resume: Harmless;
        /// Whether `onebox train` on CUDA GPUs compares one block and the head of the model with the
        /// `cpu` backend before step 1, forward and backward. A difference beyond rounding ends the
        /// start with the name of the first op that differs. The verdict is kept for each
        /// combination of GPU, driver, libraries and shapes.
        proof: bool = flag(KeyDefault::Default(true)), resume: Harmless;
        /// Number of times, after each start of `onebox train`, that the run may go back after
        /// `train.stop_after_skipped` skipped steps in a row, instead of ending. It continues with
        /// other samples from the newest intact checkpoint before the skipped steps; if there is no
        /// such checkpoint, the run ends.
        rollbacks: u64 = uint(0..=1_000_000, KeyDefault::Default(0)), resume: Harmless;
        /// Seed of the random numbers for initial weights, samples and dropout.
        seed: u64 = uint(0..=u64::MAX, KeyDefault::Default(1337)), resume: Experiment;
    }
}

/// Default of `train.steps`.
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
    /// Whether `train.steps` is a stand-in, since the data is unread that gives the number of steps.
    pub(super) const fn is_unread(&self) -> bool {
        self.epochs.is_some() && self.steps == UNREAD_STEPS
    }

    /// Whether the run saves checkpoints.
    pub const fn saves(&self) -> bool {
        self.checkpoint_every > 0
            || self.checkpoint_minutes.is_some()
            || self.checkpoint_overhead.is_some()
    }

    /// Whether the run compares its evaluations: for the best checkpoint, or for its end.
    pub const fn compares_evaluations(&self) -> bool {
        self.keep_best || self.patience.is_some()
    }
}

choice! {
    /// Whether training continues while a checkpoint is written.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum CheckpointWriter {
        /// `Background` if the run is one process and the copy of the states fits into host memory,
        /// else `Foreground`.
        Auto,
        /// Ranks copy their states, 12 bytes for each parameter, and training continues.
        Background,
        /// Ranks write their states and wait for the disk.
        Foreground,
    }
}

choice! {
    /// When a run writes its fp32 parameters to `weights.safetensors`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum WeightsPolicy {
        /// At the end of training; at an interrupt only if no checkpoint holds the states.
        Complete,
        /// At the end of training and at every interrupt.
        Always,
        /// Never: `generate` and `checkpoint export` read the newest checkpoint.
        Never,
    }
}

section! {
    /// Text that a run generates after its last step.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct SampleConfig, read(s) {
        /// Start of the text that the run generates after its last step.
        prompt: String = text(KeyDefault::Default("\n".into()), nonempty), resume: Harmless;
        /// Number of tokens that the run generates after its last step. 0: no text.
        tokens: usize = uint(0..=1_000_000, KeyDefault::Default(0)), resume: Harmless;
        /// Sampling temperature of the generated text. 0: always the most likely token.
        temperature: f32 = float(Interval::closed(0.0, 10.0), KeyDefault::Default(0.8)), resume: Harmless;
    }
}

const fn nonempty(text: &str) -> Result<(), &'static str> {
    if text.is_empty() { Err("must hold at least one character to start from") } else { Ok(()) }
}
