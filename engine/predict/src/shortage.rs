//! Finds the memory that is too small if no layout of a model fits, and the size that is enough.

use super::bound::{Bound, of_host};
use super::changes;
use super::plan::{decided, fits};
use super::search::{layouts, words};
use super::variants::{States, variants};
use config::{BoxConfig, Config, DeviceConfig, LoadedConfig};
use engine::memory::{GPU, MemoryUse};
use layout::LocalMachine;
use layout::build::{RankLayout, device_bytes, device_limit, reserved_bytes};
use layout::least::{LeastBytes, least_bytes};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use tensor_parallel::Ring;
use topology::up_to_hundredths;

/// Upper bound of a memory of a described box, in bytes.
const MOST: u64 = 1 << 50;

/// The missing memory of the layout that is closest to fitting.
#[derive(Clone, Debug, Serialize)]
pub struct Shortage {
    /// One memory, or both if every layout lacks both.
    pub short: Vec<MemoryShortage>,
    /// Form of the states in the layout.
    pub states: States,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// Samples of a micro-batch.
    pub micro: usize,
    /// Description of the layout.
    pub words: String,
    /// The `key=value` settings of the layout, which fits with enough memory.
    pub sets: Vec<String>,
}

/// A memory that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryShortage {
    /// Kind of the memory.
    pub memory: Memory,
    /// Bytes of the memory: of each GPU, of each NUMA node of a described box, or of this machine.
    pub there: u64,
    /// Bytes with which the layout fits. With a hundredth of the printed unit less, no layout fits.
    pub enough: u64,
    /// Number of NUMA nodes that need this memory; 1 for a GPU.
    pub nodes: usize,
}

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Memory of each GPU.
    Gpu,
    /// Memory of the host.
    Host,
}

/// A layout that does not fit, after it is built.
struct Layout {
    config: Config,
    built: RankLayout,
    /// Bytes that each GPU needs, if it has fewer.
    gpu: Option<u64>,
    /// Least bytes of a NUMA node.
    host: u64,
}

/// A layout that does not fit. It is built only if its lower bound may be the nearest.
struct Candidate {
    /// Number among all candidates. Of equally near candidates, the first is reported.
    number: usize,
    states: States,
    config: Config,
    least: LeastBytes,
    layout: OnceLock<Option<Layout>>,
}

/// All candidates, on one machine or box.
struct Candidates<'a> {
    bound: Bound<'a>,
    all: Vec<Candidate>,
}

/// Missing memory of the layouts of `loaded` if none fits, on `gpus` GPUs or all of its box. The
/// first entry allows any form of states; another follows if forms with the same results need more.
pub fn shortages(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
) -> Vec<Shortage> {
    let candidates = Candidates::of(loaded, machine, gpus);
    let shortage = |most: States| match &loaded.config.device {
        DeviceConfig::Sim { box_, .. } => candidates.of_box(loaded, box_, most),
        DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => candidates.of_machine(loaded, most),
    };
    let (given, split) = (shortage(States::Given), shortage(States::SplitMaster));
    let short = |of: &Option<Shortage>| of.as_ref().map(|shortage| shortage.short.clone());
    let exact = if short(&given) == short(&split) { given } else { split };
    let least = shortage(States::Bf16Moments);
    let least = if short(&least) == short(&exact) { None } else { least };
    least.into_iter().chain(exact).collect()
}

impl Candidate {
    /// Builds the layout once. `None` if all blocks stay on the GPU: another layout is the same.
    fn layout(&self, bound: &Bound<'_>) -> Option<&Layout> {
        let lay_out = || {
            let mut config = self.config.clone();
            // Virtual GPUs get the memory that they need; the limit is the host's memory.
            let built = bound.count(|| changes::widen(&mut config, bound.machine()));
            let all_stay = built.decoder.shape().ring.resident == config.model.layers;
            let streams = built.decoder.shape().ring != Ring::NONE;
            let bytes = device_bytes(&config, &built.plan);
            let limit = device_limit(&config, &built).unwrap_or(u64::MAX);
            let gpu = (bytes > limit).then_some(bytes + gpu_overhead(&config));
            let host = built.host_bytes(&config);
            let host = least_of_node(&config, host.staging + host.states);
            (!(streams && all_stay)).then_some(Layout { config, built, gpu, host })
        };
        self.layout.get_or_init(lay_out).as_ref()
    }

