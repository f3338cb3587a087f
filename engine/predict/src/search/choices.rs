//! Choices for layouts that wait for the host: optimizer share on the GPUs, first forward passes
//! together, speculative updates. Only choices that could be reported are simulated.

use super::{Brief, Candidate, TOLD, worded};
use crate::plan::fits;
use crate::simulate::SimulateError;
use config::{
    Accumulate, Activations, Config, Placement, Recompute, SpeculatedFraction, UpdateMode,
};
use layout::LocalMachine;
use layout::build::{RankLayout, lay_out, update_mode, vertical_width};
use offload::GradAccumulation;
use rayon::prelude::*;
use std::collections::BTreeSet;

/// Shares of the optimizer are multiples of 1 / `PARTS`.
const PARTS: usize = 1000;

/// Shares of speculative updates are multiples of 1 / `AHEAD`.
pub const AHEAD: usize = 20;

/// A share of at least this many parts is not tried: the whole optimizer on the GPUs, which is
/// another layout, is as good.
const ALMOST_ALL: usize = 990;

/// Largest number of micro-batches that run their first forward pass together.
const MOST_TOGETHER: usize = 8;

/// A layout that waits for the host during a smaller fraction of its step gets no choices.
const WORTH: f64 = 0.002;

/// Assumed maximum of the ratio of a choice's gain to the simple estimate of this gain.
const AT_MOST: f64 = 1.2;

/// Least cost of recomputation, as a fraction of the compute time without it. A forward pass is a
/// third, and the MLP's last linear, up to 0.4 of its matmuls, is not recomputed.
const RECOMPUTED: f64 = 0.18;

/// Candidates simulated between two comparisons; the same number on every machine.
const WAVE: usize = 4;

/// A candidate after its brief simulation.
pub(super) type ScreenedCandidate = (Brief, Candidate);

/// Fraction of a step that a speculative update must save to be worth its memory.
pub const WORTH_AHEAD: f64 = 0.01;

/// A candidate that is not simulated yet.
struct OpenCandidate {
    /// Estimated lower bound of the step time, in seconds.
    least: f64,
    /// Largest step time, in seconds, at which the candidate is worth its memory.
    most: f64,
    candidate: Candidate,
}

/// Adds all further simulated candidates to `screened`: choices of its layouts, and
/// `alternatives`, which leave more room on GPUs. Each has the number of a layout with less work.
pub(super) fn with_choices(
    given: &Config,
    mut screened: Vec<ScreenedCandidate>,
    alternatives: Vec<(Candidate, usize)>,
) -> Result<Vec<ScreenedCandidate>, SimulateError> {
    let mut open: Vec<OpenCandidate> = Vec::new();
    for (candidate, works_less) in alternatives.into_iter().filter(|(c, _)| is_plain(&c.config)) {
        let works_less = screened.iter().find(|(_, c)| c.number == works_less);
        let least =
            works_less.map(|(brief, other)| least_seconds(brief, &other.config, &candidate.config));
        open.extend(least.map(|least| OpenCandidate { least, most: f64::INFINITY, candidate }));
    }
    let (mut from, mut slowest) = (0, slowest_told(&screened));
    loop {
        let new = screened[from..].par_iter().filter(|(brief, _)| brief.floor() < slowest);
        open.extend(new.flat_map_iter(|(brief, c)| choices(given, c, brief)).collect::<Vec<_>>());
        let own = |open: &OpenCandidate| {
            let own = screened.iter().filter(|(_, c)| c.number == open.candidate.number);
            own.map(|(brief, _)| brief.seconds).fold(f64::INFINITY, f64::min)
        };
        open.retain(|open| open.least < slowest && open.least < own(open));
        if open.is_empty() {
            return Ok(screened);
        }
        open.sort_by(|a, b| a.least.total_cmp(&b.least));
        let wave: Vec<OpenCandidate> = open.drain(..open.len().min(WAVE)).collect();
        let worth = |OpenCandidate { candidate: c, most, .. }| {
            let brief = Brief::of(&c.config, &c.built)?;
            Ok((brief.seconds <= most).then_some((brief, c)))
        };
        let tried: Vec<Option<ScreenedCandidate>> =
            wave.into_par_iter().map(worth).collect::<Result<_, SimulateError>>()?;
        from = screened.len();
        screened.extend(tried.into_iter().flatten());
        slowest = slowest_told(&screened);
    }
}

