//! Finds changes that make a config fit: single changes and pairs, each checked with its layout.

use crate::bound::Bound;
use crate::changes::{self, CHECKPOINTS, PLACES, divisors, grids};
use crate::plan::fits;
use crate::search::{Brief, layouts};
use crate::variants::{States, all_variants};
use config::{
    Activations, Config, DeviceConfig, LoadedConfig, Master, Moments, OffloadConfig,
    ParameterPlace, Placement, SpeculatedFraction, UpdateMode,
};
use layout::LocalMachine;
use layout::build::{lay_out, shape};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;
use topology::available_memory;

/// Number of remedies to report.
const NAMED: usize = 3;

/// Number of pairs of changes that are tried in parallel.
const AT_ONCE: usize = 64;

/// Number of remedies to simulate, those with the fewest changes first.
const SIMULATED: usize = 16;

/// Fractions of the parameters that are updated speculatively, the largest first.
const SHARES: [f32; 4] = [0.8, 0.6, 0.4, 0.2];

/// A change after which everything fits.
#[derive(Clone, Debug, Serialize)]
pub struct Remedy {
    /// The `key=value` arguments of `--set`.
    pub sets: Vec<String>,
    /// Simulated step time relative to the given config; `None` without a box to simulate.
    pub slower: Option<f64>,
}

/// The largest model of the same shape that fits.
#[derive(Clone, Debug, Serialize)]
pub struct LargestModel {
    /// Number of layers of the model.
    pub layers: usize,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// The `key=value` arguments of `--set`: the layers and the other changes.
    pub sets: Vec<String>,
}

/// Number of a setting, and a change of it. Two changes of one setting are not combined.
type SettingChange = (usize, Box<dyn Fn(&mut Config) + Sync>);

/// The only setting that changes the results. Its changes come last.
const OTHER_RESULTS: usize = 11;
/// The memory of virtual GPUs. It is changed alone; whole layouts already get enough of it.
const VIRTUAL_MEMORY: usize = 12;
/// A whole layout.
const LAYOUT: usize = 13;

/// Numbers of the changed settings, and the changed config, which fits.
type FittingConfig = (Vec<usize>, Config);

/// A config that does not fit, and the search for configs that fit.
#[derive(Clone, Copy)]
struct Unfit<'a> {
    given: &'a Config,
    /// Number of GPUs of every config that may fit, if it is fixed.
    gpus: Option<usize>,
    bound: &'a Bound<'a>,
}

/// The nearest changes that keep the model and batch, and fit. On a box they are sorted by
/// simulated step time, otherwise by the number of changes. Each uses `gpus` GPUs, if set.
pub fn remedies(loaded: &LoadedConfig, machine: &LocalMachine, gpus: Option<usize>) -> Vec<Remedy> {
    let Some(given) = &on_gpus(&loaded.config, machine, gpus) else { return Vec::new() };
    let unfit = Unfit { given, gpus, bound: &Bound::of(machine) };
    let all = unfit.with_layouts(unfit.fitting());
    let before = if all.is_empty() { None } else { predicted(given, machine) };
    let remedy = |(settings, config): &FittingConfig| {
        let slower = before.and_then(|before| Some(predicted(config, machine)? / before));
        (settings.clone(), Remedy { sets: changes::sets(loaded, config), slower })
    };
    let most = before.map_or(all.len(), |_| SIMULATED);
    let mut remedies: Vec<(Vec<usize>, Remedy)> = all.par_iter().take(most).map(remedy).collect();
    if before.is_some() {
        let time = |remedy: &Remedy| remedy.slower.unwrap_or(f64::INFINITY);
        let other = |settings: &[usize]| settings.contains(&OTHER_RESULTS);
        remedies.sort_by(|(a, x), (b, y)| {
            other(a).cmp(&other(b)).then_with(|| time(x).total_cmp(&time(y)))
        });
    }
    // First one remedy for each set of settings; further ones of the same settings fill the list.
    let mut named = BTreeSet::new();
    let mut first = |(settings, _): &(Vec<usize>, Remedy)| named.insert(settings.clone());
    let numbered = remedies.into_iter().enumerate();
    let (first, further): (Vec<_>, Vec<_>) = numbered.partition(|(_, remedy)| first(remedy));
    let mut listed: Vec<_> = first.into_iter().chain(further).take(NAMED).collect();
    listed.sort_by_key(|(number, _)| *number);
    listed.into_iter().map(|(_, (_, remedy))| remedy).collect()
}

