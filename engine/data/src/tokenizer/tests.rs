use super::*;
use serde_json::json;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

pub(super) const TINY: &[u8] = include_bytes!("../../../../tests/fixtures/tokenizer-tiny.json");

#[test]
fn a_text_comes_back_from_its_tokens() {
    let tokenizer = Tokenizer::from_bytes(TINY.to_vec()).unwrap();
    assert_eq!(tokenizer.vocab(), 300);
    for text in ["the box holds the model", "  two\n\nlines\t", "é and 漢字 too: 🦀", ""] {
        let tokens = tokenizer.encode(text).unwrap();
        assert!(tokens.len() <= text.len());
        assert_eq!(decoded(&tokenizer, &tokens), text);
    }
    let tokens = tokenizer.encode("the box holds the model").unwrap();
    assert!(tokens.len() < 15 && tokens.iter().any(|t| *t >= 256), "{tokens:?}");
}

fn decoded(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    let mut decoder = tokenizer.decoder();
    let pieces: String = tokens.iter().map(|token| decoder.push(*token)).collect();
    pieces + &decoder.rest()
}

/// Tokenizer like Llama 2: `▁` for blanks, and byte tokens for characters without a token.
fn fallback() -> Tokenizer {
    let tokens = ["<unk>", "▁", "▁box", "s", "<0xE6>", "<0xBC>", "<0xA2>", "<0x0A>"];
    let vocab: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(i, token)| ((*token).into(), i.into())).collect();
    let decoders = json!([
        { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
        { "type": "ByteFallback" },
        { "type": "Fuse" },
        { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
    ]);
    let model = json!({
        "type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": "<unk>"
    });
    let file = json!({ "model": model, "decoder": { "type": "Sequence", "decoders": decoders } });
    Tokenizer::from_bytes(file.to_string().into_bytes()).unwrap()
}

/// Expected: `decode` of transformers, but complete characters stay before an incomplete character.
#[test]
fn a_text_keeps_its_last_character_where_that_is_not_whole() {
    let tiny = Tokenizer::from_bytes(TINY.to_vec()).unwrap();
    let tokens = tiny.encode("a漢").unwrap();
    assert_eq!(tokens.len(), 4, "each byte is a token");
    assert_eq!(decoded(&tiny, &tokens[..3]), "a\u{fffd}");
    assert_eq!(decoded(&tiny, &tokens[1..3]), "\u{fffd}");
    let cut_twice = [&tokens[..3], &tokens[..3]].concat();
    assert_eq!(decoded(&tiny, &cut_twice), "a\u{fffd}a\u{fffd}");
    let mut decoder = tiny.decoder();
    let pieces = tokens.iter().map(|token| decoder.push(*token)).collect::<Vec<_>>();
    assert_eq!((&pieces[..], &*decoder.rest()), (&["a", "", "", "漢"].map(String::from)[..], ""));
    // The decoder does not hold bytes that are no text for ever. U+FFFD has three tokens.
    for text in ["漢", "\u{fffd}"].map(|text| tiny.encode(text).unwrap()) {
        let (never, whole) = (text[..1].repeat(300), text.repeat(300));
        let mut decoder = tiny.decoder();
        let early: String = never.iter().map(|token| decoder.push(*token)).collect();
        assert!(!early.is_empty());
        assert_eq!(early + &decoder.rest(), "\u{fffd}".repeat(300));
        let all = tiny.inner.decode(&whole, false).unwrap();
        assert_eq!(decoded(&tiny, &whole), all);
    }
    let llama = fallback();
    for (tokens, text) in [
        (&[2, 3, 2][..], "boxs box"),
        (&[1, 2, 1, 1, 3], " box  s"),
        (&[2, 4, 5, 6, 7], "box漢\n"),
        (&[2, 4, 5, 6, 4, 5, 6], "box漢漢"),
        (&[2, 1, 4], "box \u{fffd}"),
        (&[2, 4, 5, 6, 4], "box漢\u{fffd}"),
        (&[2, 4, 2], "box\u{fffd} box"),
    ] {
        assert_eq!(decoded(&llama, tokens), text, "{tokens:?}");
    }
}

/// The tiny tokenizer with `part` as its `key`.
fn with(key: &str, part: &serde_json::Value) -> Vec<u8> {
    let mut file: serde_json::Value = serde_json::from_slice(TINY).unwrap();
    match key.split_once('.') {
        Some((section, key)) => file[section][key] = part.clone(),
        None => file[key] = part.clone(),
    }
    file.to_string().into_bytes()
}

#[test]
fn what_the_library_cannot_bear_is_refused_in_words() {
    let replace = |pattern: serde_json::Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let a = replace(json!({ "String": "a" }), "aaaaaaaa");
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let whitespace = json!({ "type": "Whitespace" });
    for (key, part, message) in [
        ("normalizer", replace(json!({ "Regex": "" }), "zz"), "library fails"),
        (
            "normalizer",
            json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" }),
            "library fails",
        ),
        ("model.continuing_subword_prefix", json!("xxxxxxxxxx"), "library fails"),
        (
            "normalizer",
            json!({ "type": "Sequence", "normalizers": vec![a.clone(); 9] }),
            "402653184 bytes of one",
        ),
        (
            "normalizer",
            json!({ "type": "Prepend", "prepend": "y".repeat(1 << 20) }),
            "before a text",
        ),
        ("normalizer", replace(json!({ "Regex": "[a-z]" }), &"a".repeat(1000)), "bytes of one"),
        ("decoder", json!({ "type": "Sequence", "decoders": vec![a; 9] }), "its decoder"),
        (
            "pre_tokenizer",
            json!({ "type": "Sequence", "pretokenizers": vec![byte_level; 2000] }),
            "bytes of one",
        ),
        (
            "pre_tokenizer",
            json!({ "type": "Sequence", "pretokenizers": vec![whitespace; 2000] }),
            "2001 parts",
        ),
    ] {
        let why = Tokenizer::from_bytes(with(key, &part)).unwrap_err().to_string();
        assert!(why.contains(message) && why.len() < 500, "{key}: {why}");
    }
}

#[test]
fn real_normalizers_pass() {
    let blank = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let llama = json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, blank] });
    let spaces = json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": "▁" });
    let t5 = json!({ "type": "Sequence", "normalizers": [{ "type": "NFKC" }, { "type": "Lowercase" }, spaces] });
    let bert = json!({ "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true });
    for normalizer in [llama, t5, bert] {
        Tokenizer::from_bytes(with("normalizer", &normalizer)).unwrap();
    }
    let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
    Tokenizer::from_bytes(with("pre_tokenizer", &metaspace)).unwrap();
}

#[test]
fn a_sample_has_a_limit_of_time_and_a_text_one_of_tokens() {
    // The task ends only after the test, also on a fast machine.
    let (_ends_it, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let endless = move || held.lock().unwrap().recv().map_err(|e| e.to_string());
    let why = untrusted::within(Duration::ZERO, endless).unwrap_err();
    assert!(why.contains("takes more than 0 s over 8321 bytes"), "{why}");
    // The samples do not have this letter, which becomes 20 tokens.
    let q = json!({ "type": "Replace", "pattern": { "String": "q" }, "content": "0123456789".repeat(2) });
    let tokenizer = Tokenizer::from_bytes(with("normalizer", &q)).unwrap();
    let why = tokenizer.encode(&"q".repeat(3000)).unwrap_err();
    assert!(why.contains("tokens of 3000 bytes"), "{why}");
}

#[test]
fn what_is_no_function_of_the_text_is_refused() {
    let text = str::from_utf8(TINY).unwrap();
    for (bad, message) in [
        (text.replace("\"dropout\": null", "\"dropout\": 0.1"), "model.dropout is not 0"),
        (text[..text.len() / 2].to_owned(), "EOF"),
        (String::new(), "EOF"),
        ("[]".into(), "invalid"),
        ("[".repeat(100_000), "recursion"),
        (text.replace("\"BPE\"", "\"Magic\""), ""),
    ] {
        assert!(bad != text);
        let why = Tokenizer::from_bytes(bad.clone().into_bytes()).unwrap_err().to_string();
        assert!(why.contains(message) && why.len() < 500, "{bad:.40}: {why}");
    }
    let cut = text.replace(
        "\"truncation\": null",
        "\"truncation\": {\"direction\": \"Right\", \"max_length\": 2, \"strategy\": \"LongestFirst\", \"stride\": 0}",
    );
    assert!(cut != text);
    let tokenizer = Tokenizer::from_bytes(cut.into_bytes()).unwrap();
    assert!(tokenizer.encode("not cut off after two tokens").unwrap().len() > 2);
}
