//! Lays out every byte of a rank, once and before the run. The layout is the same for all ranks.

use crate::LocalMachine;
use crate::attention::library_scratch;
use crate::batches::BatchLayout;
use crate::decoder_parts::{LayerKinds, architecture, delta_net, experts, layer_kinds, tiers};
use crate::frozen_tensors::trained_of;
use crate::placement::kernel_threads;
pub use config::decimal;
use config::{
    self, Accumulate, Attention, BoxConfig, Config, DeviceConfig, Master, Moments, OptimizerConfig,
    OptimizerKind, Packing, ParameterPlace, Placement, Precision, Recompute, Transfer, UpdateMode,
};
use device::cpu::ScratchFloats;
use device::{Arena, Dtype, Group, Plan, Tensor, cuda};
use offload::{
    BucketSharing, GradAccumulation, LossScale, OptimizerLayout, OptimizerSpec, Rule, SegmentSpec,
    Storage, chunk_elements,
};
use std::sync::Arc;
use tensor_parallel::{
    CheckpointHome, Decoder, DecoderShape, QkNorm, Ring, SegmentRole, head_rows,
};
use topology::HostBytes;

/// Layout of a rank: model, optimizer, batches, and the memory of every tensor.
#[derive(Clone, Debug)]
pub struct RankLayout {
    /// Memory plan with every tensor by name.
    pub plan: Arc<Plan>,
    /// Tensor handles of the model.
    pub decoder: Decoder,
    /// Tensor handles of the optimizer.
    pub optimizer: Arc<OptimizerLayout>,
    /// Tensor handles of the batches.
    pub batches: BatchLayout,
    /// Sums of losses on the device and on the host, F64 (micro-batches + 1). The last sum is for
    /// evaluations.
    pub losses: [Tensor; 2],
    /// Loads of the experts in a step on the host, as
    /// [`Decoder::expert_loads`](tensor_parallel::Decoder::expert_loads), if the model has experts.
    pub expert_loads: Option<Tensor>,
    /// Barrier of the ranks outside of a step: F64 (1) on the host.
    pub barrier: Tensor,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// Way to sum the gradients of the micro-batches.
    pub accumulation: GradAccumulation,
    /// Scratch memory of the kernels.
    pub scratch: KernelScratch,
    /// Machine of this layout.
    pub machine: LocalMachine,
}

impl RankLayout {
    /// Bytes of host memory that the plan needs for a rank: staging lies next to its GPU, and all
    /// other memory lies next to its cores. The memory of virtual GPUs is host memory too.
    pub fn host_bytes(&self, config: &Config) -> HostBytes {
        let pinned = self.plan.entries().iter().filter(|e| e.arena == Arena::Pinned);
        let staging: u64 =
            pinned.filter(|e| e.is_staging()).map(|e| e.range.end - e.range.start).sum();
        let is_virtual = match &config.device {
            DeviceConfig::Cpu { .. } => true,
            DeviceConfig::Sim { box_, .. } => box_.measured.is_some(),
            DeviceConfig::Cuda => false,
        };
        let gpu = if is_virtual { self.plan.bytes(Arena::Device) } else { 0 };
        HostBytes { staging, states: self.plan.bytes(Arena::Pinned) - staging + gpu }
    }
}

/// Scratch memory of kernels, besides their operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelScratch {
    /// Numbers of scratch elements.
    pub floats: ScratchFloats,
    /// Number of kernel threads of a rank; 0 on real GPUs.
    pub threads: usize,
}

/// Shapes of the model under a config.
pub fn shape(config: &Config) -> DecoderShape {
    let whole = shape_of_all(config);
    DecoderShape { trained: trained_of(&whole, config), ..whole }
}

