//! Text files in parts: each part is text of consecutive files, cut at places that do not change
//! the tokens. All cores tokenize the pieces of a part in parallel.

use super::cores;
use super::problem::{Failure, Problem, at};
use super::store::{ReadError, TokenFile, failure};
use super::token_part::TokenPart;
use super::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Largest number of pieces per task. The tokens of a task share a buffer, since the allocator
/// scatters many small buffers over the memory.
const SEVERAL: usize = 128;
/// Least number of tasks per core, if there are enough pieces.
const SHARES: usize = 4;
/// Longest word that is remembered, in bytes.
const WORD: usize = 32;
/// Words that a core remembers: about 20 MiB.
const WORDS: usize = 1 << 17;
/// Bytes after a cut that must be known to decide about the cut.
const BEHIND: u64 = 8;

/// Place where the text of the next part begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TextPosition {
    pub(super) file: usize,
    pub(super) offset: u64,
    /// Lines before the place in the file, for files of rows.
    pub(super) lines: u64,
}

/// Text files to divide, with their tokenizer.
#[derive(Debug)]
pub(super) struct TextChunks<'a> {
    pub(super) files: &'a [TokenFile],
    pub(super) tokenizer: &'a Tokenizer,
    sizes: ChunkSizes,
    /// Word memories that no core uses now.
    memos: Mutex<Vec<Memo>>,
}

/// Sizes of parts and pieces, in bytes of text.
#[derive(Clone, Copy, Debug)]
pub struct ChunkSizes {
    /// A part ends after this many bytes.
    pub part: u64,
    /// Bytes that a core tokenizes per call.
    pub piece: usize,
    /// Longest text without a place to cut. A tokenizer temporarily uses 240 times this memory.
    pub most: u64,
}

impl Default for ChunkSizes {
    fn default() -> Self {
        // The tokenizer's data for a piece of 16 KiB stays in the CPU caches.
        Self { part: 64 << 20, piece: 16 << 10, most: 256 << 20 }
    }
}

/// A part: consecutive texts of files.
#[derive(Debug)]
pub(super) struct TextChunk<'a> {
    pub(super) texts: Vec<(&'a TokenFile, String)>,
    /// Bytes of the files that the part covers.
    pub(super) bytes: u64,
    pub(super) next: TextPosition,
}

impl<'a> TextChunks<'a> {
    pub(super) const fn new(
        files: &'a [TokenFile],
        tokenizer: &'a Tokenizer,
        sizes: ChunkSizes,
    ) -> Self {
        Self { files, tokenizer, sizes, memos: Mutex::new(Vec::new()) }
    }

