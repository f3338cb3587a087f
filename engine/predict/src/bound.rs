//! Rejects configs by a lower bound of their memory, without building the layout.

use crate::changes;
use crate::plan::fits;
use config::{Config, DeviceConfig};
use layout::LocalMachine;
use layout::build::{RankLayout, lay_out};
use layout::least::{LeastBytes, least_bytes};
use std::sync::atomic::{AtomicUsize, Ordering};
use topology::{available_memory, up_to_hundredths};

/// Memory limits of the machine, and the number of layouts built.
#[derive(Debug)]
pub(crate) struct Bound<'a> {
    machine: &'a LocalMachine,
    /// Bytes of available memory of this machine, read once.
    available: u64,
    /// Number of layouts built.
    laid_out: AtomicUsize,
}

impl<'a> Bound<'a> {
    pub(crate) fn of(machine: &'a LocalMachine) -> Self {
        Self { machine, available: available_memory(), laid_out: AtomicUsize::new(0) }
    }

    pub(crate) const fn machine(&self) -> &'a LocalMachine {
        self.machine
    }

    /// Whether `config` fits. The layout is built only if the lower bound of its memory fits.
    pub(crate) fn fits(&self, config: &Config) -> bool {
        let least = least_bytes(config, self.machine);
        let may = self.host_may_hold(config, &least) && gpus_may_hold(&least);
        may && fits(config, &self.count(|| lay_out(config, self.machine)))
    }

    /// Builds the layout with enough memory for virtual GPUs; `None` if the bound does not fit.
    pub(crate) fn widened(&self, config: &mut Config) -> Option<RankLayout> {
        let least = least_bytes(config, self.machine);
        let is_wide = matches!(config.device, DeviceConfig::Cpu { .. });
        let may = self.host_may_hold(config, &least) && (is_wide || gpus_may_hold(&least));
        may.then(|| self.count(|| changes::widen(config, self.machine)))
    }

    /// Counts a layout and builds it.
    pub(crate) fn count<T>(&self, lay_out: impl FnOnce() -> T) -> T {
        self.laid_out.fetch_add(1, Ordering::Relaxed);
        lay_out()
    }

    /// Smallest factor by which the memory of the host or of a GPU must grow; 0 if the config may
    /// fit both.
    pub(crate) fn least_factor(&self, config: &Config, least: &LeastBytes) -> f64 {
        let gpu = match &config.device {
            DeviceConfig::Cpu { .. } => None,
            DeviceConfig::Sim { .. } | DeviceConfig::Cuda => {
                least.limit.map(|limit| (least.device, limit))
            }
        };
        let over = [Some(self.host(config, least)), gpu].into_iter().flatten();
        let over = over.filter(|(bytes, limit)| bytes > limit);
        let factor = |(bytes, limit)| up_to_hundredths(bytes) as f64 / u64::max(limit, 1) as f64;
        over.map(factor).fold(0.0, f64::max)
    }

    /// Number of layouts built.
    #[cfg(test)]
    pub(crate) fn laid_out(&self) -> usize {
        self.laid_out.load(Ordering::Relaxed)
    }

    fn host_may_hold(&self, config: &Config, least: &LeastBytes) -> bool {
        let (bytes, has) = self.host(config, least);
        bytes <= has
    }

    /// Two numbers of bytes of host memory: the lower bound of what the config needs, and what the
    /// host has.
    fn host(&self, config: &Config, least: &LeastBytes) -> (u64, u64) {
        let (ranks, has) = match &config.device {
            DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => {
                (self.machine.ranks(config), self.available)
            }
            DeviceConfig::Sim { box_, .. } => {
                let nodes = (box_.numa_nodes * box_.machines) as u64;
                (config.world_size(), box_.node_memory.saturating_mul(nodes))
            }
        };
        (of_host(config, least).saturating_mul(ranks as u64), has)
    }
}

fn gpus_may_hold(least: &LeastBytes) -> bool {
    least.limit.is_none_or(|limit| least.device <= limit)
}

/// Least bytes of host memory of a rank, including a virtual GPU's memory.
pub(crate) fn of_host(config: &Config, least: &LeastBytes) -> u64 {
    let is_virtual = match &config.device {
        DeviceConfig::Cpu { .. } => true,
        DeviceConfig::Sim { box_, .. } => box_.measured.is_some(),
        DeviceConfig::Cuda => false,
    };
    if is_virtual { least.both } else { least.pinned }
}