/// Shapes of the model under a config, if all parameters are trained.
pub(crate) fn shape_of_all(config: &Config) -> DecoderShape {
    let (m, dtype) = (&config.model, dtype(config.precision));
    let LayerKinds { kinds, layer_kinds } = layer_kinds(m, m.seq_len);
    DecoderShape {
        architecture: architecture(m, dtype),
        layers: m.layers,
        kinds,
        layer_kinds,
        hidden: m.hidden,
        heads: m.heads,
        kv_heads: m.kv_heads,
        head_dim: m.head_dim,
        seq_len: m.seq_len,
        vocab: m.vocab,
        ffn_hidden: m.ffn_hidden,
        experts: experts(m),
        delta: delta_net(m),
        micro_batch: config.batch.micro,
        tp_size: config.parallel.tensor,
        sequence: config.parallel.sequence && config.parallel.tensor > 1,
        recompute: match config.recompute {
            Recompute::None => tensor_parallel::Recompute::None,
            Recompute::Selective => tensor_parallel::Recompute::Selective,
            Recompute::Block => tensor_parallel::Recompute::Block,
        },
        tiers: tiers(config.activations),
        partition_checkpoints: config.partition_checkpoints,
        checkpoint_home: match (config.host_checkpoints, config.offload.transfer) {
            (false, _) => CheckpointHome::Device,
            (true, Transfer::Streamed) => CheckpointHome::Host,
            (true, Transfer::Blocking) => CheckpointHome::HostBlocking,
        },
        checkpoint_slots: vertical_width(config),
        ring: Ring::NONE,
        head_rows: head_rows(m.vocab),
        dtype,
        fp8: config.precision == Precision::Fp8,
        partial_dtype: if config.parallel.reduce_fp32 { Dtype::F32 } else { dtype },
        dropout: m.dropout,
        init_std: f64::from(m.init_std),
        trained: Default::default(),
    }
}

/// Storage type of a precision.
pub const fn dtype(precision: Precision) -> Dtype {
    match precision {
        Precision::Fp16 => Dtype::F16,
        Precision::Bf16 | Precision::Fp8 => Dtype::Bf16,
        Precision::Fp32 => Dtype::F32,
    }
}

/// Scratch memory of the cpu backend's kernels; empty on other devices. Each rank needs `host`
/// bytes of host memory.
fn kernel_scratch(config: &Config, machine: &LocalMachine, host: HostBytes) -> KernelScratch {
    let threads = match &config.device {
        DeviceConfig::Cpu { threads, .. } => {
            threads.unwrap_or_else(|| machine.virtual_threads(config, host))
        }
        DeviceConfig::Sim { box_, .. } => match &box_.measured {
            Some(measured) => kernel_threads(measured.cores, config.world_size(), None),
            None => return KernelScratch::default(),
        },
        DeviceConfig::Cuda => return KernelScratch::default(),
    };
    let floats = scratch_floats(&shape(config));
    KernelScratch { floats, threads }
}

/// Numbers of scratch elements that the cpu backend's kernels need.
pub fn scratch_floats(shape: &DecoderShape) -> ScratchFloats {
    let floats =
        ScratchFloats::new(shape.seq_len, shape.head_dim, shape.hidden, shape.widest_sum());
    // The sums of all ranks' channels, so that their order does not depend on the number of ranks.
    shape.delta.map_or(floats, |delta| floats.with_delta(delta.heads(1, shape.seq_len), delta.taps))
}

/// Bytes of each GPU that `plan` needs. On real GPUs this includes the scratch of kernels and
/// matmuls, and on simulated ones that of a library for attention.
pub fn device_bytes(config: &Config, plan: &Plan) -> u64 {
    match config.device {
        DeviceConfig::Cuda => cuda::device_bytes(plan, op_scratch(config)),
        DeviceConfig::Sim { .. } => {
            plan.bytes(Arena::Device) + library_scratch(config.attention, &shape(config))
        }
        DeviceConfig::Cpu { .. } => plan.bytes(Arena::Device),
    }
}

/// Largest scratch memory of an op of `config` on a GPU, in bytes, besides its operands.
pub fn op_scratch(config: &Config) -> u64 {
    shape_scratch(&shape(config), config.attention)
}