impl Unfit<'_> {
    /// Adds whole layouts with the same results if no change of one or two settings has them. Other
    /// results come last.
    fn with_layouts(self, changed: Vec<FittingConfig>) -> Vec<FittingConfig> {
        let same = |(settings, _): &FittingConfig| !settings.contains(&OTHER_RESULTS);
        if changed.iter().any(same) || !may_hold_states(self.given) {
            return changed;
        }
        let exact = [States::Given, States::SplitMaster];
        let whole = self.whole_layouts(&exact);
        if whole.is_empty() && changed.is_empty() {
            return self.whole_layouts(&[States::Bf16Moments]);
        }
        whole.into_iter().chain(changed).collect()
    }

    /// Layouts that fit, with the first form of states that allows any; the fewest changes first.
    fn whole_layouts(self, forms: &[States]) -> Vec<FittingConfig> {
        let Self { given, gpus, bound } = self;
        let machine = bound.machine();
        for (states, config) in all_variants(given) {
            if !forms.contains(&states) {
                continue;
            }
            let worlds = worlds(given, gpus).into_iter();
            let all: Vec<Config> =
                worlds.flat_map(|world| layouts(&config, machine, world)).collect();
            let fit = |mut config: Config| {
                let built = bound.widened(&mut config)?;
                (machine.is_sound(&config) && fits(&config, &built)).then_some(config)
            };
            let mut found: Vec<Config> = all.into_par_iter().filter_map(fit).collect();
            if !found.is_empty() {
                found.sort_by_key(|config| changes::count(given, config));
                let other = (states == States::Bf16Moments).then_some(OTHER_RESULTS);
                let settings: Vec<usize> = std::iter::once(LAYOUT).chain(other).collect();
                return found.into_iter().map(|config| (settings.clone(), config)).collect();
            }
        }
        Vec::new()
    }

    /// Single changes that fit, then pairs of changes that do not fit alone. Without a box, the
    /// search stops after enough changes.
    fn fitting(self) -> Vec<FittingConfig> {
        let changes = self.changes();
        let mut found: Vec<FittingConfig> =
            changes.iter().filter_map(|one| self.fit(&[one])).collect();
        let alone: Vec<Config> = found.iter().map(|(_, config)| config.clone()).collect();
        let fits_alone =
            |change: &SettingChange| self.changed(&[change]).is_some_and(|c| alone.contains(&c));
        let others = changes.iter().filter(|one| self.pairs_up(one) && !fits_alone(one));
        let others: Vec<&SettingChange> = others.collect();
        let pairs = pairs(&others);
        for some in pairs.chunks(AT_ONCE) {
            if self.are_enough(&found) {
                break;
            }
            found.extend(some.par_iter().filter_map(|pair| self.fit(pair)).collect::<Vec<_>>());
        }
        found
    }

    /// Whether `found` suffices, so that the search can end. On a described box it never suffices,
    /// because there all remedies are compared by time.
    fn are_enough(self, found: &[FittingConfig]) -> bool {
        let choices: BTreeSet<&Vec<usize>> = found.iter().map(|(settings, _)| settings).collect();
        let is_timed = matches!(self.given.device, DeviceConfig::Sim { .. });
        let same = choices.iter().any(|settings| !settings.contains(&OTHER_RESULTS));
        !is_timed && same && choices.len() >= NAMED
    }

    /// The first change or pair with the same results that fits.
    fn first_fitting(self) -> Option<Config> {
        let changes = self.changes();
        let same: Vec<&SettingChange> =
            changes.iter().filter(|(setting, _)| *setting != OTHER_RESULTS).collect();
        let alone = same.iter().find_map(|one| self.fit(&[*one]));
        let others: Vec<&SettingChange> =
            same.iter().copied().filter(|one| self.pairs_up(one)).collect();
        let pair = || pairs(&others).par_iter().find_map_first(|pair| self.fit(pair));
        alone.or_else(pair).map(|(_, config)| config)
    }

    /// Whether the change may be part of a pair of changes. The memory of virtual GPUs is never
    /// changed together with another setting.
    fn pairs_up(self, (setting, change): &SettingChange) -> bool {
        let mut config = self.given.clone();
        *setting != VIRTUAL_MEMORY && {
            change(&mut config);
            config != *self.given
        }
    }

    fn fit(self, changes: &[&SettingChange]) -> Option<FittingConfig> {
        let settings: Vec<usize> = changes.iter().map(|(setting, _)| *setting).collect();
        // Only the layout shows how much memory virtual GPUs need.
        if settings == [VIRTUAL_MEMORY] {
            let mut config = self.given.clone();
            let built = self.bound.widened(&mut config)?;
            let sound = config != *self.given && self.bound.machine().is_sound(&config);
            return (sound && fits(&config, &built)).then_some((settings, config));
        }
        let config = self.changed(changes)?;
        self.bound.fits(&config).then_some((settings, config))
    }

    /// `given` after `changes`, if the result is a different and valid config.
    fn changed(self, changes: &[&SettingChange]) -> Option<Config> {
        let given = self.given;
        let mut config = given.clone();
        changes.iter().for_each(|(_, change)| change(&mut config));
        // A single rank has nothing to partition: `recompute: Block` alone does the same.
        let idle = config.partition_checkpoints && config.parallel.tensor == 1;
        let idle = idle && !given.partition_checkpoints;
        (!idle && config != *given && self.bound.machine().is_sound(&config)).then_some(config)
    }

    /// All possible changes. Changes that usually cost little come first.
    fn changes(self) -> Vec<SettingChange> {
        let Self { given, gpus, bound } = self;
        let mut all: Vec<SettingChange> = Vec::new();
        if matches!(given.device, DeviceConfig::Cpu { .. }) {
            let machine = bound.machine().clone();
            all.push((VIRTUAL_MEMORY, Box::new(move |c| drop(changes::widen(c, &machine)))));
        }
        all.push((0, Box::new(|c| c.parallel.sequence = c.parallel.tensor > 1)));
        for accumulate in PLACES.map(|(_, accumulate)| accumulate) {
            all.push((1, Box::new(move |c| c.offload.accumulate = accumulate)));
        }
        for together in
            [8, 4, 2, 1].into_iter().filter(|together| *together < given.offload.first_forward)
        {
            all.push((1, Box::new(move |c| c.offload.first_forward = together)));
        }
        // The largest first. Larger ones than now count too, since one pass needs no accumulation.
        for micro in divisors(given.batch.global / given.parallel.data).into_iter().rev() {
            all.push((2, Box::new(move |c| c.batch.micro = micro)));
        }
        for (recompute, shares) in CHECKPOINTS {
            let set = move |c: &mut Config| changes::set_recompute(c, recompute, shares);
            all.push((3, Box::new(set)));
        }
        if given.activations != Activations::Uniform {
            all.push((3, Box::new(|c| c.activations = Activations::Uniform)));
        }
        for (tensor, data) in worlds(given, gpus).into_iter().flat_map(grids) {
            all.push((4, Box::new(move |c| (c.parallel.tensor, c.parallel.data) = (tensor, data))));
        }
        for optimizer in [Placement::Host, Placement::Device] {
            all.push((5, Box::new(move |c| c.offload.optimizer = optimizer)));
        }
        all.push((8, Box::new(|c| c.offload.resident_blocks = None)));
        all.push((9, Box::new(|c| c.offload.ring = None)));
        all.push((10, Box::new(|c| c.offload.master = Master::Split)));
        if given.offload.parameters == ParameterPlace::Device {
            all.push((7, Box::new(changes::stream_parameters)));
        }
        if given.offload.update == UpdateMode::Speculative {
            let now = given.offload.speculated_fraction.share();
            for share in SHARES.into_iter().filter(|share| *share < now) {
                let share = SpeculatedFraction::Share(share);
                all.push((6, Box::new(move |c| c.offload.speculated_fraction = share)));
            }
            all.push((6, Box::new(|c| c.offload.update = UpdateMode::Overlapped)));
        }
        all.push((OTHER_RESULTS, Box::new(|c| c.offload.moments = Moments::Bf16)));
        all
    }
}

