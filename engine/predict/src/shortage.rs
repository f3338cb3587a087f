//! Which memory is short where no layout of a model fits, and how much of it would be enough.

use super::changes;
use super::plan::{decided, fits};
use super::search::{layouts, words};
use super::variants::{States, variants};
use config::{Config, DeviceConfig, LoadedConfig};
use engine::memory::{GPU, MemoryUse};
use layout::LocalMachine;
use layout::build::{RankLayout, device_bytes, device_limit, lay_out, reserved_bytes};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;
use tensor_parallel::Ring;
use topology::up_to_hundredths;

/// More bytes than a memory of a described box may have.
const MOST: u64 = 1 << 50;

/// What is short in the layout that is closest to fitting.
#[derive(Clone, Debug, Serialize)]
pub struct Shortage {
    /// One memory, or both where no layout is short of one alone.
    pub short: Vec<MemoryShortage>,
    /// How states are kept there.
    pub states: States,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// Samples of a micro-batch.
    pub micro: usize,
    /// The layout in words.
    pub words: String,
    /// `key=value`, the layout that fits with so much.
    pub sets: Vec<String>,
}

/// A memory that is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryShortage {
    /// Which.
    pub memory: Memory,
    /// Bytes that are there: of each GPU, of each NUMA node of a described box, of this machine.
    pub there: u64,
    /// Bytes with which the layout fits, and with a hundredth of their unit less none does.
    pub enough: u64,
    /// NUMA nodes that need as much; 1 for a GPU.
    pub nodes: usize,
}

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Of each GPU.
    Gpu,
    /// Of the host.
    Host,
}

/// A layout that does not fit.
struct Layout {
    states: States,
    config: Config,
    built: RankLayout,
    /// Bytes that each GPU must have, if it has fewer.
    gpu: Option<u64>,
    /// Bytes of a NUMA node, at least.
    host: u64,
}

/// What the layouts of `loaded` on `gpus` GPUs, or on all of its box, are short of, as long as none fits: in any form of states, and
/// in forms with the same results, if that takes more.
pub fn shortages(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
) -> Vec<Shortage> {
    let all = unfit(loaded, machine, gpus);
    let shortage = |most: States| {
        let layouts = all.iter().filter(|layout| layout.states <= most).collect();
        match &loaded.config.device {
            DeviceConfig::Sim { .. } => of_box(loaded, layouts),
            DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => of_machine(loaded, layouts),
        }
    };
    let (given, split) = (shortage(States::Given), shortage(States::SplitMaster));
    let short = |of: &Option<Shortage>| of.as_ref().map(|shortage| shortage.short.clone());
    let exact = if short(&given) == short(&split) { given } else { split };
    let least = shortage(States::Bf16Moments);
    let least = if short(&least) == short(&exact) { None } else { least };
    least.into_iter().chain(exact).collect()
}

/// Every layout with what it takes.
fn unfit(loaded: &LoadedConfig, machine: &LocalMachine, gpus: Option<usize>) -> Vec<Layout> {
    let world = gpus.unwrap_or_else(|| changes::all_gpus(&loaded.config));
    let all = variants(loaded).into_iter();
    let all = all.flat_map(|(states, config)| {
        layouts(&config, machine, world).into_iter().map(move |config| (states, config))
    });
    // On this machine the smallest micro-batch takes least, and nobody asks for the last hundredth.
    let described = matches!(loaded.config.device, DeviceConfig::Sim { .. });
    let least = |(_, config): &(States, Config)| described || config.batch.micro == 1;
    let all: Vec<(States, Config)> = all.filter(least).collect();
    let look = |(states, mut config): (States, Config)| {
        // Virtual GPUs have what the config gives them: the host's memory is what bounds them.
        let built = changes::widen(&mut config, machine);
        let all_stay = built.decoder.shape().ring.resident == config.model.layers;
        let streams = built.decoder.shape().ring != Ring::NONE;
        let bytes = device_bytes(&config, &built.plan);
        let limit = device_limit(&config, &built).unwrap_or(u64::MAX);
        let beside = match &config.device {
            DeviceConfig::Sim { box_, .. } => reserved_bytes(box_),
            DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => 0,
        };
        let gpu = (bytes > limit).then_some(bytes + beside);
        let host = least_of_node(&config, &built);
        // All blocks stay: another layout is the same without parameters on the host.
        (!(streams && all_stay)).then_some(Layout { states, config, built, gpu, host })
    };
    all.into_par_iter().filter_map(look).collect()
}

