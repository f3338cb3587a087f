//! The parts of the tokens, and whether each has a window.

use super::problem::{DataError, Problem, at, in_key};
use std::path::Path;

/// How many of so many tokens are to train when a fraction is held out, rounded to a whole token.
pub(super) fn to_train(tokens: usize, held_out: f32) -> usize {
    tokens - (tokens as f64 * f64::from(held_out)).round() as usize
}

/// Whether each part of `total` tokens, `..split` and `split..`, has a window of `seq_len` and the token after it.
pub(super) fn check(
    (train, validation): (&str, Option<&str>),
    (split, total): (usize, usize),
    seq_len: usize,
) -> Result<(), DataError> {
    let held_out = total - split;
    let (key, text, part, tokens) = match validation {
        _ if split <= seq_len => ("data.train", train, "training", split),
        _ if held_out > seq_len => return Ok(()),
        Some(validation) => ("data.validation", validation, "held-out", held_out),
        None => ("data.train", train, "held-out", held_out),
    };
    let (arithmetic, remedy) = match validation {
        Some(_) => ("all of the files".to_owned(), "give more text"),
        None => (
            format!("{total} in all - {} in the other part", total - tokens),
            "set data.validation, change data.validation_fraction or give more text",
        ),
    };
    let problem = Problem::TooShort { part, tokens, arithmetic, seq_len, remedy };
    Err(in_key(key)(at(Path::new(text))(problem)))
}
