//! The connections between GPUs as a matrix, like `nvidia-smi topo`.

use std::fmt::Write as _;

use super::ReportSubject;
use crate::Path;

/// One row and one column per GPU: NVLink if known, and below it the path over PCIe alone.
pub fn matrix(shown: &ReportSubject<'_>) -> String {
    let machine = shown.machine;
    let n = machine.gpus.len();
    let mut out = String::new();
    if n == 0 {
        return "no GPU\n".into();
    }
    let mut square = |title: &str, path: &dyn Fn(usize, usize) -> Path| {
        let _ = writeln!(out, "{title}");
        let _ = write!(out, "{:20}", "");
        for column in 0..n {
            let _ = write!(out, "{:<6}", format!("GPU{column}"));
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
        for row in 0..n {
            let _ = write!(out, "{:<6}{:<14}", format!("GPU{row}"), machine.gpus[row].pci);
            for column in 0..n {
                let _ = write!(out, "{:<6}", path(row, column));
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
        out.push('\n');
    };
    let linked = machine.nvlink.iter().flatten().any(|mb_per_s| *mb_per_s > 0);
    if linked {
        square("NVLink where there is any, else PCIe", &|a, b| machine.path(a, b));
    }
    let title = match &machine.nvlink_unknown {
        None if linked => "PCIe alone",
        None => "PCIe; no GPU has NVLink",
        Some(why) => &format!("PCIe; NVLink is not known: {why}"),
    };
    square(title, &|a, b| machine.pcie_path(a, b));
    out + "X    the same GPU\n\
           NV#  so many NVLinks\n\
           PIX  one PCIe switch\n\
           PXB  several PCIe switches\n\
           PHB  a PCIe host bridge of the CPU\n\
           NODE several host bridges of a NUMA node\n\
           SYS  between NUMA nodes\n"
}
