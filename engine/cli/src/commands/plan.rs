//! `onebox plan`: prints the report of [`predict::plan`] as text and tables, or as JSON.

use super::check::{count, parameter_words};
use super::exit::{CommandError, code};
use super::processes::{SILENCE, Team};
use super::search::FitFailure;
use super::{BoxArg, ConfigArgs, fit_result, of_ops, print, print_json, say, search, weights};
use crate::report::progress::si;
use crate::report::stage::Stage;
use config::{Config, DeviceConfig, LoadedConfig};
use device::Error;
use files::names::RUNS;
use layout::LocalMachine;
use layout::build::{RankLayout, lay_out};
use predict::changes::arguments;
use predict::choose;
use predict::plan::{Buffer, Disk, Memory, Report, report};
use predict::remedies::Remedy;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use topology::{counted, format_bytes};

mod boxes;
mod buffers;
mod config_file;
mod model;
mod ops;

/// Show the memory that a config needs on each GPU and node; with --search, the fastest layout.
#[derive(Debug, clap::Args)]
pub(super) struct PlanArgs {
    /// RON file, such as configs/quickstart.ron; - is the standard input
    #[arg(required_unless_present = "model")]
    config: Option<PathBuf>,
    /// Change a key, such as parallel.tensor=4 or 'data.train="my.txt"'; may be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    #[command(flatten)]
    on_box: BoxArg,
    /// Instead of a config: show whether --box can train this model of transformers (its folder, its
    /// config.json, or its name in the Hugging Face cache), how, and how fast
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["config", "ops"])]
    model: Option<PathBuf>,
    /// With --model: show the time for training on N tokens
    #[arg(long, value_name = "N", requires = "model", conflicts_with = "config", value_parser = clap::value_parser!(u64).range(1..))]
    tokens: Option<u64>,
    /// With --model: rank all boxes that `onebox boxes` lists, and --box, by the time for training, and
    /// by its cost if a box has `usd_per_hour`; say what the others lack
    #[arg(long, requires = "model", conflicts_with_all = ["config", "write", "search", "gpus"])]
    boxes: bool,
    /// With --model: write a config of the answer into this new file, for `onebox train`. If the
    /// model does not fit, nothing is written
    #[arg(long, value_name = "CONFIG", requires = "model", conflicts_with_all = ["config", "search"])]
    write: Option<PathBuf>,
    /// With --write: path of the training data; without it, the config has a line to edit
    #[arg(long, value_name = "PATH", requires = "write")]
    data: Option<PathBuf>,
    /// One JSON document on stdout, with every buffer
    #[arg(long)]
    json: bool,
    /// List every op of a step in program order: its number, lane, name, source line, bytes, FLOPs,
    /// waits and tensors
    #[arg(long, conflicts_with = "search")]
    ops: bool,
    /// Simulate every layout of the model that fits its described box, and show the fastest
    #[arg(long)]
    search: bool,
    /// With --search or --model: use N GPUs instead of all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    gpus: Option<u16>,
}

/// Joins the processes of a launcher first, since a machine needs memory only for its own ranks.
pub(super) fn run(args: &PlanArgs) -> Result<(), CommandError> {
    let team = Team::join(SILENCE)?;
    let ended = team.all("plan", planned(args, &team), |()| team.facts(None));
    team.end(ended)
}

fn planned(args: &PlanArgs, team: &Team) -> Result<(), CommandError> {
    let machine = &team.machine;
    if let Some(model) = &args.model {
        if args.boxes {
            return boxes::run(args, model, machine);
        }
        return model::run(args, model, machine);
    }
    if args.gpus.is_some() && !args.search {
        let why = "--gpus takes part in a search only: give --search or --model too";
        return Err(CommandError::new(code::USAGE, why));
    }
    let config = args.config.clone().unwrap_or_else(|| unreachable!("clap asks for one"));
    let given = args.on_box.with(&ConfigArgs { config, sets: args.sets.clone() })?;
    if args.search {
        let loaded = given.load_to_search(machine)?;
        return search::run(&loaded, machine, args.gpus.map(usize::from), args.json);
    }
    let mut loaded = given.load(machine)?;
    let stage = Stage::begin("simulating update modes", 0);
    choose(&mut loaded, machine)?;
    drop(stage);
    let config = &loaded.config;
    if !matches!(config.device, DeviceConfig::Sim { .. }) {
        team.check(config)?;
    }
    if args.ops {
        return ops::run(config, &lay_out(config, machine), args.json);
    }
    let stage = Stage::begin("planning a step", 0);
    let report = made(config, &lay_out(config, machine))?;
    drop(stage);
    if args.json {
        print_json(&Document::of(&loaded, machine, &report))?;
    } else {
        print(&text(&loaded, machine, &report))?;
    }
    if let Some(not_built) = config.not_built(&loaded.origins, || machine.missing_gpus()) {
        for problem in not_built.errors().iter().filter(|p| p.key != "device") {
            say(&format!(
                "note: {}: {}; the plan is that of the nearest thing built",
                problem.key, problem.message
            ));
        }
    }
    if let Some(refused) = weights::refusal(config, true) {
        say(&format!("note: `onebox train` refuses model.from: {}", refused.message));
    }
    if let Some(refused) = weights::refusal_of_adapters(config) {
        say(&format!("note: `onebox train` refuses adapter.from: {}", refused.message));
    }
    // A plan whose memory was not checked does not count as fitting.
    fit_result(report.verdict == Some(true))
}

