//! Every key of a config: its type, its range, its default, its meaning.

use super::reading::section::{Or, Section};
use super::reading::sources::Entries;
use super::reading::value::Interval;
use super::*;

/// Steps of any kind: 10^12.
const STEPS: u64 = 1_000_000_000_000;

/// Samples of any kind: 2^31.
const SAMPLES: u64 = 1 << 31;

/// Default of [`OffloadConfig::tile_elements`]: 4 MiB of 16-bit parameters, so that starting a copy takes little of its time.
pub const TILE_ELEMENTS: usize = 1 << 21;

/// Default of [`OffloadConfig::bucket_elements`].
pub const BUCKET_ELEMENTS: usize = 50_000_000;

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
    let name = s.text(
        "name",
        Or::Derived(stem.into(), "the file's name", &[]),
        run_name,
        "Name of the run, a part of its directory's name.",
    );
    // Its default depends on the grid, so the grid is read first.
    let parallel = s.section("parallel", "How the network is split over the GPUs.", parallel);
    let device = device(s, &parallel);
    let model = s.section("model", "The network: a pre-norm decoder.", model_schema::model);
    let precision = s.named("precision", Precision::Bf16, "Storage type of parameters, activations and gradients on the GPU. Sums are fp32. `Fp16` has a dynamic loss scale. `Fp8` stores bf16, and rounds the operands of the blocks' products to 8 bits: E4M3 for inputs and weights, E5M2 for gradients, scaled by the largest magnitude of each tensor; from sm_89 on.");
    let loss_scale =
        s.section("loss_scale", "Dynamic loss scale. With `precision: Fp16` only.", loss_scale);
    let offload =
        s.section("offload", "Where the optimizer is and when it runs (ZeRO-Offload).", offload);
    let optimizer = s.section("optimizer", "The update rule.", optimizer);
    // The schedule is as long as the run unless it says otherwise.
    let train = s.section("train", "Length of the run, evaluations, checkpoints, seed.", |s| {
        train(s, loss_scale.hysteresis)
    });
    let schedule = s.section(
        "schedule",
        "Learning rate over the steps: linear warm-up, then the kind's curve.",
        |s| schedule(s, &optimizer, &train),
    );
    let batch = s.section("batch", "Batch sizes in samples of `model.seq_len` tokens.", |s| {
        batch(s, &parallel)
    });
    let recompute = s.named("recompute", Recompute::None, "What is computed again in the backward pass instead of being kept: nothing; with `Selective` the outputs of norms and of the MLP's activation, which saves about a third of the activations and costs up to 5 % of the time; with `Block` the whole block from its input, which costs about a quarter of the time.");
    let partition_checkpoints = s.flag("partition_checkpoints", false, "Each TP rank keeps its share of the inputs that `recompute: Block` keeps, and gathers them for the backward pass. Not with `parallel.sequence`, which splits them already; idle with `parallel.tensor: 1`.");
    let host_checkpoints = s.flag("host_checkpoints", false, "The inputs that `recompute: Block` keeps go to host memory, each TP rank's share of them, and come back for the backward pass.");
    let data = s.section("data", "Text or tokens.", |s| data(s, &model));
    let sample = s.section("sample", "The text that a run writes after its last step.", sample);
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
    s.choice("device", &examples, or, "What the ranks run on: virtual GPUs on this machine, NVIDIA GPUs, or a described box (for `plan` and `simulate`).", |index, s| match index {
        0 => DeviceConfig::Cpu {
            count: s.uint(
                "count",
                1..=4096 * 4096,
                Or::Derived(world, "tensor x data", &["parallel.tensor", "parallel.data"]),
                "Virtual GPUs, one for each rank.",
            ),
            memory: s.bytes("memory", 1 << 60, Or::Default(2 << 30), "Memory that each virtual GPU may hold."),
            threads: s.uint_or_none("threads", 1..=4096, "Kernel threads of each virtual GPU. None: the cores of this machine divided by `count`, at least 1."),
        },
        1 => DeviceConfig::Cuda,
        _ => {
            let path = s.path_or_name(
                "box",
                Or::Required("box: \"boxes/dgx2.ron\""),
                "File that describes the box, or the name of one that `onebox boxes` lists, such as `h100-128gib`.",
                |name| bundled::text(name).is_some(),
            );
            let box_ = load::box_of(s.reader, "device.box", &path);
            DeviceConfig::Sim { box_: Box::new(box_), path: path.into() }
        }
    })
}