    /// Reads the part that begins at `from`. The part does not depend on the text after it.
    pub(super) fn read(&self, from: TextPosition) -> Result<TextChunk<'a>, Failure> {
        let mut text = TextChunk { texts: Vec::new(), bytes: 0, next: from };
        while text.next.file < self.files.len() && text.bytes < self.sizes.part {
            let file = &self.files[text.next.file];
            let start = text.next.offset;
            let (one, end) = self.some(file, start, self.sizes.part - text.bytes)?;
            text.texts.push((file, one));
            text.bytes += end - start;
            text.next.offset = end;
            if end == file.stamp.bytes {
                text.next = TextPosition { file: text.next.file + 1, ..TextPosition::default() };
            }
        }
        Ok(text)
    }

    /// Reads text of a file from `start` on, up to the last cut within `most` bytes if one exists;
    /// returns the text and the start of the next text.
    fn some(&self, file: &TokenFile, start: u64, most: u64) -> Result<(String, u64), Failure> {
        let ChunkSizes { most: longest, .. } = self.sizes;
        let bytes = file.stamp.bytes - start;
        let cuts = self.tokenizer.cuts();
        let (Ok(cuts), true) = (cuts, bytes > most) else {
            let why = match cuts {
                Err(why) if bytes > longest => why,
                _ => return Ok((text(file, start, bytes)?, file.stamp.bytes)),
            };
            return Err(at(&file.path)(Problem::Uncut { bytes, most: longest, why: why.clone() }));
        };
        let mut length = most;
        loop {
            let some = text(file, start, bytes.min(length + BEHIND))?;
            if let Some(cut) = cuts.near(&some, most as usize) {
                return Ok((some[..cut.start].to_owned(), start + cut.end as u64));
            }
            if some.len() as u64 == bytes {
                return Ok((some, file.stamp.bytes));
            }
            if length >= longest {
                let why = format!(
                    "the {} from byte {start} on have none",
                    topology::format_bytes(length)
                );
                return Err(at(&file.path)(Problem::Uncut { bytes, most: longest, why }));
            }
            length = (2 * length).min(longest);
        }
    }

    /// The tokens of a part, in text order. `add` receives the bytes of text that are done.
    pub(super) fn encode(
        &self,
        part: &TextChunk<'_>,
        add: &(dyn Fn(u64) + Sync),
    ) -> Result<TokenPart, Failure> {
        let (mut pieces, width) = (Vec::new(), self.tokenizer.token_bytes());
        for (file, text) in &part.texts {
            let of_text = match self.tokenizer.cuts() {
                Ok(cuts) => cuts.pieces(text, self.sizes.piece),
                Err(_) => vec![text.as_str()],
            };
            pieces.extend(of_text.into_iter().map(|piece| (*file, piece)));
        }
        let longest = pieces.iter().map(|(_, piece)| piece.len() as u64).max().unwrap_or(0);
        let several = (pieces.len() / (SHARES * topology::cores())).clamp(1, SEVERAL);
        let groups: Vec<_> = pieces.chunks(several).collect();
        let encode = |i: usize| {
            let mut memo = lock(&self.memos).pop().unwrap_or_default();
            let mut made = Vec::new();
            let mut push = |tokens: &[u32]| {
                made.reserve(tokens.len() * width);
                tokens.iter().for_each(|token| made.extend(&token.to_le_bytes()[..width]));
            };
            for (file, piece) in groups[i] {
                let done = memo.encode(self.tokenizer, piece, &mut push);
                done.map_err(|why| at(&file.path)(Problem::NoTokenizer(why)))?;
                add(piece.len() as u64);
            }
            lock(&self.memos).push(memo);
            Ok(made)
        };
        let made = cores::map_by(cores::texts_at_once(longest), groups.len(), encode);
        Ok(TokenPart::of_text(made.into_iter().collect::<Result<_, _>>()?, width))
    }
}

fn lock(memos: &Mutex<Vec<Memo>>) -> MutexGuard<'_, Vec<Memo>> {
    memos.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tokens of known texts between two cuts, mostly words, which occur repeatedly in a text.
#[derive(Debug, Default)]
struct Memo(HashMap<String, Box<[u32]>>);

impl Memo {
    /// Passes the tokens of a text to `push`, in several calls.
    fn encode(
        &mut self,
        tokenizer: &Tokenizer,
        text: &str,
        push: &mut dyn FnMut(&[u32]),
    ) -> Result<(), String> {
        let Ok(cuts) = tokenizer.cuts() else {
            tokenizer.encode(text).map(|tokens| push(&tokens))?;
            return Ok(());
        };
        for word in cuts.pieces(text, 1) {
            if let Some(tokens) = self.0.get(word) {
                push(tokens);
                continue;
            }
            let tokens = tokenizer.encode(word)?;
            push(&tokens);
            if word.len() <= WORD && self.0.len() < WORDS {
                self.0.insert(word.to_owned(), tokens.into());
            }
        }
        Ok(())
    }
}

