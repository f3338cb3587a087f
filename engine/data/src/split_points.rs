//! Places where a text can be cut without changing its tokens.
//!
//! A tokenizer removes the texts of its added tokens, normalizes the rest, divides it into words,
//! and tokenizes each word separately. A place is safe if none of these steps sees both of its
//! sides. This file knows two kinds of safe places for known tokenizer steps:
//!
//! - *before a blank that follows a character other than white space*: no word of GPT-2, Llama 3,
//!   Qwen and similar has a blank after such a character. Their only look-ahead, `\s+(?!\S)`,
//!   follows white space. `Metaspace` begins a word with each blank. A SentencePiece BPE without
//!   words joins the two sides only if a token of its vocabulary has such a character before a
//!   blank.
//! - *after a line feed that follows no white space and precedes a letter or digit*: the line feed
//!   ends a word of its own or of the punctuation before it. Texts without blanks have such places.

use serde_json::Value as Json;
use std::collections::HashSet;
use std::ops::Range;

/// The character that SentencePiece writes for a blank.
const META: char = '\u{2581}';

/// Known alternatives in the patterns of words. In each, a blank is at the beginning or after white
/// space; only `/`, `\r` and `\n` follow a line feed; and there is no look-behind.
const WORDS: [&str; 27] = [
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    " ?\\p{L}+",
    "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+",
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+",
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+",
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*",
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    "[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+",
    "\\p{N}",
    "\\p{N}{1,3}",
    " ?\\p{N}+",
    " ?[^\\s\\p{L}\\p{N}]+",
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*",
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*",
    " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*",
    " ?[\\p{P}\\p{S}]+[\\r\\n]*",
    "\\s*[\\r\\n]+",
    "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
];
/// Alternatives for white space, in this order, so that a line feed at a piece's end is a word.
const SPACES: [&str; 2] = ["\\s+(?!\\S)", "\\s+"];

/// The places where a tokenizer allows a cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cuts {
    /// Characters that may be joined with a blank after them.
    join_blank: HashSet<char>,
    /// Characters with a token of their own, if the model has no words. A model without words may
    /// drop any other character and join its neighbors.
    known: Option<HashSet<char>>,
    /// First characters of added tokens.
    begin: HashSet<char>,
    /// Whether only ASCII characters are known to stay the same in the normalizer.
    ascii: bool,
    /// Whether a line feed ends a word.
    lines: bool,
    /// Whether the tokenizer writes a blank before each piece; then the blank of a cut is removed.
    writes_blank: bool,
}

impl Cuts {
    /// The cuts of a tokenizer.json.
    ///
    /// # Errors
    /// The reason why no cut is known, in words that complete "because".
    pub(super) fn of(file: &Json) -> Result<Self, String> {
        let mut cuts = Self::default();
        let blanks = cuts.normalizer(&file["normalizer"])?;
        cuts.words(&file["pre_tokenizer"], blanks, &file["model"])?;
        cuts.added(&file["added_tokens"])?;
        Ok(cuts)
    }

    /// Checks the normalizers; returns whether they write [`META`] for blanks.
    fn normalizer(&mut self, part: &Json) -> Result<bool, String> {
        let mut blanks = false;
        for part in flat(part, "normalizers") {
            match part["type"].as_str() {
                // NFC joins no blank, line feed, ASCII letter or digit to the character before it.
                Some("NFC") => self.ascii = true,
                Some("Prepend") if part["prepend"] == META.to_string() && !blanks => {
                    self.writes_blank = true;
                }
                Some("Replace")
                    if part["pattern"]["String"] == " " && part["content"] == META.to_string() =>
                {
                    blanks = true;
                }
                other => return Err(unknown("normalizer", other)),
            }
        }
        match self.writes_blank && !blanks {
            true => Err(unknown("normalizer", Some("Prepend"))),
            false => Ok(blanks),
        }
    }

