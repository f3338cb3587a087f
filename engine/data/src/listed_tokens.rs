//! Tokens listed by the files next to a tokenizer.json, in the order of transformers 5.

use files::foreign_text::foreign;
use files::json::{Json, Map};
use indexmap::IndexMap;
use std::collections::{BTreeMap, HashSet};
use tokenizers::AddedToken;

/// File with the settings of a tokenizer.
const SETTINGS: &str = "tokenizer_config.json";
/// File with special tokens by name, in older folders.
const MAP: &str = "special_tokens_map.json";
/// File with the numbers of added tokens, in older folders.
const ADDED: &str = "added_tokens.json";
/// The names of all three files.
pub(super) const FILES: [&str; 3] = [SETTINGS, MAP, ADDED];

/// Names of special tokens that every tokenizer may have, in the order of their tokens.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Key of all tokens with their numbers. If it exists, the older files are ignored.
const DECODER: &str = "added_tokens_decoder";
/// Key of special tokens without names, or with names of their own.
const EXTRA: &str = "extra_special_tokens";
/// Older name of [`EXTRA`].
const ADDITIONAL: &str = "additional_special_tokens";

/// A token and its listed number.
pub(super) type ListedToken = (Option<u32>, AddedToken);

/// A token in a file: a bare text has no flags.
#[derive(Clone, Debug, PartialEq)]
enum TokenName {
    Text(String),
    Token(AddedToken),
}

impl TokenName {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Token(token) => &token.content,
        }
    }

    fn token(self) -> AddedToken {
        match self {
            Self::Text(text) => AddedToken::from(text, true),
            Self::Token(token) => token,
        }
    }
}

/// All listed tokens in the order of their numbering, including the tokens of the tokenizer.json
/// (`own`). `read` returns a file of [`FILES`] if it exists.
///
/// # Errors
/// A file is not JSON, or has another value in place of a token.
pub(super) fn listed(
    read: &dyn Fn(&str) -> Option<Vec<u8>>,
    own: &BTreeMap<u32, AddedToken>,
) -> Result<Vec<ListedToken>, String> {
    let object = |name: &str| -> Result<Map, String> {
        let Some(bytes) = read(name) else { return Ok(Map::new()) };
        let text = str::from_utf8(&bytes).map_err(|e| format!("{name}: {e}"))?;
        match Json::read(text).map_err(|why| format!("{name}: {why}"))? {
            Json::Object(fields) => Ok(fields),
            _ => Err(format!("{name} is no JSON object")),
        }
    };
    let in_file = |name: &'static str| move |why: String| format!("{name}: {why}");
    let mut settings = object(SETTINGS)?;
    if let Some(additional) = settings.get(ADDITIONAL).cloned()
        && !settings.get(EXTRA).is_some_and(holds_some)
    {
        settings.shift_remove(ADDITIONAL);
        settings.insert(EXTRA.into(), additional);
    }
    // Tokens with own names come after those with the usual names.
    let mut own_names = IndexMap::new();
    settings.retain(|key, value| match value {
        Json::String(text) if is_own_name(key) => {
            own_names.insert(key.clone(), TokenName::Text(text.clone()));
            false
        }
        _ => true,
    });
    take_named_extra(&mut settings, &mut own_names).map_err(in_file(SETTINGS))?;
    let mut numbered = BTreeMap::new();
    match settings.get(DECODER).filter(|decoder| **decoder != Json::Null) {
        Some(decoder) => {
            numbered = of_decoder(decoder).map_err(|e| format!("{SETTINGS}: {DECODER}: {e}"))?;
        }
        None => {
            merge_map(&mut settings, object(MAP)?);
            take_named_extra(&mut settings, &mut own_names).map_err(in_file(MAP))?;
            of_added(&object(ADDED)?, &settings, &mut numbered).map_err(in_file(ADDED))?;
            numbered.extend(own.iter().map(|(number, token)| (*number, token.clone())));
        }
    }
    if let Some(additional) = settings.get(ADDITIONAL).cloned() {
        settings.entry(EXTRA.into()).or_insert(additional);
    }
    let by_text: BTreeMap<_, _> =
        numbered.values().map(|token| (token.content.as_str(), token)).collect();
    let token = |key: &str, value| one(value).map_err(|why| format!("`{key}` {why}"));
    let mut named = Vec::new();
    for key in NAMES {
        let Some(value) = settings.get(key) else { continue };
        let Some(one) = token(key, value)? else { continue };
        let known = by_text.get(one.text()).map(|token| TokenName::Token((*token).clone()));
        named.push(known.unwrap_or(one));
    }
    // A duplicate name keeps its first place.
    let mut others = IndexMap::new();
    for (key, value) in &settings {
        if is_own_name(key)
            && (is_typed(value) || value.as_str().is_some())
            && let Some(one) = token(key, value)?
        {
            others.insert(key.clone(), one);
        }
    }
    others.extend(own_names);
    named.extend(others.into_values());
    let extra = extra(&settings)?;
    Ok(in_order(numbered, &named, extra, own))
}