/// Bytes that some node has at least, if the ranks' memory is dealt evenly.
fn least_of_node(config: &Config, built: &RankLayout) -> u64 {
    let DeviceConfig::Sim { box_, .. } = &config.device else { return 0 };
    let host = built.host_bytes(config);
    let all = (host.staging + host.states) * config.world_size() as u64;
    all.div_ceil((box_.numa_nodes * box_.machines) as u64)
}

/// The nearest on a described box: the memory that has to grow by the smaller factor.
fn of_box(loaded: &LoadedConfig, layouts: Vec<&Layout>) -> Option<Shortage> {
    let DeviceConfig::Sim { box_, .. } = &loaded.config.device else { return None };
    let (gpu, node) = (box_.gpu_memory, box_.node_memory);
    let (on_gpu, beyond): (Vec<&Layout>, Vec<&Layout>) =
        layouts.into_iter().partition(|layout| layout.gpu.is_none());
    let nodes = box_.numa_nodes * box_.machines;
    let of_host = |enough| MemoryShortage { memory: Memory::Host, there: node, enough, nodes };
    let of_gpu = |enough| MemoryShortage { memory: Memory::Gpu, there: gpu, enough, nodes: 1 };
    let host = least_host(on_gpu, gpu).map(|(layout, enough)| (layout, vec![of_host(enough)]));
    let here = beyond.par_iter().copied().filter(|layout| holds(layout, MOST, node)).collect();
    let more = least_gpu(here, node).map(|(layout, enough)| (layout, vec![of_gpu(enough)]));
    let both = || {
        let (_, most) = least_gpu(beyond.clone(), MOST)?;
        let held = beyond.iter().copied().filter(|l| l.gpu.is_some_and(|bytes| bytes <= most));
        let (layout, enough) = least_host(held.collect(), most)?;
        Some((layout, vec![of_gpu(most), of_host(enough)]))
    };
    let factor = |short: &[MemoryShortage]| short[0].enough as f64 / short[0].there as f64;
    let nearest = [host, more].into_iter().flatten();
    let nearest = nearest.min_by(|a, b| factor(&a.1).total_cmp(&factor(&b.1)));
    let (layout, short) = nearest.or_else(both)?;
    Some(told(loaded, layout, short))
}

/// The layout that fits GPUs of `gpu` bytes with the least memory of the nodes, and that memory.
fn least_host(layouts: Vec<&Layout>, gpu: u64) -> Option<(&Layout, u64)> {
    let layouts = layouts.into_iter().map(|layout| (layout.host, layout)).collect();
    least_of(layouts, |layout, node| holds(layout, gpu, node))
}

/// The layout that fits nodes of `node` bytes with the least memory of each GPU, and that memory.
fn least_gpu(layouts: Vec<&Layout>, node: u64) -> Option<(&Layout, u64)> {
    let layouts = layouts.into_iter().filter_map(|layout| Some((layout.gpu?, layout))).collect();
    least_of(layouts, |layout, gpu| holds(layout, gpu, node))
}

