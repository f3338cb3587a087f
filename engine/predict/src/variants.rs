//! The forms of states with which the layouts of a model are tried, those with the same results first.

use super::changes::is_given;
use config::{Config, LoadedConfig, Master, Moments, Precision};
use serde::Serialize;

/// How states are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum States {
    /// As the config says.
    Given,
    /// fp32 parameters in two halves: the same results in 2 bytes less for each parameter.
    SplitMaster,
    /// With bf16 Adam moments: other results.
    Bf16Moments,
}

/// The config with each form of states: as it is, then what needs fewer bytes on the host and is not given another
/// value by the config.
pub(super) fn variants(loaded: &LoadedConfig) -> Vec<(States, Config)> {
    let given = |key: &str| is_given(loaded, &format!("offload.{key}"));
    forms(&loaded.config, given("master"), given("moments"))
}

/// The same, whatever the config gives.
pub(super) fn all_variants(config: &Config) -> Vec<(States, Config)> {
    forms(config, false, false)
}

fn forms(config: &Config, has_master: bool, has_moments: bool) -> Vec<(States, Config)> {
    let mut all = vec![(States::Given, config.clone())];
    let mut smaller = config.clone();
    // Only a bf16 parameter is a half of its fp32 one.
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
