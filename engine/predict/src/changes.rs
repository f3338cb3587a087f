//! Changes of a config that keep its model and batch, and the `--set` arguments for these changes.

use config::{ALL_TOGETHER, Accumulate, Activations, Config, DeviceConfig, LoadedConfig, Origin};
use config::{ParameterPlace, Placement, Recompute, format_bytes, in_line};
use device::Arena;
use files::shell::quoted;
use layout::LocalMachine;
use layout::build::{RankLayout, lay_out};
use std::collections::BTreeSet;

/// Key of a setting that a search may change, and a function that prints its value in RON.
type Setting = (&'static str, fn(&Config) -> String);

/// All settings that a search may change.
const SETTINGS: [Setting; 20] = [
    ("parallel.tensor", |c| in_line(&c.parallel.tensor)),
    ("parallel.data", |c| in_line(&c.parallel.data)),
    ("batch.micro", |c| in_line(&c.batch.micro)),
    ("recompute", |c| in_line(&c.recompute)),
    ("activations", |c| in_line(&c.activations)),
    ("partition_checkpoints", |c| in_line(&c.partition_checkpoints)),
    ("host_checkpoints", |c| in_line(&c.host_checkpoints)),
    ("parallel.sequence", |c| in_line(&c.parallel.sequence)),
    ("offload.optimizer", |c| in_line(&c.offload.optimizer)),
    ("offload.parameters", |c| in_line(&c.offload.parameters)),
    ("offload.ring", |c| in_line(&c.offload.ring)),
    ("offload.resident_blocks", |c| in_line(&c.offload.resident_blocks)),
    ("offload.accumulate", |c| in_line(&c.offload.accumulate)),
    ("offload.update", |c| in_line(&c.offload.update)),
    ("offload.speculated_fraction", |c| in_line(&c.offload.speculated_fraction)),
    ("offload.first_forward", |c| in_line(&c.offload.first_forward)),
    ("offload.master", |c| in_line(&c.offload.master)),
    ("offload.moments", |c| in_line(&c.offload.moments)),
    ("model.layers", |c| in_line(&c.model.layers)),
    ("device.memory", |c| match c.device {
        DeviceConfig::Cpu { memory, .. } => format_bytes(memory),
        DeviceConfig::Cuda | DeviceConfig::Sim { .. } => String::new(),
    }),
];

/// Keys and new values of the settings that differ.
fn changed_settings(given: &Config, changed: &Config) -> Vec<(&'static str, String)> {
    let differ = |(key, value): &Setting| {
        let (was, is) = (value(given), value(changed));
        (was != is).then_some((*key, is))
    };
    SETTINGS.iter().filter_map(differ).collect()
}

/// The `key=value` settings that turn `loaded` into `changed`. A derived value that would change
/// too, such as the global batch, is set to its value in `changed`.
pub fn sets(loaded: &LoadedConfig, changed: &Config) -> Vec<String> {
    let given = &loaded.config;
    let streams = |c: &Config| c.offload.parameters == ParameterPlace::Host;
    let differ = changed_settings(given, changed).into_iter();
    let mut sets: Vec<String> = differ.map(|(key, is)| format!("{key}={is}")).collect();
    // If the config does not set this key, its default depends on the place of the parameters.
    if streams(given) != streams(changed) && !is_given(loaded, "offload.first_forward") {
        let together = changed.offload.first_forward;
        sets.retain(|set| !set.starts_with("offload.first_forward="));
        if together != if streams(changed) { ALL_TOGETHER } else { 1 } {
            sets.push(format!("offload.first_forward={together}"));
        }
    }
    let pass = |c: &Config| c.batch.micro * c.parallel.data;
    if is_derived(loaded, "batch.global") && pass(given) != pass(changed) {
        sets.push(format!("batch.global={}", changed.batch.global));
    }
    if let DeviceConfig::Cpu { count, .. } = changed.device
        && !is_derived(loaded, "device.count")
        && given.world_size() != changed.world_size()
    {
        sets.push(format!("device.count={count}"));
    }
    sets
}

fn is_derived(loaded: &LoadedConfig, key: &str) -> bool {
    matches!(origin(loaded, key), Some(Origin::Derived(_)))
}

pub(super) fn is_given(loaded: &LoadedConfig, key: &str) -> bool {
    matches!(origin(loaded, key), Some(Origin::File { .. } | Origin::Set))
}

fn origin<'a>(loaded: &'a LoadedConfig, key: &str) -> Option<&'a Origin> {
    loaded.origins.iter().find(|(name, ..)| name == key).map(|(.., origin)| origin)
}

