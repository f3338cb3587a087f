//! The configuration of a run, checked: whoever holds a [`Config`] holds one that makes sense.
//!
//! [`load()`] reads RON, applies `--set` overrides, and reports every error at once with its place:
//! `schema` says what each key may be, `checks` what several may be together. `reading` knows no key: it keeps the
//! place of every value, and prints what is wrong there.

mod box_schema;
pub mod bundled;
mod checks;
mod data;
mod data_rules;
mod era;
mod file;
mod find_box;
pub mod keys;
mod limits;
pub mod load;
mod machine;
mod model;
mod model_schema;
mod names;
mod not_built;
mod parts;
mod precision;
mod reading;
mod schema;
mod states;
mod streaming;
pub mod tokenizers;
mod told;
pub mod transformers;
mod write;

#[cfg(test)]
mod tests;

pub use box_schema::MEASURED_OPS;
pub use checks::{Broken, MachineRules};
pub use data::{ControlTokens, DataConfig, DataFormat, DataOrder, Packing, Source, Sources};
pub use era::Fact;
pub use find_box::find_box;
pub use keys::{box_keys, keys};
pub use load::load_of_run;
pub use load::{Further, Trouble, Valid, load, load_and_look, load_box, load_stored, load_str};
pub use load::{load_text_to_search, load_to_search};
pub use model::{Family, ModelConfig, RopeConfig, RopeScaling, Weights};
pub use precision::Precision;
pub use reading::bytes::{format_bytes, parse_bytes};
pub use reading::key::Key;
pub use reading::report::{ConfigError, Problem};
pub use reading::set::BOX;
pub use schema::{BUCKET_ELEMENTS, TILE_ELEMENTS};
pub use write::in_line;

use serde::Serialize;
use std::sync::Arc;
use topology::Machine;
pub use topology::Sockets;

/// A checked config, and where each of its values came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The config.
    pub config: Config,
    /// Every dotted key, its value in RON, and its origin, in reading order.
    pub origins: Vec<(String, String, Origin)>,
    /// The text of the file, without a byte order mark.
    pub source: String,
    /// Keys of a stored config that this version does not know, dotted. Any other config with such keys is refused.
    pub ignored: Vec<String>,
    /// What stands for `Auto` of `offload.update`, and why, once [`choose`](predict::choose) has looked: a sentence.
    pub chosen: Option<String>,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Left out.
    Default,
    /// The config file.
    File {
        /// 1-based.
        line: usize,
    },
    /// A `--set` argument.
    Set,
    /// Left out, and computed from other values; how, such as "micro x data".
    Derived(String),
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    /// Names the run directory. Default: the config file's stem.
    pub name: String,
    /// On what the ranks run. Default `Cpu(count: tensor x data, memory: "2GiB")`.
    pub device: DeviceConfig,
    /// The network.
    pub model: ModelConfig,
    /// How the network is cut over the ranks.
    pub parallel: ParallelConfig,
    /// Storage type of parameters, activations and gradients on the device. Default `Bf16`.
    pub precision: Precision,
    /// Dynamic loss scale; used with `Fp16` only.
    pub loss_scale: LossScaleConfig,
    /// Where the optimizer lives and when it runs.
    pub offload: OffloadConfig,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// Learning rate over steps.
    pub schedule: ScheduleConfig,
    /// Samples per micro-batch and per step.
    pub batch: BatchConfig,
    /// What is kept for the backward pass. Default `None`.
    pub recompute: Recompute,
    /// Each TP rank keeps its share of the inputs that recomputation runs the blocks from again, and they are
    /// gathered for the backward pass; idle where tensor is 1. With `recompute: Block`, and not with
    /// `parallel.sequence`, which splits them already. Default false.
    pub partition_checkpoints: bool,
    /// These inputs go to host memory, each TP rank's share of them, and come back for the backward pass. With
    /// `recompute: Block`. Default false.
    pub host_checkpoints: bool,
    /// Text or tokens.
    pub data: DataConfig,
    /// Length, evaluation, seed.
    pub train: TrainConfig,
    /// What is sampled at the end of a run.
    pub sample: SampleConfig,
}

