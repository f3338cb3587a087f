//! `tokenizer.json` of Hugging Face's tokenizers: converts text to tokens and back.

use super::cache_file::hash_of_parts;
use super::listed_tokens::{FILES, ListedToken, listed};
use super::open::unopened;
use super::split_points::Cuts;
use super::untrusted::{check_growth, guarded, with_places};
use super::{Problem, text_model, untrusted};
use config::tokenizers::unread_tokenizers;
use config::transformers::pointer;
use files::foreign_text::{foreign, reason};
use files::input;
use std::collections::BTreeSet;
use std::fmt;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use tokenizers::{Model as _, ModelWrapper, OffsetReferential, OffsetType, PreTokenizer as _};

/// Longest tokenizer.json that is read, in bytes.
const LONGEST: u64 = 256 << 20;

/// Largest number of tokens that wait for the end of a character. A character has at most 4 bytes,
/// so more tokens are not text, and decoding them all with each token costs quadratic time.
const HELD: usize = 16;

/// A tokenizer whose tokens are a function of the text alone.
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    bytes: Vec<u8>,
    /// Hash of the files from which it was read.
    sources: u128,
    /// Tokens that only other files of the folder list.
    listed: BTreeSet<u32>,
    vocab: usize,
    cuts: Result<Cuts, String>,
    /// The model for untrusted texts; present if a control token is a piece of the model.
    plain: Option<ModelWrapper>,
    /// Whether it finds control tokens in normalized text.
    normalizes: bool,
}

