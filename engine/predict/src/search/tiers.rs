//! Chooses the tiers of activations: the numbers of blocks that keep their activations on the GPU
//! and on the host, by memory and by simulated time. They change no bit of a run.

use super::choices::{ScreenedCandidate, largest};
use super::{Brief, worded};
use crate::plan::fits;
use crate::simulate::{SimulateError, described};
use config::{Activations, Config, ParameterPlace, Recompute, in_line};
use layout::LocalMachine;
use layout::build::lay_out;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Least share of a step's time that tiers must save. Otherwise all blocks are recomputed.
const WORTH: f64 = 0.005;

/// Largest share of a step's time that tiers can save: with recomputation the forward pass is a
/// quarter of the work, and runs twice.
const MOST_SAVED: f64 = 0.25;

/// The search ends with changes of one block in this many.
const FINEST: usize = 16;

/// Numbers of blocks in tiers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct BlockNumbers {
    /// Blocks that keep the activations of both branches on the GPU.
    gpu: usize,
    /// Blocks that keep the activations of attention on the host.
    host: usize,
    /// Blocks that keep the activations of the MLP on the host.
    host_mlps: usize,
}

impl BlockNumbers {
    /// All blocks are recomputed.
    const NONE: Self = Self { gpu: 0, host: 0, host_mlps: 0 };

    /// The same numbers, with at most `layers` blocks of each branch: fewer are on the host.
    fn within(self, layers: usize) -> Self {
        let others = layers.saturating_sub(self.gpu);
        let [host, host_mlps] = [self.host, self.host_mlps].map(|number| number.min(others));
        Self { host, host_mlps, ..self }
    }

    /// Numbers that differ by `by` blocks, of a model with `layers` blocks.
    fn beside(self, by: usize, layers: usize) -> [Self; 8] {
        let more = |number: usize| (number + by).min(layers);
        let fewer = |number: usize| number.saturating_sub(by);
        let Self { gpu, host, host_mlps } = self;
        [
            Self { gpu: more(gpu), ..self },
            Self { gpu: fewer(gpu), ..self },
            Self { host: more(host), host_mlps: more(host_mlps), ..self },
            Self { host: fewer(host), host_mlps: fewer(host_mlps), ..self },
            Self { host: more(host), ..self },
            Self { host: fewer(host), ..self },
            Self { host_mlps: more(host_mlps), ..self },
            Self { host_mlps: fewer(host_mlps), ..self },
        ]
    }

    fn activations(self) -> Activations {
        let Self { gpu, host, host_mlps } = self;
        if self == Self::NONE {
            return Activations::Uniform;
        }
        let host_mlps = (host_mlps != host).then_some(host_mlps);
        Activations::Tiers { gpu_blocks: gpu, host_blocks: host, gpu_mlps: None, host_mlps }
    }
}

/// A choice with the seconds of its step.
#[derive(Clone, Copy, Debug)]
struct TimedChoice {
    numbers: BlockNumbers,
    seconds: f64,
}

/// The choices for a config that recomputes all blocks.
struct TierChoices<'a> {
    plain: &'a Config,
    machine: &'a LocalMachine,
}

