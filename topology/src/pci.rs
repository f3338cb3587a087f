//! PCI: addresses, links, and the tree between the CPUs and the GPUs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Address of a PCI device, `0000:34:00.0`: the identity of a GPU. The order is that of CUDA with
/// `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// The segment, 0 on most boxes.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device on the bus, below 32.
    pub device: u8,
    /// The function of the device, below 8.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl FromStr for PciAddress {
    type Err = String;

    /// Reads `0000:34:00.0`, `34:00.0`, and CUDA's and NVML's `00000000:34:00.0`, in any case.
    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = || {
            let (rest, function) = text.trim().rsplit_once('.')?;
            let mut parts = rest.rsplit(':');
            let (device, bus) = (parts.next()?, parts.next()?);
            let domain = parts.next().unwrap_or("0");
            let byte = |text: &str| u8::from_str_radix(text, 16).ok();
            let address = Self {
                domain: u32::from_str_radix(domain, 16).ok()?,
                bus: byte(bus)?,
                device: byte(device).filter(|d| *d < 32)?,
                function: byte(function).filter(|f| *f < 8)?,
            };
            parts.next().is_none().then_some(address)
        };
        parsed().ok_or_else(|| format!("{text:?} is no PCI address like 0000:34:00.0"))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

/// One end's report about a PCIe link. A file gives only the speed. Idle GPUs train their links
/// down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Present GB/s each way.
    pub gb_per_s: Option<f64>,
    /// Largest GB/s each way of this end.
    pub max_gb_per_s: Option<f64>,
    /// Present PCIe generation.
    pub generation: Option<u8>,
    /// Present number of lanes.
    pub width: Option<u8>,
    /// Highest PCIe generation of this end.
    pub max_generation: Option<u8>,
    /// Largest number of lanes of this end.
    pub max_width: Option<u8>,
}

impl Link {
    /// A link with only its present speed known; 0 stands for unknown.
    pub(crate) fn of_speed(gb_per_s: f32) -> Self {
        let known = gb_per_s.is_finite() && gb_per_s > 0.0 && gb_per_s < 1e4;
        Self { gb_per_s: known.then(|| f64::from(gb_per_s)), ..Self::default() }
    }

    /// A link from the generations and widths of sysfs.
    pub(crate) fn of_lanes(now: (Option<u8>, Option<u8>), max: (Option<u8>, Option<u8>)) -> Self {
        let speed = |(generation, width): (Option<u8>, Option<u8>)| {
            Some(lane_gb_per_s(generation?)? * f64::from(width?))
        };
        Self {
            gb_per_s: speed(now),
            max_gb_per_s: speed(max),
            generation: now.0,
            width: now.1,
            max_generation: max.0,
            max_width: max.1,
        }
    }
}

/// GB/s each way of one lane after line coding.
fn lane_gb_per_s(generation: u8) -> Option<f64> {
    match generation {
        1 => Some(0.25),
        2 => Some(0.5),
        3 => Some(128.0 / 130.0),
        4 => Some(2.0 * 128.0 / 130.0),
        5 => Some(4.0 * 128.0 / 130.0),
        6 => Some(8.0 * 242.0 / 256.0),
        _ => None,
    }
}

/// The PCIe generation of sysfs's rate, such as `8.0 GT/s PCIe`.
pub(crate) fn generation_of(rate: &str) -> Option<u8> {
    let number: f64 = rate.split_whitespace().next()?.parse().ok()?;
    let rates = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0];
    let index = rates.iter().position(|rate| (rate - number).abs() < 0.01)?;
    u8::try_from(index + 1).ok()
}

/// The role of a PCI object for the planner and the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PciKind {
    /// Between the CPUs and PCI; it has no address.
    HostBridge,
    /// A root port, or a port of a switch.
    Bridge,
    /// A GPU of the box.
    Gpu,
    /// NVLink's switch.
    NvSwitch,
    /// Ethernet or InfiniBand.
    Network,
    /// NVMe, SATA, RAID.
    Storage,
    /// Anything else, which is not drawn.
    Other,
}

/// An object of the PCI tree. Parents stand before their children.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PciNode {
    /// Its role.
    pub kind: PciKind,
    /// `None` for a host bridge.
    pub address: Option<PciAddress>,
    /// Its parent's index in [`Machine::pci`](crate::Machine::pci).
    pub parent: Option<usize>,
    /// Steps from the host bridge. The host bridge is at 0, a root port at 1, a switch's upper port
    /// at 2, its lower ports at 3.
    pub depth: usize,
    /// The NUMA node next to it; `None` if unknown or if there are several.
    pub numa_node: Option<u32>,
    /// This end of its link.
    pub link: Link,
    /// The operating system's names for it, such as `mlx5_0` or `nvme0n1`.
    pub names: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_every_tool_are_read_and_one_form_is_written() {
        for text in ["0000:B7:00.0", "b7:00.0", "00000000:B7:00.0", " 0000:b7:00.0\n"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), "0000:b7:00.0");
        }
        for wrong in ["", "b7", "b7:00", "1:2:3:4.0", "zz:00.0", "00:20.0", "00:00.8", "-1:00.0"] {
            assert!(wrong.parse::<PciAddress>().is_err(), "{wrong}");
        }
        let [a, b]: [PciAddress; 2] = ["0000:0f:00.0", "0001:01:00.0"].map(|t| t.parse().unwrap());
        assert!(a < b);
    }

    #[test]
    fn sixteen_lanes_of_each_generation_have_their_known_speed() {
        for (rate, generation, gb_per_s) in [
            ("2.5 GT/s PCIe", 1, 4.0),
            ("5.0 GT/s PCIe", 2, 8.0),
            ("8.0 GT/s PCIe", 3, 15.75),
            ("16.0 GT/s PCIe", 4, 31.51),
            ("32.0 GT/s PCIe", 5, 63.02),
        ] {
            assert_eq!(generation_of(rate), Some(generation));
            let link = Link::of_lanes((None, None), (Some(generation), Some(16)));
            assert!((link.max_gb_per_s.unwrap() - gb_per_s).abs() < 0.01, "{link:?}");
        }
        assert_eq!(generation_of("Unknown"), None);
        assert_eq!(Link::of_speed(0.0).gb_per_s, None);
        assert_eq!(Link::of_speed(f32::NAN).gb_per_s, None);
    }
}