/// Largest scratch memory of an op of a model of `shape`, in bytes. The backward pass of attention
/// needs one number for each row of each head. The backward pass of a norm needs sums for the
/// gradients of its gains and biases. A balance loss needs sums of the experts' shares. A gated delta
/// net needs gradients of its states. cuDNN's attention needs a matrix of weights for each head.
pub fn shape_scratch(shape: &DecoderShape, attention: Attention) -> u64 {
    let rows = (shape.tokens() * shape.heads / shape.tp_size) as u64 * Dtype::F32.bytes();
    let gains = match shape.architecture.qk_norm {
        None => 0,
        Some(QkNorm::Heads) => cuda::gains_scratch(shape.head_dim),
        Some(QkNorm::Width) => {
            let heads = shape.heads / shape.tp_size + shape.kv_heads.div_ceil(shape.tp_size);
            cuda::norm_scratch((shape.tokens(), heads * shape.head_dim), false)
        }
    };
    let norms = cuda::norm_scratch((shape.rows(), shape.hidden), !shape.architecture.rms_norm);
    let balanced = shape.experts.filter(|experts| experts.balance.is_some());
    let shares = balanced.map_or(0, |experts| cuda::shares_scratch(shape.tokens(), experts.count));
    let delta = shape.delta.map_or(0, |delta| {
        cuda::delta_scratch(shape.tokens(), delta.heads(shape.tp_size, shape.seq_len), delta.taps)
    });
    rows.max(gains).max(norms).max(shares).max(delta).max(library_scratch(attention, shape))
}

/// Most bytes that a GPU of `config` can hold; `None` if the real GPUs cannot be examined.
pub fn device_limit(config: &Config, layout: &RankLayout) -> Option<u64> {
    match &config.device {
        DeviceConfig::Cpu { memory, .. } => Some(*memory),
        DeviceConfig::Sim { box_, .. } => {
            Some(box_.gpu_memory.saturating_sub(reserved_bytes(box_)))
        }
        DeviceConfig::Cuda => {
            let budget = layout.machine.memory_budget(config, &layout.plan);
            budget.ok().map(|room| room.limit)
        }
    }
}

/// Number of micro-batches that go through each block together in the first forward pass.
pub fn vertical_width(config: &Config) -> usize {
    config.offload.first_forward.min(micro_batches(config))
}

/// Number of micro-batches of a step.
pub const fn micro_batches(config: &Config) -> usize {
    config.batch.global / (config.batch.micro * config.parallel.data)
}

/// Update mode of a run. With the optimizer on the device the update runs directly after the
/// decision, so `Delayed` and `Speculative` become `Overlapped`. An unresolved `Auto` also becomes
/// `Overlapped`, which needs no more memory.
pub fn update_mode(config: &Config) -> UpdateMode {
    match (config.offload.optimizer, config.offload.update) {
        (_, UpdateMode::Auto) => UpdateMode::Overlapped,
        (Placement::Device, UpdateMode::Delayed { .. } | UpdateMode::Speculative) => {
            UpdateMode::Overlapped
        }
        (_, update) => update,
    }
}

/// Share of the parameters after the embedding that are updated before the decision.
pub fn speculated_share(config: &Config) -> f32 {
    match update_mode(config) {
        UpdateMode::Speculative => config.offload.speculated_fraction.share(),
        UpdateMode::Serial | UpdateMode::Overlapped | UpdateMode::Delayed { .. } => 0.0,
        UpdateMode::Auto => unreachable!("`update_mode` puts Overlapped in its place"),
    }
}

/// Bytes of a described GPU that a CUDA context and NCCL use before the first tensor; 0 on a
/// virtual GPU.
pub const fn reserved_bytes(described: &BoxConfig) -> u64 {
    if described.measured.is_some() { 0 } else { 3 << 29 }
}