/// Names and contents of files.
type Files = [(&'static str, Vec<u8>)];

impl Tokenizer {
    /// Reads `path`, a tokenizer.json or its folder, and the tokens that the other files of the
    /// folder list, as transformers does. Truncation and padding of the file are ignored, so a text
    /// is always encoded whole.
    ///
    /// # Errors
    /// [`Problem`] if the file is unreadable, no tokenizer, random (BPE dropout) or above the
    /// limits for the library.
    pub fn open(path: &Path) -> Result<Self, Problem> {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        let bytes = match path.is_dir() {
            true => read(&path.join("tokenizer.json")).map_err(|problem| match problem {
                Problem::Missing => Problem::NoTokenizerJson(unread_tokenizers(path)),
                other => other,
            })?,
            false => read(path)?,
        };
        let mut other_files = Vec::new();
        for name in FILES {
            match read(&folder.join(name)) {
                Err(Problem::Missing) => {}
                Err(problem) => return Err(Problem::BadListed(format!("{name}: {problem}"))),
                Ok(bytes) => other_files.push((name, bytes)),
            }
        }
        Self::from_files(bytes, &other_files)
    }

    /// Reads the file that a run keeps, which needs no other files.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_kept(path: &Path) -> Result<Self, Problem> {
        Self::from_files(read(path)?, &[])
    }

    #[cfg(test)]
    pub(super) fn from_bytes(bytes: Vec<u8>) -> Result<Self, Problem> {
        Self::from_files(bytes, &[])
    }

    pub(super) fn from_files(bytes: Vec<u8>, other_files: &Files) -> Result<Self, Problem> {
        let wrong = |why: String| Problem::NoTokenizer(why);
        let sources = sources(&bytes, other_files);
        let FullTokenizer { inner, file, bytes, listed } = FullTokenizer::of(bytes, other_files)?;
        let cuts = Cuts::of(&file);
        drop(file);
        let largest = inner.get_vocab(true).into_values().max();
        let vocab = largest.map_or(0, |id| id as usize + 1);
        if vocab == 0 {
            return Err(wrong("it has no token".into()));
        }
        let plain = text_model::model(&inner).map_err(wrong)?;
        let added = inner.get_added_tokens_decoder();
        let normalizes = inner.get_normalizer().is_some()
            && added.values().any(|token| token.special && token.normalized);
        let inner = Arc::new(inner);
        untrusted::try_out(&inner).map_err(wrong)?;
        Ok(Self { inner, bytes, sources, listed, vocab, cuts, plain, normalizes })
    }

    /// Whether this is the tokenizer of `file`, a tokenizer.json, and of the files that
    /// `other_files` returns by name.
    pub(crate) fn is_of<'a>(
        &self,
        file: &[u8],
        other_files: impl Fn(&str) -> Option<&'a [u8]>,
    ) -> bool {
        let other_files = FILES.map(|name| other_files(name).map(|bytes| (name, bytes.to_vec())));
        let other_files: Vec<_> = other_files.into_iter().flatten().collect();
        self.sources == sources(file, &other_files)
            || FullTokenizer::of(file.to_vec(), &other_files)
                .is_ok_and(|whole| whole.bytes == self.bytes)
    }

    /// Checks that all tokens are below `vocab`.
    ///
    /// # Errors
    /// [`Problem`] with the largest token.
    pub fn fits(&self, vocab: usize) -> Result<(), Problem> {
        if self.vocab <= vocab {
            return Ok(());
        }
        let largest = u32::try_from(self.vocab - 1).unwrap_or(u32::MAX);
        let text = self.inner.id_to_token(largest).unwrap_or_default();
        let listed = self.listed.contains(&largest);
        Err(Problem::TokenizerVocab { largest, text, vocab, listed })
    }

    /// The bytes of the tokenizer.json, including the tokens from the other files.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The largest token plus 1.
    pub const fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of a token on the disk.
    pub(super) const fn token_bytes(&self) -> usize {
        if self.vocab <= 1 << 16 { 2 } else { 4 }
    }

    /// The places where a text can be cut, or the reason why none is known.
    pub(super) const fn cuts(&self) -> Result<&Cuts, &String> {
        self.cuts.as_ref()
    }

    /// Whether a text can be cut.
    pub const fn has_cuts(&self) -> bool {
        self.cuts.is_ok()
    }

    /// The tokens of a text, without special tokens around it.
    ///
    /// # Errors
    /// The error of the tokenizer library.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        self.encode_with(text, false)
    }

    /// Tokens of a prompt, with the special tokens that the tokenizer adds, such as a begin token.
    ///
    /// # Errors
    /// As for [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, String> {
        self.encode_with(text, true)
    }

    /// The tokens of a text; with `special`, includes the tokens that the tokenizer puts around it.
    ///
    /// # Errors
    /// The error of the tokenizer library, or more tokens than a text can have.
    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, String> {
        let encoded = guarded("over the text", || self.inner.encode_fast(text, special))?;
        let tokens = encoded.map_err(|e| e.to_string())?.get_ids().to_vec();
        check_growth(tokens.len(), text)?;
        Ok(tokens)
    }

    /// Tokens of a text, each with its range of bytes in the text.
    pub(super) fn encode_with_places(
        &self,
        text: &str,
        special: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, String> {
        with_places(guarded("over the text", || self.inner.encode(text, special))?, text)
    }

    /// Like [`encode_with_places`](Self::encode_with_places), for a text with plain control texts:
    /// `cut` is inside of them and gets removed; `letter` gives the original of a replaced
    /// one-letter control text. Byte ranges refer to `text` as given.
    pub(super) fn encode_cut(
        &self,
        text: &str,
        cut: char,
        letter: &dyn Fn(char) -> char,
        special: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, String> {
        let inner = &self.inner;
        let model = self.plain.as_ref().unwrap_or_else(|| inner.get_model());
        // Same steps as `encode` of the library, but with the cuts.
        let encode = || {
            let added = inner.get_added_vocabulary();
            let mut parts = added.extract_and_normalize(inner.get_normalizer(), text);
            parts.normalize(|part| {
                part.filter(|c| c != cut);
                part.map(letter);
                Ok(())
            })?;
            if let Some(into_words) = inner.get_pre_tokenizer() {
                into_words.pre_tokenize(&mut parts)?;
            }
            model.tokenize_in_pretokenized(&mut parts, None)?;
            let encoded = parts.into_encoding(None, 0, OffsetType::Byte)?;
            inner.post_process(encoded, None, special)
        };
        with_places(guarded("over the text", encode)?, text)
    }

    /// Tokens of a text with active control tokens, separate from those that the tokenizer adds.
    pub(super) fn encode_around(&self, text: &str) -> Result<TokenSpans, String> {
        let encoded = guarded("over the text", || self.inner.encode(text, true))?;
        let encoded = encoded.map_err(|e| e.to_string())?;
        let is_put: Vec<bool> =
            encoded.get_special_tokens_mask().iter().map(|put| *put == 1).collect();
        let mut text = with_places(Ok(encoded), text)?;
        let back = is_put.iter().rposition(|put| !put).map_or(text.len(), |last| last + 1);
        let back = text.split_off(back).into_iter().map(|(token, _)| token).collect();
        let front = is_put.iter().position(|put| !put).unwrap_or(0);
        let front = text.drain(..front).map(|(token, _)| token).collect();
        Ok(TokenSpans { front, text, back })
    }

    /// The first control token that the tokenizer finds in the text after normalization.
    pub(super) fn normalized_control(&self, text: &str) -> Result<Option<Range<usize>>, String> {
        if !self.normalizes {
            return Ok(None);
        }
        let added = self.inner.get_added_vocabulary();
        let find = || {
            let parts = added.extract_and_normalize(self.inner.get_normalizer(), text);
            let all = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
            let mut found = all.into_iter().filter_map(|(_, (start, end), tokens)| {
                let id = tokens.as_ref()?.first()?.id;
                let special = added.get_added_tokens_decoder().get(&id).is_some_and(|t| t.special);
                special.then_some(start..end)
            });
            found.next()
        };
        guarded("over the text", find)
    }

    /// Whether a control token is a piece of the model that a plain text can produce.
    pub(super) const fn has_control_pieces(&self) -> bool {
        self.plain.is_some()
    }

    /// The texts of the control tokens.
    pub(super) fn control(&self) -> Vec<String> {
        let added = self.inner.get_added_tokens_decoder().into_values();
        let control = added.filter(|token| token.special && !token.content.is_empty());
        let mut control: Vec<_> = control.map(|token| token.content).collect();
        control.sort();
        control
    }

    /// The token for the whole text, if one exists.
    pub(super) fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Whether a token is a control token, such as the end of a turn, and not text like one.
    pub fn is_control(&self, token: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&token).is_some_and(|added| added.special)
    }

    /// The text of a single token.
    #[cfg(test)]
    pub(super) fn text_of(&self, token: u32) -> String {
        let mut decoder = self.decoder();
        decoder.push(token) + &decoder.rest()
    }

    /// A decoder for tokens that arrive one by one.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder { inner: &self.inner, tokens: Vec::new(), num_returned: 0 }
    }
}

