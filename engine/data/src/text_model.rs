//! The tokenizer's model for untrusted texts, without pieces of control tokens. SentencePiece keeps
//! control symbols separate, but a tokenizer.json has them among the pieces of plain text.

use super::untrusted::guarded;
use files::foreign_text::reason;
use serde_json::Value;
use std::collections::HashMap;
use tokenizers::{Model as _, ModelWrapper};

/// Prefix of the replacements of control tokens: a Unicode noncharacter, which no text has.
const STAND_IN: char = '\u{FDEF}';

/// The model of `inner` without pieces of control tokens; `None` if no plain text gives such a
/// piece.
///
/// # Errors
/// The library's error for the changed model.
pub(super) fn model(inner: &tokenizers::Tokenizer) -> Result<Option<ModelWrapper>, String> {
    let model = inner.get_model();
    // A BPE without byte fallback encodes a letter only by its own piece, so that piece stays.
    let keeps_letters = matches!(model, ModelWrapper::BPE(bpe) if !bpe.byte_fallback);
    let mut pieces = HashMap::new();
    for token in inner.get_added_tokens_decoder().into_values().filter(|token| token.special) {
        let text = token.content;
        let Some(id) = model.token_to_id(&text) else { continue };
        let is_letter = text.chars().nth(1).is_none();
        let made = guarded("over a control token", || model.tokenize(&text))?;
        let comes_to_it = made.is_ok_and(|made| made.iter().any(|piece| piece.id == id));
        if comes_to_it && !(is_letter && keeps_letters) {
            pieces.insert(text, format!("{STAND_IN}{id}"));
        }
    }
    if pieces.is_empty() {
        return Ok(None);
    }
    let mut file = serde_json::to_value(model).map_err(|e| reason(e).to_string())?;
    rename(&mut file, &pieces);
    let changed = guarded("over its model", || serde_json::from_value(file))?;
    changed.map(Some).map_err(|e| format!("its model without control tokens: {}", reason(e)))
}

