//! Runs with `train.epochs`.

use super::super::data::{self, ReadOptions};
use super::super::exit::CommandError;
use super::TrainArgs;
use ::data::Dataset;
use config::{Config, DataOrder, LoadedConfig};
use std::sync::Arc;
use topology::counted;

/// Replaces epochs by steps in the config. Their number depends on the data, which is read here.
pub(super) fn as_steps(
    args: &TrainArgs,
    loaded: LoadedConfig,
) -> Result<(LoadedConfig, Option<Arc<Dataset>>), CommandError> {
    let config = &loaded.config;
    let Some(epochs) = config.train.epochs else { return Ok((loaded, None)) };
    let options = ReadOptions { dry: args.dry_run, quiet: args.quiet, ..ReadOptions::default() };
    let (_, data) = data::read_whole(config, options)?;
    let steps = config.steps_of(epochs, data.num_train_samples());
    Ok((args.config.load_with_steps(&loaded, steps)?, Some(data)))
}

/// Epochs of one step; `None` if samples are drawn at random.
pub(super) fn per_step(config: &Config, data: &Dataset) -> Option<f64> {
    let samples = data.num_train_samples();
    let known = config.data.order != DataOrder::Random && samples > 0;
    known.then(|| config.batch.global as f64 / samples as f64)
}

/// Text about the number of epochs in the run; empty if samples are drawn at random.
pub(super) fn words(config: &Config, data: &Dataset) -> String {
    if config.data.order == DataOrder::Random {
        return String::new();
    }
    let samples = config.train.steps as f64 * config.batch.global as f64;
    let shares: Vec<_> = data.shares(samples).collect();
    let several = shares.len() > 1;
    let words = |(name, each, taken): (&str, usize, f64)| {
        let of = if several { format!(" of {name}") } else { String::new() };
        format!("{:.2} epochs of {}{of}", taken / each as f64, counted(each, "sample"))
    };
    let all: Vec<String> = shares.into_iter().map(words).collect();
    let before = if data.is_several() { "\n        " } else { "; " };
    format!("{before}{}", all.join(", "))
}
