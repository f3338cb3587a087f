//! The data of a config, and what makes tokens of it, opened for a command.

use super::exit::{Failed, code};
use crate::config::Config;
use crate::data::{Cache, Dataset, Problem, Tokenized, Tokenizer};
use crate::run_dir::TOKENIZER;
use std::path::Path;
use std::sync::Arc;

/// What `data.tokenizer` names.
pub(super) fn tokenizer(config: &Config) -> Result<Option<Tokenizer>, Failed> {
    config.data.tokenizer.as_ref().map(|path| open_tokenizer(Path::new(path))).transpose()
}

/// The one that a run was trained with: its own copy, or where there is none what its config names.
pub(super) fn tokenizer_of(run: &Path, config: &Config) -> Result<Option<Tokenizer>, Failed> {
    let copy = run.join(TOKENIZER);
    match config.data.tokenizer {
        Some(_) if copy.exists() => open_tokenizer(&copy).map(Some),
        _ => tokenizer(config),
    }
}

fn open_tokenizer(path: &Path) -> Result<Tokenizer, Failed> {
    let failed = |problem: Problem| {
        Failed::new(code::DATA, format!("data.tokenizer: {}: {problem}", path.display()))
    };
    Tokenizer::open(path).map_err(failed)
}

/// Reads all of it. With `dry` nothing is written, not even tokens into the user's cache folder.
pub(super) fn open(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    dry: bool,
) -> Result<Arc<Dataset>, Failed> {
    let (data, model) = (&config.data, &config.model);
    let (train, validation) = (data.train.as_str(), data.validation.as_deref());
    let fraction = data.validation_fraction;
    let opened = match (tokenizer, &data.tokenizer) {
        (Some(tokenizer), Some(path)) => {
            let cache = Cache::of_user(dry);
            let with = Tokenized { tokenizer, path: Path::new(path), cache: &cache };
            Dataset::open_text((train, validation), &with, fraction, model.vocab, model.seq_len)
        }
        _ => Dataset::open(train, validation, data.format, fraction, model.vocab, model.seq_len),
    };
    opened.map(Arc::new).map_err(|e| Failed::new(code::DATA, e))
}
