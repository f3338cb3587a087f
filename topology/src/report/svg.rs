//! A picture of the box: sockets, nodes and their cores above, uplinks and switches below them,
//! then the GPUs, and NVLink below the GPUs. Ranks and their cores have the colour of their
//! tensor-parallel group.

use super::ReportSubject;
use super::canvas::{Anchor, Canvas};
use crate::{Machine, NumaNode, PciKind, RankPlace, counted, format_bytes};

pub(super) const MARGIN: f64 = 28.0;
pub(super) const GAP: f64 = 8.0;
pub(super) const GPU: (f64, f64) = (88.0, 92.0);
const CHIP: f64 = 26.0;
const NODE_LEAST: f64 = 150.0;
const NODE_TOP: f64 = 122.0;
/// Width of the text on an uplink.
const PLATE: f64 = 120.0;
const UPLINK: f64 = 74.0;
const SWITCH: (f64, f64) = (24.0, 20.0);
const CORE: f64 = 11.0;

const INK: &str = "fill=\"#1f2933\"";
pub(super) const FAINT: &str = "fill=\"#616e7c\" font-size=\"11\"";
const TITLE: &str = "fill=\"#1f2933\" font-size=\"20\" font-weight=\"bold\"";
pub(super) const BOLD: &str = "fill=\"#1f2933\" font-weight=\"bold\"";
const PLAIN: &str = "#e4e7eb";
/// Fill colours of tensor-parallel groups.
const COLOURS: [&str; 8] =
    ["#9fd3f5", "#f9c784", "#b5e3a8", "#e3b1e6", "#f6a5a5", "#a8e0dc", "#d8d88a", "#c3b8f0"];

/// The whole picture as one SVG document.
pub fn svg(shown: &ReportSubject<'_>) -> String {
    Picture::new(shown).draw()
}

/// A column of the picture: a root port or host bridge with GPUs below it.
pub(super) struct Root {
    pub(super) at: usize,
    pub(super) x: f64,
    pub(super) width: f64,
}

/// A node with its columns.
pub(super) struct Column<'a> {
    node: Option<&'a NumaNode>,
    x: f64,
    width: f64,
    pub(super) roots: Vec<Root>,
}

pub(super) struct Picture<'a> {
    shown: &'a ReportSubject<'a>,
    pub(super) machine: &'a Machine,
    /// Whether each object of the PCI list is drawn.
    drawn: Vec<bool>,
    pub(super) children: Vec<Vec<usize>>,
    pub(super) canvas: Canvas,
    node_height: f64,
    /// Largest number of switches above one another.
    levels: usize,
}

impl<'a> Picture<'a> {
    fn new(shown: &'a ReportSubject<'a>) -> Self {
        let machine = shown.machine;
        let mut drawn = vec![false; machine.pci.len()];
        for (at, object) in machine.pci.iter().enumerate() {
            let leaf = matches!(object.kind, PciKind::Gpu | PciKind::Network | PciKind::Storage);
            let with_gpu = || {
                let top = machine.way_up(at).last();
                machine.gpus.iter().any(|gpu| machine.way_up(gpu.node).last() == top)
            };
            if leaf && with_gpu() {
                machine.way_up(at).for_each(|at| drawn[at] = true);
            }
        }
        let mut children = vec![Vec::new(); machine.pci.len()];
        for (at, object) in machine.pci.iter().enumerate().filter(|(at, _)| drawn[*at]) {
            if let Some(parent) = object.parent {
                children[parent].push(at);
            }
        }
        let levels = machine.gpus.iter().map(|gpu| {
            let up = machine.way_up(gpu.node).skip(1);
            up.filter(|at| is_switch(machine, *at)).count()
        });
        let levels = levels.max().unwrap_or(0);
        Self {
            shown,
            machine,
            drawn,
            children,
            canvas: Canvas::default(),
            node_height: 0.0,
            levels,
        }
    }