/// Tokens of a text with byte ranges, separate from those that the tokenizer adds around it.
pub(super) struct TokenSpans {
    pub(super) front: Vec<u32>,
    pub(super) text: Vec<(u32, Range<usize>)>,
    pub(super) back: Vec<u32>,
}

/// A tokenizer.json with the tokens that the other files list.
struct FullTokenizer {
    inner: tokenizers::Tokenizer,
    file: serde_json::Value,
    bytes: Vec<u8>,
    /// Tokens that tokenizer.json itself does not have.
    listed: BTreeSet<u32>,
}

impl FullTokenizer {
    fn of(bytes: Vec<u8>, other_files: &Files) -> Result<Self, Problem> {
        let wrong = |why: String| Problem::NoTokenizer(why);
        if bytes.len() as u64 > LONGEST {
            return Err(wrong(format!("it is longer than {}", topology::format_bytes(LONGEST))));
        }
        if let Some(instead) = pointer(&bytes) {
            return Err(wrong(instead.to_string()));
        }
        let file: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|e| wrong(reason(e).to_string()))?;
        if file["model"]["dropout"].as_f64().is_some_and(|p| p > 0.0) {
            return Err(wrong(
                "its model.dropout is not 0, so that each time gives other tokens".into(),
            ));
        }
        untrusted::check(&file).map_err(wrong)?;
        let inner = load(&bytes).map_err(wrong)?;
        let own = inner.get_added_tokens_decoder().into_iter().collect();
        let read = |name: &str| {
            other_files.iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes.clone())
        };
        let all = listed(&read, &own).map_err(Problem::BadListed)?;
        let whole = Self { inner, file, bytes, listed: BTreeSet::new() };
        match all.iter().all(|(_, token)| own.values().any(|other| other == token)) {
            true => Ok(whole),
            false => whole.with(&all),
        }
    }

    /// Adds the tokens `all`, with the numbers that transformers gives them.
    fn with(mut self, all: &[ListedToken]) -> Result<Self, Problem> {
        let own: BTreeSet<u32> = self.inner.get_added_tokens_decoder().into_keys().collect();
        let tokens = all.iter().map(|(_, token)| token.clone()).collect::<Vec<_>>();
        let add = || self.inner.add_tokens(tokens);
        let added = guarded("over the tokens that files beside it list", add);
        let added = added.and_then(|added| added.map_err(|e| reason(e).to_string()));
        added.map_err(Problem::BadListed)?;
        for (number, token) in all {
            let (text, given) = (&token.content, self.inner.token_to_id(&token.content));
            if let (Some(number), Some(given)) = (number, given)
                && *number != given
            {
                tracing::warn!(
                    "a file beside tokenizer.json lists \"{}\" as token {number}, and it is {given}, as in transformers",
                    foreign(text)
                );
            }
        }
        let bad = |why: String| Problem::BadListed(why);
        let vocabulary = serde_json::to_value(self.inner.get_added_vocabulary());
        self.file["added_tokens"] = vocabulary.map_err(|e| bad(e.to_string()))?;
        self.bytes = self.file.to_string().into_bytes();
        let again = load(&self.bytes).map_err(bad)?;
        let numbers = self.inner.get_added_tokens_decoder();
        if again.get_added_tokens_decoder() != numbers {
            return Err(bad("they would have other numbers in a tokenizer.json, since its model leaves some out: save the tokenizer anew with transformers (save_pretrained)".into()));
        }
        self.listed = numbers.into_keys().filter(|number| !own.contains(number)).collect();
        self.inner = again;
        Ok(self)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    input::bytes(path, LONGEST).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => {
            let longest = topology::format_bytes(LONGEST);
            Problem::NoTokenizer(format!("it is longer than {longest}"))
        }
        _ => unopened(error),
    })
}