/// The layout that `holds` with the least amount, and that amount; each takes so much at least.
fn least_of(
    mut layouts: Vec<(u64, &Layout)>,
    holds: impl Fn(&Layout, u64) -> bool,
) -> Option<(&Layout, u64)> {
    layouts.sort_by_key(|(low, _)| *low);
    let mut best: Option<(&Layout, u64)> = None;
    for (low, layout) in layouts {
        let most = best.map_or(MOST, |(_, bytes)| bytes - 1);
        // What holds with more than the best so far is not looked at.
        if low <= most && (best.is_none() || holds(layout, most)) {
            let found = least(low, most, |bytes| holds(layout, bytes));
            best = found.map(|bytes| (layout, bytes)).or(best);
        }
    }
    best
}

/// Whether `layout` fits a box whose GPUs and nodes have so many bytes.
fn holds(layout: &Layout, gpu: u64, node: u64) -> bool {
    let mut config = layout.config.clone();
    if let DeviceConfig::Sim { box_, .. } = &mut config.device {
        **box_ = box_.with_memory(gpu, node);
    }
    let is_same = layout.gpu.is_none();
    let built =
        if is_same { layout.built.clone() } else { lay_out(&config, &layout.built.machine) };
    fits(&config, &built)
}

/// The least amount from `low` up to `most` that is written without rounding and `holds`, where all above it do.
fn least(low: u64, most: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut under, mut enough) = (None, up_to_hundredths(low.max(1)));
    while !holds(enough) {
        if enough >= most {
            return None;
        }
        under = Some(enough);
        enough = up_to_hundredths(enough.saturating_mul(2).min(most));
    }
    while let Some(held) = under {
        let next = up_to_hundredths(held + 1);
        if next >= enough {
            break;
        }
        let between = up_to_hundredths(held.midpoint(enough)).max(next);
        let between = if between >= enough { next } else { between };
        if holds(between) { enough = between } else { under = Some(between) }
    }
    Some(enough)
}

/// The nearest on this machine, whose memory is what it is.
fn of_machine(loaded: &LoadedConfig, layouts: Vec<&Layout>) -> Option<Shortage> {
    let over = |(_, bytes, there): &MemoryUse| bytes > there;
    let looked = |layout: &&'_ Layout| {
        let all = decided(&layout.config, &layout.built).limited.into_iter().filter(over);
        all.map(|(name, bytes, there)| {
            let memory = if name == GPU { Memory::Gpu } else { Memory::Host };
            MemoryShortage { memory, there, enough: up_to_hundredths(bytes), nodes: 1 }
        })
        .collect::<Vec<_>>()
    };
    let factor = |short: &[MemoryShortage]| {
        let factors = short.iter().map(|s| s.enough as f64 / s.there.max(1) as f64);
        factors.fold(0.0, f64::max)
    };
    let all = layouts.into_iter().map(|layout| (layout, looked(&layout)));
    let (layout, mut short) = all.min_by(|a, b| factor(&a.1).total_cmp(&factor(&b.1)))?;
    // Of nodes and of all of them together the one that lacks most.
    short.sort_by_key(|s| std::cmp::Reverse(s.enough - s.there));
    let mut seen = BTreeSet::new();
    short.retain(|s| seen.insert(s.memory));
    (!short.is_empty()).then(|| told(loaded, layout, short))
}

fn told(loaded: &LoadedConfig, layout: &Layout, short: Vec<MemoryShortage>) -> Shortage {
    let Layout { states, config, built, .. } = layout;
    Shortage {
        short,
        states: *states,
        tensor: config.parallel.tensor,
        data: config.parallel.data,
        micro: config.batch.micro,
        words: words(config, built),
        sets: changes::sets(loaded, config),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_amount_is_found_and_written_without_rounding() {
        for threshold in [5_000, 1 << 20, 123_456_789, 330_000_000_001u64] {
            let found = least(1024, MOST, |bytes| bytes >= threshold).unwrap();
            assert_eq!(found, up_to_hundredths(threshold), "{threshold}");
            assert_eq!(least(threshold, threshold, |bytes| bytes >= threshold), Some(found));
        }
        assert_eq!(least(1024, 4096, |_| false), None);
    }
}
