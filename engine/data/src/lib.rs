//! The tokens of a run: all tokens of its files in order, with the validation set at the end, and
//! the windows of tokens that become batches (B, T). `run` opens the data before step 1; the batch
//! filling of each step reads from it.

// The crate `files` opens, creates, reads and renames files.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::RwLock;

use device::random;
use topology::{counted, format_bytes};

use ::files::path_text::PathText;
use config::{DataConfig, DataFormat, DataOrder, Packing};

mod arrow;
mod bad_rows;
pub mod byte_tokenizer;
mod cache_file;
mod cache_folder;
pub mod chat;
mod checks;
mod chunks;
mod containers;
mod cores;
mod data_files;
mod dataset;
mod document;
mod documents;
mod fill;
mod identity;
mod ignored_keys;
pub mod inspect;
mod kind;
mod lengths;
mod listed_tokens;
mod mask;
mod megatron;
mod mixing;
pub mod model_files;
pub mod open;
mod order;
mod origins;
mod pack;
mod prepare;
mod prepare_command;
mod prepared;
mod problem;
pub mod progress;
mod read;
mod revalidate;
mod row_cache;
mod row_source;
mod rows;
mod skipped_files;
mod split_points;
mod store;
mod text_model;
mod text_source;
mod token_cache;
pub mod token_part;
mod tokenizer;
mod unpack_error;
mod untrusted;
mod use_list;
mod utf8;
mod write_watch;

pub use cache_folder::{CacheRemoval, CacheUsage, PartCount};
pub use checks::Checks;
use checks::DataFindings;
pub use chunks::ChunkSizes;
pub use cores::texts_at_once;
pub use dataset::{Dataset, Sample, SourceCorpora};
pub use document::Document;
use documents::{Documents, SampleCapacity};
pub use identity::Identity;
pub use inspect::DataInspection;
use megatron::Index;
pub use origins::Origin;
pub use prepare::{Preparation, PrepareError, PreparedData};
pub use problem::{DataError, Problem};
use problem::{Failure, at, in_key};
pub use row_source::{BYTES_AT_ONCE, RowSource};
pub use rows::Rows;
pub use skipped_files::SkippedFiles;
pub use store::ReadError;
use store::Store;
pub use text_source::TextSource;
pub use token_cache::Cache;
pub use tokenizer::{Decoder, Tokenizer};
pub use unpack_error::UnpackError;
pub use utf8::Utf8Error;

/// The data key whose files would include the output of a run in `directory`.
pub fn takes_from(data: &DataConfig, directory: &Path) -> Option<&'static str> {
    let takes = |text| data_files::takes_from(text, directory);
    named(data).find(|(_, text)| takes(text)).map(|(key, _)| key)
}

/// The entries of the data config, each with its key.
fn named(data: &DataConfig) -> impl Iterator<Item = (&'static str, &str)> {
    let all = [("data.train", &data.train), ("data.validation", &data.validation)];
    all.into_iter().flat_map(|(key, sources)| sources.paths().map(move |text| (key, text)))
}

/// Key of the data stream under the seed of a run.
const DATA_STREAM: u64 = 0x6461_7461;

/// Percent of non-padding in a sample, below which the report names a remedy.
const HALF_FULL: f64 = 50.0;

/// Function that appends the tokens of a config entry and returns the files.
type SourceReader<'a> = dyn FnMut(&mut Corpus, &str) -> Result<Vec<PathBuf>, Failure> + 'a;