impl TierChoices<'_> {
    const fn layers(&self) -> usize {
        self.plain.model.layers
    }

    fn config(&self, numbers: BlockNumbers) -> Config {
        let mut config = self.plain.clone();
        config.activations = numbers.activations();
        config
    }

    fn holds(&self, numbers: BlockNumbers) -> bool {
        let config = self.config(numbers);
        self.machine.is_sound(&config) && fits(&config, &lay_out(&config, self.machine))
    }

    /// The numbers of `wish`, with fewer blocks on the GPU if they do not fit. `None`: they do not
    /// fit with any number on the GPU.
    fn fitting(&self, wish: BlockNumbers) -> Option<BlockNumbers> {
        let with = |gpu| BlockNumbers { gpu, ..wish }.within(self.layers());
        let most = largest(wish.gpu, |gpu| gpu == 0 || self.holds(with(gpu)));
        (most > 0 || self.holds(with(0))).then(|| with(most))
    }

    /// Simulates those of `wishes` that fit and are not in `times`, and adds their seconds.
    fn time(
        &self,
        wishes: &[BlockNumbers],
        times: &mut BTreeMap<BlockNumbers, f64>,
    ) -> Result<(), SimulateError> {
        let fitting: BTreeSet<BlockNumbers> =
            wishes.par_iter().filter_map(|wish| self.fitting(*wish)).collect();
        let new: Vec<BlockNumbers> =
            fitting.into_iter().filter(|numbers| !times.contains_key(numbers)).collect();
        let timed = |numbers: &BlockNumbers| {
            let config = self.config(*numbers);
            Ok((*numbers, Brief::of(&config, &lay_out(&config, self.machine))?.seconds))
        };
        let new: Vec<(BlockNumbers, f64)> =
            new.par_iter().map(timed).collect::<Result<_, SimulateError>>()?;
        times.extend(new);
        Ok(())
    }

    /// The fastest choice and the step that recomputes all blocks. The numbers change by half of
    /// the blocks at first, and by fewer if no change makes the step faster. `None`: the config
    /// does not fit if all blocks are recomputed.
    fn fastest(&self) -> Result<Option<[TimedChoice; 2]>, SimulateError> {
        let layers = self.layers();
        let mut times = BTreeMap::new();
        let all = BlockNumbers { gpu: layers, ..BlockNumbers::NONE };
        self.time(&[BlockNumbers::NONE, all], &mut times)?;
        let Some(&recomputed) = times.get(&BlockNumbers::NONE) else { return Ok(None) };
        let recomputed = TimedChoice { numbers: BlockNumbers::NONE, seconds: recomputed };
        let mut best = fastest_of(&times, recomputed);
        let mut by = layers.div_ceil(2);
        while by >= layers.div_ceil(FINEST) {
            self.time(&best.numbers.beside(by, layers), &mut times)?;
            let found = fastest_of(&times, best);
            if found.seconds >= best.seconds {
                by /= 2;
            }
            best = found;
        }
        Ok(Some([best, recomputed]))
    }
}

/// The fastest choice of `times`, or `known` if none is faster.
fn fastest_of(times: &BTreeMap<BlockNumbers, f64>, known: TimedChoice) -> TimedChoice {
    times.iter().fold(known, |best, (&numbers, &seconds)| {
        if seconds < best.seconds { TimedChoice { numbers, seconds } } else { best }
    })
}

/// `config`, which recomputes all blocks, with the fastest tiers on its described box. `None`: no
/// tiers make a step faster, or the config has tiers or does not recompute blocks.
///
/// # Errors
/// Returns the errors of a simulation.
fn faster(config: &Config, machine: &LocalMachine) -> Result<Option<Config>, SimulateError> {
    if config.recompute != Recompute::Block || config.activations != Activations::Uniform {
        return Ok(None);
    }
    let choices = TierChoices { plain: config, machine };
    let found = choices.fastest()?.filter(is_worth);
    Ok(found.map(|[best, _]| choices.config(best.numbers)))
}

fn is_worth([best, recomputed]: &[TimedChoice; 2]) -> bool {
    best.seconds < (1.0 - WORTH) * recomputed.seconds
}

/// Adds the fastest of the layouts that recompute all blocks again, with tiers of activations, if
/// these make it faster. A layout that would be slower than the fastest with any tiers is left out.
pub(super) fn with_tiers(
    given: &Config,
    mut screened: Vec<ScreenedCandidate>,
) -> Result<Vec<ScreenedCandidate>, SimulateError> {
    let least = screened.iter().map(|(brief, _)| brief.seconds).fold(f64::INFINITY, f64::min);
    let recomputes = |(_, c): &&ScreenedCandidate| {
        let Config { recompute, activations, .. } = &c.config;
        *recompute == Recompute::Block && *activations == Activations::Uniform
    };
    let fastest =
        screened.iter().filter(recomputes).min_by(|(a, _), (b, _)| a.seconds.total_cmp(&b.seconds));
    let Some((_, plain)) = fastest.filter(|(brief, _)| (1.0 - MOST_SAVED) * brief.seconds < least)
    else {
        return Ok(screened);
    };
    let (number, machine) = (plain.number, plain.built.machine.clone());
    let found = faster(&plain.config, &machine)?;
    if let Some(config) = found.filter(|config| !is_selective(config, &machine)) {
        let candidate = worded(given, config, &machine, number);
        screened.push((Brief::of(&candidate.config, &candidate.built)?, candidate));
    }
    Ok(screened)
}

