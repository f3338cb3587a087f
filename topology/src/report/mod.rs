//! A box and a placement as text and as a picture.

mod canvas;
mod matrix;
mod svg;
mod svg_nvlink;
mod table;
mod tree;

pub use matrix::matrix;
pub use svg::svg;
pub use table::table;
pub use tree::tree;

use crate::{Machine, Placement, Warning, counted};

/// The subject of a report.
#[derive(Debug, Clone, Copy)]
pub struct ReportSubject<'a> {
    /// The box.
    pub machine: &'a Machine,
    /// The places of the ranks.
    pub placement: Option<&'a Placement>,
    /// The findings.
    pub warnings: &'a [Warning],
}

impl ReportSubject<'_> {
    /// The product's name, or a description from the known facts.
    fn title(&self) -> String {
        let machine = self.machine;
        let name = machine.name.clone().unwrap_or_else(|| {
            if machine.live { "this machine".into() } else { "a box without a name".into() }
        });
        let name = if machine.virtual_machine { name + " (virtual machine)" } else { name };
        match machine.gpus.len() {
            0 => name,
            n => format!("{name}: {}", counted(n, "GPU")),
        }
    }
}

/// `15.75`, or `-` if unknown.
fn speed(gb_per_s: Option<f64>) -> String {
    gb_per_s.map_or_else(|| "-".into(), |gb_per_s| format!("{gb_per_s:.2}"))
}

/// The known facts of a link: `gen3 x16`, `15.75 GB/s`.
fn link(link: crate::Link) -> String {
    match (link.generation, link.width, link.max_generation, link.max_width) {
        (Some(g), Some(w), Some(most_g), Some(most_w)) if (g, w) != (most_g, most_w) => {
            format!("gen{g} x{w} of gen{most_g} x{most_w}")
        }
        (Some(g), Some(w), ..) => format!("gen{g} x{w}"),
        _ => link.gb_per_s.map_or_else(|| "-".into(), |gb_per_s| format!("{gb_per_s:.2} GB/s")),
    }
}
