//! Every key: its type, its range and its default.

use super::fields::Named;
use super::machine::{self, Told};
use super::section::{Or, Section};
use super::value::Interval;
use super::*;

/// Steps of any kind: 10^12.
const STEPS: u64 = 1_000_000_000_000;

/// Samples of any kind: 2^31.
const SAMPLES: u64 = 1 << 31;

impl Named for Precision {
    const ALL: &'static [(&'static str, Self)] =
        &[("Fp16", Self::Fp16), ("Bf16", Self::Bf16), ("Fp32", Self::Fp32)];
}

impl Named for Transfer {
    const ALL: &'static [(&'static str, Self)] =
        &[("Streamed", Self::Streamed), ("Blocking", Self::Blocking)];
}

impl Named for Moments {
    const ALL: &'static [(&'static str, Self)] = &[("Fp32", Self::Fp32), ("Bf16", Self::Bf16)];
}

impl Named for Master {
    const ALL: &'static [(&'static str, Self)] = &[("Fp32", Self::Fp32), ("Split", Self::Split)];
}

impl Named for Accumulate {
    const ALL: &'static [(&'static str, Self)] =
        &[("Auto", Self::Auto), ("Device", Self::Device), ("Host", Self::Host)];
}

impl Named for Sockets {
    const ALL: &'static [(&'static str, Self)] =
        &[("Auto", Self::Auto), ("Near", Self::Near), ("All", Self::All)];
}

impl Named for OptimizerKind {
    const ALL: &'static [(&'static str, Self)] = &[("AdamW", Self::AdamW), ("Sgd", Self::Sgd)];
}

impl Named for ScheduleKind {
    const ALL: &'static [(&'static str, Self)] =
        &[("Cosine", Self::Cosine), ("Constant", Self::Constant)];
}

impl Named for Recompute {
    const ALL: &'static [(&'static str, Self)] = &[("None", Self::None), ("Block", Self::Block)];
}

impl Named for CheckpointWriter {
    const ALL: &'static [(&'static str, Self)] =
        &[("Auto", Self::Auto), ("Background", Self::Background), ("Foreground", Self::Foreground)];
}

impl Named for WeightsPolicy {
    const ALL: &'static [(&'static str, Self)] =
        &[("Complete", Self::Complete), ("Always", Self::Always), ("Never", Self::Never)];
}

impl Named for DataFormat {
    const ALL: &'static [(&'static str, Self)] =
        &[("Auto", Self::Auto), ("Bytes", Self::Bytes), ("U16", Self::U16), ("U32", Self::U32)];
}

/// The keys at the top, in the order in which people want to see them.
const ORDER: [&str; 16] = [
    "name",
    "device",
    "model",
    "parallel",
    "precision",
    "loss_scale",
    "offload",
    "optimizer",
    "schedule",
    "batch",
    "recompute",
    "partition_checkpoints",
    "host_checkpoints",
    "data",
    "train",
    "sample",
];

/// Where the dotted key `key` stands among the others.
pub(super) fn rank(key: &str) -> usize {
    let top = key.split('.').next().unwrap_or_default();
    ORDER.iter().position(|name| *name == top).unwrap_or(ORDER.len())
}

/// Reads a whole config. `stem` names a run that does not name itself.
pub(super) fn config(s: &mut Section<'_, '_>, stem: &str) -> Config {
    let name = s.text("name", Or::Derived(stem.into(), "the file's name", &[]), run_name);
    // Its default depends on the grid, so the grid is read first.
    let parallel = s.section("parallel", parallel);
    let device = device(s, &parallel);
    let model = s.section("model", model);
    let precision = s.named("precision", Precision::Bf16);
    let loss_scale = s.section("loss_scale", loss_scale);
    let offload = s.section("offload", offload);
    let optimizer = s.section("optimizer", optimizer);
    // The schedule is as long as the run unless it says otherwise.
    let train = s.section("train", |s| train(s, loss_scale.hysteresis));
    let schedule = s.section("schedule", |s| schedule(s, &optimizer, &train));
    let batch = s.section("batch", |s| batch(s, &parallel));
    let recompute = s.named("recompute", Recompute::None);
    let partition_checkpoints = s.flag("partition_checkpoints", false);
    let host_checkpoints = s.flag("host_checkpoints", false);
    let data = s.section("data", data);
    let sample = s.section("sample", sample);
    Config {
        name,
        device,
        model,
        parallel,
        precision,
        loss_scale,
        offload,
        optimizer,
        schedule,
        batch,
        recompute,
        partition_checkpoints,
        host_checkpoints,
        data,
        train,
        sample,
    }
}

