//! `tokenizer.json`, as Hugging Face's tokenizers write it: text to tokens and back.

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

/// Bytes of a file; more is none.
const LONGEST: u64 = 256 << 20;

/// Tokens that may wait for the end of a character. It has four bytes at most: more are no text, and to look at all of them with
/// each token takes the square of their number.
const HELD: usize = 16;

/// Read, and found to be a function of the text alone.
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    bytes: Vec<u8>,
    /// Of the files that it was read from.
    sources: u128,
    /// Tokens that only files beside it list.
    listed: BTreeSet<u32>,
    vocab: usize,
    cuts: Result<Cuts, String>,
    /// For texts of others, where a control token is a piece of its model.
    plain: Option<ModelWrapper>,
    /// It finds control tokens in a text that it has normalized.
    normalizes: bool,
}

/// Names and contents of files.
type Files = [(&'static str, Vec<u8>)];

impl Tokenizer {
    /// Reads `path`, a tokenizer.json or the folder of one, and the tokens that files beside it list, as transformers does. Truncation
    /// and padding, which it may ask for, are left out: a text is a text.
    ///
    /// # Errors
    /// [`Problem`] when it cannot be read, is none, draws lots (BPE dropout), or is more than the library can bear.
    pub fn open(path: &Path) -> Result<Self, Problem> {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        let bytes = match path.is_dir() {
            true => read(&path.join("tokenizer.json")).map_err(|problem| match problem {
                Problem::Missing => Problem::NoTokenizerJson(unread_tokenizers(path)),
                other => other,
            })?,
            false => read(path)?,
        };
        let mut beside = Vec::new();
        for name in FILES {
            match read(&folder.join(name)) {
                Err(Problem::Missing) => {}
                Err(problem) => return Err(Problem::BadListed(format!("{name}: {problem}"))),
                Ok(bytes) => beside.push((name, bytes)),
            }
        }
        Self::from_files(bytes, &beside)
    }

    /// Reads the file that a run keeps, which needs no other one.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_kept(path: &Path) -> Result<Self, Problem> {
        Self::from_files(read(path)?, &[])
    }

    #[cfg(test)]
    pub(super) fn from_bytes(bytes: Vec<u8>) -> Result<Self, Problem> {
        Self::from_files(bytes, &[])
    }

    pub(super) fn from_files(bytes: Vec<u8>, beside: &Files) -> Result<Self, Problem> {
        let wrong = |why: String| Problem::NoTokenizer(why);
        let sources = sources(&bytes, beside);
        let FullTokenizer { inner, file, bytes, listed } = FullTokenizer::of(bytes, beside)?;
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

    /// Whether it is the tokenizer of a tokenizer.json with these bytes, and of the files that `beside` gives by their names.
    pub(crate) fn is_of<'a>(&self, file: &[u8], beside: impl Fn(&str) -> Option<&'a [u8]>) -> bool {
        let beside = FILES.map(|name| beside(name).map(|bytes| (name, bytes.to_vec())));
        let beside: Vec<_> = beside.into_iter().flatten().collect();
        self.sources == sources(file, &beside)
            || FullTokenizer::of(file.to_vec(), &beside)
                .is_ok_and(|whole| whole.bytes == self.bytes)
    }

    /// Refuses a model that has fewer tokens.
    ///
    /// # Errors
    /// [`Problem`] names the largest token.
    pub fn fits(&self, vocab: usize) -> Result<(), Problem> {
        if self.vocab <= vocab {
            return Ok(());
        }
        let largest = u32::try_from(self.vocab - 1).unwrap_or(u32::MAX);
        let text = self.inner.id_to_token(largest).unwrap_or_default();
        let listed = self.listed.contains(&largest);
        Err(Problem::TokenizerVocab { largest, text, vocab, listed })
    }

    /// The file, with the tokens that files beside it list.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// One more than its largest token.
    pub const fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of a token on the disk.
    pub(super) const fn token_bytes(&self) -> usize {
        if self.vocab <= 1 << 16 { 2 } else { 4 }
    }

    /// Where a text can be cut, or why no place is known.
    pub(super) const fn cuts(&self) -> Result<&Cuts, &String> {
        self.cuts.as_ref()
    }

    /// Whether a text can be cut.
    pub const fn has_cuts(&self) -> bool {
        self.cuts.is_ok()
    }

    /// The tokens of a text, without any that the tokenizer would put around it.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        self.encode_with(text, false)
    }

    /// Tokens of a prompt, with the special ones that the tokenizer puts around a text, such as that of its beginning.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, String> {
        self.encode_with(text, true)
    }

    /// The tokens of a text, unless they are more than any text has; `special`: with those that the tokenizer puts around it.
    ///
    /// # Errors
    /// What the tokenizer says.
    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, String> {
        let encoded = guarded("over the text", || self.inner.encode_fast(text, special))?;
        let tokens = encoded.map_err(|e| e.to_string())?.get_ids().to_vec();
        check_growth(tokens.len(), text)?;
        Ok(tokens)
    }

    /// The same with the bytes of the text that each token stands for.
    pub(super) fn encode_with_places(
        &self,
        text: &str,
        special: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, String> {
        with_places(guarded("over the text", || self.inner.encode(text, special))?, text)
    }

    /// The same of a text in which `cut` stands inside the texts of control tokens that are to be like any other, and other
    /// characters stand for those of one letter, which `letter` gives. The places are those of the text as it is given.
    pub(super) fn encode_cut(
        &self,
        text: &str,
        cut: char,
        letter: &dyn Fn(char) -> char,
        special: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, String> {
        let inner = &self.inner;
        let model = self.plain.as_ref().unwrap_or_else(|| inner.get_model());
        // As `encode` of the library does it, but for the cuts.
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

    /// The tokens of a text whose control tokens control, and those that the tokenizer puts around it.
    pub(super) fn encode_around(&self, text: &str) -> Result<TokenSpans, String> {
        let encoded = guarded("over the text", || self.inner.encode(text, true))?;
        let encoded = encoded.map_err(|e| e.to_string())?;
        let is_put: Vec<bool> =
            encoded.get_special_tokens_mask().iter().map(|put| *put == 1).collect();
        let mut text = with_places(Ok(encoded), text)?;
        let behind = is_put.iter().rposition(|put| !put).map_or(text.len(), |last| last + 1);
        let behind = text.split_off(behind).into_iter().map(|(token, _)| token).collect();
        let front = is_put.iter().position(|put| !put).unwrap_or(0);
        let front = text.drain(..front).map(|(token, _)| token).collect();
        Ok(TokenSpans { front, text, behind })
    }

    /// The first control token of a text that is there once it is normalized.
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

    /// Whether a control token is a piece of its model, to which a text may come.
    pub(super) const fn has_control_pieces(&self) -> bool {
        self.plain.is_some()
    }

    /// The texts of its control tokens.
    pub(super) fn control(&self) -> Vec<String> {
        let added = self.inner.get_added_tokens_decoder().into_values();
        let control = added.filter(|token| token.special && !token.content.is_empty());
        let mut control: Vec<_> = control.map(|token| token.content).collect();
        control.sort();
        control
    }

    /// The token that stands for all of a text, if one does.
    pub(super) fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Whether a token is a control token, such as the end of a turn, and no text that looks like one.
    pub fn is_control(&self, token: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&token).is_some_and(|added| added.special)
    }

    /// The text of a token by itself.
    #[cfg(test)]
    pub(super) fn text_of(&self, token: u32) -> String {
        let mut decoder = self.decoder();
        decoder.push(token) + &decoder.rest()
    }

    /// Text of one token after another.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder { inner: &self.inner, tokens: Vec::new(), told: 0 }
    }
}