    /// Checks how the pre-tokenizers divide a text into words.
    fn words(&mut self, part: &Json, mut blanks: bool, model: &Json) -> Result<(), String> {
        let (mut divided, mut lines) = (false, true);
        for part in flat(part, "pretokenizers") {
            match part["type"].as_str() {
                Some("ByteLevel") if !blanks => {
                    // The prefix blank is only added to a piece without one, such as a piece that
                    // begins a line.
                    lines &= part["add_prefix_space"] == false;
                    divided |= part["use_regex"] != false;
                }
                Some("Digits") if !blanks => {}
                Some("Split") if !blanks && is_known(part) => {
                    let Some(pattern) = part["pattern"]["Regex"].as_str() else {
                        unreachable!("a known `Split` has a pattern")
                    };
                    divided |= alternatives(pattern).any(|one| one == SPACES[1]);
                }
                // At this point no blank is left.
                Some("Split") if blanks && part["pattern"]["String"] == " " => {}
                Some("Metaspace") if !blanks && part["replacement"] == META.to_string() => {
                    blanks = true;
                    divided |= part["split"] != false;
                }
                other => return Err(unknown("pre_tokenizer", other)),
            }
        }
        self.lines = lines && !blanks && divided;
        match (divided, blanks) {
            (true, _) => Ok(()),
            (false, true) => self.vocabulary(model),
            (false, false) => Err("its pre_tokenizer makes no words".into()),
        }
    }

    /// A BPE without words can only join characters that are adjacent in a token of its vocabulary.
    fn vocabulary(&mut self, model: &Json) -> Result<(), String> {
        let none = |key: &str| model[key].as_str().is_none_or(str::is_empty);
        let whole = none("continuing_subword_prefix") && none("end_of_word_suffix");
        let by_merges = model["type"] == "BPE" && model["ignore_merges"] != true && whole;
        let Some(vocab) = model["vocab"].as_object().filter(|_| by_merges) else {
            return Err(
                "its model makes tokens of a text without words, and is no plain BPE".into()
            );
        };
        let meta = META.to_string();
        if !vocab.contains_key(&meta) {
            return Err("its vocabulary has no blank".into());
        }
        let one = |token: &String| token.chars().next().filter(|c| c.len_utf8() == token.len());
        self.known = Some(vocab.keys().filter_map(one).collect());
        for token in vocab.keys() {
            let before = token.match_indices(META).filter_map(|(at, _)| token[..at].chars().last());
            self.join_blank.extend(before);
        }
        Ok(())
    }

    fn added(&mut self, tokens: &Json) -> Result<(), String> {
        let mut ascii = true;
        for token in tokens.as_array().into_iter().flatten() {
            let Some(text) = token["content"].as_str() else {
                return Err("one of its added tokens has no text".into());
            };
            if token["single_word"] == true && text.starts_with(char::is_whitespace) {
                return Err(
                    "one of its added tokens is a single word and begins with a blank".into()
                );
            }
            if self.writes_blank && text.starts_with([' ', META]) {
                return Err("one of its added tokens begins with a blank".into());
            }
            self.begin.extend(text.chars().next());
            self.join_blank.extend(text.chars().last());
            self.join_blank.extend(
                text.chars()
                    .zip(text.chars().skip(1))
                    .filter_map(|(one, next)| [' ', META].contains(&next).then_some(one)),
            );
            self.lines &= !text.contains('\n');
            ascii &= text.is_ascii();
        }
        // A normalizer may change the first and last characters of non-ASCII tokens.
        self.ascii &= !ascii;
        Ok(())
    }

