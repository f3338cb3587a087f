//! The tokens of a run: files, read into one array whose end is held out, and the windows of it
//! that become batches (B, T). `run` opens it before step 1; the batch filling of each step takes
//! from it.
//!
//! Invariant: sample i of step k is a function of (seed, k, i) only, never of rank or layout, so a
//! resumed or re-sharded run needs no replay.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf, absolute};

use device::random;

use crate::config::DataFormat;

mod files;
mod text;
mod tokenizer;
mod tokens;

use files::find_files;
pub use text::Tokenized;
pub use tokenizer::Tokenizer;
pub use tokens::Cache;

/// Word that keys the data stream under the seed of a run.
const DATA_STREAM: u64 = 0x6461_7461;
/// Longest text file that is taken from a directory.
const MAX_TEXT_FILE: u64 = 8 << 20;

/// Why a run has no tokens.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {}: {problem}", path.display())]
pub struct DataError {
    /// The config key to change.
    pub key: &'static str,
    /// What was tried, absolute.
    pub path: PathBuf,
    /// What is wrong with it, and the remedy.
    pub problem: Problem,
}

/// What is wrong with a path of the data.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum Problem {
    #[error("the key is empty: name a text file, a directory or a glob")]
    NotSet,
    #[error(
        "does not exist; paths in a config are relative to it, those in --set to where you are"
    )]
    Missing,
    #[error("no file matches (the pattern knows `*`, `?`, `[a-z]`, `[!a-z]` and `**`)")]
    NoMatch,
    #[error(
        "no usable file ({0}). A directory gives its UTF-8 files up to 8 MiB, or *.bin for U16 and \
         U32, without hidden ones, target, runs, node_modules, Cargo.lock and links; name a file \
         or a glob to take it as it is"
    )]
    NoUsableFile(Skipped),
    #[error("empty: put text into it, or name another file")]
    Empty,
    #[error("neither a regular file nor a directory: copy its content to a file")]
    NotAFile,
    #[error("cannot read it: {0}; check its permissions, and that nothing else writes to it")]
    Unreadable(io::Error),
    #[error("{bytes} bytes do not fit into memory beside {held} read before; give less text")]
    OutOfMemory { bytes: u64, held: usize },
    #[error(
        "{bytes} bytes are no whole number of {width}-byte tokens; check data.format and the end \
         of the file"
    )]
    PartialToken { bytes: usize, width: usize },
    #[error(
        "token {index} is {token}, but model.vocab is {vocab}; set model.vocab to more than the \
         largest token, or check data.format"
    )]
    TokenOutOfVocab { index: usize, token: u32, vocab: usize },
    #[error("cannot be used as a tokenizer.json: {0}")]
    NoTokenizer(String),
    #[error(
        "its largest token is {}, but model.vocab is {vocab}; set model.vocab to {tokenizer} or more",
        tokenizer - 1
    )]
    TokenizerVocab { tokenizer: usize, vocab: usize },
    #[error("not UTF-8, and data.tokenizer takes text; leave the file out, or convert it")]
    NotUtf8,
    #[error("{bytes} bytes are more than a tokenizer takes at once ({most}); split the file")]
    TextTooLong { bytes: u64, most: u64 },
    #[error(
        "the {part} part has {tokens} tokens ({arithmetic}), but model.seq_len {seq_len} needs \
         seq_len + 1 = {}; lower model.seq_len to at most {}, or {remedy}",
        seq_len + 1, tokens.saturating_sub(1).max(1)
    )]
    TooShort {
        part: &'static str,
        tokens: usize,
        arithmetic: String,
        seq_len: usize,
        remedy: &'static str,
    },
}

/// A problem, where it is.
type Failure = (PathBuf, Problem);
/// Appends the tokens of what a text names, and returns the files.
type Append<'a> = dyn FnMut(&mut Dataset, &str) -> Result<Vec<PathBuf>, Failure> + 'a;

/// Text files of a directory that were left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Over 8 MiB.
    pub too_long: usize,
    /// Not UTF-8.
    pub not_utf8: usize,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "skipped {} over 8 MiB and {} not UTF-8", self.too_long, self.not_utf8)
    }
}

