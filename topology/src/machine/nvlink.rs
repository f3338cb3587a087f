//! NVLink between GPUs, from the matrix of an export or from the driver.

use std::ffi::OsStr;

use super::kind::pci_kind;
use crate::nvml::{NvLink, NvmlGpu};
use crate::raw::{RawBox, RawKind};
use crate::{Machine, PciKind, nvml};

/// MB/s of one link each way: NVLink 2 to 4, H200's, the bridges of workstation cards, NVLink 1,
/// NVLink 5.
const LINKS: [u64; 5] = [25_000, 26_562, 14_062, 20_000, 50_000];

/// Adds the UUIDs and links that the driver's `library` reports for the GPUs of a live box, or the
/// reason why it reports none.
pub(crate) fn complete(machine: &mut Machine, library: &OsStr) {
    let gpus: Vec<_> = machine.gpus.iter().map(|gpu| gpu.pci).collect();
    if gpus.is_empty() {
        return;
    }
    let reports = match nvml::ask(library, &gpus) {
        Ok(reports) => reports,
        Err(why) => {
            machine.nvlink_unknown = machine.nvlink.is_empty().then_some(why);
            return;
        }
    };
    for (gpu, report) in machine.gpus.iter_mut().zip(&reports) {
        gpu.uuid = gpu.uuid.take().or_else(|| report.as_ref()?.uuid.clone());
    }
    let hidden = reports.iter().filter(|report| report.is_none()).count();
    if hidden < reports.len() {
        machine.nvlink = from_driver(machine, &reports);
    }
    machine.nvlink_unknown =
        (hidden > 0).then(|| format!("{} does not show {hidden} of the GPUs", nvml::NAME));
}

/// MB/s from GPU to GPU, from the driver's answers.
fn from_driver(machine: &Machine, reports: &[Option<NvmlGpu>]) -> Vec<Vec<u64>> {
    let switches = machine.pci.iter().filter(|object| object.kind == PciKind::NvSwitch);
    let switches: Vec<_> = switches.filter_map(|object| object.address).collect();
    let sum = |gpu: usize, counts: &dyn Fn(&NvLink) -> bool| {
        let links = reports[gpu].iter().flat_map(|report| &report.links);
        links.filter(|link| counts(link)).map(|link| link.mb_per_s).sum::<u64>()
    };
    let to_switches =
        |gpu| sum(gpu, &|link| link.to_switch || link.to.is_some_and(|to| switches.contains(&to)));
    let direct = |a, b: usize| sum(a, &|link| link.to == Some(machine.gpus[b].pci));
    square(machine.gpus.len(), direct, to_switches)
}

/// MB/s of each pair: their direct links, or through switches the lower of their two sums.
fn square(
    n: usize,
    direct: impl Fn(usize, usize) -> u64,
    to_switches: impl Fn(usize) -> u64,
) -> Vec<Vec<u64>> {
    let pair = |a: usize, b: usize| {
        if a == b { 0 } else { direct(a, b).max(to_switches(a).min(to_switches(b))) }
    };
    (0..n).map(|a| (0..n).map(|b| pair(a, b)).collect()).collect()
}

/// MB/s from GPU to GPU, in the order of `gpus` (indexes of raw objects); empty if the box reports
/// none.
///
/// If switches join the GPUs, the matrix holds links to the switches' ports.
pub(crate) fn between_gpus(raw: &RawBox, gpus: &[usize]) -> Vec<Vec<u64>> {
    let Some(matrix) = &raw.nvlink else { return Vec::new() };
    let n = matrix.objects.len();
    // The PCI device of each object of the matrix, which may name the driver's device below it.
    let is_device = |at: &usize| raw.objects[*at].kind == RawKind::PciDevice;
    let device: Vec<Option<usize>> =
        matrix.objects.iter().map(|object| raw.way_up((*object)?).find(is_device)).collect();
    let value = |i: usize, j: usize| matrix.values.get(i * n + j).copied().unwrap_or(0);
    let place = |gpu: usize| device.iter().position(|d| *d == Some(gpu));
    let places: Vec<Option<usize>> = gpus.iter().map(|gpu| place(*gpu)).collect();
    if places.iter().all(Option::is_none) {
        return Vec::new();
    }
    let is_switch = |j: &usize| {
        device[*j].is_some_and(|object| pci_kind(raw, object) == Some(PciKind::NvSwitch))
    };
    let to_switches = |gpu: usize| {
        let ports = (0..n).filter(is_switch);
        places[gpu].map_or(0, |i| ports.fold(0u64, |sum, j| sum.saturating_add(value(i, j))))
    };
    let direct = |a: usize, b: usize| match (places[a], places[b]) {
        (Some(i), Some(j)) => value(i, j),
        _ => 0,
    };
    square(gpus.len(), direct, to_switches)
}

