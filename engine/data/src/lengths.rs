//! The split of the tokens into parts, and the check that each part has a window.

use super::CorpusSplit;
use super::problem::{DataError, Problem, at, in_key};
use std::path::Path;

/// Training tokens (or documents) out of `tokens`, without `validation_fraction` of them; rounded.
pub(super) fn to_train(tokens: usize, validation_fraction: f32) -> usize {
    tokens - (tokens as f64 * f64::from(validation_fraction)).round() as usize
}

/// Checks that each existing part, `..split` and `split..total`, has at least `seq_len + 1` tokens.
pub(super) fn check(
    parts: CorpusSplit<'_>,
    split: usize,
    total: usize,
    seq_len: usize,
) -> Result<(), DataError> {
    let validation_tokens = total - split;
    let (train, validation) = match parts {
        CorpusSplit::Both(train, validation) => (Some(train), Some(validation)),
        CorpusSplit::Cut(train, _) => (Some(train), Some(train)),
        CorpusSplit::Train(train) => (Some(train), None),
        CorpusSplit::Validation(validation) => (None, Some(validation)),
    };
    let cut = matches!(parts, CorpusSplit::Cut(..));
    let (key, text, part, tokens) = match (train, validation) {
        (Some(train), _) if split <= seq_len => ("data.train", train, "training", split),
        (_, Some(text)) if validation_tokens <= seq_len => {
            let key = if cut { "data.train" } else { "data.validation" };
            (key, text, "validation", validation_tokens)
        }
        _ => return Ok(()),
    };
    let (arithmetic, remedy) = match cut {
        false => ("all of the files".to_owned(), "give more text"),
        true => (
            format!("{total} in all - {} in the other part", total - tokens),
            "set data.validation, change data.validation_fraction or give more text",
        ),
    };
    let problem = Problem::TooShort { part, tokens, arithmetic, seq_len, remedy };
    Err(in_key(key)(at(Path::new(text))(problem)))
}