/// Reads the description of a box.
pub(super) fn described_box(s: &mut Section<'_, '_>, stem: &str) -> BoxConfig {
    let name = s.text("name", Or::Derived(stem.into(), "the file's name", &[]), |_| Ok(()));
    let topology = s.path_or_none("topology");
    let machine = machine::read(s, topology.as_deref());
    let machines = s.uint("machines", 1..=1024, Or::Default(1));
    let or = Or::Required("gpus: 16");
    let told = Told { key: "gpus", what: "GPU", most: 4096, or, machines };
    let gpus = machine::number(s, told, machine.as_ref().map(|m| m.gpus.len()));
    let (or, what) = (Or::Default(1), "NUMA node");
    let told = Told { key: "numa_nodes", what, most: 1024, or, machines: 1 };
    let numa_nodes = machine::number(s, told, machine.as_ref().map(|m| m.numa_nodes.len()));
    let gpu_memory = s.bytes("gpu_memory", 1 << 50, Or::Required("gpu_memory: \"31.7GiB\""));
    let node_memory = s.bytes("node_memory", 1 << 50, Or::Required("node_memory: \"755GiB\""));
    BoxConfig {
        name,
        gpus,
        gpu_memory,
        numa_nodes,
        node_memory,
        topology,
        machine: machine.map(|machine| machine::with_node_memory(machine, node_memory)),
        machines,
        network_gb_per_s: rate(s, "network_gb_per_s"),
        gpu: s.section("gpu", |s| GpuConfig {
            gemm_tflops: rate(s, "gemm_tflops"),
            fp32_tflops: rate(s, "fp32_tflops"),
            memory_gb_per_s: rate(s, "memory_gb_per_s"),
            processors: s.uint("processors", 0..=100_000, Or::Default(0)),
            sm: s.uint("sm", 0..=200, Or::Default(0)),
            fused_attention: s.flag("fused_attention", false),
            as_of_2020: s.flag("as_of_2020", false),
            as_of_2020_without: facts(s),
        }),
        host: s.section("host", |s| HostConfig {
            node_gb_per_s: rate(s, "node_gb_per_s"),
            core_gb_per_s: rate(s, "core_gb_per_s"),
            cores: s.uint("cores", 0..=100_000, Or::Default(0)),
            link_gb_per_s: rate(s, "link_gb_per_s"),
        }),
        measured: s.section("measured", measured),
    }
}

/// What of 2020 is left out: `"pageable scores"`.
fn facts(s: &mut Section<'_, '_>) -> Vec<Fact> {
    let known = |text: &str| {
        let all = text.split_whitespace().all(|name| Fact::named(name).is_some());
        all.then_some(()).ok_or(
            "these are words of: scores heads small_kernels pageable one_copier adam_rate unscaling",
        )
    };
    let names = s.text("as_of_2020_without", Or::Default(String::new()), known);
    names.split_whitespace().filter_map(Fact::named).collect()
}

/// A rate that may be unknown.
fn rate(s: &mut Section<'_, '_>, key: &'static str) -> f32 {
    s.float(key, Interval::closed(0.0, 1e9), Or::Default(0.0))
}

/// Ops of virtual GPUs whose speed `bench --save-box` measures.
pub(crate) const MEASURED_OPS: [&str; 23] = [
    "layer_norm",
    "layer_norm_backward",
    "gelu",
    "gelu_backward",
    "bias_dropout_add",
    "dropout",
    "column_sum",
    "row_max",
    "cross_entropy_stats",
    "cross_entropy_backward",
    "embedding",
    "embedding_backward",
    "add_positions",
    "positions_backward",
    "add",
    "cast",
    "copy",
    "update",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "accumulate",
    "adam_tile",
];