/// Renames pieces of a model, and removes the merges that create or use them.
fn rename(file: &mut Value, pieces: &HashMap<String, String>) {
    match &mut file["vocab"] {
        Value::Object(vocab) => {
            for (text, other) in pieces {
                if let Some(id) = vocab.remove(text) {
                    vocab.insert(other.clone(), id);
                }
            }
        }
        Value::Array(vocab) => {
            for piece in vocab {
                if let Some(other) = piece[0].as_str().and_then(|text| pieces.get(text)) {
                    piece[0] = other.as_str().into();
                }
            }
        }
        _ => unreachable!("every model has a vocabulary"),
    }
    if let Some(other) = file["unk_token"].as_str().and_then(|text| pieces.get(text)) {
        file["unk_token"] = other.as_str().into();
    }
    let prefix = file["continuing_subword_prefix"].as_str().map_or(0, str::len);
    if let Some(merges) = file.get_mut("merges").and_then(Value::as_array_mut) {
        merges.retain(|merge| {
            let [one, two] = [0, 1].map(|i| merge[i].as_str().unwrap_or_default());
            let both = format!("{one}{}", two.get(prefix..).unwrap_or_default());
            ![one, two, &both].iter().any(|text| pieces.contains_key(*text))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::super::rows::Rows;
    use serde_json::{Value, json};

    /// A tokenizer with token 1, `</s>`, as the end of a text and as a piece of the model.
    fn tokenizer(model: &Value, words: &Value, normalizer: &Value) -> Tokenizer {
        let end = json!({ "id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
        let file = json!({ "version": "1.0", "added_tokens": [end], "normalizer": normalizer, "pre_tokenizer": words, "model": model });
        Tokenizer::from_bytes(file.to_string().into_bytes()).unwrap()
    }

    /// The tokens of texts, without the token of their end.
    fn tokens(tokenizer: &Tokenizer, texts: &[&str]) -> Vec<Vec<u32>> {
        let rows = Rows::of_texts(tokenizer, "text", Some("</s>"));
        let of = |text: &&str| {
            let mut made = rows.document(&json!({ "text": text }).to_string()).unwrap().tokens;
            assert_eq!(made.pop(), Some(1), "{text}");
            made
        };
        texts.iter().map(of).collect()
    }

    fn numbered(texts: &[&str]) -> serde_json::Map<String, Value> {
        texts.iter().enumerate().map(|(id, text)| ((*text).to_owned(), id.into())).collect()
    }

    const TEXTS: [&str; 3] = ["is </s> a", "</s>", "a</s></s>a"];

    /// The tokens equal the library's tokens with another text for the control token.
    #[test]
    fn a_text_like_a_control_token_comes_to_no_piece_of_it() {
        let letters = ["▁", "<", "/", "s", ">", "a", "y", "i"];
        let letters = letters.map(|letter| json!([letter, -3.0]));
        let pieces = [&[json!(["<unk>", 0.0]), json!(["</s>", 0.0])], &letters[..]].concat();
        let unigram =
            json!({ "type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false });
        let meta = |split: bool| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": split });
        let words = json!({ "type": "WhitespaceSplit" });
        let known = numbered(&["[UNK]", "</s>", "is", "a"]);
        let level = json!({ "type": "WordLevel", "unk_token": "[UNK]", "vocab": known });
        let known = numbered(&["[UNK]", "</s>", "is", "a", "<", "##/", "##s", "##>", "##a"]);
        let wordpiece = json!({ "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": known });
        let known = numbered(&["<unk>", "</s>", "<", "/", "s", ">", "a", "i", " ", "</", "s>"]);
        let bpe = |ignore: bool, merges: Value| json!({ "type": "BPE", "unk_token": "<unk>", "ignore_merges": ignore, "vocab": known, "merges": merges });
        let merged = bpe(false, json!([["<", "/"], ["s", ">"], ["</", "s>"], ["</s>", "a"]]));
        let mut merged = merged;
        merged["vocab"]["</s>a"] = 11.into();
        let whole = bpe(true, json!([["<", "/"], ["s", ">"]]));
        let blanks = json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "Isolated", "invert": false });
        let by_letters = vec![
            vec![9, 5, 2, 3, 4, 5, 6, 2, 7],
            vec![3, 4, 5, 6],
            vec![7, 3, 4, 5, 6, 3, 4, 5, 6, 7],
        ];
        let by_merges = vec![vec![7, 4, 8, 9, 10, 8, 6], vec![9, 10], vec![6, 9, 10, 9, 10, 6]];
        for (model, words, expected) in [
            (&unigram, meta(false), by_letters.clone()),
            (&unigram, meta(true), by_letters),
            (&level, words.clone(), vec![vec![2, 0, 3], vec![0], vec![0]]),
            (&wordpiece, words, vec![vec![2, 4, 5, 6, 7, 3], vec![4, 5, 6, 7], vec![0]]),
            (&merged, Value::Null, by_merges.clone()),
            (&whole, blanks, by_merges),
        ] {
            let tokenizer = tokenizer(model, &words, &Value::Null);
            assert!(tokenizer.has_control_pieces());
            assert_eq!(tokens(&tokenizer, &TEXTS), expected, "{model}");
            // A control token that a template writes.
            assert_eq!(tokenizer.encode("</s>").unwrap(), [1], "{model}");
        }
        // No text produces a piece that no merge creates.
        let separate =
            tokenizer(&bpe(false, json!([["<", "/"], ["s", ">"]])), &Value::Null, &Value::Null);
        assert!(!separate.has_control_pieces());
        assert_eq!(tokens(&separate, &TEXTS[1..2]), [[9, 10]]);
    }

    #[test]
    fn a_text_that_a_normalizer_makes_like_a_control_token_is_text() {
        let pieces: Vec<_> = ["<unk>", "</s>", "<", "/", "s", ">"].map(|p| json!([p, -1.0])).into();
        let unigram =
            json!({ "type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false });
        let tokenizer = tokenizer(&unigram, &Value::Null, &json!({ "type": "NFKC" }));
        assert_eq!(tokens(&tokenizer, &["\u{ff1c}/s\u{ff1e}"]), [[2, 3, 4, 5]]);
    }

    #[test]
    fn a_control_token_of_normalized_text_is_text() {
        let known = numbered(&["<unk>", "</s>", "<", "/", "s", ">"]);
        let bpe = json!({ "type": "BPE", "unk_token": "<unk>", "vocab": known, "merges": [] });
        let end = |strip: bool| json!({ "id": 1, "content": "</S>", "single_word": false, "lstrip": strip, "rstrip": false, "normalized": true, "special": true });
        for strip in [false, true] {
            let file = json!({ "version": "1.0", "added_tokens": [end(strip)], "normalizer": { "type": "Lowercase" }, "model": bpe });
            let tokenizer = Tokenizer::from_bytes(file.to_string().into_bytes()).unwrap();
            let id = tokenizer.encode("</s>").unwrap()[0];
            assert!(tokenizer.is_control(id) && id != 2);
            let rows = Rows::of_texts(&tokenizer, "text", None);
            for text in ["</s>", "</S>", "</s></S></s>", "s</s>"] {
                let made = rows.document(&json!({ "text": text }).to_string()).unwrap().tokens;
                assert_eq!(made.len(), text.len(), "{text}");
                assert!(!made.contains(&id), "{text}: {made:?}");
            }
        }
    }

    #[test]
    fn a_letter_that_has_one_piece_keeps_it() {
        let known = numbered(&["a", "!", "b"]);
        let bpe = json!({ "type": "BPE", "vocab": known, "merges": [] });
        let end = json!({ "id": 1, "content": "!", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
        let file = json!({ "version": "1.0", "added_tokens": [end], "model": bpe });
        let tokenizer = Tokenizer::from_bytes(file.to_string().into_bytes()).unwrap();
        let rows = Rows::of_texts(&tokenizer, "text", None);
        assert_eq!(rows.document(r#"{"text": "a!b"}"#).unwrap().tokens, [0, 1, 2]);
    }
}
