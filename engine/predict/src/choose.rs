//! Replaces `Auto` of `activations`, `offload.update` and `offload.speculated_fraction`; changes no
//! result bit.

use super::plan::{decided, fits};
use super::search::{AHEAD, Brief, WORTH_AHEAD, largest, tiers};
use super::simulate::{SimulateError, described};
use config::{
    Config, DeviceConfig, LoadedConfig, Origin, ParameterPlace, Placement, SpeculatedFraction,
    UpdateMode, in_line,
};
use device::Arena;
use layout::LocalMachine;
use layout::build::{RankLayout, lay_out};
use rayon::prelude::*;
use std::collections::BTreeSet;
use topology::format_bytes;

/// Largest relative increase of the step time for which a smaller share counts as equally good.
const AS_GOOD: f64 = 0.005;

/// Largest fraction of compute time in the backward pass: 3 of 4 parts with recomputation.
const BACKWARD: f64 = 0.75;

/// Update mode, speculated share, and the reason.
type Choice = (UpdateMode, SpeculatedFraction, String);

/// Replaces `Auto` in `loaded`, if it has any, and sets [`LoadedConfig::chosen`] to the reasons. The
/// tiers of activations are chosen first: speculative updates get the host memory that they leave.
///
/// # Errors
/// Returns an error if a given share is below the last segment, or if a check of the step fails.
pub fn choose(loaded: &mut LoadedConfig, machine: &LocalMachine) -> Result<(), SimulateError> {
    let mut reasons = Vec::new();
    if let Some((activations, why)) = tiers::choice(&loaded.config, machine)? {
        loaded.config.activations = activations;
        set_derived(loaded, "activations", in_line(&activations));
        reasons.push(why);
    }
    if let Some((update, share, why)) = choice(&loaded.config, machine)? {
        let offload = &mut loaded.config.offload;
        (offload.update, offload.speculated_fraction) = (update, share);
        set_derived(loaded, "offload.update", in_line(&update));
        set_derived(loaded, "offload.speculated_fraction", in_line(&share));
        reasons.push(why);
    }
    if !reasons.is_empty() {
        loaded.chosen = Some(reasons.join("\n"));
    }
    Ok(())
}

/// Notes that `Auto` of `key` became `value`.
fn set_derived(loaded: &mut LoadedConfig, key: &str, value: String) {
    let found = loaded.origins.iter_mut().find(|(name, was, _)| name == key && *was != value);
    if let Some((_, was, origin)) = found {
        (*was, *origin) = (value, Origin::Derived("Auto".into()));
    }
}

/// Values for `Auto` in `given` on `machine`; `None` if `given` has no `Auto`.
pub fn choice(given: &Config, machine: &LocalMachine) -> Result<Option<Choice>, SimulateError> {
    let offload = &given.offload;
    let on_device = offload.optimizer == Placement::Device;
    let found = match (offload.update, offload.speculated_fraction) {
        (UpdateMode::Auto, _) => match gains_nothing(given) {
            Some(why) => ConfigChoices::new(given, machine).overlapped(&why),
            None => found(given, machine)?,
        },
        (UpdateMode::Speculative, SpeculatedFraction::Auto) if !on_device => found(given, machine)?,
        (UpdateMode::Speculative, SpeculatedFraction::Share(share)) if !on_device => {
            let choosing = ConfigChoices::new(given, machine);
            // If all states are on the GPUs, no share updates anything speculatively.
            let is_right = choosing.moves(share) || !choosing.moves(1.0);
            return if is_right { Ok(None) } else { Err(choosing.too_small(share)) };
        }
        _ => return Ok(None),
    };
    Ok(Some(found))
}

/// Chooses by time on a described box, otherwise by memory.
fn found(given: &Config, machine: &LocalMachine) -> Result<Choice, SimulateError> {
    let choosing = ConfigChoices::new(given, machine);
    if described(given).is_err() {
        return Ok(choosing.by_memory());
    }
    match choosing.by_time() {
        // The grid does not fit the box. The caller reports this.
        Err(SimulateError::Box(_)) => Ok(choosing.by_memory()),
        found => found,
    }
}