impl Config {
    /// Ranks of a run.
    pub const fn world_size(&self) -> usize {
        self.parallel.tensor * self.parallel.data
    }
}

/// `Cpu(count: 4, memory: "512MiB")`, `Cuda`, `Sim(box: "boxes/dgx2.ron")`.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceConfig {
    /// Virtual GPUs on this machine.
    Cpu {
        /// How many: as many as ranks. Default tensor x data.
        count: usize,
        /// Bytes that each may hold. 1 KiB to 1 EiB (2^60), default 2 GiB.
        memory: u64,
        /// Kernel threads of each, 1..=4096; default: the cores of this machine divided by `count`,
        /// at least 1.
        threads: Option<usize>,
    },
    /// Real GPUs.
    Cuda,
    /// A described box.
    Sim {
        /// The description as read.
        box_: Box<BoxConfig>,
        /// Its file, absolute.
        path: std::path::PathBuf,
    },
}

/// A described box (`configs/boxes/*.ron`): `(name: "DGX-2", gpus: 16, gpu_memory: "31.7GiB",
/// numa_nodes: 2, node_memory: "755GiB", ..)`. `plan` needs no more; `simulate` needs the rates. A rate of 0 is
/// not known.
#[derive(Clone, Debug, PartialEq)]
pub struct BoxConfig {
    /// For messages. Default: the file's stem.
    pub name: String,
    /// GPUs of the box, or of all `machines` together. 1..=4096, default those of the topology.
    pub gpus: usize,
    /// Usable bytes of each GPU. 1 KiB to 1 PiB (2^50)
    pub gpu_memory: u64,
    /// NUMA nodes of a machine; without a topology GPUs are dealt to them evenly in order. 1..=1024, default those
    /// of the topology, or 1.
    pub numa_nodes: usize,
    /// Usable bytes of each node. 1 KiB to 1 PiB (2^50)
    pub node_memory: u64,
    /// hwloc XML of one machine, absolute: who shares links, cores and nodes. Without it every GPU has a link of its
    /// own.
    pub topology: Option<String>,
    /// What that XML describes.
    pub machine: Option<Arc<Machine>>,
    /// Machines alike. 1..=1024, default 1.
    pub machines: usize,
    /// GB/s each way between a machine and the others. Default 0.
    pub network_gb_per_s: f32,
    /// What each GPU does.
    pub gpu: GpuConfig,
    /// What the host does.
    pub host: HostConfig,
    /// The box is a machine whose cores stand in for GPUs, as `onebox bench --save-box` measured it.
    pub measured: Option<MeasuredConfig>,
}

/// Rates of a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuConfig {
    /// TFLOPS of large 16-bit matrix products with fp32 sums, sustained, as published measurements have it.
    pub gemm_tflops: f32,
    /// TFLOPS of fp32 arithmetic, of the data sheet.
    pub fp32_tflops: f32,
    /// GB/s of its memory, of the data sheet.
    pub memory_gb_per_s: f32,
    /// Without `topology`: GB/s each way between two GPUs of a machine, as NVLink. 0: over the links to the host.
    pub peer_gb_per_s: f32,
    /// Multiprocessors.
    pub processors: usize,
    /// Compute capability: 70 for V100, 90 for H100. 0..=200, default 0: unknown
    pub sm: u32,
    /// Software as the authors of ZeRO-Offload had it in 2020, to compare with: see device/src/sim/hardware/era.rs.
    pub as_of_2020: bool,
    /// Of that, what is left out, to see what it changes.
    pub as_of_2020_without: Vec<Fact>,
}

/// Rates of a host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostConfig {
    /// GB/s of the memory channels of each node, of the data sheet.
    pub node_gb_per_s: f32,
    /// GB/s that one core can read and write.
    pub core_gb_per_s: f32,
    /// Without `topology`: cores of a machine.
    pub cores: usize,
    /// Without `topology`: GB/s each way of each GPU's link.
    pub link_gb_per_s: f32,
}

