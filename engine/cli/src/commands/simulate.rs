//! `onebox simulate`: simulates a step on a described box, and shows it as text, JSON or a trace.

use super::exit::{CommandError, code};
use super::{BoxArg, ConfigArgs, fit_result, may_write, of_ops, print, print_json, say, unwritten};
use crate::report::progress::si;
use crate::report::reading::TerminalProgress;
use crate::report::stage::Stage;
use crate::report::trace;
use config::{Config, UpdateMode};
use files::path_text::ShownPath;
use layout::LocalMachine;
use layout::build::{RankLayout, lay_out, update_mode};
use predict::plan::{memory_report, ops_of_step};
use predict::search::most_influential;
use predict::simulate::{SimulateError, SimulationReport, groups, mean_step, simulate, summary};
use predict::{choose, schedules};
use std::fmt::Write as _;
use std::path::PathBuf;
use topology::{counted, format_bytes};

mod compare;

use compare::MeasuredRun;

/// Maximum ops of a rank's step in a simulation: about 3 GB of memory, and half a minute.
const MOST_OPS: u64 = 10_000_000;

/// Predict the time of a step on a described box, and what the step waits for. Nothing is measured.
#[derive(Debug, clap::Args)]
pub(super) struct SimulateArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    on_box: BoxArg,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
    /// Do not compare with other values of offload.update and offload.first_forward: their
    /// simulations take longer than that of the step
    #[arg(long)]
    no_schedules: bool,
    /// Compare the simulated step time with the step time of this run, in a line that you can send
    #[arg(long, value_name = "RUN")]
    compare: Option<PathBuf>,
    /// Share of steps that are clipped or skipped; with `offload.update: Speculative` these steps
    /// do a part of the update twice
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    clipped: f64,
    /// Write the last simulated step as a Chrome trace, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

pub(super) fn run(args: &SimulateArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    args.trace.as_ref().map_or(Ok(()), |path| may_write(trace::OUTPUT, path))?;
    let mut loaded = args.on_box.with(&args.config)?.load(machine)?;
    let stage = Stage::begin("simulating the step", 0);
    choose(&mut loaded, machine)?;
    let config = &loaded.config;
    let built = lay_out(config, machine);
    check_length(config, &built)?;
    let memory = memory_report(config, &built);
    let timeline = simulate(config, &built)?;
    let mut report = summary(config, &memory, &timeline);
    report.clip(args.clipped, mean_step(config, &built, report.step_seconds, args.clipped)?);
    drop(stage);
    let stage = Stage::begin("simulating the step with other rates", 0);
    let parts = groups(&report.critical_path);
    report.hangs_on = most_influential(config, &built, &parts, report.unclipped_seconds)?;
    drop(stage);
    if let Some(path) = &args.trace {
        let written = trace::simulated(path, &timeline, config.world_size());
        let ranks = written.map_err(|e| unwritten(path, &e))?;
        say(&format!("trace of {ranks} written to {}", path.shown()));
    }
    if !args.no_schedules {
        let (own, clipped) = (report.step_seconds, args.clipped);
        report.schedules = schedules(config, machine, own, clipped, &TerminalProgress)?;
    }
    report.chosen.clone_from(&loaded.chosen);
    let run = args.compare.as_deref().map(MeasuredRun::read).transpose()?;
    report.measured = run.as_ref().map(|run| run.median);
    report.compared = run.as_ref().map(|run| run.line(config, &report));
    for difference in run.iter().flat_map(|run| run.differences(config)) {
        say(&format!("warning: the run and the simulation are not comparable: {difference}"));
    }
    if args.json {
        print_json(&report)?;
    } else {
        print(&text(config, &report))?;
        if let Some(line) = &report.compared {
            print(&format!("\n{line}\n"))?;
        }
        if !report.fits {
            print(&format!("\nit does not fit, so it would not run: {}\n", memory.binding.words))?;
        }
    }
    fit_result(report.fits)
}

/// Refuses a step with too many ops for a simulation.
fn check_length(config: &Config, built: &RankLayout) -> Result<(), CommandError> {
    let ops = ops_of_step(config, built).map_err(SimulateError::from)?;
    if ops <= MOST_OPS {
        return Ok(());
    }
    let pass = config.batch.micro * config.parallel.data;
    // The remedy stays far below the limit.
    let micro_batches = (built.micro_batches as u64 * MOST_OPS / ops / 4).min(64) as usize;
    let remedy = match micro_batches {
        0 => String::new(),
        some => format!(
            ": a step grows evenly with its micro-batches, so simulate a smaller one, such as --set batch.global={}",
            some * pass
        ),
    };
    let micro_batches = counted(built.micro_batches, "micro-batch");
    let why = format!(
        "a step of {micro_batches} has {ops} ops, and at most {MOST_OPS} are played{remedy}"
    );
    Err(CommandError::new(code::CONFIG, why))
}

/// Parses a share from 0 to 1.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1, such as 0.1".into()),
    }
}

impl From<SimulateError> for CommandError {
    fn from(error: SimulateError) -> Self {
        let code = match &error {
            SimulateError::Step(_) => code::INTERNAL,
            SimulateError::NoBox(_)
            | SimulateError::Box(_)
            | SimulateError::TooFewGpus { .. }
            | SimulateError::NothingAhead { .. } => code::CONFIG,
        };
        Self::new(code, error)
    }
}

