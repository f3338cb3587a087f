//! Keys of a whole config.

use super::adapter::AdapterContext;
use super::declare::{choice, section};
use super::fine_tune::FineTune;
use super::reading::KeyDefault;
use super::{
    Activations, Adapter, BatchConfig, DataConfig, DeviceConfig, LossScaleConfig, ModelConfig,
    OffloadConfig, OptimizerConfig, ParallelConfig, SampleConfig, ScheduleConfig, TrainConfig,
    model_folder, model_schema, write,
};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

section! {
    /// Config of a whole run.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Config, read(s, stem: &str) {
        /// Name of the run; a part of the name of its directory.
        name: String = text(KeyDefault::Derived(stem.into(), "the file's name", &[]), run_name), resume: Harmless;
        /// How the network is split over the GPUs.
        parallel: ParallelConfig = section(ParallelConfig::read);

        let world = parallel.tensor * parallel.data;
        let usual = DeviceConfig::Cpu { count: world, memory: 2 << 30, threads: None };
        /// Devices of the ranks: virtual GPUs on this machine, NVIDIA GPUs, or a described box (for
        /// `plan` and `simulate`).
        device: DeviceConfig = choice_with(
            KeyDefault::Derived(usual, "virtual GPUs on this machine", &[]), world
        ), resume: Layout;
        /// The network: a decoder.
        model: ModelConfig = section(model_schema::model);
        let peft = s.settings_of_peft(&model);
        let of = AdapterContext::of(peft, &model);
        /// What is trained. `None`: the weights of the model. `Lora`: low-rank adapters (LoRA, arXiv
        /// 2106.09685) of its linears; the weights of `model.from` are frozen, need 2 bytes per
        /// parameter in 16 bits, and are in no checkpoint.
        adapter: Adapter = choice_with(KeyDefault::Default(Adapter::None), of), resume: Experiment;
        /// Storage type of parameters, activations and gradients on the GPU. Sums are fp32. `Fp16`
        /// has a dynamic loss scale. `Fp8` stores bf16, and rounds the operands of the blocks'
        /// matmuls to 8 bits: E4M3 for inputs and weights, E5M2 for gradients, scaled by the
        /// largest magnitude of each tensor. On GPUs `Bf16` needs sm_80 or newer, and `Fp8` sm_89.
        /// `Fp8` also needs multiples of 16 for `model.hidden`, `model.head_dim`,
        /// `model.ffn_hidden` / `parallel.tensor` and the tokens of a micro-batch.
        precision: Precision = choice(KeyDefault::Default(Precision::Bf16)), resume: Layout;
        /// Dynamic loss scale, used only with `precision: Fp16`.
        loss_scale: LossScaleConfig = section(LossScaleConfig::read);
        /// Where the optimizer is and when it runs (ZeRO-Offload).
        offload: OffloadConfig = section(OffloadConfig::read);

        let tune = FineTune::of(s.reader, &model, &adapter);
        /// Update rule of the optimizer.
        optimizer: OptimizerConfig = section(|s| OptimizerConfig::read(s, tune));
        /// Length of the run, evaluations, checkpoints and seed.
        train: TrainConfig = section(|s| TrainConfig::read(s, loss_scale.hysteresis));
        /// Learning rate over the steps: a linear warm-up, then the curve of `schedule.kind`.
        schedule: ScheduleConfig = section(|s| ScheduleConfig::read(s, &optimizer, &train, tune));
        /// Batch sizes in samples of `model.seq_len` tokens.
        batch: BatchConfig = section(|s| BatchConfig::read(s, &parallel, tune));
        /// Activations that the backward pass recomputes instead of keeping them (activation
        /// checkpointing). `None`: no activations. `Selective`: the outputs of norms and of the MLP's
        /// activation, which saves about a third of the activations and costs up to 5 % of the time.
        /// `Block`: the whole block from its input, which costs about a quarter of the time.
        recompute: Recompute = choice(KeyDefault::Default(Recompute::None)), resume: Placement;
        /// Only with `recompute: Block`: blocks that keep their activations until the backward pass.
        /// `Uniform`: none. `Tiers`: the last blocks on the GPU, some of the others on the host;
        /// the remaining blocks recompute them. `Auto`: the fastest numbers of blocks on a described
        /// box, otherwise as many on the GPU as fit. Blocks that keep activations still recompute
        /// the outputs of norms and of the MLP's activation, as with `recompute: Selective`.
        /// `offload.transfer: Blocking` does not allow activations on the host.
        activations: Activations = choice(KeyDefault::Default(Activations::Uniform)), resume: Placement;
        /// The library that computes attention on GPUs. `Own`: onebox's kernels. `Cudnn`: cuDNN 9.10
        /// or newer, in 16 bits on GPUs of sm_90, sm_100 and sm_103, with heads of at most 128
        /// elements. It is faster on an H200, and its memory grows with the square of
        /// `model.seq_len`. Not with dropout, `data.packing: Documents`, windows or
        /// `model.score_cap`.
        attention: Attention = choice(KeyDefault::Default(Attention::Own)), resume: Layout;
        /// How the algorithms of matmuls are selected on GPUs. `Heuristic`: the first one that
        /// cuBLASLt proposes. `Timed`: the fastest of its first eight, with and without an epilogue
        /// such as GELU, timed before step 1. The checkpoints of the run hold what it has chosen.
        matmuls: Matmuls = choice(KeyDefault::Default(Matmuls::Heuristic)), resume: Layout;
        /// Only with `recompute: Block`: whether each TP rank keeps only its share of the inputs
        /// that `recompute: Block` keeps, and gathers them for the backward pass. Not allowed with
        /// `parallel.sequence`, which splits them already; without effect with `parallel.tensor:
        /// 1`.
        partition_checkpoints: bool = flag(KeyDefault::Default(false)), resume: Placement;
        /// Only with `recompute: Block`: whether the inputs that `recompute: Block` keeps go to
        /// host memory and return for the backward pass. Each TP rank copies its share of them.
        host_checkpoints: bool = flag(KeyDefault::Default(false)), resume: Placement;
        /// Data of the run: text or tokens.
        data: DataConfig = section(|s| {
            let tokenizer = model_folder::tokenizer_of_folder(s.reader, &model);
            DataConfig::read(s, tokenizer)
        });
        /// Text that a run generates after its last step.
        sample: SampleConfig = section(SampleConfig::read);
    }
}

