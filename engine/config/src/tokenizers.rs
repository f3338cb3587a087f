//! Tokenizer files in a folder of transformers, and the remedy if onebox reads none of them.

use super::transformers::{next_to, python};
use files::names::TOKENIZER;
use files::shell::python_text;
use std::path::Path;

/// Files of a tokenizer that onebox does not read.
const UNREAD: [&str; 7] = [
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
];

/// Tokenizer file in a folder: the file that onebox reads, or else another one.
pub fn tokenizer_file(folder: &Path) -> Option<&'static str> {
    [TOKENIZER].into_iter().chain(UNREAD).find(|name| folder.join(name).is_file())
}

/// Remedy for a folder without tokenizer.json.
pub fn unread_tokenizers(folder: &Path) -> String {
    let there = UNREAD.iter().find(|name| folder.join(name).is_file());
    let Some(name) = there else {
        return "copy the tokenizer.json of the model there".into();
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let (from, new) = (folder.display().to_string(), next_to(folder, "tokenizer"));
    let line = python(&format!(
        "from transformers import AutoTokenizer as A; A.from_pretrained({}).save_pretrained({})",
        python_text(&from),
        python_text(&new)
    ));
    format!(
        "onebox does not read its {name}; make a tokenizer.json of it with `{line}`, and set `data.tokenizer` to that folder"
    )
}