fn parallel(s: &mut Section<'_, '_>) -> ParallelConfig {
    ParallelConfig {
        tensor: s.uint("tensor", 1..=4096, Or::Default(1), "TP degree: GPUs that share one replica of the model."),
        data: s.uint("data", 1..=4096, Or::Default(1), "DP degree: replicas of the model."),
        sequence: s.flag("sequence", false, "Sequence parallelism: norms, dropout and residuals are split by tokens over TP."),
        reduce_fp32: s.flag("reduce_fp32", false, "Sums over ranks exchange 32-bit numbers: TP's partial sums, and gradients over DP, whose sum is rounded once. NCCL otherwise rounds 16-bit sums at each hop; in-process sums are fp32 in any case. With DP it takes 4 bytes for each element of the longest bucket."),
        tensor_across_nodes: s.flag("tensor_across_nodes", false, "Under `mpirun` or `srun`: a TP group may have ranks in several processes, whose sums inside layers then go through the network. Without it the ranks of a process must be whole TP groups."),
    }
}

fn loss_scale(s: &mut Section<'_, '_>) -> LossScaleConfig {
    let scale = Interval::above(0.0, 16_777_216.0);
    LossScaleConfig {
        initial: s.float(
            "initial",
            scale,
            Or::Default(65536.0),
            "Scale at step 1: a power of two, at least `floor`.",
        ),
        window: s.uint(
            "window",
            1..=STEPS,
            Or::Default(1000),
            "Good steps before the scale doubles.",
        ),
        hysteresis: s.uint(
            "hysteresis",
            1..=1000,
            Or::Default(2),
            "The overflow that halves the scale, counted from the last time that it doubled; every further one halves it, too, until it doubles again. Good steps between overflows do not begin the count anew.",
        ),
        floor: s.float("floor", scale, Or::Default(1.0), "The scale never falls below it."),
    }
}

fn offload(s: &mut Section<'_, '_>) -> OffloadConfig {
    let elements = 1024..=1 << 40;
    let optimizer = placement(s);
    let parameters = s.named("parameters", ParameterPlace::Device, "Where parameters are between their uses. `Host`: on the host, from where those of each block come up ahead of each use, so that a model may be larger than the GPUs' memory; the same bits. It needs the optimizer on the host.");
    OffloadConfig {
        optimizer,
        parameters,
        ring: s.uint_or_none("ring", 2..=64, "With `parameters: Host`: blocks whose parameters a GPU holds at once, besides the resident ones. None: 3, or 2 where 3 do not fit."),
        resident_blocks: s.uint_or_none("resident_blocks", 0..=10_000, "With `parameters: Host`: blocks whose parameters stay on the GPU all the same, spread evenly. None: as many as fit."),
        update: update(s),
        speculated_fraction: match s.float_or_auto("speculated_fraction", Interval::closed(0.0, 1.0), "Share of the parameters behind the embedding whose update `Speculative` begins during the backward pass, rounded down to whole segments, the last ones: first an output projection of its own, then the final norm and the last blocks. Their states take their bytes in host memory twice. `Auto`: on a described box the share of the fastest simulated step, elsewhere at most 0.5, as far as it fits.") {
            None => Speculated::Auto,
            Some(share) => Speculated::Share(share),
        },
        transfer: s.named("transfer", Transfer::Streamed, "How gradients and parameters cross PCIe. `Blocking` is what DeepSpeed did in 2020, to compare with; it needs `update: Serial` and the optimizer on the host."),
        accumulate: s.named("accumulate", Accumulate::Auto, "Where gradients of several micro-batches are summed, in fp32: on the GPU (4/DP bytes for each parameter) or on the host (4 bytes for each owned parameter). `Auto`: on the GPU where the plan fits."),
        moments: s.named("moments", Moments::Fp32, "How the moments of AdamW are kept in host memory. `Bf16` takes 2 bytes for each and rounds up or down by chance: close to fp32, not equal. Only with the whole optimizer on the host."),
        master: s.named("master", Master::Fp32, "How fp32 parameters are kept in host memory. `Split` keeps the bf16 parameter and the 2 bytes that make it fp32: the same bits in 2 bytes less. It needs `precision: Bf16` or `Fp8`, and some of the optimizer on the host."),
        bucket_elements: s.uint("bucket_elements", elements.clone(), Or::Default(BUCKET_ELEMENTS), "Most elements of a gradient bucket before it is reduced in pieces."),
        tile_elements: s.uint("tile_elements", elements, Or::Default(TILE_ELEMENTS), "Most elements of a tile of the update on the host, whose parameters go up in one copy: 2 bytes each, with `precision: Fp32` 4."),
        lookahead: s.uint("lookahead", 1..=64, Or::Default(1), "Segments by which uploads of parameters run ahead of the forward pass."),
        keep_gradients: s.flag("keep_gradients", false, "Every block has a gradient buffer of its own, as in PyTorch, to compare with. Otherwise two take turns."),
        first_forward: s.uint("first_forward", 1..=ALL_TOGETHER as u64, together(parameters), "Micro-batches whose first forward pass goes through each block together, so that an exact update hides behind all of them. It takes a set of block inputs for each, and `recompute: Block`. With `parameters: Host` all passes of a step go so, forward and backward, in groups of so many: parameters cross PCIe twice for each group."),
        sockets: s.named("sockets", Sockets::Auto, "Sockets whose cores and memory a rank uses: its own (`Near`), or `All`. `Auto`: its own, and all where its own do not hold its states and another socket has no rank."),
    }
}