/// Whether the config has no choice yet and the update is on the host.
fn is_plain(config: &Config) -> bool {
    config.offload.optimizer == Placement::Host
        && vertical_width(config) == 1
        && update_mode(config) != UpdateMode::Speculative
}

/// Lower bound of the seconds of `config`, which does the work of `other` with the time `brief`, and
/// recomputes more.
fn least_seconds(brief: &Brief, other: &Config, config: &Config) -> f64 {
    // Blocks that keep their activations recompute little.
    let recomputes_all =
        config.recompute == Recompute::Block && config.activations == Activations::Uniform;
    if recomputes_all && other.recompute != Recompute::Block {
        return brief.floor() + RECOMPUTED * brief.compute;
    }
    brief.floor()
}

/// Seconds of the slowest layout that would be reported now.
fn slowest_told(screened: &[ScreenedCandidate]) -> f64 {
    let mut sorted: Vec<(f64, usize)> =
        screened.iter().map(|(brief, c)| (brief.seconds, c.number)).collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut seen = BTreeSet::new();
    sorted.retain(|(_, number)| seen.insert(*number));
    sorted.get(TOLD - 1).map_or(f64::INFINITY, |(seconds, _)| *seconds)
}

/// Choices that may be faster than `plain`, if it waits for the host. The number of first forward
/// passes together is 1, or enough to hide the update, or the most that fit. The optimizer's share
/// on the GPUs is 0, a share with which the step no longer waits, or the largest share that fits.
/// The same holds for the speculated share. The result has the combinations of these choices.
fn choices(given: &Config, plain: &Candidate, brief: &Brief) -> Vec<OpenCandidate> {
    if !is_plain(&plain.config) || brief.exposed <= WORTH * brief.seconds {
        return Vec::new();
    }
    // `Auto` could choose another place with less room.
    let mut config = plain.config.clone();
    config.offload.accumulate = match plain.built.accumulation {
        GradAccumulation::Host => Accumulate::Host,
        GradAccumulation::Device | GradAccumulation::Shared | GradAccumulation::None => {
            Accumulate::Device
        }
    };
    let waited = brief.host.max(brief.exposed);
    let mut all = Vec::new();
    let machine = &plain.built.machine;
    let mut add = |config: &Config, (together, parts): (usize, usize), most: f64| {
        let share = parts as f64 / PARTS as f64;
        let gain = AT_MOST * ((together - 1) as f64 * brief.forward + share * waited);
        let least = brief.floor().max(brief.seconds - gain);
        let candidate = worded(given, config.clone(), machine, plain.number);
        // The speculated share may be smaller than the last segment.
        if update_mode(config) != UpdateMode::Speculative
            || candidate.built.optimizer.is_speculative()
        {
            all.push(OpenCandidate { least, most, candidate });
        }
    };
    let together = together(&config, &plain.built, brief);
    for together in BTreeSet::from([1, together]) {
        let left = brief.exposed - (together - 1) as f64 * brief.forward;
        let with_share = |parts| with(&config, together, parts);
        let most = largest(PARTS, |parts| parts == 0 || holds(&with_share(parts), machine));
        let enough = (left / waited * PARTS as f64).ceil().max(0.0) as usize;
        let mut shares = BTreeSet::from([0, enough.min(most), most]);
        // The whole optimizer on the GPUs is another layout.
        shares.retain(|parts| *parts < ALMOST_ALL);
        let worth = WORTH_AHEAD * brief.seconds;
        for here in shares {
            if together > 1 || here > 0 {
                add(&with_share(here), (together, here), f64::INFINITY);
            }
            let saved = here as f64 / PARTS as f64 * waited;
            if update_mode(&config) == UpdateMode::Overlapped && left - saved > worth {
                let speculative = |parts| speculative_config(&with_share(here), parts);
                let waits = (left - saved) / waited;
                for parts in speculated_shares(waits, |parts| holds(&speculative(parts), machine)) {
                    let choice = (together, here + parts * (PARTS / AHEAD));
                    let saved = saved + (together - 1) as f64 * brief.forward;
                    add(&speculative(parts), choice, brief.seconds - saved - worth);
                }
            }
        }
    }
    all
}

