//! Chat templates: each makes a document of a chat, or there is a reason, soon and with little memory.
#![no_main]

use data::chat::Template;
use data::{Rows, Tokenizer};
use data::model_files::ModelFiles;
use files::foreign_text::is_line;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const ROW: &str = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>b</think>c"}, {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e<|im_end|>"}]}"#;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static MADE: OnceLock<(Tokenizer, PathBuf)> = OnceLock::new();
    let (tokenizer, into) = MADE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/hf-chat-tiny");
        let into = std::env::temp_dir().join(format!("fuzz-template-{}", std::process::id()));
        std::fs::create_dir_all(&into).unwrap();
        (Tokenizer::open(&folder).unwrap(), into)
    });
    std::fs::write(into.join("chat_template.jinja"), bytes).unwrap();
    let made = ModelFiles::open(into).map_err(|e| e.to_string()).and_then(|b| Template::of_data(&b));
    match made.and_then(|t| Rows::of_chats(tokenizer, &t, "").document(ROW)) {
        Ok(document) => {
            assert_eq!(document.tokens.len(), document.counted.len());
            assert!(document.counted.contains(&true));
        }
        Err(why) => assert!(is_line(&why), "{why}"),
    }
});