fn text(config: &Config, report: &SimulationReport) -> String {
    let mut out = String::new();
    let SimulationReport { name, box_name, tensor, data, .. } = report;
    let _ =
        writeln!(out, "{name}: simulated on {box_name}, TP {tensor} x DP {data}, not measured\n");
    let _ = writeln!(
        out,
        "a step of {} takes {}: {}\n\
         {:.1} TFLOPS per GPU as run, {:.1} of the model ({:.0} % of the rate of large products)",
        counted(config.batch.global, "sample"),
        seconds(report.step_seconds),
        with_range(
            report.tokens_per_second,
            report.tokens_per_second_low,
            report.tokens_per_second_high
        ),
        report.hardware_tflops_per_gpu,
        report.model_tflops_per_gpu,
        100.0 * report.share_of_gemm_rate,
    );
    let _ = writeln!(out, "{}", report.range.reason);
    let influence = report.hangs_on.map_or_else(
        || "no rate of the box makes this step faster: it waits for the starts of ops".to_owned(),
        |influence| influence.words(),
    );
    let _ = writeln!(out, "{influence}");
    if report.clipped > 0.0 {
        let share = 100.0 * report.clipped;
        let _ = match update_mode(config) {
            UpdateMode::Speculative => writeln!(
                out,
                "that is the mean of a run of which {share:.0} % of the steps are clipped or skipped; lanes and waits below are of a step \
                 that is not, which takes {}",
                seconds(report.unclipped_seconds)
            ),
            _ => {
                writeln!(out, "clipped steps take as long as others: the update is not Speculative")
            }
        };
    }
    let _ = writeln!(out, "\nlanes of rank 0      busy   of the step");
    let used = || report.lanes.iter().filter(|lane| lane.ops > 0);
    let width = used().map(|lane| lane.lane.len()).fold(8, usize::max);
    for lane in used() {
        let (name, ops, noun) = (&lane.lane, lane.ops, of_ops(lane.ops));
        let (time, share, bytes) =
            (seconds(lane.seconds), 100.0 * lane.share, format_bytes(lane.bytes));
        let _ = writeln!(
            out,
            "  {name:<width$} {time:>14}   {share:>5.1} %   {ops:>7} {noun:<3}  {bytes}"
        );
    }
    if report.driver_calls > 0 {
        let (time, calls) = (seconds(report.submitting_seconds), report.driver_calls);
        let share = 100.0 * (report.submitting_seconds / report.unclipped_seconds);
        let _ = writeln!(
            out,
            "  (thread) {time:>14}   {share:>5.1} %   {calls:>7} calls of the driver, by the thread that submits"
        );
    }
    if report.one_communication_queue {
        let _ = writeln!(
            out,
            "  TpComm and DpComm are one queue, in the order of the program: NCCL promises no progress to two \
             communicators side by side"
        );
    }
    let overlap = 100.0 * report.overlap;
    let _ = writeln!(out, "  {overlap:.0} % of the offload's work is hidden behind computing");
    let _ = writeln!(out, "\nwhat the step waits for, one after the other");
    for part in
        report.critical_path.iter().filter(|part| part.seconds > 0.005 * report.unclipped_seconds)
    {
        let share = 100.0 * part.seconds / report.unclipped_seconds;
        let (lane, op) = (&part.lane, part.op);
        let _ = writeln!(out, "  {:>14}   {share:>5.1} %   {op} ({lane})", seconds(part.seconds));
    }
    if report.schedules.len() > 1 {
        let _ = writeln!(out, "\nschedules: the step, and host memory of each rank");
        for s in &report.schedules {
            let (time, host) = (seconds(s.step_seconds), format_bytes(s.host_bytes_per_rank));
            let staleness = if s.exact { "" } else { ", one step stale" };
            let share = s.share.map_or(String::new(), |share| format!(", a share of {share}"));
            let room = if s.fits { "" } else { ", does not fit" };
            let _ = writeln!(
                out,
                "  {time:>14}   {:>5.2} x   {host:>10}   {}{share}{staleness}{room}",
                s.ratio, s.schedule
            );
        }
    }
    if let Some(chosen) = &report.chosen {
        let _ = writeln!(out, "\n{chosen}");
    }
    let (gpu, host) = (format_bytes(report.gpu_bytes), format_bytes(report.host_bytes_per_rank));
    let _ = writeln!(out, "\neach GPU holds {gpu}, the host {host} for each rank (`onebox plan`)");
    let _ = writeln!(out, "{}", bound(report));
    for warning in &report.assumed {
        let _ = writeln!(out, "warning: {warning}");
    }
    out
}

/// Sentence about the parts that take most of the step.
fn bound(report: &SimulationReport) -> String {
    let parts = groups(&report.critical_path).into_iter();
    let share = parts.map(|(what, seconds)| (what, seconds / report.unclipped_seconds));
    let mut parts: Vec<_> = share.filter(|(_, share)| *share > 0.005).collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let words = parts.iter().map(|(what, share)| format!("{what} {:.0} %", 100.0 * share));
    format!("the step is bound by {}", words.collect::<Vec<_>>().join(", "))
}

/// A simulated rate of tokens with its range: `46.4 ktok/s (30.2 to 53.4)`, in one unit.
pub(super) fn with_range(rate: f64, low: f64, high: f64) -> String {
    let mut unit = 1.0;
    // The limit of `si`.
    while rate / unit >= 999.95 {
        unit *= 1000.0;
    }
    format!("{}tok/s ({:.1} to {:.1})", si(rate), low / unit, high / unit)
}

pub(super) fn seconds(value: f64) -> String {
    if value >= 100.0 {
        format!("{value:.0} s")
    } else if value >= 1.0 {
        format!("{value:.2} s")
    } else if value >= 1e-3 {
        format!("{:.2} ms", 1e3 * value)
    } else {
        format!("{:.1} us", 1e6 * value)
    }
}
