//! Finds the fastest layout of a model on its box. It builds every grid of GPUs, micro-batch and
//! place, and simulates the layouts that fit with a few micro-batches. If a layout waits for the
//! host, choices with less waiting are tried. The best layouts are simulated in full.

mod brief;
mod choices;
mod grid;
mod influence;
mod played;
pub(crate) mod tiers;
mod words;

pub(crate) use brief::Brief;
pub use choices::{AHEAD, WORTH_AHEAD, largest};
pub use influence::most_influential;

use self::choices::{ScreenedCandidate, with_choices};
use self::grid::{enumerate, no_layout};
use self::played::{compare, layout};
use self::tiers::with_tiers;
pub use self::words::words;
use super::variants::{States, variants};
use crate::changes::{self, divisors};
use crate::plan::fits;
use crate::range::{KeyInfluence, RateRange};
use crate::simulate::{SimulateError, described};
use ::layout::LocalMachine;
use ::layout::build::{RankLayout, lay_out, micro_batches, shape, vertical_width};
use config::{ALL_TOGETHER, Config, LoadedConfig, OffloadConfig, ParameterPlace};
use data::progress::Progress;
use offload::GradAccumulation;
use rayon::prelude::*;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Number of the largest micro-batches to simulate if layouts differ only in the micro-batch.
const LARGEST: usize = 3;

/// Largest number of layouts to simulate.
const MOST_SIMULATED: usize = 240;

/// Number of layouts to simulate in full.
const IN_FULL: usize = 8;

/// Number of layouts to report.
const TOLD: usize = 5;

/// Report of a search. Times are simulated seconds.
#[derive(Clone, Debug, Serialize)]
pub struct SearchReport {
    /// Always true: nothing in the report was measured.
    pub simulated: bool,
    /// Name of the run.
    pub name: String,
    /// Name of the box.
    pub box_name: String,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Number of GPUs used.
    pub gpus: usize,
    /// Form of the states. It changes the results only if no layout fits with the same results.
    pub states: States,
    /// The config with this form of states.
    #[serde(skip)]
    pub config: Config,
    /// Number of layouts that the model allows on these GPUs, plus another given config that fits.
    pub enumerated: usize,
    /// Reason why the model allows no layout, and the remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_layout: Option<String>,
    /// Number of the enumerated layouts that fit every memory.
    pub fit: usize,
    /// Number of fitting layouts that do more work than another one: they have smaller
    /// micro-batches or recompute more than needed.
    pub set_aside: usize,
    /// Number of the remaining layouts that were not simulated because there are too many.
    pub left_out: usize,
    /// Number of layouts that were simulated with a few micro-batches.
    pub simulated_briefly: usize,
    /// Number of additional layouts that are choices of another one (optimizer share, first forward
    /// passes, speculated share, tiers of activations). Only a layout's fastest choice counts.
    pub choices: usize,
    /// Number of layouts and choices that were simulated in full.
    pub simulated_in_full: usize,
    /// Largest relative error of the brief simulations, compared with the full ones.
    pub brief_error: f64,
    /// Place of the given config in the ranking; `None` if it does not fit.
    pub given: Option<GivenLayout>,
    /// Key of the box with the most influence on the step of the best layout; `None` if no layout fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hangs_on: Option<KeyInfluence>,
    /// The best layouts, the fastest first.
    pub layouts: Vec<Layout>,
}

/// The given config among the layouts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct GivenLayout {
    /// Position by speed; 1 is the fastest.
    pub rank: usize,
    /// Trained tokens per second over all GPUs.
    pub tokens_per_second: f64,
    /// Low end of the range of `tokens_per_second`.
    pub tokens_per_second_low: f64,
    /// High end of the range of `tokens_per_second`.
    pub tokens_per_second_high: f64,
}