pub(super) fn made(config: &Config, built: &RankLayout) -> Result<Report, CommandError> {
    report(config, built).map_err(|e| defect(&e))
}

fn defect(error: &Error) -> CommandError {
    CommandError::new(code::INTERNAL, format!("the step does not pass its own checks: {error}"))
}

/// Text of the whole report.
pub(super) fn text(loaded: &LoadedConfig, machine: &LocalMachine, report: &Report) -> String {
    let config = &loaded.config;
    let mut out = String::new();
    let Report { tensor, data, .. } = report;
    let _ = writeln!(
        out,
        "{}: {}, TP {tensor} x DP {data} = {} {}, {:?}, optimizer on {:?}",
        report.name,
        parameter_words(config),
        tensor * data,
        report.gpu.what,
        config.precision,
        config.offload.optimizer,
    );
    table(&mut out, "each GPU", &report.gpu, true);
    table(&mut out, "host memory of each rank", &report.host_per_rank, true);
    wide_sums(&mut out, report);
    nodes(&mut out, report);
    data_memory(&mut out, report);
    step(&mut out, report);
    for words in [&loaded.chosen, &report.saving].into_iter().flatten() {
        let _ = writeln!(out, "\n{words}");
    }
    on_disk(&mut out, &disk(config, report));
    let _ = writeln!(out, "\n{}", report.binding.words);
    let _ = write!(out, "{}", verdict(loaded, machine, report));
    out
}

/// Disk space of a run in a directory of its own, below the working directory.
fn disk(config: &Config, report: &Report) -> Disk {
    Disk::new(config, report.trained_parameters, Path::new(RUNS))
}

fn on_disk(out: &mut String, disk: &Disk) {
    let shortage = disk.shortage().map(|why| format!("warning: {why}"));
    for line in disk.words().into_iter().chain(shortage) {
        let _ = writeln!(out, "{line}");
    }
}

/// Text about a refused config: the largest need, the limit, and remedies.
pub(super) fn refusal(loaded: &LoadedConfig, machine: &LocalMachine, report: &Report) -> String {
    let mut out = format!("{}\n", report.binding.words);
    if report.binding.what == "gpu" {
        table(&mut out, "each GPU", &report.gpu, false);
    } else {
        table(&mut out, "host memory of each rank", &report.host_per_rank, false);
        wide_sums(&mut out, report);
        nodes(&mut out, report);
        data_memory(&mut out, report);
    }
    for words in [&loaded.chosen, &report.saving].into_iter().flatten() {
        let _ = writeln!(out, "\n{words}");
    }
    out + "\n" + &verdict(loaded, machine, report)
}

fn table(out: &mut String, title: &str, memory: &Memory, buffers: bool) {
    let _ = writeln!(out, "\n{title}");
    for pool in &memory.pools {
        let _ = writeln!(out, "  {:>12}  {}", format_bytes(pool.bytes), pool.name);
        if !buffers {
            continue;
        }
        for line in buffers::lines(memory.buffers.iter().filter(|b| b.pool == pool.name)) {
            let _ = writeln!(out, "                  {line}");
        }
    }
    let limit = memory.limit.map_or(String::new(), |limit| {
        let reserved = match memory.reserved {
            0 => String::new(),
            bytes => format!(" (after {} beside the plan)", format_bytes(bytes)),
        };
        format!(" of {}{reserved}", format_bytes(limit))
    });
    let _ = writeln!(out, "  {:>12}  in all{limit}", format_bytes(memory.bytes));
    for part in &memory.overheads {
        let _ = writeln!(out, "  {:>12}  beside the plan: {}", format_bytes(part.bytes), part.name);
    }
}

fn nodes(out: &mut String, report: &Report) {
    let _ = writeln!(out, "\nNUMA nodes");
    for node in &report.nodes {
        let ranks = match node.ranks[..] {
            [] => "no rank".to_owned(),
            [rank] => format!("rank {rank}"),
            [first, .., last] => format!("ranks {first} to {last}"),
        };
        let (bytes, limit) = (format_bytes(node.bytes), format_bytes(node.limit));
        let _ = writeln!(out, "  node {}: {bytes} of {limit}, {ranks}", node.node);
    }
    for words in &report.placed {
        let _ = writeln!(out, "  {words}");
    }
    let _ = writeln!(out, "  and {} of the process besides", format_bytes(report.host_overhead));
    if report.process_messages > 0 {
        let _ = writeln!(
            out,
            "  of which messages between processes take {} at most; MPI's own buffers, such as its shared memory, come on top: \
             they are not counted",
            format_bytes(report.process_messages)
        );
    }
}