/// Numbered tokens, then named and extra tokens that neither they nor the tokenizer contain.
fn in_order(
    numbered: BTreeMap<u32, AddedToken>,
    named: &[TokenName],
    extra: Vec<TokenName>,
    own: &BTreeMap<u32, AddedToken>,
) -> Vec<ListedToken> {
    let known = own.values().chain(numbered.values()).map(|token| token.content.clone());
    let known: HashSet<String> = known.collect();
    let mut more: Vec<TokenName> = Vec::new();
    for one in named.iter().cloned().chain(extra) {
        if !known.contains(one.text()) && !more.contains(&one) {
            more.push(one);
        }
    }
    let names: HashSet<&str> = named.iter().map(TokenName::text).collect();
    let numbered = numbered.into_iter().map(|(number, token)| (Some(number), token));
    let all = numbered.chain(more.into_iter().map(|one| (None, one.token())));
    all.map(|(number, token)| {
        let special = token.special || names.contains(token.content.as_str());
        (number, token.special(special))
    })
    .collect()
}

/// Whether a key names a token and is not one of [`NAMES`].
fn is_own_name(key: &str) -> bool {
    key.ends_with("_token") && !NAMES.contains(&key)
}

/// Whether Python treats a value as true.
fn holds_some(value: &Json) -> bool {
    match value {
        Json::Array(values) => !values.is_empty(),
        Json::Object(fields) => !fields.is_empty(),
        Json::String(text) => !text.is_empty(),
        Json::Null => false,
        Json::Bool(value) => *value,
        Json::Number(_) | Json::Digits(_) => true,
    }
}

/// Whether an object declares itself a token.
fn is_typed(value: &Json) -> bool {
    value.get("__type").and_then(Json::as_str) == Some("AddedToken")
}

/// The token of a text or an object; `None` for null.
fn one(value: &Json) -> Result<Option<TokenName>, String> {
    match value {
        Json::Null => Ok(None),
        Json::String(text) => Ok(Some(TokenName::Text(text.clone()))),
        Json::Object(fields) => Ok(Some(TokenName::Token(of_object(fields, None)?))),
        _ => Err("is no token: a text, or an object with its `content`".into()),
    }
}

/// The token of an object; missing flags are false.
fn of_object(fields: &Map, special: Option<bool>) -> Result<AddedToken, String> {
    let Some(content) = fields.get("content").and_then(Json::as_str) else {
        return Err("is an object without a `content`".into());
    };
    let flag = |key: &str| match fields.get(key) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::Bool(value)) => Ok(Some(*value)),
        Some(_) => Err(format!(
            "of the text \"{}\" has a `{key}` that is no truth value",
            foreign(content)
        )),
    };
    let special = special.or(flag("special")?).unwrap_or(false);
    Ok(AddedToken::from(content, special)
        .single_word(flag("single_word")?.unwrap_or(false))
        .lstrip(flag("lstrip")?.unwrap_or(false))
        .rstrip(flag("rstrip")?.unwrap_or(false))
        .normalized(flag("normalized")?.unwrap_or(!special)))
}

/// Moves the extra tokens that have names to `own_names`.
fn take_named_extra(
    settings: &mut Map,
    own_names: &mut IndexMap<String, TokenName>,
) -> Result<(), String> {
    let Some(Json::Object(extra)) = settings.get(EXTRA) else { return Ok(()) };
    for (key, value) in extra {
        let one = one(value).map_err(|why| format!("{EXTRA}: `{}` {why}", foreign(key)))?;
        own_names.extend(one.map(|one| (key.clone(), one)));
    }
    settings.shift_remove(EXTRA);
    Ok(())
}