/// Speculated shares in parts of [`AHEAD`]: the share that the step waits for, and the largest
/// share that `holds`.
fn speculated_shares(waited: f64, holds: impl Fn(usize) -> bool) -> Vec<usize> {
    let most = largest(AHEAD, |parts| parts == 0 || holds(parts));
    let enough = (waited * AHEAD as f64).ceil().max(0.0) as usize;
    BTreeSet::from([enough.min(most), most]).into_iter().filter(|parts| *parts > 0).collect()
}

fn speculative_config(config: &Config, parts: usize) -> Config {
    let mut config = config.clone();
    config.offload.update = UpdateMode::Speculative;
    config.offload.speculated_fraction = SpeculatedFraction::Share(parts as f32 / AHEAD as f32);
    config
}

fn with(config: &Config, together: usize, parts: usize) -> Config {
    let mut config = config.clone();
    config.offload.first_forward = together;
    if parts > 0 {
        let device_fraction = parts as f32 / PARTS as f32;
        config.offload.optimizer = Placement::Split { device_fraction };
    }
    config
}

/// First forward passes together that hide the update, or the most that fit; 1 if none help.
fn together(config: &Config, built: &RankLayout, brief: &Brief) -> usize {
    let hides =
        config.recompute == Recompute::Block && update_mode(config) == UpdateMode::Overlapped;
    if !hides {
        return 1;
    }
    let wanted = 1 + (brief.exposed / brief.forward).ceil() as usize;
    let most = wanted.min(built.micro_batches).min(MOST_TOGETHER);
    largest(most, |together| together <= 1 || holds(&with(config, together, 0), &built.machine))
}

fn holds(config: &Config, machine: &LocalMachine) -> bool {
    machine.is_sound(config) && fits(config, &lay_out(config, machine))
}

/// Largest of 0..=`most` that `holds`. `holds` must be true for 0 and monotonic.
pub fn largest(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    if holds(most) {
        return most;
    }
    let (mut held, mut too_many) = (0, most);
    while too_many - held > 1 {
        let between = held.midpoint(too_many);
        if holds(between) { held = between } else { too_many = between }
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;

    #[test]
    fn the_largest_that_holds_is_found() {
        for (most, last) in
            [(1000, 999), (1000, 1000), (1000, 0), (1000, 137), (8, 5), (1, 0), (1, 1)]
        {
            assert_eq!(largest(most, |n| n <= last), last);
        }
    }

    #[test]
    fn only_a_layout_that_recomputes_all_blocks_surely_takes_longer() {
        let brief = Brief { seconds: 10.0, exposed: 4.0, host: 6.0, compute: 5.0, forward: 1.0 };
        let ron = "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16), train: (steps: 10))";
        let with = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
            let loaded = load_str(ron, "test.ron", std::path::Path::new("."), &sets);
            loaded.unwrap_or_else(|e| panic!("{e}")).config
        };
        let (kept, recomputed) = (with(&[]), with(&["recompute=Block"]));
        let in_tiers = with(&["recompute=Block", "activations=Tiers(gpu_blocks: 2)"]);
        assert!(least_seconds(&brief, &kept, &recomputed) > brief.floor());
        assert_eq!(least_seconds(&brief, &kept, &in_tiers), brief.floor());
        assert_eq!(least_seconds(&brief, &recomputed, &recomputed), brief.floor());
    }

    #[test]
    fn first_passes_go_together_where_an_update_hides_behind_them() {
        let ron = r#"(
            device: Cpu(count: 2, memory: "64MiB", threads: 1),
            model: (layers: 2, hidden: 32, heads: 4, seq_len: 16),
            parallel: (data: 2), batch: (micro: 1, global: 16), recompute: Block,
            data: (train: "unused"), train: (steps: 6),
        )"#;
        // The step waits for the host for the time of five forward passes.
        let brief = Brief { seconds: 10.0, exposed: 5.0, host: 6.0, compute: 5.0, forward: 1.0 };
        for (set, passes) in [
            ("train.seed=1", 6),
            ("batch.global=8", 4),
            ("batch.global=2", 1),
            ("batch.micro=8", 1),
            ("recompute=None", 1),
            ("offload.update=Serial", 1),
            ("offload.update=Delayed(after_step: 2)", 1),
        ] {
            let folder = std::path::Path::new(".");
            let loaded = load_str(ron, "test.ron", folder, &[set.to_owned()]);
            let config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
            let built = lay_out(&config, &LocalMachine::default());
            assert_eq!(together(&config, &built, &brief), passes, "{set}");
        }
    }
}
