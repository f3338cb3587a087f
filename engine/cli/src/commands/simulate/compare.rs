//! `onebox simulate --compare`: compares the measured steps of a run with the simulation, in one line that
//! people can send.

use super::super::check::count;
use super::super::exit::{CommandError, code};
use super::seconds;
use config::{Config, DeviceConfig, Placement, in_line};
use engine::metrics::{LONGEST_METRICS, config_of, median, step_seconds};
use files::foreign_text::foreign;
use files::input;
use files::names::METRICS;
use files::path_text::ShownPath;
use layout::build::shape;
use predict::simulate::SimulationReport;
use serde_json::Value;
use std::path::Path;
use topology::counted;

/// Keys of a config that the simulated step shares with the run, if both are comparable.
const COMPARED: [&str; 10] = [
    "model.family",
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.seq_len",
    "batch.micro",
    "batch.global",
    "parallel.tensor",
    "parallel.data",
    "precision",
];

/// Measured steps of a run.
pub(super) struct MeasuredRun {
    /// Seconds of each step after the second.
    steps: Vec<f64>,
    /// Median of `steps`.
    pub(super) median: f64,
    /// The run's config.
    config: Option<Value>,
}

impl MeasuredRun {
    /// Reads the metrics in the directory of a run.
    pub(super) fn read(run: &Path) -> Result<Self, CommandError> {
        let path = run.join(METRICS);
        let failed =
            |why: String| CommandError::new(code::DATA, format!("{}: {why}", path.shown()));
        let bytes = input::own_bytes(&path, LONGEST_METRICS);
        let text = bytes.and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other));
        let text = text.map_err(|e| failed(e.to_string()))?;
        let steps = step_seconds(&text);
        let median = median(steps.iter().copied());
        let median = median.ok_or_else(|| failed("no step after the second is in it".into()))?;
        Ok(Self { steps, median, config: config_of(&text) })
    }

    /// Keys whose values in the run differ from those in the simulated config, with both values.
    pub(super) fn differences(&self, simulated: &Config) -> Vec<String> {
        let Some(run) = &self.config else { return Vec::new() };
        let simulated = serde_json::to_value(simulated);
        let simulated = simulated.unwrap_or_else(|e| unreachable!("a config that is no JSON: {e}"));
        let value = |of: &Value, key: &str| {
            let pointer = format!("/{}", key.replace('.', "/"));
            of.pointer(&pointer).map(Value::to_string)
        };
        let differs = |key: &&str| {
            let (ran, is) = (value(run, key)?, value(&simulated, key)?);
            (ran != is).then(|| format!("{key} is {} in the run, and {is} here", foreign(ran)))
        };
        COMPARED.iter().filter_map(differs).collect()
    }

    /// The line: program, box, model, layout, measured and simulated step.
    pub(super) fn line(&self, config: &Config, report: &SimulationReport) -> String {
        let Self { steps, median, .. } = self;
        let [least, most] = [
            steps.iter().copied().fold(f64::INFINITY, f64::min),
            steps.iter().copied().fold(0.0, f64::max),
        ];
        let (model, offload) = (&config.model, &config.offload);
        let rates = match &config.device {
            DeviceConfig::Sim { box_, .. } => match &box_.measured {
                Some(measured) => counted(measured.cores, "core"),
                None => format!("gemm_tflops {}, sm {}", box_.gpu.gemm_tflops, box_.gpu.sm),
            },
            DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => {
                unreachable!("a step is simulated on a described box")
            }
        };
        let optimizer = match offload.optimizer {
            Placement::Host => "host".to_owned(),
            Placement::Device => "GPU".to_owned(),
            Placement::Split { device_fraction } => format!("{device_fraction} on GPU"),
        };
        format!(
            "compared: onebox {}; box {} ({rates}); {:?}, {} parameters, {} layers, hidden {}, {} tokens a sample; TP {} x DP {}, \
             micro {}, global {}; {:?}, recompute {:?}, optimizer {optimizer}, {}, attention {:?}; measured {} per step (median); \
             simulated {}, {:.2}x as long; {} of {} to {}",
            files::VERSION,
            foreign(&report.box_name),
            model.family,
            count(shape(config).parameters() as f64),
            model.layers,
            model.hidden,
            model.seq_len,
            config.parallel.tensor,
            config.parallel.data,
            config.batch.micro,
            config.batch.global,
            config.precision,
            config.recompute,
            in_line(&offload.update),
            config.attention,
            seconds(*median),
            seconds(report.step_seconds),
            report.step_seconds / median,
            counted(steps.len(), "step"),
            seconds(least),
            seconds(most),
        )
    }
}
