//! Finds what a valid config names and `train` cannot do on this machine.

use super::reading::{ConfigError, Problem, Spot};
use super::{Config, DeviceConfig, Origin};

impl Config {
    /// Error about everything in this config that `train` cannot do; `None` if `train` can run it.
    ///
    /// `plan` and `config check` accept such a config. `train` refuses it, because `train` only
    /// does what the config says. `origins` are those of [`LoadedConfig`](super::LoadedConfig).
    /// `missing` returns why this machine has no usable GPUs; it is called only for `device: Cuda`.
    pub fn not_built(
        &self,
        origins: &[(String, String, Origin)],
        missing: impl FnOnce() -> Option<String>,
    ) -> Option<ConfigError> {
        let (message, help) = match self.device {
            DeviceConfig::Cpu { .. } => return None,
            DeviceConfig::Cuda => (
                format!("`Cuda` cannot be used here: {}", missing()?),
                "see `onebox doctor`, or use `Cpu(count: N)`: virtual GPUs on this machine run the same step",
            ),
            DeviceConfig::Sim { .. } => (
                "`Sim` cannot train".into(),
                "a described box holds no data: see what it needs with `onebox plan`, or train on \
                 virtual GPUs with `--set 'device=Cpu(count: N)'`",
            ),
        };
        // The place of the value in the user's input.
        let origin = origins.iter().find(|(name, ..)| name == "device").map(|(.., origin)| origin);
        let spots = match origin {
            Some(Origin::File { line }) => {
                vec![Spot::Note(format!("`device` stands in line {line} of the config"))]
            }
            Some(Origin::Set) => vec![Spot::Note("`device` was given by `--set`".into())],
            _ => Vec::new(),
        };
        let problem = Problem { key: "device".into(), message, help: help.into(), spots };
        let name = format!("run `{}`", self.name);
        Some(ConfigError { name, sources: Vec::new(), problems: vec![problem] })
    }
}
