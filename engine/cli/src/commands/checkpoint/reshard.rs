//! `onebox checkpoint reshard`: writes a checkpoint for another layout.

use super::super::{CommandError, Failable, code, data, say};
use super::{NewRun, open, run_of};
use ::data::model_files::ModelFiles;
use checkpoint::rewrite::reshard;
use config::{Config, DeviceConfig, LoadedConfig, load_stored};
use files::path_text::ShownPath;
use layout::LocalMachine;
use layout::build::lay_out;
use std::path::PathBuf;

/// Write a checkpoint as the ranks of another layout would write it.
#[derive(Debug, clap::Args)]
pub(in crate::commands) struct ReshardArgs {
    /// Checkpoint, or run directory for its newest checkpoint
    path: PathBuf,
    /// New run directory for the rewritten checkpoint
    out: PathBuf,
    /// Tensor-parallel ranks
    #[arg(long, value_name = "N")]
    tp: usize,
    /// Data-parallel ranks
    #[arg(long, value_name = "N")]
    dp: usize,
    /// Change another layout key of the checkpoint's config, such as batch.micro=1
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

pub(super) fn run(args: &ReshardArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let from = open(&args.path)?;
    let stored = from.summary().config()?;
    let now = moved(&stored.config, &from.manifest().config, args)?;
    super::diff::only_layout(&stored, &now)?;
    let built = lay_out(&now.config, machine);
    let tokenizer = data::tokenizer_of(run_of(&from), &now.config)?;
    let beside = ModelFiles::of_run(run_of(&from))?;
    let new = NewRun::create(&args.out, &now.config, tokenizer.as_ref(), beside)?;
    let sealed = reshard(&from, &now.config, &built, new.folder())?;
    let written = new.finish(sealed)?;
    say(&format!(
        "{}: TP {} x DP {}, every tensor bit-equal to {}\n\
         training needs no such thing: any layout goes on from any checkpoint; here each rank finds its part in one file",
        written.shown(),
        args.tp,
        args.dp,
        from.path().shown()
    ));
    Ok(())
}

/// Loads the stored config with the layout of `args`.
fn moved(stored: &Config, ron: &str, args: &ReshardArgs) -> Result<LoadedConfig, CommandError> {
    let mut sets =
        vec![format!("parallel.tensor={}", args.tp), format!("parallel.data={}", args.dp)];
    if matches!(stored.device, DeviceConfig::Cpu { .. }) {
        sets.push(format!("device.count={}", args.tp.saturating_mul(args.dp)));
    }
    sets.extend(args.sets.iter().cloned());
    load_stored(ron, &sets).fail_with(code::CONFIG)
}