/// Number of links with this bandwidth, for `NV#`: at least 1 unless the bandwidth is 0.
pub(crate) fn links(mb_per_s: u64, device_id: (u16, u16)) -> u64 {
    if mb_per_s == 0 {
        return 0;
    }
    // Some sums are whole numbers of links of several generations: 100 GB/s is five of Pascal's,
    // four of Volta's.
    let order = match device_id.1 >> 8 {
        0x15 => [3, 0, 1, 2, 4],
        0x29 | 0x31 | 0x32 => [4, 0, 1, 2, 3],
        _ => [0, 1, 2, 3, 4],
    };
    let whole = |link: &u64| {
        let count = (mb_per_s + link / 2) / link;
        count > 0 && mb_per_s.abs_diff(count * link).saturating_mul(200) <= mb_per_s
    };
    let link = order.iter().map(|i| LINKS[*i]).find(whole).unwrap_or(LINKS[0]);
    ((mb_per_s + link / 2) / link).max(1)
}

/// Names of common models, for boxes whose files do not name them.
pub(crate) fn model_name(device_id: (u16, u16)) -> Option<&'static str> {
    let name = match device_id {
        (0x10de, 0x15f8 | 0x15f9) => "P100",
        (0x10de, 0x1db1 | 0x1db4) => "V100-16GB",
        (0x10de, 0x1db5 | 0x1db8 | 0x1db6) => "V100-32GB",
        (0x10de, 0x1eb8) => "T4",
        (0x10de, 0x20b0 | 0x20b1) => "A100-40GB",
        (0x10de, 0x20b2 | 0x20b5) => "A100-80GB",
        (0x10de, 0x2204) => "RTX 3090",
        (0x10de, 0x2684) => "RTX 4090",
        (0x10de, 0x2230) => "RTX A6000",
        (0x10de, 0x2330) => "H100",
        (0x10de, 0x2331) => "H100 PCIe",
        (0x10de, 0x2335) => "H200",
        (0x10de, 0x26b9) => "L40S",
        (0x10de, 0x2901) => "B200",
        _ => return None,
    };
    Some(name)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::memory::tests::Tree;

    #[test]
    fn bandwidths_are_counted_in_links_of_their_generation() {
        let v100 = (0x10de, 0x1db8);
        for (mb_per_s, count) in
            [(0, 0), (25_000, 1), (50_000, 2), (150_000, 6), (300_000, 12), (450_000, 18)]
        {
            assert_eq!(links(mb_per_s, v100), count, "{mb_per_s}");
        }
        assert_eq!(links(40_000, (0x10de, 0x15f9)), 2);
        assert_eq!(links(56_248, (0x10de, 0x2230)), 4);
        assert_eq!(links(56_000, (0x10de, 0x2230)), 4);
        assert_eq!(links(478_116, (0x10de, 0x2335)), 18);
        assert_eq!(links(7, v100), 1);
        assert_eq!(links(900_000, (0x10de, 0x2901)), 18);
    }

    fn folder() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    /// A DGX-1V without its export's report of NVLink.
    fn unlinked() -> Machine {
        let file = folder().join("../configs/boxes/topologies/dgx1v.xml");
        let mut machine = Machine::from_xml_file(&file).unwrap();
        machine.nvlink.clear();
        machine
    }

    /// That machine with the answers of the driver's stand-in.
    fn with_driver(defines: &[&str]) -> Machine {
        let tree = Tree::new();
        let library = tree.root().join("libnvidia-ml.so.1");
        let words = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let mut words = words.split_whitespace();
        let mut compiler = Command::new(words.next().unwrap_or("cc"));
        compiler.args(words).args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&library);
        compiler.args(defines).arg(folder().join("tests/nvml/fake.c"));
        assert!(compiler.status().unwrap().success(), "the tests need a C compiler");
        let mut machine = unlinked();
        complete(&mut machine, library.as_os_str());
        machine
    }

    fn row(machine: &Machine, gpu: usize) -> String {
        let paths: Vec<_> = (0..8).map(|b| machine.path(gpu, b).to_string()).collect();
        paths.join(" ")
    }

    #[test]
    fn the_driver_reports_direct_links_and_hidden_gpus_are_counted() {
        let machine = with_driver(&[]);
        assert_eq!(row(&machine, 0), "X NV1 NV1 NV2 NV2 SYS SYS SYS");
        assert_eq!(row(&machine, 2), "NV1 NV2 X NV2 SYS SYS NV1 SYS");
        assert_eq!(machine.gpus[3].uuid.as_deref(), Some("GPU-0b"));
        assert_eq!(machine.gpus[4].uuid, None);
        assert!(machine.nvlink_unknown.unwrap().contains("4 of the GPUs"));
    }

    #[test]
    fn links_to_switches_join_all_gpus() {
        let machine = with_driver(&["-DSWITCHES"]);
        assert_eq!(row(&machine, 7), "NV6 NV6 NV6 NV6 NV6 NV6 NV6 X");
        assert_eq!(machine.nvlink_unknown, None);
    }

    #[test]
    fn without_the_drivers_library_the_reason_is_kept_and_nothing_fails() {
        let mut machine = unlinked();
        complete(&mut machine, OsStr::new("libnot-there.so.1"));
        assert_eq!(machine.nvlink_unknown.as_deref(), Some("no libnot-there.so.1 was found"));
        // A library without these functions.
        complete(&mut machine, OsStr::new("libc.so.6"));
        assert!(machine.nvlink_unknown.as_deref().unwrap().contains("not NVIDIA's"));
        assert!(machine.nvlink.is_empty());
    }
}