/// The sources of a corpus.
#[derive(Clone, Copy, Debug)]
pub enum CorpusSplit<'a> {
    /// Config entries for training and for validation.
    Both(&'a str, &'a str),
    /// A config entry and the fraction of it that is for validation: the last tokens or documents.
    Cut(&'a str, f32),
    /// A config entry for training only.
    Train(&'a str),
    /// A config entry for validation only.
    Validation(&'a str),
}

/// Settings for the samples of token files.
#[derive(Clone, Copy, Debug)]
pub struct SampleSettings<'a> {
    /// Format of the files.
    pub format: &'a DataFormat,
    /// Kind of the samples.
    pub packing: Packing,
    /// Whether a document that is too long for a sample is cut, instead of left out or divided.
    pub truncate: bool,
}

/// Tokens: `..split` for training, `split..` for validation.
pub struct Corpus {
    store: Store,
    split: usize,
    seq_len: usize,
    num_files: usize,
    left_out: SkippedFiles,
    /// Bytes of the tokenized text; `None` without a tokenizer.
    text: Option<usize>,
    /// The documents, if samples consist of documents.
    documents: Option<Documents>,
    /// The index of each segment, if its file has one.
    indexes: Vec<Index>,
    /// Whether samples hold several documents.
    packs: bool,
    found: DataFindings,
    /// Number of repeated reads of touched files. Readers of tokens hold the lock.
    read_again: RwLock<u64>,
    /// The files of all parts.
    files: Vec<PathBuf>,
}

impl Corpus {
    /// Opens all files and checks their tokens, which stay in the files. `train` and `validation`
    /// name a file or a directory if it exists, else a glob. Without `validation` the last
    /// `validation_fraction` of the tokens, rounded to a whole token, is for validation.
    ///
    /// # Errors
    /// [`DataError`] if an entry has no tokens, a token is not below `vocab`, or a part has at most
    /// `seq_len` tokens.
    #[expect(clippy::needless_pass_by_value, reason = "most callers name a format")]
    pub fn open(
        train: &str,
        validation: Option<&str>,
        format: DataFormat,
        validation_fraction: f32,
        vocab: usize,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        let checks = Checks { vocab, ..Checks::none() };
        let parts = match validation {
            Some(validation) => CorpusSplit::Both(train, validation),
            None => CorpusSplit::Cut(train, validation_fraction),
        };
        let with = SampleSettings { format: &format, packing: Packing::Windows, truncate: false };
        Self::open_checked(parts, with, checks, seq_len)
    }

    /// Like [`open`](Self::open), but keeps the results of checks for the next time.
    pub fn open_checked(
        parts: CorpusSplit<'_>,
        with: SampleSettings<'_>,
        checks: Checks<'_>,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        let SampleSettings { format, packing, truncate } = with;
        let packs = packing == Packing::Documents;
        let documents = Documents::that_count(SampleCapacity::new(seq_len, truncate, packs));
        let documents = (packing != Packing::Windows).then_some(documents);
        // A Megatron index next to the first file changes the width.
        let width = format.width().unwrap_or(1);
        let mut data = Self { documents, packs, ..Self::of_width(width, seq_len) };
        data.fill_parts(parts, checks, &mut |data, text| data.read(text, format, checks))?;
        Ok(data)
    }

    /// Reads all parts, and splits an entry that is for both training and validation.
    fn fill_parts(
        &mut self,
        parts: CorpusSplit<'_>,
        checks: Checks<'_>,
        read: &mut SourceReader<'_>,
    ) -> Result<(), DataError> {
        use CorpusSplit::{Both, Cut, Train, Validation};
        if let Both(text, _) | Cut(text, _) | Train(text) = parts {
            self.files = read(self, text).map_err(in_key("data.train"))?;
        }
        self.split = self.num_tokens();
        let to_train = self.files.len();
        let mut documents = self.documents.as_ref().map_or(0, Documents::len);
        match parts {
            Both(_, validation) | Validation(validation) => {
                let files = read(self, validation).map_err(in_key("data.validation"))?;
                warn_of_overlap(self.files.iter(), files.iter());
                self.files.extend(files);
            }
            Cut(train, fraction) => match &self.documents {
                Some(all) => {
                    let cut = lengths::to_train(documents, fraction);
                    let one = || in_key("data.train")(at(Path::new(train))(Problem::OneRow));
                    documents = all.whole_cut(cut).ok_or_else(one)?;
                }
                None => self.split = lengths::to_train(self.split, fraction),
            },
            Train(_) => {}
        }
        if let Some(all) = &mut self.documents {
            all.hold_out(documents, self.packs);
        }
        self.pass(checks).map_err(|failure| {
            let is_separate = matches!(parts, Both(..) | Validation(_));
            let trained_on = !is_separate || self.files[..to_train].contains(&failure.0);
            in_key(if trained_on { "data.train" } else { "data.validation" })(failure)
        })?;
        match self.documents {
            Some(_) => Ok(()),
            None => lengths::check(parts, self.split, self.num_tokens(), self.seq_len),
        }
    }

    /// Appends the tokens of a document; it is a separate document if samples consist of documents.
    fn append(&mut self, document: &Document) {
        if let Some(documents) = &mut self.documents {
            documents.push_counted(&document.counted);
        }
        let width = self.store.width;
        let mut bytes = Vec::with_capacity(document.tokens.len() * width);
        for token in &document.tokens {
            bytes.extend_from_slice(&token.to_le_bytes()[..width]);
        }
        self.store.push_bytes(&bytes);
    }

    /// A corpus of given documents of at most `seq_len` + 1 tokens, each in a sample of its own or
    /// packed. Their `counted` flags say which tokens count.
    ///
    /// # Panics
    /// If a document is longer, or a part has no document.
    pub fn of_documents(
        train: &[Document],
        validation: &[Document],
        seq_len: usize,
        packs: bool,
    ) -> Self {
        let documents = Some(Documents::that_say(SampleCapacity::new(seq_len, false, false)));
        let mut data = Self { documents, packs, ..Self::of_width(4, seq_len) };
        for document in train.iter().chain(validation) {
            assert!(document.tokens.len() <= seq_len + 1, "a document is longer than a sample");
            data.append(document);
        }
        assert!(!train.is_empty() && !validation.is_empty(), "each part has a document");
        let Some(documents) = &mut data.documents else { unreachable!("it was made with some") };
        documents.hold_out(train.len(), packs);
        let Ok(()) = data.pass(Checks::none()) else {
            unreachable!("tokens in memory can be read")
        };
        data
    }

    /// A corpus without tokens, for a step that is counted and not run.
    pub fn none(seq_len: usize) -> Self {
        Self::of_width(1, seq_len)
    }

    /// A corpus without tokens yet, for tokens of `width` bytes.
    fn of_width(width: usize, seq_len: usize) -> Self {
        Self {
            store: Store::new(width),
            split: 0,
            seq_len,
            num_files: 0,
            left_out: SkippedFiles::default(),
            text: None,
            documents: None,
            indexes: Vec::new(),
            packs: false,
            found: DataFindings::default(),
            read_again: RwLock::default(),
            files: Vec::new(),
        }
    }

    /// A corpus of random bytes with a window for validation, for timed steps.
    pub fn noise(seq_len: usize) -> Self {
        let windows = 4;
        let byte = |i: u64| random::below(0, i, 256) as u8;
        let bytes: Vec<u8> = (0..=(windows * seq_len) as u64).map(byte).collect();
        let split = bytes.len() - seq_len - 1;
        let mut data = Self { split, ..Self::none(seq_len) };
        data.store.push_bytes(&bytes);
        data
    }

    /// The random place of sample `index` of the global batch of `step`: the number of a document
    /// sample, or the start of a window. Window starts are uniform over all that leave `seq_len +
    /// 1` tokens of the training part.
    pub fn sample(&self, seed: u64, step: u64, index: u64) -> usize {
        let stream = random::key(random::key(seed, DATA_STREAM), step);
        let windows = || self.split - self.seq_len;
        let places = self.documents.as_ref().map_or_else(windows, Documents::samples_to_train);
        random::below(stream, index, places as u64) as usize
    }

    /// The place of sample `number` of a run in the order `order`, counted from 0 over all its
    /// steps of `per_step` samples.
    pub(crate) fn place(&self, order: DataOrder, seed: u64, number: u64, per_step: u64) -> usize {
        match order {
            DataOrder::Random => self.sample(seed, 1 + number / per_step, number % per_step),
            DataOrder::Shuffled => self.shuffled(seed, number),
        }
    }

    /// Number of samples of an epoch: document samples, or windows of `seq_len` targets. Fewer than
    /// `seq_len` tokens at the end of the training part are in no window.
    pub fn num_train_samples(&self) -> usize {
        let windows = || (self.split - 1) / self.seq_len;
        self.documents.as_ref().map_or_else(windows, Documents::samples_to_train)
    }

    /// The place of sample `number` of a run, counted from 0, if each epoch uses every sample once.
    pub fn shuffled(&self, seed: u64, number: u64) -> usize {
        let sample = order::shuffled(seed, number, self.num_train_samples() as u64) as usize;
        if self.documents.is_some() { sample } else { sample * self.seq_len }
    }

    /// Number of targets of the sample at `place` that count.
    pub fn targets(&self, place: usize) -> u64 {
        self.documents.as_ref().map_or(self.seq_len as u64, |d| d.targets(place..place + 1))
    }

    /// Documents in the sample at `place`, and non-padding places of its `seq_len`; `None` for
    /// windows.
    pub fn held(&self, place: usize) -> Option<(u64, u64)> {
        self.documents.as_ref().map(|documents| documents.held(place))
    }

    /// Number of windows of `seq_len` targets that cover the validation part, or of its samples.
    pub fn num_eval_windows(&self) -> usize {
        let tokens = self.num_tokens() - self.split;
        let windows = || (tokens - 1).div_ceil(self.seq_len);
        self.documents.as_ref().map_or_else(windows, |d| d.samples() - d.samples_to_train())
    }

    /// Number of targets of the first `windows` validation windows. All windows together have every
    /// validation token but the first as a target, once.
    pub fn num_eval_targets(&self, windows: u64) -> u64 {
        match &self.documents {
            Some(d) => {
                let (first, all) = (d.samples_to_train(), d.samples());
                d.targets(first..first + windows.min((all - first) as u64) as usize)
            }
            None => {
                let all = (self.num_tokens() - self.split - 1) as u64;
                windows.saturating_mul(self.seq_len as u64).min(all)
            }
        }
    }

    /// Files, tokens and split, for the start-up report.
    pub fn describe(&self) -> String {
        let (files, tokens) = (self.num_files, self.num_tokens());
        let bytes = self.text.unwrap_or(tokens * self.store.width);
        let (train, validation) = (self.split, tokens - self.split);
        let files = counted(files, "file");
        let bytes = format_bytes(bytes as u64);
        let of_index = self.indexes.iter().map(Index::num_documents).sum::<u64>();
        // For a corpus with one part, the other part is not mentioned.
        let parts = |to_train, validation| match (to_train, validation) {
            (to_train, 0) => format!("{to_train} to train"),
            (0, validation) => format!("{validation} for validation"),
            _ => format!("{to_train} to train, {validation} for validation"),
        };
        let parts = match &self.documents {
            None => parts(train, validation),
            Some(d) => {
                let targets = d.targets(0..d.samples());
                let in_samples = d.num_tokens();
                let share = 100.0 * targets as f64 / in_samples.max(1) as f64;
                let rows = counted(d.len(), if of_index > 0 { "document" } else { "row" });
                let (to_train, validation) = (d.split, d.len() - d.split);
                let rows = format!("{rows}: {}", parts(to_train, validation));
                let (all, samples) = (d.samples(), d.samples_to_train());
                let full = 100.0 * (in_samples - d.len()) as f64 / (all * self.seq_len) as f64;
                let packed = match d.is_packed() {
                    true => {
                        format!("; samples: {}, {full:.0} % full", parts(samples, all - samples))
                    }
                    false if full < HALF_FULL => {
                        format!(
                            "; samples are {full:.0} % full: several rows share one with data.packing: Documents"
                        )
                    }
                    false => String::new(),
                };
                format!("{share:.0} % are targets; {rows}{packed}")
            }
        };
        let documents = match self.indexes.is_empty() {
            true => String::new(),
            false => format!(" in {}", counted(of_index as usize, "document")),
        };
        let text = format!("{files}, {bytes}, {tokens} tokens{documents}: {parts}");
        let text = match self.bytes_per_token() {
            Some(bytes) => format!("{text}; {bytes:.2} bytes per token"),
            None => text,
        };
        text + &self.left_out.brief()
    }

    /// Hashes of the tokens, independent of the files.
    pub const fn identity(&self) -> Identity {
        self.found.identity
    }

    /// Number of tokens of both parts.
    pub(crate) fn num_tokens(&self) -> usize {
        self.store.num_tokens()
    }
}

impl fmt::Debug for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Corpus({})", self.describe())
    }
}

/// The real path of a file, after all links.
fn real_path(file: &Path) -> Option<PathBuf> {
    file.canonicalize().ok()
}

fn warn_of_overlap<'a>(
    train: impl Iterator<Item = &'a PathBuf>,
    validation: impl Iterator<Item = &'a PathBuf>,
) {
    let train: HashSet<_> = train.filter_map(|file| real_path(file)).collect();
    for file in validation.filter_map(|file| real_path(file)).filter(|file| train.contains(file)) {
        let file = PathText(&file);
        tracing::warn!(
            "{file} is in data.train and in data.validation: evaluation uses training data"
        );
    }
}

#[cfg(test)]
mod tests;