/// Lays out all memory of a rank on `machine`. `accumulate: Auto` sums on the device if the plan
/// then fits the device's limit.
///
/// The calling thread must not be bound to cores, because this function counts kernel threads. The
/// ranks' memory can decide on how many sockets they are, and so how many threads they have. If
/// this changes the number of threads, everything is laid out again.
pub fn lay_out(config: &Config, machine: &LocalMachine) -> RankLayout {
    let near = kernel_scratch(config, machine, HostBytes::default());
    let layout = LayoutBuilder { config, machine, scratch: near }.with_fitting_threads();
    let scratch = kernel_scratch(config, machine, layout.host_bytes(config));
    if scratch.threads == near.threads {
        layout
    } else {
        LayoutBuilder { config, machine, scratch }.with_fitting_threads()
    }
}

fn fits(config: &Config, layout: &RankLayout) -> bool {
    let limit = device_limit(config, layout);
    limit.is_some_and(|limit| device_bytes(config, &layout.plan) <= limit)
}

/// Inputs of a layout.
#[derive(Clone, Copy)]
pub(crate) struct LayoutBuilder<'a> {
    config: &'a Config,
    machine: &'a LocalMachine,
    scratch: KernelScratch,
}

impl<'a> LayoutBuilder<'a> {
    /// Returns a builder with the least number of kernel threads that a layout may have.
    pub(crate) fn of_least_threads(config: &'a Config, machine: &'a LocalMachine) -> Self {
        let threads = match &config.device {
            DeviceConfig::Cpu { threads, .. } => threads.unwrap_or(1),
            DeviceConfig::Sim { box_, .. } => usize::from(box_.measured.is_some()),
            DeviceConfig::Cuda => 0,
        };
        let floats = if threads > 0 { scratch_floats(&shape(config)) } else { Default::default() };
        Self { config, machine, scratch: KernelScratch { floats, threads } }
    }

    /// Builds a layout with fewer kernel threads if their scratch memory does not fit into the GPU.
    /// A machine with many cores therefore trains what a machine with few cores trains. A number of
    /// threads in the config stays unchanged.
    fn with_fitting_threads(mut self) -> RankLayout {
        let config = self.config;
        let is_named = matches!(config.device, DeviceConfig::Cpu { threads: Some(_), .. });
        loop {
            let layout = match config.offload.parameters {
                ParameterPlace::Device => self.with_accumulation(Ring::NONE),
                ParameterPlace::Host => self.with_ring(),
            };
            if is_named || self.scratch.threads < 2 {
                return layout;
            }
            let limit = device_limit(config, &layout).unwrap_or(u64::MAX);
            let over = device_bytes(config, &layout.plan).saturating_sub(limit);
            if over == 0 {
                return layout;
            }
            let KernelScratch { floats, threads } = &mut self.scratch;
            let each = floats.bytes(2) - floats.bytes(1);
            *threads = threads.saturating_sub(over.div_ceil(each) as usize).max(1);
        }
    }

    /// Builds a layout with parameters on the host. The ring holds as many blocks as fit, at most
    /// three, and as many resident blocks as fit stay on the GPU. Numbers in the config replace
    /// both.
    fn with_ring(self) -> RankLayout {
        let config = self.config;
        let with = |buffers, resident| self.with_accumulation(Ring { buffers, resident });
        let resident_blocks = config.offload.resident_blocks;
        let least = resident_blocks.unwrap_or(0);
        let mut layout = with(config.offload.ring.unwrap_or(3), least);
        if config.offload.ring.is_none() && !fits(config, &layout) {
            layout = with(2, least);
        }
        let slots = layout.decoder.shape().ring.buffers;
        let limit = device_limit(config, &layout).filter(|_| resident_blocks.is_none());
        let Some(limit) = limit else { return layout };
        let left = limit.saturating_sub(device_bytes(config, &layout.plan));
        let block = |layer| {
            layout.decoder.params(layout.decoder.segment(SegmentRole::Block(layer))).bytes()
        };
        // Blocks with experts are longer than those with one MLP.
        let Some(least) = (0..config.model.layers).map(block).min() else { return layout };
        let most = config.model.layers.min((left / least) as usize);
        let fitting = (1..=most).rev().map(|resident| with(slots, resident));
        let mut fitting = fitting.filter(|more| fits(config, more));
        fitting.next().unwrap_or(layout)
    }