/// Reason why speculative updates cannot gain much, if this is clear without a simulation.
fn gains_nothing(given: &Config) -> Option<String> {
    if given.offload.optimizer == Placement::Device {
        return Some("the optimizer is on the GPUs".into());
    }
    if let DeviceConfig::Cpu { .. } = given.device {
        return Some("virtual GPUs compute on the cores that update".into());
    }
    // With parameters on the host, all micro-batches run backward through a block together.
    if given.offload.parameters == ParameterPlace::Host {
        return None;
    }
    let passes = given.batch.global / (given.batch.micro * given.parallel.data);
    let most = BACKWARD / passes as f64;
    (most < WORTH_AHEAD).then(|| {
        format!(
            "Speculative hides an update behind one more backward pass, at most {:.1} % of a step of {passes} micro-batches",
            100.0 * most
        )
    })
}

/// A config with `Auto`, and its layout without speculative updates.
struct ConfigChoices<'a> {
    given: &'a Config,
    exact: Config,
    built: RankLayout,
}

impl<'a> ConfigChoices<'a> {
    fn new(given: &'a Config, machine: &LocalMachine) -> Self {
        let exact = with(given, UpdateMode::Overlapped, given.offload.speculated_fraction);
        let built = lay_out(&exact, machine);
        Self { given, exact, built }
    }

    /// The share in the config, if it is not `Auto`.
    const fn named_share(&self) -> Option<f32> {
        match self.given.offload.speculated_fraction {
            SpeculatedFraction::Auto => None,
            SpeculatedFraction::Share(share) => Some(share),
        }
    }

    /// Whether the config names `Speculative`, which is then refused if it does not fit.
    fn must(&self) -> bool {
        self.given.offload.update == UpdateMode::Speculative
    }

    fn lay_out(&self, config: &Config) -> RankLayout {
        lay_out(config, &self.built.machine)
    }

    fn speculative_config(&self, share: f32) -> Config {
        with(self.given, UpdateMode::Speculative, SpeculatedFraction::Share(share))
    }

    /// Whether the second arrays of states fit next to all other data, if this share of the
    /// parameters is updated speculatively. If the checkpoint copy of the states fits without the
    /// second arrays, it must also fit with them.
    fn holds(&self, share: f32) -> bool {
        let config = self.speculative_config(share);
        let built = self.lay_out(&config);
        let copies = |config, built| decided(config, built).copy > 0;
        built.machine.is_sound(&config)
            && fits(&config, &built)
            && copies(&config, &built) == copies(&self.exact, &self.built)
    }

    fn overlapped(&self, why: &str) -> Choice {
        let why = format!("offload.update: Auto is Overlapped: {why}");
        (UpdateMode::Overlapped, self.given.offload.speculated_fraction, why)
    }

    fn speculative(&self, share: f32, why: &str) -> Choice {
        let key = if self.must() {
            "speculated_fraction: Auto is"
        } else {
            "update: Auto is Speculative with a share of"
        };
        let pinned = |built: &RankLayout| built.plan.bytes(Arena::Pinned);
        let more = pinned(&self.lay_out(&self.speculative_config(share)))
            .saturating_sub(pinned(&self.built));
        let why = format!(
            "offload.{key} {share}: {why}; it takes {} more of the host's memory per rank",
            format_bytes(more)
        );
        (UpdateMode::Speculative, SpeculatedFraction::Share(share), why)
    }

    /// Whether the share updates anything speculatively: it must cover at least the last segment.
    fn moves(&self, share: f32) -> bool {
        self.lay_out(&self.speculative_config(share)).optimizer.is_speculative()
    }

    /// The error of a given share that is smaller than the last segment.
    fn too_small(&self, share: f32) -> SimulateError {
        let least = largest(AHEAD, |parts| !self.moves(share_of(parts))) + 1;
        SimulateError::NothingAhead { share, least: share_of(least) }
    }

    fn is_usable(&self, share: f32) -> bool {
        self.holds(share) && self.moves(share)
    }

