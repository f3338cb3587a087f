//! Runs steps of two small models on this machine and compares them with a simulation on its measured box.

use super::steps;
use config::{BOX, Config, ResidualConfig, load_str};
use data::{Corpus, Dataset};
use layout::LocalMachine;
use layout::build::lay_out;
use predict::simulate::simulate;
use std::path::Path;
use std::sync::Arc;

/// Number of measured steps of each model; their median counts.
const STEPS: usize = 7;

/// Sizes of the small models, and the device on which they run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SmallModels {
    /// The device in RON.
    device: &'static str,
    precision: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    seq_len: usize,
    micro: usize,
}

impl SmallModels {
    /// Models for one GPU: steps of tenths of a second.
    pub(crate) const fn of_gpu(sm: u32) -> Self {
        let precision = if sm >= 80 { "Bf16" } else { "Fp16" };
        let (layers, hidden, heads) = (8, 2048, 16);
        Self { device: "Cuda", precision, layers, hidden, heads, seq_len: 1024, micro: 8 }
    }

    /// Models for virtual GPUs on the cores: steps of hundredths of a second.
    pub(crate) const OF_CORES: Self = Self {
        device: "Cpu(count: 1, memory: \"4GiB\")",
        precision: "Bf16",
        layers: 2,
        hidden: 128,
        heads: 4,
        seq_len: 64,
        micro: 4,
    };

    /// Config of one of the models; `more` has the keys of its family.
    fn config(self, more: &str, sets: &[String]) -> Result<Config, String> {
        let Self { device, precision, layers, hidden, heads, seq_len, micro } = self;
        let ron = format!(
            "(device: {device}, model: (layers: {layers}, hidden: {hidden}, heads: {heads}, seq_len: {seq_len}{more}), \
             precision: {precision}, recompute: Block, offload: (update: Overlapped), \
             batch: (micro: {micro}, global: {}), data: (train: \"unused\"), train: (steps: {}))",
            4 * micro,
            STEPS + 4,
        );
        let loaded = load_str(&ron, "a small model", Path::new(""), sets);
        loaded.map(|loaded| loaded.config).map_err(|e| e.to_string())
    }

    /// Measured over simulated speed of one of the models on the box in the file `path`.
    fn residual(self, more: &str, path: &str, machine: &LocalMachine) -> Result<f32, String> {
        let simulated = self.config(more, &[format!("{BOX}{path}")])?;
        let simulated = simulate(&simulated, &lay_out(&simulated, machine));
        let simulated = simulated.map_err(|e| e.to_string())?.step_seconds();
        let config = self.config(more, &[])?;
        let built = lay_out(&config, machine);
        let data = Arc::new(Dataset::from(Corpus::noise(config.model.seq_len)));
        let measured = steps(&config, &built, &data, STEPS, 0.0, 0.0, None);
        let measured = measured.map_err(|e| e.to_string())?.seconds;
        Ok((simulated / measured) as f32)
    }
}

/// Measured over simulated speed of both small models on the box in the file `path`. `tell` gets the name of
/// each model.
///
/// # Errors
/// A model does not run here, or cannot be simulated on the box; the text says why.
pub(crate) fn residuals(
    models: SmallModels,
    path: &Path,
    machine: &LocalMachine,
    tell: &mut dyn FnMut(&str),
) -> Result<ResidualConfig, String> {
    let path = path.to_str().ok_or("a config cannot hold a path that is not UTF-8")?;
    tell("steps of a small GPT-2, to compare them with a simulation on this box");
    let gpt2 = models.residual("", path, machine)?;
    tell("steps of a small Llama");
    let llama = models.residual(", family: Llama", path, machine)?;
    Ok(ResidualConfig { gpt2, llama })
}

/// The text of a box with the key `residual`.
pub(crate) fn with_residual(ron: &str, residual: ResidualConfig) -> String {
    let open = ron.trim_end().strip_suffix(')');
    let open = open.unwrap_or_else(|| unreachable!("a box ends with a bracket: {ron}"));
    let ResidualConfig { gpt2, llama } = residual;
    format!(
        "{open}    // Measured: the speed of steps of two small models over their speed in a simulation on this box.\n    \
         residual: (gpt2: {gpt2:.4}, llama: {llama:.4}),\n)\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_box;

    #[test]
    fn a_box_gets_its_residual() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("box.ron");
        let text = "// A box.\n(\n    gpus: 1,\n    gpu_memory: \"8GiB\",\n    node_memory: \"8GiB\",\n)\n";
        let residual = ResidualConfig { gpt2: 0.9375, llama: 1.25 };
        std::fs::write(&path, with_residual(text, residual)).unwrap();
        assert_eq!(load_box(&path).unwrap().residual, residual);
    }
}