/// What cores reach as virtual GPUs, one core while the others work too.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeasuredConfig {
    /// Cores.
    pub cores: usize,
    /// Microseconds until a rank's threads share an op.
    pub thread_us: f32,
    /// What each further core adds to a rank's first, 0 to 1.
    pub thread_share: f32,
    /// Matrix products, 16-bit and 32-bit storage: GFLOPS, and GB/s of their operands, one after the other.
    pub gemm: [[f32; 2]; 2],
    /// Attention, forward and backward: likewise.
    pub attention: [[f32; 2]; 2],
    /// GB/s by op, 16-bit and 32-bit storage; 0: not measured.
    pub ops_gb_per_s: Vec<(&'static str, [f32; 2])>,
    /// GB/s of any other op.
    pub other_gb_per_s: f32,
    /// Microseconds that any op takes.
    pub op_us: f32,
    /// Microseconds until ranks have met.
    pub meeting_us: f32,
}

/// The rank grid.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParallelConfig {
    /// TP degree. 1..=4096, default 1.
    pub tensor: usize,
    /// DP degree. 1..=4096, default 1.
    pub data: usize,
    /// Sequence parallelism: norm, dropout and residual regions split by tokens over TP.
    /// Default false.
    pub sequence: bool,
    /// 32-bit payloads in sums over ranks: of TP's partial sums, which then keep 32 bits until they are summed, and of gradients
    /// over DP, whose sum is rounded once. NCCL else rounds 16-bit sums at each hop; sums in-process are fp32 in any case, so
    /// there gradients stay the same. With DP it takes 4 bytes for each element of the longest bucket. Default false.
    pub reduce_fp32: bool,
    /// Where several processes have the ranks: TP groups may have ranks in more than one of them. Default false.
    pub tensor_across_nodes: bool,
}

/// Dynamic loss scale of `Fp16`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LossScaleConfig {
    /// At step 1, a power of two in [floor, 2^24]. Default 65536.
    pub initial: f32,
    /// Good steps before it doubles. At least 1, default 1000.
    pub window: u64,
    /// Overflows in a row before it halves. 1..=1000, default 2.
    pub hysteresis: u32,
    /// Never below. (0, 2^24], default 1.
    pub floor: f32,
}

/// ZeRO-Offload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OffloadConfig {
    /// Where states and the Adam step are. Default `Host`.
    pub optimizer: Placement,
    /// Where parameters are between their uses. Default `Device`.
    pub parameters: ParameterPlace,
    /// Blocks whose parameters a GPU holds at once besides the resident ones, with `parameters: Host`. 2..=64; absent: 3, or 2 where
    /// 3 do not fit.
    pub ring: Option<usize>,
    /// Blocks whose parameters stay on the GPU all the same. Absent: as many as the plan fits.
    pub resident_blocks: Option<usize>,
    /// When the update runs. Default `Overlapped`.
    pub update: UpdateMode,
    /// Share of the parameters behind the embedding that `Speculative` updates ahead of the decision, in whole segments, the
    /// last ones. Default `Auto`.
    pub speculated_fraction: Speculated,
    /// How gradients come down. Default `Streamed`.
    pub transfer: Transfer,
    /// Where micro-batches are summed. Default `Auto`.
    pub accumulate: Accumulate,
    /// How first and second moments are kept. Default `Fp32`.
    pub moments: Moments,
    /// How master weights are kept. Default `Fp32`.
    pub master: Master,
    /// Most elements of a gradient bucket before it is reduced in pieces. 1024..=2^40,
    /// default 50,000,000.
    pub bucket_elements: usize,
    /// Most elements of a host Adam tile, which goes up in one copy. 1024..=2^40, default 2,097,152.
    pub tile_elements: usize,
    /// How many segments ahead of the forward parameters are sent up. 1..=64, default 1.
    pub lookahead: usize,
    /// Every block has a gradient buffer of its own, as in PyTorch, where two take turns otherwise: to compare
    /// with. Default false.
    pub keep_gradients: bool,
    /// The first forward passes of so many micro-batches, as far as a step has them, go through each block together, so that
    /// an exact update hides behind all of them. Takes a set of checkpoints for each; with `recompute: Block`.
    /// With `parameters: Host` all micro-batches go through the blocks in groups of so many, forward and backward.
    /// 1..=4096, default 1, and 4096 with `parameters: Host`.
    pub first_forward: usize,
    /// Whose cores and memory ranks use besides those of the sockets that they are on. Default `Auto`.
    pub sockets: Sockets,
}