/// Sets the recomputation of `config`, and the split of the kept inputs. Without recomputed blocks
/// no block is an exception.
pub const fn set_recompute(config: &mut Config, recompute: Recompute, shares: bool) {
    (config.recompute, config.partition_checkpoints) = (recompute, shares);
    if !matches!(recompute, Recompute::Block) {
        config.activations = Activations::Uniform;
    }
}

/// Puts the parameters on the host, with the other settings that suit this.
pub fn stream_parameters(config: &mut Config) {
    let offload = &mut config.offload;
    (offload.parameters, offload.optimizer) = (ParameterPlace::Host, Placement::Host);
    (offload.first_forward, offload.accumulate) = (ALL_TOGETHER, Accumulate::Auto);
    (config.recompute, config.host_checkpoints) = (Recompute::Block, true);
}

/// Builds the layout of `config` and raises the memory of virtual GPUs to its need, in whole MiB.
pub(super) fn widen(config: &mut Config, machine: &LocalMachine) -> RankLayout {
    const MIB: u64 = 1 << 20;
    let built = lay_out(config, machine);
    let needed = built.plan.bytes(Arena::Device).next_multiple_of(MIB);
    if let DeviceConfig::Cpu { memory, .. } = &mut config.device {
        *memory = (*memory).max(needed);
    }
    built
}

/// Keeps all parameters on the GPUs.
pub const fn keep_parameters(config: &mut Config) {
    config.offload.parameters = ParameterPlace::Device;
    (config.offload.ring, config.offload.resident_blocks) = (None, None);
}

/// Shell arguments such as `--set a=1 --set 'b=C(d: 2)'`.
pub fn arguments(sets: &[String]) -> String {
    let all: Vec<String> = sets.iter().map(|set| format!("--set {}", quoted(set))).collect();
    all.join(" ")
}

/// Number of settings that differ. The TP x DP grid counts as one setting.
pub fn count(given: &Config, changed: &Config) -> usize {
    let keys = changed_settings(given, changed).into_iter().map(|(key, _)| match key {
        "parallel.data" => "parallel.tensor",
        key => key,
    });
    keys.collect::<BTreeSet<_>>().len()
}

/// Number of GPUs of a described box; otherwise the number that the config uses.
pub(super) fn all_gpus(config: &Config) -> usize {
    match &config.device {
        DeviceConfig::Sim { box_, .. } => box_.gpus,
        DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => config.world_size(),
    }
}

/// All TP x DP grids of `world` ranks.
pub fn grids(world: usize) -> Vec<(usize, usize)> {
    divisors(world).into_iter().map(|tensor| (tensor, world / tensor)).collect()
}

/// Divisors in ascending order. 0 has none.
pub fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<usize> =
        (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let large = small.iter().rev().filter(|d| *d * *d != n).map(|d| n / d);
    small.iter().copied().chain(large).collect()
}

/// Choices of activation checkpoints: (recompute, partition_checkpoints).
pub const CHECKPOINTS: [(Recompute, bool); 4] = [
    (Recompute::None, false),
    (Recompute::Selective, false),
    (Recompute::Block, false),
    (Recompute::Block, true),
];

/// Choices of the places of the optimizer and of gradient accumulation.
pub const PLACES: [(Placement, Accumulate); 3] = [
    (Placement::Host, Accumulate::Device),
    (Placement::Host, Accumulate::Host),
    (Placement::Device, Accumulate::Device),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_words_of_a_shell() {
        let sets = ["a=1", "b=Some(2)", "c=\"it's\""].map(str::to_owned);
        assert_eq!(arguments(&sets), r#"--set a=1 --set 'b=Some(2)' --set 'c="it'\''s"'"#);
    }

    #[test]
    fn divisors_are_all_there_in_order() {
        for n in 0..200 {
            let all: Vec<usize> = (1..=n).filter(|d| n % d == 0).collect();
            assert_eq!(divisors(n), all, "{n}");
        }
        assert_eq!(grids(6), [(1, 6), (2, 3), (3, 2), (6, 1)]);
    }
}