fn data_memory(out: &mut String, report: &Report) {
    if let Some(data) = &report.data_memory {
        let _ = writeln!(out, "  {}", data.words());
    }
    if let Some(why) = &report.data_not_counted {
        let _ = writeln!(out, "  data: not counted: {why}");
    }
}

/// Explains why several micro-batches need more host memory if their sums go to the host.
fn wide_sums(out: &mut String, report: &Report) {
    let has = |memory: &Memory, pool: &str, is_wide: bool| {
        let of_pool = |buffer: &&Buffer| buffer.pool == pool;
        memory.buffers.iter().filter(of_pool).any(|buffer| (buffer.dtype == "f32") == is_wide)
    };
    let is_wide = has(&report.host_per_rank, "gradient staging", true);
    if report.accumulate == "device" && is_wide && has(&report.gpu, "parameters", false) {
        let _ = writeln!(
            out,
            "  gradient staging has 4 bytes a parameter: sums of micro-batches come down in fp32 and wait until clipping is \
             decided, and 16 bits would round them; one micro-batch takes 2"
        );
    }
}

fn step(out: &mut String, report: &Report) {
    let Some(step) = &report.step else { return };
    let world = (report.tensor * report.data) as f64;
    let _ = writeln!(
        out,
        "\na step of {}, {}, summed on: {}\n  {}FLOP of the model, {}FLOP as \
         run on all GPUs\n  rank 0, by lane:",
        counted(step.tokens, "token"),
        counted(report.micro_batches, "micro-batch"),
        report.accumulate,
        si(step.model_flops),
        si(step.hardware_flops * world),
    );
    let used = || step.lanes.iter().filter(|lane| lane.ops > 0);
    let width = used().map(|lane| lane.lane.len()).fold(8, usize::max);
    for lane in used() {
        let (name, ops, noun) = (&lane.lane, lane.ops, of_ops(lane.ops));
        let bytes = format_bytes(lane.bytes);
        let _ = writeln!(out, "    {name:<width$} {ops:>7} {noun:<3}  {bytes}");
    }
}

/// Says whether the config fits, and if not, which changes would make it fit.
fn verdict(loaded: &LoadedConfig, machine: &LocalMachine, report: &Report) -> String {
    if let (true, Some(why)) = (report.fits, &report.not_checked) {
        return format!(
            "GPU memory was not checked: {why}\nto check it, name a described box: --box \
             h100-128gib (`onebox boxes` lists them)\n"
        );
    }
    if report.fits {
        let warnings = report.nearly_full.iter().map(|why| format!("warning: {why}\n"));
        return warnings.chain(["it fits\n".to_owned()]).collect();
    }
    let mut out = String::from("it does not fit\n");
    let FitFailure { remedies, lacking } = FitFailure::new(loaded, machine, None);
    if let Some(lacking) = lacking {
        for line in lacking.lines(&loaded.config, true) {
            let _ = writeln!(out, "{line}");
        }
        return out + virtual_gpus(&loaded.config);
    }
    out += "the nearest changes with which it would, each by itself";
    let simulated = remedies.iter().any(|remedy| remedy.slower.is_some());
    out += if simulated { ", and what they cost (simulated):\n" } else { ":\n" };
    for Remedy { sets, slower } in &remedies {
        let cost = slower.map(|times| format!("{times:.2} x the time"));
        let rounds = sets.iter().any(|set| set.starts_with("offload.moments="));
        let rounds =
            rounds.then(|| "other results: bf16 Adam moments, rounded stochastically".into());
        let notes: Vec<String> = cost.into_iter().chain(rounds).collect();
        let notes =
            if notes.is_empty() { String::new() } else { format!("   # {}", notes.join("; ")) };
        let _ = writeln!(out, "  {}{notes}", arguments(sets));
    }
    out + virtual_gpus(&loaded.config)
}

/// Note about the limits of virtual GPUs; empty for other devices.
const fn virtual_gpus(config: &Config) -> &'static str {
    match config.device {
        DeviceConfig::Cpu { .. } => {
            "these GPUs are virtual: parts of this machine's memory, of device.memory bytes each; to plan for real GPUs, name a box: \
             --box h100-128gib (`onebox boxes` lists them)\n"
        }
        DeviceConfig::Cuda | DeviceConfig::Sim { .. } => "",
    }
}

/// Document that `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    report: &'a Report,
    /// Update mode that was chosen for `Auto` of `offload.update`, and the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen: Option<&'a str>,
    /// Disk space that a run needs.
    disk: Disk,
    /// Changes that would make the config fit, if it does not fit.
    #[serde(flatten)]
    no: FitFailure,
}

impl<'a> Document<'a> {
    fn of(loaded: &'a LoadedConfig, machine: &LocalMachine, report: &'a Report) -> Self {
        let no = match report.fits {
            true => FitFailure::default(),
            false => FitFailure::new(loaded, machine, None),
        };
        let (chosen, disk) = (loaded.chosen.as_deref(), disk(&loaded.config, report));
        Self { report, chosen, disk, no }
    }
}
