//! `onebox checkpoint reshard`: writes a checkpoint for another layout.

use super::super::{CommandError, Failable, code, data, say};
use super::{NewRun, is_checkpoint, open, run_of};
use crate::report::stage::Stage;
use ::data::model_files::ModelFiles;
use checkpoint::Checkpoint;
use checkpoint::rewrite::reshard;
use config::{Config, DeviceConfig, LoadedConfig, load_stored};
use files::names::checkpoint_name;
use files::path_text::ShownPath;
use layout::LocalMachine;
use layout::build::lay_out;
use std::path::{Path, PathBuf};

/// Write a checkpoint as the ranks of another layout would write it.
#[derive(Debug, clap::Args)]
pub(in crate::commands) struct ReshardArgs {
    /// Checkpoint, or run directory for its newest and its best checkpoint
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
    let best = other_best(&args.path, &from)?;
    let stored = from.summary().config()?;
    let now = moved(&stored.config, &from.manifest().config, args)?;
    super::diff::only_layout(&stored, &now)?;
    let built = lay_out(&now.config, machine);
    let tokenizer = data::tokenizer_of(run_of(&from), &now.config)?;
    let model_files = ModelFiles::of_run(run_of(&from))?;
    // The best checkpoint is the older one, and gets its name first.
    let all: Vec<&Checkpoint> = best.iter().chain([&from]).collect();
    let new = NewRun::create(&args.out, &now.config, tokenizer.as_ref(), model_files, all.len())?;
    let stage = Stage::begin("writing the checkpoint", 0);
    let sealed = reshard(&all, &now.config, &built, new.folder())?;
    drop(stage);
    let written = new.finish(sealed)?;
    say(&format!(
        "{}: TP {} x DP {}, every tensor bit-equal to {}\n\
         training needs no such thing: any layout goes on from any checkpoint; here each rank finds its part in one file",
        written.shown(),
        args.tp,
        args.dp,
        from.path().shown()
    ));
    if let Some(best) = &best {
        say(&format!("so is the best checkpoint of the run, of step {}", best.step()));
    }
    Ok(())
}

/// The best checkpoint of the run in `path`, if it is another one than its newest, `newest`.
fn other_best(path: &Path, newest: &Checkpoint) -> Result<Option<Checkpoint>, CommandError> {
    let best = newest.summary().best().filter(|best| best.step != newest.step());
    let Some(best) = best else { return Ok(None) };
    if is_checkpoint(path) {
        say(&format!(
            "the best checkpoint of that run, of step {}, is another one, and is not rewritten: name the run to rewrite both",
            best.step
        ));
        return Ok(None);
    }
    let folder = newest.path().parent().unwrap_or(path);
    let opened = Checkpoint::open(&folder.join(checkpoint_name(best.step)), best.step);
    Ok(Some(opened.map_err(|error| {
        CommandError::from(error)
            .and("it is the best checkpoint of the run: name the newest checkpoint to leave it out")
    })?))
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
