//! NVLink between GPUs, from the matrix that an export may carry.

use crate::build::pci_kind;
use crate::raw::{RawBox, RawKind};

/// MB/s of one link each way: NVLink 2 to 4, H200's, the bridges of workstation cards, NVLink 1.
const LINKS: [u64; 4] = [25_000, 26_562, 14_062, 20_000];

/// MB/s from GPU to GPU, in the order of `gpus` (indexes of raw objects); empty if the box does not tell.
///
/// Where GPUs are joined by switches the matrix holds links to the switches' ports: two GPUs then reach each other at
/// the lower of their sums.
pub(crate) fn between_gpus(raw: &RawBox, gpus: &[usize]) -> Vec<Vec<u64>> {
    let Some(told) = &raw.nvlink else { return Vec::new() };
    let n = told.objects.len();
    // The PCI device of each object of the matrix: it may name the driver's device below it.
    let device: Vec<Option<usize>> = told
        .objects
        .iter()
        .map(|object| {
            let parent = |at: &usize| raw.objects[*at].parent;
            std::iter::successors(*object, parent)
                .find(|at| raw.objects[*at].kind == RawKind::PciDevice)
        })
        .collect();
    let value = |i: usize, j: usize| told.values.get(i * n + j).copied().unwrap_or(0);
    let place = |gpu: usize| device.iter().position(|d| *d == Some(gpu));
    let places: Vec<Option<usize>> = gpus.iter().map(|gpu| place(*gpu)).collect();
    if places.iter().all(Option::is_none) {
        return Vec::new();
    }
    let is_switch = |j: &usize| {
        device[*j].is_some_and(|object| pci_kind(raw, object) == Some(crate::PciKind::NvSwitch))
    };
    let to_switches = |i: usize| {
        let ports = (0..n).filter(is_switch);
        ports.fold(0u64, |sum, j| sum.saturating_add(value(i, j)))
    };
    let pair = |a: usize, b: usize| match (places[a], places[b]) {
        (Some(i), Some(j)) if a != b => value(i, j).max(to_switches(i).min(to_switches(j))),
        _ => 0,
    };
    (0..gpus.len()).map(|a| (0..gpus.len()).map(|b| pair(a, b)).collect()).collect()
}

/// How many links make this bandwidth, for `NV#`: at least one where there is any.
pub(crate) fn links(mb_per_s: u64, device_id: (u16, u16)) -> u64 {
    if mb_per_s == 0 {
        return 0;
    }
    // Pascal's links are slower; 100 GB/s is four of them or five of the others.
    let pascal = device_id.1 >> 8 == 0x15;
    let order = if pascal { [3, 0, 1, 2] } else { [0, 1, 2, 3] };
    let whole = |link: &u64| {
        let count = (mb_per_s + link / 2) / link;
        count > 0 && mb_per_s.abs_diff(count * link).saturating_mul(200) <= mb_per_s
    };
    let link = order.iter().map(|i| LINKS[*i]).find(whole).unwrap_or(LINKS[0]);
    ((mb_per_s + link / 2) / link).max(1)
}

/// Names of common models, for boxes from files that do not tell them.
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
    use super::*;

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
    }
}