/// One layout and its step.
#[derive(Clone, Debug, Serialize)]
pub struct Layout {
    /// The `key=value` arguments of `--set`; empty for the given config.
    pub sets: Vec<String>,
    /// Number of settings that differ from the given config.
    pub changes: usize,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// Samples of a micro-batch.
    pub micro: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Fraction of the parameters with states and update on the GPUs.
    pub device_fraction: f32,
    /// Number of micro-batches whose first forward passes run together through each block.
    pub first_forward: usize,
    /// Fraction of the parameters after the embedding that are updated speculatively.
    pub speculated_fraction: f32,
    /// Description of the recomputation, the split and the places.
    pub words: String,
    /// Trained tokens per second over all GPUs.
    pub tokens_per_second: f64,
    /// Low end of the range of `tokens_per_second`.
    pub tokens_per_second_low: f64,
    /// High end of the range of `tokens_per_second`.
    pub tokens_per_second_high: f64,
    /// The range relative to a rate, and its reason.
    pub range: RateRange,
    /// Seconds of one optimizer step.
    pub step_seconds: f64,
    /// Executed operations, including recomputation, per second and GPU, in 10^12.
    pub hardware_tflops_per_gpu: f64,
    /// Operations of the model alone, per second and GPU, in 10^12.
    pub model_tflops_per_gpu: f64,
    /// Planned bytes of each GPU.
    pub gpu_bytes: u64,
    /// Bytes of each GPU that the plan may use.
    pub gpu_limit: u64,
    /// Planned bytes of each NUMA node.
    pub node_bytes: Vec<u64>,
    /// Bytes of memory of each NUMA node.
    pub node_limit: u64,
    /// Sentence for each memory that is nearly full.
    pub nearly_full: Vec<String>,
    /// Sentences about rates that the box does not say and that are assumed.
    pub assumed: Vec<String>,
    /// Whether the step is extrapolated because it has too many micro-batches to simulate.
    pub extrapolated: bool,
    /// Seconds of the step by the ops that it waits for.
    pub waits: Vec<(&'static str, f64)>,
    /// Reasons why the layout is slower than the first, as fractions of that step: the largest
    /// longer waits, then a much shorter wait.
    pub loses_by: Vec<(String, f64)>,
}

impl Layout {
    /// Bytes of the fullest NUMA node.
    pub fn fullest_node(&self) -> u64 {
        let most = self.node_bytes.iter().max();
        *most.unwrap_or_else(|| unreachable!("a box has a NUMA node"))
    }
}

/// A layout that fits.
#[derive(Clone)]
struct Candidate {
    /// Number of the layout. Choices of one layout share it.
    number: usize,
    config: Config,
    built: RankLayout,
    /// Number of settings that differ from the given config.
    changes: usize,
    /// Whether this is the given config.
    given: bool,
}

/// Searches the layouts of the config's model on `gpus` GPUs of its box, or on all of them. If none
/// fits, it tries smaller forms of states, unless the config sets the form.
///
/// # Errors
/// Returns an error if the config has no box or the box lacks a rate.
pub fn search(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
    progress: &dyn Progress,
) -> Result<SearchReport, SimulateError> {
    let mut as_given: Option<SearchReport> = None;
    for (states, config) in variants(loaded) {
        let found = search_form(loaded, machine, states, &config, gpus, progress)?;
        if !found.layouts.is_empty() || found.no_layout.is_some() {
            return Ok(found);
        }
        as_given.get_or_insert(found);
    }
    Ok(as_given.unwrap_or_else(|| unreachable!("the config as it is comes first")))
}

/// Searches the fastest layouts with bf16 Adam moments, if the config does not set the moments.
///
/// # Errors
/// Returns the errors of [`search`].
pub fn search_bf16_moments(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
    progress: &dyn Progress,
) -> Result<Option<SearchReport>, SimulateError> {
    let form = variants(loaded).into_iter().find(|(states, _)| *states == States::Bf16Moments);
    let found = |(states, config)| search_form(loaded, machine, states, &config, gpus, progress);
    form.map(found).transpose()
}

/// Searches the layouts with one form of states. `form` is the config with this form.
fn search_form(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    states: States,
    form: &Config,
    gpus: Option<usize>,
    progress: &dyn Progress,
) -> Result<SearchReport, SimulateError> {
    let given = &loaded.config;
    // A search needs a box. The config may have more ranks than the box.
    let box_ = described(given)?;
    let (box_name, of_box) = (box_.name.clone(), box_.gpus);
    let world = gpus.unwrap_or(of_box);
    if world > of_box {
        return Err(SimulateError::TooFewGpus { requested: world, has: of_box, box_name });
    }
    let all = enumerate(form, machine, world);
    let enumerated = all.len();
    let stage = progress.begin_steps("laying out the model in every way", enumerated as u64);
    let laid_out = |(number, config): (usize, &Config)| {
        let found = laid_out(given, config, machine, number);
        stage.add(1);
        found
    };
    let fitting: Vec<Candidate> = all.par_iter().enumerate().filter_map(laid_out).collect();
    drop(stage);
    let of_these = fitting.len();
    let no_layout = (enumerated == 0).then(|| no_layout(given, machine, world));
    // If the user names a number of GPUs, no layout has another number.
    let fitting = match gpus {
        Some(_) if given.world_size() != world => fitting,
        _ => with_given(given, machine, fitting),
    };
    let enumerated = enumerated + fitting.len() - of_these;
    let fit = fitting.len();
    let (mut candidates, alternatives) = without_dominated(fitting);
    let left_out = candidates.len().saturating_sub(MOST_SIMULATED);
    let not_dominated = candidates.len();
    let effort = |c: &Config| (c.recompute, Reverse(c.batch.micro));
    candidates.sort_by_key(|c| (!c.given, effort(&c.config), c.config.parallel.tensor));
    candidates.truncate(MOST_SIMULATED);
    let stage = progress.begin_steps("simulating the layouts that fit", candidates.len() as u64);
    let brief = |c: Candidate| {
        let brief = Brief::of(&c.config, &c.built)?;
        stage.add(1);
        Ok((brief, c))
    };
    let screened: Vec<ScreenedCandidate> =
        candidates.into_par_iter().map(brief).collect::<Result<_, SimulateError>>()?;
    drop(stage);
    let alternative_numbers: BTreeSet<usize> = alternatives.iter().map(|(c, _)| c.number).collect();
    let stage = progress.begin_steps("simulating changes of the fastest layouts", 0);
    let screened = with_choices(given, screened, alternatives)?;
    drop(stage);
    let stage = progress.begin_steps("simulating tiers of activations", 0);
    let screened = with_tiers(given, screened)?;
    drop(stage);
    let tried: BTreeSet<usize> = screened.iter().map(|(_, c)| c.number).collect();
    let revived = tried.intersection(&alternative_numbers).count();
    let set_aside = fit - not_dominated - revived;
    let simulated_briefly = not_dominated - left_out + revived;
    let choices = screened.len() - simulated_briefly;
    let screened = fastest_choices(screened);
    let given_at = screened.iter().position(|(_, c)| c.given);
    let finalists = screened.iter().enumerate().filter(|(at, (_, c))| *at < IN_FULL || c.given);
    let finalists: Vec<&ScreenedCandidate> = finalists.map(|(_, screened)| screened).collect();
    let of_all = finalists.len() as u64;
    let stage = progress.begin_steps("simulating the fastest layouts in full", of_all);
    let in_full = |at: usize| {
        let played = (layout(loaded, &finalists[at].1)?, at);
        stage.add(1);
        Ok(played)
    };
    // Each layout has the position of its candidate.
    let all = (0..finalists.len()).into_par_iter();
    let mut played: Vec<(Layout, usize)> =
        all.map(in_full).collect::<Result<_, SimulateError>>()?;
    drop(stage);
    let simulated_in_full = played.len();
    let off = |((brief, _), (layout, _)): (&&ScreenedCandidate, &(Layout, usize))| {
        (brief.seconds / layout.step_seconds - 1.0).abs()
    };
    let brief_error = finalists.iter().zip(&played).map(off).fold(0.0, f64::max);
    sort(&mut played, |(layout, _)| (layout.step_seconds, layout.changes));
    let stage = progress.begin_steps("simulating the best layout with other rates", 0);
    let hangs_on = match played.first() {
        Some((best, at)) => {
            let Candidate { config, built, .. } = &finalists[*at].1;
            most_influential(config, built, &best.waits, best.step_seconds)?
        }
        None => None,
    };
    drop(stage);
    let given = played.iter().position(|(_, at)| finalists[*at].1.given).map(|at| GivenLayout {
        // After the finalists, the order is that of the brief simulations.
        rank: given_at.filter(|at| *at >= IN_FULL).unwrap_or(at) + 1,
        tokens_per_second: played[at].0.tokens_per_second,
        tokens_per_second_low: played[at].0.tokens_per_second_low,
        tokens_per_second_high: played[at].0.tokens_per_second_high,
    });
    let mut layouts: Vec<Layout> =
        played.into_iter().map(|(layout, _)| layout).take(TOLD).collect();
    compare(&mut layouts);
    Ok(SearchReport {
        simulated: true,
        name: loaded.config.name.clone(),
        box_name,
        parameters: shape(form).parameters(),
        gpus: world,
        states,
        config: form.clone(),
        enumerated,
        no_layout,
        fit,
        set_aside,
        left_out,
        simulated_briefly,
        choices,
        simulated_in_full,
        brief_error,
        given,
        hangs_on,
        layouts,
    })
}

/// The fastest choice of each layout, and the given config, in order of time.
fn fastest_choices(mut screened: Vec<ScreenedCandidate>) -> Vec<ScreenedCandidate> {
    sort(&mut screened, |(brief, c)| (brief.seconds, c.changes));
    let mut seen = BTreeSet::new();
    screened.retain(|(_, c)| seen.insert(c.number) || c.given);
    screened
}

/// Sorts by time to five digits, then by the number of changes. The sort is stable.
fn sort<T>(all: &mut [T], key: impl Fn(&T) -> (f64, usize)) {
    let digits = |seconds: f64| {
        let unit = 10f64.powf(seconds.max(1e-12).log10().floor() - 4.0);
        (seconds / unit).round() * unit
    };
    all.sort_by(|a, b| {
        let ((a, fewer), (b, more)) = (key(a), key(b));
        digits(a).total_cmp(&digits(b)).then(fewer.cmp(&more))
    });
}

/// A candidate of `config`, if it fits, with the largest group of micro-batches that fits.
fn laid_out(
    given: &Config,
    config: &Config,
    machine: &LocalMachine,
    number: usize,
) -> Option<Candidate> {
    let fits = |config: &Config| {
        let built = lay_out(config, machine);
        // If all blocks stay on the GPU, the layout equals that without parameters on the host.
        let stays = built.decoder.shape().ring.resident == config.model.layers;
        !stays && fits(config, &built)
    };
    let config = in_groups(config).into_iter().find(fits)?;
    Some(worded(given, config, machine, number))
}

/// All layouts of a search, with all group sizes for parameters on the host.
pub fn layouts(config: &Config, machine: &LocalMachine, world: usize) -> Vec<Config> {
    let all = enumerate(config, machine, world);
    all.iter().flat_map(in_groups).filter(|config| machine.is_sound(config)).collect()
}

/// `config`, and with parameters on the host also smaller and smaller groups of micro-batches.
fn in_groups(config: &Config) -> Vec<Config> {
    let OffloadConfig { parameters, first_forward, .. } = &config.offload;
    if *parameters == ParameterPlace::Device || *first_forward != ALL_TOGETHER {
        return vec![config.clone()];
    }
    let fewer = divisors(micro_batches(config)).into_iter().rev().skip(1);
    let with = |together| {
        let mut config = config.clone();
        config.offload.first_forward = together;
        config
    };
    std::iter::once(config.clone()).chain(fewer.map(with)).collect()
}

/// A candidate of `config`, with the settings of `given` that have the same effect.
fn worded(given: &Config, mut config: Config, machine: &LocalMachine, number: usize) -> Candidate {
    let mut built = lay_out(&config, machine);
    let mut same = config.clone();
    same.offload.accumulate = given.offload.accumulate;
    same.offload.first_forward = given.offload.first_forward;
    if vertical_width(&same) != vertical_width(&config) || !machine.is_sound(&same) {
        same.offload.first_forward = config.offload.first_forward;
    }
    if same != config && machine.is_sound(&same) {
        let as_given = lay_out(&same, machine);
        if as_given.accumulation == built.accumulation {
            (config, built) = (same, as_given);
        }
    }
    let changes = changes::count(given, &config);
    Candidate { number, given: config == *given, config, built, changes }
}

/// Adds the given config if it fits and is not in `all`, for example because it uses fewer GPUs.
fn with_given(given: &Config, machine: &LocalMachine, mut all: Vec<Candidate>) -> Vec<Candidate> {
    if !all.iter().any(|c| c.given) && machine.is_sound(given) {
        let built = lay_out(given, machine);
        if fits(given, &built) {
            let number = all.iter().map(|c| c.number + 1).max().unwrap_or(0);
            all.push(Candidate { number, config: given.clone(), built, changes: 0, given: true });
        }
    }
    all
}

/// Removes layouts that do more work than a similar one, except the given config. Those that
/// recompute more leave more room: they are returned with the similar one's number.
fn without_dominated(all: Vec<Candidate>) -> (Vec<Candidate>, Vec<(Candidate, usize)>) {
    let alike = |a: &Candidate, b: &Candidate| {
        let (x, y) = (&a.config, &b.config);
        x.parallel == y.parallel
            && x.offload.optimizer == y.offload.optimizer
            && x.offload.parameters == y.offload.parameters
    };
    // Layouts keep all activations, most, whole inputs, or parts of inputs, with growing work.
    let checkpoints = |c: &Candidate| (c.config.recompute, c.config.partition_checkpoints);
    // Whether the candidate is removed, and the number of the layout with less recomputation.
    let dominated = |c: &Candidate| {
        let others = || all.iter().filter(|other| alike(other, c));
        let (micro, sum) = (c.config.batch.micro, c.built.accumulation);
        let less = |o: &&Candidate| {
            o.config.batch.micro == micro
                && o.built.accumulation == sum
                && checkpoints(o) < checkpoints(c)
        };
        let larger = |o: &&Candidate| {
            let same =
                o.built.accumulation == sum || o.built.accumulation == GradAccumulation::None;
            o.config.batch.micro > micro && same && checkpoints(o) == checkpoints(c)
        };
        // The given config may appear twice, with its own settings and with equivalent ones.
        let larger: BTreeSet<usize> =
            others().filter(larger).map(|o| o.config.batch.micro).collect();
        if larger.len() >= LARGEST {
            return (true, None);
        }
        let least = others().filter(less).min_by_key(|o| checkpoints(o)).map(|o| o.number);
        (least.is_some(), least)
    };
    let goes: Vec<(bool, Option<usize>)> =
        all.iter().map(|c| if c.given { (false, None) } else { dominated(c) }).collect();
    let (mut candidates, mut alternatives) = (Vec::new(), Vec::new());
    for (candidate, (goes, works_less)) in all.into_iter().zip(goes) {
        match works_less {
            Some(works_less) => alternatives.push((candidate, works_less)),
            None if !goes => candidates.push(candidate),
            None => {}
        }
    }
    (candidates, alternatives)
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_as_fast_to_five_digits_is_ordered_by_fewer_changes() {
        let mut all =
            [(0.2, 3, 'd'), (0.100001, 2, 'c'), (0.1, 3, 'x'), (0.0999996, 1, 'b'), (0.09, 9, 'a')];
        super::sort(&mut all, |(seconds, changes, _)| (*seconds, *changes));
        let names: String = all.iter().map(|(.., name)| name).collect();
        assert_eq!(names, "abcxd");
    }
}
