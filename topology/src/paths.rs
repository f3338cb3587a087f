//! The ways from GPUs to the host and to each other: shared links, their speed, and how far apart
//! two GPUs are.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::machine::nvlink;
use crate::{Link, Machine, PciAddress, PciKind};

/// How two GPUs reach each other, nearest first. Names follow `nvidia-smi topo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Path {
    /// The same GPU.
    Same,
    /// NVLink, with the number of links.
    NvLink(u64),
    /// One PCIe switch.
    Pix,
    /// Several PCIe switches.
    Pxb,
    /// A host bridge.
    Phb,
    /// Several host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes.
    Sys,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.pad("X"),
            Self::NvLink(links) => f.pad(&format!("NV{links}")),
            Self::Pix => f.pad("PIX"),
            Self::Pxb => f.pad("PXB"),
            Self::Phb => f.pad("PHB"),
            Self::Node => f.pad("NODE"),
            Self::Sys => f.pad("SYS"),
        }
    }
}

/// A link on a GPU's way to the host.
#[derive(Debug, Clone, Copy)]
pub struct Hop {
    /// The lower end, an index into [`Machine::pci`]. Everything below it shares the link.
    pub below: usize,
    /// GB/s each way at full speed of both ends; at present speed if full speed is unknown.
    pub gb_per_s: f64,
}

impl Machine {
    /// The objects from a PCI object up to its host bridge, the object itself first.
    pub fn way_up(&self, node: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(node), |at| self.pci.get(*at)?.parent)
    }

    /// The bridge next to the host bridge on the GPU's way, its root port; `None` if the next
    /// object is no bridge.
    pub fn root_port_node(&self, gpu: usize) -> Option<usize> {
        let top = self.way_up(self.gpus[gpu].node).find(|at| self.pci[*at].depth == 1)?;
        (self.pci[top].kind == PciKind::Bridge).then_some(top)
    }

    /// The root port through which the GPU reaches the host; `None` if the GPU is on the host
    /// bridge itself.
    pub fn root_port(&self, gpu: usize) -> Option<PciAddress> {
        self.pci[self.root_port_node(gpu)?].address
    }

    /// Number of GPUs that reach the host through this GPU's root port, itself included.
    pub fn sharers(&self, gpu: usize) -> usize {
        let Some(port) = self.root_port_node(gpu) else { return 1 };
        (0..self.gpus.len()).filter(|other| self.root_port_node(*other) == Some(port)).count()
    }

    /// Whether a hypervisor shows every GPU on a port of its own, so that shared links stay hidden.
    pub fn hides_its_tree(&self) -> bool {
        let alone = |gpu: usize| self.sharers(gpu) == 1 && self.pci[self.gpus[gpu].node].depth <= 2;
        self.virtual_machine && self.gpus.len() > 1 && (0..self.gpus.len()).all(alone)
    }

    /// GB/s of the fastest GPU of the same model, if this GPU gets less than 90 % of it from the
    /// host. Each GPU copies alone.
    pub fn outdone_by(&self, gpu: usize) -> Option<f64> {
        let model = self.gpus[gpu].device_id;
        let peers = (0..self.gpus.len()).filter(|peer| self.gpus[*peer].device_id == model);
        let best =
            peers.filter_map(|peer| self.host_gb_per_s_alone(peer)).max_by(f64::total_cmp)?;
        (self.host_gb_per_s_alone(gpu)? < 0.9 * best).then_some(best)
    }

    /// The links of known speed on the way to the host, nearest first.
    ///
    /// The chain alternates: the object at even depth below the host bridge is the lower end of a
    /// link (a switch's upper port or a device), and its parent is the upper end. Between the upper
    /// and lower ports inside a switch there is no link.
    pub fn hops(&self, gpu: usize) -> Vec<Hop> {
        let own = self.gpus[gpu].node;
        let links = self.way_up(own).filter(|at| {
            let depth = self.pci[*at].depth;
            (depth >= 2 && depth.is_multiple_of(2)) || (*at == own && depth > 0)
        });
        let hop = |below: usize| {
            let above = self.pci[below].parent.map(|parent| &self.pci[parent]);
            let port = above.filter(|node| node.kind == PciKind::Bridge && node.depth % 2 == 1);
            let port = port.map(|node| node.link).unwrap_or_default();
            Some(Hop { below, gb_per_s: ceiling(self.pci[below].link, port)? })
        };
        links.filter_map(hop).collect()
    }

    /// GB/s each way between the GPU and the host while the GPUs `copying` copy as well, by PCIe's
    /// limits alone; `None` if no link is known.
    pub fn host_gb_per_s(&self, gpu: usize, copying: &[usize]) -> Option<f64> {
        let below =
            |node: usize, other: usize| self.way_up(self.gpus[other].node).any(|at| at == node);
        let share = |hop: Hop| {
            let others = copying.iter().filter(|other| **other != gpu && below(hop.below, **other));
            hop.gb_per_s / (others.count() + 1) as f64
        };
        self.hops(gpu).into_iter().map(share).min_by(f64::total_cmp)
    }

    /// [`Machine::host_gb_per_s`] while no other GPU copies.
    pub fn host_gb_per_s_alone(&self, gpu: usize) -> Option<f64> {
        self.host_gb_per_s(gpu, &[])
    }

    /// [`Machine::host_gb_per_s`] while all GPUs of the box copy.
    pub fn host_gb_per_s_all(&self, gpu: usize) -> Option<f64> {
        self.host_gb_per_s(gpu, &Vec::from_iter(0..self.gpus.len()))
    }

    /// Path from GPU `a` to GPU `b`: NVLink if they have links, else [`Machine::pcie_path`].
    pub fn path(&self, a: usize, b: usize) -> Path {
        if a == b {
            return Path::Same;
        }
        match nvlink::links(self.nvlink_mb_per_s(a, b), self.gpus[a].device_id) {
            0 => self.pcie_path(a, b),
            links => Path::NvLink(links),
        }
    }

    /// MB/s of NVLink from GPU `a` to GPU `b`.
    pub fn nvlink_mb_per_s(&self, a: usize, b: usize) -> u64 {
        self.nvlink.get(a).and_then(|row| row.get(b)).copied().unwrap_or(0)
    }

    /// How GPU `a` reaches GPU `b` over PCIe and the CPUs.
    pub fn pcie_path(&self, a: usize, b: usize) -> Path {
        if a == b {
            return Path::Same;
        }
        let (up_a, up_b): (Vec<usize>, Vec<usize>) =
            (self.way_up(self.gpus[a].node).collect(), self.way_up(self.gpus[b].node).collect());
        let meeting = up_a.iter().enumerate().find_map(|(steps, at)| {
            let other = up_b.iter().position(|other| other == at)?;
            Some((*at, steps.max(other)))
        });
        match meeting {
            // A device, a lower port and the common upper port: two steps up are one switch.
            Some((at, steps)) if self.pci[at].kind == PciKind::Bridge => {
                if steps <= 2 {
                    Path::Pix
                } else {
                    Path::Pxb
                }
            }
            Some(_) => Path::Phb,
            None => {
                let (a, b) = (self.gpus[a].numa_node, self.gpus[b].numa_node);
                let one_node = self.numa_nodes.len() == 1;
                if one_node || (a.is_some() && a == b) { Path::Node } else { Path::Sys }
            }
        }
    }
}

