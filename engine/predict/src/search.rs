//! Which layout of a model on its box is the fastest: every grid of its GPUs, micro-batch and place is laid out, what
//! fits is simulated with a few micro-batches, where that waits for the host it is given less of the optimizer or more to
//! hide behind, and the best are played in full.

mod brief;
mod choices;
mod grid;
mod played;
mod words;

pub(crate) use brief::Brief;
pub use choices::{AHEAD, WORTH_AHEAD, largest};

use self::choices::{ScreenedCandidate, with_choices};
use self::grid::{enumerate, no_layout};
use self::played::{compare, layout};
pub use self::words::words;
use super::variants::{States, variants};
use crate::changes::{self, divisors};
use crate::plan::fits;
use crate::simulate::{SimulateError, described};
use ::layout::LocalMachine;
use ::layout::build::{RankLayout, lay_out, micro_batches, shape, vertical_width};
use config::{ALL_TOGETHER, Config, LoadedConfig, OffloadConfig, ParameterPlace};
use offload::GradAccumulation;
use rayon::prelude::*;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Of layouts that differ in the micro-batch alone, so many of the largest are simulated.
const LARGEST: usize = 3;

/// Most layouts that are simulated at all.
const MOST_SIMULATED: usize = 240;

/// Layouts that are played in full.
const IN_FULL: usize = 8;

/// Layouts that are told.
const TOLD: usize = 5;

/// What a search found. Times are simulated seconds.
#[derive(Clone, Debug, Serialize)]
pub struct SearchReport {
    /// Always true: none of this was measured.
    pub simulated: bool,
    /// Of the run.
    pub name: String,
    /// Of the box.
    pub box_name: String,
    /// Of the model.
    pub parameters: u64,
    /// That were used.
    pub gpus: usize,
    /// How the layouts keep states: other results only where no layout fits without them.
    pub states: States,
    /// The config with such states.
    #[serde(skip)]
    pub config: Config,
    /// Layouts that the model allows on these GPUs; and the config as it is, where it fits and is none of them.
    pub enumerated: usize,
    /// Why the model allows none, and what would.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_layout: Option<String>,
    /// Of these, layouts whose every memory holds what it must.
    pub fit: usize,
    /// Of these, layouts that do more work than another that fits: the same with smaller micro-batches, or with
    /// recomputation that is not needed.
    pub set_aside: usize,
    /// Of the rest, layouts that were too many.
    pub left_out: usize,
    /// Layouts that were simulated with a few micro-batches.
    pub simulated_briefly: usize,
    /// Shares of the optimizer and numbers of first forward passes that were simulated so for some of them; of each
    /// layout the fastest choice counts.
    pub choices: usize,
    /// Of both, what was played in full.
    pub simulated_in_full: usize,
    /// How far the brief simulations of the layouts that were then played in full were off, at most.
    pub brief_error: f64,
    /// Where the given config stands, from 1; absent where it does not fit.
    pub given: Option<GivenLayout>,
    /// The best, the fastest first.
    pub layouts: Vec<Layout>,
}

/// The given config among the layouts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct GivenLayout {
    /// 1: nothing is faster.
    pub rank: usize,
    /// Over all GPUs.
    pub tokens_per_second: f64,
}