    /// The choice if no share both fits and updates anything speculatively.
    fn nothing_fits(&self) -> Choice {
        let why = if !fits(&self.exact, &self.built) {
            "the run does not fit without it".to_owned()
        } else if let Some(share) = self.named_share().filter(|share| !self.moves(*share)) {
            format!("a share of {share} is less than the last segment, so nothing is updated ahead")
        } else {
            "the second arrays of Speculative do not fit the host's memory beside all else"
                .to_owned()
        };
        match self.must() {
            true => self.speculative(SpeculatedFraction::USUAL, &why),
            false => self.overlapped(&why),
        }
    }

    /// The choice without a described box: the usual share, or the largest smaller share that fits.
    fn by_memory(&self) -> Choice {
        let unknown =
            "no described box says what it gains (`onebox plan --search --box BOX` finds it)";
        if let Some(share) = self.named_share() {
            return if self.is_usable(share) {
                self.speculative(share, unknown)
            } else {
                self.nothing_fits()
            };
        }
        let usual = (SpeculatedFraction::USUAL * AHEAD as f32) as usize;
        let holds = |parts| parts == 0 || self.holds(share_of(parts));
        match largest(usual, holds) {
            parts if parts == 0 || !self.moves(share_of(parts)) => self.nothing_fits(),
            parts if parts == usual => self.speculative(share_of(parts), unknown),
            parts => self.speculative(share_of(parts), &format!("as much as fits; {unknown}")),
        }
    }

    /// The choice on a described box: the smallest share with a simulated step close to the best.
    fn by_time(&self) -> Result<Choice, SimulateError> {
        let overlapped = Brief::of(&self.exact, &self.built)?;
        let waits = overlapped.waits();
        if !self.must() && waits < WORTH_AHEAD {
            let why = format!(
                "a step waits for its host for {:.1} % of its time (simulated)",
                100.0 * waits
            );
            return Ok(self.overlapped(&why));
        }
        let shares = self.shares(&overlapped);
        if shares.is_empty() {
            return Ok(self.nothing_fits());
        }
        let timed = |&share: &f32| {
            let config = self.speculative_config(share);
            Ok((Brief::of(&config, &self.lay_out(&config))?.seconds, share))
        };
        let timed: Vec<(f64, f32)> =
            shares.par_iter().map(timed).collect::<Result<_, SimulateError>>()?;
        let least = timed.iter().map(|(seconds, _)| *seconds).fold(f64::INFINITY, f64::min);
        let good = |(seconds, _): &&(f64, f32)| *seconds <= least * (1.0 + AS_GOOD);
        let Some(&(seconds, share)) = timed.iter().find(good) else {
            unreachable!("the least of some is among them")
        };
        let times = format!(
            "a step takes {seconds:.2} s, and {:.2} s under Overlapped, where no gradient is clipped (simulated)",
            overlapped.seconds
        );
        Ok(match overlapped.seconds - seconds < WORTH_AHEAD * overlapped.seconds && !self.must() {
            true => self.overlapped(&format!(
                "Speculative gains less than 1 %: with a share of {share} {times}"
            )),
            false => self.speculative(share, &times),
        })
    }

    /// Shares to simulate, ascending: the share of the update for which the step waits, a larger
    /// share, and the largest share that fits.
    fn shares(&self, overlapped: &Brief) -> Vec<f32> {
        if let Some(share) = self.named_share() {
            return if self.is_usable(share) { vec![share] } else { Vec::new() };
        }
        let most = largest(AHEAD, |parts| parts == 0 || self.holds(share_of(parts)));
        let enough = (overlapped.waited_share() * AHEAD as f64).ceil() as usize;
        let parts = [enough.clamp(1, AHEAD), (enough + AHEAD.div_ceil(5)).min(AHEAD), most];
        let parts = parts.into_iter().map(|parts| parts.min(most)).filter(|parts| *parts > 0);
        parts
            .collect::<BTreeSet<_>>()
            .into_iter()
            .map(share_of)
            .filter(|share| self.moves(*share))
            .collect()
    }
}

fn share_of(parts: usize) -> f32 {
    parts as f32 / AHEAD as f32
}

