//! What a config may name and `train` cannot do on this machine.

use super::reading::{ConfigError, Problem, Spot};
use super::{Config, DeviceConfig, Origin};

impl Config {
    /// What this config asks for and `train` cannot do, all of it, or `None`.
    ///
    /// `plan` and `config check` accept such a config; `train` refuses it, since it never does
    /// something else than it was asked for. `origins` are those of [`Loaded`](super::Loaded).
    /// `missing`: why this machine has no real GPUs that onebox can use, asked where the config wants some.
    pub fn not_built(
        &self,
        origins: &[(String, String, Origin)],
        missing: impl FnOnce() -> Option<String>,
    ) -> Option<ConfigError> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, value: String, help: &str| {
            let message = match &*value {
                "Sim" => "`Sim` cannot train".into(),
                _ => format!("`Cuda` cannot be used here: {value}"),
            };
            let spots = origin_note(key, origins);
            problems.push(Problem { key: key.into(), message, help: help.into(), spots });
        };
        match self.device {
            DeviceConfig::Cpu { .. } => {}
            DeviceConfig::Cuda => {
                if let Some(missing) = missing() {
                    let help = "see `onebox doctor`, or use `Cpu(count: N)`: virtual GPUs on this \
                                machine run the same step";
                    refuse("device", missing, help);
                }
            }
            DeviceConfig::Sim { .. } => refuse(
                "device",
                "Sim".into(),
                "a described box holds no data: see what it needs with `onebox plan`, or train on \
                 virtual GPUs with `--set 'device=Cpu(count: N)'`",
            ),
        }
        let name = format!("run `{}`", self.name);
        (!problems.is_empty()).then(|| ConfigError { name, sources: Vec::new(), problems })
    }
}

/// Where the value was written.
fn origin_note(key: &str, origins: &[(String, String, Origin)]) -> Vec<Spot> {
    let origin = origins.iter().find(|(name, ..)| name == key).map(|(.., origin)| origin);
    let note = match origin {
        Some(Origin::File { line }) => format!("`{key}` stands in line {line} of the config"),
        Some(Origin::Set) => format!("`{key}` was given by `--set`"),
        _ => return Vec::new(),
    };
    vec![Spot::Note(note)]
}