    /// Least bytes of each GPU.
    fn gpu(&self) -> u64 {
        self.least.device + gpu_overhead(&self.config)
    }

    /// Least bytes of the fullest node.
    fn host(&self) -> u64 {
        least_of_node(&self.config, of_host(&self.config, &self.least))
    }
}

/// Bytes of a described GPU that are reserved for uses other than the plan.
fn gpu_overhead(config: &Config) -> u64 {
    match &config.device {
        DeviceConfig::Sim { box_, .. } => reserved_bytes(box_),
        DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => 0,
    }
}

/// Least bytes of the fullest node, if all ranks' memory is dealt evenly, `of_rank` bytes each.
fn least_of_node(config: &Config, of_rank: u64) -> u64 {
    let DeviceConfig::Sim { box_, .. } = &config.device else { return 0 };
    let all = of_rank * config.world_size() as u64;
    all.div_ceil((box_.numa_nodes * box_.machines) as u64)
}

/// A candidate that fits with more memory: the bytes that are enough, the least bytes of its
/// layout, the candidate, and the layout.
type EnoughMemory<'c> = (u64, u64, &'c Candidate, &'c Layout);

impl<'a> Candidates<'a> {
    fn of(loaded: &LoadedConfig, machine: &'a LocalMachine, gpus: Option<usize>) -> Self {
        let world = gpus.unwrap_or_else(|| changes::all_gpus(&loaded.config));
        let all = variants(loaded).into_iter();
        let all = all.flat_map(|(states, config)| {
            layouts(&config, machine, world).into_iter().map(move |config| (states, config))
        });
        // On this machine the smallest micro-batch needs the least memory; an estimate is enough.
        let described = matches!(loaded.config.device, DeviceConfig::Sim { .. });
        let least = |(_, config): &(States, Config)| described || config.batch.micro == 1;
        let all: Vec<(States, Config)> = all.filter(least).collect();
        let candidate = |(number, (states, config)): (usize, (States, Config))| {
            let least = least_bytes(&config, machine);
            Candidate { number, states, config, least, layout: OnceLock::new() }
        };
        let all = all.into_par_iter().enumerate().map(candidate).collect();
        Self { bound: Bound::of(machine), all }
    }

    /// The candidates with a form of states up to `most`.
    fn up_to(&self, most: States) -> impl Iterator<Item = &Candidate> {
        self.all.iter().filter(move |candidate| candidate.states <= most)
    }

    /// The nearest layout on a described box: one memory must grow by the smaller factor.
    fn of_box(&self, loaded: &LoadedConfig, box_: &BoxConfig, most: States) -> Option<Shortage> {
        let (gpu, node) = (box_.gpu_memory, box_.node_memory);
        let nodes = box_.numa_nodes * box_.machines;
        let of_host = |enough| MemoryShortage { memory: Memory::Host, there: node, enough, nodes };
        let of_gpu = |enough| MemoryShortage { memory: Memory::Gpu, there: gpu, enough, nodes: 1 };
        let host = self.least_host(most, gpu, true);
        let host = host.map(|(enough, _, of, layout)| ((of.states, layout), vec![of_host(enough)]));
        let more = self.least_gpu(most, node);
        let more = more.map(|(enough, _, of, layout)| ((of.states, layout), vec![of_gpu(enough)]));
        let both = || {
            let (larger, ..) = self.least_gpu(most, MOST)?;
            let (enough, _, of, layout) = self.least_host(most, larger, false)?;
            Some(((of.states, layout), vec![of_gpu(larger), of_host(enough)]))
        };
        let factor = |short: &[MemoryShortage]| short[0].enough as f64 / short[0].there as f64;
        let nearest = [host, more].into_iter().flatten();
        let nearest = nearest.min_by(|a, b| factor(&a.1).total_cmp(&factor(&b.1)));
        let ((states, layout), short) = nearest.or_else(both)?;
        Some(shortage(loaded, states, layout, short))
    }