    /// Builds a layout that sums micro-batches in the first way of
    /// [`accumulations`](Self::accumulations) if it fits, else in the second way.
    fn with_accumulation(self, ring: Ring) -> RankLayout {
        match self.accumulations(ring)[..] {
            [first, otherwise] => {
                let layout = self.plan_layout(first, ring);
                if fits(self.config, &layout) { layout } else { self.plan_layout(otherwise, ring) }
            }
            [sum] => self.plan_layout(sum, ring),
            _ => unreachable!("sums are in one place, or in either of two"),
        }
    }

    /// Ways to sum micro-batches that the config allows, the preferred way first.
    pub(crate) fn accumulations(self, ring: Ring) -> Vec<GradAccumulation> {
        let (config, offload) = (self.config, &self.config.offload);
        let micro_batches = micro_batches(config);
        let together = ring != Ring::NONE && vertical_width(config) == micro_batches;
        vec![match offload.accumulate {
            _ if micro_batches == 1 => GradAccumulation::None,
            Accumulate::Auto | Accumulate::Device if together => GradAccumulation::Shared,
            _ if offload.optimizer == Placement::Device => GradAccumulation::Device,
            _ if offload.transfer == Transfer::Blocking => GradAccumulation::Host,
            Accumulate::Device => GradAccumulation::Device,
            Accumulate::Host => GradAccumulation::Host,
            Accumulate::Auto => return vec![GradAccumulation::Device, GradAccumulation::Host],
        }]
    }

    pub(crate) fn plan_layout(self, sum: GradAccumulation, ring: Ring) -> RankLayout {
        let Self { config, machine, scratch } = self;
        let micro_batches = micro_batches(config);
        let (shape, mut plan) = (DecoderShape { ring, ..shape(config) }, Plan::default());
        let sets = if ring == Ring::NONE { 1 } else { vertical_width(config) };
        let chunk = chunk_elements(Decoder::longest_segment(&shape));
        let decoder = Decoder::plan(&mut plan, &shape, chunk * config.parallel.data);
        let spec_of = |part| {
            let segment = decoder.segment(part);
            let layout = &decoder.segments()[segment];
            SegmentSpec {
                name: layout.name.clone(),
                params: decoder.params(segment),
                trained: layout.padded,
                len: layout.len,
                decayed: layout.decayed,
                bucket: match part {
                    // The output layer begins this gradient, and the embedding completes it much
                    // later.
                    SegmentRole::Embedding if config.model.tied && sets > 1 => {
                        BucketSharing::PerSlot(sets)
                    }
                    _ if config.offload.keep_gradients => BucketSharing::Own,
                    SegmentRole::Block(_) => BucketSharing::Alternating,
                    SegmentRole::FinalNorm => BucketSharing::Own,
                    // Between two uses of this bucket all blocks go backward, or forward.
                    SegmentRole::Embedding | SegmentRole::Head => BucketSharing::Shared,
                },
                param_buffer: decoder.param_buffer(segment),
            }
        };
        let segments: Vec<SegmentSpec> = decoder.segment_roles().map(spec_of).collect();
        let layout =
            OptimizerLayout::plan(&mut plan, &spec(config, micro_batches, sum), chunk, &segments);
        let packs = config.data.packing == Packing::Documents;
        let batches = BatchLayout::plan(&mut plan, shape.tokens(), packs, vertical_width(config));
        let mut small = |arena, name, len| {
            plan.tensor((arena, "batches and losses"), name, Dtype::F64, (1, len))
        };
        let losses = [
            small(Arena::Device, "losses", micro_batches + 1),
            small(Arena::Pinned, "losses_host", micro_batches + 1),
        ];
        let meeting = small(Arena::Pinned, "meeting", 1);
        let expert_loads = decoder.expert_loads().map(|loads| {
            let at = (Arena::Pinned, "batches and losses");
            plan.tensor(at, "expert_load_host", Dtype::F64, loads.shape())
        });
        if scratch.threads > 0 {
            let shape = (1, scratch.floats.bytes(scratch.threads).div_ceil(4) as usize);
            plan.tensor((Arena::Device, "kernel scratch"), "kernel scratch", Dtype::F32, shape);
        }
        let (plan, layout) = (Arc::new(plan), Arc::new(layout));
        RankLayout {
            plan,
            decoder,
            optimizer: layout,
            batches,
            losses,
            expert_loads,
            barrier: meeting,
            micro_batches,
            accumulation: sum,
            scratch,
            machine: machine.clone(),
        }
    }
}

