//! The default report: nodes, GPUs, plan, warnings.

use std::fmt::Write as _;

use super::{ReportSubject, link, speed};
use crate::{RankPlace, Severity, ascending, counted, format_bytes, format_cpu_list, format_nodes};

/// The whole report in lines that fit a terminal.
pub fn table(shown: &ReportSubject<'_>) -> String {
    let machine = shown.machine;
    let mut out = shown.title() + "\n";
    if let Some(model) = &machine.cpu_model {
        let _ = writeln!(out, "{model}");
    }
    let threads: usize = machine.cores.iter().map(|core| core.cpus.len()).sum();
    let _ = writeln!(
        out,
        "{}, {}, {} allowed; {}",
        counted(machine.cores.len(), "core"),
        counted(threads, "CPU"),
        machine.allowed_cpus.len(),
        format_bytes(machine.total_memory)
    );
    if let Some(kinds) = machine.kinds_of_cores() {
        let _ = writeln!(out, "kinds of cores: {kinds}");
    }
    nodes(&mut out, shown);
    gpus(&mut out, shown);
    plan(&mut out, shown);
    warnings(&mut out, shown);
    out
}

fn nodes(out: &mut String, shown: &ReportSubject<'_>) {
    let machine = shown.machine;
    let _ = writeln!(out, "\nNODE  SOCKET  CORES      MEMORY        FREE  GPUS  CPUS");
    for node in &machine.numa_nodes {
        let cores = machine.cores.iter().filter(|core| core.numa_node == node.id);
        // Includes cores without memory of their own.
        let cpus = cores.clone().flat_map(|core| &core.cpus).chain(&node.cpus);
        let cpus = ascending(cpus.copied());
        let cores = cores.count();
        let gpus = machine.gpus.iter().filter(|gpu| gpu.numa_node == Some(node.id)).count();
        let _ = writeln!(
            out,
            "{:<4}  {:<6}  {cores:>5}  {:>10}  {:>10}  {gpus:>4}  {}",
            node.id,
            node.package.map_or("-".into(), |package| package.to_string()),
            format_bytes(node.memory_bytes),
            node.free_bytes.map_or("-".into(), format_bytes),
            format_cpu_list(&cpus),
        );
    }
}

fn gpus(out: &mut String, shown: &ReportSubject<'_>) {
    let machine = shown.machine;
    if machine.gpus.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "\nGPU           NODE  ROOT PORT     SHARED BY  GB/s ALONE  GB/s ALL COPY  LINK         MODEL"
    );
    for (index, gpu) in machine.gpus.iter().enumerate() {
        let _ = writeln!(
            out,
            "{}  {:>4}  {:<12}  {:>9}  {:>10}  {:>13}  {:<11}  {}",
            gpu.pci,
            gpu.numa_node.map_or("-".into(), |node| node.to_string()),
            machine.root_port(index).map_or("-".into(), |port| port.to_string()),
            match machine.hides_its_tree() {
                true => "?".to_owned(),
                false => machine.sharers(index).to_string(),
            },
            speed(machine.host_gb_per_s_alone(index)),
            speed(machine.host_gb_per_s_all(index)),
            link(machine.pci[gpu.node].link),
            gpu.model.as_deref().unwrap_or("-"),
        );
    }
}

fn plan(out: &mut String, shown: &ReportSubject<'_>) {
    let Some(placement) = shown.placement.filter(|placement| !placement.ranks.is_empty()) else {
        return;
    };
    let _ = writeln!(
        out,
        "\nplan: TP {} x DP {}\nRANK  TP  DP  GPU           STAGING  STATES   DRIVER  CORES",
        placement.tp, placement.dp
    );
    for rank in &placement.ranks {
        let _ = writeln!(
            out,
            "{:>4}  {:>2}  {:>2}  {:<12}  {:<7}  {:<7}  {:>6}  {}",
            rank.rank,
            rank.tp_rank,
            rank.dp_rank,
            rank.gpu.map_or("virtual".into(), |gpu| gpu.to_string()),
            format!("node {}", format_nodes(&rank.staging_nodes())),
            format_nodes(&rank.state_nodes),
            rank.driver_cpu.map_or("-".into(), |cpu| cpu.to_string()),
            cores(rank),
        );
        for reason in &rank.reasons {
            let _ = writeln!(out, "      {reason}");
        }
    }
    for reason in &placement.reasons {
        let _ = writeln!(out, "{reason}");
    }
}

fn cores(rank: &RankPlace) -> String {
    let mut cpus = rank.worker_cpus.clone();
    cpus.sort_unstable();
    match cpus.len() {
        0 => "none".into(),
        n => format!("{} ({n})", format_cpu_list(&cpus)),
    }
}

fn warnings(out: &mut String, shown: &ReportSubject<'_>) {
    if shown.warnings.is_empty() {
        return;
    }
    out.push('\n');
    for warning in shown.warnings {
        let severity = match warning.severity {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        let _ = writeln!(
            out,
            "{severity} [{}]: {}\n    remedy: {}",
            warning.id, warning.text, warning.remedy
        );
    }
}