/// Pairs of changes of two settings, in the order of the changes.
fn pairs<'a>(changes: &[&'a SettingChange]) -> Vec<[&'a SettingChange; 2]> {
    let with_later = |(i, a): (usize, &&'a SettingChange)| {
        let a = *a;
        changes[i + 1..].iter().map(move |b| [a, *b]).collect::<Vec<_>>()
    };
    let all = changes.iter().enumerate().flat_map(with_later);
    all.filter(|[a, b]| a.0 != b.0).collect()
}

/// Whether host and GPUs together have 6 bytes per trained parameter, the least bytes of its states,
/// and 2 bytes per frozen one.
fn may_hold_states(config: &Config) -> bool {
    let bytes = match &config.device {
        DeviceConfig::Cpu { .. } => available_memory(),
        DeviceConfig::Cuda => return true,
        DeviceConfig::Sim { box_, .. } => {
            let nodes = (box_.numa_nodes * box_.machines) as u64;
            box_.node_memory.saturating_mul(nodes)
                + box_.gpu_memory.saturating_mul(box_.gpus as u64)
        }
    };
    let shape = shape(config);
    let trained = shape.trained_parameters();
    let frozen = match shape.adapters() {
        Some(_) => shape.parameters(),
        None => shape.parameters() - trained,
    };
    6 * trained + 2 * frozen <= bytes
}