/// Checks that a name can be a part of a directory's name.
fn run_name(name: &str) -> Result<(), &'static str> {
    let bad = |c: char| c == '/' || c.is_control();
    // The directory's name adds a time and a number, and has at most 255 bytes.
    if name.is_empty() || name == "." || name == ".." || name.len() > 230 || name.contains(bad) {
        return Err("must be a name for a directory (at most 230 bytes, without `/`)");
    }
    Ok(())
}

/// Defines the order of the top-level keys for readers, and writes a config in this order.
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
    name device model adapter parallel precision loss_scale offload optimizer schedule batch recompute activations attention
    matmuls partition_checkpoints host_checkpoints data train sample
}

/// Position of the dotted key `key` in this order.
pub(super) fn rank(key: &str) -> usize {
    let top = key.split('.').next().unwrap_or_default();
    ORDER.iter().position(|name| *name == top).unwrap_or(ORDER.len())
}

impl Config {
    /// Number of ranks of a run.
    pub const fn world_size(&self) -> usize {
        self.parallel.tensor * self.parallel.data
    }

    /// Every key with its value, one per line, in RON. Paths are absolute, so that the text means
    /// the same in every folder. Only an empty `data.train` is left out.
    pub fn to_ron(&self) -> String {
        write::lines(self)
    }
}

choice! {
    /// 16-bit storage with fp32 arithmetic, or all fp32.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Precision {
        /// As `Bf16`, but the operands of the blocks' matmuls are rounded to 8 bits with a scale
        /// for each tensor.
        Fp8,
        /// IEEE half precision with a dynamic loss scale.
        Fp16,
        /// bfloat16 storage.
        Bf16,
        /// 32-bit storage.
        Fp32,
    }
}

choice! {
    /// Activations that the backward pass recomputes (activation checkpointing).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
    pub enum Recompute {
        /// Nothing: every activation is kept.
        None,
        /// The outputs of norms and of the MLP's activation.
        Selective,
        /// The whole block: each block keeps only its input.
        Block,
    }
}

choice! {
    /// The library that computes attention in 16 bits on GPUs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
    pub enum Attention {
        /// cuDNN.
        Cudnn,
        /// onebox's kernels.
        Own,
    }
}

choice! {
    /// How the algorithms of matmuls are selected on GPUs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
    pub enum Matmuls {
        /// The first algorithm of the library's heuristic.
        Heuristic,
        /// The fastest by the clock.
        Timed,
    }
}

impl Recompute {
    /// Text for messages about the activations that blocks keep.
    pub(crate) const fn kept(self) -> &'static str {
        match self {
            Self::None => "every activation is kept",
            Self::Selective => "results of products and attention are kept",
            Self::Block => "the input of each block is kept",
        }
    }
}
