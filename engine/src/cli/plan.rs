//! `onebox plan`: the report of [`crate::plan`] in words and tables, or as JSON.

use super::check::count;
use super::exit::{Failed, code};
use super::{ConfigArgs, print, say};
use crate::build::{Built, build, device_limit};
use crate::config::{Accumulate, Config, Placement, Recompute};
use crate::plan::{Buffer, Memory, Report, report};
use crate::progress::si;
use device::Arena;
use std::fmt::Write as _;
use topology::format_bytes;

/// Show what a config needs of every GPU and NUMA node.
#[derive(Debug, clap::Args)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// One JSON document on stdout, with every buffer
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &PlanArgs) -> Result<(), Failed> {
    let loaded = args.config.load()?;
    let config = &loaded.config;
    let report = made(config, &build(config))?;
    if args.json {
        let json = serde_json::to_string_pretty(&report);
        print(&(json.map_err(|e| Failed::new(code::INTERNAL, e))? + "\n"))?;
    } else {
        print(&text(config, &report))?;
    }
    if let Some(not_built) = config.not_built(&loaded.origins) {
        for problem in not_built.errors().iter().filter(|p| p.key != "device") {
            say(&format!(
                "note: {}: {}; the plan is that of the nearest thing built",
                problem.key, problem.message
            ));
        }
    }
    if report.fits { Ok(()) } else { Err(Failed::silent(code::DOES_NOT_FIT)) }
}

pub(super) fn made(config: &Config, built: &Built) -> Result<Report, Failed> {
    let defect =
        |e| Failed::new(code::INTERNAL, format!("the step does not pass its own checks: {e}"));
    report(config, built).map_err(defect)
}

/// The whole report.
pub(super) fn text(config: &Config, report: &Report) -> String {
    let mut out = String::new();
    let Report { tensor, data, .. } = report;
    let _ = writeln!(
        out,
        "{}: {} parameters, TP {tensor} x DP {data} = {} {}, {:?}, optimizer on {:?}",
        report.name,
        count(report.parameters as f64),
        tensor * data,
        report.gpu.what,
        config.precision,
        config.offload.optimizer,
    );
    table(&mut out, "each GPU", &report.gpu, true);
    table(&mut out, "host memory of each rank", &report.host_per_rank, true);
    nodes(&mut out, report);
    step(&mut out, report);
    let _ = writeln!(out, "\n{}", report.binding.words);
    let _ = write!(out, "{}", verdict(config, report));
    out
}

/// Why `config` is refused: what needs most, the limit, and what would help.
pub(super) fn refusal(config: &Config, report: &Report) -> String {
    let mut out = format!("{}\n", report.binding.words);
    if report.binding.what == "gpu" {
        table(&mut out, "each GPU", &report.gpu, false);
    } else {
        table(&mut out, "host memory of each rank", &report.host_per_rank, false);
        nodes(&mut out, report);
    }
    out + "\n" + &verdict(config, report)
}

fn table(out: &mut String, title: &str, memory: &Memory, buffers: bool) {
    let _ = writeln!(out, "\n{title}");
    for pool in &memory.pools {
        let _ = writeln!(out, "  {:>12}  {}", format_bytes(pool.bytes), pool.name);
        if !buffers {
            continue;
        }
        for line in grouped(memory.buffers.iter().filter(|b| b.pool == pool.name)) {
            let _ = writeln!(out, "                  {line}");
        }
    }
    let limit = memory.limit.map_or(String::new(), |limit| {
        let reserved = match memory.reserved {
            0 => String::new(),
            bytes => format!(" (after {} for the CUDA context and NCCL)", format_bytes(bytes)),
        };
        format!(" of {}{reserved}", format_bytes(limit))
    });
    let _ = writeln!(out, "  {:>12}  in all{limit}", format_bytes(memory.bytes));
}

/// Buffers that differ in a number of their name only, together: `block.{0..68}.params`.
fn grouped<'a>(buffers: impl Iterator<Item = &'a Buffer>) -> Vec<String> {
    let mut groups: Vec<(String, Vec<&str>, &Buffer, u64)> = Vec::new();
    for buffer in buffers {
        let number = buffer.name.split('.').find(|part| part.parse::<u32>().is_ok());
        let pattern = number.map_or(buffer.name.clone(), |n| buffer.name.replacen(n, "{}", 1));
        let same = |g: &&mut (String, Vec<&str>, &Buffer, u64)| {
            g.0 == pattern && g.2.shape == buffer.shape
        };
        match groups.iter_mut().find(same) {
            Some(group) => {
                group.1.extend(number);
                group.3 += buffer.bytes;
            }
            None => groups.push((pattern, number.into_iter().collect(), buffer, buffer.bytes)),
        }
    }
    let line = |(pattern, numbers, first, bytes): &(String, Vec<&str>, &Buffer, u64)| {
        let name = match numbers[..] {
            [] => pattern.clone(),
            [only] => pattern.replacen("{}", only, 1),
            [first, .., last] => pattern.replacen("{}", &format!("{{{first}..{last}}}"), 1),
        };
        let times = if numbers.len() > 1 { format!("{} x ", numbers.len()) } else { String::new() };
        let (rows, cols) = first.shape;
        let size = format_bytes(*bytes);
        format!("{name:<34} {size:>11}  {times}{} [{rows}, {cols}]", first.dtype)
    };
    groups.iter().map(line).collect()
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
}