/// All micro-batches where parameters cross PCIe for each group of them.
const fn together(parameters: ParameterPlace) -> Or<usize> {
    match parameters {
        ParameterPlace::Device => Or::Default(1),
        ParameterPlace::Host => {
            Or::Derived(ALL_TOGETHER, "all micro-batches of a step", &["offload.parameters"])
        }
    }
}

fn placement(s: &mut Section<'_, '_>) -> Placement {
    let examples = ["Host", "Device", "Split(device_fraction: 0.2)"];
    s.choice("optimizer", &examples, Or::Default(0), "Where the optimizer states and the update are.", |index, s| match index {
        0 => Placement::Host,
        1 => Placement::Device,
        _ => {
            let within = Interval::closed(0.0, 1.0);
            let or = Or::Required("device_fraction: 0.2");
            Placement::Split { device_fraction: s.float("device_fraction", within, or, "Share of the parameters whose states are on the GPUs, rounded to what every rank can own alike.") }
        }
    })
}

fn update(s: &mut Section<'_, '_>) -> UpdateMode {
    let examples = ["Serial", "Overlapped", "Speculative", "Delayed(after_step: 40)", "Auto"];
    s.choice("update", &examples, Or::Default(1), "When the update runs. `Overlapped` and `Speculative` give the bits of `Serial`; `Speculative` begins during the backward pass, and takes more memory; with `Delayed` each step computes on parameters of one step earlier. `Auto` is `Speculative` where that fits and gains, else `Overlapped`; `plan`, `simulate` and `train` say why.", |index, s| match index {
        0 => UpdateMode::Serial,
        1 => UpdateMode::Overlapped,
        2 => UpdateMode::Speculative,
        4 => UpdateMode::Auto,
        _ => {
            let or = Or::Required("after_step: 40");
            UpdateMode::Delayed { after_step: s.uint("after_step", 0..=STEPS, or, "The update of this step is the first delayed one.") }
        }
    })
}

