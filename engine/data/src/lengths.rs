//! The split of the tokens into parts, and the check that each part has a window.

use super::CorpusSplit;
use super::problem::{DataError, Problem, at, in_key};
use std::path::Path;

/// Training tokens (or documents) out of `tokens`, without the fraction `held_out`; rounded.
pub(super) fn to_train(tokens: usize, held_out: f32) -> usize {
    tokens - (tokens as f64 * f64::from(held_out)).round() as usize
}

/// Checks that each existing part, `..split` and `split..total`, has at least `seq_len + 1` tokens.
pub(super) fn check(
    parts: CorpusSplit<'_>,
    split: usize,
    total: usize,
    seq_len: usize,
) -> Result<(), DataError> {
    let held_out = total - split;
    let (train, validation) = match parts {
        CorpusSplit::Both(train, validation) => (Some(train), Some(validation)),
        CorpusSplit::Cut(train, _) => (Some(train), Some(train)),
        CorpusSplit::Train(train) => (Some(train), None),
        CorpusSplit::HeldOut(validation) => (None, Some(validation)),
    };
    let cut = matches!(parts, CorpusSplit::Cut(..));
    let (key, text, part, tokens) = match (train, validation) {
        (Some(train), _) if split <= seq_len => ("data.train", train, "training", split),
        (_, Some(text)) if held_out <= seq_len => {
            (if cut { "data.train" } else { "data.validation" }, text, "held-out", held_out)
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