fn with(given: &Config, update: UpdateMode, share: SpeculatedFraction) -> Config {
    let mut config = given.clone();
    (config.offload.update, config.offload.speculated_fraction) = (update, share);
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;

    /// The choice on GPUs without a described box.
    fn on_gpus(hidden: usize, sets: &[&str]) -> Choice {
        let ron = format!(
            r#"(device: Cuda, model: (layers: 8, hidden: {hidden}, heads: {}, seq_len: 16), precision: Fp16,
            batch: (micro: 1, global: 4), data: (train: "unused"), train: (steps: 6))"#,
            hidden.div_ceil(256)
        );
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        let loaded = load_str(&ron, "test.ron", std::path::Path::new("."), &sets);
        let config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
        choice(&config, &LocalMachine::default())
            .unwrap_or_else(|e| panic!("{e}"))
            .unwrap_or_else(|| panic!("open"))
    }

    #[test]
    fn a_named_share_that_takes_no_segment_is_refused_with_one_that_does() {
        let choice_of = |share: &str, more: &str| {
            let ron = r#"(device: Cuda, model: (family: Llama, layers: 4, hidden: 64, heads: 4, seq_len: 16, vocab: 5000),
                data: (train: "unused"), train: (steps: 6), precision: Fp16)"#;
            let sets = ["offload.update=Speculative", share, more].map(str::to_owned);
            let loaded = load_str(ron, "test.ron", std::path::Path::new("."), &sets);
            choice(&loaded.unwrap_or_else(|e| panic!("{e}")).config, &LocalMachine::default())
                .map_err(|e| e.to_string())
        };
        // The output projection is the last segment, 0.6 of all parameters after the embedding.
        let small = "offload.speculated_fraction=0.3";
        let refused = choice_of(small, "train.seed=1").expect_err("nothing is updated ahead");
        let expected = "a share of 0.3 takes no whole segment, so `Speculative` would update nothing ahead: set it to 0.";
        assert!(refused.contains(expected), "{refused}");
        let (_, least) = refused.split_once("set it to ").unwrap_or_else(|| panic!("{refused}"));
        let (least, _) = least.split_once(" or more").unwrap_or_else(|| panic!("{least}"));
        let enough = format!("offload.speculated_fraction={least}");
        assert_eq!(choice_of(&enough, "train.seed=1"), Ok(None));
        for idle in ["offload.optimizer=Device", "offload.optimizer=Split(device_fraction: 1)"] {
            assert_eq!(choice_of(small, idle), Ok(None), "{idle}");
        }
    }

    #[test]
    fn gpus_that_nobody_has_described_update_ahead_what_fits_and_the_reason_says_so() {
        let auto = "offload.update=Auto";
        let (update, share, why) = on_gpus(64, &[auto]);
        assert_eq!((update, share), (UpdateMode::Speculative, SpeculatedFraction::Share(0.5)));
        assert!(why.contains("no described box says what it gains"), "{why}");
        let named = on_gpus(64, &[auto, "offload.speculated_fraction=0.3"]);
        assert_eq!(named.1, SpeculatedFraction::Share(0.3));
        // No machine has enough memory for this model.
        let (update, _, why) = on_gpus(256_000, &[auto]);
        assert_eq!(update, UpdateMode::Overlapped);
        assert!(why.contains("the run does not fit without it"), "{why}");
        // If the config names `Speculative`, it is not replaced: the plan refuses it.
        let named = on_gpus(256_000, &["offload.update=Speculative"]);
        assert_eq!((named.0, named.1), (UpdateMode::Speculative, SpeculatedFraction::Share(0.5)));
    }

    #[test]
    fn what_cannot_gain_is_not_looked_into() {
        for (set, words) in [
            ("offload.optimizer=Device", "the optimizer is on the GPUs"),
            ("batch.global=76", "at most 1.0 % of a step of 76 micro-batches"),
        ] {
            let (update, _, why) = on_gpus(64, &["offload.update=Auto", set]);
            assert!(update == UpdateMode::Overlapped && why.contains(words), "{why}");
        }
        assert_eq!(
            on_gpus(64, &["offload.update=Auto", "batch.global=74"]).0,
            UpdateMode::Speculative
        );
    }
}