    /// The layout that fits GPUs of `gpu` bytes with the least node memory, and this memory.
    /// `there`: the box has such GPUs.
    fn least_host(&self, most: States, gpu: u64, there: bool) -> Option<EnoughMemory<'_>> {
        let may = self.up_to(most).filter(|candidate| candidate.gpu() <= gpu);
        let may = may.map(|candidate| (candidate.host(), candidate)).collect();
        self.least_of(
            may,
            |layout| layout.host,
            |candidate, layout, node| {
                if there {
                    return layout.gpu.is_none()
                        && fits(&with_memory(layout, gpu, node), &layout.built);
                }
                layout.gpu.is_some() && self.holds(candidate, gpu, node)
            },
        )
    }

    /// The layout that fits nodes of `node` bytes with the least GPU memory, and this memory.
    fn least_gpu(&self, most: States, node: u64) -> Option<EnoughMemory<'_>> {
        let may = self.up_to(most).filter(|candidate| candidate.host() <= node);
        let may = may.map(|candidate| (candidate.gpu(), candidate)).collect();
        let bytes = |layout: &Layout| layout.gpu.unwrap_or(0);
        self.least_of(may, bytes, |candidate, layout, gpu| {
            layout.gpu.is_some() && self.holds(candidate, gpu, node)
        })
    }

    /// The candidate that `holds` with the least bytes, and these bytes. `may` has a lower bound
    /// for each candidate. Ties are broken by the least bytes of the layout.
    fn least_of<'c>(
        &'c self,
        mut may: Vec<(u64, &'c Candidate)>,
        bytes: impl Fn(&Layout) -> u64,
        holds: impl Fn(&Candidate, &Layout, u64) -> bool,
    ) -> Option<EnoughMemory<'c>> {
        may.sort_by_key(|(low, _)| *low);
        let mut best: Option<EnoughMemory<'c>> = None;
        for (low, candidate) in may {
            let most = best.map_or(MOST, |(enough, ..)| enough);
            // A candidate that needs more than the best one so far is skipped.
            if low > most {
                break;
            }
            let Some(layout) = candidate.layout(&self.bound) else { continue };
            if bytes(layout) > most || !holds(candidate, layout, most) {
                continue;
            }
            let low = low.max(bytes(layout));
            let Some(enough) = least(low, most, |bytes| holds(candidate, layout, bytes)) else {
                continue;
            };
            let exact = bytes(layout);
            let is_less = |(least, of, first, _): EnoughMemory<'c>| {
                (enough, exact, candidate.number) < (least, of, first.number)
            };
            if best.is_none_or(is_less) {
                best = Some((enough, exact, candidate, layout));
            }
        }
        best
    }

    /// Whether `candidate` fits a box with `gpu` bytes per GPU and `node` bytes per node.
    fn holds(&self, candidate: &Candidate, gpu: u64, node: u64) -> bool {
        let layout = candidate.layout(&self.bound);
        layout.is_some_and(|layout| self.bound.fits(&with_memory(layout, gpu, node)))
    }

    /// The layout on this machine with the smallest growth factor of its most lacking memory.
    fn of_machine(&self, loaded: &LoadedConfig, most: States) -> Option<Shortage> {
        let least = |of: &'_ Candidate| self.bound.least_factor(&of.config, &of.least);
        let mut may: Vec<(f64, &Candidate)> = self.up_to(most).map(|of| (least(of), of)).collect();
        may.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut best: Option<(f64, &Candidate, Vec<MemoryShortage>)> = None;
        for (least, candidate) in may {
            if best.as_ref().is_some_and(|(factor, ..)| *factor < least) {
                break;
            }
            let Some(layout) = candidate.layout(&self.bound) else { continue };
            let short = lacking(layout);
            let factors = short.iter().map(|s| s.enough as f64 / s.there.max(1) as f64);
            let factor = factors.fold(0.0, f64::max);
            let is_nearer = |(nearest, first, _): &(f64, &Candidate, Vec<MemoryShortage>)| {
                (factor, candidate.number) < (*nearest, first.number)
            };
            if best.as_ref().is_none_or(is_nearer) {
                best = Some((factor, candidate, short));
            }
        }
        let (_, candidate, mut short) = best?;
        // Of the nodes and all nodes together, only the one that lacks most is reported.
        short.sort_by_key(|s| std::cmp::Reverse(s.enough - s.there));
        let mut seen = BTreeSet::new();
        short.retain(|s| seen.insert(s.memory));
        let layout = candidate.layout(&self.bound)?;
        (!short.is_empty()).then(|| shortage(loaded, candidate.states, layout, short))
    }
}