fn measured(s: &mut Section<'_, '_>) -> Option<MeasuredConfig> {
    let cores = s.uint("cores", 0..=100_000, Or::Default(0));
    let pair = |s: &mut Section<'_, '_>, keys: [&'static str; 2]| keys.map(|key| rate(s, key));
    let gemm = [
        pair(s, ["gemm_gflops_16", "gemm_gb_per_s_16"]),
        pair(s, ["gemm_gflops_32", "gemm_gb_per_s_32"]),
    ];
    let attention = [
        pair(s, ["attention_gflops", "attention_gb_per_s"]),
        pair(s, ["attention_backward_gflops", "attention_backward_gb_per_s"]),
    ];
    let ops = |s: &mut Section<'_, '_>| MEASURED_OPS.map(|name| rate(s, name));
    let of_16 = s.section("gb_per_s_16", ops);
    let of_32 = s.section("gb_per_s_32", ops);
    let measured = MeasuredConfig {
        cores,
        thread_us: rate(s, "thread_us"),
        thread_share: s.float("thread_share", Interval::closed(0.0, 1.0), Or::Default(1.0)),
        gemm,
        attention,
        ops_gb_per_s: MEASURED_OPS
            .into_iter()
            .zip(of_16.into_iter().zip(of_32).map(|(a, b)| [a, b]))
            .collect(),
        other_gb_per_s: rate(s, "other_gb_per_s"),
        op_us: rate(s, "op_us"),
        meeting_us: rate(s, "meeting_us"),
    };
    (cores > 0).then_some(measured)
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

fn device(s: &mut Section<'_, '_>, parallel: &ParallelConfig) -> DeviceConfig {
    let examples = ["Cpu(count: 4, memory: \"512MiB\")", "Cuda", "Sim(box: \"boxes/dgx2.ron\")"];
    let world = parallel.tensor * parallel.data;
    let or = Or::Derived(0, "virtual GPUs on this machine", &[]);
    s.choice("device", &examples, or, |index, s| match index {
        0 => DeviceConfig::Cpu {
            count: s.uint(
                "count",
                1..=4096 * 4096,
                Or::Derived(world, "tensor x data", &["parallel.tensor", "parallel.data"]),
            ),
            memory: s.bytes("memory", 1 << 60, Or::Default(2 << 30)),
            threads: s.uint_or_none("threads", 1..=4096),
        },
        1 => DeviceConfig::Cuda,
        _ => {
            let path = s.path("box", Or::Required("box: \"boxes/dgx2.ron\""));
            let box_ = load::box_of(s.reader, "device.box", &path);
            DeviceConfig::Sim { box_: Box::new(box_), path: path.into() }
        }
    })
}

fn model(s: &mut Section<'_, '_>) -> ModelConfig {
    let layers = s.uint("layers", 1..=10_000, Or::Required("layers: 12"));
    let hidden = s.uint("hidden", 1..=1_000_000, Or::Required("hidden: 768"));
    ModelConfig {
        layers,
        hidden,
        heads: s.uint("heads", 1..=65_536, Or::Required("heads: 12")),
        seq_len: s.uint("seq_len", 1..=16_777_216, Or::Required("seq_len: 1024")),
        vocab: s.uint("vocab", 2..=16_777_216, Or::Default(256)),
        ffn_hidden: s.uint(
            "ffn_hidden",
            1..=4_000_000,
            Or::Derived(4 * hidden, "4 x hidden", &["model.hidden"]),
        ),
        dropout: s.float("dropout", Interval::below(0.0, 1.0), Or::Default(0.0)),
        init_std: s.float("init_std", Interval::closed(0.0, 10.0), Or::Default(0.02)),
    }
}

fn parallel(s: &mut Section<'_, '_>) -> ParallelConfig {
    ParallelConfig {
        tensor: s.uint("tensor", 1..=4096, Or::Default(1)),
        data: s.uint("data", 1..=4096, Or::Default(1)),
        sequence: s.flag("sequence", false),
        reduce_fp32: s.flag("reduce_fp32", false),
    }
}

fn loss_scale(s: &mut Section<'_, '_>) -> LossScaleConfig {
    let scale = Interval::above(0.0, 16_777_216.0);
    LossScaleConfig {
        initial: s.float("initial", scale, Or::Default(65536.0)),
        window: s.uint("window", 1..=STEPS, Or::Default(1000)),
        hysteresis: s.uint("hysteresis", 1..=1000, Or::Default(2)),
        floor: s.float("floor", scale, Or::Default(1.0)),
    }
}

fn offload(s: &mut Section<'_, '_>) -> OffloadConfig {
    let elements = 1024..=1 << 40;
    OffloadConfig {
        optimizer: placement(s),
        update: update(s),
        transfer: s.named("transfer", Transfer::Streamed),
        accumulate: s.named("accumulate", Accumulate::Auto),
        moments: s.named("moments", Moments::Fp32),
        master: s.named("master", Master::Fp32),
        bucket_elements: s.uint("bucket_elements", elements.clone(), Or::Default(50_000_000)),
        tile_elements: s.uint("tile_elements", elements, Or::Default(1_048_576)),
        lookahead: s.uint("lookahead", 1..=64, Or::Default(1)),
        keep_gradients: s.flag("keep_gradients", false),
        first_forward: s.uint("first_forward", 1..=4096, Or::Default(1)),
        sockets: s.named("sockets", Sockets::Auto),
    }
}

fn placement(s: &mut Section<'_, '_>) -> Placement {
    let examples = ["Host", "Device", "Split(device_fraction: 0.2)"];
    s.choice("optimizer", &examples, Or::Default(0), |index, s| match index {
        0 => Placement::Host,
        1 => Placement::Device,
        _ => {
            let within = Interval::closed(0.0, 1.0);
            let or = Or::Required("device_fraction: 0.2");
            Placement::Split { device_fraction: s.float("device_fraction", within, or) }
        }
    })
}

fn update(s: &mut Section<'_, '_>) -> UpdateMode {
    let examples = ["Serial", "Overlapped", "Delayed(after_step: 40)"];
    s.choice("update", &examples, Or::Default(1), |index, s| match index {
        0 => UpdateMode::Serial,
        1 => UpdateMode::Overlapped,
        _ => {
            let or = Or::Required("after_step: 40");
            UpdateMode::Delayed { after_step: s.uint("after_step", 0..=STEPS, or) }
        }
    })
}

fn optimizer(s: &mut Section<'_, '_>) -> OptimizerConfig {
    OptimizerConfig {
        kind: s.named("kind", OptimizerKind::AdamW),
        lr: s.float("lr", Interval::above(0.0, 10.0), Or::Default(6e-4)),
        beta1: s.float("beta1", Interval::below(0.0, 1.0), Or::Default(0.9)),
        beta2: s.float("beta2", Interval::below(0.0, 1.0), Or::Default(0.95)),
        eps: s.float("eps", Interval::above(0.0, 1.0), Or::Default(1e-8)),
        weight_decay: s.float("weight_decay", Interval::closed(0.0, 10.0), Or::Default(0.1)),
        clip: s.float_or_none("clip", Interval::above(0.0, 1e9), Or::Default(Some(1.0))),
    }
}

fn schedule(s: &mut Section<'_, '_>, opt: &OptimizerConfig, train: &TrainConfig) -> ScheduleConfig {
    ScheduleConfig {
        kind: s.named("kind", ScheduleKind::Cosine),
        warmup_steps: s.uint("warmup_steps", 0..=STEPS, Or::Default(0)),
        decay_steps: s.uint(
            "decay_steps",
            1..=STEPS,
            Or::Derived(train.steps, "train.steps", &["train.steps"]),
        ),
        min_lr: s.float(
            "min_lr",
            Interval::closed(0.0, 10.0),
            Or::Derived(tenth(opt.lr), "lr / 10", &["optimizer.lr"]),
        ),
    }
}

/// A tenth of the number that was written, so that 6e-4 gives 6e-5 and not 6.0000002e-5.
fn tenth(rate: f32) -> f32 {
    rate.to_string().parse::<f64>().map_or(rate / 10.0, |exact| (exact / 10.0) as f32)
}

fn batch(s: &mut Section<'_, '_>, parallel: &ParallelConfig) -> BatchConfig {
    let micro = s.uint("micro", 1..=SAMPLES, Or::Default(1));
    let from = &["batch.micro", "parallel.data"];
    BatchConfig {
        micro,
        global: s.uint(
            "global",
            1..=SAMPLES,
            Or::Derived(micro * parallel.data, "micro x data", from),
        ),
    }
}

fn data(s: &mut Section<'_, '_>) -> DataConfig {
    DataConfig {
        train: s.path("train", Or::Default(String::new())),
        validation: s.path_or_none("validation"),
        tokenizer: s.path_or_none("tokenizer"),
        format: s.named("format", DataFormat::Auto),
        validation_fraction: s.float(
            "validation_fraction",
            Interval::above(0.0, 0.5),
            Or::Default(0.1),
        ),
    }
}

/// Share of its time that training waits for checkpoints where the config says nothing of them.
const OVERHEAD: f32 = 0.01;

fn train(s: &mut Section<'_, '_>, hysteresis: u32) -> TrainConfig {
    // A loss scale would have come down from 2^24 to 1 by then.
    let hopeless = 24 * (u64::from(hysteresis) + 1) + 28;
    let steps = s.uint("steps", 1..=STEPS, Or::Required("steps: 1000"));
    let eval_every = s.uint("eval_every", 0..=STEPS, Or::Default(0));
    let eval_batches = s.uint_or_none("eval_batches", 0..=STEPS);
    let checkpoint_every = s.uint("checkpoint_every", 0..=STEPS, Or::Default(0));
    let minutes = Interval::above(0.0, 1e6);
    let checkpoint_minutes = s.float_or_none("checkpoint_minutes", minutes, Or::Default(None));
    let rhythm = checkpoint_every > 0 || checkpoint_minutes.is_some();
    TrainConfig {
        steps,
        eval_every,
        eval_batches,
        checkpoint_every,
        checkpoint_minutes,
        checkpoint_overhead: s.float_or_none(
            "checkpoint_overhead",
            Interval::above(0.0, 1.0),
            Or::Derived(
                (!rhythm).then_some(OVERHEAD),
                "0.01 where neither checkpoint_every nor checkpoint_minutes is given",
                &["train.checkpoint_every", "train.checkpoint_minutes"],
            ),
        ),
        checkpoint_writer: s.named("checkpoint_writer", CheckpointWriter::Auto),
        checkpoint_keep: s.uint("checkpoint_keep", 1..=1_000_000, Or::Default(2)),
        weights: s.named("weights", WeightsPolicy::Complete),
        stop_after_skipped: s.uint(
            "stop_after_skipped",
            1..=STEPS,
            Or::Derived(hopeless, "24 x (hysteresis + 1) + 28", &["loss_scale.hysteresis"]),
        ),
        rollbacks: s.uint("rollbacks", 0..=1_000_000, Or::Default(0)),
        seed: s.uint("seed", 0..=u64::MAX, Or::Default(1337)),
    }
}

fn sample(s: &mut Section<'_, '_>) -> SampleConfig {
    let nonempty = |text: &str| match text {
        "" => Err("must hold at least one character to start from"),
        _ => Ok(()),
    };
    SampleConfig {
        prompt: s.text("prompt", Or::Default("\n".into()), nonempty),
        tokens: s.uint("tokens", 0..=1_000_000, Or::Default(0)),
        temperature: s.float("temperature", Interval::closed(0.0, 10.0), Or::Default(0.8)),
    }
}
