//! Configuration of a run. Every [`Config`] that is loaded here is checked and valid.
//!
//! [`load()`] reads RON, applies `--set` overrides, and reports all errors together, each with its
//! place. `schema` defines what each key may be, and `checks` which values exclude each other.
//! `reading` knows no key: it keeps the place of every value, and prints the errors there.

// Only the crate `files` opens, creates, reads and renames files.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod activation_rules;
mod activations;
mod adapter;
mod adapter_rules;
mod attention;
mod box_rules;
mod box_schema;
mod box_sources;
pub mod bundled;
mod checks;
mod columns;
mod data;
mod data_rules;
mod declare;
mod delta_net;
mod delta_rules;
mod device;
mod era;
mod expert_rules;
mod experts;
mod few_steps;
mod file;
mod find_box;
mod fine_tune;
mod keys;
pub mod layer_pattern;
mod limits;
mod load;
mod load_box;
mod machine;
mod model;
mod model_folder;
mod model_schema;
mod not_built;
mod offload;
mod optimizer;
mod parallel;
mod parse;
mod parts;
mod peft;
mod precision;
mod reading;
mod resume_effect;
mod rope;
mod schema;
mod sources;
mod states;
mod streaming;
pub mod tokenizers;
mod train;
pub mod transformers;
mod unusual_rate;
mod write;

#[cfg(test)]
mod tests;

pub use self::device::{DeviceConfig, LoadDistribution};
pub use activations::{Activations, KeptBlocks};
pub use adapter::{Adapter, AdapterTargets, EXPERT_MATRICES};
pub use box_schema::{
    BoxConfig, GpuConfig, HostConfig, MEASURED_OPS, MeasuredConfig, ResidualConfig,
};
pub use box_sources::{box_keys, meaning_and_source, missing_rates, new_box};
pub use checks::MachineRules;
pub use columns::ChatColumns;
pub use data::{ChatTargets, ControlTokens, DataConfig, DataFormat, DataOrder, Packing};
pub use delta_net::DeltaNetConfig;
pub use era::Fact;
pub use experts::{Balance, ExpertsConfig, ScoreRule};
pub use find_box::find_box;
pub use keys::keys;
pub use load::{
    Further, Trouble, ValidKeys, load, load_and_look, load_of_run, load_stored, load_str,
    load_str_and_look,
};
pub use load_box::load_box;
pub use model::{Family, Gate, ModelConfig, NormPlace, Weights};
pub use offload::{ALL_TOGETHER, BUCKET_ELEMENTS, TILE_ELEMENTS};
pub use offload::{Accumulate, Master, Moments, OffloadConfig, ParameterPlace, Placement};
pub use offload::{SpeculatedFraction, Transfer, UpdateMode};
pub use optimizer::{
    LossScaleConfig, OptimizerConfig, OptimizerKind, ScheduleConfig, ScheduleKind,
};
pub use parallel::{BatchConfig, ParallelConfig};
pub use reading::{BOX, ConfigError, Key, Problem, Violation, format_bytes, parse_bytes};
pub use resume_effect::ResumeEffect;
pub use rope::{RopeConfig, RopeScaling, decimal};
pub use schema::{Attention, Config, Matmuls, Precision, Recompute};
pub use sources::{Source, Sources};
pub use topology::Sockets;
pub use train::{CheckpointWriter, SampleConfig, TrainConfig, WeightsPolicy};
pub use write::in_line;

/// Largest number of steps of a key: 10^12.
const STEPS: u64 = 1_000_000_000_000;

/// A checked config, and the origin of each value.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// Checked config.
    pub config: Config,
    /// Every dotted key with its value in RON and its origin, in the order of the sections of
    /// [`Config::to_ron`].
    pub origins: Vec<(String, String, Origin)>,
    /// Text of the file, without a byte order mark.
    pub source: String,
    /// Dotted keys of a stored config that this version does not know. In any other config an
    /// unknown key is an error.
    pub ignored: Vec<String>,
    /// Warnings about what the config names.
    pub warnings: Vec<String>,
    /// Sentence about the choice for `Auto` of `offload.update`, and its reason. `None` before
    /// `predict::choose` decides.
    pub chosen: Option<String>,
}

/// Origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The key is left out.
    Default,
    /// The value is in the config file.
    File {
        /// Line number, from 1.
        line: usize,
    },
    /// The value is in a `--set` argument.
    Set,
    /// The key is left out, and its value computed from other values. The text says how, such as
    /// "micro x data".
    Derived(String),
}
