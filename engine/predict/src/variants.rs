//! Forms of optimizer states for which layouts are tried. Forms with unchanged results come first.

use super::changes::is_given;
use config::{Config, LoadedConfig, Master, Moments, Precision};
use serde::Serialize;

/// Form of the optimizer states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum States {
    /// The form in the config.
    Given,
    /// fp32 parameters in two halves, which saves 2 bytes per parameter and keeps the results.
    SplitMaster,
    /// bf16 Adam moments, which change the results.
    Bf16Moments,
}

/// The config with each form of states. The config itself is first. Smaller forms follow, unless
/// the config sets their key.
pub(super) fn variants(loaded: &LoadedConfig) -> Vec<(States, Config)> {
    let given = |key: &str| is_given(loaded, &format!("offload.{key}"));
    forms(&loaded.config, given("master"), given("moments"))
}

/// All forms of states, even if the config sets their keys.
pub(super) fn all_variants(config: &Config) -> Vec<(States, Config)> {
    forms(config, false, false)
}

fn forms(config: &Config, has_master: bool, has_moments: bool) -> Vec<(States, Config)> {
    let mut all = vec![(States::Given, config.clone())];
    let mut smaller = config.clone();
    // Only a bf16 parameter is half of its fp32 parameter.
    let splits = matches!(config.precision, Precision::Bf16 | Precision::Fp8);
    if splits && !has_master && config.offload.master == Master::Fp32 {
        smaller.offload.master = Master::Split;
        all.push((States::SplitMaster, smaller.clone()));
    }
    if !has_moments && config.offload.moments == Moments::Fp32 {
        smaller.offload.moments = Moments::Bf16;
        all.push((States::Bf16Moments, smaller));
    }
    all
}
