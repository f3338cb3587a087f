//! Tests that compare rows of tests/fixtures/chats with the results of transformers.

use super::{Document, Rows};
use crate::Tokenizer;
use crate::chat::Template;
use crate::model_files::ModelFiles;
use serde::Deserialize;
use serde_json::Value as Json;
use serde_json::value::RawValue;
use std::path::Path;

/// Row, with its keys in order, and its known results.
#[derive(Deserialize)]
struct OracleRow {
    row: Box<RawValue>,
    #[serde(flatten)]
    known: Json,
}

fn ones(of: &Json) -> Vec<bool> {
    of.as_array().unwrap().iter().map(|one| one == 1).collect()
}

fn tokens(of: &Json) -> Vec<u32> {
    of.as_array().unwrap().iter().map(|one| one.as_u64().unwrap() as u32).collect()
}

/// Difference between a row's document and its known results. None: no difference.
fn difference(
    chats: &Rows<'_>,
    texts: &Rows<'_>,
    OracleRow { row, known: one }: &OracleRow,
) -> Option<String> {
    let row = row.get();
    let is_text = serde_json::from_str::<Json>(row).unwrap().get("text").is_some();
    let rows = if is_text { texts } else { chats };
    let made = rows.document(row);
    let show = |tokens: &[u32]| {
        let mut decoder = rows.tokenizer.decoder();
        let mut text: String = tokens.iter().map(|t| decoder.push(*t) + "·").collect();
        text += &decoder.rest();
        format!("{text:?}")
    };
    if let Some(refused) = one["refused"].as_str() {
        return match made {
            Ok(document) => Some(format!("not refused: {}", show(&document.tokens))),
            Err(why) if why.contains(refused) => None,
            Err(why) => Some(format!("refused otherwise: {why}")),
        };
    }
    let Document { tokens: made, counted } = match made {
        Ok(document) => document,
        Err(why) => {
            let nothing = one["tokens"] == serde_json::json!([]);
            return (!nothing).then(|| format!("refused: {why}"));
        }
    };
    if one["live"].is_array() && made == tokens(&one["live"]) {
        return Some("control tokens of a message control".into());
    }
    let mut wanted = tokens(&one["tokens"]);
    if is_text {
        wanted.extend(rows.end);
    }
    if made != wanted {
        return Some(format!("{}\n not {}", show(&made), show(&wanted)));
    }
    if one["counted"].is_array() && counted != ones(&one["counted"]) {
        let of = |counted: &[bool]| -> String {
            let pairs = made.iter().zip(counted);
            pairs.map(|(t, c)| if *c { show(&[*t]) } else { "_".into() }).collect()
        };
        return Some(format!(
            "counted\n     {}\n not {}",
            of(&counted),
            of(&ones(&one["counted"]))
        ));
    }
    None
}

#[test]
fn rows_are_those_of_transformers() {
    let chats = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/chats");
    let mut differ = Vec::new();
    let mut all = 0;
    for folder in std::fs::read_dir(chats).unwrap() {
        let folder = folder.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap();
        let tokenizer = Tokenizer::open(&folder.join("tokenizer.json")).unwrap();
        let template = Template::of_data(&ModelFiles::open(&folder).unwrap()).unwrap();
        let chats = Rows::of_chats(&tokenizer, &template, "");
        let texts = Rows::of_texts(&tokenizer, "text", template.end_of_text());
        let rows = std::fs::read(folder.join("rows.json")).unwrap();
        let rows: Vec<OracleRow> = serde_json::from_slice(&rows).unwrap();
        all += rows.len();
        for one in &rows {
            if let Some(how) = difference(&chats, &texts, one) {
                differ.push(format!("{name}, {}: {how}", one.known["name"].as_str().unwrap()));
            }
        }
    }
    assert!(all > 200);
    assert!(differ.is_empty(), "{} of {all} differ:\n{}", differ.len(), differ.join("\n"));
}