/// Tokens as they stand in the files, little-endian: `..split` to train, `split..` held out.
pub struct Dataset {
    bytes: Vec<u8>,
    /// Bytes of a token: 1, 2 or 4.
    width: usize,
    split: usize,
    seq_len: usize,
    num_files: usize,
    skipped: Skipped,
    /// Bytes of the text that a tokenizer made these tokens of.
    text: Option<usize>,
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
        let width = match format {
            DataFormat::Bytes => 1,
            DataFormat::U16 => 2,
            DataFormat::U32 => 4,
        };
        let mut data = Self { width, ..Self::none(seq_len) };
        let (parts, fraction) = ((train, validation), validation_fraction);
        data.fill_parts(parts, fraction, &mut |data, text| data.read(text, vocab))?;
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
            let held_out = self.split as f64 * f64::from(validation_fraction);
            self.split -= held_out.round() as usize;
        }
        self.check_lengths(train, validation)
    }

    /// No tokens: for a step that is counted, not run.
    pub(crate) const fn none(seq_len: usize) -> Self {
        let skipped = Skipped { too_long: 0, not_utf8: 0 };
        Self { bytes: Vec::new(), width: 1, split: 0, seq_len, num_files: 0, skipped, text: None }
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

    /// Fills `inputs` (T) and `targets` (T), the next tokens, of the sample at `start` (from
    /// [`sample`](Self::sample)).
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
        let plural = if files == 1 { "" } else { "s" };
        let text = format!(
            "{files} file{plural}, {bytes} bytes, {tokens} tokens: {train} to train, {held_out} \
             held out"
        );
        let text = match self.bytes_per_token() {
            Some(bytes) => format!("{text}; {bytes:.2} bytes per token"),
            None => text,
        };
        if self.skipped == Skipped::default() { text } else { format!("{text}; {}", self.skipped) }
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

    /// Appends the tokens of all files that `text` names, in order; returns the files.
    fn read(&mut self, text: &str, vocab: usize) -> Result<Vec<PathBuf>, Failure> {
        let before = self.bytes.len();
        let (files, from_directory) = find_files(text, self.width)?;
        for file in &files {
            let must_be_text = from_directory && self.width == 1;
            self.read_file(file, must_be_text, vocab).map_err(at(file))?;
        }
        if self.bytes.len() > before {
            return Ok(files);
        }
        let none =
            if from_directory { Problem::NoUsableFile(self.skipped) } else { Problem::Empty };
        Err(at(Path::new(text))(none))
    }

    /// Appends one file, or skips it if it `must_be_text` and is not or is too long.
    fn read_file(&mut self, file: &Path, must_be_text: bool, vocab: usize) -> Result<(), Problem> {
        let before = self.bytes.len();
        let mut file = File::open(file).map_err(Problem::Unreadable)?;
        let bytes = file.metadata().map_err(Problem::Unreadable)?.len();
        if must_be_text && bytes > MAX_TEXT_FILE {
            self.skipped.too_long += 1;
            return Ok(());
        }
        let fits = usize::try_from(bytes).is_ok_and(|n| self.bytes.try_reserve(n).is_ok());
        if !fits {
            return Err(Problem::OutOfMemory { bytes, held: before });
        }
        let read = file.by_ref().take(bytes).read_to_end(&mut self.bytes);
        if read.map_err(Problem::Unreadable)? as u64 != bytes {
            return Err(Problem::Unreadable(io::ErrorKind::UnexpectedEof.into()));
        }
        if must_be_text && str::from_utf8(&self.bytes[before..]).is_err() {
            self.skipped.not_utf8 += 1;
            self.bytes.truncate(before);
            return Ok(());
        }
        self.num_files += usize::from(bytes > 0);
        self.check_tokens(before, vocab)
    }

    /// Checks the file whose bytes are `before..`.
    fn check_tokens(&self, before: usize, vocab: usize) -> Result<(), Problem> {
        let (width, bytes) = (self.width, self.bytes.len() - before);
        if !bytes.is_multiple_of(width) {
            return Err(Problem::PartialToken { bytes, width });
        }
        let first = before / width;
        let unknown = (first..self.num_tokens()).find(|&i| self.token(i) as usize >= vocab);
        unknown.map_or(Ok(()), |i| {
            Err(Problem::TokenOutOfVocab { index: i - first, token: self.token(i), vocab })
        })
    }

    fn check_lengths(&self, train: &str, validation: Option<&str>) -> Result<(), DataError> {
        let (total, seq_len) = (self.num_tokens(), self.seq_len);
        let held_out = total - self.split;
        let (key, text, part, tokens) = match validation {
            _ if self.split <= seq_len => ("data.train", train, "training", self.split),
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
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dataset({})", self.describe())
    }
}

fn in_key(key: &'static str) -> impl FnOnce(Failure) -> DataError {
    move |(path, problem)| DataError { key, path: absolute(&path).unwrap_or(path), problem }
}

fn at(path: &Path) -> impl FnOnce(Problem) -> Failure {
    |problem| (path.to_owned(), problem)
}

fn warn_of_overlap(train: &[PathBuf], validation: &[PathBuf]) {
    let train: Vec<_> = train.iter().filter_map(|file| file.canonicalize().ok()).collect();
    for file in validation.iter().filter_map(|file| file.canonicalize().ok()) {
        if train.contains(&file) {
            let file = file.display();
            tracing::warn!(
                "{file} is in data.train and in data.validation: evaluation is not held out"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::files::tests::{TREE, folder, path};
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// `train` of bytes in windows of 4, a quarter held out.
    fn open(train: &str) -> Result<Dataset, DataError> {
        Dataset::open(train, None, DataFormat::Bytes, 0.25, 256, 4)
    }

    fn error(result: Result<Dataset, DataError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_directory_gives_its_text_in_sorted_path_order() {
        let folder = folder(&TREE);
        symlink(folder.path().join("b.txt"), folder.path().join("link.txt")).unwrap();
        symlink(folder.path(), folder.path().join("loop")).unwrap();
        let data = Dataset::open(&path(&folder, ""), None, DataFormat::Bytes, 0.5, 256, 3).unwrap();
        assert_eq!(data.bytes, b"ddzzaabb");
        assert_eq!(
            data.describe(),
            "4 files, 8 bytes, 8 tokens: 4 to train, 4 held out; \
             skipped 0 over 8 MiB and 1 not UTF-8"
        );
    }

    #[test]
    fn a_directory_leaves_long_files_out_and_a_named_file_may_be_long_and_binary() {
        let long = vec![0xff; MAX_TEXT_FILE as usize + 1];
        let folder = folder(&[("long.txt", &long)]);
        let message = error(open(&path(&folder, "")));
        assert!(message.contains("skipped 1 over 8 MiB and 0 not UTF-8"), "{message}");
        assert_eq!(open(&path(&folder, "long.txt")).unwrap().bytes, long);
    }

    #[test]
    fn what_gives_no_text_is_refused_with_key_absolute_path_and_remedy() {
        let folder = folder(&[("empty.txt", b""), ("sub/.hidden", b"x"), ("none", b"")]);
        let root = folder.path().to_str().unwrap();
        for (name, text) in [
            ("missing.txt", "missing.txt: does not exist"),
            ("*.md", "*.md: no file matches"),
            ("missing/*", "missing/*: no file matches"),
            ("empty.txt", "empty.txt: empty"),
            ("e*", "e*: empty"),
            ("sub", "sub: no usable file"),
            ("empty.txt/x", "empty.txt/x: cannot read it: Not a directory"),
        ] {
            let message = error(open(&path(&folder, name)));
            assert!(message.starts_with(&format!("data.train: {root}/{text}")), "{message}");
        }
        assert!(error(open("")).contains("the key is empty"));
        assert!(error(open("/dev/null")).contains("/dev/null: neither a regular file"));
        assert!(error(open("missing-é")).contains(env!("CARGO_MANIFEST_DIR")));
        let train = folder.path().join("train.txt");
        fs::write(&train, "0123456789").unwrap();
        let (train, missing) = (train.to_str().unwrap(), path(&folder, "missing"));
        let result = Dataset::open(train, Some(&missing), DataFormat::Bytes, 0.1, 256, 4);
        assert!(error(result).starts_with(&format!("data.validation: {missing}: does not exist")));
    }

    #[test]
    fn a_file_without_read_permission_is_an_error_also_inside_a_directory() {
        let folder = folder(&[("a.txt", b"0123456789"), ("b.txt", b"0123456789")]);
        let locked = folder.path().join("b.txt");
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).unwrap();
        if File::open(&locked).is_ok() {
            println!("skipped: root reads everything");
            return;
        }
        for name in ["b.txt", ""] {
            let message = error(open(&path(&folder, name)));
            assert!(message.contains("b.txt: cannot read it: Permission denied"), "{message}");
        }
    }

    #[test]
    fn tokens_are_little_endian_whole_and_below_the_vocabulary() {
        let folder = folder(&[
            ("u16.bin", &[1, 0, 0, 1, 2, 0, 3, 0, 4, 0, 5, 0]),
            ("u32.bin", &[1, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]),
            ("odd.bin", &[1, 0, 0]),
        ]);
        let open =
            |name, format, vocab| Dataset::open(&path(&folder, name), None, format, 0.5, vocab, 1);
        let data = open("u16.bin", DataFormat::U16, 257).unwrap();
        assert_eq!((0..6).map(|i| data.token(i)).collect::<Vec<_>>(), [1, 256, 2, 3, 4, 5]);
        let data = open("u32.bin", DataFormat::U32, 257).unwrap();
        assert_eq!((0..4).map(|i| data.token(i)).collect::<Vec<_>>(), [1, 256, 2, 3]);
        let message = error(open("u16.bin", DataFormat::U16, 256));
        assert!(message.contains("u16.bin: token 1 is 256, but model.vocab is 256"), "{message}");
        let message = error(open("u32.bin", DataFormat::U32, 3));
        assert!(message.contains("u32.bin: token 1 is 256, but model.vocab is 3"), "{message}");
        let message = error(open("odd.bin", DataFormat::U16, 9));
        assert!(message.contains("3 bytes are no whole number of 2-byte tokens"), "{message}");
        assert!(error(open("u16.bin", DataFormat::Bytes, 5)).contains("token 10 is 5"));
    }

    #[test]
    fn a_part_shorter_than_a_window_is_refused_with_the_arithmetic() {
        let folder = folder(&[("train", b"0123456789"), ("long", b"01234567890123456789")]);
        let open = |validation: Option<&str>, fraction, seq_len| {
            let validation = validation.map(|name| path(&folder, name));
            let train = path(&folder, "train");
            Dataset::open(&train, validation.as_deref(), DataFormat::Bytes, fraction, 256, seq_len)
        };
        let message = error(open(None, 0.1, 9));
        assert!(
            message.contains("training part has 9 tokens (10 in all - 1 in the other"),
            "{message}"
        );
        assert!(
            message.contains("needs seq_len + 1 = 10; lower model.seq_len to at most 8"),
            "{message}"
        );
        let message = error(open(None, 0.2, 2));
        assert!(
            message.contains("held-out part has 2 tokens (10 in all - 8 in the other"),
            "{message}"
        );
        assert!(error(open(Some("long"), 0.1, 10)).starts_with("data.train"));
        assert!(open(Some("train"), 0.1, 9).is_ok());
        assert!(open(None, 0.5, 4).is_ok());
    }

    #[test]
    fn samples_are_pure_cover_the_training_part_and_stay_inside_it() {
        let folder = folder(&[("t", b"0123456789abcdefghij")]);
        let data = open(&path(&folder, "t")).unwrap(); // 15 to train: starts 0..=10
        let starts: Vec<_> = (0..400).map(|i| data.sample(7, 1 + i / 20, i % 20)).collect();
        assert_eq!((starts.iter().min(), starts.iter().max()), (Some(&0), Some(&10)));
        assert!((0..11).all(|start| starts.contains(&start)));
        assert_eq!(starts[33], data.sample(7, 2, 13));
        assert_ne!(
            starts,
            (0..400).map(|i| data.sample(8, 1 + i / 20, i % 20)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn targets_are_the_next_tokens_of_the_training_part_only() {
        let folder = folder(&[("t", b"0123456789abcdefghij")]);
        let data = open(&path(&folder, "t")).unwrap();
        let (mut inputs, mut targets) = ([9; 4], [9; 4]);
        data.fill_train(10, &mut inputs, &mut targets);
        assert_eq!((inputs, targets), (b"abcd".map(i32::from), b"bcde".map(i32::from)));
    }

    #[test]
    fn evaluation_predicts_every_held_out_token_but_the_first_exactly_once() {
        let folder = folder(&[("t", b"0123456789"), ("v", b"abcdefghijk")]);
        let (train, validation) = (path(&folder, "t"), path(&folder, "v"));
        for seq_len in 1..=9 {
            let data =
                Dataset::open(&train, Some(&validation), DataFormat::Bytes, 0.1, 256, seq_len)
                    .unwrap();
            let (mut seen, mut windows) = (Vec::new(), 0);
            loop {
                let (mut inputs, mut targets) = (vec![9; seq_len], vec![9; seq_len]);
                data.fill_eval(windows, &mut inputs, &mut targets);
                for (&input, &target) in inputs.iter().zip(&targets) {
                    let padded = (input, target) == (0, -1);
                    assert!(padded || target == input + 1, "{input} {target}");
                    seen.extend((!padded).then_some(target as u8));
                }
                if targets.iter().all(|&target| target == -1) {
                    break;
                }
                windows += 1;
            }
            assert_eq!(seen, b"bcdefghijk");
            assert_eq!((windows, data.num_eval_targets()), (data.num_eval_windows(), 10));
        }
    }

    #[test]
    fn the_last_tenth_is_held_out_by_default() {
        let text: Vec<u8> = (0..200).collect();
        let folder = folder(&[("t", &text)]);
        let data =
            Dataset::open(&path(&folder, "t"), None, DataFormat::Bytes, 0.1, 256, 4).unwrap();
        assert_eq!((data.split, data.num_eval_targets()), (180, 19));
        assert_eq!(data.describe(), "1 file, 200 bytes, 200 tokens: 180 to train, 20 held out");
    }
}