/// Whether the tiers of `config` are those of `recompute: Selective`, which a search tries anyway.
fn is_selective(config: &Config, machine: &LocalMachine) -> bool {
    let [attention, mlp] = [config.activations.attention(), config.activations.mlp()];
    let mut selective = config.clone();
    (selective.recompute, selective.activations) = (Recompute::Selective, Activations::Uniform);
    let all = config.model.layers;
    attention.gpu == all && mlp.gpu == all && machine.is_sound(&selective)
}

/// Value for `activations: Auto` in `given` and its reason; `None` if `given` has another value.
///
/// # Errors
/// Returns the errors of a simulation.
pub(crate) fn choice(
    given: &Config,
    machine: &LocalMachine,
) -> Result<Option<(Activations, String)>, SimulateError> {
    if given.activations != Activations::Auto {
        return Ok(None);
    }
    let mut plain = given.clone();
    plain.activations = Activations::Uniform;
    let choices = TierChoices { plain: &plain, machine };
    let found = match described(given) {
        Ok(_) => choices.fastest(),
        Err(_) => return Ok(Some(by_memory(&choices))),
    };
    let found = match found {
        // The grid does not fit the box. The caller reports this.
        Err(SimulateError::Box(_)) => return Ok(Some(by_memory(&choices))),
        found => found?,
    };
    let Some([best, recomputed]) = found else {
        return Ok(Some(uniform("the run does not fit with all blocks recomputed")));
    };
    if !is_worth(&[best, recomputed]) {
        return Ok(Some(uniform("no tiers make a step 0.5 % faster (simulated)")));
    }
    let why = format!(
        "a step takes {:.2} s, and {:.2} s if all blocks are recomputed (simulated)",
        best.seconds, recomputed.seconds
    );
    Ok(Some(because(best.numbers.activations(), &why)))
}

/// The choice without a described box: as many blocks on the GPU as fit.
fn by_memory(choices: &TierChoices<'_>) -> (Activations, String) {
    const UNKNOWN: &str =
        "no described box says what copies gain (`onebox plan --search --box BOX` finds it)";
    if choices.plain.offload.parameters == ParameterPlace::Host {
        return uniform(&format!("parameters and activations share the GPU, and {UNKNOWN}"));
    }
    match choices.fitting(BlockNumbers { gpu: choices.layers(), ..BlockNumbers::NONE }) {
        None => uniform("the run does not fit with all blocks recomputed"),
        Some(BlockNumbers::NONE) => {
            uniform(&format!("the GPU has no room for the activations of a block; {UNKNOWN}"))
        }
        Some(numbers) => {
            because(numbers.activations(), &format!("as many blocks as fit the GPU; {UNKNOWN}"))
        }
    }
}

fn uniform(why: &str) -> (Activations, String) {
    because(Activations::Uniform, why)
}

