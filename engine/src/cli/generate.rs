//! `onebox generate`.

use super::exit::{Failed, code};
use super::seen;
use crate::generate::{GenerateError, Sampling, generate};
use crate::run_dir::{CONFIG, WEIGHTS};
use std::io::Write;
use std::path::PathBuf;

/// Draw text from a model that `train` left.
#[derive(Debug, clap::Args)]
pub(super) struct GenerateArgs {
    /// Run directory, with config.ron and weights.safetensors
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
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if (0.0..=10.0).contains(&t) => Ok(t),
        _ => Err("a number from 0 to 10 is expected".into()),
    }
}

pub(super) fn run(args: &GenerateArgs) -> Result<(), Failed> {
    let config = args.run.join(CONFIG);
    if !config.exists() {
        let path = args.run.display();
        let why = format!("{path} is not a run directory: it has no {CONFIG} (see runs/)");
        return Err(Failed::new(code::DATA, why));
    }
    let loaded = crate::config::load(&config, &[]).map_err(|e| Failed::new(code::CONFIG, e))?;
    let weights = args.run.join(WEIGHTS);
    if !weights.exists() {
        let why = format!("{} does not exist yet: a run writes it when it ends", weights.display());
        return Err(Failed::new(code::DATA, why));
    }
    let GenerateArgs { prompt, tokens, temperature, seed, .. } = args;
    let sampling = Sampling {
        prompt: crate::generate::default_prompt(&loaded.config, prompt),
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
    generate(&loaded.config, &weights, &sampling, &mut emit).map_err(failed)?;
    emit(b"\n");
    unseen.map_or(Ok(()), Err)
}

fn failed(error: GenerateError) -> Failed {
    let code = match &error {
        GenerateError::Read { .. } => code::IO,
        GenerateError::Weights { .. } => code::DATA,
        GenerateError::Prompt(..) => 2,
        GenerateError::Device(device::Error::HostMemory { .. }) => code::HOST_MEMORY,
        GenerateError::Device(_) => code::INTERNAL,
    };
    Failed::new(code, error)
}
