//! Classifies the objects of hwloc's PCI tree.

use crate::PciKind;
use crate::raw::{RawBox, RawKind, RawObject};

/// NVIDIA's vendor number in PCI.
const NVIDIA: u16 = 0x10de;

/// The kind of an object of the PCI tree; `None` for an object outside it.
pub(super) fn pci_kind(raw: &RawBox, index: usize) -> Option<PciKind> {
    let object = &raw.objects[index];
    match object.kind {
        RawKind::HostBridge => Some(PciKind::HostBridge),
        RawKind::PciBridge => Some(PciKind::Bridge),
        RawKind::PciDevice => {
            let pci = object.pci?;
            // Exports without class numbers still list the driver's device below.
            let computes = || {
                os_devices(raw, index).any(|device| {
                    let name = device.name.as_deref().unwrap_or("");
                    name.starts_with("nvml") || name.starts_with("cuda")
                })
            };
            Some(match (pci.class >> 8, pci.vendor_id) {
                (0x03, NVIDIA) => PciKind::Gpu,
                (_, NVIDIA) if computes() => PciKind::Gpu,
                (0x06, NVIDIA) => PciKind::NvSwitch,
                (0x02, _) => PciKind::Network,
                (0x01, _) => PciKind::Storage,
                _ => PciKind::Other,
            })
        }
        _ => None,
    }
}

pub(super) fn os_devices(raw: &RawBox, index: usize) -> impl Iterator<Item = &RawObject> {
    let objects = raw.objects.iter();
    objects.filter(move |o| o.kind == RawKind::OsDevice && o.parent == Some(index))
}
