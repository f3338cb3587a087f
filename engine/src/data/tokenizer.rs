//! `tokenizer.json`, as Hugging Face's tokenizers write it: text to tokens and back.

use super::Problem;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of a file; more is none.
const LONGEST: u64 = 256 << 20;

/// Read, and found to be a function of the text alone.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: Vec<u8>,
    vocab: usize,
}

impl Tokenizer {
    /// Reads `path`. Truncation and padding, which it may ask for, are left out: a text is a text.
    ///
    /// # Errors
    /// [`Problem`] when it cannot be read, is none, or draws lots (BPE dropout).
    pub fn open(path: &Path) -> Result<Self, Problem> {
        let file = File::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Problem::Missing,
            _ => Problem::Unreadable(error),
        })?;
        if !file.metadata().map_err(Problem::Unreadable)?.is_file() {
            return Err(Problem::NotAFile);
        }
        let mut bytes = Vec::new();
        file.take(LONGEST + 1).read_to_end(&mut bytes).map_err(Problem::Unreadable)?;
        Self::from_bytes(bytes)
    }

    fn from_bytes(bytes: Vec<u8>) -> Result<Self, Problem> {
        let wrong = |why: String| Problem::NoTokenizer(why);
        if bytes.len() as u64 > LONGEST {
            return Err(wrong(format!("it is longer than {LONGEST} bytes")));
        }
        let value: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        if value["model"]["dropout"].as_f64().is_some_and(|p| p > 0.0) {
            return Err(wrong(
                "its model.dropout is not 0, so that each time gives other tokens".into(),
            ));
        }
        drop(value);
        let made = tokenizers::Tokenizer::from_bytes(&bytes);
        let mut inner = made.map_err(|e| wrong(e.to_string()))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let largest = inner.get_vocab(true).into_values().max();
        let vocab = largest.map_or(0, |id| id as usize + 1);
        if vocab == 0 {
            return Err(wrong("it has no token".into()));
        }
        Ok(Self { inner, bytes, vocab })
    }

    /// The file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// One more than its largest token.
    pub const fn vocab(&self) -> usize {
        self.vocab
    }

    /// The tokens of a text, without any that the tokenizer would put around it.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoded = self.inner.encode_fast(text, false).map_err(|e| e.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }

    /// Text of one token after another: a piece as soon as it is whole characters.
    pub fn decoder(&self) -> impl FnMut(u32) -> String {
        let mut stream = self.inner.decode_stream(false);
        move |token| stream.step(token).ok().flatten().unwrap_or_default()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const TINY: &[u8] = include_bytes!("../../../tests/fixtures/tokenizer-tiny.json");

    #[test]
    fn a_text_comes_back_from_its_tokens() {
        let tokenizer = Tokenizer::from_bytes(TINY.to_vec()).unwrap();
        assert_eq!(tokenizer.vocab(), 300);
        for text in ["the box holds the model", "  two\n\nlines\t", "é and 漢字 too: 🦀", ""] {
            let tokens = tokenizer.encode(text).unwrap();
            assert!(tokens.len() <= text.len());
            let mut decode = tokenizer.decoder();
            let back: String = tokens.iter().map(|token| decode(*token)).collect();
            assert_eq!(back, text);
        }
        let tokens = tokenizer.encode("the box holds the model").unwrap();
        assert!(tokens.len() < 15 && tokens.iter().any(|t| *t >= 256), "{tokens:?}");
    }

    #[test]
    fn what_is_no_function_of_the_text_is_refused() {
        let text = str::from_utf8(TINY).unwrap();
        for (bad, said) in [
            (text.replace("\"dropout\": null", "\"dropout\": 0.1"), "model.dropout is not 0"),
            (text[..text.len() / 2].to_owned(), "EOF"),
            (String::new(), "EOF"),
            ("[]".into(), "invalid"),
            ("[".repeat(100_000), "recursion"),
            (text.replace("\"BPE\"", "\"Magic\""), ""),
        ] {
            assert!(bad != text);
            let why = Tokenizer::from_bytes(bad.clone().into_bytes()).unwrap_err().to_string();
            assert!(why.contains(said) && why.len() < 500, "{bad:.40}: {why}");
        }
        let cut = text.replace(
            "\"truncation\": null",
            "\"truncation\": {\"direction\": \"Right\", \"max_length\": 2, \"strategy\": \"LongestFirst\", \"stride\": 0}",
        );
        assert!(cut != text);
        let tokenizer = Tokenizer::from_bytes(cut.into_bytes()).unwrap();
        assert!(tokenizer.encode("not cut off after two tokens").unwrap().len() > 2);
    }
}