fn predicted(config: &Config, machine: &LocalMachine) -> Option<f64> {
    Brief::of(config, &lay_out(config, machine)).ok().map(|brief| brief.seconds)
}

/// Numbers of ranks to try: `gpus`, or the current number and all GPUs of a described box.
fn worlds(given: &Config, gpus: Option<usize>) -> Vec<usize> {
    let now = given.world_size();
    match (&given.device, gpus) {
        (_, Some(gpus)) => vec![gpus],
        (DeviceConfig::Sim { box_, .. }, None) if box_.gpus != now => vec![now, box_.gpus],
        _ => vec![now],
    }
}

/// `given` on `gpus` GPUs with the largest valid TP degree. Settings that prevent this are reset.
fn on_gpus(given: &Config, machine: &LocalMachine, gpus: Option<usize>) -> Option<Config> {
    let Some(gpus) = gpus.filter(|gpus| *gpus != given.world_size()) else {
        return Some(given.clone());
    };
    let with = |(tensor, data)| {
        let mut config = given.clone();
        (config.parallel.tensor, config.parallel.data) = (tensor, data);
        let mut plain = config.clone();
        (plain.parallel.sequence, plain.partition_checkpoints, plain.batch.micro) =
            (false, false, 1);
        [config, plain].into_iter().find(|config| machine.is_sound(config))
    };
    grids(gpus).into_iter().rev().find_map(with)
}

