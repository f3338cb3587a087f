//! The configuration of a run, checked: whoever holds a [`Config`] holds one that makes sense.
//!
//! [`load()`] reads RON, applies `--set` overrides, and reports every error at once with its place:
//! `schema` says what each key may be, `checks` what several may be together. `reading` knows no key: it keeps the
//! place of every value, and prints what is wrong there.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod box_schema;
pub mod bundled;
mod checks;
mod data;
mod data_rules;
mod declare;
mod device;
mod era;
mod file;
mod find_box;
mod keys;
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
mod precision;
mod reading;
mod resume_effect;
mod schema;
mod sources;
mod states;
mod streaming;
pub mod tokenizers;
mod train;
pub mod transformers;
mod write;

#[cfg(test)]
mod tests;

pub use self::device::DeviceConfig;
pub use box_schema::{BoxConfig, GpuConfig, HostConfig, MEASURED_OPS, MeasuredConfig};
pub use checks::MachineRules;
pub use data::{ControlTokens, DataConfig, DataFormat, DataOrder, Packing};
pub use era::Fact;
pub use find_box::find_box;
pub use keys::{box_keys, keys};
pub use load::{
    Further, Trouble, ValidKeys, load, load_and_look, load_of_run, load_stored, load_str,
    load_str_and_look,
};
pub use load_box::load_box;
pub use model::{Family, ModelConfig, RopeConfig, RopeScaling, Weights};
pub use offload::{ALL_TOGETHER, BUCKET_ELEMENTS, TILE_ELEMENTS};
pub use offload::{Accumulate, Master, Moments, OffloadConfig, ParameterPlace, Placement};
pub use offload::{SpeculatedFraction, Transfer, UpdateMode};
pub use optimizer::{
    LossScaleConfig, OptimizerConfig, OptimizerKind, ScheduleConfig, ScheduleKind,
};
pub use parallel::{BatchConfig, ParallelConfig};
pub use reading::{BOX, ConfigError, Key, Problem, Violation, format_bytes, parse_bytes};
pub use resume_effect::ResumeEffect;
pub use schema::{Config, Precision, Recompute};
pub use sources::{Source, Sources};
pub use topology::Sockets;
pub use train::{CheckpointWriter, SampleConfig, TrainConfig, WeightsPolicy};
pub use write::in_line;

/// Most steps of any kind: 10^12.
const STEPS: u64 = 1_000_000_000_000;

/// A checked config, and where each of its values came from.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// The config.
    pub config: Config,
    /// Every dotted key, its value in RON, and its origin, in reading order.
    pub origins: Vec<(String, String, Origin)>,
    /// The text of the file, without a byte order mark.
    pub source: String,
    /// Keys of a stored config that this version does not know, dotted. Any other config with such keys is refused.
    pub ignored: Vec<String>,
    /// What stands for `Auto` of `offload.update`, and why, once [`choose`](predict::choose) has looked: a sentence.
    pub chosen: Option<String>,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Left out.
    Default,
    /// The config file.
    File {
        /// 1-based.
        line: usize,
    },
    /// A `--set` argument.
    Set,
    /// Left out, and computed from other values; how, such as "micro x data".
    Derived(String),
}
