//! `onebox boxes`: lists the box descriptions that the program contains, and writes a box to fill in.

use super::{CommandError, Failable, code, print, print_json, say, unwritten};
use config::bundled::BOXES;
use config::{BoxConfig, load_box, new_box};
use files::durable::create_new;
use files::path_text::ShownPath;
use files::shell::quoted_path;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use topology::format_bytes;

/// List the box descriptions that `--box NAME` accepts.
#[derive(Debug, clap::Args)]
pub(super) struct BoxesArgs {
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Print the table of docs/simulator.md
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Write a box to fill in into this new file, with the meaning, the source and an example of each
    /// key
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "markdown"])]
    new: Option<PathBuf>,
}

/// Row of the list for one box. Link rates are GB/s in each direction, as the box describes them.
#[derive(Serialize)]
struct BoxRow {
    name: &'static str,
    title: String,
    machines: usize,
    /// Number of GPUs of all machines.
    gpus: usize,
    gpu_memory_bytes: u64,
    /// Bytes of host memory of each machine.
    host_memory_bytes: u64,
    gemm_tflops: f32,
    /// Rates of the slowest and the fastest GPU that copies alone.
    link_gb_per_s: [f64; 2],
    /// Rate of the slowest GPU while all GPUs copy.
    link_gb_per_s_all: f64,
    /// Fastest NVLink rate between two GPUs; 0 if NVLink joins none.
    nvlink_gb_per_s: f64,
    /// Whether NVLink joins every pair of GPUs.
    nvlink_joins_all: bool,
    /// Rate at which each GPU sends in sums over PCIe; 0 if the box does not say it.
    pcie_sums_gb_per_s: f32,
    /// Rate between machines.
    network_gb_per_s: f32,
}

pub(super) fn run(args: &BoxesArgs) -> Result<(), CommandError> {
    if let Some(path) = &args.new {
        return write_new(path);
    }
    let listed = |(name, _): &(&'static str, _)| {
        let described = load_box(Path::new(name)).fail_with(code::INTERNAL)?;
        Ok(listed(name, &described))
    };
    let all = BOXES.iter().map(listed).collect::<Result<Vec<_>, CommandError>>()?;
    match (args.json, args.markdown) {
        (true, _) => print_json(&all),
        (_, true) => print(&markdown(&all)),
        _ => print(&table(&all)),
    }
}

/// Writes a box to fill in. Users edit boxes, so onebox replaces no file.
fn write_new(path: &Path) -> Result<(), CommandError> {
    let written = create_new(path).and_then(|mut file| file.write_all(new_box().as_bytes()));
    let shown = path.shown();
    written.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => {
            let why = format!(
                "--new {shown}: it exists, and no file is replaced; give another name, or remove it"
            );
            CommandError::new(code::NO_RUN_DIR, why)
        }
        _ => unwritten(path, &error),
    })?;
    say(&format!(
        "{shown}: written; fill in its keys\n\nnext, try:\n  onebox plan CONFIG --box {}",
        quoted_path(path)
    ));
    Ok(())
}

fn listed(name: &'static str, described: &BoxConfig) -> BoxRow {
    let alone = f64::from(described.host.link_gb_per_s);
    let (mut link, mut all) = ([alone; 2], alone);
    let mut nvlink = vec![f64::from(described.nvlink_gb_per_s())];
    if let Some(machine) = &described.machine {
        let gpus = 0..machine.gpus.len();
        let each = gpus.clone().filter_map(|gpu| machine.host_gb_per_s_alone(gpu));
        link = each.fold([f64::INFINITY, 0.0], |[a, b], rate| [a.min(rate), b.max(rate)]);
        let each = gpus.clone().filter_map(|gpu| machine.host_gb_per_s_all(gpu));
        all = each.fold(f64::INFINITY, f64::min);
        let between = |a| (0..a).map(move |b| machine.nvlink_mb_per_s(a, b) as f64 / 1e3);
        nvlink = gpus.flat_map(between).collect();
    }
    BoxRow {
        name,
        title: described.name.clone(),
        machines: described.machines,
        gpus: described.gpus,
        gpu_memory_bytes: described.gpu_memory,
        host_memory_bytes: described.node_memory * described.numa_nodes as u64,
        gemm_tflops: described.gpu.gemm_tflops,
        link_gb_per_s: link,
        link_gb_per_s_all: all,
        nvlink_gb_per_s: nvlink.iter().copied().fold(0.0, f64::max),
        nvlink_joins_all: !nvlink.is_empty() && nvlink.iter().all(|rate| *rate > 0.0),
        pcie_sums_gb_per_s: described.pcie_sums_gb_per_s(),
        network_gb_per_s: described.network_gb_per_s,
    }
}

const HEADS: [&str; 8] =
    ["NAME", "BOX", "GPUs", "EACH", "TFLOPS", "HOST", "LINK OF A GPU", "BETWEEN GPUs"];

impl BoxRow {
    fn columns(&self) -> [String; 8] {
        let rate = |rate: f64| format!("{}", (rate * 10.0).round() / 10.0);
        let [slow, fast] = self.link_gb_per_s.map(rate);
        let mut link = if slow == fast { slow.clone() } else { format!("{slow} to {fast}") };
        link += " GB/s";
        if rate(self.link_gb_per_s_all) != slow {
            let _ = write!(link, ", {} while all copy", rate(self.link_gb_per_s_all));
        }
        let nvlink = format!("NVLink {} GB/s", rate(self.nvlink_gb_per_s));
        let mut between = match (self.gpus, self.nvlink_joins_all) {
            (1, _) => "-".into(),
            (_, true) => nvlink,
            (_, false) if self.nvlink_gb_per_s > 0.0 => nvlink + " between some",
            (_, false) if self.pcie_sums_gb_per_s > 0.0 => {
                format!("over these links, sums {} GB/s", rate(f64::from(self.pcie_sums_gb_per_s)))
            }
            (_, false) => "over these links".into(),
        };
        if self.machines > 1 {
            let network = rate(f64::from(self.network_gb_per_s));
            let _ = write!(between, "; between {} machines {network} GB/s", self.machines);
        }
        [
            self.name.into(),
            self.title.clone(),
            self.gpus.to_string(),
            format_bytes(self.gpu_memory_bytes),
            self.gemm_tflops.to_string(),
            format_bytes(self.host_memory_bytes),
            link,
            between,
        ]
    }
}

fn table(all: &[BoxRow]) -> String {
    let rows: Vec<[String; 8]> =
        std::iter::once(HEADS.map(str::to_owned)).chain(all.iter().map(BoxRow::columns)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let mut out = String::new();
    for row in &rows {
        for (column, text) in row.iter().enumerate() {
            let width = width(column).unwrap_or(0);
            // Numbers are aligned to the right.
            let _ = match column {
                2..=5 => write!(out, "{text:>width$}  "),
                _ => write!(out, "{text:<width$}  "),
            };
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out + "\nTFLOPS: what large 16-bit products sustain, without sparsity. HOST: memory of a machine.\n\
           onebox plan --model FOLDER --box NAME\n"
}

fn markdown(all: &[BoxRow]) -> String {
    let mut out = String::from(
        "| name | box | GPUs | each | TFLOPS | host | link of a GPU | between GPUs |\n|---|---|---|---|---|---|---|---|\n",
    );
    for row in all.iter().map(BoxRow::columns) {
        let [name, rest @ ..] = row;
        let _ = writeln!(out, "| [{name}](../configs/boxes/{name}.ron) | {} |", rest.join(" | "));
    }
    out
}
