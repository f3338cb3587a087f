//! A data set of text through a tokenizer.

use super::problem::{Failure, at, in_key};
use super::read::named;
use super::tokenizer::Tokenizer;
use super::tokens::Cache;
use super::{DataError, Dataset, Problem};
use crate::config::DataFormat;
use std::path::{Path, PathBuf};

/// Longest file, in bytes. A tokenizer takes some 240 times as much memory for a moment.
pub(super) const MAX_FILE: u64 = 256 << 20;

/// How texts become tokens.
#[derive(Debug)]
pub struct Tokenized<'a> {
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// What its file is called, for messages.
    pub path: &'a Path,
    /// Where tokens are kept.
    pub cache: &'a Cache,
    /// `Auto`, or `Bytes` for who insists on files that seem to be no text.
    pub format: DataFormat,
}

impl Dataset {
    /// [`open`](Self::open), where files are text and tokens what the tokenizer makes of each.
    ///
    /// # Errors
    /// As there, and for a tokenizer with tokens that `vocab` has not, or text that is not UTF-8.
    pub fn open_text(
        (train, validation): (&str, Option<&str>),
        with: &Tokenized<'_>,
        validation_fraction: f32,
        vocab: usize,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        let tokenizer = with.tokenizer.vocab();
        if tokenizer > vocab {
            let problem = Problem::TokenizerVocab { tokenizer, vocab };
            return Err(in_key("data.tokenizer")(at(with.path)(problem)));
        }
        let width = if tokenizer <= 1 << 16 { 2 } else { 4 };
        let mut data = Self { width, text: Some(0), ..Self::none(seq_len) };
        let (parts, fraction) = ((train, validation), validation_fraction);
        data.fill_parts(parts, fraction, &mut |data, text| data.read_text(text, with, vocab))?;
        Ok(data)
    }

    /// Appends the tokens of all files that `text` names, in order; returns the files.
    fn read_text(
        &mut self,
        text: &str,
        with: &Tokenized<'_>,
        vocab: usize,
    ) -> Result<Vec<PathBuf>, Failure> {
        let (files, mut source) = named(text, &with.format, 256, true)?;
        let mut raw = Self::none(self.seq_len);
        let mut ends = Vec::new();
        for file in &files {
            let before = raw.bytes.len();
            raw.read_file(file, &mut source, Some("leave it out")).map_err(at(file))?;
            let bytes = (raw.bytes.len() - before) as u64;
            if bytes > MAX_FILE {
                return Err(at(file)(Problem::TextTooLong { bytes, most: MAX_FILE }));
            }
            ends.push(raw.bytes.len());
        }
        self.num_files += raw.num_files;
        let mut texts = Vec::new();
        let mut start = 0;
        for (file, end) in files.iter().zip(&ends) {
            let Ok(text) = str::from_utf8(&raw.bytes[start..*end]) else {
                unreachable!("{} was read as text", file.display());
            };
            texts.push(text);
            start = *end;
        }
        let tokens = with.cache.tokens(with.tokenizer, &texts);
        let tokens = tokens.map_err(|(i, why)| at(&files[i])(Problem::NoTokenizer(why)))?;
        // Text may come to no tokens at all.
        let taken = if tokens.is_empty() { 0 } else { raw.bytes.len() as u64 };
        self.left_out.append(source.end(Path::new(text), taken).map_err(at(Path::new(text)))?);
        if let Some(index) = tokens.iter().position(|token| *token as usize >= vocab) {
            let problem = Problem::TokenOutOfVocab { index, token: tokens[index], vocab };
            return Err(at(Path::new(text))(problem));
        }
        match self.width {
            2 => self.bytes.extend(tokens.iter().flat_map(|token| (*token as u16).to_le_bytes())),
            _ => self.bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes())),
        }
        self.text = self.text.map(|bytes| bytes + raw.bytes.len());
        Ok(files)
    }

    /// Bytes of text for each token, both parts together; none where bytes are tokens, or files hold them.
    pub fn bytes_per_token(&self) -> Option<f64> {
        self.text.map(|bytes| bytes as f64 / self.num_tokens() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::files::tests::{folder, path};
    use super::*;

    fn open(train: &str, vocab: usize) -> Result<Dataset, DataError> {
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizer-tiny.json");
        let tokenizer = Tokenizer::open(&file).unwrap();
        let cache = Cache::default();
        let with = Tokenized {
            tokenizer: &tokenizer,
            path: &file,
            cache: &cache,
            format: DataFormat::Auto,
        };
        Dataset::open_text((train, None), &with, 0.25, vocab, 4)
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
        // `the box` at the start of a file, after a blank: not one text.
        let both = open(&path(&folder, "[ab].txt"), 300).unwrap();
        assert_eq!(data.bytes, both.bytes);
        let first = open(&path(&folder, "a.txt"), 300).unwrap();
        assert_eq!(data.bytes[..first.bytes.len()], first.bytes);
        assert_eq!(data.token(first.num_tokens()), data.token(0));
        assert!(data.bytes_per_token().unwrap() > 2.0, "{data:?}");
        let said = data.describe();
        for text in ["2 files, 199 B", "bytes per token", "2 files (5 B) left out"] {
            assert!(said.contains(text), "{said}");
        }
        let refused =
            |name: &str, vocab| open(&path(&folder, name), vocab).unwrap_err().to_string();
        for (name, text) in [
            ("c.txt", "not UTF-8 (byte 0xff at offset 0)"),
            ("d.md", "ends inside a character (which begins at offset 3)"),
        ] {
            let said = refused(name, 300);
            assert!(said.contains(text) && said.ends_with("; or leave it out"), "{said}");
        }
        let small = refused("a.txt", 299);
        assert!(small.starts_with("data.tokenizer") && small.contains("model.vocab"), "{small}");
        assert!(small.contains("300"), "{small}");
    }
}
