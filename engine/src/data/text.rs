//! A data set of text through a tokenizer.

use super::checked::{Checks, Texts, failure};
use super::problem::{Failure, at, in_key};
use super::read::named;
use super::tokenizer::Tokenizer;
use super::tokens::Cache;
use super::{Corpus, DataError, Parts, Problem};
use crate::config::DataFormat;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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

impl Corpus {
    /// [`open`](Self::open), where files are text and tokens what the tokenizer makes of each.
    ///
    /// # Errors
    /// As there, and for a tokenizer with tokens that `vocab` has not, or text that is not UTF-8.
    pub fn open_text(
        parts: Parts<'_>,
        with: &Tokenized<'_>,
        vocab: usize,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        let tokenizer = with.tokenizer.vocab();
        if tokenizer > vocab {
            let problem = Problem::TokenizerVocab { tokenizer, vocab };
            return Err(in_key("data.tokenizer")(at(with.path)(problem)));
        }
        let width = if tokenizer <= 1 << 16 { 2 } else { 4 };
        let mut data = Self { text: Some(0), ..Self::of_width(width, seq_len) };
        data.fill_parts(parts, Checks::none(), &mut |data, text| {
            data.read_text(text, with, vocab)
        })?;
        Ok(data)
    }

    /// Appends the tokens of all files that `text` names, in order; returns the files.
    fn read_text(
        &mut self,
        text: &str,
        with: &Tokenized<'_>,
        vocab: usize,
    ) -> Result<Vec<PathBuf>, Failure> {
        let (files, mut source) = named(text, &with.format, true)?;
        let mut texts = Vec::new();
        let checks = Checks { cache: with.cache, vocab, quiet: true };
        let (began, mut known) = (SystemTime::now(), Texts::of(text, checks));
        for path in &files {
            let file = source.open(path, Some("leave it out"), &mut known).map_err(at(path))?;
            let Some(file) = file.filter(|file| file.stamp.bytes > 0) else { continue };
            let bytes = file.stamp.bytes;
            if bytes > MAX_FILE {
                return Err(at(path)(Problem::TextTooLong { bytes, most: MAX_FILE }));
            }
            let text = file.read_whole().map_err(failure)?;
            let text = String::from_utf8(text).map_err(|error| {
                let offset = error.utf8_error().valid_up_to() as u64;
                at(path)(Problem::Changed { offset, why: "it was text a moment ago".into() })
            })?;
            texts.push((path, text));
        }
        known.keep(began);
        self.num_files += texts.len();
        let bytes: usize = texts.iter().map(|(_, text)| text.len()).sum();
        let (paths, texts): (Vec<_>, Vec<_>) =
            texts.iter().map(|(path, text)| (*path, text.as_str())).unzip();
        let tokens = with.cache.tokens(with.tokenizer, &texts);
        let tokens = tokens.map_err(|(i, why)| at(paths[i])(Problem::NoTokenizer(why)))?;
        // Text may come to no tokens at all.
        let taken = if tokens.is_empty() { 0 } else { bytes as u64 };
        self.left_out.append(source.end(Path::new(text), taken).map_err(at(Path::new(text)))?);
        if let Some(index) = tokens.iter().position(|token| *token as usize >= vocab) {
            let which = format!("token {index}");
            let problem = Problem::TokenOutOfVocab { which, token: tokens[index], vocab };
            return Err(at(Path::new(text))(problem));
        }
        self.push_tokens(&tokens);
        self.text = self.text.map(|all| all + bytes);
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

    fn open(train: &str, vocab: usize) -> Result<Corpus, DataError> {
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
        Corpus::open_text(Parts::Cut(train, 0.25), &with, vocab, 4)
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
        assert_eq!(data.bytes(), both.bytes());
        let first = open(&path(&folder, "a.txt"), 300).unwrap();
        assert!(data.bytes().starts_with(&first.bytes()));
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
