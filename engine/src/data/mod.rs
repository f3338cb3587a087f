//! The tokens of a run: files, read into one array whose end is held out, and the windows of it
//! that become batches (B, T). `run` opens it before step 1; the batch filling of each step takes
//! from it.
//!
//! Invariant: sample i of step k is a function of (seed, k, i) only, never of rank or layout, so a
//! resumed or re-sharded run needs no replay.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use device::random;
use topology::{counted, format_bytes};

use crate::config::{DataConfig, DataFormat};
use crate::report::shown::Shown;

mod cores;
mod files;
mod identity;
mod kind;
mod left_out;
mod lengths;
mod look;
mod megatron;
mod open;
mod order;
mod problem;
mod read;
mod text;
mod tokenizer;
mod tokens;
mod untrusted;
mod utf8;

pub(crate) use cores::texts_at_once;
pub use identity::Identity;
pub use left_out::LeftOut;
pub(crate) use look::Look;
pub use problem::{DataError, Problem};
use problem::{Failure, in_key};
pub use text::Tokenized;
pub use tokenizer::{Decoder, Tokenizer};
pub use tokens::Cache;
pub use utf8::NotUtf8;

/// The key of the data that would take what a run writes into `directory`.
pub(crate) fn takes_from(data: &DataConfig, directory: &Path) -> Option<&'static str> {
    let named = [("data.train", Some(&data.train)), ("data.validation", data.validation.as_ref())];
    let takes = |text: &String| files::takes_from(text, directory);
    named.into_iter().find_map(|(key, text)| text.is_some_and(takes).then_some(key))
}

/// Word that keys the data stream under the seed of a run.
const DATA_STREAM: u64 = 0x6461_7461;

/// Appends the tokens of what a text names, and returns the files.
type Append<'a> = dyn FnMut(&mut Dataset, &str) -> Result<Vec<PathBuf>, Failure> + 'a;

/// Tokens as they stand in the files, little-endian: `..split` to train, `split..` held out.
pub struct Dataset {
    bytes: Vec<u8>,
    /// Bytes of a token: 1, 2 or 4.
    width: usize,
    split: usize,
    seq_len: usize,
    num_files: usize,
    left_out: LeftOut,
    /// Bytes of the text that a tokenizer made these tokens of.
    text: Option<usize>,
    identity: Identity,
}

impl Dataset {
    /// Reads everything into memory and checks it. What `train` and `validation` name is taken as a
    /// file or a directory if it exists, else as a glob. Without `validation` the last
    /// `validation_fraction` of the tokens, rounded to a whole one, is held out.
    ///
    /// # Errors
    /// [`DataError`] if a name gives no tokens, a token is not below `vocab`, or a part has fewer
    /// than `seq_len + 1`.
    pub fn open(
        train: &str,
        validation: Option<&str>,
        format: DataFormat,
        validation_fraction: f32,
        vocab: usize,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        let mut data = Self { width: format.width(), ..Self::none(seq_len) };
        let (parts, fraction) = ((train, validation), validation_fraction);
        data.fill_parts(parts, fraction, &mut |data, text| data.read(text, format, vocab))?;
        Ok(data)
    }

    /// Reads both parts, or cuts the first.
    fn fill_parts(
        &mut self,
        (train, validation): (&str, Option<&str>),
        validation_fraction: f32,
        read: &mut Append<'_>,
    ) -> Result<(), DataError> {
        let train_files = read(self, train).map_err(in_key("data.train"))?;
        self.split = self.num_tokens();
        if let Some(validation) = validation {
            let files = read(self, validation).map_err(in_key("data.validation"))?;
            warn_of_overlap(&train_files, &files);
        } else {
            self.split = lengths::to_train(self.split, validation_fraction);
        }
        lengths::check((train, validation), (self.split, self.num_tokens()), self.seq_len)?;
        self.identity = Identity::of(&self.bytes, self.width, self.split);
        Ok(())
    }

    /// No tokens: for a step that is counted, not run.
    pub(crate) const fn none(seq_len: usize) -> Self {
        let left_out =
            LeftOut { files: 0, bytes: 0, largest: None, binary: 0, runs: BTreeSet::new() };
        let identity = Identity::NONE;
        Self {
            bytes: Vec::new(),
            width: 1,
            split: 0,
            seq_len,
            num_files: 0,
            left_out,
            text: None,
            identity,
        }
    }

