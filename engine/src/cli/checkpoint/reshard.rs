//! `onebox checkpoint reshard`.

use super::super::exit::{Failed, code};
use super::super::{data, say, train};
use super::{failed, open, rewrite_failed, run_of};
use crate::build::build;
use crate::checkpoint::inspect::Summary;
use crate::checkpoint::rewrite::reshard;
use crate::config::{Config, DeviceConfig, Loaded, load_stored};
use crate::run_dir::{CONFIG, RunDir, RunMode, TOKENIZER};
use std::path::PathBuf;

/// Write a checkpoint as ranks of another layout would have.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct ReshardArgs {
    /// Checkpoint, or run directory (its newest)
    path: PathBuf,
    /// New run directory for it
    out: PathBuf,
    /// Tensor-parallel ranks
    #[arg(long, value_name = "N")]
    tp: usize,
    /// Data-parallel ranks
    #[arg(long, value_name = "N")]
    dp: usize,
    /// Change another key of its config that says how it is laid out, such as batch.micro=1
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

pub(super) fn run(args: &ReshardArgs) -> Result<(), Failed> {
    let from = open(&args.path)?;
    let stored = Summary::read(from.path()).and_then(|s| s.config()).map_err(failed)?;
    let now = moved(&stored.config, from.config(), args)?;
    super::diff::only_layout(&stored, &now)?;
    let built = build(&now.config);
    let dir = RunDir::create(Some(&args.out), &now.config.name, RunMode::Fresh);
    let dir = dir.map_err(train::refused)?;
    let written = reshard(&from, (&now.config, &built), dir.path()).map_err(rewrite_failed)?;
    let file = |e| Failed::new(code::IO, e);
    dir.write_atomically(CONFIG, now.config.to_ron().as_bytes()).map_err(file)?;
    if let Some(tokenizer) = data::tokenizer_of(run_of(&from), &now.config)? {
        dir.write_atomically(TOKENIZER, tokenizer.bytes()).map_err(file)?;
    }
    say(&format!(
        "{}: TP {} x DP {}, every tensor bit-equal to {}\n\
         training needs no such thing: any layout goes on from any checkpoint; here each rank finds its part in one file",
        written.display(),
        args.tp,
        args.dp,
        from.path().display()
    ));
    Ok(())
}

/// The stored config with another layout.
fn moved(stored: &Config, ron: &str, args: &ReshardArgs) -> Result<Loaded, Failed> {
    let mut sets =
        vec![format!("parallel.tensor={}", args.tp), format!("parallel.data={}", args.dp)];
    if matches!(stored.device, DeviceConfig::Cpu { .. }) {
        sets.push(format!("device.count={}", args.tp.saturating_mul(args.dp)));
    }
    sets.extend(args.sets.iter().cloned());
    load_stored(ron, &sets).map_err(|e| Failed::new(code::CONFIG, e))
}
