//! `onebox bench`: [`crate::bench`] as text or JSON, and box files, see [`predict::calibrate`].

use super::data::{self, ReadOptions};
use super::train::check_memory;
use super::{
    CommandError, ConfigArgs, Failable, check_built, code, may_write, plan, print_as, say,
    unwritten, write_output,
};

mod host;
use crate::bench::gpu_box::{self, GpuBoxError};
use crate::bench::{
    BOX_OF_GPUS, Copies, SmallModels, StepTimes, TILE_BYTES, copies, is_on_cuda, product,
    residuals, steps, with_residual,
};
use crate::report::progress::si;
use crate::report::trace;
use config::ResidualConfig;
use device::Trace;
use files::path_text::PathText;
use files::shell::quoted_path;
use layout::LocalMachine;
use layout::build::{dtype, lay_out};
use predict::calibrate::{measure, to_ron};
use predict::{calibrate, choose};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use topology::{available_memory, counted, format_bytes};

/// Arguments of `onebox bench`: a verb, or `--save-box`, which clap requires without a verb.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(override_usage = "onebox bench step [OPTIONS] <CONFIG>\n       \
                            onebox bench copy [OPTIONS]\n       \
                            onebox bench <adam|gemm|collective> [OPTIONS]\n       \
                            onebox bench --save-box <FILE> [--cores]")]
pub(super) struct BenchArgs {
    /// Measure this machine and write a box file for `onebox simulate --box FILE`: its GPUs and its
    /// host. Without an NVIDIA driver, its cores are measured as virtual GPUs
    #[arg(long, value_name = "FILE", required = true)]
    save_box: Option<PathBuf>,
    /// Measure the cores as virtual GPUs even if the machine has GPUs
    #[arg(long, requires = "save_box")]
    cores: bool,
    #[command(subcommand)]
    verb: Option<BenchVerb>,
}

#[derive(Debug, clap::Subcommand)]
enum BenchVerb {
    /// Measure training steps of a config: time, tokens, share of the speed of plain matmuls,
    /// exposed update
    Step(StepArgs),
    /// Measure copies between host memory and a GPU, or a virtual GPU if there is none; the memory
    /// of each NUMA node
    Copy(CopyArgs),
    /// Measure the update on the host, in turn with the same loads and stores without arithmetic
    Adam(host::AdamArgs),
    /// Measure matmuls of virtual GPUs, compared with the cores' fused multiply-adds
    Gemm(host::GemmArgs),
    /// Measure collectives of virtual GPUs, compared with a plain copy
    Collective(host::CollectiveArgs),
}

#[derive(Debug, clap::Args)]
struct StepArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of steps to measure, after one step that is not measured
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// Write a Chrome trace of the ops of the last measured step
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct CopyArgs {
    /// MiB to copy in each direction
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    mib: u32,
    /// MiB of a tile, which is copied up after its update: 2 bytes times `offload.tile_elements`,
    /// or 4 bytes with `precision: Fp32`
    #[arg(long, default_value_t = (TILE_BYTES >> 20) as u32, value_parser = clap::value_parser!(u32).range(1..))]
    tile_mib: u32,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &BenchArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    match (&args.verb, &args.save_box) {
        (Some(BenchVerb::Step(args)), _) => step(args, machine),
        (Some(BenchVerb::Copy(args)), _) => copy(args, machine),
        (Some(BenchVerb::Adam(args)), _) => host::adam(args),
        (Some(BenchVerb::Gemm(args)), _) => host::gemm(args),
        (Some(BenchVerb::Collective(args)), _) => host::collective(args),
        (None, Some(path)) => save_box(path, machine, args.cores),
        (None, None) => Ok(()),
    }
}

fn save_box(path: &Path, machine: &LocalMachine, on_cores: bool) -> Result<(), CommandError> {
    let on_gpus = !on_cores && machine.cuda().has_driver();
    // A box file of one kind may replace a box file of the other kind.
    let kinds = [calibrate::OUTPUT, BOX_OF_GPUS];
    let kind = kinds.into_iter().find(|kind| kind.check(path).is_ok()).unwrap_or(calibrate::OUTPUT);
    may_write(kind, path)?;
    let mut tell = |what: &str| say(&format!("measuring: {what}"));
    let (ron, models) = match on_gpus {
        true => box_of_gpus(machine, &mut tell)?,
        false => (box_of_cores(machine, &mut tell)?, Some(SmallModels::OF_CORES)),
    };
    write_output(kind, path, &ron)?;
    // The simulation needs the file.
    if let Some(models) = models {
        match residuals(models, path, machine, &mut tell) {
            Ok(residual) => {
                let kind = if on_gpus { BOX_OF_GPUS } else { calibrate::OUTPUT };
                write_output(kind, path, &with_residual(&ron, residual))?;
                let ResidualConfig { gpt2, llama } = residual;
                say(&format!(
                    "residual: a step of a small GPT-2 had {gpt2:.2} of its simulated speed on this box, one of a small Llama {llama:.2}"
                ));
            }
            Err(why) => say(&format!(
                "warning: no steps of small models are compared with a simulation on this box: {why}"
            )),
        }
    }
    say(&format!(
        "{}: written\nnext: onebox simulate configs/quickstart.ron --box {}",
        PathText(path),
        quoted_path(path)
    ));
    Ok(())
}

fn box_of_cores(
    machine: &LocalMachine,
    tell: &mut dyn FnMut(&str),
) -> Result<String, CommandError> {
    let measured = measure(machine, tell).fail_with(code::INTERNAL)?;
    let memory = format_bytes(available_memory()).replace(' ', "");
    Ok(to_ron(&measured, 4 * machine.cores(), &memory, &memory))
}