fn optimizer(s: &mut Section<'_, '_>) -> OptimizerConfig {
    OptimizerConfig {
        kind: s.named(
            "kind",
            OptimizerKind::AdamW,
            "AdamW (arXiv 1711.05101), or plain gradient descent with decoupled weight decay.",
        ),
        lr: s.float("lr", Interval::above(0.0, 10.0), Or::Default(6e-4), "Peak learning rate."),
        beta1: s.float(
            "beta1",
            Interval::below(0.0, 1.0),
            Or::Default(0.9),
            "Decay of the first moment.",
        ),
        beta2: s.float(
            "beta2",
            Interval::below(0.0, 1.0),
            Or::Default(0.95),
            "Decay of the second moment.",
        ),
        eps: s.float(
            "eps",
            Interval::above(0.0, 1.0),
            Or::Default(1e-8),
            "Added to the root of the second moment.",
        ),
        weight_decay: s.float(
            "weight_decay",
            Interval::closed(0.0, 10.0),
            Or::Default(0.1),
            "Decoupled weight decay, on matrices only.",
        ),
        clip: s.float_or_none(
            "clip",
            Interval::above(0.0, 1e9),
            Or::Default(Some(1.0)),
            "Global gradient norm above which gradients are scaled down. None: never.",
        ),
    }
}

fn schedule(s: &mut Section<'_, '_>, opt: &OptimizerConfig, train: &TrainConfig) -> ScheduleConfig {
    let warmup_steps = s.uint(
        "warmup_steps",
        0..=STEPS,
        Or::Default(0),
        "Steps from 0 to the peak; at most `decay_steps`.",
    );
    let decay_steps = s.uint(
        "decay_steps",
        1..=STEPS,
        Or::Derived(train.steps, "train.steps", &["train.steps"]),
        "Step that reaches the minimum. It may exceed `train.steps`. `Constant` and `InverseSqrt` do not use it.",
    );
    let kinds = ["Cosine", "Constant", "Linear", "Wsd(stable_until: 900)", "InverseSqrt"];
    ScheduleConfig {
        kind: s.choice("kind", &kinds, Or::Default(0), "Curve after the warm-up. `Wsd` (warm-up, stable, decay) stays at the peak and then falls as `Cosine` does. `InverseSqrt` is the peak times the root of `warmup_steps` / step; without a warm-up, of 10_000 / (10_000 + step).", |index, s| match index {
            0 => ScheduleKind::Cosine,
            1 => ScheduleKind::Constant,
            2 => ScheduleKind::Linear,
            3 => {
                let from = &["schedule.decay_steps", "schedule.warmup_steps"];
                let until = (decay_steps - decay_steps / 10).max(warmup_steps);
                let or = Or::Derived(until, "9/10 of decay_steps, or warmup_steps where that is more", from);
                ScheduleKind::Wsd { stable_until: s.uint("stable_until", 0..=STEPS, or, "Last step at the peak; from `warmup_steps` to `decay_steps`.") }
            }
            _ => ScheduleKind::InverseSqrt,
        }),
        warmup_steps,
        decay_steps,
        min_lr: s.float(
            "min_lr",
            Interval::closed(0.0, 10.0),
            Or::Derived(tenth(opt.lr), "lr / 10", &["optimizer.lr"]),
            "Least learning rate after the warm-up; at most `optimizer.lr`. `Constant` does not use it.",
        ),
    }
}

/// A tenth of the number that was written, so that 6e-4 gives 6e-5 and not 6.0000002e-5.
fn tenth(rate: f32) -> f32 {
    rate.to_string().parse::<f64>().map_or(rate / 10.0, |exact| (exact / 10.0) as f32)
}

fn batch(s: &mut Section<'_, '_>, parallel: &ParallelConfig) -> BatchConfig {
    let micro = s.uint("micro", 1..=SAMPLES, Or::Default(1), "Samples of a rank in one pass.");
    let from = &["batch.micro", "parallel.data"];
    BatchConfig {
        micro,
        global: s.uint(
            "global",
            1..=SAMPLES,
            Or::Derived(micro * parallel.data, "micro x data", from),
            "Samples of an optimizer step over all ranks; a multiple of micro x data.",
        ),
    }
}

