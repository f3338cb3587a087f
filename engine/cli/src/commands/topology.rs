//! `onebox topology`: shows the box, the placement of ranks, and warnings.

use super::{CommandError, Failable, code, print, print_json};
use files::path_text::ShownPath;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use topology::report::{self, ReportSubject};
use topology::{
    Environment, Machine, Placement, RankPlace, Request, Seats, Severity, parse_bytes, place,
    warnings,
};

/// Show a box and the places of ranks on it.
#[derive(Debug, clap::Args)]
pub(super) struct TopologyArgs {
    /// Show another box: an export of `lstopo --whole-io box.xml`, format 2
    #[arg(long, value_name = "FILE", group = "box")]
    xml: Option<PathBuf>,
    /// Show another box in hwloc's words, such as "pack:2 numa:1 core:8 pu:2"; without GPUs
    #[arg(long, value_name = "TEXT", group = "box")]
    synthetic: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Same as --format json
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Plan for groups of this many tensor-parallel ranks [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    tp: Option<u16>,
    /// Plan for this many data-parallel replicas [default: as many as the GPUs allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    dp: Option<u16>,
    /// Optimizer states of each rank, such as 66GiB, to compare with the memory of its nodes
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    states: Option<u64>,
    /// Staging buffers of each rank, to compare with the memory of its nodes
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    staging: Option<u64>,
    /// Exit with 1 if there is a warning of severity "error"
    #[arg(long)]
    check: bool,
    /// Read /proc and /sys below another directory
    #[arg(long, value_name = "DIR", hide = true)]
    sysroot: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Format {
    /// Nodes, GPUs, plan, warnings
    Table,
    /// The PCI tree
    Tree,
    /// Paths between GPUs
    Matrix,
    /// One JSON document
    Json,
    /// A picture
    Svg,
}

pub(super) fn run(args: &TopologyArgs) -> Result<(), CommandError> {
    let live = args.xml.is_none() && args.synthetic.is_none();
    let root = args.sysroot.clone().or_else(|| live.then(|| PathBuf::from("/")));
    let machine = match (&args.xml, &args.synthetic) {
        (Some(file), _) => Machine::from_xml_file(file).map_err(|e| match e {
            topology::Error::Read { .. } => e.to_string(),
            e => format!("{}: {e}", file.shown()),
        }),
        (_, Some(text)) => Machine::from_synthetic(text).map_err(|e| e.to_string()),
        _ => Machine::discover_under(root.as_deref().unwrap_or(Path::new("/")))
            .map_err(|e| e.to_string()),
    };
    let machine = machine.fail_with(code::DATA)?;
    let variable = |name| std::env::var(name).ok().filter(|_| live);
    let environment = Environment {
        root: root.filter(|_| live),
        visible_devices: variable("CUDA_VISIBLE_DEVICES"),
        device_order: variable("CUDA_DEVICE_ORDER"),
    };
    let placement = placed(&machine, args)?;
    let warnings = warnings(&machine, placement.as_ref(), &environment);
    let shown =
        ReportSubject { machine: &machine, placement: placement.as_ref(), warnings: &warnings };
    match if args.json { Format::Json } else { args.format } {
        Format::Table => print(&report::table(&shown)),
        Format::Tree => print(&report::tree(&shown)),
        Format::Matrix => print(&report::matrix(&shown)),
        Format::Svg => print(&report::svg(&shown)),
        Format::Json => print_json(&document(&shown)),
    }?;
    // Most formats do not show warnings.
    let errors = warnings.iter().filter(|warning| warning.severity == Severity::Error);
    let errors: Vec<&str> = errors.map(|warning| warning.text.as_str()).collect();
    if args.check && !errors.is_empty() {
        return Err(CommandError::new(code::DOES_NOT_FIT, errors.join("; ")));
    }
    Ok(())
}

/// Places the requested ranks, or one rank per GPU; `None` without a request and without GPUs.
fn placed(machine: &Machine, args: &TopologyArgs) -> Result<Option<Placement>, CommandError> {
    let gpus = machine.gpus.len();
    let has_sizes = args.tp.is_some() || args.dp.is_some();
    if gpus == 0 && !has_sizes {
        return Ok(None);
    }
    let tp = usize::from(args.tp.unwrap_or(1));
    let dp = args.dp.map_or((gpus / tp).max(1), usize::from);
    let request = Request {
        tp,
        dp,
        seats: if gpus == 0 { Seats::Virtual } else { Seats::Gpus },
        state_bytes: args.states.unwrap_or(0),
        staging_bytes: args.staging.unwrap_or(0),
        sockets: topology::Sockets::Auto,
    };
    place(machine, &request).map(Some).fail_with(code::DOES_NOT_FIT)
}

/// JSON for other programs. While the number `schema` stays the same, keys may be added, but no key
/// is removed or redefined.
fn document(shown: &ReportSubject<'_>) -> Value {
    let machine = shown.machine;
    let pci = |gpu: &topology::Gpu| gpu.pci.to_string();
    let node = |node: &topology::NumaNode| {
        let gpus = machine.gpus.iter().filter(|gpu| gpu.numa_node == Some(node.id));
        json!({
            "id": node.id,
            "cpus": node.cpus,
            "memory_bytes": node.memory_bytes,
            "free_bytes": node.free_bytes,
            "socket": node.package,
            "distances": node.distances,
            "gpus": gpus.map(pci).collect::<Vec<_>>(),
        })
    };
    let gpu = |(index, gpu): (usize, &topology::Gpu)| {
        json!({
            "pci": pci(gpu),
            "uuid": gpu.uuid,
            "model": gpu.model,
            "numa_node": gpu.numa_node,
            "root_port": machine.root_port(index).map(|port| port.to_string()),
            "link": machine.pci[gpu.node].link,
            "sharers": machine.sharers(index),
            "host_gb_per_s_alone": machine.host_gb_per_s_alone(index).map(rounded),
            "host_gb_per_s_all": machine.host_gb_per_s_all(index).map(rounded),
        })
    };
    let n = machine.gpus.len();
    let square = |path: &dyn Fn(usize, usize) -> topology::Path| -> Vec<Vec<String>> {
        (0..n).map(|a| (0..n).map(|b| path(a, b).to_string()).collect()).collect()
    };
    let ranks = shown.placement.map_or(&[][..], |placement| &placement.ranks);
    json!({
        "schema": 1,
        "name": machine.name,
        "virtual_machine": machine.virtual_machine,
        "cpu_model": machine.cpu_model,
        "live": machine.live,
        "allowed_cpus": machine.allowed_cpus,
        "allowed_nodes": machine.allowed_nodes,
        "core_kinds": machine.core_kinds,
        "numa_nodes": machine.numa_nodes.iter().map(node).collect::<Vec<_>>(),
        "gpus": machine.gpus.iter().enumerate().map(gpu).collect::<Vec<_>>(),
        "p2p": square(&|a, b| machine.pcie_path(a, b)),
        "nvlink": square(&|a, b| machine.path(a, b)),
        "nvlink_unknown": machine.nvlink_unknown,
        "plan": ranks.iter().map(rank).collect::<Vec<_>>(),
        "plan_reasons": shown.placement.map_or(&[][..], |placement| &placement.reasons),
        "warnings": shown.warnings,
    })
}

fn rank(place: &RankPlace) -> Value {
    json!({
        "rank": place.rank,
        "tp_rank": place.tp_rank,
        "dp_rank": place.dp_rank,
        "gpu": place.gpu.map(|gpu| gpu.to_string()),
        "staging_node": place.numa_node,
        "far_staging": place.far_staging,
        "state_nodes": place.state_nodes,
        "adam_cpus": place.worker_cpus,
        "driver_cpu": place.driver_cpu,
        "cpus": place.cpus,
        "reasons": place.reasons,
    })
}

/// Rounds to three decimals; link rates are not known better.
fn rounded(gb_per_s: f64) -> f64 {
    (gb_per_s * 1000.0).round() / 1000.0
}