/// The model with the most layers that fits, also after one or two exact changes, on `gpus` GPUs if
/// set. `None` if one layer does not fit, if the model is a trained one from a folder, or if globs
/// freeze tensors, whose names have the numbers of layers.
pub fn largest(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
) -> Option<LargestModel> {
    let given =
        on_gpus(&loaded.config, machine, gpus).filter(|config| config.model.from.is_none())?;
    if !given.optimizer.frozen.is_empty() {
        return None;
    }
    let bound = &Bound::of(machine);
    let with = |layers: usize| -> Option<Config> {
        let mut config = given.clone();
        config.model.layers = layers;
        config.activations = config.activations.within(layers);
        let OffloadConfig { ring, resident_blocks, .. } = &mut config.offload;
        for blocks in [ring, resident_blocks] {
            *blocks = blocks.filter(|blocks| *blocks <= layers);
        }
        if machine.is_sound(&config) && bound.fits(&config) {
            return Some(config);
        }
        Unfit { given: &config, gpus, bound }.first_fitting()
    };
    let mut best = with(1)?;
    let (mut least, mut too_many) = (1, loaded.config.model.layers);
    while too_many - least > 1 {
        let layers = least.midpoint(too_many);
        match with(layers) {
            Some(config) => (least, best) = (layers, config),
            None => too_many = layers,
        }
    }
    let parameters = lay_out(&best, machine).decoder.shape().parameters();
    Some(LargestModel { layers: least, parameters, sets: changes::sets(loaded, &best) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(name: &str, sets: &[&str]) -> LoadedConfig {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        config::load(&folder.join(name), &sets).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The lower bound of memory rejects a model that does not fit, so no layout is built.
    #[test]
    fn of_a_model_that_is_far_too_large_nothing_is_laid_out() {
        let machine = LocalMachine::default();
        let wide = ["model.hidden=65536", "model.heads=256", "model.layers=10000"];
        for (name, sets) in [
            ("quickstart.ron", &wide[..]),
            ("quickstart.ron", &["model.hidden=131072", "model.heads=1024", "model.layers=4000"]),
            (
                "quickstart.ron",
                &["model.vocab=16777216", "model.hidden=1000000", "model.heads=1000"],
            ),
            ("quickstart.ron", &["model.seq_len=1048576", "model.hidden=1000000", "model.heads=8"]),
            ("h100-1.3b.ron", &["model.layers=10000", "model.hidden=65536", "model.heads=512"]),
        ] {
            let given = &loaded(name, sets).config;
            let bound = &Bound::of(&machine);
            let unfit = Unfit { given, gpus: None, bound };
            assert!(unfit.fitting().is_empty() && unfit.first_fitting().is_none(), "{sets:?}");
            let whole = [States::Given, States::SplitMaster, States::Bf16Moments];
            assert!(unfit.whole_layouts(&whole).is_empty(), "{sets:?}");
            assert_eq!(bound.laid_out(), 0, "{name} {sets:?}");
        }
        // With very many micro-batches, the bound rejects most changes too.
        let many = ["batch.micro=1000000", "batch.global=1000000", "parallel.data=1"];
        let many = [&many[..], &["parallel.tensor=1", "device.count=1"]].concat();
        let given = &loaded("quickstart.ron", &many).config;
        let bound = &Bound::of(&machine);
        let unfit = Unfit { given, gpus: None, bound };
        let fitting = unfit.fitting().len();
        let tried = unfit.changes().len();
        assert!(fitting > 0 && tried > 50, "{fitting} of {tried}");
        assert!(bound.laid_out() < fitting + tried, "{} for {fitting}", bound.laid_out());
    }

    /// The bound decides which layouts are built and does not change the result.
    #[test]
    fn what_is_found_is_what_laying_out_every_change_finds() {
        let machine = LocalMachine::default();
        let small = ["batch.micro=64", "batch.global=128", "device.memory=\"48MiB\""];
        let speculative =
            ["offload.update=Speculative", "offload.optimizer=Host", "device.memory=\"24MiB\""];
        let in_two = ["offload.optimizer=Split(device_fraction: 0.5)", "device.memory=\"16MiB\""];
        let few = "model.layers=6";
        let mut all = 0;
        for (name, sets) in [
            ("quickstart.ron", &small[..]),
            ("quickstart.ron", &speculative),
            ("quickstart.ron", &in_two),
            ("quickstart.ron", &["device.memory=\"8MiB\""]),
            ("small-text-llama.ron", &["device.memory=\"20MiB\"", "model.layers=9"]),
            ("qwen3-14b-one-gpu.ron", &[few, "offload.ring=6", "model.hidden=40960"]),
            ("h100-1.3b.ron", &[few, "model.hidden=32768", "model.heads=256"]),
        ] {
            let given = &loaded(name, sets).config;
            let bound = &Bound::of(&machine);
            let unfit = Unfit { given, gpus: None, bound };
            let changes = unfit.changes();
            let fits_all = |changes: &[&SettingChange]| {
                let config = unfit.changed(changes)?;
                let settings: Vec<usize> = changes.iter().map(|(setting, _)| *setting).collect();
                fits(&config, &lay_out(&config, &machine)).then_some((settings, config))
            };
            let mut wanted: Vec<FittingConfig> =
                changes.iter().filter_map(|one| fits_all(&[one])).collect();
            let alone: Vec<Config> = wanted.iter().map(|(_, config)| config.clone()).collect();
            let others: Vec<&SettingChange> =
                changes.iter().filter(|(setting, _)| *setting != VIRTUAL_MEMORY).collect();
            let fits_alone =
                |one: &SettingChange| unfit.changed(&[one]).is_some_and(|c| alone.contains(&c));
            for pair in pairs(&others) {
                if !pair.iter().any(|one| fits_alone(one)) {
                    wanted.extend(fits_all(&pair));
                }
            }
            all += wanted.len();
            let found = unfit.fitting();
            assert!(wanted.starts_with(&found), "{name} {sets:?}: {} found", wanted.len());
            assert!(found == wanted || unfit.are_enough(&found), "{name} {sets:?}");
            let same = |(settings, _): &&FittingConfig| !settings.contains(&OTHER_RESULTS);
            let first = wanted.iter().find(same).map(|(_, config)| config.clone());
            assert!(unfit.first_fitting() == first, "{name} {sets:?}");
        }
        assert!(all > 10, "{all}");
    }

    /// A smaller model keeps its tiers, as far as it has the blocks.
    #[test]
    fn the_largest_model_keeps_its_tiers() {
        let machine = LocalMachine::default();
        for (tiers, kept) in [
            ("gpu_blocks: 6", "gpu_blocks: 5, host_blocks: 0"),
            ("gpu_blocks: 2, host_blocks: 4", "gpu_blocks: 2, host_blocks: 3"),
        ] {
            let tiers = format!("activations=Tiers({tiers})");
            // The GPUs hold all models that have fewer blocks than the given one.
            let sets = ["model.layers=6", "recompute=Block", tiers.as_str()];
            let found = largest(&loaded("quickstart.ron", &sets), &machine, None).unwrap();
            assert_eq!(found.layers, 5);
            let set = found.sets.iter().find(|set| set.starts_with("activations=")).unwrap();
            assert!(set.contains(kept), "{set}");
        }
    }

    #[test]
    fn remedies_on_some_gpus_take_just_these() {
        let config = loaded("dgx2-70b.ron", &[]).config;
        // 3 divides neither the micro-batch's rows nor 512 samples: only TP 3 without `sequence`.
        let machine = LocalMachine::default();
        for gpus in [3, 8, 16] {
            let on = on_gpus(&config, &machine, Some(gpus)).unwrap();
            assert_eq!(on.world_size(), gpus);
            let unfit = Unfit { given: &on, gpus: Some(gpus), bound: &Bound::of(&machine) };
            let all = unfit.changes();
            let all: Vec<Config> = all.iter().filter_map(|one| unfit.changed(&[one])).collect();
            let other = all.iter().any(|config| config.parallel != on.parallel);
            assert!(other || gpus == 3, "{gpus}");
            assert!(all.iter().all(|config| config.world_size() == gpus), "{gpus}");
        }
    }
}
