//! A whole config.

use super::declare::{choice, section};
use super::reading::KeyDefault;
use super::{
    BatchConfig, DataConfig, DeviceConfig, LossScaleConfig, ModelConfig, OffloadConfig,
    OptimizerConfig, ParallelConfig, SampleConfig, ScheduleConfig, TrainConfig, model_folder,
    model_schema, write,
};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

section! {
    /// A whole run.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Config, read(s, stem: &str) {
        /// Name of the run, a part of its directory's name.
        name: String = text(KeyDefault::Derived(stem.into(), "the file's name", &[]), run_name), resume: Harmless;
        /// How the network is split over the GPUs.
        parallel: ParallelConfig = section(ParallelConfig::read);

        let world = parallel.tensor * parallel.data;
        let usual = DeviceConfig::Cpu { count: world, memory: 2 << 30, threads: None };
        /// What the ranks run on: virtual GPUs on this machine, NVIDIA GPUs, or a described box (for `plan` and `simulate`).
        device: DeviceConfig = choice_with(
            KeyDefault::Derived(usual, "virtual GPUs on this machine", &[]), world
        ), resume: Layout;
        /// The network: a pre-norm decoder.
        model: ModelConfig = section(model_schema::model);
        /// Storage type of parameters, activations and gradients on the GPU. Sums are fp32. `Fp16` has a dynamic loss
        /// scale. `Fp8` stores bf16, and rounds the operands of the blocks' products to 8 bits: E4M3 for inputs and
        /// weights, E5M2 for gradients, scaled by the largest magnitude of each tensor; from sm_89 on.
        precision: Precision = choice(KeyDefault::Default(Precision::Bf16)), resume: Layout;
        /// Dynamic loss scale. With `precision: Fp16` only.
        loss_scale: LossScaleConfig = section(LossScaleConfig::read);
        /// Where the optimizer is and when it runs (ZeRO-Offload).
        offload: OffloadConfig = section(OffloadConfig::read);
        /// The update rule.
        optimizer: OptimizerConfig = section(OptimizerConfig::read);
        /// Length of the run, evaluations, checkpoints, seed.
        train: TrainConfig = section(|s| TrainConfig::read(s, loss_scale.hysteresis));
        /// Learning rate over the steps: linear warm-up, then the kind's curve.
        schedule: ScheduleConfig = section(|s| ScheduleConfig::read(s, &optimizer, &train));
        /// Batch sizes in samples of `model.seq_len` tokens.
        batch: BatchConfig = section(|s| BatchConfig::read(s, &parallel));
        /// What is computed again in the backward pass instead of being kept: nothing; with `Selective` the outputs of
        /// norms and of the MLP's activation, which saves about a third of the activations and costs up to 5 % of the
        /// time; with `Block` the whole block from its input, which costs about a quarter of the time.
        recompute: Recompute = choice(KeyDefault::Default(Recompute::None)), resume: Placement;
        /// Each TP rank keeps its share of the inputs that `recompute: Block` keeps, and gathers them for the backward
        /// pass. Not with `parallel.sequence`, which splits them already; idle with `parallel.tensor: 1`.
        partition_checkpoints: bool = flag(KeyDefault::Default(false)), resume: Placement;
        /// The inputs that `recompute: Block` keeps go to host memory, each TP rank's share of them, and come back for
        /// the backward pass.
        host_checkpoints: bool = flag(KeyDefault::Default(false)), resume: Placement;
        /// Text or tokens.
        data: DataConfig = section(|s| {
            let tokenizer = model_folder::tokenizer_of_folder(s.reader, &model);
            DataConfig::read(s, tokenizer)
        });
        /// The text that a run writes after its last step.
        sample: SampleConfig = section(SampleConfig::read);
    }
}

/// The name becomes a part of a directory's name.
fn run_name(name: &str) -> Result<(), &'static str> {
    let bad = |c: char| c == '/' || c.is_control();
    // With its time and a number it is the name of a directory, of which 255 bytes are allowed.
    if name.is_empty() || name == "." || name == ".." || name.len() > 230 || name.contains(bad) {
        return Err("must be a name for a directory (at most 230 bytes, without `/`)");
    }
    Ok(())
}

/// Says in which order people want to see the keys at the top, and writes them in it.
macro_rules! order {
    ($($key:ident)+) => {
        const ORDER: &[&str] = &[$(stringify!($key)),+];

        impl Serialize for Config {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let Self { $($key),+ } = self;
                let mut keys = serializer.serialize_struct("Config", ORDER.len())?;
                $(keys.serialize_field(stringify!($key), $key)?;)+
                keys.end()
            }
        }
    };
}

order! {
    name device model parallel precision loss_scale offload optimizer schedule batch recompute partition_checkpoints
    host_checkpoints data train sample
}

/// Where the dotted key `key` stands among the others.
pub(super) fn rank(key: &str) -> usize {
    let top = key.split('.').next().unwrap_or_default();
    ORDER.iter().position(|name| *name == top).unwrap_or(ORDER.len())
}

impl Config {
    /// Ranks of a run.
    pub const fn world_size(&self) -> usize {
        self.parallel.tensor * self.parallel.data
    }

    /// Every key with its value, one per line, in RON. Paths are absolute, so that the text means
    /// the same wherever it is put; only `data.train` is left out where there is none.
    pub fn to_ron(&self) -> String {
        write::lines(self)
    }
}

choice! {
    /// 16-bit storage with fp32 arithmetic, or all fp32.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Precision {
        /// `Bf16`, but for the products of blocks, whose operands are rounded to 8 bits with a scale for each tensor.
        Fp8,
        /// IEEE half with dynamic loss scale.
        Fp16,
        /// bfloat16.
        Bf16,
        /// 32-bit.
        Fp32,
    }
}

choice! {
    /// Activation recomputation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
    pub enum Recompute {
        /// Everything is kept.
        None,
        /// The outputs of norms and of the MLP's activation are computed again in the backward pass.
        Selective,
        /// Each block keeps its input and is run again in the backward pass.
        Block,
    }
}

impl Recompute {
    /// The activations that blocks keep, in words.
    pub(crate) const fn kept(self) -> &'static str {
        match self {
            Self::None => "every activation is kept",
            Self::Selective => "results of products and attention are kept",
            Self::Block => "the input of each block is kept",
        }
    }
}