/// One layout and its step.
#[derive(Clone, Debug, Serialize)]
pub struct Layout {
    /// `key=value`, to give with `--set`; none: the config as it is.
    pub sets: Vec<String>,
    /// Settings that differ from the config's.
    pub changes: usize,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// Samples of a micro-batch.
    pub micro: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Of the parameters, those whose states and update are on the GPUs.
    pub device_fraction: f32,
    /// Micro-batches whose first forward passes go through each block together.
    pub first_forward: usize,
    /// Of the parameters behind the embedding, those that are updated ahead of the decision.
    pub speculated_fraction: f32,
    /// In words: recomputation, split, places.
    pub words: String,
    /// Over all GPUs.
    pub tokens_per_second: f64,
    /// One optimizer step.
    pub step_seconds: f64,
    /// Operations as run, recomputation included, per second and GPU, in 10^12.
    pub hardware_tflops_per_gpu: f64,
    /// Operations of the model alone.
    pub model_tflops_per_gpu: f64,
    /// Bytes of each GPU.
    pub gpu_bytes: u64,
    /// Bytes that the plan may take of each GPU.
    pub gpu_limit: u64,
    /// Bytes of each NUMA node.
    pub node_bytes: Vec<u64>,
    /// Bytes that each NUMA node has.
    pub node_limit: u64,
    /// Of each memory that is nearly full: a sentence.
    pub nearly_full: Vec<String>,
    /// The step was not played to its end: more micro-batches than are looked at.
    pub extrapolated: bool,
    /// What it waits for, in seconds.
    pub waits: Vec<(&'static str, f64)>,
    /// Why it is not the first: what it waits for longer, largest first, and much shorter instead; as shares of the
    /// first one's step.
    pub loses_by: Vec<(String, f64)>,
}

impl Layout {
    /// Bytes of the NUMA node that holds most.
    pub fn fullest_node(&self) -> u64 {
        let most = self.node_bytes.iter().max();
        *most.unwrap_or_else(|| unreachable!("a box has a NUMA node"))
    }
}

/// A layout that fits.
#[derive(Clone)]
struct Candidate {
    /// Of the layout; choices of one layout share it.
    number: usize,
    config: Config,
    built: RankLayout,
    /// Settings that differ from the config's.
    changes: usize,
    /// It is the config.
    given: bool,
}

/// Searches the layouts of the config's model on `gpus` GPUs of its box, or on all. If none fits, then with states that take less of the
/// host, unless the config gives their form.
///
/// # Errors
/// No box, or one that says too little.
pub fn search(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
) -> Result<SearchReport, SimulateError> {
    let mut as_given: Option<SearchReport> = None;
    for (states, config) in variants(loaded) {
        let found = search_form(loaded, machine, states, &config, gpus)?;
        if !found.layouts.is_empty() || found.no_layout.is_some() {
            return Ok(found);
        }
        as_given.get_or_insert(found);
    }
    Ok(as_given.unwrap_or_else(|| unreachable!("the config as it is comes first")))
}

/// The fastest layouts with bf16 Adam moments, where the config leaves them open.
///
/// # Errors
/// As [`search`].
pub fn search_bf16_moments(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
) -> Result<Option<SearchReport>, SimulateError> {
    let form = variants(loaded).into_iter().find(|(states, _)| *states == States::Bf16Moments);
    form.map(|(states, config)| search_form(loaded, machine, states, &config, gpus)).transpose()
}

/// The layouts of one form of states, whose config is `form`.
fn search_form(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    states: States,
    form: &Config,
    gpus: Option<usize>,
) -> Result<SearchReport, SimulateError> {
    let given = &loaded.config;
    // No box, no search. The ranks of the config may be too many for it.
    let box_ = described(given)?;
    let (box_name, of_box) = (box_.name.clone(), box_.gpus);
    let world = gpus.unwrap_or(of_box);
    if world > of_box {
        return Err(SimulateError::TooFewGpus { asked: world, has: of_box, box_name });
    }
    let all = enumerate(form, machine, world);
    let enumerated = all.len();
    let laid_out = |(number, config): (usize, &Config)| laid_out(given, config, machine, number);
    let fitting: Vec<Candidate> = all.par_iter().enumerate().filter_map(laid_out).collect();
    let of_these = fitting.len();
    let no_layout = (enumerated == 0).then(|| no_layout(given, machine, world));
    // Who names a number of GPUs wants no layout of another.
    let fitting = match gpus {
        Some(_) if given.world_size() != world => fitting,
        _ => with_given(given, machine, fitting),
    };
    let enumerated = enumerated + fitting.len() - of_these;
    let fit = fitting.len();
    let (mut kept, aside) = without_dominated(fitting);
    let left_out = kept.len().saturating_sub(MOST_SIMULATED);
    let not_dominated = kept.len();
    let effort = |c: &Config| (c.recompute, Reverse(c.batch.micro));
    kept.sort_by_key(|c| (!c.given, effort(&c.config), c.config.parallel.tensor));
    kept.truncate(MOST_SIMULATED);
    let brief = |c: Candidate| Ok((Brief::of(&c.config, &c.built)?, c));
    let screened: Vec<ScreenedCandidate> =
        kept.into_par_iter().map(brief).collect::<Result<_, SimulateError>>()?;
    let numbers_aside: BTreeSet<usize> = aside.iter().map(|(c, _)| c.number).collect();
    let screened = with_choices(given, screened, aside)?;
    let tried: BTreeSet<usize> = screened.iter().map(|(_, c)| c.number).collect();
    let revived = tried.intersection(&numbers_aside).count();
    let set_aside = fit - not_dominated - revived;
    let simulated_briefly = not_dominated - left_out + revived;
    let choices = screened.len() - simulated_briefly;
    let screened = fastest_choices(screened);
    let given_at = screened.iter().position(|(_, c)| c.given);
    let finalists = screened.iter().enumerate().filter(|(at, (_, c))| *at < IN_FULL || c.given);
    let finalists: Vec<&ScreenedCandidate> = finalists.map(|(_, screened)| screened).collect();
    let mut played: Vec<(Layout, bool)> = finalists
        .par_iter()
        .map(|(_, c)| Ok((layout(loaded, c)?, c.given)))
        .collect::<Result<_, SimulateError>>()?;
    let simulated_in_full = played.len();
    let off = |((brief, _), (layout, _)): (&&ScreenedCandidate, &(Layout, bool))| {
        (brief.seconds / layout.step_seconds - 1.0).abs()
    };
    let brief_error = finalists.iter().zip(&played).map(off).fold(0.0, f64::max);
    sort(&mut played, |(layout, _)| (layout.step_seconds, layout.changes));
    let given = played.iter().position(|(_, given)| *given).map(|at| GivenLayout {
        // Behind the finalists the order is that of the brief simulations.
        rank: given_at.filter(|at| *at >= IN_FULL).unwrap_or(at) + 1,
        tokens_per_second: played[at].0.tokens_per_second,
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
        layouts,
    })
}

/// Of each layout the fastest choice, and the config itself; in order.
fn fastest_choices(mut screened: Vec<ScreenedCandidate>) -> Vec<ScreenedCandidate> {
    sort(&mut screened, |(brief, c)| (brief.seconds, c.changes));
    let mut seen = BTreeSet::new();
    screened.retain(|(_, c)| seen.insert(c.number) || c.given);
    screened
}

/// By time, and where that is the same to five digits by fewer changes; else as before.
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

/// `config` with its handles, if it fits; with parameters on the host in the largest groups of micro-batches that do.
fn laid_out(
    given: &Config,
    config: &Config,
    machine: &LocalMachine,
    number: usize,
) -> Option<Candidate> {
    let fits = |config: &Config| {
        let built = lay_out(config, machine);
        // All blocks stay: it is the same without parameters on the host.
        let stays = built.decoder.shape().ring.resident == config.model.layers;
        !stays && fits(config, &built)
    };
    let config = in_groups(config).into_iter().find(fits)?;
    Some(worded(given, config, machine, number))
}

/// Every layout that a search looks at, with parameters on the host in every size of groups.
pub fn layouts(config: &Config, machine: &LocalMachine, world: usize) -> Vec<Config> {
    let all = enumerate(config, machine, world);
    all.iter().flat_map(in_groups).filter(|config| machine.is_sound(config)).collect()
}

/// `config`, and then with fewer and fewer micro-batches together, where parameters are on the host and all go together.
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

/// `config` with its handles, in the words of `given` where these mean the same.
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

/// `all`, and the config itself where it is of another kind, such as one on fewer GPUs, and fits.
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

/// Without layouts that do more work than another that fits, and is the same but for that. The config itself stays. And
/// what was set aside because it recomputes, with the number of that other one: it leaves more room.
fn without_dominated(all: Vec<Candidate>) -> (Vec<Candidate>, Vec<(Candidate, usize)>) {
    let alike = |a: &Candidate, b: &Candidate| {
        let (x, y) = (&a.config, &b.config);
        x.parallel == y.parallel
            && x.offload.optimizer == y.offload.optimizer
            && x.offload.parameters == y.offload.parameters
    };
    // All activations, most, whole inputs, shares of inputs: what keeps less works more.
    let checkpoints = |c: &Candidate| (c.config.recompute, c.config.partition_checkpoints);
    // Whether it goes, and for whom.
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
        // The config itself may be there twice, in its own words and in others.
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
    let (mut kept, mut aside) = (Vec::new(), Vec::new());
    for (candidate, (goes, works_less)) in all.into_iter().zip(goes) {
        match works_less {
            Some(works_less) => aside.push((candidate, works_less)),
            None if !goes => kept.push(candidate),
            None => {}
        }
    }
    (kept, aside)
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
