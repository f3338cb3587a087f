//! The tokens of a run: those of its files one behind another, of which the end is held out, and the windows of them that
//! become batches (B, T). `run` opens it before step 1; the batch filling of each step reads from it.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::RwLock;

use device::random;
use topology::{counted, format_bytes};

use ::files::path_text::PathText;
use config::{DataConfig, DataFormat, DataOrder, Packing};

mod bad_rows;
mod cache_file;
mod cache_folder;
pub mod chat;
mod checks;
mod chunks;
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
pub use utf8::Utf8Error;

/// The key of the data that would take what a run writes into `directory`.
pub fn takes_from(data: &DataConfig, directory: &Path) -> Option<&'static str> {
    let takes = |text| data_files::takes_from(text, directory);
    named(data).find(|(_, text)| takes(text)).map(|(key, _)| key)
}

/// What the data names, each with its key.
fn named(data: &DataConfig) -> impl Iterator<Item = (&'static str, &str)> {
    let all = [("data.train", &data.train), ("data.validation", &data.validation)];
    all.into_iter().flat_map(|(key, sources)| sources.paths().map(move |text| (key, text)))
}

/// Word that keys the data stream under the seed of a run.
const DATA_STREAM: u64 = 0x6461_7461;

/// Percent of a sample that are no padding, below which a remedy is named.
const HALF_FULL: f64 = 50.0;

/// Appends the tokens of what a text names, and returns the files.
type SourceReader<'a> = dyn FnMut(&mut Corpus, &str) -> Result<Vec<PathBuf>, Failure> + 'a;

