//! Facts about the data without its tokens: whether the files exist, what they seem to hold, and
//! their sizes. Also compares files that onebox has written with their hashes.

use super::containers::Preview;
use super::megatron::Index;
use super::open::open_regular;
use super::problem::{DataError, Failure, Problem, at, in_key};
use super::progress::Progress;
use super::read::{FileUse, named};
use super::store::TokenFile;
use super::{CorpusSplit, kind, lengths, mask, prepared};
use config::{Config, DataConfig, Packing};
use std::fs::File;
use std::path::Path;

/// Facts about the training and validation files.
#[derive(Clone, Debug, Default)]
pub struct DataInspection {
    /// Bytes to read; for a directory this includes files that later turn out not to be UTF-8.
    pub bytes: u64,
    /// Number of tokens in token files.
    pub tokens: usize,
    /// Number of documents in token files, if samples are not windows.
    pub documents: u64,
    /// Whether a mask next to a token file says which tokens count.
    pub is_masked: bool,
    /// Size of the longest file, in bytes.
    pub longest: u64,
    /// Whether a file is packed, so that its length is estimated from its beginning.
    pub is_estimated: bool,
    /// The beginning of the first text file.
    pub sample: String,
}

impl DataInspection {
    /// Opens every file and reads its beginning. `warn` logs the warnings of `Corpus::open`.
    pub fn at(config: &Config, warn: bool) -> Result<Self, DataError> {
        let (data, mut look) = (&config.data, Self::default());
        if data.train.is_empty() {
            return Err(in_key("data.train")(at(Path::new(""))(Problem::NotSet)));
        }
        for (key, text) in super::named(data) {
            let before = look.tokens;
            look.part(text, data, warn).map_err(in_key(key))?;
            let known = data.tokenizer.is_none() || !data.format.is_text();
            if known && !look.is_estimated && data.packing == Packing::Windows {
                let tokens = look.tokens - before;
                let (parts, split) = match (key, data.validation.is_empty()) {
                    ("data.train", true) => {
                        let fraction = data.validation_fraction;
                        (CorpusSplit::Cut(text, fraction), lengths::to_train(tokens, fraction))
                    }
                    ("data.train", false) => (CorpusSplit::Train(text), tokens),
                    _ => (CorpusSplit::Validation(text), 0),
                };
                lengths::check(parts, split, tokens, config.model.seq_len)?;
            }
        }
        Ok(look)
    }

    /// Compares all bytes of prepared tokens with their recorded hashes.
    pub fn compare(data: &DataConfig, progress: &dyn Progress) -> Result<(), DataError> {
        for (key, text) in super::named(data).filter(|_| !data.format.is_text()) {
            let (files, source) = named(text, &data.format, false).map_err(in_key(key))?;
            let bytes = files.iter().filter_map(|file| file.metadata().ok());
            let reading = progress.begin("comparing bytes", bytes.map(|file| file.len()).sum());
            for folder in prepared::folders(text, &files, source.from_directory) {
                prepared::check_bytes(folder, &|bytes| reading.add(bytes)).map_err(in_key(key))?;
            }
        }
        Ok(())
    }

    fn part(&mut self, text: &str, data: &DataConfig, warn: bool) -> Result<(), Failure> {
        let (files, mut source) = named(text, &data.format, warn)?;
        let before = self.bytes;
        for path in &files {
            let mut file = open_regular(path).map_err(at(path))?;
            match source.takes(path, &mut file).map_err(at(path))? {
                None => {}
                Some(FileUse::Whole) => self.add(path, file, data).map_err(at(path))?,
                Some(FileUse::Unpacked(container)) => {
                    let packed = |error| Problem::Packed { what: container.what(), error };
                    match container.preview(&file).map_err(packed) {
                        Ok(preview) => self.add_packed(preview, data),
                        Err(problem) => {
                            let bytes = file.metadata().map_or(0, |file| file.len());
                            source.leave_out(path, bytes, problem).map_err(at(path))?;
                        }
                    }
                }
            }
        }
        source.end(Path::new(text), self.bytes - before).map(drop)
    }

    /// Adds a packed file, whose length is estimated.
    fn add_packed(&mut self, Preview { head, bytes }: Preview, data: &DataConfig) {
        if data.tokenizer.is_some() && self.sample.is_empty() {
            self.sample = String::from_utf8_lossy(&head).into_owned();
        }
        self.bytes += bytes;
        self.tokens += bytes as usize;
        self.longest = self.longest.max(bytes);
        self.is_estimated = true;
    }

    fn add(&mut self, path: &Path, mut file: File, data: &DataConfig) -> Result<(), Problem> {
        let bytes = file.metadata().map_err(Problem::Unreadable)?.len();
        mask::check_use(path, &data.format, data.packing)?;
        if data.tokenizer.is_some() && data.format.is_text() && self.sample.is_empty() {
            let head = kind::head(&mut file).map_err(Problem::Unreadable)?;
            self.sample = String::from_utf8_lossy(&head).into_owned();
        }
        let width = match data.format.width() {
            Some(width) => width,
            None => {
                let tokens = TokenFile::new(path, file).map_err(Problem::Unreadable)?;
                let index = Index::open_for(&tokens)?;
                if data.packing != Packing::Windows {
                    self.documents += index.num_documents();
                    self.is_masked |= mask::path_of(path).exists();
                }
                index.width()
            }
        };
        if !bytes.is_multiple_of(width as u64) {
            return Err(Problem::PartialToken { bytes: bytes as usize, width });
        }
        self.bytes += bytes;
        self.tokens += bytes as usize / width;
        self.longest = self.longest.max(bytes);
        Ok(())
    }
}