fn spec(config: &Config, micro_batches: usize, sum: GradAccumulation) -> OptimizerSpec {
    let (offload, scale) = (&config.offload, &config.loss_scale);
    OptimizerSpec {
        rule: rule(&config.optimizer),
        device_fraction: match offload.optimizer {
            Placement::Host => 0.0,
            Placement::Device => 1.0,
            Placement::Split { device_fraction } => f64::from(device_fraction),
        },
        delayed: matches!(update_mode(config), UpdateMode::Delayed { .. }),
        speculative_fraction: f64::from(speculated_share(config)),
        accumulation: sum,
        transfer: match offload.transfer {
            Transfer::Streamed => offload::Transfer::Streamed,
            Transfer::Blocking => offload::Transfer::Blocking,
        },
        storage: Storage {
            moments: match offload.moments {
                Moments::Fp32 => Dtype::F32,
                Moments::Bf16 => Dtype::Bf16,
            },
            split_master: offload.master == Master::Split,
        },
        micro_batches,
        dp_size: config.parallel.data,
        reduce_fp32: config.parallel.reduce_fp32,
        norm_group: Group::Tp,
        clip: config.optimizer.clip.map(f64::from),
        loss_scale: (config.precision == Precision::Fp16).then(|| LossScale {
            initial: f64::from(scale.initial),
            window: scale.window,
            hysteresis: scale.hysteresis,
            floor: f64::from(scale.floor),
        }),
        bucket_elements: offload.bucket_elements,
        tile_elements: offload.tile_elements,
    }
}