/// Text of the box of this machine's GPUs, and the small models to run on one of them; `None` for a stand-in.
fn box_of_gpus(
    machine: &LocalMachine,
    tell: &mut dyn FnMut(&str),
) -> Result<(String, Option<SmallModels>), CommandError> {
    let measured = gpu_box::measure(machine, tell).map_err(|error| {
        let code = match error {
            GpuBoxError::None(_) | GpuBoxError::Mixed(_) => code::CONFIG,
            GpuBoxError::Full { .. } => code::DEVICE_MEMORY,
            GpuBoxError::Failed { .. } => code::RANK,
            GpuBoxError::Simulated(_) => code::INTERNAL,
        };
        CommandError::new(code, error)
    })?;
    if measured.is_stand_in() {
        say(
            "warning: the driver is a stand-in without a GPU: these figures say nothing about any GPU",
        );
    }
    measured.missing().iter().for_each(|what| say(&format!("warning: {what}")));
    let models = (!measured.is_stand_in()).then(|| SmallModels::of_gpu(measured.gpu.sm));
    Ok((measured.to_ron(), models))
}

fn step(args: &StepArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    args.trace.as_ref().map_or(Ok(()), |path| may_write(trace::OUTPUT, path))?;
    let mut loaded = args.config.load(machine)?;
    choose(&mut loaded, machine)?;
    let config = &loaded.config;
    check_built(&loaded, machine)?;
    let built = lay_out(config, machine);
    data::look(config)?;
    check_memory(&loaded, &built, false)?;
    let dry = ReadOptions { dry: true, ..ReadOptions::default() };
    let data = data::open(config, data::tokenizer(config)?.as_ref(), dry)?;
    let model_flops = plan::made(config, &built)?.step.map_or(0.0, |step| step.model_flops);
    let ceiling = product(is_on_cuda(config), dtype(config.precision));
    let ceiling = ceiling.fail_with(code::RANK)?;
    let last = u64::from(args.steps) + 1;
    let noted = args.trace.as_ref().map(|_| Arc::new(Trace::of_steps(last..=last)));
    let count = usize::from(args.steps);
    let measured = steps(config, &built, &data, count, model_flops, ceiling, noted.clone());
    let measured = measured.fail_with(code::RANK)?;
    if let (Some(path), Some(noted)) = (&args.trace, noted) {
        trace::measured(path, &noted).map_err(|e| unwritten(path, &e))?;
    }
    print_as(args.json, &measured, || step_text(&measured))
}

fn copy(args: &CopyArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let on_cuda = machine.missing_gpus().is_none();
    let measured =
        copies(machine, on_cuda, u64::from(args.mib) << 20, u64::from(args.tile_mib) << 20);
    let measured = measured.fail_with(code::RANK)?;
    print_as(args.json, &measured, || copy_text(&measured))
}

fn step_text(s: &StepTimes) -> String {
    let StepTimes { steps, seconds, least_seconds, tflops_per_gpu, host_seconds, .. } = s;
    let (rate, ceiling) = (si(s.tokens_per_second), s.ceiling_tflops);
    let share = 100.0 * tflops_per_gpu / ceiling;
    let mut out = format!(
        "step      {seconds:.4} s (median of {steps}; fastest {least_seconds:.4})\ntokens    {rate}tok/s\n\
         compute   {tflops_per_gpu:.3} TFLOP/s of the model per GPU, {share:.1} % of the {ceiling:.3} that a plain product reaches\n\
         host      {host_seconds:.4} s of work per step",
    );
    match s.exposed_seconds {
        Some(exposed) => {
            let share = 100.0 * exposed / s.seconds;
            let _ = writeln!(out, ", of which {exposed:.4} s ({share:.1} % of the step) exposed");
        }
        None => out += "; lanes run one after another here\n",
    }
    out
}

fn copy_text(c: &Copies) -> String {
    let ceiling = match c.ceiling {
        Some(gb) => format!("{gb:.2} GB/s: {}", c.ceiling_is),
        None => format!("unknown: {}", c.ceiling_is),
    };
    let Copies { up, down, both, parts, .. } = c;
    let [tile, piece] =
        [parts.tile_bytes, parts.piece_bytes].map(|b| b as f64 / f64::from(1 << 20));
    let [tiles, pieces, parts_both] = [parts.up, parts.down, parts.both];
    let [tiles_share, pieces_share, parts_share, both_share] =
        [parts.up_share, parts.down_share, parts.both_share, c.both_share]
            .map(|share| 100.0 * share);
    let mut out = format!(
        "up        {up:.2} GB/s in one copy; {tiles:.2} GB/s ({tiles_share:.1} %) in tiles of {tile:.1} MiB, each behind a task of the host\n\
         down      {down:.2} GB/s in one copy; {pieces:.2} GB/s ({pieces_share:.1} %) in pieces of {piece:.1} MiB\n\
         both      {both:.2} GB/s at once, added: {both_share:.1} % of up and down in one copy each; {parts_both:.2} GB/s ({parts_share:.1} %) \
         in tiles and pieces\n\
         ceiling   {ceiling}\n",
    );
    for m in &c.memory {
        let node = m.node.map_or_else(|| "all".into(), |node| node.to_string());
        let (read, write, copy, rmw) = (m.read, m.write, m.copy, m.rmw);
        let threads = counted(m.threads, "thread");
        let _ = writeln!(
            out,
            "node {node:<4} read {read:.2}, write {write:.2}, copy {copy:.2}, change {rmw:.2} GB/s by {threads}"
        );
    }
    out
}