fn data(s: &mut Section<'_, '_>, model: &ModelConfig) -> DataConfig {
    let train = s.sources("train", Entries::Weighed, "File, directory or glob to train on, or several with their shares of the samples. Relative to the config file; in `--set` to the working directory. `train` needs it, `plan` does not.");
    let validation = s.sources("validation", Entries::Named, "The same for evaluations; each of several has a loss of its own. None: the last `validation_fraction` of `train`.");
    let format = data_format(s);
    let tokenizer = match told::tokenizer_beside(s.reader, model) {
        Some(path) => Or::Derived(Some(path), "beside config.json", &["model.from"]),
        None => Or::Default(None),
    };
    let packing = match format {
        DataFormat::Chat => Or::Derived(Packing::None, "chats are samples", &["data.format"]),
        _ => Or::Default(Packing::Windows),
    };
    // Versions without the key knew nothing else.
    let order = if s.reader.stored { DataOrder::Random } else { DataOrder::Shuffled };
    DataConfig {
        train,
        validation,
        format,
        tokenizer: s.path_or("tokenizer", tokenizer, "A `tokenizer.json` for text, or the folder of one. None: a byte is a token. With `format` `U16`, `U32` and `Megatron` the one that made the tokens, which the run keeps for `generate`, `export` and `data show`. With `model.from` the one of its folder where this is left out; where that has none, text is refused for its weights unless the `None` is written."),
        validation_fraction: s.float(
            "validation_fraction",
            Interval::above(0.0, 0.5),
            Or::Default(0.1),
            "Share of `train` that is held out where there is no `validation`.",
        ),
        packing: s.named_or("packing", packing, "The sample. `Windows`: `model.seq_len` tokens of all documents side by side. `Documents`: documents of `Jsonl`, `Chat` or `Megatron` side by side, each of which sees itself alone. `None`: one of them, and padding behind it."),
        truncate: s.flag("truncate", false, "With `packing: Documents` and `None`, a document of more than `model.seq_len` + 1 tokens is cut there. `false`: it is left out, and counted; one of `Jsonl` or `Megatron` with `packing: Documents` is divided."),
        system: s.text("system", Or::Default(String::new()), |_| Ok(()), "With `Chat`, the first message of each chat that has none of the system. Empty: none."),
        control_tokens: s.named("control_tokens", ControlTokens::Text, "What the text of a control token, such as `<|im_end|>`, is in the texts of `Jsonl`, and in `prompt` and `completion` of `Chat` where these are texts. `Text`: text, which controls nothing. `Parsed`: the token, for chats that a template has rendered; a text that ends with a control token gets no other end. Messages of `Chat` are always text; files of plain text are always parsed."),
        order: s.named("order", order, "`Shuffled`: epochs, each of which has every window of `model.seq_len` tokens once. `Random`: each sample starts anywhere."),
    }
}

fn data_format(s: &mut Section<'_, '_>) -> DataFormat {
    let examples = ["Auto", "Bytes", "U16", "U32", "Megatron", "Jsonl(text: \"text\")", "Chat"];
    s.choice("format", &examples, Or::Default(0), "`Auto`: text, and a file that seems to be something else is refused. `Bytes`: files of any kind. `U16`, `U32`: little-endian token files. `Megatron`: a `.bin` with its `.idx` beside it, by either name or by what the names have in common. `Jsonl`: JSON lines with a text each. `Chat`: JSON lines with `messages` each, or `prompt` and `completion`; only answers count.", |index, s| match index {
        0 => DataFormat::Auto,
        1 => DataFormat::Bytes,
        2 => DataFormat::U16,
        3 => DataFormat::U32,
        4 => DataFormat::Megatron,
        5 => DataFormat::Jsonl { text: s.text("text", Or::Default("text".into()), |_| Ok(()), "The key of the text in a row.") },
        _ => DataFormat::Chat,
    })
}

/// Steps of a run of epochs whose data nobody has read: what needs the number reads it.
pub(super) const UNREAD_STEPS: u64 = 1_000_000;

/// Share of its time that training waits for checkpoints where the config says nothing of them.
const OVERHEAD: f32 = 0.01;

