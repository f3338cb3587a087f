//! Lists of prepared tokens, as a folder from elsewhere has one: the tokens can be used, or a part of a line says why not, and
//! a command in it is one of onebox.
#![no_main]

use config::DataFormat;
use data::Corpus;
use files::foreign_text::is_line;
use files::shell::words;
use std::path::PathBuf;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|list: &[u8]| {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let made = std::env::temp_dir().join(format!("fuzz-lists-{}", std::process::id()));
        std::fs::create_dir_all(made.join("train")).unwrap();
        std::fs::write(made.join("train/000000.bin"), [0; 400]).unwrap();
        made
    });
    std::fs::write(made.join("prepared.json"), list).unwrap();
    let train = made.join("train");
    let opened = Corpus::open(train.to_str().unwrap(), None, DataFormat::U16, 0.2, 1000, 4);
    let Err(why) = opened.map_err(|e| e.to_string()) else { return };
    assert!(is_line(&why), "{why}");
    if let Some((_, command)) = why.split_once("make them again: ") {
        let words = words(command).unwrap();
        let own = if words[0] == "cd" { &words[3..] } else { &words[..] };
        assert_eq!(own[..3], ["onebox", "data", "prepare"], "{command}");
    }
});