fn of_decoder(decoder: &Json) -> Result<BTreeMap<u32, AddedToken>, String> {
    let Json::Object(decoder) = decoder else { return Err("it is no object".into()) };
    let one = |(key, value): (&String, &Json)| {
        let number = key
            .parse::<u32>()
            .map_err(|_| format!("`{}` is no number of a token", foreign(key)))?;
        let Json::Object(fields) = value else {
            return Err(format!("`{}` is no object", foreign(key)));
        };
        let token = of_object(fields, None).map_err(|why| format!("`{}` {why}", foreign(key)))?;
        Ok((number, token))
    };
    decoder.iter().map(one).collect()
}

/// Merges the map of special tokens into the settings; the map has priority.
fn merge_map(settings: &mut Map, map: Map) {
    for (key, mut value) in map {
        match &mut value {
            Json::Object(fields) if key != EXTRA => typed(fields),
            Json::Array(more) if key == EXTRA => {
                let mut all = match settings.get(EXTRA) {
                    Some(Json::Array(all)) => all.clone(),
                    _ => Vec::new(),
                };
                for mut one in more.drain(..) {
                    if let Json::Object(fields) = &mut one {
                        typed(fields);
                    }
                    if !all.contains(&one) {
                        all.push(one);
                    }
                }
                value = Json::Array(all);
            }
            _ => {}
        }
        settings.insert(key, value);
    }
}

/// Marks an object of the map as a token, and as a special one.
fn typed(fields: &mut Map) {
    fields.insert("__type".into(), Json::String("AddedToken".into()));
    fields.insert("special".into(), Json::Bool(true));
}

/// Adds the tokens of the older file; tokens with a name are special.
fn of_added(
    added: &Map,
    settings: &Map,
    numbered: &mut BTreeMap<u32, AddedToken>,
) -> Result<(), String> {
    let named = NAMES.iter().filter_map(|key| settings.get(*key));
    let extra = match settings.get(EXTRA) {
        Some(Json::Array(extra)) => extra.as_slice(),
        _ => &[],
    };
    // Values that are not tokens are refused where they are read.
    let texts = named.chain(extra).filter_map(|value| Some(one(value).ok()??.text().to_owned()));
    let special: HashSet<String> = texts.collect();
    for (text, number) in added {
        let Json::Number(number) = number else {
            return Err(format!("`{}` has no number", foreign(text)));
        };
        let number = number.as_u64().and_then(|number| u32::try_from(number).ok());
        let number =
            number.ok_or_else(|| format!("`{}` has no number of a token", foreign(text)))?;
        numbered.insert(number, AddedToken::from(text.as_str(), special.contains(text)));
    }
    Ok(())
}