fn train(s: &mut Section<'_, '_>, hysteresis: u32) -> TrainConfig {
    // The first overflow that halves a loss scale of 2^24, 23 more until it is 1, and a margin.
    let hopeless = u64::from(hysteresis) + 23 + 28;
    let epochs = s.float_or_none(
        "epochs",
        Interval::above(0.0, 1e6),
        Or::Default(None),
        "Number of times that the run takes every sample, instead of `steps`. The number of steps follows from it, rounded up, when the data is read.",
    );
    let steps = match epochs {
        None => Or::Required("steps: 1000"),
        Some(_) => Or::Derived(
            UNREAD_STEPS,
            "a stand-in: the data says how many train.epochs need",
            &["train.epochs"],
        ),
    };
    let steps = s.uint("steps", 1..=STEPS, steps, "Optimizer steps.");
    let eval_every = s.uint(
        "eval_every",
        0..=STEPS,
        Or::Default(0),
        "Steps between evaluations. 0: only after the last step.",
    );
    let eval_batches = s.uint_or_none("eval_batches", 0..=STEPS, "Most global batches of an evaluation. 0: all. None: 8 between steps, and 600 after the last step.");
    let tensorboard = s.flag(
        "tensorboard",
        false,
        "Write the curves into event files for TensorBoard, too, in the run's directory.",
    );
    let checkpoint_every = s.uint("checkpoint_every", 0..=STEPS, Or::Default(0), "Steps between checkpoints. 0: not by steps. A run that saves any checkpoint also saves one at its end.");
    let minutes = Interval::above(0.0, 1e6);
    let checkpoint_minutes = s.float_or_none(
        "checkpoint_minutes",
        minutes,
        Or::Default(None),
        "Minutes between checkpoints. None: not by the clock.",
    );
    let rhythm = checkpoint_every > 0 || checkpoint_minutes.is_some();
    TrainConfig {
        steps,
        epochs,
        eval_every,
        eval_batches,
        tensorboard,
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
            "Share of its time that training may wait for checkpoints, as the last one made it wait; they are at least ten minutes apart. None: not by this. With none of the three keys the run leaves no checkpoint.",
        ),
        checkpoint_writer: s.named("checkpoint_writer", CheckpointWriter::Auto, "`Background`: ranks copy their states, 12 bytes for each parameter, and go on. `Foreground`: ranks wait for the disk. `Auto`: in the background where the copy fits the host's memory."),
        checkpoint_keep: s.uint("checkpoint_keep", 1..=1_000_000, Or::Default(2), "Number of newest checkpoints that stay."),
        weights: s.named("weights", WeightsPolicy::Complete, "When a run writes `weights.safetensors`, its fp32 parameters: when it is done (and at an interrupt where no checkpoint holds the states), at every end, or never."),
        stop_after_skipped: s.uint(
            "stop_after_skipped",
            1..=STEPS,
            Or::Derived(hopeless, "hysteresis + 51", &["loss_scale.hysteresis"]),
            "Skipped steps in a row that end the run. The default is the `hysteresis` + 23 overflows in which a loss scale falls from 2^24 to 1, and 28 more.",
        ),
        verify_every: s.uint("verify_every", 0..=STEPS, Or::Default(0), "Steps between those whose forward and backward passes run twice, to see whether the bits are the same. A difference means faulty hardware: the run names rank and tensor, and goes on. 0: never."),
        rollbacks: s.uint("rollbacks", 0..=1_000_000, Or::Default(0), "Times that the run goes back to the newest checkpoint from before such steps, and on from there with other samples, before it ends."),
        seed: s.uint("seed", 0..=u64::MAX, Or::Default(1337), "Seed of weights, samples and dropout."),
    }
}

fn sample(s: &mut Section<'_, '_>) -> SampleConfig {
    let nonempty = |text: &str| match text {
        "" => Err("must hold at least one character to start from"),
        _ => Ok(()),
    };
    SampleConfig {
        prompt: s.text("prompt", Or::Default("\n".into()), nonempty, "Start of the text."),
        tokens: s.uint("tokens", 0..=1_000_000, Or::Default(0), "Tokens to draw. 0: none."),
        temperature: s.float(
            "temperature",
            Interval::closed(0.0, 10.0),
            Or::Default(0.8),
            "Temperature of the draw. 0: always the likeliest token.",
        ),
    }
}