    fn draw(mut self) -> String {
        let columns = self.columns();
        let width = columns.last().map_or(0.0, |c| c.x + c.width) + MARGIN;
        let width = width.max(860.0);
        self.node_height = columns.iter().map(|c| self.height_of_node(c)).fold(0.0, f64::max);
        self.canvas.text((MARGIN, 38.0), Anchor::Start, TITLE, &self.shown.title());
        self.subtitle();
        self.legend();
        self.sockets(&columns);
        for column in &columns {
            self.node(column);
            for root in &column.roots {
                self.root(column, root);
            }
        }
        let bottom = self.nvlink(&columns, width);
        self.canvas.finish(width, bottom + MARGIN)
    }

    /// Y coordinate of the GPUs' upper edge.
    pub(super) fn gpu_top(&self) -> f64 {
        NODE_TOP + self.node_height + UPLINK + self.levels as f64 * (SWITCH.0 + SWITCH.1)
    }

    /// Y coordinate of the sockets' lower edge.
    pub(super) fn socket_bottom(&self) -> f64 {
        NODE_TOP + self.node_height + 10.0
    }

    fn columns(&self) -> Vec<Column<'a>> {
        let machine = self.machine;
        let roots_of = |node: Option<u32>| {
            let tops = (0..machine.pci.len()).filter(|at| {
                let object = &machine.pci[*at];
                // A host bridge with several root ports takes several columns.
                self.drawn[*at]
                    && object.depth == 1
                    && object.numa_node == node
                    && !self.gpus_below(*at).is_empty()
            });
            tops.collect::<Vec<_>>()
        };
        let mut nodes: Vec<Option<&NumaNode>> = machine.numa_nodes.iter().map(Some).collect();
        nodes.sort_by_key(|node| node.map(|node| (node.package, node.id)));
        if !roots_of(None).is_empty() {
            nodes.push(None);
        }
        let (mut x, mut last, mut columns) = (MARGIN + GAP, None, Vec::new());
        for node in nodes {
            let package = node.and_then(|node| node.package);
            if last.is_some_and(|last| last != package) {
                x += 3.0 * GAP;
            }
            last = Some(package);
            let start = x;
            let mut inner = x + GAP;
            let mut roots = Vec::new();
            for at in roots_of(node.map(|node| node.id)) {
                let width = self.width_of(at).max(PLATE + GAP);
                roots.push(Root { at, x: inner, width });
                inner += width + 2.0 * GAP;
            }
            let width = (inner - start - GAP).max(NODE_LEAST);
            columns.push(Column { node, x: start, width, roots });
            x = start + width + 2.0 * GAP;
        }
        columns
    }

    fn gpus_below(&self, at: usize) -> Vec<usize> {
        let below =
            |gpu: &usize| self.machine.way_up(self.machine.gpus[*gpu].node).any(|up| up == at);
        (0..self.machine.gpus.len()).filter(below).collect()
    }

    /// Width of an object and everything below it.
    pub(super) fn width_of(&self, at: usize) -> f64 {
        match self.machine.pci[at].kind {
            PciKind::Gpu => GPU.0,
            PciKind::HostBridge | PciKind::Bridge => {
                let widths = self.children[at].iter().map(|child| self.width_of(*child));
                let sum: f64 = widths.sum();
                sum + GAP * self.children[at].len().saturating_sub(1) as f64
            }
            _ => CHIP,
        }
    }

    fn subtitle(&mut self) {
        let machine = self.machine;
        let mut parts = Vec::new();
        parts.extend(machine.cpu_model.clone());
        parts.push(counted(machine.cores.len(), "core"));
        parts.push(format_bytes(machine.total_memory));
        parts.extend(machine.gpus.first().and_then(|gpu| gpu.model.clone()));
        let gpus = 0..machine.gpus.len();
        let total: f64 = gpus.filter_map(|gpu| machine.host_gb_per_s_all(gpu)).sum();
        if total > 0.0 {
            parts.push(format!("{total:.0} GB/s each way to the host in all"));
        }
        self.canvas.text((MARGIN, 60.0), Anchor::Start, INK, &parts.join("  ·  "));
    }

    fn legend(&mut self) {
        let Some(placement) = self.shown.placement else { return };
        let mut x = MARGIN;
        // Without groups each rank has a colour, and the GPUs name the ranks.
        let groups = if placement.tp > 1 { placement.dp.min(16) } else { 0 };
        for group in 0..groups {
            let fill = format!("rx=\"3\" fill=\"{}\" stroke=\"#9aa5b1\"", colour(group));
            self.canvas.rect((x, 76.0), (14.0, 14.0), &fill);
            let text = format!("TP group {group}");
            self.canvas.text((x + 20.0, 88.0), Anchor::Start, INK, &text);
            x += 104.0;
        }
        let text = "squares: cores, in the colour of the ranks whose parameters they update; every other rank has a dark outline";
        self.canvas.text((x, 88.0), Anchor::Start, FAINT, text);
    }

    fn sockets(&mut self, columns: &[Column<'_>]) {
        let package = |column: &Column<'_>| column.node.and_then(|node| node.package);
        for group in columns.chunk_by(|a, b| package(a) == package(b)) {
            let (Some(first), Some(last)) = (group.first(), group.last()) else { continue };
            let (x, right) = (first.x - GAP, last.x + last.width + GAP);
            let style = "rx=\"10\" fill=\"#f5f7fa\" stroke=\"#cbd2d9\"";
            let height = self.node_height + 34.0;
            self.canvas.rect((x, NODE_TOP - 24.0), (right - x, height), style);
            let name =
                package(first).map_or("CPU".to_owned(), |package| format!("socket {package}"));
            self.canvas.text((x + 12.0, NODE_TOP - 8.0), Anchor::Start, FAINT, &name);
        }
    }

    fn cores_of(&self, node: u32) -> Vec<u32> {
        let cores = self.machine.cores.iter().filter(|core| core.numa_node == node);
        cores.filter_map(|core| core.cpus.first().copied()).collect()
    }

    fn cores_per_row(&self, column: &Column<'_>) -> usize {
        (((column.width - 24.0) / (CORE + 3.0)) as usize).max(1)
    }

    fn height_of_node(&self, column: &Column<'_>) -> f64 {
        let cores = column.node.map_or(0, |node| self.cores_of(node.id).len());
        let rows = cores.div_ceil(self.cores_per_row(column)).max(1);
        50.0 + rows as f64 * (CORE + 3.0)
    }

    fn node(&mut self, column: &Column<'_>) {
        let (at, size) = ((column.x, NODE_TOP), (column.width, self.node_height));
        let Some(node) = column.node else {
            let style = "rx=\"6\" fill=\"#ffffff\" stroke=\"#9aa5b1\" stroke-dasharray=\"4 3\"";
            self.canvas.rect(at, size, style);
            self.canvas.text((at.0 + 12.0, at.1 + 20.0), Anchor::Start, BOLD, "node unknown");
            return;
        };
        self.canvas.rect(at, size, "rx=\"6\" fill=\"#ffffff\" stroke=\"#7b8794\"");
        let name = format!("NUMA node {}", node.id);
        self.canvas.text((at.0 + 12.0, at.1 + 19.0), Anchor::Start, BOLD, &name);
        let cores = self.cores_of(node.id);
        let facts =
            format!("{} · {}", counted(cores.len(), "core"), format_bytes(node.memory_bytes));
        self.canvas.text((at.0 + 12.0, at.1 + 35.0), Anchor::Start, FAINT, &facts);
        let per_row = self.cores_per_row(column);
        for (index, cpu) in cores.iter().enumerate() {
            let x = at.0 + 12.0 + (index % per_row) as f64 * (CORE + 3.0);
            let y = at.1 + 44.0 + (index / per_row) as f64 * (CORE + 3.0);
            let owner = self.ranks().find(|rank| rank.worker_cpus.contains(cpu));
            let fill = owner.map_or("#ffffff", |rank| colour(rank.dp_rank));
            // Outlines distinguish neighbouring ranks of one group.
            let stroke = match owner {
                Some(rank) if rank.rank % 2 == 1 => "#52606d",
                Some(_) => "#b8c2cc",
                None => "#cbd2d9",
            };
            let style = format!("rx=\"2\" fill=\"{fill}\" stroke=\"{stroke}\"");
            self.canvas.rect((x, y), (CORE, CORE), &style);
        }
    }

    fn ranks(&self) -> impl Iterator<Item = &'a RankPlace> + use<'a> {
        self.shown.placement.into_iter().flat_map(|placement| &placement.ranks)
    }

    /// Draws a root port: its uplink with the link's speed, and everything below.
    fn root(&mut self, column: &Column<'_>, root: &Root) {
        let machine = self.machine;
        let centre = root.x + root.width / 2.0;
        let (top, bottom) = (NODE_TOP + self.node_height, NODE_TOP + self.node_height + UPLINK);
        let gpus = self.gpus_below(root.at);
        let all = gpus.first().and_then(|gpu| machine.host_gb_per_s_all(*gpu));
        // The link nearest the host.
        let link = gpus.first().and_then(|gpu| machine.hops(*gpu).last().copied());
        let shared = gpus.len() > 1;
        let hidden = machine.hides_its_tree();
        let slow = gpus.iter().find_map(|gpu| machine.outdone_by(*gpu));
        let ink = match (shared, slow) {
            (true, _) => "#c2410c",
            (false, Some(_)) => "#b7791f",
            (false, None) if hidden => "#616e7c",
            (false, None) => "#2f855a",
        };
        let width = link.map_or(2.0, |link| (link.gb_per_s / 6.0).clamp(2.0, 9.0));
        let style = format!("stroke=\"{ink}\" stroke-width=\"{width:.1}\"");
        let from = centre.clamp(column.x + 6.0, column.x + column.width - 6.0);
        let first = self.switch_below(root.at);
        let end = first.map_or_else(|| self.gpu_top(), |_| bottom);
        self.canvas.line((from, top), (centre, end), &style);
        let label = link.map_or("uplink".to_owned(), |link| format!("{:.2} GB/s", link.gb_per_s));
        let detail = match (shared, all, slow) {
            (true, Some(all), _) => format!("÷ {} = {all:.2} each", gpus.len()),
            (_, _, Some(best)) => format!("slow: peers {best:.2}"),
            _ if hidden => "sharing hidden".to_owned(),
            _ => "not shared".to_owned(),
        };
        let address = machine.pci[root.at].address.map_or(String::new(), |a| a.to_string());
        let left = centre - PLATE / 2.0;
        let plate = "rx=\"4\" fill=\"#ffffff\" fill-opacity=\"0.94\" stroke=\"#cbd2d9\"";
        self.canvas.rect((left, top + 10.0), (PLATE, 50.0), plate);
        let bold = format!("fill=\"{ink}\" font-weight=\"bold\"");
        self.canvas.text((centre, top + 25.0), Anchor::Middle, &bold, &label);
        self.canvas.text((centre, top + 40.0), Anchor::Middle, INK, &detail);
        self.canvas.text((centre, top + 54.0), Anchor::Middle, FAINT, &address);
        let start = root.x + (root.width - self.width_of(root.at)) / 2.0;
        self.below(root.at, start, 0);
    }

    /// The first switch at or below an object.
    fn switch_below(&self, at: usize) -> Option<usize> {
        if is_switch(self.machine, at) {
            return Some(at);
        }
        self.children[at].iter().find_map(|child| self.switch_below(*child))
    }

    /// Draws an object from `x` on, with `level` switches above it.
    fn below(&mut self, at: usize, x: f64, level: usize) {
        let switch = is_switch(self.machine, at);
        let bar = NODE_TOP + self.node_height + UPLINK + level as f64 * (SWITCH.0 + SWITCH.1);
        let children = self.children[at].clone();
        let mut child_x = x;
        for child in children {
            let width = self.width_of(child);
            if switch {
                let to = match self.switch_below(child) {
                    Some(_) => bar + SWITCH.0 + SWITCH.1,
                    None => self.gpu_top(),
                };
                let (from, to) =
                    ((child_x + width / 2.0, bar + SWITCH.0), (child_x + width / 2.0, to));
                self.canvas.line(from, to, "stroke=\"#7b8794\" stroke-width=\"2\"");
            }
            self.below(child, child_x, level + usize::from(switch));
            child_x += width + GAP;
        }
        if switch {
            let width = self.width_of(at);
            let style = "rx=\"5\" fill=\"#dbe4ee\" stroke=\"#7b8794\"";
            self.canvas.rect((x, bar), (width, SWITCH.0), style);
            let address = self.machine.pci[at].address.map_or(String::new(), |a| a.to_string());
            let name =
                if width > 150.0 { format!("PCIe switch {address}") } else { "switch".into() };
            self.canvas.text((x + width / 2.0, bar + 16.0), Anchor::Middle, INK, &name);
        }
        match self.machine.pci[at].kind {
            PciKind::Gpu => self.gpu(at, x),
            PciKind::Network => self.chip(at, x, "#fde68a", "NIC"),
            PciKind::Storage => self.chip(at, x, "#e5e7eb", "NVMe"),
            _ => {}
        }
    }

    fn chip(&mut self, at: usize, x: f64, fill: &str, what: &str) {
        let top = self.gpu_top();
        let style = format!("rx=\"4\" fill=\"{fill}\" stroke=\"#9aa5b1\"");
        self.canvas.rect((x, top), (CHIP, 72.0), &style);
        let name = self.machine.pci[at].names.last().map_or(what, String::as_str);
        let name = if name.chars().count() > 10 { what } else { name };
        self.canvas.upright((x + CHIP / 2.0 + 4.0, top + 36.0), FAINT, name);
    }

    fn gpu(&mut self, at: usize, x: f64) {
        let Some(index) = self.machine.gpus.iter().position(|gpu| gpu.node == at) else { return };
        let gpu = &self.machine.gpus[index];
        let rank = self.ranks().find(|rank| rank.gpu == Some(gpu.pci));
        let fill = rank.map_or(PLAIN, |rank| colour(rank.dp_rank));
        let (top, centre) = (self.gpu_top(), x + GPU.0 / 2.0);
        let style = format!("rx=\"6\" fill=\"{fill}\" stroke=\"#52606d\" stroke-width=\"1.5\"");
        self.canvas.rect((x, top), GPU, &style);
        self.canvas.text((centre, top + 20.0), Anchor::Middle, BOLD, &format!("GPU {index}"));
        self.canvas.text((centre, top + 36.0), Anchor::Middle, FAINT, &gpu.pci.to_string());
        if let Some(rank) = rank {
            let text = format!("rank {}", rank.rank);
            self.canvas.text((centre, top + 54.0), Anchor::Middle, INK, &text);
            let text = format!("TP {} · DP {}", rank.tp_rank, rank.dp_rank);
            self.canvas.text((centre, top + 69.0), Anchor::Middle, FAINT, &text);
        }
        if let Some(all) = self.machine.host_gb_per_s_all(index) {
            let text = format!("{all:.2} GB/s");
            self.canvas.text((centre, top + 85.0), Anchor::Middle, BOLD, &text);
        }
    }
}

/// Whether an object is drawn as a switch: a bridge at even depth is a switch's upper port.
fn is_switch(machine: &Machine, at: usize) -> bool {
    let object = &machine.pci[at];
    object.kind == PciKind::Bridge && object.depth >= 2 && object.depth.is_multiple_of(2)
}

fn colour(group: usize) -> &'static str {
    COLOURS[group % COLOURS.len()]
}