    /// The cut at byte `at` of `text`, if it is safe. The first piece ends at the start of the
    /// returned range, and the next piece begins at its end.
    fn at(&self, text: &str, at: usize) -> Option<Range<usize>> {
        let bytes = text.as_bytes();
        let is_stable = |c: char| !c.is_whitespace() && (!self.ascii || c.is_ascii());
        let begins = |at: usize| {
            let next = text[at..].chars().next()?;
            let begins = next.is_alphanumeric() && is_stable(next) && !self.begin.contains(&next);
            begins.then_some(())
        };
        if bytes[at] == b' ' {
            let before = text[..at].chars().next_back()?;
            let known = self.known.as_ref().is_none_or(|known| known.contains(&before));
            if !known || !is_stable(before) || self.join_blank.contains(&before) {
                return None;
            }
            if !self.writes_blank {
                return Some(at..at);
            }
            begins(at + 1)?;
            return Some(at..at + 1);
        }
        if !self.lines || at < 2 || bytes[at - 1] != b'\n' {
            return None;
        }
        let before = text[..at - 1].chars().next_back()?;
        begins(at)?;
        (!before.is_whitespace()).then_some(at..at)
    }

    /// The last cut up to byte `most`, or else the first one after it; `None` if there is no cut.
    pub(super) fn near(&self, text: &str, most: usize) -> Option<Range<usize>> {
        let most = most.min(text.len().saturating_sub(1));
        let mut before = (1..=most).rev();
        before
            .find_map(|at| self.at(text, at))
            .or_else(|| (most + 1..text.len()).find_map(|at| self.at(text, at)))
    }

    /// Divides a text into pieces of about `size` bytes.
    pub(super) fn pieces<'a>(&self, text: &'a str, size: usize) -> Vec<&'a str> {
        let (mut pieces, mut left) = (Vec::new(), text);
        while left.len() > size
            && let Some(cut) = self.near(left, size)
        {
            pieces.push(&left[..cut.start]);
            left = &left[cut.end..];
        }
        pieces.push(left);
        pieces
    }
}

/// The parts of a nested sequence as a flat list.
fn flat<'a>(part: &'a Json, key: &str) -> Vec<&'a Json> {
    match part[key].as_array() {
        _ if part.is_null() => Vec::new(),
        Some(parts) => parts.iter().flat_map(|part| flat(part, key)).collect(),
        None => vec![part],
    }
}

fn unknown(what: &str, kind: Option<&str>) -> String {
    format!("its {what} {} is none of those that are known", kind.unwrap_or("without a type"))
}

/// Whether a `Split` consists of known alternatives and keeps the whole text.
fn is_known(split: &Json) -> bool {
    let Some(pattern) = split["pattern"]["Regex"].as_str() else { return false };
    let keeps = match split["behavior"].as_str() {
        Some("Isolated") => split["invert"] != true,
        Some("Removed") => split["invert"] == true,
        _ => false,
    };
    let parts: Vec<&str> = alternatives(pattern).collect();
    let place = |part: &str| parts.iter().position(|one| *one == part);
    let known = |part: &&str| WORDS.contains(part) || SPACES.contains(part);
    let in_order = match SPACES.map(place) {
        [None, None] => split["invert"] != true,
        [Some(ahead), Some(behind)] => ahead < behind,
        _ => false,
    };
    keeps && in_order && parts.iter().all(known)
}