/// The special tokens without names.
fn extra(settings: &Map) -> Result<Vec<TokenName>, String> {
    let token = |value| one(value).map_err(|why| format!("{EXTRA}: one {why}")).transpose();
    match settings.get(EXTRA) {
        None | Some(Json::Null) => Ok(Vec::new()),
        Some(Json::Array(values)) => values.iter().filter_map(token).collect(),
        Some(_) => Err(format!("{EXTRA} is no list of tokens")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::*;
    use serde_json::{Value, json};

    /// tokenizer-tiny.json with these added tokens.
    fn tiny(added: &Value) -> Vec<u8> {
        let tiny = include_bytes!("../../../tests/fixtures/tokenizer-tiny.json");
        let mut file: Value = serde_json::from_slice(tiny).unwrap();
        file["added_tokens"] = added.clone();
        file.to_string().into_bytes()
    }

    fn added_of(tokenizer: &Tokenizer) -> serde_json::Map<String, Value> {
        let file: Value = serde_json::from_slice(tokenizer.bytes()).unwrap();
        let mut all = serde_json::Map::new();
        for token in file["added_tokens"].as_array().unwrap() {
            let mut token = token.clone();
            let number = token.as_object_mut().unwrap().remove("id").unwrap();
            all.insert(number.to_string(), token);
        }
        all
    }

    /// The results of transformers for the same folders (make_listed_fixture.py).
    #[test]
    fn tokens_that_files_beside_a_tokenizer_list_are_those_of_transformers() {
        let text = include_str!("../../../tests/fixtures/listed-tokens.json");
        let cases: Vec<Value> = serde_json::from_str(text).unwrap();
        // Files keep the order of their keys.
        let Json::Array(ordered) = Json::read(text).unwrap() else { unreachable!() };
        assert!(cases.len() > 25);
        for (case, ordered) in cases.iter().zip(&ordered) {
            let files = ordered.get("files").unwrap();
            let name = &case["name"];
            let file = |file: &'static str| {
                let content = files.get(file)?;
                Some((file, serde_json::to_vec(content).unwrap()))
            };
            let other_files: Vec<_> = FILES.into_iter().filter_map(file).collect();
            let bytes = tiny(&case["added"]);
            let tokenizer = Tokenizer::from_files(bytes.clone(), &other_files).unwrap();
            assert_eq!(Value::Object(added_of(&tokenizer)), case["tokens"], "{name}");
            let get =
                |name: &str| other_files.iter().find(|file| file.0 == name).map(|file| &*file.1);
            assert!(tokenizer.is_of(&bytes, get), "{name}");
            // The tokenizer kept by a run needs no other files; added tokens make its file another
            // one.
            let kept = Tokenizer::from_bytes(tokenizer.bytes().to_vec()).unwrap();
            assert_eq!(kept.bytes(), tokenizer.bytes());
            assert!(kept.is_of(&bytes, get), "{name}");
            let own: Value = serde_json::from_slice(&bytes).unwrap();
            let is_same = own == serde_json::from_slice::<Value>(tokenizer.bytes()).unwrap();
            assert_eq!(tokenizer.bytes() == bytes, is_same, "{name}");
            for (text, tokens) in case["texts"].as_object().unwrap() {
                for tokenizer in [&tokenizer, &kept] {
                    assert_eq!(json!(tokenizer.encode(text).unwrap()), *tokens, "{name}: {text}");
                }
            }
        }
    }

    #[test]
    fn what_lists_no_tokens_is_refused_with_its_place() {
        let of = |name: &'static str, content: &str| {
            let other_files = [(name, content.as_bytes().to_vec())];
            Tokenizer::from_files(tiny(&json!([])), &other_files).unwrap_err().to_string()
        };
        for (name, content, message) in [
            (SETTINGS, "{", "tokenizer_config.json: EOF"),
            (SETTINGS, "[]", "tokenizer_config.json is no JSON object"),
            (SETTINGS, r#"{"eos_token": 3}"#, "`eos_token` is no token"),
            (SETTINGS, r#"{"eos_token": {"special": true}}"#, "without a `content`"),
            (
                SETTINGS,
                r#"{"additional_special_tokens": [["<a>"]]}"#,
                "extra_special_tokens: one is no",
            ),
            (
                SETTINGS,
                r#"{"added_tokens_decoder": {"x": {"content": "<a>"}}}"#,
                "`x` is no number",
            ),
            (
                SETTINGS,
                r#"{"added_tokens_decoder": {"7": {"content": "<a>", "lstrip": 1}}}"#,
                "`lstrip`",
            ),
            (ADDED, r#"{"<a>": -1}"#, "added_tokens.json: `<a>` has no number"),
            (MAP, r#"{"eos_token": {}}"#, "`eos_token` is an object without"),
        ] {
            let why = of(name, content);
            assert!(why.contains(message) && why.contains("files beside it"), "{message}: {why}");
        }
    }

    #[test]
    fn a_listed_token_that_a_model_has_not_is_named() {
        let other_files = [(SETTINGS, br#"{"pad_token": "<pad>"}"#.to_vec())];
        let tokenizer = Tokenizer::from_files(tiny(&json!([])), &other_files).unwrap();
        tokenizer.fits(301).unwrap();
        let why = tokenizer.fits(300).unwrap_err().to_string();
        for message in
            ["300 (\"<pad>\")", "model.vocab is 300", "301 or more", "tokenizer_config.json"]
        {
            assert!(why.contains(message), "{message}: {why}");
        }
        let why =
            Tokenizer::from_bytes(tiny(&json!([]))).unwrap().fits(299).unwrap_err().to_string();
        assert!(why.contains("299 (") && !why.contains("tokenizer_config.json"), "{why}");
    }
}