fn step(out: &mut String, report: &Report) {
    let Some(step) = &report.step else { return };
    let world = (report.tensor * report.data) as f64;
    let _ = writeln!(
        out,
        "\na step of {} tokens, {} micro-batches, summed on: {}\n  {}FLOP of the model, {}FLOP as \
         run on all GPUs\n  rank 0, by lane:",
        step.tokens,
        report.micro_batches,
        report.accumulate,
        si(step.model_flops),
        si(step.hardware_flops * world),
    );
    for lane in step.lanes.iter().filter(|lane| lane.ops > 0) {
        let _ =
            writeln!(out, "    {:<8} {:>7} ops  {}", lane.lane, lane.ops, format_bytes(lane.bytes));
    }
}

fn verdict(config: &Config, report: &Report) -> String {
    if report.fits {
        return "it fits\n".into();
    }
    let mut out = String::from("it does not fit\n");
    let tried = remedies(config, report);
    if !tried.is_empty() {
        out += "one change at a time, and what it would need of each GPU and of each rank's host memory:\n";
    }
    for (sets, gpu, host, fits) in tried {
        let verdict = if fits { "fits the GPU" } else { "not enough by itself" };
        let (gpu, host) = (format_bytes(gpu), format_bytes(host));
        let _ = writeln!(out, "  {sets:<44} {gpu:>12} {host:>12}  {verdict}");
    }
    out
}

/// (`--set` arguments, bytes of each GPU, host bytes of each rank, fits the GPU) for changes that leave the
/// results as they are, up to rounding.
fn remedies(config: &Config, report: &Report) -> Vec<(String, u64, u64, bool)> {
    let mut tried: Vec<(String, Config)> = Vec::new();
    let mut with = |sets: &str, change: &dyn Fn(&mut Config)| {
        let mut changed = config.clone();
        change(&mut changed);
        tried.push((sets.to_owned(), changed));
    };
    if config.recompute == Recompute::None {
        with("--set recompute=Block", &|c| c.recompute = Recompute::Block);
    }
    if config.offload.optimizer == Placement::Device {
        with("--set offload.optimizer=Host", &|c| c.offload.optimizer = Placement::Host);
    } else if config.offload.accumulate != Accumulate::Host {
        with("--set offload.accumulate=Host", &|c| c.offload.accumulate = Accumulate::Host);
    }
    let tokens = config.model.seq_len * config.batch.micro;
    let divides = tokens.is_multiple_of(config.parallel.tensor);
    if config.parallel.tensor > 1 && !config.parallel.sequence && divides {
        with("--set parallel.sequence=true", &|c| c.parallel.sequence = true);
    }
    let half = config.batch.micro / 2;
    if config.batch.micro.is_multiple_of(2)
        && config.batch.global.is_multiple_of(half * config.parallel.data)
    {
        with(&format!("--set batch.micro={half}"), &|c| c.batch.micro = half);
    }
    let (tensor, data) = (2 * config.parallel.tensor, config.parallel.data / 2);
    let regrid = config.parallel.data.is_multiple_of(2)
        && config.model.heads.is_multiple_of(tensor)
        && config.model.ffn_hidden.is_multiple_of(tensor);
    if regrid {
        let sets = format!("--set parallel.tensor={tensor} --set parallel.data={data}");
        with(&sets, &|c| (c.parallel.tensor, c.parallel.data) = (tensor, data));
    }
    let sizes = |(sets, changed): (String, Config)| {
        let plan = build(&changed).plan;
        let (gpu, host) = (plan.bytes(Arena::Device), plan.bytes(Arena::Pinned));
        (sets, gpu, host, device_limit(&changed).is_none_or(|limit| gpu <= limit))
    };
    let on_gpu = report.binding.what == "gpu";
    let helps = |(_, gpu, host, _): &(String, u64, u64, bool)| {
        if on_gpu {
            *gpu < report.gpu.bytes
        } else {
            gpu + host < report.gpu.bytes + report.host_per_rank.bytes
        }
    };
    let mut tried: Vec<_> = tried.into_iter().map(sizes).filter(helps).collect();
    tried.sort_by_key(|(_, gpu, host, _)| if on_gpu { *gpu } else { gpu + host });
    tried
}