fn because(activations: Activations, why: &str) -> (Activations, String) {
    (activations, format!("activations: Auto is {}: {why}", in_line(&activations)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{DeviceConfig, LoadedConfig};
    use device::Arena;
    use std::path::Path;

    /// A streamed model of 6 layers on one H100, which has room for all of its parameters.
    fn streamed(sets: &[&str]) -> Config {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let all = ["model.layers=6", "offload.resident_blocks=6", "batch.micro=4"];
        let all = all.iter().chain(&["batch.global=16"]).chain(sets).map(ToString::to_string);
        let all: Vec<String> = all.collect();
        let loaded = config::load(&folder.join("llama3-70b-one-gpu.ron"), &all);
        loaded.unwrap_or_else(|e| panic!("{e}")).config
    }

    #[test]
    fn the_choice_on_a_described_box_is_faster_and_fits() {
        let machine = LocalMachine::default();
        let (activations, why) =
            choice(&streamed(&["activations=Auto"]), &machine).unwrap().unwrap();
        assert!(why.contains("if all blocks are recomputed (simulated)"), "{why}");
        let chosen = Config { activations, ..streamed(&[]) };
        let built = lay_out(&chosen, &machine);
        assert!(chosen.is_sound() && fits(&chosen, &built), "{why}");
        let seconds =
            |config: &Config| Brief::of(config, &lay_out(config, &machine)).unwrap().seconds;
        let chosen = seconds(&chosen);
        for fixed in ["Uniform", "Tiers(gpu_blocks: 4)", "Tiers(host_blocks: 4)"] {
            let fixed = streamed(&[&format!("activations={fixed}")]);
            // The search may miss the last block, which is less than this.
            let is_fast = chosen < 1.02 * seconds(&fixed);
            assert!(is_fast || !fits(&fixed, &lay_out(&fixed, &machine)), "{chosen}: {why}");
        }
        assert!(chosen < 0.995 * seconds(&streamed(&[])), "{why}");
    }

    #[test]
    fn a_search_adds_tiers_to_the_fastest_layout_that_recomputes() {
        let (machine, plain) = (LocalMachine::default(), streamed(&[]));
        let candidate = worded(&plain, plain.clone(), &machine, 7);
        let brief = Brief::of(&candidate.config, &candidate.built).unwrap();
        let all = with_tiers(&plain, vec![(brief, candidate)]).unwrap();
        let [(before, _), (after, tiers)] = &all[..] else { panic!("{} layouts", all.len()) };
        assert!(after.seconds < (1.0 - WORTH) * before.seconds);
        assert!(tiers.config.activations != Activations::Uniform && tiers.number == 7);
        assert!(fits(&tiers.config, &tiers.built) && tiers.changes > 0);
    }

    #[test]
    fn only_blocks_that_are_recomputed_get_tiers() {
        let machine = LocalMachine::default();
        for set in ["recompute=Selective", "activations=Tiers(gpu_blocks: 1)"] {
            let config = streamed(&[set, "host_checkpoints=false", "offload.first_forward=1"]);
            assert!(faster(&config, &machine).unwrap().is_none(), "{set}");
            assert!(choice(&config, &machine).unwrap().is_none(), "{set}");
        }
    }

    fn on_cores(sets: &[&str]) -> LoadedConfig {
        let ron = r#"(
            device: Cpu(count: 1, memory: "64MiB", threads: 1),
            model: (layers: 8, hidden: 32, heads: 4, seq_len: 16),
            recompute: Block,
            // Otherwise the gradients leave the GPU if activations need the memory.
            offload: (accumulate: Host),
            batch: (micro: 4, global: 8),
            data: (train: "unused"),
            train: (steps: 3),
        )"#;
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        let loaded = config::load_str(ron, "test.ron", Path::new("."), &sets);
        loaded.unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn without_a_described_box_as_many_blocks_as_fit_stay_on_the_gpu() {
        let machine = LocalMachine::default();
        for kept in [0, 3, 8] {
            let kept_blocks = match kept {
                0 => "activations=Uniform".to_owned(),
                _ => format!("activations=Tiers(gpu_blocks: {kept})"),
            };
            let config = on_cores(&[&kept_blocks]).config;
            let bytes = lay_out(&config, &machine).plan.bytes(Arena::Device);
            let mut auto = on_cores(&["activations=Auto"]);
            if let DeviceConfig::Cpu { memory, .. } = &mut auto.config.device {
                *memory = bytes;
            }
            crate::choose(&mut auto, &machine).unwrap();
            assert_eq!(auto.config.activations.attention().gpu, kept, "{:?}", auto.chosen);
            assert_eq!(auto.config.activations.mlp().gpu, kept);
            assert!(!auto.config.activations.moves());
            let why = auto.chosen.unwrap();
            assert!(why.contains("no described box says what copies gain"), "{why}");
            let shown = auto.origins.iter().find(|(key, ..)| key == "activations");
            assert_eq!(shown.unwrap().1, in_line(&auto.config.activations));
        }
    }
}