/// Where the optimizer is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Placement {
    /// States and step on the host.
    Host,
    /// States and step on the device, partitioned over DP: no offload.
    Device,
    /// States and step of the parameters that the forward pass needs first on the device, of the others on the host.
    Split {
        /// Of the parameters, on the device. [0, 1], rounded to what every rank can own alike.
        device_fraction: f32,
    },
}

/// `offload.first_forward` for all micro-batches of any step.
pub const ALL_TOGETHER: usize = 4096;

/// Where the 16-bit parameters are between their uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum ParameterPlace {
    /// On the device, all of them.
    Device,
    /// On the host, from where each block's come up for each use; the same bits.
    Host,
}

/// How the moments of AdamW are kept in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Moments {
    /// 4 bytes each.
    Fp32,
    /// 2 bytes each, rounded up or down by chance so that the mean is right: close to fp32, not equal. The random bits
    /// are those of seed, step, tensor and index, in every layout. Only with the whole optimizer on the host.
    Bf16,
}

/// How master weights are kept in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Master {
    /// 4 bytes each, besides the 16-bit parameter.
    Fp32,
    /// The bf16 parameter and the 2 bytes that make it the fp32 master: the same bits, 2 bytes less. Needs
    /// `precision: Bf16` or `Fp8`, and some of the optimizer on the host.
    Split,
}

/// When the update runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum UpdateMode {
    /// All of it before the next step.
    Serial,
    /// Layer by layer under the next forward; the same bits as `Serial`.
    Overlapped,
    /// Segments are updated during the last backward pass of a step as if neither clipping nor a skip followed, into second arrays of
    /// the states, and again behind the decision where one did; the same bits as `Serial`.
    /// Idle where `optimizer` is `Device`: there it is `Overlapped`.
    Speculative,
    /// The update of step k runs under the whole of step k + 1, which computes on the parameters of step k - 1. Not exact.
    /// Idle where `optimizer` is `Device`: there it is `Overlapped`.
    Delayed {
        /// The update of this step is the first delayed one: steps up to it are exact, the next one is stale.
        after_step: u64,
    },
    /// `Speculative` or `Overlapped`, as [`choose`](predict::choose) finds; `Overlapped` before it has looked.
    Auto,
}

/// Share of the parameters that `Speculative` updates ahead of the decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Speculated {
    /// As [`choose`](predict::choose) finds.
    Auto,
    /// In [0, 1].
    Share(f32),
}

impl Speculated {
    /// Where nothing else is known.
    pub const USUAL: f32 = 0.5;

    /// The share: [`USUAL`](Self::USUAL) before anyone has chosen.
    pub const fn share(self) -> f32 {
        match self {
            Self::Auto => Self::USUAL,
            Self::Share(share) => share,
        }
    }
}

/// How gradients and parameters cross PCIe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Transfer {
    /// 16-bit shards as they are ready.
    Streamed,
    /// As DeepSpeed in 2020, to compare with: fp32 gradients down with every micro-batch (and the sum up), the
    /// backward pass waits for them block by block, parameters go up after the whole update. Needs
    /// `update: Serial` and the optimizer on the host.
    Blocking,
}

/// Where gradients of several micro-batches are summed, in fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Accumulate {
    /// The device when the plan fits it.
    Auto,
    /// 4/DP bytes per parameter of device memory.
    Device,
    /// 4 bytes per owned parameter of host memory.
    Host,
}

/// The update rule's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum OptimizerKind {
    /// Decoupled weight decay (arXiv 1711.05101).
    AdamW,
    /// p -= lr * g, with decoupled weight decay. For tests: it does not hide the gradient's scale.
    Sgd,
}

/// The update rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerConfig {
    /// Default `AdamW`.
    pub kind: OptimizerKind,
    /// Peak learning rate. (0, 10], default 6e-4.
    pub lr: f32,
    /// [0, 1), default 0.9.
    pub beta1: f32,
    /// [0, 1), default 0.95.
    pub beta2: f32,
    /// (0, 1], default 1e-8.
    pub eps: f32,
    /// On matrices only. [0, 10], default 0.1.
    pub weight_decay: f32,
    /// Global gradient norm above which gradients are scaled down; `None`: never. (0, 1e9], default 1.0.
    pub clip: Option<f32>,
}