/// What a corpus is made of.
#[derive(Clone, Copy, Debug)]
pub enum CorpusSplit<'a> {
    /// Names of what to train on, and of what to hold out.
    Both(&'a str, &'a str),
    /// A name, of which this share is held out: the last tokens or documents.
    Cut(&'a str, f32),
    /// A name of what to train on; nothing is held out.
    Train(&'a str),
    /// A name of what to hold out; there is nothing to train on.
    HeldOut(&'a str),
}

/// How files of tokens become samples.
#[derive(Clone, Copy, Debug)]
pub struct SampleSettings<'a> {
    /// Of the files.
    pub format: &'a DataFormat,
    /// The kind of a sample.
    pub packing: Packing,
    /// A document that is too long for a sample is cut, and not left out or divided.
    pub truncate: bool,
}

/// Tokens: `..split` to train, `split..` held out.
pub struct Corpus {
    store: Store,
    split: usize,
    seq_len: usize,
    num_files: usize,
    left_out: SkippedFiles,
    /// Bytes of the text that a tokenizer made these tokens of.
    text: Option<usize>,
    /// Where samples are made of documents.
    documents: Option<Documents>,
    /// Of each segment of the tokens, where its file has one.
    indexes: Vec<Index>,
    /// Several of them share a sample.
    packs: bool,
    found: DataFindings,
    /// How often files that somebody has touched were read through again. Whoever reads tokens holds it.
    read_again: RwLock<u64>,
    /// Of all parts.
    files: Vec<PathBuf>,
}

impl Corpus {
    /// Opens all files and checks their tokens, which stay in the files. What `train` and `validation` name is taken as a
    /// file or a directory if it exists, else as a glob. Without `validation` the last
    /// `validation_fraction` of the tokens, rounded to a whole one, is held out.
    ///
    /// # Errors
    /// [`DataError`] if a name gives no tokens, a token is not below `vocab`, or a part has fewer
    /// than `seq_len + 1`.
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

    /// [`open`](Self::open), where what a check finds is kept for the next time.
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
        // An index beside the first file says it otherwise.
        let width = format.width().unwrap_or(1);
        let mut data = Self { documents, packs, ..Self::of_width(width, seq_len) };
        data.fill_parts(parts, checks, &mut |data, text| data.read(text, format, checks))?;
        Ok(data)
    }

    /// Reads all parts, and cuts where one name is of both.
    fn fill_parts(
        &mut self,
        parts: CorpusSplit<'_>,
        checks: Checks<'_>,
        read: &mut SourceReader<'_>,
    ) -> Result<(), DataError> {
        use CorpusSplit::{Both, Cut, HeldOut, Train};
        if let Both(text, _) | Cut(text, _) | Train(text) = parts {
            self.files = read(self, text).map_err(in_key("data.train"))?;
        }
        self.split = self.num_tokens();
        let to_train = self.files.len();
        let mut documents = self.documents.as_ref().map_or(0, Documents::len);
        match parts {
            Both(_, validation) | HeldOut(validation) => {
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
            let apart = matches!(parts, Both(..) | HeldOut(_));
            let trained_on = !apart || self.files[..to_train].contains(&failure.0);
            in_key(if trained_on { "data.train" } else { "data.validation" })(failure)
        })?;
        match self.documents {
            Some(_) => Ok(()),
            None => lengths::check(parts, self.split, self.num_tokens(), self.seq_len),
        }
    }

    /// Appends the tokens of a document, which is in one sample if documents are.
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

    /// Documents that are known, of at most `seq_len` + 1 tokens, each in a sample of its own or packed; as many tokens count as
    /// its `counted` say.
    ///
    /// # Panics
    /// If a document is longer, or if a part has none.
    pub fn of_documents(
        train: &[Document],
        held_out: &[Document],
        seq_len: usize,
        packs: bool,
    ) -> Self {
        let documents = Some(Documents::that_say(SampleCapacity::new(seq_len, false, false)));
        let mut data = Self { documents, packs, ..Self::of_width(4, seq_len) };
        for document in train.iter().chain(held_out) {
            assert!(document.tokens.len() <= seq_len + 1, "a document is longer than a sample");
            data.append(document);
        }
        assert!(!train.is_empty() && !held_out.is_empty(), "each part has a document");
        let Some(documents) = &mut data.documents else { unreachable!("it was made with some") };
        documents.hold_out(train.len(), packs);
        let Ok(()) = data.pass(Checks::none()) else {
            unreachable!("tokens in memory can be read")
        };
        data
    }

    /// No tokens: for a step that is counted, not run.
    pub fn none(seq_len: usize) -> Self {
        Self::of_width(1, seq_len)
    }

    /// No tokens yet, each of which will have so many bytes.
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

    /// Bytes without meaning, a window of them held out: for a step that is timed.
    pub fn noise(seq_len: usize) -> Self {
        let windows = 4;
        let byte = |i: u64| random::below(0, i, 256) as u8;
        let bytes: Vec<u8> = (0..=(windows * seq_len) as u64).map(byte).collect();
        let split = bytes.len() - seq_len - 1;
        let mut data = Self { split, ..Self::none(seq_len) };
        data.store.push_bytes(&bytes);
        data
    }

    /// The place of sample `index` of the global batch of `step`, by chance: a sample of documents, or the start of a window, uniform over
    /// all that leave `seq_len + 1` tokens of the training part.
    pub fn sample(&self, seed: u64, step: u64, index: u64) -> usize {
        let stream = random::key(random::key(seed, DATA_STREAM), step);
        let windows = || self.split - self.seq_len;
        let places = self.documents.as_ref().map_or_else(windows, Documents::samples_to_train);
        random::below(stream, index, places as u64) as usize
    }

    /// The place of sample `number` of a run, counted from 0 over all its steps of `per_step` samples, in this order.
    pub(crate) fn place(&self, order: DataOrder, seed: u64, number: u64, per_step: u64) -> usize {
        match order {
            DataOrder::Random => self.sample(seed, 1 + number / per_step, number % per_step),
            DataOrder::Shuffled => self.shuffled(seed, number),
        }
    }

    /// How many samples an epoch has: those of documents, or windows of `seq_len` targets, of which fewer than `seq_len` tokens at the end
    /// of the training part are in none.
    pub fn num_train_samples(&self) -> usize {
        let windows = || (self.split - 1) / self.seq_len;
        self.documents.as_ref().map_or_else(windows, Documents::samples_to_train)
    }

    /// The place of sample `number` of a run, counted from 0 over all its steps, if each epoch takes every sample once.
    pub fn shuffled(&self, seed: u64, number: u64) -> usize {
        let sample = order::shuffled(seed, number, self.num_train_samples() as u64) as usize;
        if self.documents.is_some() { sample } else { sample * self.seq_len }
    }

    /// How many targets of the sample at `place` count.
    pub fn targets(&self, place: usize) -> u64 {
        self.documents.as_ref().map_or(self.seq_len as u64, |d| d.targets(place..place + 1))
    }

    /// How many documents the sample at `place` holds, and how many of its `seq_len` places are no padding; of windows nothing.
    pub fn held(&self, place: usize) -> Option<(u64, u64)> {
        self.documents.as_ref().map(|documents| documents.held(place))
    }

    /// How many windows of `seq_len` targets cover the held-out part, or how many samples its documents are.
    pub fn num_eval_windows(&self) -> usize {
        let tokens = self.num_tokens() - self.split;
        let windows = || (tokens - 1).div_ceil(self.seq_len);
        self.documents.as_ref().map_or_else(windows, |d| d.samples() - d.samples_to_train())
    }

    /// Targets of the first `windows` windows together. Those of all are every held-out token but the first, once.
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
        let (train, held_out) = (self.split, tokens - self.split);
        let files = counted(files, "file");
        let bytes = format_bytes(bytes as u64);
        let of_index = self.indexes.iter().map(Index::num_documents).sum::<u64>();
        // Of a corpus that has one part, the other is not spoken of.
        let parts = |to_train, held_out| match (to_train, held_out) {
            (to_train, 0) => format!("{to_train} to train"),
            (0, held_out) => format!("{held_out} held out"),
            _ => format!("{to_train} to train, {held_out} held out"),
        };
        let parts = match &self.documents {
            None => parts(train, held_out),
            Some(d) => {
                let targets = d.targets(0..d.samples());
                let in_samples = d.num_tokens();
                let share = 100.0 * targets as f64 / in_samples.max(1) as f64;
                let rows = counted(d.len(), if of_index > 0 { "document" } else { "row" });
                let (to_train, held_out) = (d.split, d.len() - d.split);
                let rows = format!("{rows}: {}", parts(to_train, held_out));
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

    /// What the tokens are, whatever files they stand in.
    pub const fn identity(&self) -> Identity {
        self.found.identity
    }

    /// Both parts.
    pub(crate) fn num_tokens(&self) -> usize {
        self.store.num_tokens()
    }
}

impl fmt::Debug for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Corpus({})", self.describe())
    }
}

/// The file behind a name, whatever links lead there.
fn behind(file: &Path) -> Option<PathBuf> {
    file.canonicalize().ok()
}

fn warn_of_overlap<'a>(
    train: impl Iterator<Item = &'a PathBuf>,
    held_out: impl Iterator<Item = &'a PathBuf>,
) {
    let train: HashSet<_> = train.filter_map(|file| behind(file)).collect();
    for file in held_out.filter_map(|file| behind(file)).filter(|file| train.contains(file)) {
        let file = PathText(&file);
        tracing::warn!(
            "{file} is in data.train and in data.validation: evaluation is not held out"
        );
    }
}

#[cfg(test)]
mod tests;