const fn rule(o: &OptimizerConfig) -> Rule {
    let OptimizerConfig { beta1, beta2, eps, weight_decay, .. } = *o;
    match o.kind {
        OptimizerKind::AdamW => Rule::AdamW { beta1, beta2, eps, weight_decay },
        OptimizerKind::Sgd => Rule::Sgd { weight_decay },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Scratch on a rank of TP 2: two samples of 200 tokens, two heads of queries with 64 elements.
    #[test]
    fn scratch_has_room_for_the_weights_of_cudnn() {
        const CONFIG: &str = "(device: Cuda, model: (family: Llama, layers: 1, hidden: 256, heads: 4, \
            seq_len: 200), parallel: (tensor: 2), precision: Bf16, batch: (micro: 2, global: 2), \
            train: (steps: 1))";
        let bytes = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let loaded = config::load_str(CONFIG, "test.ron", Path::new("."), &sets);
            op_scratch(&loaded.unwrap_or_else(|e| panic!("{e}")).config)
        };
        // Matrices of 256 x 256 weights, a number for each row, and a page.
        let weights = 4 * (256 * 256 * 2 + 256 * 4) + 4096;
        assert_eq!(bytes(&["attention=Cudnn"]), weights);
        // Gradients of keys and values for each head of queries.
        let shared = 2 * 4 * 256 * 64 * 2;
        assert_eq!(bytes(&["attention=Cudnn", "model.kv_heads=2"]), weights + shared);
        assert!(bytes(&[]) < weights, "{} bytes", bytes(&[]));
    }

    /// Sums of the shares of 256 experts over 16 tokens: one f64 for each expert and 8 tokens.
    #[test]
    fn scratch_has_room_for_the_shares_of_a_balance_loss() {
        const CONFIG: &str = "(device: Cuda, model: (family: Llama, layers: 1, hidden: 16, heads: 1, \
            seq_len: 16, experts: (count: 256, per_token: 1, ffn_hidden: 16)), train: (steps: 1))";
        let bytes = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let loaded = config::load_str(CONFIG, "test.ron", Path::new("."), &sets);
            op_scratch(&loaded.unwrap_or_else(|e| panic!("{e}")).config)
        };
        let shares = 256 * 2 * 8;
        assert_eq!(bytes(&["model.experts.balance=Megatron(factor: 0.01)"]), shares);
        assert!(bytes(&[]) < shares, "{} bytes", bytes(&[]));
    }

    /// Source: the sizes that Qwen/Qwen3-30B-A3B publishes.
    #[test]
    fn a_model_with_experts_has_the_parameters_of_its_publisher() {
        const CONFIG: &str = "(model: (family: Llama, layers: 48, hidden: 2048, heads: 32, kv_heads: 4, \
            head_dim: 128, seq_len: 4096, vocab: 151936, qk_norm: true, \
            experts: (count: 128, per_token: 8, ffn_hidden: 768)), train: (steps: 1))";
        let shape_of = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let loaded = config::load_str(CONFIG, "test.ron", Path::new("."), &sets);
            shape(&loaded.unwrap_or_else(|e| panic!("{e}")).config)
        };
        let whole = shape_of(&[]);
        assert_eq!(whole.parameters(), 30_532_122_624);
        assert_eq!(whole.active_parameters(), 3_353_032_704);
        // 6 FLOPs for each active parameter of a matmul: all but the norms and the token table.
        let attention = 6.0 * 4096.0 * (32.0 * 128.0) * 48.0;
        let norms = (48 * (2 * 2048 + 2 * 128) + 2048) as u64;
        let matmuls = whole.active_parameters() - norms - 151_936 * 2048;
        let expected = 6.0 * matmuls as f64 + attention;
        let flops = whole.model_flops_per_token();
        assert!((flops / expected - 1.0).abs() < 1e-3, "{flops:e} {expected:e}");
        // One MLP of 2048 x 8/3 channels, up to a multiple of 64, in the place of experts.
        let dense = shape_of(&["model.experts.dense_layers=[0]"]);
        let experts = 128 * 3 * 2048 * 768 + 128 * 2048;
        assert_eq!(whole.parameters() - dense.parameters(), experts - 3 * 2048 * 5504);
        let longest = [&whole, &dense].map(Decoder::longest_segment);
        assert_eq!(longest[0], longest[1]);
    }

    /// Lays out the quickstart config on one rank, and on its own number of ranks.
    #[test]
    fn the_quick_start_fits_on_machines_of_any_number_of_cores() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = folder.join("../../configs/quickstart.ron");
        let machine = LocalMachine::default();
        for sets in [&[][..], &["parallel.tensor=1", "parallel.data=1", "device.count=1"]] {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let config = config::load(&path, &sets).unwrap().config;
            let of = |threads| {
                let scratch = KernelScratch {
                    threads,
                    ..kernel_scratch(&config, &machine, HostBytes::default())
                };
                let builder = LayoutBuilder { config: &config, machine: &machine, scratch };
                let layout = builder.with_fitting_threads();
                let bytes = device_bytes(&config, &layout.plan);
                let limit = device_limit(&config, &layout).unwrap();
                assert!(bytes <= limit, "{threads} threads: {bytes} of {limit}");
                (layout.scratch.threads, limit - bytes)
            };
            assert_eq!([1, 2, 64].map(|threads| of(threads).0), [1, 2, 64]);
            let [(few, _), (most, left), (more, _)] = [128, 256, 4096].map(of);
            // The layout uses all room on the GPU, and keeps a number of threads of the config.
            let each = kernel_scratch(&config, &machine, HostBytes::default()).floats;
            let each = each.bytes(2) - each.bytes(1);
            assert!(few <= most && most == more && left < 2 * each, "{few} {most} {more} {left}");
            assert!((64..256).contains(&most), "{most}");
            let with_named_threads = [sets.clone(), vec!["device.threads=256".into()]].concat();
            let with_named_threads =
                lay_out(&config::load(&path, &with_named_threads).unwrap().config, &machine);
            assert_eq!(with_named_threads.scratch.threads, 256);
        }
    }
}