/// A token, with the bytes of the text that it stands for; those that the tokenizer puts around a text are told apart.
pub(super) struct TokenSpans {
    pub(super) front: Vec<u32>,
    pub(super) text: Vec<(u32, Range<usize>)>,
    pub(super) behind: Vec<u32>,
}

/// A tokenizer.json with the tokens that files beside it list.
struct FullTokenizer {
    inner: tokenizers::Tokenizer,
    file: serde_json::Value,
    bytes: Vec<u8>,
    /// Those that it does not have itself.
    listed: BTreeSet<u32>,
}

impl FullTokenizer {
    fn of(bytes: Vec<u8>, beside: &Files) -> Result<Self, Problem> {
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
            beside.iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes.clone())
        };
        let all = listed(&read, &own).map_err(Problem::BadListed)?;
        let whole = Self { inner, file, bytes, listed: BTreeSet::new() };
        match all.iter().all(|(_, token)| own.values().any(|other| other == token)) {
            true => Ok(whole),
            false => whole.with(&all),
        }
    }

    /// With these tokens, which get their numbers as transformers gives them.
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

/// xxh3, 128 bits, of a tokenizer.json and of the files beside it.
fn sources(file: &[u8], beside: &Files) -> u128 {
    let beside = beside.iter().flat_map(|(name, bytes)| [name.as_bytes(), bytes.as_slice()]);
    hash_of_parts([file].into_iter().chain(beside))
}

/// Makes text of tokens that come one by one. A token by itself may be a part of a character, and its text may depend on the
/// tokens before it.
#[derive(Debug)]
pub struct Decoder<'a> {
    inner: &'a tokenizers::Tokenizer,
    /// Those of the last piece of text, and those behind it.
    tokens: Vec<u32>,
    /// How many are of the last piece.
    told: usize,
}

impl Decoder<'_> {
    /// How the text goes on with `token`: whole characters, as soon as they are. What the library cannot decode is U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        self.tokens.push(token);
        self.piece(false)
    }

    /// How the text ends: each part of a character that never became whole is U+FFFD.
    pub fn rest(&mut self) -> String {
        self.piece(true)
    }

    fn piece(&mut self, last: bool) -> String {
        let (before, new) = self.tokens.split_at(self.told);
        let (Ok(before), Ok(all), Ok(alone)) =
            (self.text(before), self.text(&self.tokens), self.text(new))
        else {
            self.tokens.clear();
            self.told = 0;
            return char::REPLACEMENT_CHARACTER.into();
        };
        // Some decoders change what stood before, such as whole characters beside one that is not: then the new ones count alone.
        let piece = all.strip_prefix(&before).unwrap_or(&alone);
        let incomplete = piece.is_empty() || piece.ends_with(char::REPLACEMENT_CHARACTER);
        if incomplete && !last && new.len() < HELD {
            return String::new();
        }
        let piece = piece.to_owned();
        self.tokens.drain(..self.told);
        self.told = self.tokens.len();
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
