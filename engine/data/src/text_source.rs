//! A data set of plain text that a tokenizer converts to tokens.

use super::checks::{self, Checks};
use super::chunks::{ChunkSizes, TextChunks, TextPosition};
use super::problem::{Failure, at, in_key};
use super::progress::Progress;
use super::read::{SourceFiles, named};
use super::store::{Store, TokenFile};
use super::token_cache::Cache;
use super::tokenizer::Tokenizer;
use super::{Corpus, CorpusSplit, DataError};
use config::DataFormat;
use std::path::{Path, PathBuf};

/// Settings for tokenizing text.
#[derive(Debug)]
pub struct TextSource<'a> {
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Path of the tokenizer's file, for messages.
    pub path: &'a Path,
    /// The cache for the tokens.
    pub cache: &'a Cache,
    /// `Auto`, or `Bytes` to use also files that seem not to be text.
    pub format: DataFormat,
    /// Sizes of parts and pieces.
    pub sizes: ChunkSizes,
    /// Receiver of the progress.
    pub progress: &'a dyn Progress,
}

/// The files of an entry: all paths, the closed text or row files, and the settings of opening.
/// `store` protects unpacked copies from removal.
pub(super) fn text_files(
    text: &str,
    format: &DataFormat,
    checks: Checks<'_>,
    store: &mut Store,
) -> Result<(Vec<PathBuf>, Vec<TokenFile>, SourceFiles), Failure> {
    let (paths, mut source) = named(text, format, true)?;
    let mut known = checks::TextVerdicts::of(text, checks);
    let mut files = Vec::new();
    for path in &paths {
        let file = source.open(path, Some("leave it out"), &mut known, store).map_err(at(path))?;
        files.extend(file.filter(|file| file.stamp.bytes > 0).map(TokenFile::closed));
    }
    known.keep();
    Ok((paths, files, source))
}

impl Corpus {
    /// Like [`open`](Self::open), for text files and the tokens of each by the tokenizer.
    ///
    /// # Errors
    /// As for `open`; or the tokenizer has tokens outside of `vocab`, or a text is not UTF-8.
    pub fn open_text(
        parts: CorpusSplit<'_>,
        with: &TextSource<'_>,
        vocab: usize,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        let fits = with.tokenizer.fits(vocab).map_err(at(with.path));
        fits.map_err(in_key("data.tokenizer"))?;
        let width = with.tokenizer.token_bytes();
        let mut data = Self { text: Some(0), ..Self::of_width(width, seq_len) };
        let checks = Checks { cache: with.cache, vocab, progress: with.progress, names_all: false };
        data.fill_parts(parts, checks, &mut |data, text| data.read_text(text, with, checks))?;
        Ok(data)
    }

    /// Appends the tokens of all files that `text` names, in order; returns the files.
    fn read_text(
        &mut self,
        text: &str,
        with: &TextSource<'_>,
        checks: Checks<'_>,
    ) -> Result<Vec<PathBuf>, Failure> {
        let (paths, files, source) = text_files(text, &with.format, checks, &mut self.store)?;
        let texts = TextChunks::new(&files, with.tokenizer, with.sizes);
        let bytes: u64 = files.iter().map(|file| file.stamp.bytes).sum();
        let reading = with.progress.begin("making tokens", bytes);
        let (before, mut from) = (self.store.num_tokens(), TextPosition::default());
        while from.file < files.len() {
            let part = texts.read(from)?;
            with.cache.add_part(&mut self.store, &texts, &part, &|bytes| reading.add(bytes))?;
            from = part.next;
        }
        drop(reading);
        self.num_files += files.len();
        // A text may have no tokens.
        let taken = if self.store.num_tokens() == before { 0 } else { bytes };
        self.left_out.append(source.end(Path::new(text), taken)?);
        self.text = self.text.map(|all| all + bytes as usize);
        Ok(paths)
    }

    /// Bytes of text per token, over both parts; `None` if bytes are tokens or files hold tokens.
    pub fn bytes_per_token(&self) -> Option<f64> {
        self.text.map(|bytes| bytes as f64 / self.num_tokens() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::data_files::tests::{folder, path};
    use super::super::progress::Silence;
    use super::*;

    fn open(train: &str, vocab: usize) -> Result<Corpus, DataError> {
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer-tiny.json");
        let tokenizer = Tokenizer::open(&file).unwrap();
        let cache = Cache::default();
        let with = TextSource {
            tokenizer: &tokenizer,
            path: &file,
            cache: &cache,
            format: DataFormat::Auto,
            sizes: ChunkSizes::default(),
            progress: &Silence,
        };
        Corpus::open_text(CorpusSplit::Cut(train, 0.25), &with, vocab, 4)
    }

    #[test]
    fn files_are_tokenized_each_by_itself() {
        let text = "the box holds the model ".repeat(8);
        let folder = folder(&[
            ("a.txt", text.as_bytes()),
            ("b.txt", b"the box"),
            ("c.txt", b"\xff"),
            ("d.md", b"caf\xc3"),
        ]);
        let data = open(&path(&folder, ""), 300).unwrap();
        // `the box` begins a file, or follows a blank: the two files are not one text.
        let both = open(&path(&folder, "[ab].txt"), 300).unwrap();
        assert_eq!(data.bytes(), both.bytes());
        let first = open(&path(&folder, "a.txt"), 300).unwrap();
        assert!(data.bytes().starts_with(&first.bytes()));
        assert_eq!(data.token(first.num_tokens()), data.token(0));
        assert!(data.bytes_per_token().unwrap() > 2.0, "{data:?}");
        let message = data.describe();
        for text in ["2 files, 199 B", "bytes per token", "2 files (5 B) left out"] {
            assert!(message.contains(text), "{message}");
        }
        let refused =
            |name: &str, vocab| open(&path(&folder, name), vocab).unwrap_err().to_string();
        for (name, text) in [
            ("c.txt", "not UTF-8 (byte 0xff at offset 0)"),
            ("d.md", "ends inside a character (which begins at offset 3)"),
        ] {
            let message = refused(name, 300);
            assert!(message.contains(text) && message.ends_with("; or leave it out"), "{message}");
        }
        let small = refused("a.txt", 299);
        assert!(small.starts_with("data.tokenizer") && small.contains("model.vocab"), "{small}");
        assert!(small.contains("300"), "{small}");
    }
}
