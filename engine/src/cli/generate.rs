//! `onebox generate`.

use super::checkpoint::{run_of, unusable};
use super::exit::{Failed, code};
use super::{data, print, say, seen};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::inspect::{Summary, open_newest};
use crate::config::{Config, Loaded, load_of_run, load_str};
use crate::data::Tokenizer;
use crate::generate::{GenerateError, Sampling, Trained, generate, next_logits};
use crate::run_dir::{CONFIG, TOKENIZER, WEIGHTS};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Draw text from a model that `train` left.
#[derive(Debug, clap::Args)]
pub(super) struct GenerateArgs {
    /// Run directory, with config.ron and weights.safetensors; a checkpoint; or a folder of transformers
    run: PathBuf,
    /// Start of the text; token numbers for a model of token files
    #[arg(long, default_value = "\n")]
    prompt: String,
    /// Tokens to draw
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// 0: always the likeliest token
    #[arg(long, default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f64,
    /// The same seed draws the same text
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Print the logits of the token after the prompt, as JSON, and draw nothing
    #[arg(long)]
    logits: bool,
}

/// For a run that has not ended: what it would go on from.
fn newest(args: &GenerateArgs, lacks: &str) -> Result<Checkpoint, Failed> {
    let found = open_newest(&args.run).map_err(|error| {
        let why = format!("{} {lacks}, and no checkpoint: {error}", args.run.display());
        Failed::new(code::DATA, why)
    })?;
    let (found, broken) = found;
    broken.iter().for_each(|why| say(&format!("warning: {why}")));
    say(&format!("{}: the parameters after step {}", found.path().display(), found.step()));
    Ok(found)
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if (0.0..=10.0).contains(&t) => Ok(t),
        _ => Err("a number from 0 to 10 is expected".into()),
    }
}

/// The config of a folder of transformers.
fn config_of(folder: &Path) -> Result<Loaded, Failed> {
    let absolute = folder
        .canonicalize()
        .map_err(|e| Failed::new(code::DATA, format!("cannot read {}: {e}", folder.display())))?;
    let format = if folder.join(TOKENIZER).is_file() { "Auto" } else { "U32" };
    let text = format!(
        "(model: (from: {:?}), data: (format: {format}), train: (steps: 1))",
        absolute.display().to_string()
    );
    load_str(&text, &folder.display().to_string(), Path::new(""), &[])
        .map_err(|e| Failed::new(code::CONFIG, e))
}

/// From a folder of transformers.
fn run_folder(args: &GenerateArgs) -> Result<(), Failed> {
    let loaded = config_of(&args.run)?;
    let tokenizer = data::tokenizer(&loaded.config)?;
    draw(args, &loaded.config, (Trained::Folder(&args.run), tokenizer.as_ref()))
}

pub(super) fn run(args: &GenerateArgs) -> Result<(), Failed> {
    if args.run.join("config.json").is_file() && !args.run.join(CONFIG).exists() {
        return run_folder(args);
    }
    let (config, weights) = (args.run.join(CONFIG), args.run.join(WEIGHTS));
    let (loaded, checkpoint) = if config.is_file() {
        let loaded = load_of_run(&config).map_err(|e| Failed::new(code::CONFIG, e))?;
        let lacks = format!("has no {WEIGHTS}, which a run writes when it ends");
        let checkpoint = if weights.exists() { None } else { Some(newest(args, &lacks)?) };
        (loaded, checkpoint)
    } else if config.symlink_metadata().is_ok() {
        return Err(Failed::new(code::DATA, format!("{} is not a file", config.display())));
    } else {
        let found =
            newest(args, &format!("is not a run directory (it has no {CONFIG}; see runs/)"))?;
        let stored = Summary::read(found.path()).and_then(|summary| summary.config());
        (stored.map_err(|e| Failed::new(code::CHECKPOINT, e))?, Some(found))
    };
    let run = match &checkpoint {
        Some(checkpoint) if !config.is_file() => run_of(checkpoint),
        _ => &args.run,
    };
    let tokenizer = data::tokenizer_of(run, &loaded.config)?;
    let trained = checkpoint.as_ref().map_or(Trained::Weights(&weights), Trained::Checkpoint);
    draw(args, &loaded.config, (trained, tokenizer.as_ref()))
}

/// Draws and writes, or writes the logits that are asked for.
fn draw(
    args: &GenerateArgs,
    config: &Config,
    trained: (Trained<'_>, Option<&Tokenizer>),
) -> Result<(), Failed> {
    if args.logits {
        let prompt = crate::generate::default_prompt(config, &args.prompt);
        let logits = next_logits(config, trained, &prompt).map_err(failed)?;
        return print(&format!("{}\n", serde_json::json!({ "logits": logits })));
    }
    let GenerateArgs { prompt, tokens, temperature, seed, .. } = args;
    let sampling = Sampling {
        prompt: crate::generate::default_prompt(config, prompt),
        tokens: *tokens,
        temperature: *temperature,
        seed: *seed,
    };
    let mut out = std::io::stdout().lock();
    let mut unseen = None;
    let mut emit = |piece: &[u8]| match seen(out.write_all(piece).and_then(|()| out.flush())) {
        Ok(go_on) => go_on,
        Err(failed) => {
            unseen = Some(failed);
            false
        }
    };
    generate(config, trained, &sampling, &mut emit).map_err(failed)?;
    emit(b"\n");
    unseen.map_or(Ok(()), Err)
}

fn failed(error: GenerateError) -> Failed {
    let code = match error {
        GenerateError::Folder(error) => return unusable(error),
        GenerateError::Read { .. } => code::IO,
        GenerateError::Weights { .. } => code::DATA,
        GenerateError::Prompt(..) => 2,
        GenerateError::Device(device::Error::HostMemory { .. }) => code::HOST_MEMORY,
        GenerateError::Device(_) => code::INTERNAL,
    };
    Failed::new(code, error)
}