/// Linear warm-up, then the kind's curve.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScheduleConfig {
    /// Steps from 0 to the peak; at most `decay_steps`. Default 0.
    pub warmup_steps: u64,
    /// Step at which the minimum is reached; may exceed `train.steps`. Default `train.steps`.
    pub decay_steps: u64,
    /// Default `Cosine`.
    pub kind: ScheduleKind,
    /// [0, lr], default lr / 10 (of the decimal number: 6e-4 gives 6e-5).
    pub min_lr: f32,
}

/// What follows the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum ScheduleKind {
    /// Cosine to `min_lr`.
    Cosine,
    /// The peak throughout.
    Constant,
    /// A straight line to `min_lr`.
    Linear,
    /// Warm-up, stable, decay: the peak, and then a cosine to `min_lr`.
    Wsd {
        /// Last step at the peak; from `warmup_steps` to `decay_steps`. Default 9/10 of `decay_steps`.
        stable_until: u64,
    },
    /// The peak times the root of `warmup_steps` / step, never below `min_lr`.
    InverseSqrt,
}

/// Batch sizes in samples of `seq_len` tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchConfig {
    /// Per rank and pass. 1..=2^31, default 1.
    pub micro: usize,
    /// Per optimizer step, over all ranks; a multiple of micro x data, which is the default.
    pub global: usize,
}

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

impl TrainConfig {
    /// Whether the run leaves checkpoints.
    pub const fn saves(&self) -> bool {
        self.checkpoint_every > 0
            || self.checkpoint_minutes.is_some()
            || self.checkpoint_overhead.is_some()
    }
}

/// Length and rhythm of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainConfig {
    /// Instead of `steps`, until the data is read.
    pub epochs: Option<f32>,
    /// Optimizer steps. 1..=10^12, as every number of steps.
    pub steps: u64,
    /// Steps between evaluations; 0: only after the last. Default 0.
    pub eval_every: u64,
    /// Most global batches of an evaluation, also of the last one; 0: all. Default None: 8 between steps, and 600 for the
    /// last one, which is all of a small held-out part.
    pub eval_batches: Option<usize>,
    /// Whether steps and evaluations also go to event files for TensorBoard. Default false.
    pub tensorboard: bool,
    /// Steps between checkpoints; 0: not by steps. A run that saves any also saves one when it ends. Default 0.
    pub checkpoint_every: u64,
    /// Also when training went on for so many minutes since the last one. Default None.
    pub checkpoint_minutes: Option<f32>,
    /// Largest share of its time, (0, 1], that training waits for checkpoints ten minutes apart; None: not by this. Default
    /// 0.01 where neither of the two above is given. With none of the three the run leaves no checkpoint.
    pub checkpoint_overhead: Option<f32>,
    /// Default `Auto`.
    pub checkpoint_writer: CheckpointWriter,
    /// The newest so many checkpoints are kept. 1..=1,000,000, default 2.
    pub checkpoint_keep: usize,
    /// Default `Complete`.
    pub weights: WeightsPolicy,
    /// So many skipped steps in a row end the run. Default: in as many a loss scale comes down from 2^24 to 1, and some more.
    pub stop_after_skipped: u64,
    /// Steps between those whose passes run twice and are compared; 0: never. Default 0.
    pub verify_every: u64,
    /// Number of times that the run is taken back to the newest checkpoint from before the skipped steps instead, and goes
    /// on from there with other samples. 0..=1,000,000, default 0.
    pub rollbacks: u64,
    /// Seed of weights, samples and dropout. Default 1337.
    pub seed: u64,
}

/// The text sampled after the last step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampleConfig {
    /// Start of the text, not empty. Default "\n".
    pub prompt: String,
    /// Tokens to draw; 0: none. 0..=1,000,000, default 0.
    pub tokens: usize,
    /// [0, 10]; 0: always the likeliest. Default 0.8.
    pub temperature: f32,
}