/// Memories of this machine that are too small for a layout.
fn lacking(layout: &Layout) -> Vec<MemoryShortage> {
    let all = decided(&layout.config, &layout.built).limited.into_iter();
    let over = all.filter(|(_, bytes, there): &MemoryUse| bytes > there);
    let short = over.map(|(name, bytes, there)| {
        let memory = if name == GPU { Memory::Gpu } else { Memory::Host };
        MemoryShortage { memory, there, enough: up_to_hundredths(bytes), nodes: 1 }
    });
    short.collect()
}

/// The config of `layout` on a box with `gpu` bytes per GPU and `node` bytes per node.
fn with_memory(layout: &Layout, gpu: u64, node: u64) -> Config {
    let mut config = layout.config.clone();
    if let DeviceConfig::Sim { box_, .. } = &mut config.device {
        **box_ = box_.with_memory(gpu, node);
    }
    config
}

/// Smallest amount in `low..=most` that prints without rounding and for which `holds` is true. The
/// function `holds` must be monotonic.
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

fn shortage(
    loaded: &LoadedConfig,
    states: States,
    layout: &Layout,
    short: Vec<MemoryShortage>,
) -> Shortage {
    let Layout { config, built, .. } = layout;
    Shortage {
        short,
        states,
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

    /// The described box is far too small, and the model has very many blocks.
    #[test]
    fn what_a_box_is_short_of_is_found_by_laying_out_few() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/dgx2-70b.ron");
        let sets = ["model.layers=1000", "batch.global=16"].map(str::to_owned);
        let loaded = config::load(path.as_ref(), &sets).unwrap_or_else(|e| panic!("{e}"));
        let DeviceConfig::Sim { box_, .. } = &loaded.config.device else { panic!("no box") };
        let machine = LocalMachine::default();
        let all = Candidates::of(&loaded, &machine, None);
        let short = all.of_box(&loaded, box_, States::Bf16Moments);
        assert!(short.is_some_and(|shortage| !shortage.short.is_empty()));
        let (few, of) = (all.bound.laid_out(), all.all.len());
        assert!(few * 5 < of, "{few} of {of}");
    }

    /// No machine holds the model. The nearest layout is found, and only a few layouts are built.
    #[test]
    fn the_nearest_of_all_layouts_is_found_by_laying_out_few() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/quickstart.ron");
        let sets = ["model.hidden=131072", "model.heads=1024", "model.layers=40"];
        let sets = sets.map(str::to_owned);
        let loaded = config::load(path.as_ref(), &sets).unwrap_or_else(|e| panic!("{e}"));
        let machine = LocalMachine::default();
        let all = Candidates::of(&loaded, &machine, None);
        let nearest = all.of_machine(&loaded, States::Bf16Moments);
        let nearest = nearest.unwrap_or_else(|| panic!("it fits")).short;
        let (few, of) = (all.bound.laid_out(), all.all.len());
        assert!(of > 40 && few * 4 < of, "{few} of {of}");
        // The available memory changes a little between two reads.
        let most = |short: &[MemoryShortage]| short.iter().map(|s| s.enough).max().unwrap_or(0);
        let limit = most(&nearest) as f64 * 0.98;
        let layouts = all.all.iter().filter_map(|candidate| candidate.layout(&all.bound));
        let enough: Vec<u64> = layouts.map(|layout| most(&lacking(layout))).collect();
        assert!(enough.iter().all(|enough| *enough as f64 >= limit), "{nearest:?}: {enough:?}");
    }

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
