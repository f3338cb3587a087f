//! The files of a tokenizer whose tokens are bytes. An export of a model that was trained on bytes
//! has them, so that transformers makes the tokens of the model.

use serde_json::{Value, json};

/// The `tokenizer.json` whose token N is the byte N. Its model is a BPE without merges over GPT-2's
/// alphabet of bytes, so it neither changes nor splits a text.
pub fn tokenizer_json() -> String {
    format!("{:#}\n", tokenizer())
}

/// The `tokenizer_config.json` that belongs to [`tokenizer_json`].
pub fn tokenizer_config() -> String {
    let config = json!({
        "clean_up_tokenization_spaces": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    format!("{config:#}\n")
}

/// Whether a `tokenizer.json` makes the same tokens as [`tokenizer_json`].
pub fn is_of_bytes(tokenizer_json: &[u8]) -> bool {
    serde_json::from_slice(tokenizer_json).is_ok_and(|found: Value| found == tokenizer())
}

fn tokenizer() -> Value {
    let bytes = || {
        json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": false,
            "use_regex": false,
        })
    };
    let vocabulary: serde_json::Map<String, Value> =
        (0..=u8::MAX).zip(alphabet()).map(|(byte, c)| (c.to_string(), byte.into())).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": bytes(),
        "post_processor": null,
        "decoder": bytes(),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocabulary,
            "merges": [],
        },
    })
}

/// GPT-2's characters of the 256 bytes: a printable byte of Latin-1 is its own character, and the
/// others take the characters from U+0100 on.
fn alphabet() -> impl Iterator<Item = char> {
    let mut next = (0x100..=0x1ff_u32).filter_map(char::from_u32);
    (0..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => next.next().unwrap_or_else(|| unreachable!("68 of 256 characters are taken")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn the_alphabet_is_that_of_the_crate_tokenizers() {
        let ours: BTreeSet<char> = alphabet().collect();
        assert_eq!(ours.len(), 256);
        assert_eq!(ours, ByteLevel::alphabet().into_iter().collect());
    }

    /// The crate `tokenizers` is what transformers runs.
    #[test]
    fn a_token_is_a_byte() {
        let made = tokenizers::Tokenizer::from_bytes(tokenizer_json()).unwrap();
        let points = (0..0x80).chain((0x80..=0x10_ffff).step_by(0x3f));
        let every: String = points.filter_map(char::from_u32).collect();
        let seen: BTreeSet<u8> = every.bytes().collect();
        // UTF-8 uses all bytes but C0, C1 and F5 to FF.
        assert_eq!(seen.len(), 256 - 13);
        for text in ["hello", " a  b\r\n\t'll don't", "e\u{301} 한국 <s></s><|endoftext|>", &every]
        {
            let ids = made.encode(text, true).unwrap().get_ids().to_vec();
            assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
            assert_eq!(made.decode(&ids, true).unwrap(), text);
        }
        for byte in 0..=255 {
            let token = made.id_to_token(byte).unwrap();
            assert_eq!(made.token_to_id(&token), Some(byte));
        }
        assert_eq!(made.get_vocab_size(true), 256);
    }

    #[test]
    fn only_this_tokenizer_is_of_bytes() {
        assert!(is_of_bytes(tokenizer_json().as_bytes()));
        assert!(is_of_bytes(tokenizer().to_string().as_bytes()));
        let other = tokenizer_json().replace("\"a\": 97", "\"a\": 98");
        assert!(!is_of_bytes(other.as_bytes()) && !is_of_bytes(b"{}") && !is_of_bytes(b""));
    }
}