/// The tokenizer of a file, without truncation and padding.
fn load(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let made = guarded("over the file", || tokenizers::Tokenizer::from_bytes(bytes))?;
    let mut inner = made.map_err(|e| reason(e).to_string())?;
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|e| reason(e).to_string())?;
    Ok(inner)
}

/// 128-bit xxh3 hash of a tokenizer.json and the other files.
fn sources(file: &[u8], other_files: &Files) -> u128 {
    let other_files =
        other_files.iter().flat_map(|(name, bytes)| [name.as_bytes(), bytes.as_slice()]);
    hash_of_parts([file].into_iter().chain(other_files))
}

/// Converts tokens that arrive one by one into text. A single token may be a part of a character,
/// and its text may depend on the tokens before it.
#[derive(Debug)]
pub struct Decoder<'a> {
    inner: &'a tokenizers::Tokenizer,
    /// Tokens of the last returned text, followed by newer tokens.
    tokens: Vec<u32>,
    /// Number of tokens of the last returned text.
    num_returned: usize,
}

impl Decoder<'_> {
    /// Adds `token`; returns the new complete characters. Undecodable bytes become U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        self.tokens.push(token);
        self.piece(false)
    }

    /// Ends the text; each incomplete character becomes U+FFFD.
    pub fn rest(&mut self) -> String {
        self.piece(true)
    }

    fn piece(&mut self, last: bool) -> String {
        let (before, new) = self.tokens.split_at(self.num_returned);
        let (Ok(before), Ok(all), Ok(alone)) =
            (self.text(before), self.text(&self.tokens), self.text(new))
        else {
            self.tokens.clear();
            self.num_returned = 0;
            return char::REPLACEMENT_CHARACTER.into();
        };
        // Some decoders change earlier text next to an incomplete character; then the new tokens
        // count.
        let piece = all.strip_prefix(&before).unwrap_or(&alone);
        let incomplete = piece.is_empty() || piece.ends_with(char::REPLACEMENT_CHARACTER);
        if incomplete && !last && new.len() < HELD {
            return String::new();
        }
        let piece = piece.to_owned();
        self.tokens.drain(..self.num_returned);
        self.num_returned = self.tokens.len();
        piece
    }

    fn text(&self, tokens: &[u32]) -> Result<String, String> {
        let text = guarded("over tokens", || self.inner.decode(tokens, false))?;
        text.map_err(|e| e.to_string())
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab)
    }
}

#[cfg(test)]
mod tests;
