//! The part of the picture below the GPUs: NVLink.

use super::canvas::Anchor;
use super::svg::{BOLD, Column, FAINT, GAP, GPU, MARGIN, Picture};
use crate::{Path, PciKind};

impl Picture<'_> {
    /// Draws NVLink below the GPUs. Returns the lower edge of the picture.
    pub(super) fn nvlink(&mut self, columns: &[Column<'_>], width: f64) -> f64 {
        let machine = self.machine;
        let bottom = self.gpu_top() + GPU.1;
        if machine.gpus.is_empty() {
            let bottom = self.socket_bottom() + 24.0;
            self.canvas.text((MARGIN, bottom), Anchor::Start, FAINT, "no GPU");
            return bottom;
        }
        let centres: Vec<f64> =
            (0..machine.gpus.len()).filter_map(|gpu| self.centre_of(columns, gpu)).collect();
        let n = machine.gpus.len();
        let pairs = || (0..n).flat_map(move |a| (a + 1..n).map(move |b| (a, b)));
        let links: Vec<(usize, usize, u64)> = pairs()
            .filter_map(|(a, b)| match machine.path(a, b) {
                Path::NvLink(links) => Some((a, b, links)),
                _ => None,
            })
            .collect();
        let Some((_, _, first)) = links.first().copied().filter(|_| centres.len() == n) else {
            return bottom;
        };
        let uniform = links.len() == pairs().count() && links.iter().all(|l| l.2 == first);
        if uniform && n > 2 {
            let top = bottom + 34.0;
            for centre in &centres {
                let style = "stroke=\"#76b900\" stroke-width=\"3\"";
                self.canvas.line((*centre, bottom), (*centre, top), style);
            }
            let style = "rx=\"6\" fill=\"#e3f2c1\" stroke=\"#76b900\" stroke-width=\"1.5\"";
            let switches =
                machine.pci.iter().filter(|object| object.kind == PciKind::NvSwitch).count();
            let height = if switches > 0 { 62.0 } else { 30.0 };
            self.canvas.rect((MARGIN, top), (width - 2.0 * MARGIN, height), style);
            self.switches(switches, top + 8.0, width);
            let who = if switches > 0 { format!("{switches} NVSwitches") } else { "NVLink".into() };
            let text = format!("{who}: NV{first} between any two GPUs");
            self.canvas.text((width / 2.0, top + height - 10.0), Anchor::Middle, BOLD, &text);
            return top + height;
        }
        let mut lowest = bottom;
        for (a, b, links) in links {
            let (from, to) = ((centres[a], bottom), (centres[b], bottom));
            let depth = 24.0 + (centres[b] - centres[a]).abs() / 7.0;
            let style = format!(
                "stroke=\"#76b900\" stroke-width=\"{:.1}\" stroke-opacity=\"0.8\"",
                1.5 * links.min(4) as f64
            );
            self.canvas.arc(from, to, depth, &style);
            lowest = lowest.max(bottom + depth * 0.75);
        }
        let text = "NVLink: the wider, the more links";
        self.canvas.text((MARGIN, lowest + 22.0), Anchor::Start, FAINT, text);
        lowest + 22.0
    }

    /// Draws a row of NVLink switches.
    fn switches(&mut self, count: usize, top: f64, width: f64) {
        let each = (width - 2.0 * MARGIN) / count.max(1) as f64;
        let chip = (each - 2.0 * GAP).clamp(4.0, 84.0);
        for index in 0..count {
            let centre = MARGIN + (index as f64 + 0.5) * each;
            let style = "rx=\"4\" fill=\"#c5e384\" stroke=\"#76b900\"";
            self.canvas.rect((centre - chip / 2.0, top), (chip, 24.0), style);
            if chip > 70.0 {
                self.canvas.text((centre, top + 16.0), Anchor::Middle, FAINT, "NVSwitch");
            }
        }
    }

    /// X coordinate of a GPU's centre, as `below` lays it out.
    fn centre_of(&self, columns: &[Column<'_>], gpu: usize) -> Option<f64> {
        let target = self.machine.gpus[gpu].node;
        for root in columns.iter().flat_map(|column| &column.roots) {
            let start = root.x + (root.width - self.width_of(root.at)) / 2.0;
            let mut open = vec![(root.at, start)];
            while let Some((at, mut x)) = open.pop() {
                if at == target {
                    return Some(x + GPU.0 / 2.0);
                }
                for child in &self.children[at] {
                    open.push((*child, x));
                    x += self.width_of(*child) + GAP;
                }
            }
        }
        None
    }
}