    /// Bytes without meaning, a window of them held out: for a step that is timed.
    pub(crate) fn noise(seq_len: usize) -> Self {
        let windows = 4;
        let byte = |i: u64| random::below(0, i, 256) as u8;
        let bytes: Vec<u8> = (0..=(windows * seq_len) as u64).map(byte).collect();
        let split = bytes.len() - seq_len - 1;
        Self { bytes, split, ..Self::none(seq_len) }
    }

    /// Where sample `index` of the global batch of `step` starts: uniform over all starts that
    /// leave `seq_len + 1` tokens of the training part.
    pub fn sample(&self, seed: u64, step: u64, index: u64) -> usize {
        let stream = random::key(random::key(seed, DATA_STREAM), step);
        random::below(stream, index, (self.split - self.seq_len) as u64) as usize
    }

    /// How many windows of `seq_len` targets the training part has; fewer than `seq_len` tokens at its end are in none.
    pub const fn num_train_windows(&self) -> usize {
        (self.split - 1) / self.seq_len
    }

    /// Where sample `number` of a run, counted from 0 over all its steps, starts if each epoch takes every window once.
    pub fn shuffled(&self, seed: u64, number: u64) -> usize {
        order::shuffled(seed, number, self.num_train_windows() as u64) as usize * self.seq_len
    }

    /// Fills `inputs` (T) and `targets` (T), the next tokens, of the sample at `start` (from [`sample`](Self::sample) or
    /// [`shuffled`](Self::shuffled)).
    pub fn fill_train(&self, start: usize, inputs: &mut [i32], targets: &mut [i32]) {
        self.fill(start, self.split, inputs, targets);
    }

    /// How many windows of `seq_len` targets cover the held-out part.
    pub fn num_eval_windows(&self) -> usize {
        (self.num_tokens() - self.split - 1).div_ceil(self.seq_len)
    }

    /// Targets of all windows together: every held-out token but the first, once.
    pub fn num_eval_targets(&self) -> u64 {
        (self.num_tokens() - self.split - 1) as u64
    }

    /// Fills `inputs` (T) and `targets` (T) of an evaluation window. Past the end of the held-out
    /// part, so all over for `window >= num_eval_windows()`, inputs are 0 and targets -1: ignored.
    pub fn fill_eval(&self, window: usize, inputs: &mut [i32], targets: &mut [i32]) {
        let start = self.split.saturating_add(window.saturating_mul(self.seq_len));
        self.fill(start, self.num_tokens(), inputs, targets);
    }

    /// Files, tokens and split, for the start-up report.
    pub fn describe(&self) -> String {
        let (files, tokens) = (self.num_files, self.num_tokens());
        let bytes = self.text.unwrap_or(self.bytes.len());
        let (train, held_out) = (self.split, tokens - self.split);
        let files = counted(files, "file");
        let bytes = format_bytes(bytes as u64);
        let text = format!(
            "{files}, {bytes}, {tokens} tokens: {train} to train, {held_out} \
             held out"
        );
        let text = match self.bytes_per_token() {
            Some(bytes) => format!("{text}; {bytes:.2} bytes per token"),
            None => text,
        };
        text + &self.left_out.brief()
    }

    /// What the tokens are, whatever files they stand in.
    pub const fn identity(&self) -> Identity {
        self.identity
    }

    /// Both parts.
    pub(crate) fn num_tokens(&self) -> usize {
        self.bytes.len() / self.width
    }

    fn token(&self, i: usize) -> u32 {
        match (self.width, &self.bytes[i * self.width..]) {
            (1, &[a, ..]) => u32::from(a),
            (2, &[a, b, ..]) => u32::from(u16::from_le_bytes([a, b])),
            (_, &[a, b, c, d, ..]) => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        }
    }

    /// Pairs of tokens in `start..end`, then padding. Tokens are below `vocab`, which fits an i32.
    fn fill(&self, start: usize, end: usize, inputs: &mut [i32], targets: &mut [i32]) {
        for (i, (input, target)) in inputs.iter_mut().zip(targets).enumerate() {
            let at = start.saturating_add(i);
            (*input, *target) = match at.saturating_add(1) < end {
                true => (self.token(at) as i32, self.token(at + 1) as i32),
                false => (0, -1),
            };
        }
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dataset({})", self.describe())
    }
}

fn warn_of_overlap(train: &[PathBuf], validation: &[PathBuf]) {
    let train: Vec<_> = train.iter().filter_map(|file| file.canonicalize().ok()).collect();
    for file in validation.iter().filter_map(|file| file.canonicalize().ok()) {
        if train.contains(&file) {
            let file = Shown(&file);
            tracing::warn!(
                "{file} is in data.train and in data.validation: evaluation is not held out"
            );
        }
    }
}

#[cfg(test)]
mod tests;