/// At most `bytes` bytes of a file from `start` on, without an incomplete last character.
fn text(file: &TokenFile, start: u64, bytes: u64) -> Result<String, Failure> {
    let mut some = vec![0; bytes as usize];
    file.read(start, &mut some).map_err(failure)?;
    let is_end = start + bytes == file.stamp.bytes;
    String::from_utf8(some).or_else(|error| {
        let (e, path) = (error.utf8_error(), file.path.clone());
        if e.error_len().is_none() && !is_end {
            let mut some = error.into_bytes();
            some.truncate(e.valid_up_to());
            return String::from_utf8(some).map_err(|_| unreachable!("it is text up to there"));
        }
        let (offset, why) = (start + e.valid_up_to() as u64, "it was text a moment ago".into());
        Err(failure(ReadError { path, offset, why }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn tokenizer(words: &serde_json::Value) -> Tokenizer {
        let fixture = include_bytes!("../../../tests/fixtures/tokenizer-tiny.json");
        let mut file: serde_json::Value = serde_json::from_slice(fixture).unwrap();
        if !words.is_null() {
            file["pre_tokenizer"] = words.clone();
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::open(folder.path()).unwrap()
    }

    /// The tokens of a file with this text, and the number of its parts.
    fn parts(
        tokenizer: &Tokenizer,
        text: &str,
        sizes: ChunkSizes,
    ) -> Result<(Vec<u8>, usize), Failure> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, text).unwrap();
        let files = [TokenFile::new(&path, File::open(&path).unwrap()).unwrap()];
        let texts = TextChunks::new(&files, tokenizer, sizes);
        let (mut tokens, mut count, mut from) = (Vec::new(), 0, TextPosition::default());
        while from.file < files.len() {
            let part = texts.read(from)?;
            assert!(part.next != from);
            tokens.extend(texts.encode(&part, &|_| ())?.tokens.concat());
            (count, from) = (count + 1, part.next);
        }
        Ok((tokens, count))
    }

    fn whole(tokenizer: &Tokenizer, text: &str) -> Vec<u8> {
        let tokens = tokenizer.encode(text).unwrap();
        tokens.into_iter().flat_map(|token| (token as u16).to_le_bytes()).collect()
    }

    #[test]
    fn a_file_in_parts_of_any_size_has_the_tokens_of_the_whole() {
        let tokenizer = tokenizer(&serde_json::Value::Null);
        let line = |i: u32| {
            format!("the b\u{f6}x {i} h\u{f6}lds\n\n  a \u{1f980}.\nmodel's\u{6f22}\u{5b57}")
        };
        let text: String = (0..30).map(line).collect();
        for part in [1, 2, 3, 7, 40, 500, 1 << 20] {
            for piece in [1, 16, 1 << 10] {
                let sizes = ChunkSizes { part, piece, most: 64 };
                let (tokens, count) = parts(&tokenizer, &text, sizes).unwrap();
                assert_eq!(tokens, whole(&tokenizer, &text), "{part} {piece}");
                assert!(count > 60 || part > 7, "{part}: {count} parts");
            }
        }
    }

    #[test]
    fn a_long_text_that_cannot_be_cut_is_refused_with_a_remedy() {
        let sizes = ChunkSizes { part: 10, piece: 10, most: 20 };
        let known = tokenizer(&serde_json::Value::Null);
        let unknown = tokenizer(&serde_json::json!({ "type": "Whitespace" }));
        let refused = |tokenizer: &Tokenizer, text: &str| {
            parts(tokenizer, text, sizes).unwrap_err().1.to_string()
        };
        let message = refused(&unknown, "the box holds a model");
        let words = [
            "21 B of text are more",
            "(20 B)",
            "its pre_tokenizer Whitespace is none",
            "JSON lines",
        ];
        words.iter().for_each(|words| assert!(message.contains(words), "{words}: {message}"));
        let message = refused(&known, &format!("the box {}", "\u{e9}".repeat(40)));
        assert!(message.contains("the 20 B from byte 7 on have none"), "{message}");
        for text in ["the box holds a mode", "-----------------------------"] {
            let short = &text[..20];
            for tokenizer in [&known, &unknown] {
                assert!(parts(tokenizer, short, sizes).is_ok(), "{short}");
            }
        }
    }
}