/// GB/s of a link. Each end reports the speed it is built for, and the lower one counts. A file
/// gives only the present speed, and the ends should agree. If they differ, a hypervisor made
/// one up or it was read at another moment, and the higher one counts.
fn ceiling(lower: Link, upper: Link) -> Option<f64> {
    let ends = [lower, upper].into_iter();
    let built_for = ends.clone().filter_map(|end| end.max_gb_per_s).min_by(f64::total_cmp);
    built_for.or_else(|| ends.filter_map(|end| end.gb_per_s).max_by(f64::total_cmp))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(gb_per_s: f64) -> Link {
        Link { gb_per_s: Some(gb_per_s), ..Link::default() }
    }

    fn built_for(gb_per_s: f64) -> Link {
        Link { gb_per_s: Some(0.5), max_gb_per_s: Some(gb_per_s), ..Link::default() }
    }

    #[test]
    fn a_link_is_as_fast_as_its_slower_end_is_built_for() {
        assert_eq!(ceiling(built_for(31.5), built_for(15.75)), Some(15.75));
        assert_eq!(ceiling(built_for(31.5), Link::default()), Some(31.5));
        // A hypervisor shows a port at 2 GB/s above a GPU that runs at 15.75.
        assert_eq!(ceiling(now(15.75), now(2.0)), Some(15.75));
        assert_eq!(ceiling(Link::default(), Link::default()), None);
    }
}