/// Divides a pattern at each `|` outside of brackets.
fn alternatives(pattern: &str) -> impl Iterator<Item = &str> {
    let (mut round, mut square, mut escaped) = (0, false, false);
    pattern.split(move |c| {
        let is_escaped = std::mem::take(&mut escaped);
        match c {
            _ if is_escaped => {}
            '\\' => escaped = true,
            ']' => square = false,
            '[' => square = true,
            '(' if !square => round += 1,
            ')' if !square => round -= 1,
            _ => return c == '|' && round == 0 && !square,
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::*;
    use device::random;
    use serde_json::json;
    use std::collections::BTreeMap;

    const GPT2: &str =
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    const LLAMA3: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    const QWEN35: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    const O200K: &str = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    const DEEPSEEK: &str = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

    /// Parts of random texts: composing letters, marks, digits, white space, and an added token.
    const SIGNS: [&str; 25] = [
        "a",
        "S",
        "x",
        "1",
        "2",
        "\u{e9}",
        "\u{6f22}",
        "\u{301}",
        "\u{93f}",
        "e",
        " ",
        " ",
        " ",
        "\n",
        "\n",
        "\r",
        "\t",
        "'",
        "s",
        ".",
        "/",
        "\u{a0}",
        "<x>",
        "\u{1f980}",
        "\u{436}",
    ];

    /// The character that GPT-2 writes for a byte.
    fn written(byte: u8) -> char {
        let is_itself = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let before = (0..byte).filter(|b| !is_itself(*b)).count() as u32;
        char::from_u32(if is_itself(byte) { byte.into() } else { 256 + before }).unwrap()
    }

    /// A model that merges every pair of these signs and many more, so a wrong cut changes the
    /// tokens.
    fn model(signs: &[String], joins: impl Fn(&str, &str) -> bool) -> Json {
        let mut vocab: BTreeMap<String, usize> = BTreeMap::new();
        let mut add = |token: &str| {
            let next = vocab.len();
            vocab.entry(token.to_owned()).or_insert(next);
        };
        signs.iter().for_each(|sign| add(sign));
        let mut merges = Vec::new();
        let mut merged = Vec::new();
        for one in signs {
            for other in signs.iter().filter(|other| joins(one, other)) {
                merges.push([one.clone(), other.clone()]);
                merged.push(format!("{one}{other}"));
            }
        }
        for (i, one) in merged.iter().enumerate().step_by(3) {
            let other = &merged[random::below(7, i as u64, merged.len() as u64) as usize];
            if joins(one, other) {
                merges.push([one.clone(), other.clone()]);
            }
        }
        // The priority of the pairs is random too.
        let pairs = signs.len() * signs.len();
        let many = pairs.min(merged.len());
        merges[..many]
            .sort_by_key(|pair| random::key(3, pair.concat().bytes().map(u64::from).sum()));
        merges.iter().for_each(|pair| add(&pair.concat()));
        json!({ "type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": true })
    }

    fn file(normalizer: &Json, words: &Json, model: &Json) -> Json {
        let added = json!({ "id": 0, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
        let mut file = json!({ "version": "1.0", "normalizer": normalizer, "pre_tokenizer": words, "model": model, "added_tokens": [added] });
        let next = file["model"]["vocab"].as_object().unwrap().len();
        file["added_tokens"][0]["id"] = next.into();
        file
    }

    fn byte_level(patterns: &[&str]) -> Json {
        let split = |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        let mut parts: Vec<Json> = patterns.iter().map(split).collect();
        let last = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": patterns.is_empty() });
        parts.push(last);
        json!({ "type": "Sequence", "pretokenizers": parts })
    }

    /// Asserts that every text has the same tokens whole and in pieces of every size.
    fn pieces_are_the_whole(name: &str, file: &Json, at_least: usize) {
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(path.path(), file.to_string()).unwrap();
        let tokenizer = Tokenizer::open(path.path()).unwrap();
        let cuts = tokenizer.cuts().unwrap();
        let mut made = 0;
        for number in 0..600 {
            let key = random::key(11, number);
            let length = random::below(key, 0, 40);
            let sign = |i| SIGNS[random::below(key, i + 1, SIGNS.len() as u64) as usize];
            let text: String = (0..length).map(sign).collect();
            let whole = tokenizer.encode(&text).unwrap();
            for size in [1, 2, 5, 17] {
                let pieces = cuts.pieces(&text, size);
                let tokens: Vec<u32> =
                    pieces.iter().flat_map(|piece| tokenizer.encode(piece).unwrap()).collect();
                assert_eq!(tokens, whole, "{name}: {text:?} as {pieces:?}");
                made += pieces.len() - 1;
            }
        }
        assert!(made > at_least, "{name}: only {made} cuts");
    }

    #[test]
    fn pieces_of_any_text_have_the_tokens_of_the_whole() {
        let bytes: Vec<String> = (0..=255).map(|byte| written(byte).to_string()).collect();
        let used: HashSet<String> =
            SIGNS.concat().bytes().map(|byte| written(byte).to_string()).collect();
        let both = |one: &str, other: &str| {
            used.contains(one) && used.contains(other) || one.chars().count() > 1
        };
        let of_bytes = model(&bytes, both);
        let (none, nfc) = (Json::Null, json!({ "type": "NFC" }));
        let digits = json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Digits", "individual_digits": true },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }
        ]});
        let prefixed = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
        for (name, normalizer, words) in [
            ("GPT-2", &none, byte_level(&[])),
            ("GPT-2 as a pattern", &nfc, byte_level(&[GPT2])),
            ("Llama 3", &none, byte_level(&[LLAMA3])),
            ("Qwen 2", &nfc, byte_level(&[&LLAMA3.replace("{1,3}", "")])),
            ("Qwen 3.5", &nfc, byte_level(&[QWEN35])),
            ("o200k", &none, byte_level(&[O200K])),
            (
                "DeepSeek",
                &none,
                byte_level(&[
                    "\\p{N}{1,3}",
                    "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
                    DEEPSEEK,
                ]),
            ),
            ("StarCoder", &none, digits),
            ("RoBERTa", &none, prefixed),
        ] {
            pieces_are_the_whole(name, &file(normalizer, &words, &of_bytes), 1000);
        }
    }

    #[test]
    fn pieces_of_any_text_have_the_tokens_of_the_whole_where_blanks_are_written() {
        // No vocabulary contains the crab or the Russian letter.
        let signs = SIGNS.concat().replace(' ', "\u{2581}").replace(['\u{1f980}', '\u{436}'], "");
        let mut signs: Vec<String> = signs.chars().map(String::from).collect();
        signs.sort();
        signs.dedup();
        let any = model(&signs, |_, _| true);
        let meta = META.to_string();
        let in_front = |one: &str, other: &str| {
            !other.contains(META)
                || one.chars().all(|c| c == META) && !other.trim_start_matches(META).contains(META)
        };
        let whole_words = model(&signs, in_front);
        let metaspace = |scheme: &str, split: bool| json!({ "type": "Metaspace", "replacement": meta, "prepend_scheme": scheme, "split": split });
        let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": meta });
        let llama = json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": meta }, replace] });
        let gemma = json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false });
        let none = Json::Null;
        for (name, normalizer, words, model) in [
            ("Metaspace", &none, metaspace("always", true), &any),
            ("Metaspace of the first", &none, metaspace("first", true), &any),
            ("Metaspace without", &none, metaspace("never", true), &any),
            ("no words", &none, metaspace("first", false), &whole_words),
            ("Llama 2", &llama, Json::Null, &whole_words),
            ("Gemma", &replace, gemma, &whole_words),
        ] {
            pieces_are_the_whole(name, &file(normalizer, &words, model), 500);
        }
        let joined = Cuts::of(&file(&llama, &none, &any)).unwrap();
        assert_eq!(
            joined.near("a b", 1),
            None,
            "a token of its vocabulary has a blank behind an a"
        );
    }

    #[test]
    fn a_tokenizer_of_unknown_steps_has_no_places() {
        let model = model(&["a".into(), META.into()], |_, _| true);
        let why = |normalizer: Json, words: Json| Cuts::of(&file(&normalizer, &words, &model));
        let none = || Json::Null;
        let odd = LLAMA3.replace("\\s*[\\r\\n]+", "\\w \\w");
        for (normalizer, words, message) in [
            (none(), none(), "makes no words"),
            (json!({ "type": "Lowercase" }), byte_level(&[]), "its normalizer Lowercase is none"),
            (none(), json!({ "type": "Whitespace" }), "its pre_tokenizer Whitespace is none"),
            (none(), byte_level(&[&odd]), "its pre_tokenizer Split is none"),
            (none(), byte_level(&["\\p{N}{1,3}"]), "makes no words"),
        ] {
            let told = why(normalizer, words).unwrap_err();
            assert!(told.contains(message), "{message}: {told}");
        }
        let mut single = file(&Json::Null, &byte_level(&[]), &model);
        single["added_tokens"][0]["content"] = " x".into();
        single["added_tokens"][0]["single_word"] = true.into();
        assert!(Cuts::of(&single).unwrap_err().contains("single word"));
    }
}
