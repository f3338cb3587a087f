//! Rows of JSON lines: each gives a document whose tokens and targets fit, or a reason.
#![no_main]

use data::chat::Template;
use data::{Rows, Tokenizer};
use data::model_files::ModelFiles;
use files::foreign_text::is_line;
use std::path::Path;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static MADE: OnceLock<(Tokenizer, Template)> = OnceLock::new();
    let (tokenizer, template) = MADE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/hf-chat-tiny");
        let template = Template::of_data(&ModelFiles::open(&folder).unwrap()).unwrap();
        (Tokenizer::open(&folder).unwrap(), template)
    });
    let Some((kind, row)) = bytes.split_first() else { return };
    let Ok(row) = str::from_utf8(row) else { return };
    let rows = match kind % 3 {
        0 => Rows::of_chats(tokenizer, template, ""),
        1 => Rows::of_chats(tokenizer, template, "a system"),
        _ => Rows::of_texts(tokenizer, "text", template.end_of_text()),
    };
    match rows.document(row) {
        Ok(document) => {
            assert_eq!(document.tokens.len(), document.counted.len());
            assert!(!document.counted[0] && document.counted.contains(&true));
        }
        Err(why) => assert!(!why.is_empty() && is_line(&why), "{why}"),
    }
});
